"""The result of a tuning run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvgen.arch import Target
from kvgen.registry.entry import Entry
from kvgen.spec import AnySpec
from kvgen.tune.candidate import Record


@dataclass(frozen=True)
class TuningResult:
    """The registered entry and how it came about. `records` are all finished candidates, earlier runs' included."""

    spec: AnySpec
    target: Target
    entry: Entry
    path: Path
    """The entry's folder in the registry."""
    why: str
    records: tuple[Record, ...] = ()
    finalists: tuple[Record, ...] = ()
    measured: int = 0
    """Candidates measured in this run."""
    known: int = 0
    """Candidates that were finished in earlier runs."""
    seconds: float = 0.0
    interrupted: bool = False
    reused: bool = False
    """Another process built the same entry while this one waited for it."""
    refusals: tuple[str, ...] = ()
    """Back ends that do not support the spec, each with its reason."""
    notes: tuple[str, ...] = ()
    """What a build left out, each with the reason."""
    studies: Mapping[str, str] = field(default_factory=dict)
    """Optuna study by `backend workload`."""

    @property
    def failures(self) -> list[Record]:
        """Everything that was not ok."""
        return [record for record in (*self.records, *self.finalists) if record.kind != "ok"]

    def to_json(self) -> dict[str, Any]:
        """Plain data, without the samples of candidates that did not win."""
        return {
            "spec": self.spec.name,
            "target": self.target,
            "key": self.entry.key,
            "path": str(self.path),
            "why": self.why,
            "entry": self.entry.to_json(),
            "measured": self.measured,
            "known": self.known,
            "seconds": round(self.seconds, 3),
            "interrupted": self.interrupted,
            "reused": self.reused,
            "refusals": list(self.refusals),
            "notes": list(self.notes),
            "failures": [failure(record) for record in self.failures],
            "studies": dict(self.studies),
        }


def failure(record: Record) -> dict[str, Any]:
    """A failed candidate by name."""
    schedule = record.candidate.schedule
    return {
        "kind": record.kind,
        "schedule": schedule.to_json(),
        "id": schedule.id,
        "workload": record.candidate.workload.key,
        "detail": record.detail,
    }
