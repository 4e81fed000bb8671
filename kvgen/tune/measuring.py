"""Compiles and measures candidates: compilers run in parallel, ahead of the devices that measure, each in a worker process, so that a
candidate that crashes or hangs costs one measurement.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Lock, Semaphore
from typing import Any

from filelock import FileLock, Timeout

from kvgen._machine import available_bytes, cores, gpu_uuid, named_gpus, visible_gpus
from kvgen.arch import Target
from kvgen.errors import MeasureError, host_errors
from kvgen.lower.backend import Sources
from kvgen.lower.schedule import Schedule
from kvgen.measure.measurement import Candidate, Job, Key, Measurement, TimingPolicy, VerdictKind, compare, fingerprint
from kvgen.measure.worker import Worker
from kvgen.plaindata import Facts
from kvgen.spec import AnySpec
from kvgen.toolchain import Artifact, ArtifactCache
from kvgen.toolchain import compile as compiling
from kvgen.toolchain.compile import CompilePool
from kvgen.verify import CheckPolicy

CPU_SEARCH = TimingPolicy(seconds=0.2)
CUDA_SEARCH = TimingPolicy(seconds=0.05, warmup_seconds=0.02)
FINAL = TimingPolicy(seconds=0.05, warmup_seconds=0.01, samples=15, read=True)
ROUNDS = 15
"""Rounds of the final, where there is time."""
ROUND_SECONDS = 0.15
"""About what a finalist takes at one workload in a round, with its share of the reads and rests."""
CLEAR = 0.01
"""Relative gain that counts as faster: samples of one round are paired, so 1 % is distinguishable from noise."""
TIMEOUT_S = 60.0
WAIT_S = 0.2
"""Seconds after which a wait for another process's measurement looks whether the build has ended."""

Passed = tuple[str, str]
"""(sha256 of a compiled module, key of a workload)."""
Outcome = Measurement | BaseException | None
"""A measurement, what ended it, or nothing where there was no time left for it."""


class CompileQueue(CompilePool):
    """Modules of schedules, each compiled once. `exclusive`: compilers rest while something is measured, which they would disturb."""

    def __init__(self, sources: Sources, cache: ArtifactCache, *, exclusive: bool) -> None:
        super().__init__()
        self._sources, self._cache, self._exclusive = sources, cache, exclusive
        self._jobs: dict[str, Future[Artifact]] = {}
        self._permits, self._resting = Semaphore(self.workers), Lock()

    def start(self, schedule: Schedule) -> Future[Artifact]:
        """Queue a schedule, unless it was queued before."""
        if schedule.id not in self._jobs:
            self._jobs[schedule.id] = self.submit(self._compile, schedule)
        return self._jobs[schedule.id]

    def artifact(self, schedule: Schedule) -> Artifact:
        """The compiled schedule; waits for it. Raises CompileError, CompilerCrash, UnsupportedError, ToolchainMissing or HostError."""
        return self.start(schedule).result()

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """A context in which nothing is compiled. It begins when the compilers that run have ended; no further one starts before."""
        if not self._exclusive:
            yield
            return
        # no further compiler starts, and no other measurement takes permits in turns with this one
        with self._resting, ExitStack() as taken:
            for _ in range(self.workers):  # Ctrl-C while the last compilers end gives back what was taken
                self._permits.acquire()
                taken.callback(self._permits.release)
            yield

    def _compile(self, schedule: Schedule) -> Artifact:
        with self._resting:  # or compilers that follow each other would leave no turn to what waits for all permits
            self._permits.acquire()
        try:
            return compiling.build(self._sources.of(schedule), self._cache)
        finally:
            self._permits.release()


class Pipeline:
    """Candidates on their way: they are compiled, wait for a device, and are measured, what is compiled first at first."""

    def __init__(self, queue: CompileQueue, runner: Runner, time_for: Callable[[Candidate], float]) -> None:
        """`time_for` says how many seconds there are for a compiled candidate: one that takes longer is ended, and has no outcome."""
        self._queue, self._runner, self._time_for = queue, runner, time_for
        self.width = 2 * max(queue.workers, runner.devices)
        """Candidates that keep all compilers and devices busy."""
        self.inside: dict[Key, Candidate] = {}
        self._threads = ThreadPoolExecutor(self.width, "measure")
        self._outcomes: SimpleQueue[tuple[Candidate, Outcome]] = SimpleQueue()
        self._idle: SimpleQueue[int] = SimpleQueue()
        for device in range(runner.devices):
            self._idle.put(device)
        self._ended = Event()

    def start(self, candidate: Candidate) -> None:
        """Begin with a candidate."""
        self.inside[candidate.key] = candidate
        self._queue.start(candidate.schedule)
        self._threads.submit(self._run, candidate)

    def next(self, seconds: float | None) -> tuple[Candidate, Outcome] | None:
        """The next candidate that is done; None if `seconds` pass without one."""
        try:
            candidate, outcome = self._outcomes.get(timeout=seconds)
        except Empty:
            return None
        del self.inside[candidate.key]
        return candidate, outcome

    def end(self) -> list[Measurement]:
        """End what is compiled, wait for what is measured, and return its records."""
        self.stop()
        idle = [self._idle.get() for _ in range(self._runner.devices)]
        outcomes = [self._outcomes.get()[1] for _ in range(self._outcomes.qsize())]
        for device in idle:  # threads that wait for one must end
            self._idle.put(device)
        return [outcome for outcome in outcomes if isinstance(outcome, Measurement)]

    def stop(self) -> None:
        """End what is compiled; nothing further is measured."""
        self._ended.set()
        self._queue.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, candidate: Candidate) -> None:
        device: int | None = None
        outcome: Outcome = None
        try:
            artifact = self._queue.artifact(candidate.schedule)
            with self._queue.at_rest():
                device = self._idle.get()
                if (seconds := self._time_for(candidate)) > 0 and not self._ended.is_set():
                    outcome = self._runner.measure(candidate, artifact, device, seconds)
        except BaseException as error:
            outcome = error
        self._outcomes.put((candidate, outcome))
        if device is not None:
            self._idle.put(device)


class Runner:
    """Verifies and times compiled candidates in killable workers.

    Of the processes that share a folder of locks, only one measures on a device at a time.
    """

    def __init__(
        self,
        spec: AnySpec,
        target: Target,
        locks: Path,
        devices: Sequence[int] | None = None,
        *,
        memory_bytes: int | None = None,
        timeout_s: float = TIMEOUT_S,
        check: CheckPolicy | None = None,
    ) -> None:
        """`devices` are GPU indices among the visible ones; None means the current device. Lock files go to `locks`.

        A candidate may take `memory_bytes` of host memory (half of what is free by default) and `timeout_s` per stage.
        Raises KvgenError for a GPU that is not visible.
        """
        self._spec, self._target, self._timeout_s, self._check = spec, target, timeout_s, check or CheckPolicy()
        self.passed: dict[Passed, Facts] = {}
        """What was verified by this runner, with its errors; no measurement of another build is in it."""
        self._verified: dict[str, Mapping[str, float]] = {}
        """Errors by sha256: checks that do not depend on the workload run once."""
        self._verifying: dict[str, Lock] = {}
        self._closed = Event()
        self.exclusive = target == "cpu"
        """Whether compilers must rest while a candidate is measured."""
        visible = [] if self.exclusive else visible_gpus()
        names: Sequence[str | None] = named_gpus(devices) if devices and not self.exclusive else visible[:1] or [None]
        self.devices = len(names)
        """Candidates that can be measured at the same time."""
        self._search = CPU_SEARCH if self.exclusive else CUDA_SEARCH
        self.policy: Mapping[str, Any] = {"device": fingerprint(target), "timing": asdict(self._search), "check": asdict(self._check)}
        """Part of every study's name."""
        memory_bytes = memory_bytes if memory_bytes is not None else available_bytes() // (1 + self.devices)
        self._workers = [Worker(memory_bytes, _environment(name if devices else None, len(names))) for name in names]
        self._locks = [locks / f"measure-{target if name is None else gpu_uuid(name)}.lock" for name in names]

    def measure(self, candidate: Candidate, artifact: Artifact, device: int, seconds: float = math.inf) -> Measurement | None:
        """Verify, then time. A crash, a hang or a wrong result of the candidate becomes its record; None where it takes longer than
        `seconds`. A device that measures a module which another one verifies now waits for its verdict.
        """
        with suppress(TimeoutError):
            return self._judged(candidate, artifact, device, self._search, seconds)
        return None

    def verify(self, candidate: Candidate, artifact: Artifact) -> Measurement:
        """Verify on the first device without timing, unless this runner has verified the module at this workload already."""
        accuracy = self.passed.get((artifact.sha256, candidate.workload.key))
        if accuracy is None:
            return self._judged(candidate, artifact, 0, None)
        return candidate.measured("ok", accuracy=accuracy, resources=artifact.resources.to_json(), module=artifact.sha256)

    def _judged(
        self, candidate: Candidate, artifact: Artifact, device: int, timing: TimingPolicy | None, seconds: float = math.inf
    ) -> Measurement:
        module = artifact.sha256
        with self._verifying.setdefault(module, Lock()) if module not in self._verified else nullcontext():
            before = self._verified.get(module, {})
            job = self._job(candidate, artifact, timing, replace(self._check, workloads_only=module in self._verified))
            with self._locked(device):
                outcome = self._workers[device].run(job, self._timeout_s, seconds)
            accuracy = {name: max(before.get(name, 0.0), outcome.accuracy.get(name, 0.0)) for name in {**before, **outcome.accuracy}}
            if outcome.ok:
                self._verified[module] = self.passed[module, candidate.workload.key] = accuracy
        return _of(candidate, artifact, replace(outcome, accuracy=accuracy))

    def final(self, entrants: Sequence[tuple[Candidate, Artifact]], seconds: float | None) -> list[Measurement]:
        """Time verified candidates A B C A B C … on the first device, so that drift of the machine affects all alike. Takes about `seconds`
        where given, but at least a few rounds. A finalist that fails is out.
        """
        jobs = [self._job(candidate, artifact, FINAL, None) for candidate, artifact in entrants]
        with self._locked(0):
            outcomes = self._workers[0].interleave(jobs, ROUNDS, self._timeout_s, seconds=seconds)
        return [_of(candidate, artifact, outcome) for (candidate, artifact), outcome in zip(entrants, outcomes, strict=True)]

    def compare(self, new: Measurement, old: Measurement) -> VerdictKind:
        """How `new` compares with `old`, beyond noise."""
        return compare(new.samples, old.samples, min_effect=CLEAR).kind

    def close(self) -> None:
        """Kill all workers. A thread that waits for a device gives up, too."""
        self._closed.set()
        for worker in self._workers:
            worker.close()

    def _job(self, candidate: Candidate, artifact: Artifact, timing: TimingPolicy | None, check: CheckPolicy | None) -> Job:
        return Job(self._spec, candidate.schedule, self._target, artifact.path, candidate.workload, check, timing)

    @contextmanager
    def _locked(self, device: int) -> Iterator[None]:
        file = self._locks[device]
        with host_errors("lock", file):
            file.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(file)
            while not lock.is_locked:
                if self._closed.is_set():
                    raise MeasureError("the run has ended")
                with suppress(Timeout):
                    lock.acquire(timeout=WAIT_S)
        try:
            yield
        finally:
            lock.release()


def _environment(name: str | None, devices: int) -> dict[str, str]:
    """Variables of a worker: its GPU, and of several workers, which compute references on the CPU at the same time, a share of threads."""
    found = {} if name is None else {"CUDA_VISIBLE_DEVICES": name}
    if devices > 1:
        share, given = max(1, cores() // devices), os.environ.get("OMP_NUM_THREADS", "")
        found["OMP_NUM_THREADS"] = str(min(share, int(given)) if given.isdigit() and int(given) else share)
    return found


def _of(candidate: Candidate, artifact: Artifact, outcome: Measurement) -> Measurement:
    """What a worker answered, with the candidate and its module."""
    resources = artifact.resources.to_json()
    return replace(outcome, schedule=candidate.schedule, workload=candidate.workload, module=artifact.sha256, resources=resources)
