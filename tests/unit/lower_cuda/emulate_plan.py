"""The CUDA plan kernel and the host's plan function beside their oracle: on the CPU over the emulation of CUDA, or on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.support.plan import HEADER, Plan, PlanShape, make_plan, read_plan, written_plan
from tests.unit.lower_cuda.emulate import library

NO_LIMIT = 2**30
STALE = -1_000_000_007
"""What a plan's memory holds before it is made."""
MARGIN = 1 << 16
"""int32 on either side of a plan, so that a faulty plan kernel that writes there can be told."""
SHAPE_FIELDS = (
    "batch", "heads", "workers", "tile_tokens", "block_tokens", "head_cost", "least_tiles", "window", "q_len", "fresh", "unpacked",
    "tile_residual",
)  # fmt: skip
CALLS = """
#include "kvgen/host/launch.cuh"
using namespace kvgen;
PlanShape shape_of(const int* n) { return {n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11]}; }
extern "C" int quotient(int dividend, int divisor) { return dividend / Divisor(divisor); }
extern "C" int remainder_of(int dividend, int divisor) { return dividend % Divisor(divisor); }
extern "C" int64_t size(const int* numbers) { return shape_of(numbers).size(); }
extern "C" bool host_plan(const int* numbers, const int* lengths, int limit, bool skip_empty, int* plan) {
  return make_plan(shape_of(numbers), lengths, limit, skip_empty, plan);
}
// The error of a launch or of its kernel, which has ended.
int ended(cudaError_t launched) { return launched == cudaSuccess ? cudaDeviceSynchronize() : launched; }
extern "C" int device_plan(const int* numbers, const int* lengths, int limit, bool skip_empty, int* plan, int* overflow) {
  return ended(launch_plan({shape_of(numbers), lengths, plan, overflow, limit, skip_empty}, nullptr, true));
}
extern "C" int advance(int* lengths, int batch, const int* counts, int count, int limit, int* overflow) {
  return ended(launch_advance({lengths, batch, counts, count, true, limit, overflow}, nullptr, true));
}
extern "C" int crop(int* lengths, int* least, int batch, const int* counts, int count, int rollback, int* overflow) {
  return ended(launch_crop({lengths, least, batch, counts, count, rollback, overflow}, nullptr, true));
}
"""


@dataclass(frozen=True)
class Made:
    """What a call wrote: a plan's numbers (of `advance`, none), whether a sequence overflows, the lengths, and whether it wrote outside."""

    plan: list[int]
    overflow: bool
    lengths: list[int]
    outside: bool = False


class Planner:
    """Plans of any shape, and lengths that advance or are cropped, by a compiled library of CALLS."""

    def __init__(self, compiled: Path, gpu: bool = False) -> None:
        """`gpu`: the kernels run on a GPU. Then what they read and write is pinned memory, which host and GPU reach by one address."""
        self._library, self._gpu = ctypes.CDLL(str(compiled)), gpu
        self._library.size.restype, self._library.host_plan.restype = ctypes.c_int64, ctypes.c_bool

    @classmethod
    def emulated(cls, folder: Path) -> Planner:
        """One whose kernels run in the emulator, which is compiled in `folder`."""
        return cls(library(CALLS, folder))

    def divided(self, dividend: int, divisor: int) -> tuple[int, int]:
        """Quotient and remainder of a division by a `Divisor`."""
        return int(self._library.quotient(dividend, divisor)), int(self._library.remainder_of(dividend, divisor))

    def size(self, shape: PlanShape) -> int:
        """int32 of a plan."""
        return int(self._library.size(_shape(shape)))

    def device(self, shape: PlanShape, lengths: Sequence[int], limit: int, skip_empty: bool) -> Made:
        """The plan kernel's plan."""
        held, memory = self._ints(lengths), torch.zeros(shape.size + 2 * MARGIN, dtype=torch.int32, pin_memory=self._gpu)
        plan = memory[MARGIN:-MARGIN].fill_(STALE)
        overflow = self._launch(self._library.device_plan, _shape(shape), _at(held), limit, ctypes.c_bool(skip_empty), _at(plan))
        outside = bool(memory[:MARGIN].any() or memory[-MARGIN:].any())
        return Made(plan.tolist(), overflow, held.tolist(), outside)

    def host(self, shape: PlanShape, lengths: Sequence[int], limit: int, skip_empty: bool) -> Made:
        """The host function's plan."""
        held, plan = self._ints(lengths), self._ints([STALE] * shape.size)
        overflow = self._library.host_plan(_shape(shape), _at(held), limit, ctypes.c_bool(skip_empty), _at(plan))
        return Made(plan.tolist(), bool(overflow), list(lengths))

    def advance(self, lengths: Sequence[int], counts: Sequence[int] | None, count: int, limit: int) -> Made:
        """The end of a step: `counts`, or `count` for all."""
        held, own = self._ints(lengths), None if counts is None else self._ints(counts)
        overflow = self._launch(self._library.advance, _at(held), len(lengths), _at(own), count, limit)
        return Made([], overflow, held.tolist())

    def crop(
        self, lengths: Sequence[int], least: Sequence[int], counts: Sequence[int] | None, count: int, rollback: int
    ) -> tuple[Made, Made]:
        """Tokens taken back: `counts`, or `count` of all. The lengths, and the least ones."""
        held, kept, own = self._ints(lengths), self._ints(least), None if counts is None else self._ints(counts)
        overflow = self._launch(self._library.crop, _at(held), _at(kept), len(lengths), _at(own), count, rollback)
        return Made([], overflow, held.tolist()), Made([], overflow, kept.tolist())

    def _launch(self, call: Callable[..., int], *arguments: object) -> bool:
        """Launch a kernel and wait for its end. Returns its overflow flag, the last argument."""
        overflow = self._ints([0])
        failed = call(*arguments, _at(overflow))
        assert not failed, f"CUDA error {failed}"
        return bool(overflow.item())

    def _ints(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, pin_memory=self._gpu)


def differences(planner: Planner, shape: PlanShape, lengths: Sequence[int], limit: int, skip_empty: bool) -> list[str]:
    """In what the plans of device and host differ from the oracle's."""
    want = make_plan(shape, lengths, limit, skip_empty)
    found = [] if planner.size(shape) == shape.size else ["size"]
    device, host = planner.device(shape, lengths, limit, skip_empty), planner.host(shape, lengths, limit, skip_empty)
    header = HEADER + 2 * shape.workers
    for name, made in (("device", device), ("host", host)):
        if made.plan[:header] != written_plan(shape, want)[:header]:
            found.append(f"{name}: ranges")
        elif read_plan(shape, made.plan) != Plan(want.workers, want.empty, ()):
            found.append(f"{name}: work tiles")
        if made.overflow != bool(want.overflowing):
            found.append(f"{name}: overflow")
    found += ["device: memory outside the plan"] * device.outside
    return found if device.lengths == list(lengths) else [*found, "lengths"]


def advanced(planner: Planner, lengths: Sequence[int], counts: Sequence[int] | None, count: int, limit: int) -> bool:
    """Whether lengths advance where there is room: a sequence by its own count, or by one for all that are not empty."""
    more = [count if n else 0 for n in lengths] if counts is None else list(counts)
    fits = [by >= 0 and n + by <= limit for n, by in zip(lengths, more, strict=True)]
    want = [n + by * fit for n, by, fit in zip(lengths, more, fits, strict=True)]
    return planner.advance(lengths, counts, count, limit) == Made([], not all(fits), want)


def cropped(
    planner: Planner, lengths: Sequence[int], least: Sequence[int], counts: Sequence[int] | None, count: int, rollback: int
) -> bool:
    """Whether tokens are taken back where that is allowed, and other sequences keep their length."""
    fewer = [count if n else 0 for n in lengths] if counts is None else list(counts)
    floors = [max(floor, n - rollback) for n, floor in zip(lengths, least, strict=True)]
    allowed = [0 <= by <= n - floor for n, by, floor in zip(lengths, fewer, floors, strict=True)]
    want = [n - by * ok for n, by, ok in zip(lengths, fewer, allowed, strict=True)]
    refused = not all(allowed)
    return planner.crop(lengths, least, counts, count, rollback) == (Made([], refused, want), Made([], refused, floors))


def unlike(batch: int) -> list[int]:
    """Lengths that differ, some of them 0, the longest far behind."""
    return [0 if b % 17 == 3 else 30000 if b == batch - 2 else b * 37 % 3000 for b in range(batch)]


def sparse(batch: int) -> list[int]:
    """Lengths of which one in 15 is not 0; these have unlike residuals."""
    return [0 if b % 15 else b * 7 % 3000 + 1 for b in range(batch)]


def _at(numbers: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if numbers is None else numbers.data_ptr())


def _shape(shape: PlanShape) -> ctypes.Array[ctypes.c_int]:
    return (ctypes.c_int * len(SHAPE_FIELDS))(*(getattr(shape, name) for name in SHAPE_FIELDS))
