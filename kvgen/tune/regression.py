"""Does an entry still hold? Its source rendered anew, its resources, its numbers and, on its own device, its speed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvgen.errors import CompileError, KvgenError, ToolchainMissing
from kvgen.lower.backends import get_backend
from kvgen.lower.base import Source
from kvgen.measure.finalists import interleave
from kvgen.measure.job import CheckPolicy, Job, TimingPolicy
from kvgen.measure.verdict import compare
from kvgen.measure.worker import Worker
from kvgen.registry.device import here
from kvgen.registry.entry import Code, Entry, Launch
from kvgen.spec import Workload
from kvgen.spec.target import gpu_capability
from kvgen.toolchain import Artifact, ArtifactCache, build
from kvgen.toolchain.artifact import Resources

Status = Literal["good", "changed", "regressed", "skipped"]
FINDINGS = ("source", "resources", "numerics", "speed")
FINAL = TimingPolicy(seconds=0.1, samples=15)
ROUNDS = 11


@dataclass(frozen=True)
class Finding:
    """One aspect of an entry. `changed` is for a look, `regressed` for a fix."""

    aspect: str
    status: Status
    detail: str = ""


@dataclass(frozen=True)
class Checked:
    """Findings of an entry, and the entry that `--accept` would write: the same schedules, rendered and compiled here.

    None where they do not compile, or are wrong.
    """

    entry: Entry
    findings: tuple[Finding, ...]
    renewed: Entry | None

    @property
    def regressed(self) -> bool:
        """Whether anything is worse than when the entry was made."""
        return any(finding.status == "regressed" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "key": self.entry.key,
            "spec": self.entry.spec.name,
            "arch": self.entry.arch,
            "regressed": self.regressed,
            "findings": [{"aspect": f.aspect, "status": f.status, "detail": f.detail} for f in self.findings],
        }


def check_entry(entry: Entry, cache: ArtifactCache | None = None, *, speed: bool = False) -> Checked:
    """Check an entry; what this machine cannot do is skipped by name. Sources that differ from what renders now regress."""
    cache = cache or ArtifactCache()
    try:
        rendered = _render(entry)
    except KvgenError as error:
        return Checked(entry, (Finding("source", "skipped", str(error)),), None)
    findings = [_source(entry, rendered)]
    try:
        built = {file: build(source, cache) for file, source in rendered.items()}
    except ToolchainMissing as error:
        return Checked(entry, (*findings, Finding("resources", "skipped", str(error))), None)
    except CompileError as error:
        return Checked(entry, (*findings, Finding("resources", "regressed", f"it does not compile any more: {error}")), None)
    findings.append(_resources(entry, {file: artifact.resources for file, artifact in built.items()}))
    reason = _cannot_run(entry)
    if reason is not None:
        findings.append(Finding("numerics", "skipped", reason))
    else:
        with Worker() as worker:
            findings.append(_numerics(entry, built, worker))
            if speed:
                findings.append(_speed(entry, rendered, built, cache, worker))
    wrong = any(finding.aspect == "numerics" and finding.status == "regressed" for finding in findings)
    return Checked(entry, tuple(findings), None if wrong else _renew(entry, rendered, built))


def _render(entry: Entry) -> dict[str, Source]:
    """Sources as they render now, by the file name of the entry's own."""
    return {launch.file: get_backend(launch.backend).lower(entry.spec, entry.schedule(launch), entry.arch) for launch in entry.launches}


def _source(entry: Entry, rendered: Mapping[str, Source]) -> Finding:
    for file, source in rendered.items():
        old, new = entry.codes[file], Code.of(source)
        if old.text != new.text:
            return Finding("source", "regressed", f"{file} renders differently now (line {_first_difference(old.text, new.text)})")
        if old.flags != new.flags:
            return Finding("source", "regressed", f"{file} is compiled with other flags now")
        if old.headers_digest != new.headers_digest:
            return Finding("source", "changed", f"headers of {file} changed since")
    return Finding("source", "good")


def _first_difference(old: str, new: str) -> int:
    pairs = zip(old.splitlines(), new.splitlines(), strict=False)
    shorter = min(len(old.splitlines()), len(new.splitlines()))
    return next((number for number, (a, b) in enumerate(pairs, 1) if a != b), shorter + 1)


def _resources(entry: Entry, now: Mapping[str, Resources]) -> Finding:
    worse: list[str] = []
    other: list[str] = []
    for file, resources in now.items():
        old = entry.codes[file].resources
        for name, kernel in resources.kernels.items():
            before = old.kernels.get(name) if old else None
            for field in ("registers", "spill_bytes", "shared_bytes"):
                then, value = getattr(before, field, None), getattr(kernel, field)
                if then is not None and then != value:
                    (worse if value > then else other).append(f"{name}: {field} {then} to {value}")
    if worse:
        return Finding("resources", "regressed", "; ".join(worse))
    return Finding("resources", "changed" if other else "good", "; ".join(other))


def _cannot_run(entry: Entry) -> str | None:
    if entry.arch == "cpu":
        return None
    capability = gpu_capability()
    if capability is None:
        return "no NVIDIA GPU is visible"
    if entry.arch != "sm80" and 10 * capability[0] + capability[1] < int(entry.arch[2:]):
        return f"the GPU here does not run {entry.arch} code"
    return None


def _numerics(entry: Entry, built: Mapping[str, Artifact], worker: Worker) -> Finding:
    worst = 0.0
    for file, launch in {launch.file: launch for launch in entry.launches}.items():
        job = Job(entry.spec, entry.schedule(launch), entry.arch, built[file].path, (launch.workload,), CheckPolicy(), None)
        outcome = worker.run(job)
        if not outcome.ok:
            return Finding("numerics", "regressed", f"{launch.workload.key}: {outcome.kind}: {outcome.detail}")
        worst = max(worst, outcome.accuracy.get("relative_l2", 0.0))
    return Finding("numerics", "good", f"relative L2 {worst:.1e}")


def _speed(entry: Entry, rendered: Mapping[str, Source], built: Mapping[str, Artifact], cache: ArtifactCache, worker: Worker) -> Finding:
    """Old against new, taking turns; where the source is the same there is nothing to compare."""
    if entry.device.get("name") != here(entry.arch).get("name"):
        return Finding("speed", "skipped", f"it was tuned on {entry.device.get('name')}")
    told = []
    for launch in entry.launches:
        old = entry.codes[launch.file].source(entry.arch)
        if old is None:
            return Finding("speed", "skipped", "the headers that it was tuned with are gone")
        if old.id == rendered[launch.file].id:
            continue
        jobs = [_timed(entry, launch, artifact) for artifact in (built[launch.file], build(old, cache))]
        new, before = interleave(jobs, ROUNDS, worker=worker)
        if not (new.ok and before.ok):
            return Finding("speed", "regressed", f"{launch.workload.key}: {new.detail or before.detail}")
        verdict = compare(new.timings[0].samples, before.timings[0].samples)
        told.append(f"{launch.workload.key}: {verdict}")
        if verdict.kind == "slower":
            return Finding("speed", "regressed", told[-1])
    return Finding("speed", "good", "; ".join(told) or "the same source")


def _timed(entry: Entry, launch: Launch, artifact: Artifact) -> Job:
    return Job(entry.spec, entry.schedule(launch), entry.arch, artifact.path, (launch.workload,), None, FINAL)


def _renew(entry: Entry, rendered: Mapping[str, Source], built: Mapping[str, Artifact]) -> Entry:
    launches: list[tuple[Workload, Any, Source, Artifact | None]] = [
        (launch.workload, entry.schedule(launch), rendered[launch.file], built[launch.file]) for launch in entry.launches
    ]
    fresh = Entry.of(entry.spec, entry.arch, entry.layout_id, launches, device=entry.device)
    return replace(entry, launches=fresh.launches, codes=fresh.codes)
