"""Verifies the modules of an entry, each at the workloads of all launches that use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvgen.measure.measurement import Job, Measurement, TimingPolicy
from kvgen.measure.worker import Worker
from kvgen.registry.entry import Entry
from kvgen.toolchain import Artifact
from kvgen.tune.regression.finding import Aspect, Finding
from kvgen.verify import CheckPolicy


def check_numerics(entry: Entry, built: Mapping[str, Artifact], worker: Worker) -> Finding:
    """Verify every module of an entry. Raises MeasureError if no worker can be started."""
    worst = 0.0
    for file, artifact in built.items():
        for number, job in enumerate(jobs_of(entry, file, artifact, None)):
            outcome = worker.run(replace(job, check=CheckPolicy(workloads_only=number > 0)))
            if not outcome.ok:
                return bad_outcome("numerics", f"{file} ({job.workload.key if job.workload else ''})", outcome)
            worst = max(worst, outcome.accuracy.get("relative_l2", 0.0))
    return Finding("numerics", "good", f"relative L2 {worst:.1e}")


def jobs_of(entry: Entry, file: str, artifact: Artifact, timing: TimingPolicy | None) -> list[Job]:
    """Jobs for one source's module at the workloads of all launches that use it, without verification."""
    launches = [launch for launch in entry.every_launch if launch.file == file]
    return [Job(entry.spec, entry.schedule(one), entry.arch, artifact.path, one.workload, None, timing) for one in launches]


def bad_outcome(aspect: Aspect, what: str, outcome: Measurement) -> Finding:
    """The finding of a failed outcome: lack of memory may be this machine's fault, anything else is the module's."""
    detail = f"{what}: {outcome.kind}: {outcome.detail}"
    return Finding(aspect, "unable", detail, environment=True) if outcome.kind == "oom" else Finding(aspect, "regressed", detail)
