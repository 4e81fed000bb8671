"""Times every module of an entry that is not the recorded one.

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
from kvgen.tune.regression.entry import Finding, Status, bad_outcome, jobs_of

FINAL = TimingPolicy(seconds=0.1, samples=15)
READ = TimingPolicy(seconds=0.1, samples=15, read=True)
ROUNDS = 11
TOLERATED = 0.9
"""Least fraction of the recorded read fraction that is not a regression."""
SEVERITY: tuple[Status, ...] = ("regressed", "unable", "changed", "good")


def check_speed(entry: Entry, built: Sequence[Artifact], cache: ArtifactCache, worker: Worker) -> Finding:
    """Time every module that differs from the recorded one, on the device that the entry was made on. Raises MeasureError where no worker
    can be started.
    """
    then, now = entry.device.get("name"), here(entry.arch).get("name")
    if then != now or not then:
        on = f"on {then}, and this is {now or 'a machine without such a device'}" if then else "on no device"
        return Finding("speed", "unable", f"it was {entry.made} {on}")
    findings = []
    for index, (launch, artifact) in enumerate(zip(entry.launches, built, strict=True)):
        old = cache.get(launch.artifact) if launch.artifact is not None and launch.machine == machine(entry.arch) else None
        if artifact.id == launch.artifact or (old is None and not launch.workloads):  # nothing was timed that it could be compared with
            continue
        findings.append(_against_old(entry, index, artifact, old, worker) if old else _against_read(entry, index, artifact, worker))
    worst = min((finding.status for finding in findings), key=SEVERITY.index, default=SEVERITY[-1])
    told = [finding.detail for finding in findings if finding.status == worst]
    return Finding("speed", worst, "; ".join(told) or "the same modules", any(finding.environment for finding in findings))


def _against_old(entry: Entry, index: int, artifact: Artifact, old: Artifact, worker: Worker) -> Finding:
    """Time the new and the old module side by side; slower beyond noise is a regression."""
    slower, told = False, []
    for jobs in zip(*(jobs_of(entry, index, one, FINAL) for one in (artifact, old)), strict=True):
        new, before = worker.interleave(jobs, ROUNDS)
        if not new.ok:
            return bad_outcome("speed", f"launch {index}", new)
        if not before.ok:
            reason = f"the module that launch {index} was tuned as does not run: {before.detail}"
            return Finding("speed", "unable", reason, environment=True)
        verdict = compare(new.samples, before.samples)
        slower |= verdict.kind == "slower"
        told.append(f"{new.key[1]}: {verdict} than the module it was tuned as")
    return Finding("speed", "regressed" if slower else "good", "; ".join(told))


def _against_read(entry: Entry, index: int, artifact: Artifact, worker: Worker) -> Finding:
    """Without the old module: compare the read fraction with the recorded one."""
    jobs = jobs_of(entry, index, artifact, READ)
    recorded = {timing.workload.key: timing.read_fraction for timing in entry.timings}
    if missing := [job.workload.key for job in jobs if job.workload is not None and recorded.get(job.workload.key) is None]:
        return Finding("speed", "unable", f"{', '.join(missing)}: the module it was tuned as is gone, and no read was timed beside it")
    slower, told = False, []
    for one in worker.interleave(jobs, ROUNDS):
        if not one.ok:
            return bad_outcome("speed", f"launch {index}", one)
        now, then = one.read_fraction or 0.0, recorded[one.key[1]] or 0.0
        slower |= now < TOLERATED * then
        told.append(f"{one.key[1]}: {now:.0%} of a read's speed, {then:.0%} when tuned")
    return Finding("speed", "regressed" if slower else "good", "; ".join(told))
