"""The plan of a step: which KV tiles each worker attends to. The oracle of `templates/common/include/kvgen/schedule/plan.hpp`.

All KV tiles of all heads lie in one row, sequence by sequence, and each worker (a CTA of a launch, on the CPU a work unit) has at
most one range of it, all of equal length: stream-K (Osama et al., 2023), as FlashAttention-3, FlashMLA and FlashInfer compute it once
per decode step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple

HEADER = 8
"""int32 before the ranges of a plan; the first is the number of empty sequences."""
WORK_TILE = 8
"""int32 of a work tile."""
OWN_LENGTHS = 32
"""Lengths of own ranges that are tried, at most."""


class HeadLoad(NamedTuple):
    """What there is to read of a head, in KV tiles. A head without tiles counts as one, because its residual needs a worker."""

    tiles: int
    residual: int
    """The KV tiles that have as many bytes as its unquantized tokens."""


@dataclass(frozen=True)
class Row:
    """How the heads lie in the row, and how the row is cut. Shared ranges may hold tiles of several heads; otherwise every head has ranges
    of its own, the last of which may be partly empty.
    """

    each: int
    """Positions of a range."""
    head_cost: int
    """Empty positions before the tiles of a head; others, which stand for its residual, follow them."""
    shared: bool

    def positions(self, load: HeadLoad) -> int:
        """Positions of a head."""
        return self.head_cost + sum(load) if self.shared else -(-load.tiles // self.each) * self.each


@dataclass(frozen=True)
class PlanShape:
    """Constants of a plan, in addition to the lengths. KV tile t of a head holds the packed tokens from t * tile_tokens on, counted after
    the sink. Unquantized tokens belong to no KV tile.
    """

    batch: int
    heads: int
    """Of a sequence: KV heads or, where their runs of query rows have work tiles of their own, runs of all KV heads."""
    workers: int
    tile_tokens: int
    block_tokens: int
    head_cost: int
    """Cost of starting a head, in KV tiles that a worker could read meanwhile."""
    least_tiles: int
    """Least length of a range."""
    window: int = 0
    """Tokens of the sliding window; 0: none."""
    q_len: int = 1
    fresh: int = 0
    """Tokens that the step appends: `q_len` for decode, 0 for attend."""
    unpacked: int = 0
    """Sink and local tokens, which are never in a packed block."""
    tile_residual: int = 0
    """Unquantized tokens that have as many bytes as a KV tile; 0: they do not count."""

    def packed(self, length: int) -> int:
        """Tokens of a sequence that are packed."""
        return max(0, length - self.unpacked) // self.block_tokens * self.block_tokens

    def tiles(self, length: int) -> range:
        """KV tiles of a sequence that hold a token which a query of the step attends to. A window never goes with sink tokens."""
        packed = self.packed(length)
        end = -(-packed // self.tile_tokens)
        token = length + self.fresh - self.q_len - self.window + 1
        if self.window == 0 or token <= 0:
            return range(end)
        return range(token // self.tile_tokens if token < packed else end, end)

    def load(self, length: int) -> HeadLoad:
        """What there is to read of each head of a sequence."""
        rest = length + self.fresh - self.packed(length)
        return HeadLoad(max(len(self.tiles(length)), 1), rest // self.tile_residual if self.tile_residual else 0)

    def range_length(self, total: int) -> int:
        """Positions of a range, in a row of `total`."""
        return max(-(-total // self.workers), self.least_tiles)

    def row(self, heads: Sequence[HeadLoad]) -> Row:
        """Chooses the row for heads of these loads.

        Heads have ranges of their own if there are workers enough for all ranges and the ranges are not longer than shared ones: then no
        worker starts on a second head. Their length is the least multiple of `least_tiles` for which the workers suffice, or the
        least of the OWN_LENGTHS longest ones.
        """
        loads = sum(map(sum, heads))
        shared = Row(self.range_length(loads + len(heads) * self.head_cost), self.head_cost, True)
        if self.head_cost == 0 or len(heads) > self.workers:
            return shared
        longest = shared.each // self.least_tiles
        rows = [Row(multiple * self.least_tiles, 0, False) for multiple in range(longest, max(0, longest - OWN_LENGTHS), -1)]
        return [shared, *(row for row in rows if sum(map(row.positions, heads)) <= row.each * self.workers)][-1]

    @property
    def tiles_at(self) -> int:
        """Where the work tiles begin in the plan, in int32."""
        return -(-(HEADER + 2 * self.workers) // 8) * 8

    @property
    def empty_at(self) -> int:
        """Where the list of empty sequences begins."""
        return self.tiles_at + WORK_TILE * (self.batch * self.heads + self.workers)

    @property
    def size(self) -> int:
        """int32 of a plan."""
        return self.empty_at + self.batch


@dataclass(frozen=True)
class WorkTile:
    """A range [first, end) of the KV tiles of one head, in the order in which a plan stores its fields."""

    sequence: int
    head: int
    first: int
    end: int
    split_idx: int
    num_splits: int
    slot: int
    length: int


@dataclass(frozen=True)
class Plan:
    """Work tiles of every worker, sequences without tokens, and sequences that have no room for the step's tokens."""

    workers: tuple[tuple[WorkTile, ...], ...]
    empty: tuple[int, ...]
    overflowing: tuple[int, ...]


def make_plan(shape: PlanShape, lengths: Sequence[int], limit: int, skip_empty: bool = False) -> Plan:
    """The plan of a step over sequences of `lengths` tokens, none of which may exceed `limit` after the step.

    An empty sequence is included if the step appends tokens, unless `skip_empty`.
    """
    empty = [b for b, n in enumerate(lengths) if n <= 0 and (shape.fresh == 0 or skip_empty)]
    overflowing = [b for b, n in enumerate(lengths) if b not in empty and n + shape.fresh > limit]
    heads = [(b, head) for b in range(shape.batch) if b not in empty and b not in overflowing for head in range(shape.heads)]
    loads = [shape.load(lengths[b]) for b, _ in heads]
    row = shape.row(loads)
    ranges = -(-sum(map(row.positions, loads)) // row.each)
    workers: list[list[WorkTile]] = [[] for _ in range(shape.workers)]
    at = 0
    for number, ((b, head), load) in enumerate(zip(heads, loads, strict=True)):
        tiles = shape.tiles(lengths[b])
        first_place = at + row.head_cost
        at += row.positions(load)
        last_place = (first_place + load.tiles if row.shared else at) - 1
        having = range(first_place // row.each, last_place // row.each + 1)
        for index in having:
            first = max(index * row.each - first_place, 0)
            end = min((index + 1) * row.each - first_place, len(tiles))
            split = (index - having.start, len(having))
            # Where there are fewer ranges than workers they are spread evenly.
            workers[index * shape.workers // ranges].append(
                WorkTile(b, head, tiles.start + first, tiles.start + end, *split, number + index, lengths[b])
            )
    return Plan(tuple(map(tuple, workers)), tuple(empty), tuple(overflowing))


def written_plan(shape: PlanShape, plan: Plan) -> list[int]:
    """The int32 numbers of a plan, as a module writes them; places without a meaning are 0."""
    numbers = [0] * shape.size
    numbers[0] = len(plan.empty)
    numbers[shape.empty_at : shape.empty_at + len(plan.empty)] = plan.empty
    for worker, tiles in enumerate(plan.workers):
        if not tiles:
            continue
        numbers[HEADER + 2 * worker : HEADER + 2 * worker + 2] = tiles[0].slot, tiles[-1].slot + 1
        for tile in tiles:
            place = shape.tiles_at + WORK_TILE * tile.slot
            numbers[place : place + WORK_TILE] = astuple(tile)
    return numbers


def read_plan(shape: PlanShape, numbers: Sequence[int]) -> Plan:
    """A plan from the int32 numbers that a module wrote; sequences that overflow are not in it."""
    workers = []
    for worker in range(shape.workers):
        begin, end = numbers[HEADER + 2 * worker : HEADER + 2 * worker + 2]
        places = (shape.tiles_at + WORK_TILE * index for index in range(begin, end))
        workers.append(tuple(WorkTile(*numbers[place : place + WORK_TILE]) for place in places))
    return Plan(tuple(workers), tuple(numbers[shape.empty_at : shape.empty_at + numbers[0]]), ())
