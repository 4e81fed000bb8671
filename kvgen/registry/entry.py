"""An entry: a registered winner, as one JSON file that says how to render, run and check it.

An entry has one packed layout and up to four launches, each with the back end that it is of and the workloads that it won. Sources are not
stored: they are rendered from the schedules. The fingerprint of a launch tells whether what is rendered today is what was measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from kvgen._machine import cores, gpu_identity
from kvgen.arch import Target
from kvgen.digest import digest
from kvgen.errors import KvgenError
from kvgen.format.layout import PackedLayout
from kvgen.lower.backend import Source
from kvgen.lower.schedule import Params, Schedule, layout_id, layout_of
from kvgen.plaindata import Facts, Json
from kvgen.spec import AnySpec, AnyWorkload, KernelSpec, Workload
from kvgen.spec.dispatch import ALIKE, Call, Dispatch
from kvgen.spec.workloads import Timing, mean_length, spread
from kvgen.toolchain.cache import Artifact, Resources
from kvgen.toolchain.compilers import cpu_name, machine

SCHEMA = 5
"""Version of the entry's format and of the module ABI; entries of another version are not used."""
WIDTH = 150
"""Longest list or object of an entry's file on one line; what holds no further ones always is."""


class Damaged(Exception):
    """An entry that cannot be used, with the reason. Not raised to callers of the registry."""


@dataclass(frozen=True)
class Launch(Json):
    """A launch of an entry: back end and parameters, the keys of the workloads that it won (none for one that serves other calls), and what
    was compiled: `artifact` is the module's id, `machine` a digest of the properties of a machine that the module depends on.
    """

    backend: str
    params: Params
    workloads: tuple[str, ...]
    fingerprint: str
    artifact: str | None = None
    machine: str | None = None
    resources: Resources | None = None


@dataclass(frozen=True)
class Entry(Json):
    """A winner. Times are in microseconds; `device`, `toolchain` and `provenance` are plain facts by name, `accuracy` holds errors by
    workload key.
    """

    spec: AnySpec
    arch: Target
    device: Facts
    layout: Params
    layout_id: str
    launches: tuple[Launch, ...]
    timings: tuple[Timing, ...] = ()
    accuracy: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    toolchain: Facts = field(default_factory=dict)
    provenance: Facts = field(default_factory=dict)
    """How it came to be; `sources` is the `sources_id` of what was timed."""

    @classmethod
    def of(
        cls,
        spec: AnySpec,
        arch: Target,
        launches: Iterable[tuple[AnyWorkload, Schedule, Source, Artifact | None]],
        more: Iterable[tuple[AnyWorkload, Schedule, Source, Artifact | None]] = (),
        **facts: Any,
    ) -> Entry:
        """The entry of tuned schedules, which have the same layout part; `more` are launches for other calls (their workloads do not
        matter), and `facts` the other fields by name.

        Raises ValueError where the schedules differ in layout or there are none, and where the layout cannot hold the spec.
        """
        launches = list(launches)
        made: dict[Schedule, tuple[Source, Artifact | None]] = {}
        for _, schedule, source, artifact in (*launches, *more):
            made.setdefault(schedule, (source, artifact))
        layouts = {schedule.layout for schedule in made}
        if len(layouts) != 1:
            raise ValueError(f"an entry has one layout, not {len(layouts)}")
        (layout,) = layouts
        every = tuple(
            Launch(
                schedule.backend,
                schedule.launch,
                tuple(work.key for work, one, _, _ in launches if one == schedule),
                source.fingerprint,
                artifact.id if artifact else None,
                machine(source.target) if artifact else None,
                artifact.resources if artifact else None,
            )
            for schedule, (source, artifact) in made.items()
        )
        entry = cls(spec, arch, layout=layout, layout_id=layout_id(spec, layout), launches=every, **facts)
        entry.__dict__["sources"] = tuple(source for source, _ in made.values())  # they need not be rendered again
        return entry

    # --- its file ------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Contents of the entry's file, without their digest."""
        return {"schema": SCHEMA, "key": self.key, "backend": self.backend, **super().to_json()}

    def text(self) -> str:
        """The entry's file. Raises KvgenError if a figure is not a finite number."""
        data = self.to_json()
        try:
            return _compact({"digest": digest(data), **data}) + "\n"
        except ValueError as error:
            raise KvgenError(f"the entry {self.key} cannot be written: {error}") from error

    @classmethod
    def of_text(cls, raw: bytes) -> Entry:
        """The entry of a file. Raises Damaged if it was changed after it was written, is of another version, or is no entry."""
        try:
            data = json.loads(raw)
            if not isinstance(data, dict) or type(data.get("schema")) is not int:
                raise Damaged("it is no entry: it has no schema")
            if data["schema"] != SCHEMA:
                newer = ", which a newer kvgen wrote: upgrade this one" if data["schema"] > SCHEMA else ": build it again"
                raise Damaged(f"schema {data['schema']}, and this kvgen reads {SCHEMA}{newer}")
            if data.pop("digest", None) != digest(data):
                raise Damaged("it was changed after it was written: its digest is another")
            return cls.from_json(data)
        except (ValueError, RecursionError, KvgenError) as error:
            raise Damaged(f"it cannot be read: {error}") from error

    # --- what it says ----------------------------------------------------------------------------------------------------

    @property
    def tuned(self) -> list[tuple[AnyWorkload, Launch]]:
        """The workloads that it was tuned for, in the spec's order, each with its launch."""
        won = {key: launch for launch in self.launches for key in launch.workloads}
        return [(work, won[work.key]) for work in self.spec.workloads if work.key in won]

    @cached_property
    def key(self) -> str:
        """Key: digest of format, architecture, device name and workloads."""
        return entry_key(self.spec, self.arch, self.device, (work for work, _ in self.tuned))

    @property
    def backend(self) -> str:
        """Names of the back ends of the tuned launches, joined by `+`."""
        return "+".join(sorted({launch.backend for _, launch in self.tuned}))

    @property
    def made(self) -> str:
        """How it was made: tuned, compiled where nothing was measured, or measured under disturbances."""
        return "measured under disturbances" if self.disturbed else "tuned" if self.timings else "compiled"

    @property
    def disturbed(self) -> dict[str, float]:
        """Spreads of the samples, by the keys of workloads where they were disturbed."""
        return {timing.workload.key: spread(timing.samples) for timing in self.timings if timing.disturbed}

    def schedule(self, launch: Launch) -> Schedule:
        """The whole schedule of one launch."""
        return Schedule(launch.backend, self.layout, launch.params)

    @cached_property
    def packed(self) -> PackedLayout:
        """The packed layout of the entry's layout part, as it is defined today. Raises as `layout_of` does, and TypeError for an operation
        on a matrix, which packs nothing.
        """
        if not isinstance(self.spec, KernelSpec):
            raise TypeError(f"{self.spec.operation} has no packed layout")
        return layout_of(self.spec, self.layout)

    @cached_property
    def sources(self) -> tuple[Source, ...]:
        """The sources of the launches, rendered today. Raises KvgenError where a back end is missing or does not lower a schedule."""
        from kvgen.lower.backend import get_backend

        try:
            return tuple(get_backend(one.backend).lower(self.spec, self.schedule(one), self.arch) for one in self.launches)
        except (KeyError, TypeError, ValueError) as error:  # parameters that the back end does not have today
            raise KvgenError(f"a launch of the entry {self.key} cannot be rendered: {type(error).__name__}: {error}") from error

    @property
    def outdated(self) -> bool:
        """Whether a launch renders to other tokens than were measured. Raises as `sources` does."""
        return any(source.fingerprint != launch.fingerprint for source, launch in zip(self.sources, self.launches, strict=True))

    @property
    def sources_id(self) -> str:
        """Digest of the fingerprints of all launches. A build records it in `provenance` as `sources`."""
        return digest(sorted(launch.fingerprint for launch in self.launches))

    @property
    def timed_with_others(self) -> bool:
        """Whether its times are of other sources than kvgen renders today. So is an entry that does not record which were timed."""
        if not self.timings:
            return False
        with suppress(KvgenError):
            return self.provenance.get("sources") != self.sources_id or self.outdated
        return True

    def look_up(self, spec: KernelSpec | None = None) -> Dispatch:
        """Which of `launches` serves a call; of two that were tuned for the same calls under different loads, the one for the load of most
        traffic of `spec` (by default the entry's own). Raises ToolchainMissing if a back end cannot be loaded.
        """
        from kvgen.lower.backend import get_backend

        try:
            tilings = [get_backend(one.backend).tiling(self.spec, self.schedule(one), self.arch) for one in self.launches]
        except (KeyError, TypeError, ValueError):  # parameters that the back end does not have today
            tilings = [None]
        known = [tiling for tiling in tilings if tiling is not None]
        traffic = [work for work in (spec or self.spec).workloads if isinstance(work, Workload)]
        sustained = 2 * sum(work.weight for work in traffic if work.load == "sustained") > sum(work.weight for work in traffic)
        tuned = [(work, self.launches.index(launch)) for work, launch in self.tuned if isinstance(work, Workload)]
        tuned.sort(key=lambda one: (one[0].load == "sustained") == sustained)
        calls = [(call_of(work), index) for work, index in tuned]
        return Dispatch(known if len(known) == len(self.launches) else [ALIKE] * len(self.launches), calls)

    def timing(self, workload: AnyWorkload) -> Timing | None:
        """The measurement at a workload that was tuned for; None without one."""
        return next((timing for timing in self.timings if timing.workload.key == workload.key), None)

    def standings(self) -> list[dict[str, Any]]:
        """By workload, the winner and its time, as plain data."""
        timings = {timing.workload.key: timing.us for timing in self.timings}
        return [{"workload": work.key, "backend": launch.backend, "us": timings.get(work.key)} for work, launch in self.tuned]


def entry_key(spec: AnySpec, arch: Target, device: Mapping[str, Any], workloads: Iterable[AnyWorkload]) -> str:
    """Key of the entry for a format, an architecture, a device (by its name) and a set of workloads."""
    return digest([spec.format_id, arch, str(device.get("name", "unknown")), sorted(work.key for work in workloads)])


@cache
def here(target: Target) -> dict[str, Any]:
    """Name of the device that the target means here, with the threads of a CPU or the driver of a GPU.

    The name is empty if there is no such device.
    """
    if target == "cpu":
        return {"name": cpu_name(), "threads": cores()}
    return {"name": "", **gpu_identity()}


def call_of(work: Workload) -> Call:
    """A call of exactly a workload."""
    return Call(work.batch, work.kv_len, work.q_len, round(work.batch * mean_length(work)))


def _compact(value: Any, indent: str = "") -> str:
    """JSON in which what is short, or holds no further lists and objects, is one line; so are plain values that follow each other in an
    object. Raises ValueError for a number that is not finite.
    """
    line = json.dumps(value, allow_nan=False)
    held = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if len(line) <= WIDTH or not any(isinstance(one, (dict, list)) for one in held):
        return line
    inner = indent + " "
    if isinstance(value, list):
        return f"[\n{inner}" + f",\n{inner}".join(_compact(one, inner) for one in value) + f"\n{indent}]"
    text, plain = "", False
    for name, one in value.items():
        before, plain = plain, not isinstance(one, (dict, list))
        text += (", " if before and plain else f",\n{inner}") if text else ""
        text += f"{json.dumps(name)}: {_compact(one, inner)}"
    return f"{{\n{inner}{text}\n{indent}}}"
