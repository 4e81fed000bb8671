"""`kvgen report`: an HTML page about registered entries."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvgen.cli.output import Json, print_json
from kvgen.extras import require


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("report")(report)


def report(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The page to write.")] = Path("kvgen-report.html"),
    keys: Annotated[list[str] | None, typer.Option("--key", metavar="KEY", help="Only entries whose key begins so.")] = None,
    as_json: Json = False,
) -> None:
    """Write a self-contained HTML page: best times, defaults, read roofline, course of the search, importance of parameters, failures."""
    require("kvgen report", "optuna", "pandas")
    from dataclasses import asdict

    from kvgen.registry import stores
    from kvgen.toolchain import ArtifactCache
    from kvgen.tune.report import render, study_views

    cache = ArtifactCache()
    found = {one.entry.key: one.entry for store in reversed(stores()) for one in store.all() if one.entry is not None}
    entries = [entry for key, entry in found.items() if not keys or any(key.startswith(start) for start in keys)]
    if as_json:
        print_json([{"key": e.key, "spec": e.spec.name, "studies": [asdict(view) for view in study_views(e, cache)]} for e in entries])
        return
    from kvgen.accuracy.page import FILE

    output.write_text(render(entries, cache, accuracy=FILE if (output.parent / FILE).is_file() else None))
    typer.echo(f"wrote {output}: {len(entries)} entries")
