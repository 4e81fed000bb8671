"""From a decision to an entry of the registry."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kvgen.arch import Target
from kvgen.lower.backend import Source, Sources
from kvgen.lower.schedule import Schedule
from kvgen.measure.measurement import Measurement
from kvgen.registry.device import here, provenance
from kvgen.registry.entry import Entry, OtherLayout, Rival, RunnerUp
from kvgen.registry.select import untuned_entry
from kvgen.spec import AnySpec, AnyWorkload, KernelSpec
from kvgen.spec.timing import Timing
from kvgen.toolchain import Artifact
from kvgen.tune.candidates import Contender
from kvgen.tune.final import Decision
from kvgen.verify.quality import format_quality

MOST_LAUNCHES = 4
"""Of an entry, unless more workloads have winners of their own."""


def make_entry(
    sources: Sources,
    decision: Decision,
    more: Sequence[Schedule],
    artifact: Callable[[Schedule], Artifact],
    records: Sequence[Measurement],
    defaults: Mapping[str, Schedule],
    facts: Mapping[str, Any],
) -> Entry:
    """The entry of a tuned winner; `artifact` gives compiled schedules, `records` are the basis of the decision, `defaults` are by workload
    key, `facts` become part of its provenance, `more` are further launches for other calls.
    """
    spec, target = sources.spec, sources.target

    def compiled(work: AnyWorkload, schedule: Schedule) -> tuple[AnyWorkload, Schedule, Source, Artifact]:
        return work, schedule, sources.of(schedule), artifact(schedule)

    def rivals(launches: Mapping[str, Measurement]) -> dict[str, Rival]:
        return {key: Rival(one.candidate.backend, one.candidate.schedule.launch, one.cost) for key, one in launches.items()}

    timings = []
    for work in spec.workloads:
        won = decision.launches[work.key]
        default_us = next((one.cost for one in records if one.timed and one.key == (defaults[work.key].id, work.key)), None)
        timings.append(Timing(work, won.cost, won.samples, won.read_us, default_us, won.watts, won.clock_mhz))
    launches = [compiled(work, decision.launches[work.key].candidate.schedule) for work in spec.workloads]
    other = OtherLayout(decision.runner_up[0], rivals(decision.runner_up[1])) if decision.runner_up else None
    entry = Entry.of(
        spec,
        target,
        launches,
        [compiled(spec.workloads[0], schedule) for schedule in more],
        device=dict(here(target)),
        toolchain=_toolchain(launches[0][3]),
        provenance={**provenance(), **facts, "tuned": True, "why": decision.why},
        accuracy={key: dict(record.accuracy) for key, record in decision.launches.items()},
        timings=tuple(timings),
        runner_up=RunnerUp(rivals(decision.rivals), other) if decision.rivals or other else None,
        quality=_quality(spec),
    )
    return replace(entry, provenance={**entry.provenance, "sources": entry.sources_id})


def further(spec: AnySpec, target: Target, winners: Sequence[Schedule], first: Contender) -> list[Schedule]:
    """The defaults of a back end over the winners' layout that run another number of CTAs at once than any winner of that back end, as
    many as make MOST_LAUNCHES in all.
    """

    def shape(schedule: Schedule) -> tuple[int, int] | None:
        tiling = first.backend.tiling(spec, schedule, target)
        return None if tiling is None else (tiling.resident, tiling.ctas_per_sm)

    taken = {shape(schedule) for schedule in winners if schedule.backend == first.backend.name}
    others = [one for one in first.defaults if one.layout == winners[0].layout and shape(one) not in taken]
    return others[: max(0, MOST_LAUNCHES - len(set(winners)))]


def make_untuned(spec: AnySpec, target: Target, c: Contender, built: Mapping[Schedule, tuple[Source, Artifact]]) -> Entry:
    """The untuned entry of a back end's defaults, which were compiled and never run."""
    facts = {**provenance(), "tuned": False, "why": "compiled only: never run, never measured"}
    about = {"device": dict(here(target)), "toolchain": _toolchain(built[c.defaults[0]][1]), "provenance": facts}
    return untuned_entry(spec, target, c.backend, built, **about, quality=_quality(spec))


def _quality(spec: AnySpec) -> dict[str, Any] | None:
    """What the format costs; the errors of a matrix are in the entry's accuracy."""
    return {"outputs": format_quality(spec)} if isinstance(spec, KernelSpec) else None


def _toolchain(artifact: Artifact) -> dict[str, Any]:
    """Versions that a compiled module depends on."""
    versions = {"compiler": artifact.resources.compiler, "python": platform.python_version()}
    for name, package in {"torch": "torch", "tvm_ffi": "apache-tvm-ffi", "tilelang": "tilelang"}.items():
        with suppress(PackageNotFoundError):
            versions[name] = version(package)
    return versions
