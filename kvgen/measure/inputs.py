"""Inputs of one workload for timing: quantized caches with real data, as many copies as exceed the device's last-level cache."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvgen.measure.bytes import half_full, must_read
from kvgen.measure.device import cold_bytes
from kvgen.measure.filled import FilledCache
from kvgen.measure.job import TimingPolicy
from kvgen.measure.timer import timer_for
from kvgen.reference.data import learned_sinks, normal
from kvgen.runtime.kvcache import KVCache
from kvgen.runtime.variant import Variant
from kvgen.spec import Workload

MOST_COPIES = 64


class WorkloadInputs:
    """A workload over one layout; every variant of that layout can be verified and timed on it.

    `q`, `k`, `v` and `sinks` are the inputs of every call, `length` the tokens of every sequence, `nbytes` what a call must read.
    """

    def __init__(self, variant: Variant, workload: Workload, device: torch.device | str, cold: int | None = None) -> None:
        self.workload = workload
        self.device = torch.device(device)
        layout = variant.layout
        self.length = half_full(variant.spec, layout, workload.kv_len)
        self.nbytes = must_read(variant.spec, layout, [self.length] * workload.batch)
        cold = cold_bytes(self.device.type) if cold is None else cold
        copies = max(1, min(MOST_COPIES, -(-cold // self.nbytes)))
        unpacked = variant.spec.cache.unpacked
        room = max(self.length, unpacked) + layout.tokens + workload.q_len
        self.filled = FilledCache(variant, workload.batch, room, self.device)
        self.filled.set([self.length] * workload.batch)
        self.caches: list[KVCache] = [self.filled.cache, *(self.filled.copy(variant) for _ in range(copies - 1))]
        inputs = normal(variant.spec, workload.batch, workload.q_len, q_len=workload.q_len, seed=1)
        self.q, self.k, self.v = (x.to(self.device) for x in (inputs.q, inputs.k, inputs.v))
        self.sinks = learned_sinks(variant.spec, self.device)
        self._outs = [torch.empty_like(self.q) for _ in range(copies)]
        for cache in self.caches:
            variant.release(cache)  # the workspace of the variant that filled it
        self.wanted: object | None = None
        """The expected results, which `kvgen.measure.timed` stores here."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the caches."""
        return sum(cache.nbytes for cache in self.caches)

    def rewind(self) -> None:
        """Restore every cache as it was filled: lengths, bounds, residuals."""
        for cache in self.caches:
            cache.lengths.fill_(self.length)
            cache.bound, cache.sequences.uniform = self.length, True
            self.filled.restore(cache)

    def time(self, variant: Variant, policy: TimingPolicy) -> tuple[float, ...]:
        """Samples in µs per call of `policy.call`. Raises MeasureError, and CacheMismatch for another layout."""
        if variant.module.set_threads is not None and policy.threads is not None:
            variant.module.set_threads(policy.threads)
        indices = range(len(self.caches))
        try:
            for cache in self.caches:
                variant.prepare(cache)
            timer = timer_for(self.device)
            if policy.call == "attend":
                return timer.time([self._attend(variant, i) for i in indices], policy)
            steps = max(1, variant.layout.tokens // self.workload.q_len)
            samples = timer.time([self._decode(variant, i, steps) for i in indices], policy)
            self.rewind()
            return tuple(sample / steps for sample in samples)
        finally:
            for cache in self.caches:
                variant.release(cache)

    def _attend(self, variant: Variant, index: int) -> Callable[[], object]:
        cache, out, q = self.caches[index], self._outs[index], self.q
        return lambda: variant.attend(q, cache, out=out, sinks=self.sinks)

    def _decode(self, variant: Variant, index: int, steps: int) -> Callable[[], object]:
        """As many decode steps as fill a block, with one flush; their mean length is the workload's, which is restored at the end."""
        cache, out = self.caches[index], self._outs[index]
        start = max(0, self.length - steps * self.workload.q_len // 2)

        def begin(length: int) -> None:
            cache.lengths.fill_(length)
            cache.bound = length

        def run() -> None:
            begin(start)
            for _ in range(steps):
                variant.decode(self.q, self.k, self.v, cache, out=out, sinks=self.sinks)
            begin(self.length)

        return run
