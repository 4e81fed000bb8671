"""The read roofline: a kernel that only reads. Attention over the same bytes cannot be faster, launch for launch.

Its module has a function `read(buffer, sink)`, which reads all of `buffer`, uint8 [n], in loads of 16 bytes (n is a multiple of 4096). It
may write to `sink`, uint8 [4096], so that the compiler keeps the loads. `copy(from, to)`, uint8 [n] both, is the roofline of operations
that write what they read. CPU modules also have `set_threads(n)`. CUDA modules have other ways to read, of which the
fastest at a size counts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from statistics import median

import torch

from kvgen.arch import Target, device_type
from kvgen.lower.backend import CPU_FLAGS, Source
from kvgen.measure.measurement import TimingPolicy
from kvgen.measure.timer import cold_bytes, timer_for
from kvgen.runtime.kvcache import new_bytes
from kvgen.runtime.module import load_library
from kvgen.toolchain.compile import build

PIECE = 4096
SINK_BYTES = 4096
READS = ("read", "read_bulk", "read_bulk_fine")


def source(target: Target) -> Source:
    """The read kernel's source, from `templates/{cpu,cuda}/read.*.jinja`."""
    template, flags = ("cpu/read.cpp.jinja", CPU_FLAGS) if target == "cpu" else ("cuda/read.cu.jinja", ())
    return Source.of_template(template, target, READS[:1], flags, target=target)


class ReadRoofline:
    """A loaded read kernel with a buffer that grows with the requested size."""

    def __init__(self, path: Path, device: torch.device | str) -> None:
        self.device = torch.device(device)
        library = load_library(path)
        self._reads = [library.get_function(name) for name in READS if library.implements_function(name)]
        self._copy = library.get_function("copy")
        self._fastest: dict[int, Callable[..., object]] = {}
        self._set_threads = library.get_function("set_threads") if library.implements_function("set_threads") else None
        self._sink = torch.zeros(SINK_BYTES, dtype=torch.uint8, device=self.device)
        self._pool = torch.empty(0, dtype=torch.uint8, device=self.device)

    def samples(self, nbytes: int, policy: TimingPolicy | None = None) -> tuple[float, ...]:
        """Samples in µs of reading `nbytes` (rounded up to a multiple of PIECE) from memory, not from a cache."""
        policy = policy or TimingPolicy()
        size, buffers = self._buffers(nbytes, policy)
        if size in self._fastest:
            return self._time(self._fastest[size], buffers, policy)
        taken = [(self._time(read, buffers, policy), read) for read in self._reads]
        best, self._fastest[size] = min(taken, key=lambda one: median(one[0]))
        return best

    def copies(self, nbytes: int, policy: TimingPolicy | None = None) -> tuple[float, ...]:
        """Samples in µs of a copy that moves `nbytes`: it reads one half of them and writes the other."""
        policy = policy or TimingPolicy()
        size, buffers = self._buffers(nbytes, policy, 2)
        half = size // 2
        calls = [partial(self._copy, buffer[:half], buffer[half:]) for buffer in buffers]
        return timer_for(self.device).time(calls, policy)

    def _buffers(self, nbytes: int, policy: TimingPolicy, parts: int = 1) -> tuple[int, list[torch.Tensor]]:
        """Bytes of a buffer, a multiple of `parts` pieces, and as many buffers as exceed the device's last-level cache."""
        if self._set_threads is not None and policy.threads is not None:
            self._set_threads(policy.threads)
        piece = parts * PIECE
        size = -(-max(nbytes, 1) // piece) * piece
        cold = cold_bytes(self.device.type) if policy.cold_bytes is None else policy.cold_bytes
        count = max(1, -(-cold // size))
        pool = self._grown(size * count)
        return size, [pool[i * size : (i + 1) * size] for i in range(count)]

    def _time(self, read: Callable[..., object], buffers: list[torch.Tensor], policy: TimingPolicy) -> tuple[float, ...]:
        return timer_for(self.device).time([partial(read, buffer, self._sink) for buffer in buffers], policy)

    def _grown(self, size: int) -> torch.Tensor:
        if self._pool.numel() < size:
            self._pool = torch.empty(0, dtype=torch.uint8, device=self.device)
            self._pool = new_bytes(size, self.device).fill_(1)  # as caches have it
        return self._pool


@cache
def read_roofline(target: Target) -> ReadRoofline:
    """This process's read kernel for a target, compiled at the first call."""
    return ReadRoofline(build(source(target)).path, device_type(target))


def read_us(target: Target, nbytes: int, policy: TimingPolicy | None = None) -> float:
    """Median µs of a pure read of `nbytes` on the target's device in this process."""
    samples = sorted(read_roofline(target).samples(nbytes, policy))
    return samples[len(samples) // 2]
