"""Checks whether entries still hold: their claims, sources, resources, numerics and, on their own device, their speed.

An aspect of an entry is a finding, and all findings of an entry, or of a file that holds none, are one verdict.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Literal

from pydantic import Field, computed_field

from kvgen.errors import CompileError, HostError, KvgenError, MeasureError, ToolchainMissing
from kvgen.lower.backend import Source
from kvgen.measure.measurement import Job, Measurement, TimingPolicy
from kvgen.measure.worker import Worker
from kvgen.plaindata import Json
from kvgen.registry.entry import Entry, here
from kvgen.registry.select import misfits, stale, tuned_module
from kvgen.registry.store import Found, Store, format_name
from kvgen.runtime.device import cannot_run_here
from kvgen.toolchain import Artifact, ArtifactCache, build
from kvgen.toolchain.compile import build_all
from kvgen.toolchain.compilers import machine
from kvgen.verify import CheckPolicy

Aspect = Literal["registry", "source", "resources", "numerics", "speed"]
LEVELS: tuple[Aspect, ...] = ("source", "resources", "numerics", "speed")
"""Aspects of an entry, each of which depends on the previous ones. `registry` is about files: damaged, or under another name."""
Status = Literal["good", "changed", "damaged", "regressed", "unable"]
Verdict = Literal["good", "damaged", "regressed", "unable"]
FAILING: tuple[Verdict, ...] = ("damaged", "regressed")
"""What a check fails for. Of a damaged entry nothing is known, so it is not called a regression."""
COUNTED = ("registers", "spill_bytes", "shared_bytes")
BROKEN_COMPILER = ("internal compiler error", "cannot execute")
"""Messages of a compiler that failed for reasons other than the source."""
PASSED_OVER = "get_kernel passes it over"
NOT_RENDERED = "it does not render any more"
UNCHECKED = {
    "source": NOT_RENDERED,
    "resources": "it does not compile any more",
    "numerics": "it cannot be verified any more",
    "speed": "it cannot be timed any more",
}
READ = TimingPolicy(seconds=0.1, samples=15, read=True)
ROUNDS = 11
TOLERATED = 0.9
"""Least fraction of the recorded read fraction that is not a regression."""


@dataclass(frozen=True)
class Finding(Json):
    """One aspect: unchanged (`good`), different and no worse (`changed`), worse (`regressed`), not checked (`unable`), or of a file that
    cannot be read as an entry (`damaged`).

    `detail` says what differs, or why it was not checked. `environment`: it was not checked because this machine failed (a full disk, a
    missing or crashing compiler, a worker that does not start), and not for want of a device.
    """

    aspect: Aspect
    status: Status
    detail: str = ""
    environment: bool = False


@dataclass(frozen=True)
class Checked(Json):
    """All findings of one entry, or of a file of a registry that holds none.

    `renewed` is the entry that `--accept` writes: the same schedules, rendered and compiled here. It is None where `get_kernel` would
    pass the entry over, and where the entry does not compile or is wrong. `accepted`: a regression that was accepted.
    """

    key: str
    findings: tuple[Finding, ...]
    spec: str = ""
    arch: str = ""
    registry: str = ""
    accepted: bool = False
    renewed: Annotated[Entry | None, Field(exclude=True)] = field(default=None, repr=False)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def regressed(self) -> bool:
        """Whether anything is worse than when the entry was made."""
        return any(finding.status == "regressed" for finding in self.findings)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def environment(self) -> bool:
        """Whether something was not checked because this machine failed."""
        return any(finding.environment for finding in self.findings)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def verdict(self) -> Verdict:
        """`damaged` or `regressed` if any aspect is, else `unable` if any was not checked, else `good`."""
        found = {finding.status for finding in self.findings}
        return next((verdict for verdict in (*FAILING, "unable") if verdict in found), "good")

    @computed_field  # type: ignore[prop-decorator]
    @property
    def reason(self) -> str:
        """The first finding that makes the verdict; empty for a good entry."""
        return next((f"{f.aspect}: {f.detail}" for f in self.findings if f.status == self.verdict != "good"), "")

    @property
    def bad(self) -> bool:
        """Whether it is damaged or regressed, and still is."""
        return self.verdict in FAILING and not self.accepted


def check_registry(
    store: Store,
    every: Sequence[Found],
    worker: Worker,
    *,
    keys: Sequence[str] = (),
    archs: Sequence[str] = (),
    speed: bool = False,
    accept: bool = False,
    compiling: Callable[[int], object],
) -> Iterator[Checked]:
    """Check the entries that a store holds (`Store.all`), one by one: those whose key begins with one of `keys` and whose target is one of
    `archs` (any where there are none).

    What has to be compiled for them is compiled before, in parallel; `compiling` is called with the number of modules, if there are any.
    `accept` writes those of them that render and compile into the store.
    """
    found = [one for one in every if not keys or one.key.startswith(tuple(keys))]
    chosen = [one.entry for one in found if one.entry is not None and (not archs or one.entry.arch in archs)]
    sources: list[Source] = []
    for entry in chosen:
        with suppress(Exception):  # templates raise exceptions of many kinds
            sources += entry.sources
    with suppress(KvgenError):  # the check of its entry names the failure
        build_all(sources, ArtifactCache(), compiling)
    for entry in chosen:
        checked = replace(check_entry(entry, speed=speed, worker=worker), registry=store.name)
        if accept and checked.renewed is not None:
            try:
                if checked.renewed != entry:
                    store.put(checked.renewed)
                checked = replace(checked, accepted=checked.regressed)
            except (KvgenError, OSError) as error:
                checked = replace(checked, findings=(*checked.findings, Finding("registry", "unable", str(error), environment=True)))
        yield checked
    yield from (replace(problem, registry=store.name) for problem in map(file_problem, found) if problem is not None)


def file_problem(one: Found) -> Checked | None:
    """What is wrong with a file, whatever its entry is: it is damaged, or `get_kernel` does not look for it under its name."""
    if one.entry is None:
        return Checked(one.key, (Finding("registry", "damaged", f"{one.path.parent.name}/{one.path.name}: {one.problem}"),))
    if one.path.name.partition(".")[0] == (name := format_name(one.entry.spec)):
        return None
    return Checked(one.key, (Finding("registry", "regressed", f"get_kernel looks for it as {name}.json, and it is {one.path.name}"),))


def summary(results: Sequence[Checked], *, accept: bool = False) -> str:
    """One line: the number of entries by verdict, and what was not checked, with the reasons."""
    entries = Counter(one.verdict for one in results)
    count = sum(entries.values())
    told = f"{count} {'entry' if count == 1 else 'entries'}, "
    told += f"{entries['good']} good, {entries['regressed']} regressed, {entries['unable']} unable"
    told += f", {entries['damaged']} damaged" if entries["damaged"] else ""
    if accept:
        told += f"; of these accepted: {sum(one.accepted for one in results)}"
    missed = Counter((found.aspect, found.detail) for one in results for found in one.findings if found.status == "unable")
    reasons = [f"{aspect} of {count} ({detail})" for (aspect, detail), count in missed.items()]
    return told + (f"; not checked: {', '.join(reasons)}" if reasons else "")


def check_entry(entry: Entry, cache: ArtifactCache | None = None, *, speed: bool = False, worker: Worker | None = None) -> Checked:
    """Check an entry. An aspect that this machine cannot check is `unable`, and why. `worker` runs modules (a new one by default)."""
    with nullcontext(worker) if worker is not None else Worker() as runner:
        check = EntryCheck(entry, cache or ArtifactCache(), runner)
        findings = tuple(check.find(level) for level in LEVELS if speed or level != "speed")
        return Checked(entry.key, findings, entry.spec.name, entry.arch, renewed=check.renewed())


class EntryCheck:
    """The check of one entry; `find` returns one aspect, after checking those that it depends on."""

    def __init__(self, entry: Entry, cache: ArtifactCache, worker: Worker) -> None:
        self.entry, self.cache, self.worker = entry, cache, worker
        self._found: dict[Aspect, Finding] = {}
        self.built: list[Artifact] | None = None
        """The modules of the launches as they compile now."""

    def find(self, level: Aspect) -> Finding:
        """The finding of one of LEVELS."""
        if level not in self._found:
            looks = {"source": self._source, "resources": self._resources, "numerics": self._numerics, "speed": self._speed}
            try:
                self._found[level] = looks[level]()
            except Exception as error:  # templates, compilers and modules raise exceptions of many kinds
                message = str(error) or type(error).__name__
                if _of_machine(error):
                    self._found[level] = Finding(level, "unable", message, environment=True)
                else:
                    self._found[level] = Finding(level, "regressed", f"{UNCHECKED[level]}: {message}")
        return self._found[level]

    def renewed(self) -> Entry | None:
        """The entry as it renders and compiles now; None if `get_kernel` would not use it, if it does not compile, or if it is wrong or
        was not verified although this machine has the device.
        """
        source, numbers = self.find("source"), self.find("numerics")
        if source.detail.startswith(PASSED_OVER) or self.built is None:
            return None
        if numbers.status == "regressed" or numbers.environment:
            return None
        on = machine(self.entry.arch)
        renewed = (
            replace(launch, fingerprint=source.fingerprint, artifact=artifact.id, machine=on, resources=artifact.resources)
            for launch, source, artifact in zip(self.entry.launches, self.entry.sources, self.built, strict=True)
        )
        return replace(self.entry, launches=tuple(renewed))

    def _source(self) -> Finding:
        """Whether `get_kernel` would use the entry, and whether it renders to the tokens that were measured."""
        entry = self.entry
        if (reason := stale(entry, entry.arch) or next(iter(misfits(entry)), None)) is not None:
            return Finding("source", "regressed", f"{PASSED_OVER}: {reason}")
        if any(launch.backend == "tilelang" for launch in entry.launches):
            _require_tilelang(entry)
        changed = []
        for index, (launch, source) in enumerate(zip(entry.launches, entry.sources, strict=True)):
            then, now = launch.fingerprint.partition("-"), source.fingerprint.partition("-")
            if then[0] != now[0]:
                return Finding("source", "regressed", f"launch {index} ({launch.backend} {launch.params}) renders differently now")
            changed += [str(index)] if then != now else []
        detail = f"headers of launch {', '.join(changed)} changed since" if changed else ""
        return Finding("source", "changed" if changed else "good", detail)

    def _resources(self) -> Finding:
        """Registers, spills and shared memory of every kernel, against those that the entry recorded."""
        if self.find("source").environment or self.find("source").detail.startswith(NOT_RENDERED):
            return Finding("resources", "unable", "there is no source to compile")
        self.built = [build(source, self.cache) for source in self.entry.sources]
        worse: list[str] = []
        other: list[str] = []
        for launch, artifact in zip(self.entry.launches, self.built, strict=True):
            recorded = launch.resources.kernels if launch.resources else {}
            for name, kernel in artifact.resources.kernels.items():
                for counted in COUNTED:
                    then, now = getattr(recorded.get(name), counted, None), getattr(kernel, counted)
                    if then is not None and then != now:
                        (worse if now > then else other).append(f"{name}: {counted} {then} to {now}")
        return Finding("resources", "regressed" if worse else "changed" if other else "good", "; ".join(worse or other))

    def _numerics(self) -> Finding:
        """Verifies all modules that `get_kernel` may serve: as they compile now, and those that were tuned where these are others."""
        self.find("resources")
        if self.built is None:
            return Finding("numerics", "unable", "there is no module to run")
        if (reason := cannot_run_here(self.entry.arch)) is not None:
            return Finding("numerics", "unable", reason)
        tuned = [tuned_module(*each, self.cache) for each in zip(self.entry.launches, self.entry.sources, strict=True)]
        served = [*enumerate(self.built)]
        served += [(index, one) for index, one in enumerate(tuned) if one and one.sha256 != self.built[index].sha256]
        worst = 0.0
        for index, artifact in served:
            for number, job in enumerate(jobs_of(self.entry, index, artifact, None)):
                outcome = self.worker.run(replace(job, check=CheckPolicy(workloads_only=number > 0)))
                if not outcome.ok:
                    return bad_outcome("numerics", f"launch {index} ({job.workload.key if job.workload else ''})", outcome)
                worst = max(worst, outcome.accuracy.get("relative_l2", 0.0))
        return Finding("numerics", "good", f"relative L2 {worst:.1e}")

    def _speed(self) -> Finding:
        """Times every module that is not the recorded one, on the device that the entry was made on, beside the read roofline: its read
        fraction is compared with the one that the entry recorded.
        """
        entry, numbers = self.entry, self.find("numerics")
        if self.built is None or numbers.status != "good":
            return Finding("speed", "unable", numbers.detail if numbers.status == "unable" else "its numbers are wrong")
        then, now = entry.device.get("name"), here(entry.arch).get("name")
        if then != now or not then:
            on = f"on {then}, and this is {now or 'a machine without such a device'}" if then else "on no device"
            return Finding("speed", "unable", f"it was {entry.made} {on}")
        recorded = {timing.workload.key: timing.read_fraction for timing in entry.timings}
        slower, told = False, list[str]()
        for index, (launch, artifact) in enumerate(zip(entry.launches, self.built, strict=True)):
            if artifact.id == launch.artifact or not launch.workloads:  # nothing was timed that it could be compared with
                continue
            if missing := [key for key in launch.workloads if recorded.get(key) is None]:
                told.append(f"no read was timed beside it at {', '.join(missing)}")
                return Finding("speed", "regressed" if slower else "unable", "; ".join(told))
            for one in self.worker.interleave(jobs_of(entry, index, artifact, READ), ROUNDS):
                if not one.ok:
                    return Finding("speed", "regressed", "; ".join(told)) if slower else bad_outcome("speed", f"launch {index}", one)
                fraction, before = one.read_fraction or 0.0, recorded[one.key[1]] or 0.0
                slower |= fraction < TOLERATED * before
                told.append(f"{one.key[1]}: {fraction:.0%} of a read's speed, {before:.0%} when tuned")
        return Finding("speed", "regressed" if slower else "good", "; ".join(told) or "the modules that won a workload are the same")


def jobs_of(entry: Entry, index: int, artifact: Artifact, timing: TimingPolicy | None) -> list[Job]:
    """Jobs, without verification, for the module of one launch at the workloads that it won; at the spec's first where it won none."""
    launch = entry.launches[index]
    works = [work for work in entry.spec.workloads if work.key in launch.workloads] or entry.spec.workloads[:1]
    return [Job(entry.spec, entry.schedule(launch), entry.arch, artifact.path, work, None, timing) for work in works]


def bad_outcome(aspect: Aspect, what: str, outcome: Measurement) -> Finding:
    """The finding of a failed outcome: lack of memory may be this machine's fault, anything else is the module's."""
    detail = f"{what}: {outcome.kind}: {outcome.detail}"
    return Finding(aspect, "unable", detail, environment=True) if outcome.kind == "oom" else Finding(aspect, "regressed", detail)


def _require_tilelang(entry: Entry) -> None:
    """Raise ToolchainMissing where another TileLang is installed than the one that the entry was lowered with: it may print other text,
    which says nothing of the entry.
    """
    then, now = entry.toolchain.get("tilelang"), "none"
    with suppress(PackageNotFoundError):
        now = version("tilelang")
    if then not in (None, now):
        raise ToolchainMissing(f"it was lowered by TileLang {then}, and the one here is {now}: pip install tilelang=={then}")


def _of_machine(error: BaseException | None) -> bool:
    """Whether an exception, or one that it was raised from, is about this machine: its tools, its disk, its processes."""
    if error is None:
        return False
    if isinstance(error, CompileError):
        found = any(sign in str(error) for sign in BROKEN_COMPILER)
    elif isinstance(error, OSError):  # an absent file is a part of kvgen that is gone
        found = error.errno not in (None, errno.ENOENT, errno.ENOTDIR)
    else:
        found = isinstance(error, (HostError, ToolchainMissing, MeasureError, MemoryError))
    return found or _of_machine(error.__cause__)
