"""Records what formats cost in the entries of a registry."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgen.registry.entry import Entry
from kvgen.registry.store import Store
from kvgen.verify.quality import format_quality

if TYPE_CHECKING:
    from kvgen.accuracy.run import Table

FACTS = ("model", "text", "outliers", "device", "torch", "kvgen", "date")


def record(store: Store, table: Table) -> list[Path]:
    """Write the quality of a table, whose rows are called by entries' keys, into a store's entries, each as a new revision.

    Everything else of an entry stays as it was, its date included. Returns the folders. Raises HostError if the store cannot be written.
    """
    measured = {row.name for row in table.rows}
    found = [(one.path, one.entry) for one in store.all() if one.entry is not None and one.key in measured]
    return [store.replace(path, replace(entry, quality=_quality(entry, table))) for path, entry in found]


def _quality(entry: Entry, table: Table) -> dict[str, Any]:
    """`quality` of an entry: errors on seeded data, and a model's figures by length."""
    rows = {
        str(row.length): {
            "perplexity": row.perplexity,
            "unquantized_perplexity": row.unquantized_perplexity,
            "increase": row.increase,
            "increase_error": row.increase_error,
            "agreement": row.agreement,
            "divergence": row.divergence,
        }
        for row in table.rows
        if row.name == entry.key
    }
    return {"outputs": format_quality(entry.spec), "model": {**{name: table.facts[name] for name in FACTS}, "lengths": rows}}
