"""Lengths at which a launch's split plan changes: where verification has to look."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

SplitTokens = Callable[[int], int]
"""Tokens of a split for a bound of lengths; 0 where sequences are not split. A module exports it (docs/abi.md)."""
NEAR = (-1, 0, 1)


def single_lengths(split_tokens: SplitTokens, block: int, room: int, unpacked: int = 0) -> list[tuple[int, int]]:
    """(length, bound) of one sequence: next to every boundary of the first blocks, and of the first, the last but one and the last
    split, for the bounds with the smallest number of splits, one more, and the largest number within `room` tokens.

    `unpacked` tokens of a sequence are never packed.
    """
    edges = (0, 1, unpacked, *(unpacked + n for n in (block - 1, block, block + 1, 2 * block, 3 * block - 1)))
    found = {(length, max(length, 1)): None for length in edges if length <= room}
    found[1, room] = found[unpacked + block + 1, room] = None  # a captured launch may be replayed with short sequences
    for bound in _bounds_of_interest(split_tokens, block, room):
        split = split_tokens(bound) or bound
        count = math.ceil(bound / split)
        for number in {1, count - 1, count}:
            for at in {unpacked + number * split, unpacked + number * split // block * block}:
                found |= {(at + by, bound): None for by in NEAR if 0 < at + by <= bound}
        found[bound, bound] = None
    return list(found)


def ragged_lengths(split_tokens: SplitTokens, block: int, room: int, batch: int, seed: int = 0, unpacked: int = 0) -> list[tuple[int, ...]]:
    """Lengths of a batch, three times: next to the boundaries of the splits for `room` tokens; log-uniform, with 0 and `room` among
    them; one long sequence beside short ones.
    """
    draw = random.Random(seed)
    split = split_tokens(room) or room
    starts = (*(unpacked + at for at in (*range(split, room + 1, split), 2 * block)), room)
    edges = [at + by for at in starts for by in NEAR if 0 <= at + by <= room]
    log = [int(math.exp(draw.uniform(0.0, math.log(room)))) for _ in range(batch)]
    log[-1], log[batch // 2] = room, 0
    short = [1 + number * block // 3 % (2 * block) for number in range(batch)]
    return [tuple(draw.choices(edges, k=batch)), tuple(log), (*short[:-1], room)]


def _bounds_of_interest(split_tokens: SplitTokens, block: int, room: int) -> list[int]:
    """The first bound for each of the two smallest numbers of splits above one, and for the largest; and the room."""
    first: dict[int, int] = {}
    for bound in _growing(block, room):
        split = split_tokens(bound)
        first.setdefault(math.ceil(bound / split) if split else 1, bound)
    counts = sorted(count for count in first if count > 1)
    return list(dict.fromkeys([*(first[count] for count in [*counts[:2], *counts[-1:]]), room]))


def _growing(block: int, room: int) -> Iterator[int]:
    """Multiples of a block up to the room, an eighth apart in the long run; each also with one token more."""
    bound = block
    while bound < room:
        yield bound
        yield bound + 1
        bound += max(1, bound // (8 * block)) * block
    yield room
