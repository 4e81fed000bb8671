"""The CUDA plan kernel and the host's plan function, run on the CPU over the emulation of CUDA, beside their oracle."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvgen.reference.plan import HEADER, Plan, PlanShape, make_plan, read_plan, written_plan
from tests.unit.lower_cuda.emulate import library

NO_LIMIT = 2**30
STALE = -1_000_000_007
"""What a plan's memory holds before it is made."""
MARGIN = 1 << 18
"""Bytes on either side of a plan, so that a faulty plan kernel that writes there can be told."""
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
extern "C" int device_plan(const int* numbers, const int* lengths, int limit, bool skip_empty, int* plan) {
  int overflow = 0;
  const PlanArgs args{shape_of(numbers), lengths, plan, &overflow, limit, skip_empty};
  if (launch_plan(args, nullptr, true) != cudaSuccess) return -1;
  return overflow;
}
extern "C" int advance(int* lengths, int batch, const int* counts, int count, int limit) {
  int overflow = 0;
  if (launch_advance({lengths, batch, counts, count, true, limit, &overflow}, nullptr, true) != cudaSuccess) return -1;
  return overflow;
}
extern "C" int crop(int* lengths, int* least, int batch, const int* counts, int count, int rollback) {
  int overflow = 0;
  if (launch_crop({lengths, least, batch, counts, count, rollback, &overflow}, nullptr, true) != cudaSuccess) return -1;
  return overflow;
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
    """Plans of any shape, and the advance of lengths."""

    def __init__(self, folder: Path) -> None:
        self._library = ctypes.CDLL(str(library(CALLS, folder)))
        self._library.size.restype, self._library.host_plan.restype = ctypes.c_int64, ctypes.c_bool

    def divided(self, dividend: int, divisor: int) -> tuple[int, int]:
        """Quotient and remainder of a division by a `Divisor`."""
        return int(self._library.quotient(dividend, divisor)), int(self._library.remainder_of(dividend, divisor))

    def size(self, shape: PlanShape) -> int:
        """int32 of a plan."""
        return int(self._library.size(_shape(shape)))

    def device(self, shape: PlanShape, lengths: Sequence[int], limit: int, skip_empty: bool) -> Made:
        """The plan kernel's plan."""
        held, memory = _ints(lengths), ctypes.create_string_buffer(2 * MARGIN + 4 * shape.size)
        plan = (ctypes.c_int * shape.size).from_buffer(memory, MARGIN)
        plan[:] = [STALE] * shape.size
        overflow = self._library.device_plan(_shape(shape), held, limit, ctypes.c_bool(skip_empty), plan)
        outside = memory.raw[:MARGIN] + memory.raw[-MARGIN:]
        return Made(list(plan), bool(overflow), list(held), outside != bytes(2 * MARGIN))

    def host(self, shape: PlanShape, lengths: Sequence[int], limit: int, skip_empty: bool) -> Made:
        """The host function's plan."""
        plan = _ints([STALE] * shape.size)
        overflow = self._library.host_plan(_shape(shape), _ints(lengths), limit, ctypes.c_bool(skip_empty), plan)
        return Made(list(plan), bool(overflow), list(lengths))

    def advance(self, lengths: Sequence[int], counts: Sequence[int] | None, count: int, limit: int) -> Made:
        """The end of a step: `counts`, or `count` for all."""
        held = _ints(lengths)
        overflow = self._library.advance(held, len(lengths), None if counts is None else _ints(counts), count, limit)
        return Made([], bool(overflow), list(held))

    def crop(
        self, lengths: Sequence[int], least: Sequence[int], counts: Sequence[int] | None, count: int, rollback: int
    ) -> tuple[Made, Made]:
        """Tokens taken back: `counts`, or `count` of all. The lengths, and the least ones."""
        held, kept = _ints(lengths), _ints(least)
        overflow = self._library.crop(held, kept, len(lengths), None if counts is None else _ints(counts), count, rollback)
        return Made([], bool(overflow), list(held)), Made([], bool(overflow), list(kept))


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


def _ints(numbers: Sequence[int]) -> ctypes.Array[ctypes.c_int]:
    return (ctypes.c_int * len(numbers))(*numbers)


def _shape(shape: PlanShape) -> ctypes.Array[ctypes.c_int]:
    return _ints([getattr(shape, name) for name in SHAPE_FIELDS])
