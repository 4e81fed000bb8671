"""`attend` over large filled caches, at the lengths where a launch's split plan changes: one long sequence, several, and on a GPU many."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from kvgen.format.layout import PackedLayout
from kvgen.spec import KernelSpec
from kvgen.verify.calls import CallCheck, Pair, query_lengths
from kvgen.verify.data import normal
from kvgen.verify.filled import FilledCache, kept
from kvgen.verify.lives import extend_tokens

ROOM_BYTES = {"cpu": 48 << 20, "cuda": 256 << 20}
"""Packed bytes of a cache. They bound the number of splits that a sequence can have here."""
KEPT = 8
"""Filled caches that are kept for the next variant: those of two layouts."""
SEVERAL = 9
MANY, MANY_BLOCKS = 1024, 3
"""Largest number of sequences on a GPU, of which as many are used as fit; `kvgen.verify.sizes` has more, of fewer tokens."""
FEW = 16
"""Of as many sequences one has tokens in a further case: on a GPU there are more empty sequences than CTAs."""
UNEVEN, UNEVEN_TOKENS = 160, 2048
"""Another case on a GPU: more sequences than the 128 whose lengths a CTA keeps, some much longer than others, so that splits differ."""
NEAR = (-1, 0, 1)

SplitTokens = Callable[[int], int]
"""Tokens of a split for a bound of lengths; 0 where sequences are not split. A module exports it (docs/abi.md)."""

_filled: dict[object, FilledCache] = {}


@dataclass(frozen=True)
class Case:
    """One call over a filled cache, with its expected result."""

    name: str
    filled: FilledCache
    q: torch.Tensor
    lengths: tuple[int, ...]
    bound: int
    want: Pair


class Reads(CallCheck):
    """Filled caches, and the references over them, are kept for the next variant."""

    _cases: Sequence[Case] = ()

    def prepare(self) -> None:
        """Fill caches and compute the expected results."""
        room = room_tokens(self.spec, self.layout, ROOM_BYTES[self.device.type], self.policy.most_tokens)
        many = self._many() if self.gpu else ()
        self._cases = [*self._one(room + self.unpacked), *self._several(room // SEVERAL + self.unpacked), *many]

    def run(self) -> None:
        """Raises CheckError at the first wrong number."""
        for case in self._cases:
            for how, uniform in self.schedulers() if self.gpu and len(case.lengths) > 1 else (("", len(set(case.lengths)) == 1),):
                case.filled.set(case.lengths, case.bound)
                case.filled.cache.sequences.uniform = uniform
                found: Pair = self.call(case.filled.cache, case.q)
                self.comparison.output(f"{case.name}{how}", *found, *case.want)
        for case in self._cases:
            self.variant.release(case.filled.cache)

    def _one(self, room: int) -> Iterator[Case]:
        filled = self._cache(1, room)
        more = [] if self.gpu or self.places else [extend_tokens(self.spec)]  # the CPU has no limit, unless the cache forgets what they see
        for q_len in (*query_lengths(self.spec), *more):
            pairs = single_lengths(self._split_tokens(1, q_len), self.block, room, self.unpacked)
            if q_len > 1:  # one split more, and the most
                pairs = [pair for pair in pairs if pair[0] == pair[1]][-2:]
            q = self._query(1, q_len)
            lengths = tuple(length for length, _ in pairs)
            out, lse = self._want(filled, q.expand(len(pairs), -1, -1, -1), lengths, (0,) * len(pairs))
            for index, (length, bound) in enumerate(pairs):
                name = f"attend of {q_len} queries over {length} tokens, bound {bound}"
                yield Case(name, filled, q, (length,), bound, (out[index : index + 1], lse[index : index + 1]))

    def _several(self, room: int) -> Iterator[Case]:
        filled = self._cache(SEVERAL, room)
        for q_len in query_lengths(self.spec):
            drawn = ragged_lengths(self._split_tokens(SEVERAL, q_len), self.block, room, SEVERAL, seed=q_len, unpacked=self.unpacked)
            for lengths in drawn if q_len == 1 else drawn[:1]:
                yield self._case(f"attend of {q_len} queries over {list(lengths)} tokens", filled, q_len, lengths)

    def _many(self) -> Iterator[Case]:
        block, room = self.block, MANY_BLOCKS * self.block + self.unpacked
        batch = min(MANY, max(UNEVEN, room_tokens(self.spec, self.layout, ROOM_BYTES["cuda"], 1 << 30) // room))
        lengths = tuple(number * (block // 2 + 5) % (room + 1) for number in range(batch))
        filled = self._cache(batch, room)
        yield self._case(f"attend over {batch} sequences", filled, 1, lengths)
        few = tuple(length if number % FEW == 1 else 0 for number, length in enumerate(lengths))
        yield self._case(f"attend over {batch} sequences, most of them empty", filled, 1, few)
        lengths = tuple(UNEVEN_TOKENS - number if number % 9 == 8 else 40 + number for number in range(UNEVEN))
        yield self._case(f"attend over {UNEVEN} unequal sequences", self._cache(UNEVEN, UNEVEN_TOKENS), 1, lengths)

    def _case(self, name: str, filled: FilledCache, q_len: int, lengths: Sequence[int]) -> Case:
        q = self._query(len(lengths), q_len)
        return Case(name, filled, q, tuple(lengths), max(lengths), self._want(filled, q, tuple(lengths)))

    def _cache(self, batch: int, tokens: int) -> FilledCache:
        key = (self.spec.format_id, self.layout.id, self.device, batch, tokens)
        filled = kept(_filled, key, KEPT, lambda: FilledCache(self.variant, batch, tokens, self.device))
        self.variant.release(filled.cache)
        return filled

    def _query(self, batch: int, q_len: int) -> torch.Tensor:
        return normal(self.spec, batch, 1, q_len=q_len, seed=5).q.to(self.device)

    def _split_tokens(self, batch: int, q_len: int) -> SplitTokens:
        """Tokens of a split for a bound, as the module reports them."""

        def split_tokens(bound: int) -> int:
            with torch.cuda.device(self.device) if self.gpu else nullcontext():
                return int(self.variant.module.split_tokens(batch, bound, q_len))

        return split_tokens

    @staticmethod
    def _want(filled: FilledCache, q: torch.Tensor, lengths: tuple[int, ...], sequences: tuple[int, ...] | None = None) -> Pair:
        """The reference, computed once for all variants."""
        key = q.shape[1], lengths
        return filled.known.get(key) or filled.known.setdefault(key, filled.attend(q, lengths, sequences=sequences))


def room_tokens(spec: KernelSpec, layout: PackedLayout, nbytes: int, most: int) -> int:
    """Tokens of one sequence that fit in so many bytes of packed blocks: whole blocks, at least as many as several short sequences need."""
    block = layout.block_bytes * spec.attention.kv_heads
    return max(4 * SEVERAL, min(nbytes // block, most // layout.tokens)) * layout.tokens


def single_lengths(split_tokens: SplitTokens, block: int, room: int, unpacked: int = 0) -> list[tuple[int, int]]:
    """(length, bound) of one sequence: next to every boundary of the first blocks, and of the first, the last but one and the last
    split, for the bounds with the smallest number of splits, one more, and the largest number within `room` tokens.

    `unpacked` tokens of a sequence are never packed.
    """
    edges = (0, 1, unpacked, *(unpacked + n for n in (block - 1, block, block + 1, 2 * block, 3 * block - 1)))
    found = {(length, max(length, 1)): None for length in edges if length <= room}
    found[1, room] = found[unpacked + block + 1, room] = None  # a captured launch may be replayed with short sequences
    first: dict[int, int] = {}  # bound for each number of splits
    for bound in _growing(block, room):
        split = split_tokens(bound)
        first.setdefault(math.ceil(bound / split) if split else 1, bound)
    counts = sorted(count for count in first if count > 1)
    for bound in dict.fromkeys([*(first[count] for count in [*counts[:2], *counts[-1:]]), room]):
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


def _growing(block: int, room: int) -> Iterator[int]:
    """Multiples of a block up to the room, an eighth apart in the long run; each also with one token more."""
    bound = block
    while bound < room:
        yield bound
        yield bound + 1
        bound += max(1, bound // (8 * block)) * block
    yield room
