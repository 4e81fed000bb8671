"""Plans made by the CUDA plan kernel, run in the emulator, and by the host function, against the oracle; and the advance of lengths."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvgen.reference.plan import HEADER, Plan, PlanShape, make_plan, read_plan, written_plan
from tests.unit.lower_cuda.emulate import library

NO_LIMIT = 2**30
STALE = -1_000_000_007
"""What a plan's memory holds before it is made."""
SHAPE_FIELDS = ("batch", "heads", "workers", "tile_tokens", "block_tokens", "head_cost", "least_tiles", "window", "q_len", "fresh")
CALLS = """
#include "kvgen/host/launch.cuh"
using namespace kvgen;
PlanShape shape_of(const int* n) { return {n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9]}; }
extern "C" int64_t size(const int* numbers) { return shape_of(numbers).size(); }
extern "C" bool host_plan(const int* numbers, const int* lengths, int limit, bool skip_empty, int* plan) {
  return make_plan(shape_of(numbers), lengths, limit, skip_empty, plan);
}
extern "C" int device_plan(const int* numbers, int* lengths, int limit, bool skip_empty, bool advance, int* plan) {
  int overflow = 0;
  const PlanArgs args{shape_of(numbers), lengths, plan, &overflow, limit, skip_empty, advance};
  if (launch_plan(args, nullptr, true) != cudaSuccess) return -1;
  return overflow;
}
extern "C" int advance(int* lengths, int batch, const int* counts, int count, int limit) {
  int overflow = 0;
  if (launch_advance(lengths, batch, counts, count, limit, &overflow, nullptr, true) != cudaSuccess) return -1;
  return overflow;
}
"""
Lengths = list[int]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    found = ctypes.CDLL(str(library(CALLS, tmp_path_factory.mktemp("plan"))))
    found.size.restype, found.host_plan.restype = ctypes.c_int64, ctypes.c_bool
    return found


def ints(numbers: Lengths) -> ctypes.Array[ctypes.c_int]:
    """As C has them; one at least, so that there is a pointer."""
    return (ctypes.c_int * max(len(numbers), 1))(*numbers)


def numbers_of(shape: PlanShape) -> ctypes.Array[ctypes.c_int]:
    return ints([getattr(shape, name) for name in SHAPE_FIELDS])


def device_plan(
    built: ctypes.CDLL, shape: PlanShape, lengths: Lengths, limit: int, skip_empty: bool, advance: bool
) -> tuple[Lengths, int, Lengths]:
    """The plan's numbers, the overflow flag, and the lengths afterwards."""
    held, plan = ints(lengths), ints([STALE] * shape.size)
    overflow = built.device_plan(numbers_of(shape), held, limit, ctypes.c_bool(skip_empty), ctypes.c_bool(advance), plan)
    return list(plan), overflow, list(held)


def host_plan(built: ctypes.CDLL, shape: PlanShape, lengths: Lengths, limit: int, skip_empty: bool) -> tuple[Lengths, bool]:
    """The plan's numbers and whether a sequence overflows."""
    plan = ints([STALE] * shape.size)
    overflow = built.host_plan(numbers_of(shape), ints(lengths), limit, ctypes.c_bool(skip_empty), plan)
    return list(plan), overflow


def agrees(built: ctypes.CDLL, shape: PlanShape, lengths: Lengths, limit: int, skip_empty: bool, advance: bool) -> Plan:
    """Device, host and oracle make the same plan, of which they write the same numbers."""
    want = make_plan(shape, lengths, limit, skip_empty)
    assert built.size(numbers_of(shape)) == shape.size
    made, overflow, after = device_plan(built, shape, lengths, limit, skip_empty, advance)
    on_host, overflows = host_plan(built, shape, lengths, limit, skip_empty)
    for numbers in (made, on_host):
        found = read_plan(shape, numbers)
        assert (found.workers, found.empty) == (want.workers, want.empty)
        header = HEADER + 2 * shape.workers
        assert numbers[:header] == written_plan(shape, want)[:header]
    assert overflow == overflows == bool(want.overflowing)
    skipped = {*want.empty, *want.overflowing}
    assert after == [n + shape.fresh * (advance and b not in skipped) for b, n in enumerate(lengths)]
    return want


@st.composite
def shapes(draw: st.DrawFn) -> PlanShape:
    """Shapes as variants have them: tiles within a block, or of several blocks."""
    block = draw(st.sampled_from([16, 32, 64, 128, 256]))
    tile = block * draw(st.sampled_from([1, 2, 4])) if block < 64 else block // draw(st.sampled_from([1, 2]))
    q_len = draw(st.integers(1, 8))
    return PlanShape(
        batch=0,
        heads=draw(st.integers(1, 4)),
        workers=draw(st.one_of(st.integers(1, 12), st.integers(1, 400))),
        tile_tokens=tile,
        block_tokens=block,
        head_cost=draw(st.integers(0, 20)),
        least_tiles=draw(st.integers(1, 8)),
        window=draw(st.sampled_from([0, 0, 1, 5, 100, 1000])),
        q_len=q_len,
        fresh=draw(st.sampled_from([0, q_len])),
    )


LENGTH = st.one_of(st.sampled_from([0, 1, 15, 16, 127, 128]), st.integers(0, 600), st.integers(0, 20000))


def test_device_and_host_make_the_oracles_plan(built: ctypes.CDLL) -> None:
    """Any lengths, also without room for the step's tokens; empty sequences that take part and that do not."""

    @settings(max_examples=60, deadline=None, database=None)
    @given(shapes(), st.lists(LENGTH, min_size=1, max_size=12), st.sampled_from([NO_LIMIT, 600, 128]), st.booleans(), st.booleans())
    @example(PlanShape(0, 2, 8, 64, 128, 13, 8, fresh=1), [300, 0, 4000], 4000, True, True)
    @example(PlanShape(0, 3, 400, 64, 128, 13, 1), [0, 0], NO_LIMIT, False, False)
    def check(shape: PlanShape, lengths: Lengths, limit: int, skip_empty: bool, advance: bool) -> None:
        agrees(built, replace(shape, batch=len(lengths)), lengths, limit, skip_empty, advance)

    check()


def many(batch: int) -> Lengths:
    """Unlike lengths, some of them 0, the longest far behind."""
    return [0 if b % 17 == 3 else 30000 if b == batch - 2 else b * 37 % 3000 for b in range(batch)]


@pytest.mark.parametrize(("batch", "heads", "workers"), [(200, 2, 132), (200, 8, 264), (1500, 1, 400)])
def test_plans_of_many_sequences(built: ctypes.CDLL, batch: int, heads: int, workers: int) -> None:
    """More heads than the kernel has threads, and more sequences."""
    shape = PlanShape(batch, heads, workers, 64, 128, 13, 8, q_len=2, fresh=2)
    plan = agrees(built, shape, many(batch), 29000, True, True)
    assert len(plan.overflowing) == 1
    assert len(plan.empty) > 10


def test_work_is_shared_equally_and_every_tile_is_had_once(built: ctypes.CDLL) -> None:
    lengths = many(40)
    shape = PlanShape(len(lengths), 2, 66, 64, 128, 13, 8)
    plan = agrees(built, shape, lengths, NO_LIMIT, False, False)
    places = sum(shape.heads * shape.cost(length) for length in lengths if length > 0)
    had = [(tile.sequence, tile.head, number) for tiles in plan.workers for tile in tiles for number in range(tile.first, tile.end)]
    assert len(had) == len(set(had))
    assert set(had) == {(b, head, i) for b, length in enumerate(lengths) for head in range(shape.heads) for i in shape.tiles(length)}
    each = max(-(-places // shape.workers), shape.least_tiles)
    assert all(sum(tile.end - tile.first for tile in tiles) <= each for tiles in plan.workers)
    slots = [tile.slot for tiles in plan.workers for tile in tiles]
    assert len(slots) == len(set(slots))
    assert max(slots) < shape.batch * shape.heads + shape.workers


@pytest.mark.parametrize("batch", [1, 300])
def test_advance_adds_tokens_where_there_is_room(built: ctypes.CDLL, batch: int) -> None:
    """One count for all leaves empty sequences empty; a sequence with a count of its own gets it, empty or not."""
    lengths = [b * 7 % 50 for b in range(batch)]
    for limit in (NO_LIMIT, 40):
        held = ints(lengths)
        overflow = built.advance(held, batch, None, 3, limit)
        want = [n if n == 0 or n + 3 > limit else n + 3 for n in lengths]
        assert list(held) == want
        assert overflow == any(n > 0 and n + 3 > limit for n in lengths)
        counts = [b % 5 for b in range(batch)]
        held = ints(lengths)
        overflow = built.advance(held, batch, ints(counts), 0, limit)
        assert list(held) == [n if n + more > limit else n + more for n, more in zip(lengths, counts, strict=True)]
        assert overflow == any(n + more > limit for n, more in zip(lengths, counts, strict=True))
