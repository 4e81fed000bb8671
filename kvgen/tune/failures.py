"""Failed candidates in short: how many failed alike, and of what."""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvgen.registry.facts import Failure
from kvgen.tune.candidate import Record


def failures(records: Iterable[Record]) -> tuple[Failure, ...]:
    """Failed records by back end, by kind and by what was said, numbers in it aside; the most frequent first."""
    alike: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        if not record.ok:
            said = re.sub(r"[\d.]+(e[-+]\d+)?|0x[\da-f]+", "0", record.detail.strip())
            alike.setdefault((record.candidate.backend, record.kind, said), []).append(record)
    told = [Failure(backend, kind, len(same), str(same[0].candidate), same[0].detail.strip()) for (backend, kind, _), same in alike.items()]
    return tuple(sorted(told, key=lambda failure: -failure.count))
