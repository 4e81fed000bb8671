"""Times calls: on a CPU by the clock, on a GPU by events around graph replays. All results are µs per call."""

from __future__ import annotations

import glob
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from statistics import median

import torch

from kvgen.errors import MeasureError
from kvgen.measure.measurement import TimingPolicy

Calls = Sequence[Callable[[], object]]
MIN_SAMPLES = 5
CPU_SAMPLE_SECONDS = 5e-4
GRAPH_SECONDS = 2e-3
"""A CUDA graph repeats its calls until they take this long."""
GRAPH_FRACTION = 0.1
"""If it is shorter than GRAPH_SECONDS, they take this fraction of the policy's seconds."""
MOST_CAPTURED = 512
"""Most calls of a graph."""
RETAKES = 3
WAITING_FRACTION = 0.02
"""A sample in which a thread waited longer than this fraction of the time is taken again."""
RUNS = 2
"""Replays of an idle-rested sample: one that does not count, and one that does."""


def timer_for(device: torch.device | str) -> CpuTimer | CudaTimer:
    """The timer of a device. It times a rotation of calls, each with inputs of its own, so that the inputs are no longer in a cache."""
    return CudaTimer() if torch.device(device).type == "cuda" else CpuTimer()


class CpuTimer:
    """Wall-clock time; short calls are timed several at once, and samples in which a thread waited for a CPU are retaken."""

    def time(self, calls: Calls, policy: TimingPolicy) -> tuple[float, ...]:
        """Samples in µs per call; every call is made at least once. Raises MeasureError if the clock does not advance."""
        once = self._warm_up(calls, policy.warmup_seconds)
        inner = max(1, math.ceil(CPU_SAMPLE_SECONDS / once))
        wanted = wanted_samples(policy, once * inner)
        clean: list[float] = []
        disturbed: list[float] = []
        position = 0
        while len(clean) < wanted and len(clean) + len(disturbed) < RETAKES * wanted:
            waited, started = waiting_seconds(), time.perf_counter()
            for _ in range(inner):
                calls[position]()
                position = (position + 1) % len(calls)
            taken = time.perf_counter() - started
            waiting = (waiting_seconds() - waited) / taken if taken > 0 else 0.0
            (clean if waiting < WAITING_FRACTION else disturbed).append(taken / inner * 1e6)
        return _checked(clean if len(clean) >= MIN_SAMPLES else clean + disturbed)

    @staticmethod
    def _warm_up(calls: Calls, seconds: float) -> float:
        """Seconds per call, after every call ran once and the warm-up time has passed."""
        begun, position, taken = time.perf_counter(), 0, []
        while position < len(calls) or time.perf_counter() - begun < seconds:
            started = time.perf_counter()
            calls[position % len(calls)]()
            taken.append(time.perf_counter() - started)
            position += 1
        return max(median(taken), 1e-7)


class CudaTimer:
    """Replays of a CUDA graph of all calls, between two events, so that launch costs of the host do not count.

    Idle-rested timing (the default): before each sample the device idles for as long as the sample takes. Sustained timing
    (`sustained_seconds`): the device is busy before the first sample and never idles; some kernels then reach the power cap after 40 ms,
    and clocks fall.

    The work runs on a stream of its own, after the current stream's work; later work of the current stream waits for it.
    """

    def time(self, calls: Calls, policy: TimingPolicy) -> tuple[float, ...]:
        """Samples in µs per call; every call is made at least once. Raises MeasureError if the clock does not advance."""
        stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())  # a torch stream does not wait for the default one by itself
        with torch.cuda.stream(stream):
            for call in calls:
                call()
            once = self._events(lambda: [call() for call in calls], 1)[0] / len(calls)
            repeats = captured_rounds(policy, once, len(calls))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(repeats):
                    for call in calls:
                        call()
            number = repeats * len(calls)
            taken = self._busy(graph.replay, max(policy.warmup_seconds, policy.sustained_seconds))
            samples = [seconds / number * 1e6 for seconds in self._replays(graph.replay, policy, taken)]
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        return _checked(samples)

    @staticmethod
    def _events(run: Callable[[], object], count: int) -> list[float]:
        """Seconds of each of `count` consecutive runs on the stream."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]  # type: ignore[no-untyped-call]
        marks[0].record()
        for mark in marks[1:]:
            run()
            mark.record()
        marks[-1].synchronize()
        return [before.elapsed_time(after) * 1e-3 for before, after in pairwise(marks)]

    @classmethod
    def _replays(cls, run: Callable[[], object], policy: TimingPolicy, taken: float) -> list[float]:
        """Seconds of as many runs, of `taken` each, as the policy has time for. Idle-rested, the last of RUNS counts, after a rest."""
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


def captured_rounds(policy: TimingPolicy, once: float, calls: int) -> int:
    """How often a CUDA graph repeats `calls` calls of `once` seconds each."""
    wanted = min(GRAPH_SECONDS, GRAPH_FRACTION * policy.seconds)
    return max(1, min(math.ceil(wanted / max(once * calls, 1e-7)), MOST_CAPTURED // calls))


def wanted_samples(policy: TimingPolicy, each: float) -> int:
    """Number of samples of `each` seconds that a policy has time for; at least MIN_SAMPLES."""
    return min(policy.samples, max(MIN_SAMPLES, int(policy.seconds / each)))


def waiting_seconds() -> float:
    """Seconds that threads of this process were ready to run without a CPU, since they began; 0 if the kernel does not report it."""
    total = 0
    for file in glob.glob("/proc/self/task/*/schedstat"):
        with suppress(OSError, ValueError, IndexError), open(file) as stat:
            total += int(stat.read().split()[1])
    return total * 1e-9


def _checked(samples: list[float]) -> tuple[float, ...]:
    if not samples or min(samples) <= 0 or not all(math.isfinite(sample) for sample in samples):
        raise MeasureError("the clock did not advance during a measurement")
    return tuple(samples)
