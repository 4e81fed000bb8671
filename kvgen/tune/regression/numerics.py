"""Verifies the modules of an entry, each at the workloads of all launches that use it."""

from __future__ import annotations

from collections.abc import Mapping

from kvgen.measure.job import CheckPolicy, Job, Outcome, TimingPolicy
from kvgen.measure.worker import Worker
from kvgen.registry.entry import Entry
from kvgen.toolchain import Artifact
from kvgen.tune.regression.finding import Aspect, Finding


def check_numerics(entry: Entry, built: Mapping[str, Artifact], worker: Worker) -> Finding:
    """Verify every module of an entry. Raises MeasureError if no worker can be started."""
    worst = 0.0
    for file, artifact in built.items():
        job = job_of(entry, file, artifact, CheckPolicy(), None)
        outcome = worker.run(job)
        if not outcome.ok:
            return bad_outcome("numerics", f"{file} ({', '.join(work.key for work in job.workloads)})", outcome)
        worst = max(worst, outcome.accuracy.get("relative_l2", 0.0))
    return Finding("numerics", "good", f"relative L2 {worst:.1e}")


def job_of(entry: Entry, file: str, artifact: Artifact, check: CheckPolicy | None, timing: TimingPolicy | None) -> Job:
    """A job for one source's module at the workloads of all launches that use it."""
    launches = [launch for launch in entry.every_launch if launch.file == file]
    workloads = tuple(launch.workload for launch in launches)
    return Job(entry.spec, entry.schedule(launches[0]), entry.arch, artifact.path, workloads, check, timing)


def bad_outcome(aspect: Aspect, what: str, outcome: Outcome) -> Finding:
    """The finding of a failed outcome: lack of memory may be this machine's fault, anything else is the module's."""
    detail = f"{what}: {outcome.kind}: {outcome.detail}"
    return Finding(aspect, "unable", detail, environment=True) if outcome.kind == "oom" else Finding(aspect, "regressed", detail)
