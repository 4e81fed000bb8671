"""Compiling a space where nothing can be run: resources by schedule, spilling schedules excluded, untuned entries."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvgen.arch import Target
from kvgen.errors import CompileError, CompilerCrash
from kvgen.lower.backend import Backend, Source, Sources
from kvgen.lower.schedule import Schedule
from kvgen.lower.space import SearchSpace
from kvgen.plaindata import Json
from kvgen.registry import user_store
from kvgen.registry.entry import Entry
from kvgen.registry.store import Store
from kvgen.spec import AnySpec
from kvgen.spec.target import resolve
from kvgen.toolchain import Artifact, ArtifactCache
from kvgen.toolchain.compile import build_many
from kvgen.tune.contenders import Contender, contenders, require
from kvgen.tune.progress import Progress, Watch
from kvgen.tune.register import make_untuned
from kvgen.tune.trial_store import flatten


@dataclass(frozen=True)
class CompileOutcome(Json):
    """How one schedule compiled: `ok`, `spills`, `compile_error` or `compiler_crash`; resources are the maximum over its kernels."""

    schedule: Schedule
    kind: str
    registers: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0
    artifact: str = ""
    detail: str = ""


@dataclass(frozen=True)
class CompileReport:
    """The outcome of every schedule, and the entry that is registered with its folder: the untuned one, or a tuned one that was there."""

    spec: AnySpec
    target: Target
    outcomes: tuple[CompileOutcome, ...]
    entry: Entry
    path: Path
    seconds: float
    feasible: int
    """Schedules of the search space; more than were compiled where `limit` asked for a covering set."""
    refusals: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "spec": self.spec.name,
            "target": self.target,
            "seconds": round(self.seconds, 1),
            "feasible": self.feasible,
            "compiled": len(self.outcomes),
            "excluded": [one.to_json() for one in self.outcomes if one.kind != "ok"],
            "outcomes": [one.to_json() for one in self.outcomes],
            "entries": [{"key": self.entry.key, "backend": self.entry.backend, "path": str(self.path)}],
            "refusals": list(self.refusals),
        }


def compile_space(
    spec: AnySpec,
    target: Target | None = None,
    *,
    backends: Sequence[Backend] | None = None,
    workers: int | None = None,
    limit: int | None = None,
    progress: Watch | None = None,
    store: Store | None = None,
    cache: ArtifactCache | None = None,
) -> CompileReport:
    """Compile the spec's schedules without running them; the defaults of the first back end are registered as an untuned entry, unless a
    tuned one is there.

    With `limit`, at most that many schedules per back end (but all of these), chosen so that every value of every parameter occurs
    (as far as they go). Modules stay in the cache, where a later tuning finds them. Raises ToolchainMissing without a compiler,
    UnsupportedError where no back end takes the spec, CompileError where not even a default compiles, HostError where the disk
    fails: before anything is compiled if the registry or the cache cannot be written.
    """
    target = target or resolve(spec.arch)
    found, refusals = contenders(spec, target, backends)
    store, cache, watch = store or user_store(), cache or ArtifactCache(), progress or (lambda _: None)
    store.require_writable()
    cache.require_writable()
    sources = Sources(spec, target, {c.backend.name: c.backend for c in found})
    require(sources, found, cache, compile_only=True)
    began = time.monotonic()
    outcomes: list[CompileOutcome] = []
    registered: tuple[Entry, Path] | None = None
    feasible = 0
    jobs: list[tuple[Contender, Schedule, Source]] = []
    for c in found:
        every = list(c.space.schedules())
        feasible += len(every)
        first = c.defaults
        chosen = list(dict.fromkeys([*first, *every])) if limit is None else covering(c.space, every, first, limit)
        jobs += [(c, schedule, sources.of(schedule)) for schedule in chosen]
    failures: Counter[str] = Counter()
    built: dict[Schedule, tuple[Source, Artifact]] = {}
    unmeasured = found[0].defaults
    for index, result in build_many([source for _, _, source in jobs], workers, cache):
        c, schedule, source = jobs[index]
        outcome = _outcome(schedule, result)
        outcomes.append(outcome)
        if outcome.kind != "ok":
            failures[outcome.kind] += 1
        if c is found[0] and schedule in unmeasured:
            built[schedule] = (source, _required(result, c))
            if len(built) == len(unmeasured):
                registered = _register(make_untuned(spec, target, c, built), store)
        elapsed = time.monotonic() - began
        watch(Progress("compiling", str(schedule), len(outcomes), len(jobs), 0, failures.copy(), {}, elapsed, None))
    order = {schedule.id: place for place, (_, schedule, _) in enumerate(jobs)}
    outcomes.sort(key=lambda one: order[one.schedule.id])
    assert registered is not None, "its schedules are among those that were compiled"
    return CompileReport(spec, target, tuple(outcomes), *registered, time.monotonic() - began, feasible, tuple(map(str, refusals)))


def _required(result: Artifact | CompileError | CompilerCrash, c: Contender) -> Artifact:
    """The module of a default. Raises what kept it from being compiled."""
    if isinstance(result, CompilerCrash):
        raise result
    if isinstance(result, CompileError):
        raise CompileError(f"a default schedule of {c.backend.name} does not compile", str(result))
    return result


def _register(entry: Entry, store: Store) -> tuple[Entry, Path]:
    """The entry where it is stored, or the tuned one that is there."""
    for one in store.find(entry.spec):
        if one.entry is not None and one.entry.key == entry.key and one.entry.timings:
            return one.entry, one.path
    return entry, store.put(entry)


def _outcome(schedule: Schedule, result: Artifact | CompileError | CompilerCrash) -> CompileOutcome:
    if isinstance(result, CompilerCrash):
        return CompileOutcome(schedule, "compiler_crash", detail=str(result))
    if isinstance(result, CompileError):
        return CompileOutcome(schedule, "compile_error", detail=str(result))
    kernels = result.resources.kernels.values()
    spills = result.resources.spill_bytes
    return CompileOutcome(
        schedule,
        "spills" if spills else "ok",
        max((kernel.registers for kernel in kernels), default=0),
        spills,
        max((kernel.shared_bytes for kernel in kernels), default=0),
        result.id,
        f"{spills} bytes of register spills" if spills else "",
    )


def covering(space: SearchSpace, schedules: Iterable[Schedule], first: Sequence[Schedule], limit: int) -> list[Schedule]:
    """The `first` and others, `limit` in all (but all of the first), that together show as many parameter values as they can."""
    rest = [schedule for schedule in schedules if schedule not in first]
    random.Random(space.backend).shuffle(rest)
    chosen, seen = list(first), {item for schedule in first for item in flatten(schedule).items()}
    while rest and len(chosen) < limit:
        best = max(rest, key=lambda schedule: len(set(flatten(schedule).items()) - seen))
        chosen.append(best)
        seen |= set(flatten(best).items())
        rest.remove(best)
    return chosen
