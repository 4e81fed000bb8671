"""A fault planted in a header: its text, what it breaks, and the case that reaches the line."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Any

from benchmarks.gpu_words import schedules_of
from kvgen.arch import Target
from kvgen.lower.backend import Source, get_backend
from kvgen.lower.schedule import Params, Schedule
from kvgen.spec import AnySpec, AnyWorkload


@dataclass(frozen=True)
class Case:
    """A variant and the workloads it is verified at. `schedule`: words of benchmarks/gpu_words.py, or changes of the CPU's default."""

    name: str
    backend: str
    spec: AnySpec
    schedule_words: str = "default"
    changes: tuple[tuple[str, int | str], ...] = ()

    @property
    def target(self) -> Target:
        """What it is compiled for: GPU cases run on an H200."""
        return "cpu" if self.backend == "cpu" else "sm90"

    @property
    def workloads(self) -> tuple[AnyWorkload, ...]:
        """Those of the spec."""
        return self.spec.workloads

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule."""
        backend = get_backend(self.backend)
        base = schedules_of(self.schedule_words, backend, self.spec, self.target)[0]
        changes: dict[str, Any] = dict(self.changes)
        layout = Params({**base.layout, **{name: changes.pop(name) for name in ("block",) if name in changes}})
        return Schedule(base.backend, layout, Params({**base.launch, **changes}))

    def source(self) -> Source:
        """The rendered source without a fault, lowered once for all faults. Raises what lowering raises."""
        with _LOCKS[self.backend]:
            if self.name not in _SOURCES[self.backend]:
                _SOURCES[self.backend][self.name] = get_backend(self.backend).lower(self.spec, self.schedule, self.target)
            return _SOURCES[self.backend][self.name]


_LOCKS = {name: Lock() for name in ("cpu", "cuda", "tilelang")}
_SOURCES: dict[str, dict[str, Source]] = {name: {} for name in _LOCKS}


@dataclass(frozen=True)
class Fault:
    """`find` occurs once in `file` (a path from the root of the project), or `nth` (from 1) of several occurrences is meant."""

    name: str
    file: str
    case: str
    breaks: str
    find: str
    replace: str
    nth: int = 0


class MisplacedFault(ValueError):
    """A fault whose text is not in its file as declared."""


def planted(fault: Fault, text: str) -> str:
    """The file's text with the fault. Raises MisplacedFault."""
    count = text.count(fault.find)
    if count == 0 or (fault.nth == 0 and count != 1) or fault.nth > count:
        raise MisplacedFault(f"{fault.name}: its text occurs {count} times in {fault.file}, declared is {fault.nth or 'one'}")
    if fault.find == fault.replace:
        raise MisplacedFault(f"{fault.name}: replaces its text by itself")
    parts = text.split(fault.find)
    at = max(fault.nth, 1)
    return fault.find.join(parts[:at]) + fault.replace + fault.find.join(parts[at:])
