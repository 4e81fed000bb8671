"""The check of one entry: an aspect is a finding, and all findings are one verdict."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Literal

from pydantic import Field, computed_field

from kvgen.errors import CompileError, HostError, MeasureError, ToolchainMissing
from kvgen.measure.measurement import Job, Measurement, TimingPolicy
from kvgen.measure.worker import Worker
from kvgen.plaindata import Json
from kvgen.registry.entry import Entry
from kvgen.registry.modules import tuned_module
from kvgen.registry.select import misfits, stale
from kvgen.runtime.device import cannot_run_here
from kvgen.toolchain import Artifact, ArtifactCache, build
from kvgen.toolchain.compilers import machine
from kvgen.tune.regression.claims import impossible
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


@dataclass(frozen=True)
class Finding(Json):
    """One aspect: unchanged (`good`), different and no worse (`changed`), worse (`regressed`), not checked (`unable`), or of a file that
    cannot be read as an entry, or says what cannot be (`damaged`).

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

    `renewed` is the entry that `--accept` would write: the same schedules, rendered and compiled here. It is None where
    `get_kernel` would pass the entry over, and where the entry does not compile or is wrong.
    """

    key: str
    findings: tuple[Finding, ...]
    spec: str = ""
    arch: str = ""
    entry: Annotated[Entry | None, Field(exclude=True)] = field(default=None, repr=False)
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


def check_entry(entry: Entry, cache: ArtifactCache | None = None, *, speed: bool = False, worker: Worker | None = None) -> Checked:
    """Check an entry. An aspect that this machine cannot check is `unable`, and why. `worker` runs modules (a new one by default)."""
    with nullcontext(worker) if worker is not None else Worker() as runner:
        check = EntryCheck(entry, cache or ArtifactCache(), runner)
        findings = tuple(check.find(level) for level in LEVELS if speed or level != "speed")
        return Checked(entry.key, findings, entry.spec.name, entry.arch, entry, check.renewed())


class EntryCheck:
    """The check of one entry; `find` returns one aspect, after checking those that it depends on."""

    def __init__(self, entry: Entry, cache: ArtifactCache, worker: Worker) -> None:
        self.entry = entry
        self._cache, self._worker = cache, worker
        self._found: dict[Aspect, Finding] = {}
        self._built: list[Artifact] | None = None

    def find(self, level: Aspect) -> Finding:
        """The finding of one of LEVELS."""
        if level not in self._found:
            looks = {"source": self._source, "resources": self._resources, "numerics": self._numerics, "speed": self._speed}
            unchecked = {
                "source": "it does not render any more",
                "resources": "it does not compile any more",
                "numerics": "it cannot be verified any more",
                "speed": "it cannot be timed any more",
            }
            try:
                self._found[level] = looks[level]()
            except Exception as error:  # templates, compilers and modules raise exceptions of many kinds
                message = str(error) or type(error).__name__
                machine_failed = _of_machine(error)
                detail = message if machine_failed else f"{unchecked[level]}: {message}"
                self._found[level] = Finding(level, "unable" if machine_failed else "regressed", detail, environment=machine_failed)
        return self._found[level]

    def renewed(self) -> Entry | None:
        """The entry as it renders and compiles now; None if `get_kernel` would not use it, if it is damaged or does not compile, or if it
        is wrong or was not verified although this machine has the device.
        """
        source, numbers = self.find("source"), self.find("numerics")
        unusable = source.status == "damaged" or source.detail.startswith(PASSED_OVER) or self._built is None
        if unusable or numbers.status == "regressed" or numbers.environment:
            return None
        on = machine(self.entry.arch)
        renewed = (
            replace(launch, fingerprint=source.fingerprint, artifact=artifact.id, machine=on, resources=artifact.resources)
            for launch, source, artifact in zip(self.entry.launches, self.entry.sources, self._built or (), strict=True)
        )
        return replace(self.entry, launches=tuple(renewed))

    def _source(self) -> Finding:
        """Whether `get_kernel` would use the entry, and whether it renders to the tokens that were measured."""
        entry = self.entry
        if (reason := impossible(entry)) is not None:
            return Finding("source", "damaged", reason)
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
        source = self.find("source")
        try:
            sources = self.entry.sources
        except Exception:
            return Finding("resources", "unable", "there is no source to compile")
        if source.environment:
            return Finding("resources", "unable", "there is no source to compile")
        self._built = [build(source, self._cache) for source in sources]
        worse: list[str] = []
        other: list[str] = []
        for launch, artifact in zip(self.entry.launches, self._built, strict=True):
            recorded = launch.resources.kernels if launch.resources else {}
            for name, kernel in artifact.resources.kernels.items():
                for counted in COUNTED:
                    then, now = getattr(recorded.get(name), counted, None), getattr(kernel, counted)
                    if then is not None and then != now:
                        (worse if now > then else other).append(f"{name}: {counted} {then} to {now}")
        status: Status = "regressed" if worse else "changed" if other else "good"
        return Finding("resources", status, "; ".join(worse or other))

    def _numerics(self) -> Finding:
        """Verifies all modules that `get_kernel` may serve: as they compile now, and those that were tuned where these are others."""
        self.find("resources")
        if self._built is None:
            return Finding("numerics", "unable", "there is no module to run")
        if (reason := cannot_run_here(self.entry.arch)) is not None:
            return Finding("numerics", "unable", reason)
        found = check_numerics(self.entry, self._built, self._worker)
        tuned = [tuned_module(*each, self._cache) for each in zip(self.entry.launches, self.entry.sources, strict=True)]
        others = [one if one and one.sha256 != now.sha256 else None for one, now in zip(tuned, self._built, strict=True)]
        return check_numerics(self.entry, others, self._worker) if found.status == "good" and any(others) else found

    def _speed(self) -> Finding:
        from kvgen.tune.regression.speed import check_speed, other_device

        numbers = self.find("numerics")
        if self._built is None or numbers.status != "good":
            return Finding("speed", "unable", numbers.detail if numbers.status == "unable" else "its numbers are wrong")
        if (reason := other_device(self.entry)) is not None:
            return Finding("speed", "unable", reason)
        return check_speed(self.entry, self._built, self._cache, self._worker)


PASSED_OVER = "get_kernel passes it over"


def _require_tilelang(entry: Entry) -> None:
    """Raise ToolchainMissing where another TileLang is installed than the one that the entry was lowered with: it may print other text,
    which says nothing of the entry.
    """
    then = entry.toolchain.get("tilelang")
    try:
        now = version("tilelang")
    except PackageNotFoundError:
        now = "none"
    if then is not None and then != now:
        raise ToolchainMissing(f"it was lowered by TileLang {then}, and the one here is {now}: pip install tilelang=={then}")


def check_numerics(entry: Entry, modules: Sequence[Artifact | None], worker: Worker) -> Finding:
    """Verify modules of an entry's launches, in their order; None is passed over. Raises MeasureError if no worker can be started."""
    worst = 0.0
    for index, artifact in enumerate(modules):
        for number, job in enumerate(jobs_of(entry, index, artifact, None) if artifact is not None else ()):
            outcome = worker.run(replace(job, check=CheckPolicy(workloads_only=number > 0)))
            if not outcome.ok:
                return bad_outcome("numerics", f"launch {index} ({job.workload.key if job.workload else ''})", outcome)
            worst = max(worst, outcome.accuracy.get("relative_l2", 0.0))
    return Finding("numerics", "good", f"relative L2 {worst:.1e}")


def jobs_of(entry: Entry, index: int, artifact: Artifact, timing: TimingPolicy | None) -> list[Job]:
    """Jobs, without verification, for the module of one launch at the workloads that it won; at the spec's first where it won none."""
    launch = entry.launches[index]
    works = [work for work in entry.spec.workloads if work.key in launch.workloads] or entry.spec.workloads[:1]
    return [Job(entry.spec, entry.schedule(launch), entry.arch, artifact.path, work, None, timing) for work in works]


def bad_outcome(aspect: Aspect, what: str, outcome: Measurement) -> Finding:
    """The finding of a failed outcome: lack of memory may be this machine's fault, anything else is the module's."""
    detail = f"{what}: {outcome.kind}: {outcome.detail}"
    return Finding(aspect, "unable", detail, environment=True) if outcome.kind == "oom" else Finding(aspect, "regressed", detail)


def _of_machine(error: BaseException) -> bool:
    """Whether an exception, or one that it was raised from, is about this machine: its tools, its disk, its processes."""
    return any(_is_of_machine(one) for one in _chain(error))


def _is_of_machine(error: BaseException) -> bool:
    if isinstance(error, CompileError):
        return any(sign in str(error) for sign in BROKEN_COMPILER)
    if isinstance(error, OSError):  # an absent file is a part of kvgen that is gone
        return error.errno not in (None, errno.ENOENT, errno.ENOTDIR)
    return isinstance(error, (HostError, ToolchainMissing, MeasureError, MemoryError))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
