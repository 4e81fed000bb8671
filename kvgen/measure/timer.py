"""Times of calls, on the CPU by the clock and on a GPU by events around graph replays. All results are µs per call."""

from __future__ import annotations

import glob
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from statistics import median
from typing import Protocol

import torch

from kvgen.errors import MeasureError
from kvgen.measure.job import TimingPolicy

Calls = Sequence[Callable[[], object]]
MIN_SAMPLES = 5
CPU_SAMPLE_SECONDS = 5e-4
GRAPH_SECONDS = 2e-3
MOST_CAPTURED = 512
RETAKES = 3
WAITING_SHARE = 0.02
RUNS = 2
"""Of a burst's sample: one to get going, one that counts."""


class Timer(Protocol):
    """Times calls that take turns, so that each finds its inputs out of the caches."""

    def time(self, calls: Calls, policy: TimingPolicy) -> tuple[float, ...]:
        """Samples in µs per call; every call is made at least once. Raises MeasureError where time does not pass."""
        ...


def timer_for(device: torch.device | str) -> Timer:
    """The timer of a device."""
    return CudaTimer() if torch.device(device).type == "cuda" else CpuTimer()


class CpuTimer:
    """Wall-clock time; short calls are timed several at once, and samples in which a thread waited for a CPU are retaken."""

    def time(self, calls: Calls, policy: TimingPolicy) -> tuple[float, ...]:
        """See `Timer`."""
        once = self._warm_up(calls, policy.warmup_seconds)
        inner = max(1, math.ceil(CPU_SAMPLE_SECONDS / once))
        wanted = wanted_samples(policy, once * inner)
        clean: list[float] = []
        disturbed: list[float] = []
        turn = 0
        while len(clean) < wanted and len(clean) + len(disturbed) < RETAKES * wanted:
            waited, started = waiting_seconds(), time.perf_counter()
            for _ in range(inner):
                calls[turn]()
                turn = (turn + 1) % len(calls)
            taken = time.perf_counter() - started
            share = (waiting_seconds() - waited) / taken if taken > 0 else 0.0
            (clean if share < WAITING_SHARE else disturbed).append(taken / inner * 1e6)
        return _checked(clean if len(clean) >= MIN_SAMPLES else clean + disturbed)

    @staticmethod
    def _warm_up(calls: Calls, seconds: float) -> float:
        """Seconds per call, after every call ran once and the warm-up time has passed."""
        begun, turn, taken = time.perf_counter(), 0, []
        while turn < len(calls) or time.perf_counter() - begun < seconds:
            started = time.perf_counter()
            calls[turn % len(calls)]()
            taken.append(time.perf_counter() - started)
            turn += 1
        return max(median(taken), 1e-7)


class CudaTimer:
    """Replays of a CUDA graph that holds the calls in turn, between two events: launch costs of the host do not count.

    In a burst the device rests before each sample for as long as that takes: without a pause some kernels meet the power cap after
    40 ms, and clocks fall. `sustained_seconds` asks for that; samples follow each other then.

    All of it goes to a stream of its own, behind what the current stream was given; what comes after waits for it.
    """

    def time(self, calls: Calls, policy: TimingPolicy) -> tuple[float, ...]:
        """See `Timer`."""
        stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())  # a torch stream does not wait for the default one by itself
        with torch.cuda.stream(stream):
            for call in calls:
                call()
            once = self._events(lambda: [call() for call in calls], 1)[0] / len(calls)
            turns = max(1, min(math.ceil(GRAPH_SECONDS / max(once * len(calls), 1e-7)), MOST_CAPTURED // len(calls)))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(turns):
                    for call in calls:
                        call()
            number = turns * len(calls)
            taken = self._busy(graph.replay, max(policy.warmup_seconds, policy.sustained_seconds))
            samples = [seconds / number * 1e6 for seconds in self._replays(graph.replay, policy, taken)]
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        return _checked(samples)

    @staticmethod
    def _events(run: Callable[[], object], count: int) -> list[float]:
        """Seconds of each of `count` runs, one behind the other on the stream."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]  # type: ignore[no-untyped-call]
        marks[0].record()
        for mark in marks[1:]:
            run()
            mark.record()
        marks[-1].synchronize()
        return [before.elapsed_time(after) * 1e-3 for before, after in pairwise(marks)]

    @classmethod
    def _replays(cls, run: Callable[[], object], policy: TimingPolicy, taken: float) -> list[float]:
        """Seconds of as many runs as the policy has time for, of `taken` each. In a burst the last of RUNS counts, after a rest as long."""
        if policy.sustained_seconds:
            return cls._events(run, wanted_samples(policy, taken))
        replays = []
        for _ in range(wanted_samples(policy, 2 * RUNS * taken)):
            time.sleep(RUNS * taken)
            replays.append(cls._events(run, RUNS)[-1])
        return replays

    @classmethod
    def _busy(cls, run: Callable[[], object], seconds: float) -> float:
        """Run for a while; seconds of the last run."""
        started = time.perf_counter()
        last = cls._events(run, 2)[-1]
        while time.perf_counter() - started < seconds:
            last = cls._events(run, 4)[-1]
        return max(last, 1e-7)


def wanted_samples(policy: TimingPolicy, each: float) -> int:
    """How many of `each` seconds a policy has time for; MIN_SAMPLES at least."""
    return min(policy.samples, max(MIN_SAMPLES, int(policy.seconds / each)))


def waiting_seconds() -> float:
    """Time that threads of this process were ready to run and had no CPU, since they began; 0 where the kernel does not tell."""
    total = 0
    for file in glob.glob("/proc/self/task/*/schedstat"):
        with suppress(OSError, ValueError, IndexError), open(file) as stat:
            total += int(stat.read().split()[1])
    return total * 1e-9


def _checked(samples: list[float]) -> tuple[float, ...]:
    if not samples or min(samples) <= 0 or not all(math.isfinite(sample) for sample in samples):
        raise MeasureError("the clock did not advance during a measurement")
    return tuple(samples)
