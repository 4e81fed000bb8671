"""Compiles a search space where nothing can be run: resources by schedule, spilling schedules excluded, an untuned entry."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvgen.arch import Target
from kvgen.errors import CompileError, CompilerCrash
from kvgen.lower.backend import Backend, Source, Sources
from kvgen.lower.schedule import Schedule
from kvgen.plaindata import Json
from kvgen.registry import user_store
from kvgen.registry.entry import Entry, here
from kvgen.registry.select import untuned_entry
from kvgen.registry.store import Store
from kvgen.spec import AnySpec
from kvgen.spec.target import resolve
from kvgen.toolchain import Artifact, ArtifactCache
from kvgen.toolchain.compile import build_many
from kvgen.tune.budget import Progress, Watch
from kvgen.tune.candidates import Contender, contenders, require_toolchain
from kvgen.tune.final import provenance, quality_of, toolchain_of


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
    """Schedules of the search space; more than were compiled where there was a `limit`."""
    refusals: tuple[str, ...] = ()

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

    With `limit`, the defaults and a random choice of others, so many per back end. Modules stay in the cache, where a later tuning finds
    them. Raises ToolchainMissing without a compiler, UnsupportedError where no back end takes the spec, CompileError where not even a
    default compiles, HostError where the disk fails: before anything is compiled if the registry or the cache cannot be written.
    """
    target = target or resolve(spec.arch)
    found, refusals = contenders(spec, target, backends)
    store, cache, watch = store or user_store(), cache or ArtifactCache(), progress or (lambda _: None)
    store.require_writable()
    cache.require_writable()
    sources = Sources(spec, target, {c.backend.name: c.backend for c in found})
    require_toolchain(sources, found, cache, compile_only=True)
    began = time.monotonic()
    spaces = [(c, list(c.space.schedules())) for c in found]
    jobs: list[tuple[Schedule, Source]] = []
    for c, every in spaces:
        rest = [schedule for schedule in every if schedule not in c.defaults]
        if limit is not None:
            rest = random.Random(0).sample(rest, min(len(rest), max(0, limit - len(c.defaults))))
        jobs += [(schedule, sources.of(schedule)) for schedule in (*c.defaults, *rest)]
    outcomes: dict[int, CompileOutcome] = {}
    defaults: dict[Schedule, tuple[Source, Artifact]] = {}
    for index, result in build_many([source for _, source in jobs], workers, cache):
        schedule, source = jobs[index]
        outcomes[index] = _outcome(schedule, result)
        if schedule in found[0].defaults:
            if isinstance(result, CompilerCrash):
                raise result
            if isinstance(result, CompileError):
                raise CompileError(f"a default schedule of {schedule.backend} does not compile", str(result))
            defaults[schedule] = source, result
        failures = Counter(one.kind for one in outcomes.values() if one.kind != "ok")
        watch(Progress("compiling", str(schedule), len(outcomes), len(jobs), 0, failures, {}, time.monotonic() - began, None))
    entry = make_untuned(spec, target, found[0], {one: defaults[one] for one in found[0].defaults})
    there = ((one.entry, one.path) for one in store.find(spec) if one.entry and one.entry.key == entry.key and one.entry.timings)
    entry, path = next(there, None) or (entry, store.put(entry))
    every_outcome = tuple(outcome for _, outcome in sorted(outcomes.items()))
    feasible, seconds = sum(len(every) for _, every in spaces), time.monotonic() - began
    return CompileReport(spec, target, every_outcome, entry, path, seconds, feasible, tuple(map(str, refusals)))


def make_untuned(spec: AnySpec, target: Target, c: Contender, built: Mapping[Schedule, tuple[Source, Artifact]]) -> Entry:
    """The untuned entry of a back end's defaults, which were compiled and never run."""
    facts = {**provenance(), "tuned": False, "why": "compiled only: never run, never measured"}
    about = {"device": dict(here(target)), "toolchain": toolchain_of(built[c.defaults[0]][1]), "provenance": facts}
    return untuned_entry(spec, target, c.backend, built, **about, quality=quality_of(spec))


def _outcome(schedule: Schedule, result: Artifact | CompileError | CompilerCrash) -> CompileOutcome:
    if isinstance(result, CompilerCrash):
        return CompileOutcome(schedule, "compiler_crash", detail=str(result))
    if isinstance(result, CompileError):
        return CompileOutcome(schedule, "compile_error", detail=str(result))
    kernels, spills = result.resources.kernels.values(), result.resources.spill_bytes
    return CompileOutcome(
        schedule,
        "spills" if spills else "ok",
        max((kernel.registers for kernel in kernels), default=0),
        spills,
        max((kernel.shared_bytes for kernel in kernels), default=0),
        result.id,
        f"{spills} bytes of register spills" if spills else "",
    )
