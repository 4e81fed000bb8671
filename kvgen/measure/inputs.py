"""Inputs of a workload that are timed: seeded caches, matrices or weights, in as many copies as exceed the device's last-level cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from kvgen.errors import MeasureError
from kvgen.format.sizes import must_read, timed_lengths
from kvgen.lower.matrix import ELEMENT_BYTES
from kvgen.measure.measurement import Load, TimingPolicy
from kvgen.measure.timer import cold_bytes, timer_for
from kvgen.runtime.calls import Variant
from kvgen.runtime.linear import LinearVariant
from kvgen.runtime.matrix import MatrixVariant
from kvgen.runtime.module import Functions
from kvgen.spec import LinearShape, MatrixShape, Workload
from kvgen.verify import matrix as reference
from kvgen.verify.check import WorkloadCaches
from kvgen.verify.filled import free_bytes
from kvgen.verify.linear import Case

MOST_COPIES = 64
FREE_SHARE = 0.8
"""Of the memory that is free, for the caches of one workload."""


class NoRoom(MeasureError):
    """The memory that is free cannot hold the caches of a workload."""


def copies_of(nbytes: int, device: torch.device, cold: int | None = None) -> int:
    """Copies of inputs of so many bytes that calls take in turn, so that none finds its own in the device's cache. `cold`: bytes that are
    touched between two uses of one.
    """
    cold = cold_bytes(device.type) if cold is None else cold
    return max(1, min(MOST_COPIES, -(-cold // nbytes)))


def limit_threads(module: Functions, policy: TimingPolicy) -> None:
    """Let a module have as many threads as a policy says."""
    if module.set_threads is not None and policy.threads is not None:
        module.set_threads(policy.threads)


class WorkloadInputs(WorkloadCaches):
    """A workload over one layout; every variant of that layout can be verified and timed on it.

    `lengths` are the tokens of each sequence, the workload's unless they are given; `nbytes` is what a call must read. On a GPU, `attend`
    over unequal lengths has a plan that was made before, as all layers of a step share one.

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
        self.lengths = timed_lengths(variant.spec, variant.layout, workload) if lengths is None else list(lengths)
        self.nbytes = must_read(variant.spec, variant.layout, self.lengths)
        copies = copies_of(self.nbytes, torch.device(device), cold)
        self.load = workload.load
        need = copies * workload.batch * variant.new_cache(1, self.room(variant, workload, self.lengths), device).nbytes
        free = free_bytes(torch.device(device))
        if need > FREE_SHARE * free:
            raise NoRoom(f"the caches of {workload.key} take {need / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free")
        super().__init__(variant, workload, device, self.lengths, copies)
        self._outs = [torch.empty_like(self.q) for _ in range(copies)]

    @property
    def held_bytes(self) -> int:
        """Bytes of the caches."""
        return sum(cache.nbytes for cache in self.caches)

    def time(self, variant: Variant, policy: TimingPolicy) -> tuple[float, ...]:
        """Samples in µs per call of `policy.call`, under the workload's load. Raises MeasureError, and CacheMismatch for another layout."""
        policy = policy.under(self.load)
        limit_threads(variant.module, policy)
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
        if self.device.type == "cuda" and not self.uniform:
            plan, run = variant.plan(cache, q.shape[1], append=False), variant.executable.run
            workspace, scale = variant.workspace(cache), variant.scale
            # not through `attend`, which refuses within a graph the plan that was made outside: lengths do not change here
            limit, flag = cache.max_len, cache.sequences.overflow.address
            rest = (out, None, self.sinks, workspace, plan.numbers, scale, self.length)
            return lambda: run(q, None, cache.tensors, rest, limit, flag, advance=False)
        return lambda: variant.attend(q, cache, out=out, sinks=self.sinks)

    def _decode(self, variant: Variant, index: int, steps: int) -> Callable[[], object]:
        """As many decode steps as fill a block, with one flush; their mean length is the workload's, which is restored at the end."""
        cache, out = self.caches[index], self._outs[index]
        back = steps * self.workload.q_len // 2
        first = (self.start - back).clamp(min=0)

        def run() -> None:
            cache.lengths.copy_(first)
            cache.bound = max(0, self.length - back)
            for _ in range(steps):
                variant.decode(self.q, self.k, self.v, cache, out=out, sinks=self.sinks)
            cache.lengths.copy_(self.start)
            cache.bound = self.length

        return run


class OperationInputs(ABC):
    """Inputs of a linear layer or of an operation on a matrix; `nbytes` is what a call must move."""

    load: Load = "rested"
    nbytes: int

    def __init__(self, shape: MatrixShape | LinearShape, device: torch.device | str) -> None:
        self.shape, self.device = shape, torch.device(device)

    @property
    @abstractmethod
    def tensors(self) -> Sequence[torch.Tensor]:
        """All that is held; some may be there twice."""

    @abstractmethod
    def calls(self, variant: Any) -> list[Callable[[], object]]:
        """A call over each copy."""

    @property
    def held_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.nbytes for x in {id(x): x for x in self.tensors}.values())

    def time(self, variant: MatrixVariant | LinearVariant, policy: TimingPolicy) -> tuple[float, ...]:
        """Samples in µs of a call. Raises MeasureError."""
        limit_threads(variant.module, policy)
        return timer_for(self.device).time(self.calls(variant), policy)


class MatrixInputs(OperationInputs):
    """Matrices of one shape, with their codes and scales, in as many copies as exceed the device's last-level cache.

    `nbytes` is what `quantize` or `dequantize` moves: every element read and written once, as dtype or code, and the scales read.
    """

    def __init__(self, variant: MatrixVariant, shape: MatrixShape, device: torch.device | str, cold: int | None = None) -> None:
        super().__init__(shape, device)
        self.nbytes = shape.elements * (ELEMENT_BYTES[variant.spec.matrix.dtype] + 1) + 4 * shape.channels
        count = copies_of(self.nbytes, self.device, cold)
        first = reference.uniform(shape.tokens, shape.channels, variant.dtype, self.device)
        scale = reference.scales(first)
        codes = torch.zeros(first.shape, dtype=torch.int8, device=self.device)
        for rows in reference.chunks(*first.shape):
            codes[rows] = reference.codes(first[rows], scale)
        self.matrices, self.scales, self.codes = ([x, *(x.clone() for _ in range(count - 1))] for x in (first, scale, codes))
        self.outs = [torch.empty_like(first) for _ in range(count)] if variant.spec.operation == "dequantize" else self.matrices

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        return [*self.matrices, *self.codes, *self.outs]

    def calls(self, variant: MatrixVariant) -> list[Callable[[], object]]:
        """Of the spec's operation."""
        call = variant.spec.operation
        given = (self.codes, self.scales, self.outs) if call == "dequantize" else (self.matrices, self.scales, self.codes)
        return [partial(getattr(variant.module, call), *each) for each in zip(*given, strict=True)]


class LinearInputs(OperationInputs):
    """Packed weights and inputs of a call, in as many copies as exceed the device's last-level cache. `nbytes` are the packed bytes."""

    def __init__(self, variant: LinearVariant, shape: LinearShape, device: torch.device | str, cold: int | None = None) -> None:
        super().__init__(shape, device)
        self.case = case = Case(variant, self.device, shape.rows)
        self.nbytes = case.packed.nbytes
        count = copies_of(self.nbytes, self.device, cold)
        self.packed, self.x = ([x, *(x.clone() for _ in range(count - 1))] for x in (case.packed, case.x))
        self.outs = [torch.empty((shape.rows, variant.features), dtype=variant.dtype, device=self.device) for _ in range(count)]

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        return [*self.packed, *self.x, *self.outs]

    def calls(self, variant: LinearVariant) -> list[Callable[[], object]]:
        call, case, given = variant.module.linear, self.case, zip(self.x, self.packed, self.outs, strict=True)
        return [partial(call, x, packed, case.bias, case.residual, out) for x, packed, out in given]
