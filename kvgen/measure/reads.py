"""Verifies `attend` over large filled caches: one long sequence, several, and on a GPU many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache

import torch

from kvgen.format.layout import PackedLayout
from kvgen.format.window import window_places
from kvgen.measure.compare import Comparison, poisoned
from kvgen.measure.filled import FilledCache, Kept, Output
from kvgen.measure.scenario import extend_tokens, query_lengths
from kvgen.measure.split_lengths import SplitTokens, ragged_lengths, single_lengths
from kvgen.runtime.variant import Variant
from kvgen.spec import KernelSpec
from kvgen.verify.data import learned_sinks, normal

ROOM_BYTES = {"cpu": 48 << 20, "cuda": 256 << 20}
"""Packed bytes of a cache. They bound the number of splits that a sequence can have here."""
KEPT_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}
SEVERAL = 9
MANY, MANY_BLOCKS = 1024, 3
"""Largest number of sequences on a GPU, of which as many are used as fit; `kvgen.measure.sizes` has more, of fewer tokens."""
FEW = 16
"""Of as many sequences one has tokens in a further case: on a GPU there are more empty sequences than CTAs."""
UNEVEN = 160
UNEVEN_TOKENS = 2048
"""Another case on a GPU: more sequences than the 128 whose lengths a CTA keeps, some much longer than others, so that splits differ."""


@dataclass(frozen=True)
class Case:
    """One call over a filled cache, with its expected result."""

    name: str
    filled: FilledCache
    q: torch.Tensor
    lengths: tuple[int, ...]
    bound: int
    want: Output


class Reads:
    """The cases of one variant. `prepare` computes references, `run` calls the variant. Filled caches are kept for the next variant."""

    def __init__(self, variant: Variant, device: torch.device, comparison: Comparison, most_tokens: int) -> None:
        self.variant, self.device, self._comparison, self._most_tokens = variant, device, comparison, most_tokens
        self._cases: list[Case] = []
        self._sinks = learned_sinks(variant.spec, device)
        self._unpacked = variant.spec.cache.unpacked

    def prepare(self) -> None:
        """Fill caches and compute the expected results."""
        room = room_tokens(self.variant.spec, self.variant.layout, ROOM_BYTES[self.device.type], self._most_tokens)
        self._cases = [*self._one(room + self._unpacked), *self._several(room // SEVERAL + self._unpacked)]
        if self.device.type == "cuda":
            self._cases += self._many()

    def run(self) -> None:
        """Raises CheckError at the first wrong number."""
        for filled in dict.fromkeys(case.filled for case in self._cases):
            mine = [case for case in self._cases if case.filled is filled]
            outputs = [(case, how, self._call(case, uniform)) for case in mine for how, uniform in self._schedulers(case)]
            for case, how, output in outputs:
                self._comparison.output(f"{case.name}{how}", *output, *case.want)
            self.variant.release(filled.cache)

    def _schedulers(self, case: Case) -> tuple[tuple[str, bool | None], ...]:
        """The schedulers of a case: on a GPU both must give the same numbers, for all lengths."""
        if self.device.type == "cpu" or len(case.lengths) == 1:
            return (("", None),)
        return (", with a plan", False), (", by the static scheduler", True)

    def _call(self, case: Case, uniform: bool | None) -> Output:
        case.filled.set(case.lengths, case.bound)
        if uniform is not None:
            case.filled.cache.sequences.uniform = uniform
        out = poisoned(case.q.shape, case.q.dtype, self.device)
        lse = poisoned(case.want[1].shape, torch.float32, self.device)
        self.variant.attend(case.q, case.filled.cache, out=out, lse=lse, sinks=self._sinks)
        return out, lse

    def _one(self, room: int) -> Iterator[Case]:
        filled = self._filled(1, room)
        for q_len in self._query_lengths():
            pairs = single_lengths(self._split_tokens(1, q_len), self.variant.layout.tokens, room, self._unpacked)
            if q_len > 1:  # one split more, and the most
                pairs = [pair for pair in pairs if pair[0] == pair[1]][-2:]
            q = self._query(1, q_len)
            lengths = tuple(length for length, _ in pairs)
            out, lse = self._want(filled, q.expand(len(pairs), -1, -1, -1), lengths, (0,) * len(pairs))
            for index, (length, bound) in enumerate(pairs):
                name = f"attend of {q_len} queries over {length} tokens, bound {bound}"
                yield Case(name, filled, q, (length,), bound, (out[index : index + 1], lse[index : index + 1]))

    def _several(self, room: int) -> Iterator[Case]:
        filled = self._filled(SEVERAL, room)
        for q_len in query_lengths(self.variant.spec):
            drawn = ragged_lengths(
                self._split_tokens(SEVERAL, q_len), self.variant.layout.tokens, room, SEVERAL, seed=q_len, unpacked=self._unpacked
            )
            for lengths in drawn if q_len == 1 else drawn[:1]:
                yield self._case(f"attend of {q_len} queries over {list(lengths)} tokens", filled, q_len, lengths)

    def _many(self) -> Iterator[Case]:
        block, room = self.variant.layout.tokens, MANY_BLOCKS * self.variant.layout.tokens + self._unpacked
        each = room_tokens(self.variant.spec, self.variant.layout, ROOM_BYTES[self.device.type], 1 << 30) // room
        batch = min(MANY, max(UNEVEN, each))
        lengths = tuple(number * (block // 2 + 5) % (room + 1) for number in range(batch))
        filled = self._filled(batch, room)
        yield self._case(f"attend over {batch} sequences", filled, 1, lengths)
        few = tuple(length if number % FEW == 1 else 0 for number, length in enumerate(lengths))
        yield self._case(f"attend over {batch} sequences, most of them empty", filled, 1, few)
        lengths = tuple(UNEVEN_TOKENS - number if number % 9 == 8 else 40 + number for number in range(UNEVEN))
        yield self._case(f"attend over {UNEVEN} unequal sequences", self._filled(UNEVEN, UNEVEN_TOKENS), 1, lengths)

    def _case(self, name: str, filled: FilledCache, q_len: int, lengths: Sequence[int]) -> Case:
        q = self._query(len(lengths), q_len)
        return Case(name, filled, q, tuple(lengths), max(lengths), self._want(filled, q, tuple(lengths)))

    def _split_tokens(self, batch: int, q_len: int) -> SplitTokens:
        """Tokens of a split for a bound, as the module reports them."""
        ask = self.variant.module.split_tokens

        def split_tokens(bound: int) -> int:
            with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
                return int(ask(batch, bound, q_len))

        return split_tokens

    @staticmethod
    def _want(filled: FilledCache, q: torch.Tensor, lengths: tuple[int, ...], sequences: tuple[int, ...] | None = None) -> Output:
        """The reference, computed once for all variants."""
        key = q.shape[1], lengths
        return filled.known.get(key) or filled.known.setdefault(key, filled.attend(q, lengths, sequences=sequences))

    def _filled(self, batch: int, tokens: int) -> FilledCache:
        return _kept(self.device.type).get(self.variant, batch, tokens, self.device)

    def _query_lengths(self) -> Iterator[int]:
        """All that a GPU module takes; on the CPU, which has no limit, also one number beyond a block of query rows, unless a cache with
        a sliding window does not keep what so many see."""
        yield from query_lengths(self.variant.spec)
        if self.device.type == "cpu" and not window_places(self.variant.spec, self.variant.layout.tokens):
            yield extend_tokens(self.variant.spec)

    def _query(self, batch: int, q_len: int) -> torch.Tensor:
        return normal(self.variant.spec, batch, 1, q_len=q_len, seed=5).q.to(self.device)


def room_tokens(spec: KernelSpec, layout: PackedLayout, nbytes: int, most: int) -> int:
    """Tokens of one sequence that fit in so many bytes of packed blocks: whole blocks, at least as many as several short sequences need."""
    block = layout.block_bytes * spec.attention.kv_heads
    return max(4 * SEVERAL, min(nbytes // block, most // layout.tokens)) * layout.tokens


@cache
def _kept(device: str) -> Kept:
    return Kept(KEPT_BYTES[device])
