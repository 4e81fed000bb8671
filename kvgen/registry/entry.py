"""An entry: a registered winner, with everything that is needed to run and to check it.

An entry has one packed layout, a launch per workload, each with the back end that won there, and further launches, which were not
tuned and serve calls that they suit better. Each launch names one of the entry's rendered sources. Because the source is stored,
templates may change and the entry still describes the kernel that was measured, as long as the included headers are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, get_args

from kvgen.arch import Target
from kvgen.digest import canonical_json, digest
from kvgen.errors import KvgenError
from kvgen.files import is_name
from kvgen.format.layout import PackedLayout
from kvgen.lower import flags as known
from kvgen.lower.backend import FUNCTIONS, Language, Source, functions_of
from kvgen.lower.schedule import Params, Schedule, layout_id, layout_of
from kvgen.lower.tokens import headers_digest, tokens_digest
from kvgen.plaindata import Facts, Json, Shaped
from kvgen.registry.facts import Provenance, Quality
from kvgen.registry.paths import check_portable, locate, portable
from kvgen.spec import AnySpec, AnyWorkload, KernelSpec, Workload
from kvgen.spec.dispatch import ALIKE, Call, Dispatch, Tiling
from kvgen.spec.timing import Timing, require_times
from kvgen.spec.workloads import mean_length
from kvgen.toolchain.cache import Artifact, Resources
from kvgen.toolchain.compilers import machine
from kvgen.validated import recall, record

SCHEMA = 4
"""Version of the entry's format and of the module ABI; entries of another version are not used."""

ALWAYS = ("toolchain", "provenance", "accuracy", "timings", "runner_up")
"""Fields that have defaults and are in every `entry.json`."""

SUFFIX: dict[Language, str] = {"c++": ".cpp", "cuda": ".cu"}


class Damaged(Exception):
    """An entry that cannot be used, with the reason. Not raised to callers of the registry."""


class OtherSchema(Damaged):
    """A whole entry of another version of kvgen."""

    def __init__(self, schema: int) -> None:
        newer = ", which a newer kvgen wrote: upgrade this one" if schema > SCHEMA else ""
        super().__init__(f"schema {schema}: this kvgen reads {SCHEMA}{newer}")


@dataclass(frozen=True)
class Code(Json):
    """One rendered source, with its flags, headers and include folders; their names are portable.

    Text and resources are files of their own, and not in an entry's JSON.
    """

    text: str
    language: Language
    include: tuple[str, ...]
    flags: tuple[str, ...]
    headers: tuple[str, ...]
    headers_digest: str
    resources: Resources | None = None
    artifact: str | None = None
    """Id of the compiled module when it was tuned."""
    machine: str | None = None
    """Digest of the properties of a machine that the module depends on."""

    def __post_init__(self) -> None:
        if self.language not in SUFFIX:
            raise KvgenError(f"{self.language!r:.60} is no language of kvgen's back ends")
        if (flag := known.refused(self.language, self.flags)) is not None:
            raise KvgenError(f"it asks for the compiler flag {flag!r:.120}, which no back end of kvgen uses")
        if not all(name is None or is_name(name) for name in (self.artifact, self.machine)):
            raise KvgenError(f"{self.artifact!r:.120} is no key of a compiled module")
        for name in (*self.include, *self.headers):
            check_portable(name)

    @classmethod
    def of(cls, source: Source, artifact: Artifact | None = None) -> Code:
        """The code of a source and, if it was compiled, of its artifact.

        Raises ValueError for headers of no package, KvgenError for flags that `kvgen.lower.flags` does not list.
        """
        return cls(
            source.text,
            source.language,
            tuple(map(portable, source.include)),
            source.flags,
            tuple(map(portable, source.headers)),
            headers_digest(source.headers),
            artifact.resources if artifact else None,
            artifact.id if artifact else None,
            machine(source.target) if artifact else None,
        )

    @property
    def file(self) -> str:
        """File name in the entry's folder."""
        return f"kernel-{digest([tokens_digest(self.text), self.flags, self.headers_digest])[:8]}{SUFFIX[self.language]}"

    def source(self, target: Target, functions: tuple[str, ...] = FUNCTIONS) -> Source | None:
        """The source to compile, which exports `functions`; None if headers are absent or have other tokens than when it was tuned."""
        try:
            headers = tuple(map(locate, self.headers))
            if headers_digest(headers) != self.headers_digest:
                return None
            include = tuple(map(locate, self.include))
            return Source(self.text, self.language, target, include, self.flags, headers, functions)
        except (OSError, ValueError):  # ValueError: a package that cannot be looked up here, such as __main__
            return None


@dataclass(frozen=True)
class Launch:
    """A launch of an entry: back end and parameters. `file` names the code; `workload` is the one that it was tuned for, of a further
    launch the spec's first.
    """

    workload: AnyWorkload
    backend: str
    params: Params
    file: str


@dataclass(frozen=True)
class Entry(Json):
    """A winner. Times are in microseconds; `device`, `toolchain` and `provenance` are plain facts by name, `accuracy` holds errors by
    workload key.

    `runner_up` holds `launches`, the best of another back end over the same layout by workload key ({backend, launch, us}), and
    `layout`, the next best layout with launches of the same form, or None.

    `kvgen.registry.facts` has the shapes of `provenance` and `quality`.

    `cache` is None in every entry that kvgen writes today, and nothing uses it. It is part of the schema and is
    preserved, so that a later version can fill it without a new schema.
    """

    spec: AnySpec
    arch: Target
    layout: Params
    layout_id: str
    launches: tuple[Launch, ...]
    codes: Mapping[str, Code]
    device: Facts
    toolchain: Facts = field(default_factory=dict)
    provenance: Annotated[Facts, Shaped(Provenance)] = field(default_factory=dict)
    accuracy: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    timings: tuple[Timing, ...] = ()
    runner_up: Facts | None = None
    further: tuple[Launch, ...] = ()
    """Defaults for calls that they suit better than the launches of the workloads."""
    quality: Annotated[Facts, Shaped(Quality)] | None = None
    """What the format costs, or None where it was never computed."""
    cache: Facts | None = None
    """Reserved for a later version; None today."""

    @classmethod
    def of(
        cls,
        spec: AnySpec,
        arch: Target,
        launches: Iterable[tuple[AnyWorkload, Schedule, Source, Artifact | None]],
        more: Iterable[tuple[AnyWorkload, Schedule, Source, Artifact | None]] = (),
        **facts: Any,
    ) -> Entry:
        """The entry of tuned schedules, which have the same layout part; `more` are its further launches, and `facts` the other fields by
        name.

        Raises ValueError where the schedules differ in layout or there are none, and where the layout cannot hold the spec.
        """
        chosen, further = tuple(launches), tuple(more)
        layouts = {schedule.layout for _, schedule, _, _ in (*chosen, *further)}
        if len(layouts) != 1:
            raise ValueError(f"an entry has one layout, not {len(layouts)}")
        (layout,) = layouts
        codes: dict[str, Code] = {}
        made: list[Launch] = []
        for workload, schedule, source, artifact in (*chosen, *further):
            code = Code.of(source, artifact)
            codes.setdefault(code.file, code)
            made.append(Launch(workload, schedule.backend, schedule.launch, code.file))
        tuned, others = tuple(made[: len(chosen)]), tuple(made[len(chosen) :])
        return cls(spec, arch, layout, layout_id(spec, layout), tuned, codes, further=others, **facts)

    @property
    def key(self) -> str:
        """Key: digest of format, architecture, device name and workloads."""
        return entry_key(self.spec, self.arch, self.device, (launch.workload for launch in self.launches))

    @property
    def backend(self) -> str:
        """Names of the launches' back ends, joined by `+`."""
        return "+".join(sorted({launch.backend for launch in self.launches}))

    @property
    def made(self) -> str:
        """How it was made, in one word: tuned, or compiled where nothing was measured."""
        return "tuned" if self.timings else "compiled"

    @property
    def sources_id(self) -> str:
        """Digest of the sources of all launches, with their flags and headers. A build records it in `provenance` as `sources`."""
        return digest(sorted(self.codes))

    @property
    def timed_with_others(self) -> bool:
        """Whether its times are of other sources than these: rendered anew since, or with headers that have changed. So is an entry that
        does not record which sources were timed.
        """
        recorded = self.provenance.get("sources") == self.sources_id
        return bool(self.timings) and not (recorded and all(self.source(code) for code in self.codes.values()))

    @property
    def every_launch(self) -> tuple[Launch, ...]:
        """The launches of the workloads, then the further ones: the order of the indices of `look_up`."""
        return (*self.launches, *self.further)

    def look_up(self, spec: KernelSpec | None = None) -> Dispatch:
        """Which launch of `every_launch` serves a call; of two that were tuned for the same calls under different loads, the one for the
        load of most traffic of `spec` (by default the entry's own). Raises ToolchainMissing if a back end cannot be loaded.
        """
        sustained = _prefers_sustained((spec or self.spec).workloads)
        works = ((launch.workload, index) for index, launch in enumerate(self.launches))
        tuned = [(work, index) for work, index in works if isinstance(work, Workload)]
        tuned.sort(key=lambda one: (one[0].load == "sustained") == sustained)
        return Dispatch(self._tilings(), [(call_of(work), index) for work, index in tuned])

    def _tilings(self) -> list[Tiling]:
        """Of `every_launch`. Where one has parameters that its back end does not know, all are alike, and the nearest workload decides."""
        from kvgen.lower.backend import get_backend

        backends = {name: get_backend(name) for name in {launch.backend for launch in self.every_launch}}
        try:
            found = [backends[launch.backend].tiling(self.spec, self.schedule(launch), self.arch) for launch in self.every_launch]
        except (KeyError, TypeError, ValueError):
            found = [None]
        known = [tiling for tiling in found if tiling is not None]
        return known if len(known) == len(self.every_launch) else [ALIKE] * len(self.every_launch)

    @cached_property
    def packed(self) -> PackedLayout:
        """The packed layout of the entry's layout part, as it is defined today. Raises as `layout_of` does, and TypeError for an operation
        on a matrix, which packs nothing.
        """
        if not isinstance(self.spec, KernelSpec):
            raise TypeError(f"{self.spec.operation} has no packed layout")
        return layout_of(self.spec, self.layout)

    def source(self, code: Code) -> Source | None:
        """See `Code.source`."""
        return code.source(self.arch, functions_of(self.spec))

    def schedule(self, launch: Launch) -> Schedule:
        """The whole schedule of one launch."""
        return Schedule(launch.backend, self.layout, launch.params)

    def timing(self, workload: AnyWorkload) -> Timing | None:
        """The measurement at a workload that was tuned for; None without one."""
        return next((timing for timing in self.timings if timing.workload.key == workload.key), None)

    def rival(self, workload: AnyWorkload) -> tuple[str, float] | None:
        """The best launch of another back end at a workload: its back end, and its time over the winner's. None if there was none."""
        timing = self.timing(workload)
        other = ((self.runner_up or {}).get("launches") or {}).get(workload.key)
        return (str(other["backend"]), other["us"] / timing.us) if other and timing else None

    def standings(self) -> list[dict[str, Any]]:
        """By workload, the winner and the best launch of another back end, as plain data."""
        rows = []
        for launch in self.launches:
            timing, rival = self.timing(launch.workload), self.rival(launch.workload)
            runner_up = {"backend": rival[0], "ratio": round(rival[1], 4)} if rival else None
            us = timing.us if timing else None
            rows.append({"workload": launch.workload.key, "backend": launch.backend, "us": us, "runner_up": runner_up})
        return rows

    def resources(self) -> dict[str, Any]:
        """Contents of `resources.json`: by source file, compile time and the resources of its kernels."""
        return {file: code.resources.to_json() for file, code in sorted(self.codes.items()) if code.resources}

    def to_json(self) -> dict[str, Any]:
        """Contents of `entry.json`, except the digests of the other files."""
        data = super().to_json()
        launches, further = ([_written(one) for one in data.pop(name)] for name in ("launches", "further"))
        sources = data.pop("codes")
        for code in sources.values():
            del code["text"], code["resources"]
        schedule = {"layout": data.pop("layout"), "launches": launches, "further": further}
        return {"schema": SCHEMA, "key": self.key, "backend": self.backend, "schedule": schedule, "sources": sources, **data}

    @classmethod
    def from_parts(cls, data: Mapping[str, Any], texts: Mapping[str, str], resources: Mapping[str, Any]) -> Entry:
        """Inverse of `to_json`, given the text of each source and the contents of `resources.json`.

        Raises Damaged for another schema or a key that does not follow from the contents; KeyError, TypeError, ValueError or KvgenError
        where fields are absent or wrong.
        """
        if type(data["schema"]) is not int:
            raise Damaged("its schema is no number")
        if data["schema"] != SCHEMA:
            raise OtherSchema(data["schema"])
        if data["arch"] not in get_args(Target):
            raise Damaged(f"{data['arch']!r:.60} is no target")
        if absent := [name for name in ALWAYS if name not in data]:
            raise Damaged(f"it has no {absent[0]}")
        codes = {file: {**item, "text": texts[file], "resources": resources.get(file) or None} for file, item in data["sources"].items()}
        launches, further = ([_read(item) for item in data["schedule"][name]] for name in ("launches", "further"))
        fields = {**data, "layout": data["schedule"]["layout"], "launches": launches, "codes": codes, "further": further}
        entry = cls._validated(fields)
        if entry.key != data["key"]:
            raise Damaged("its key does not follow from its contents")
        for timing in entry.timings:
            timing.check()
        _check_runner_up(entry.runner_up or {})
        if missing := [launch.file for launch in entry.every_launch if launch.file not in entry.codes]:
            raise Damaged(f"it names no source {missing[0]}")
        return entry

    @classmethod
    def _validated(cls, fields: dict[str, Any]) -> Entry:
        """The entry with these fields, validated unless this machine has validated the same before. Raises ValueError, TypeError."""
        source = canonical_json(fields)
        entry = recall(cls, source, fields)
        if entry is None:
            entry = cls.from_json(fields)
            record(entry, source, fields, keep=False)
        return entry


def entry_key(spec: AnySpec, arch: Target, device: Mapping[str, Any], workloads: Iterable[AnyWorkload]) -> str:
    """Key of the entry for a format, an architecture, a device (by its name) and a set of workloads."""
    return digest([spec.format_id, arch, str(device.get("name", "unknown")), sorted(work.key for work in workloads)])


def call_of(work: Workload) -> Call:
    """A call of exactly a workload."""
    return Call(work.batch, work.kv_len, work.q_len, round(work.batch * mean_length(work)))


def _prefers_sustained(workloads: Iterable[AnyWorkload]) -> bool:
    """Whether most of the traffic, by weight, is under a sustained load. Shapes of matrices say nothing of it."""
    loads = [(getattr(work, "load", "rested") == "sustained", work.weight) for work in workloads]
    return 2 * sum(weight for sustained, weight in loads if sustained) > sum(weight for _, weight in loads)


def _check_runner_up(facts: Mapping[str, Any]) -> None:
    """Raises ValueError, TypeError, KeyError or AttributeError where `Entry.runner_up` is not what `Entry` describes."""
    layout = facts.get("layout")
    if layout is not None:
        Params(layout["layout"])
    for launches in (facts.get("launches") or {}, {} if layout is None else layout["launches"]):
        for work, one in launches.items():
            if not isinstance(one["backend"], str):
                raise TypeError(f"the runner-up at {work} has no back end")
            if one["us"] is None:
                raise TypeError(f"the runner-up at {work} has no time")
            require_times(f"the runner-up at {work}", one["us"])


def _written(launch: dict[str, Any]) -> dict[str, Any]:
    """A launch as `entry.json` has it: its parameters are called `launch` and its file `source`."""
    return {"launch": launch.pop("params"), "source": launch.pop("file"), **launch}


def _read(item: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of `_written`."""
    return {**item, "params": item["launch"], "file": item["source"]}
