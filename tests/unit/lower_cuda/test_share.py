"""Equal shares of all heads: every unit is in one piece, of one CTA, however lengths are."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.gpu_words import spec_of, workload_of
from kvgen.reference.layout import packed_layout
from tests.unit.lower_cuda.emulate_attend import compile_variant, launch

WARPS, UNIT, BLOCK = 2, 64, 128
START = -(-(96 * 1024 + WARPS * (8448 + 512)) // 8448)
"""Units that beginning with a head counts as."""
MOST = 4096
CALLS = """
using Traits_ = kvgen::Traits<Format, kvgen::Solo<Schedule>>;
struct Lengths {
  const kvgen::CacheArgs& cache;
  int lane, longest;
  int length(int batch) const { return kvgen::length_of(cache, batch, longest); }
};
extern "C" int pieces(int slot, int slots, int batch, int kv_heads, int* lengths, int longest, int* rows, int most) {
  kvgen::CacheArgs cache;
  cache.lengths = lengths, cache.batch = batch, cache.kv_heads = kv_heads;
  int count = 0;
  emulator::launch(dim3(1), 32, [&] {
    if (longest == kvgen::kSure) kvgen::ptx::griddepcontrol_wait();
    kvgen::Share<Traits_> share(Lengths{cache, threadIdx.x, longest}, kvgen::Divisor(slots), slot);
    for (int i = 0; i < most; ++i) {
      const kvgen::Piece p = share.next(cache, [&](int batch) { return kvgen::length_of(cache, batch, longest); });
      if (p.count == 0) break;
      const int row[] = {p.head.batch, p.head.head, p.length, p.begin, p.end, p.rank, p.count, p.first, p.turn};
      if (threadIdx.x == 0) std::copy(row, row + 9, rows + 9 * count), ++count;
    }
  });
  return count;
}
"""


@dataclass(frozen=True)
class Piece:
    """As the kernel has it."""

    batch: int
    head: int
    length: int
    begin: int
    end: int
    rank: int
    count: int
    first: int
    turn: int


Ask = Callable[..., list[Piece]]
SURE = -1


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    spec = spec_of("k4v4:h8/2", "sm90", [workload_of("2x256")])
    chosen = launch(warps=WARPS, kv_tile=UNIT, tiles_in_flight=1)
    built = compile_variant(spec, packed_layout(spec, BLOCK, "mma"), chosen, tmp_path_factory.mktemp("share"), CALLS)

    def pieces(slot: int, slots: int, heads: int, lengths: list[int], longest: int = SURE) -> list[Piece]:
        rows = (ctypes.c_int * (9 * MOST))()
        count = built.pieces(slot, slots, len(lengths), heads, (ctypes.c_int * len(lengths))(*lengths), longest, rows, MOST)
        return [Piece(*rows[9 * i : 9 * i + 9]) for i in range(count)]

    return pieces


def units(length: int) -> int:
    return length // BLOCK * (BLOCK // UNIT)


def test_shares_are_equal_and_hold_every_unit_once(ask: Ask) -> None:
    @settings(max_examples=60, deadline=None, database=None)
    @given(
        st.lists(st.one_of(st.sampled_from([0, 127, 128]), st.integers(0, 9000)), min_size=1, max_size=70),
        st.integers(1, 3),
        st.integers(1, 20),
    )
    def check(lengths: list[int], heads: int, slots: int) -> None:
        shares = [ask(slot, slots, heads, lengths) for slot in range(slots + 2)]
        row = heads * sum(START + max(units(length), 1) for length in lengths)
        found = defaultdict(list)
        for slot, share in enumerate(shares):
            assert sum(piece.end - piece.begin for piece in share) <= max(-(-row // slots), WARPS)
            assert [piece.turn for piece in share] == [sum(p.end - p.begin for p in share[:i]) for i in range(len(share))]
            assert not share or slot < slots
            for piece in share:
                found[piece.batch, piece.head].append(piece)
        places = [piece.first + piece.rank for pieces in found.values() for piece in pieces]
        assert len(set(places)) == len(places)
        assert max(places) < slots + heads * len(lengths)
        for batch, length in enumerate(lengths):
            for head in range(heads):
                pieces = found[batch, head]
                assert [(p.rank, p.count, p.length, p.first) for p in pieces] == [
                    (rank, len(pieces), length, pieces[0].first) for rank in range(len(pieces))
                ]
                assert [p.begin for p in pieces] == [0, *(p.end for p in pieces[:-1])]
                assert pieces[-1].end == units(length)

    check()


def test_launches_of_many_more_ctas_than_run_at_once(ask: Ask) -> None:
    """A thousand sequences of 128K to 32 heads: what all CTAs of a launch would have, if each had a share, does not fit an int."""
    lengths, slots, heads = [131072 + 128 * (i % 7) for i in range(1024)], 132, 32
    for slot in (0, 77, slots - 1):
        share = ask(slot, slots, heads, lengths)
        assert share
        assert all(0 <= p.begin < p.end <= units(lengths[p.batch]) and 0 <= p.rank < p.count for p in share)
    assert [ask(slot, slots, heads, lengths) for slot in (slots, 8 * slots, 2**20)] == [[], [], []]


def test_before_its_turn_a_launch_sees_anything_and_finds_pieces_that_can_be(ask: Ask) -> None:
    """The emulator garbles lengths, of more sequences than a warp copies: a piece is of a head that there is, within the longest."""
    longest, slots, heads, lengths = 4096, 132, 32, [7] * 300
    for slot in (0, 50, 113, slots - 1):
        for p in ask(slot, slots, heads, lengths, longest):
            assert 0 <= p.batch < len(lengths)
            assert 0 <= p.head < heads
            assert 0 <= p.begin <= p.end <= units(longest)
