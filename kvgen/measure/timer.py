"""Times calls: on a CPU by the clock, on a GPU by events around graph replays, beside its power and clock. All times are µs per call."""

from __future__ import annotations

import glob
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from kvgen._machine import ask, llc_bytes, nvml_device
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
CPU_COLD_FACTOR, CPU_COLD_MOST = 8, 512 << 20
CUDA_COLD_FACTOR = 24
"""With 3 to 20 times the L2 some kernels find a part of their inputs there (docs/design.md)."""
POLL_SECONDS = 0.02


def timer_for(device: torch.device | str) -> CpuTimer | CudaTimer:
    """The timer of a device. It times a rotation of calls, each with inputs of its own, so that the inputs are no longer in a cache."""
    return CudaTimer() if torch.device(device).type == "cuda" else CpuTimer()


def cold_bytes(device: str) -> int:
    """Bytes to touch between two uses of an input, so that it comes from memory: many times the last-level cache.

    The L2 of a GPU may keep a part of what is read again before several times its size was read. A virtual machine often uses more of the
    CPU's cache than it sees.
    """
    if device == "cpu":
        return min(CPU_COLD_FACTOR * llc_bytes(), CPU_COLD_MOST)
    return CUDA_COLD_FACTOR * int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)


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


@dataclass
class Power:
    """Medians over a measurement; None where NVML does not tell."""

    watts: float | None = None
    clock_mhz: float | None = None
    """Of the multiprocessors."""


@contextmanager
def metered() -> Iterator[Power]:
    """Read power and clock of the first visible GPU until the end of the block, and then fill what was yielded: the medians of the second
    half of the readings, since power and clocks still change in the first.
    """
    power, stop = Power(), threading.Event()
    readings: list[tuple[Any, Any]] = []

    def read(nvml: Any, handle: Any) -> None:
        while not stop.wait(POLL_SECONDS):
            readings.append((_milliwatts(nvml, handle), ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)))

    with nvml_device() as found:
        if found is None:
            yield power
            return
        reader = threading.Thread(target=read, args=found, daemon=True)
        reader.start()
        try:
            yield power
        finally:
            stop.set()
            reader.join()
            settled = readings[len(readings) // 2 :]
            watts, clocks = ([float(one[at]) for one in settled if one[at] is not None] for at in (0, 1))
            power.watts, power.clock_mhz = median(watts) / 1000 if watts else None, median(clocks) if clocks else None


def _milliwatts(nvml: Any, handle: Any) -> int | None:
    """Power now; where the driver has only an average over the last second, that."""
    values = ask(nvml.nvmlDeviceGetFieldValues, handle, [nvml.NVML_FI_DEV_POWER_INSTANT])
    power: int | None = values[0].value.uiVal if values and values[0].nvmlReturn == 0 else ask(nvml.nvmlDeviceGetPowerUsage, handle)
    return power
