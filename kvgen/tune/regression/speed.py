"""Times every module of an entry whose machine code differs from the recorded one.

It is timed side by side with the recorded module, if that is in the cache or can be compiled from the recorded source with unchanged
headers. Otherwise its read fraction is compared with the one that the entry recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from kvgen.errors import ToolchainMissing
from kvgen.measure.measurement import TimingPolicy, compare
from kvgen.measure.worker import Worker
from kvgen.registry.device import here
from kvgen.registry.entry import Entry
from kvgen.toolchain import Artifact, ArtifactCache, build
from kvgen.toolchain.compilers import machine
from kvgen.toolchain.machine_code import same_machine_code
from kvgen.tune.regression.finding import Finding, Status
from kvgen.tune.regression.numerics import bad_outcome, jobs_of

FINAL = TimingPolicy(seconds=0.1, samples=15)
READ = TimingPolicy(seconds=0.1, samples=15, read=True)
ROUNDS = 11
TOLERATED = 0.9
"""Least fraction of the recorded read fraction that is not a regression."""


def other_device(entry: Entry) -> str | None:
    """The reason why the entry's times do not apply here; None on the device that it was made on."""
    then, now = entry.device.get("name"), here(entry.arch).get("name")
    if not then:
        return f"it was {entry.made} on no device"
    return None if then == now else f"it was {entry.made} on {then}, and this is {now or 'a machine without such a device'}"


def check_speed(entry: Entry, built: Mapping[str, Artifact], cache: ArtifactCache, worker: Worker) -> Finding:
    """Time every module that differs from the recorded one. Raises MeasureError where no worker can be started."""
    findings = [_check_file(entry, file, artifact, cache, worker) for file, artifact in built.items()]
    worst: Status = min((finding.status for finding in findings), key=("regressed", "unable", "changed", "good").index)
    told = [finding.detail for finding in findings if finding.status == worst and finding.detail]
    environment = any(finding.environment for finding in findings)
    return Finding("speed", worst, "; ".join(told) or "the same machine code", environment)


def _check_file(entry: Entry, file: str, artifact: Artifact, cache: ArtifactCache, worker: Worker) -> Finding:
    if artifact.id == entry.codes[file].artifact:
        return Finding("speed", "good")
    old = _recorded(entry, file, cache)
    if old is None:
        return _against_read(entry, file, artifact, worker)
    if old.id == artifact.id or same_machine_code(old.path, artifact.path):
        return Finding("speed", "good")
    return _against_old(entry, file, artifact, old, worker)


def _recorded(entry: Entry, file: str, cache: ArtifactCache) -> Artifact | None:
    """The module that the entry recorded, or one compiled from its source and headers; None if neither is available."""
    code = entry.codes[file]
    if code.artifact is not None and code.machine == machine(entry.arch):
        artifact = cache.get(code.artifact)
        if artifact is not None:
            return artifact
    source = entry.source(code)
    if source is not None:
        with suppress(ToolchainMissing):
            return build(source, cache)
    return None


def _against_old(entry: Entry, file: str, artifact: Artifact, old: Artifact, worker: Worker) -> Finding:
    """Time the new and the old module side by side; slower beyond noise is a regression."""
    slower, told = False, []
    for jobs in zip(*(jobs_of(entry, file, one, FINAL) for one in (artifact, old)), strict=True):
        new, before = worker.interleave(jobs, ROUNDS)
        if not new.ok:
            return bad_outcome("speed", file, new)
        if not before.ok:
            return Finding("speed", "unable", f"the module that {file} was tuned as does not run: {before.detail}", environment=True)
        verdict = compare(new.samples, before.samples)
        slower |= verdict.kind == "slower"
        told.append(f"{new.key[1]}: {verdict} than the module it was tuned as")
    return Finding("speed", "regressed" if slower else "good", "; ".join(told))


def _against_read(entry: Entry, file: str, artifact: Artifact, worker: Worker) -> Finding:
    """Without the old module: compare the read fraction with the recorded one."""
    jobs = jobs_of(entry, file, artifact, READ)
    works = [job.workload for job in jobs if job.workload is not None]
    recorded = {work.key: timing.read_fraction for work in works if (timing := entry.timing(work)) is not None}
    if missing := [work.key for work in works if recorded.get(work.key) is None]:
        return Finding("speed", "unable", f"{', '.join(missing)}: the module it was tuned as is gone, and no read was timed beside it")
    slower, told = False, []
    for one in worker.interleave(jobs, ROUNDS):
        if not one.ok:
            return bad_outcome("speed", file, one)
        now, then = one.read_fraction or 0.0, recorded[one.key[1]] or 0.0
        slower |= now < TOLERATED * then
        told.append(f"{one.key[1]}: {now:.0%} of a read's speed, {then:.0%} when tuned")
    return Finding("speed", "regressed" if slower else "good", "; ".join(told))
