"""From a decision to an entry of the registry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvgen.arch import Target
from kvgen.lower.backend import Source, Sources
from kvgen.lower.schedule import Schedule
from kvgen.measure.measurement import Measurement
from kvgen.registry.device import here, provenance
from kvgen.registry.entry import Entry
from kvgen.registry.select import untuned_entry
from kvgen.spec import AnySpec, AnyWorkload, KernelSpec
from kvgen.spec.timing import Timing
from kvgen.toolchain import Artifact
from kvgen.tune.candidates import Contender
from kvgen.verify.quality import format_quality

if TYPE_CHECKING:
    from kvgen.tune.final import Decision
    from kvgen.tune.measuring import CompileQueue

MOST_LAUNCHES = 4
"""Of an entry, unless more workloads have winners of their own."""


def make_entry(
    sources: Sources,
    decision: Decision,
    more: Sequence[Schedule],
    compile_queue: CompileQueue,
    records: Sequence[Measurement],
    defaults: Mapping[str, Schedule],
    facts: Mapping[str, Any],
) -> Entry:
    """The entry of a tuned winner; `records` are the basis of the decision, `defaults` are by workload key, `facts` become part of its
    provenance, `more` are further launches for other calls.
    """
    spec, target = sources.spec, sources.target
    launches: list[tuple[AnyWorkload, Schedule, Source, Artifact | None]] = []
    timings, accuracy = [], {}
    for work in spec.workloads:
        record = decision.launches[work.key]
        schedule = record.candidate.schedule
        launches.append((work, schedule, sources.of(schedule), compile_queue.artifact(schedule)))
        default_us = _cost(records, defaults[work.key], work)
        timings.append(Timing(work, record.cost, record.samples, record.read_us, default_us, record.watts, record.clock_mhz))
        accuracy[work.key] = dict(record.accuracy)
    compiler = launches[0][3].resources.compiler if launches[0][3] else ""
    entry = Entry.of(
        spec,
        target,
        launches,
        [(spec.workloads[0], schedule, sources.of(schedule), compile_queue.artifact(schedule)) for schedule in more],
        device=dict(here(target)),
        toolchain=toolchain(compiler),
        provenance={**provenance(), **facts, "tuned": True, "why": decision.why},
        accuracy=accuracy,
        timings=tuple(timings),
        runner_up=_runner_up(decision),
        quality={"outputs": format_quality(spec)} if isinstance(spec, KernelSpec) else None,  # accuracy has the errors of a matrix
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
    """The untuned entry of a back end's defaults and its plain schedule, which were compiled and never run."""
    return untuned_entry(
        spec,
        target,
        c.backend,
        built,
        device=dict(here(target)),
        toolchain=toolchain(built[c.defaults[0]][1].resources.compiler),
        provenance={**provenance(), "tuned": False, "why": "compiled only: never run, never measured"},
        quality={"outputs": format_quality(spec)} if isinstance(spec, KernelSpec) else None,  # accuracy has the errors of a matrix
    )


def toolchain(compiler: str) -> dict[str, Any]:
    """Versions that a compiled module depends on."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    versions = {"compiler": compiler, "python": platform.python_version(), "torch": version("torch"), "tvm_ffi": version("apache-tvm-ffi")}
    with suppress(PackageNotFoundError):
        versions["tilelang"] = version("tilelang")
    return versions


def _cost(records: Sequence[Measurement], schedule: Schedule, work: AnyWorkload) -> float | None:
    """µs of a schedule at a workload among some records."""
    costs = [r.cost for r in records if r.timed and r.candidate.schedule.id == schedule.id and r.candidate.workload.key == work.key]
    return costs[0] if costs else None


def _runner_up(decision: Decision) -> dict[str, Any] | None:
    """The runners-up as plain data: other back ends over the same layout, and the best other layout."""
    if not decision.rivals and not decision.runners_up:
        return None
    other: dict[str, Any] | None = None
    if decision.runners_up:
        layout, launches = decision.runners_up[0]
        other = {"layout": dict(layout), "launches": _describe(launches)}
    return {"launches": _describe(decision.rivals), "layout": other}


def _describe(launches: Mapping[str, Measurement]) -> dict[str, Any]:
    return {
        key: {"backend": record.candidate.backend, "launch": dict(record.candidate.schedule.launch), "us": record.cost}
        for key, record in launches.items()
    }
