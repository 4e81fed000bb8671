"""Inputs of one workload for timing: quantized caches with real data, as many copies as exceed the device's last-level cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvgen.errors import MeasureError
from kvgen.format.residual import residual_rows
from kvgen.format.window import window_places
from kvgen.measure.bytes import must_read, timed_lengths
from kvgen.measure.device import cold_bytes, free_bytes
from kvgen.measure.filled import FilledCache
from kvgen.measure.job import TimingPolicy
from kvgen.measure.power import Power, metered
from kvgen.measure.timer import Calls, Timer, timer_for
from kvgen.runtime.kvcache import KVCache
from kvgen.runtime.variant import Variant
from kvgen.spec import Workload
from kvgen.verify.data import learned_sinks, normal

MOST_COPIES = 64
FREE_SHARE = 0.8
"""Of the memory that is free, for the caches of one workload."""


class NoRoom(MeasureError):
    """The memory that is free cannot hold the caches of a workload."""


class WorkloadInputs:
    """A workload over one layout; every variant of that layout can be verified and timed on it.

    `q`, `k`, `v` and `sinks` are the inputs of every call, `lengths` the tokens of each sequence (the workload's, unless they are given),
    `length` the longest, `nbytes` what a call must read. On a GPU, `attend` over unequal lengths has a plan that was made before, as all
    layers of a step share one.

    Raises NoRoom where the memory that is free cannot hold the caches.
    """

    def __init__(
        self,
        variant: Variant,
        workload: Workload,
        device: torch.device | str,
        cold: int | None = None,
        lengths: Sequence[int] | None = None,
    ) -> None:
        self.workload = workload
        self.device = torch.device(device)
        layout = variant.layout
        self.lengths = timed_lengths(variant.spec, layout, workload) if lengths is None else list(lengths)
        self.length, self.uniform = max(self.lengths), len(set(self.lengths)) == 1
        self.nbytes = must_read(variant.spec, layout, self.lengths)
        cold = cold_bytes(self.device.type) if cold is None else cold
        copies = max(1, min(MOST_COPIES, -(-cold // self.nbytes)))
        unpacked = variant.spec.cache.unpacked
        room = max(self.length, unpacked) + layout.tokens + workload.q_len
        _require_room(variant, workload, room, copies, self.device)
        self.filled = FilledCache(variant, workload.batch, room, self.device)
        self.filled.set(self.lengths)
        self._start = self.filled.cache.lengths.clone()
        self.caches: list[KVCache] = [self.filled.cache, *(self.filled.copy(variant) for _ in range(copies - 1))]
        inputs = normal(variant.spec, workload.batch, workload.q_len, q_len=workload.q_len, seed=1)
        self.q, self.k, self.v = (x.to(self.device) for x in (inputs.q, inputs.k, inputs.v))
        self.sinks = learned_sinks(variant.spec, self.device)
        self._outs = [torch.empty_like(self.q) for _ in range(copies)]
        for cache in self.caches:
            variant.release(cache)  # the workspace of the variant that filled it
        self.wanted: object | None = None
        """The expected results, which `kvgen.measure.timed` stores here."""
        self.power = Power()
        """Of the GPU during the last sustained timing."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the caches."""
        return sum(cache.nbytes for cache in self.caches)

    def rewind(self) -> None:
        """Restore every cache as it was filled: lengths, bounds, residuals."""
        for cache in self.caches:
            cache.lengths.copy_(self._start)
            cache.bound, cache.sequences.uniform = self.length, self.uniform
            self.filled.restore(cache)

    def time(self, variant: Variant, policy: TimingPolicy) -> tuple[float, ...]:
        """Samples in µs per call of `policy.call`, under the workload's load. Raises MeasureError, and CacheMismatch for another layout."""
        policy = policy.under(self.workload.load)
        if variant.module.set_threads is not None and policy.threads is not None:
            variant.module.set_threads(policy.threads)
        indices = range(len(self.caches))
        try:
            for cache in self.caches:
                variant.prepare(cache)
            timer = timer_for(self.device)
            if policy.call == "attend":
                return self._metered(timer, [self._attend(variant, i) for i in indices], policy)
            steps = max(1, variant.layout.tokens // self.workload.q_len)
            samples = self._metered(timer, [self._decode(variant, i, steps) for i in indices], policy)
            self.rewind()
            return tuple(sample / steps for sample in samples)
        finally:
            for cache in self.caches:
                variant.release(cache)

    def _metered(self, timer: Timer, calls: Calls, policy: TimingPolicy) -> tuple[float, ...]:
        """Samples; of a sustained load on a GPU with `power`."""
        if self.device.type != "cuda" or not policy.sustained_seconds:
            return timer.time(calls, policy)
        with metered(torch.cuda.current_device()) as self.power:
            return timer.time(calls, policy)

    def _attend(self, variant: Variant, index: int) -> Callable[[], object]:
        cache, out, q = self.caches[index], self._outs[index], self.q
        if self.device.type == "cuda" and not self.uniform:
            plan, run = variant.plan(cache, q.shape[1], append=False), variant.executable.run
            workspace, scale = variant.workspace(cache), variant.scale
            # not through `attend`, which refuses within a graph the plan that was made outside: lengths do not change here
            return lambda: run(q, None, cache, out, None, self.sinks, workspace, scale, self.length, plan, advance=False)
        return lambda: variant.attend(q, cache, out=out, sinks=self.sinks)

    def _decode(self, variant: Variant, index: int, steps: int) -> Callable[[], object]:
        """As many decode steps as fill a block, with one flush; their mean length is the workload's, which is restored at the end."""
        cache, out = self.caches[index], self._outs[index]
        back = steps * self.workload.q_len // 2
        first = (self._start - back).clamp(min=0)

        def begin(lengths: torch.Tensor, bound: int) -> None:
            cache.lengths.copy_(lengths)
            cache.bound = bound

        def run() -> None:
            begin(first, max(0, self.length - back))
            for _ in range(steps):
                variant.decode(self.q, self.k, self.v, cache, out=out, sinks=self.sinks)
            begin(self._start, self.length)

        return run


def _require_room(variant: Variant, workload: Workload, room: int, copies: int, device: torch.device) -> None:
    """Raise NoRoom if the caches of a workload would take more than FREE_SHARE of the memory that is free."""
    layout, attention = variant.layout, variant.spec.attention
    rows = residual_rows(variant.spec, layout.tokens).rows
    blocks = window_places(variant.spec, layout.tokens) or -(-room // layout.tokens)
    residual = 2 * rows * layout.head_dim * (4 if attention.dtype == "float32" else 2)
    nbytes = copies * workload.batch * attention.kv_heads * (blocks * layout.block_bytes + residual)
    free = free_bytes(device)
    if nbytes > FREE_SHARE * free:
        raise NoRoom(f"the caches of {workload.key} take {nbytes / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free")
