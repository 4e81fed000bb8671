"""Times every module of an entry whose machine code differs from the recorded one.

It is timed side by side with the recorded module, if that is in the cache. Otherwise its read fraction is compared with the one that the
entry recorded.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvgen.measure.measurement import TimingPolicy, compare
from kvgen.measure.worker import Worker
from kvgen.registry.device import here
from kvgen.registry.entry import Entry
from kvgen.toolchain import Artifact, ArtifactCache
from kvgen.toolchain.compilers import machine
from kvgen.toolchain.machine_code import same_machine_code
from kvgen.tune.regression.entry import Finding, Status, bad_outcome, jobs_of

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


def check_speed(entry: Entry, built: Sequence[Artifact], cache: ArtifactCache, worker: Worker) -> Finding:
    """Time every module that differs from the recorded one. Raises MeasureError where no worker can be started."""
    findings = [_check_launch(entry, index, artifact, cache, worker) for index, artifact in enumerate(built)]
    worst: Status = min((finding.status for finding in findings), key=("regressed", "unable", "changed", "good").index)
    told = [finding.detail for finding in findings if finding.status == worst and finding.detail]
    environment = any(finding.environment for finding in findings)
    return Finding("speed", worst, "; ".join(told) or "the same machine code", environment)


def _check_launch(entry: Entry, index: int, artifact: Artifact, cache: ArtifactCache, worker: Worker) -> Finding:
    launch = entry.launches[index]
    if artifact.id == launch.artifact:
        return Finding("speed", "good")
    old = cache.get(launch.artifact) if launch.artifact is not None and launch.machine == machine(entry.arch) else None
    if old is None and not launch.workloads:  # nothing was timed that it could be compared with
        return Finding("speed", "good")
    if old is None:
        return _against_read(entry, index, artifact, worker)
    if old.id == artifact.id or same_machine_code(old.path, artifact.path):
        return Finding("speed", "good")
    return _against_old(entry, index, artifact, old, worker)


def _against_old(entry: Entry, index: int, artifact: Artifact, old: Artifact, worker: Worker) -> Finding:
    """Time the new and the old module side by side; slower beyond noise is a regression."""
    slower, told = False, []
    for jobs in zip(*(jobs_of(entry, index, one, FINAL) for one in (artifact, old)), strict=True):
        new, before = worker.interleave(jobs, ROUNDS)
        if not new.ok:
            return bad_outcome("speed", f"launch {index}", new)
        if not before.ok:
            return Finding(
                "speed", "unable", f"the module that launch {index} was tuned as does not run: {before.detail}", environment=True
            )
        verdict = compare(new.samples, before.samples)
        slower |= verdict.kind == "slower"
        told.append(f"{new.key[1]}: {verdict} than the module it was tuned as")
    return Finding("speed", "regressed" if slower else "good", "; ".join(told))


def _against_read(entry: Entry, index: int, artifact: Artifact, worker: Worker) -> Finding:
    """Without the old module: compare the read fraction with the recorded one."""
    jobs = jobs_of(entry, index, artifact, READ)
    works = [job.workload for job in jobs if job.workload is not None]
    recorded = {work.key: timing.read_fraction for work in works if (timing := entry.timing(work)) is not None}
    if missing := [work.key for work in works if recorded.get(work.key) is None]:
        return Finding("speed", "unable", f"{', '.join(missing)}: the module it was tuned as is gone, and no read was timed beside it")
    slower, told = False, []
    for one in worker.interleave(jobs, ROUNDS):
        if not one.ok:
            return bad_outcome("speed", f"launch {index}", one)
        now, then = one.read_fraction or 0.0, recorded[one.key[1]] or 0.0
        slower |= now < TOLERATED * then
        told.append(f"{one.key[1]}: {now:.0%} of a read's speed, {then:.0%} when tuned")
    return Finding("speed", "regressed" if slower else "good", "; ".join(told))
