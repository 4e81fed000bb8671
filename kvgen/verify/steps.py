"""Decode steps: lengths shared by several layers, sequences that are empty or have no room, missing pages; and extend attention.

`planned` simulates a captured batch of a serving engine: two layers, one plan per step, lengths that advance at its end. `static` uses the
static scheduler with sequences of equal lengths, until there is no room. Both compare every output with the fp64 reference, and check that
a step does not change other memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import torch

from kvgen.errors import CacheMismatch, CheckError
from kvgen.lower.modifier import extend_refusal
from kvgen.runtime.kvcache import KVCache
from kvgen.verify.calls import CallCheck, Output, Pair, form, poison, query_lengths
from kvgen.verify.data import normal
from kvgen.verify.reference import WholeSequences

T = TypeVar("T")
Layer = tuple[WholeSequences, list[torch.Tensor]]
"""K and V of a layer, and the queries of its steps."""
LAYERS = 2
STEPS = 3
BATCH = 2
"""Sequences of equal lengths."""
LONGEST_WINDOW = 2048
EXTEND_TOKENS = 72
"""More query tokens than a GPU's kernel takes or a CPU's block of query rows holds."""


class Steps(CallCheck):
    """All of them."""

    def run(self) -> None:
        """Raises CheckError at the first wrong number."""
        self.q_len = len(query_lengths(self.spec))  # of a step: the most that the kernel takes
        window = self.spec.attention.window or 0
        self.passed = window if window <= LONGEST_WINDOW else 0  # tokens that a window leaves behind; of long windows that costs too much
        self.planned()
        self.static()
        if not extend_refusal(self.spec, gpu=self.gpu):
            self.extended()

    def planned(self) -> None:
        """Two layers over a batch with empty sequences; the longest sequence has room for one step, another one for two."""
        block, q_len, begin = self.block, self.q_len, self.passed + self.unpacked
        limit = begin + 3 * block + 7
        lengths = [limit - q_len, 0, self.unpacked + block - 1, begin + 2 * block + 5, 1, limit - 2 * q_len, 0]
        layers = [self._layer(len(lengths), limit, seed) for seed in range(1, LAYERS + 1)]
        first = self.poisoned_cache(len(lengths), limit)
        caches = [first, *(poison(self.variant.new_cache(like=first)) for _ in range(LAYERS - 1))]
        for cache, (whole, _) in zip(caches, layers, strict=True):
            self.variant.prefill(cache, *whole.new([0] * len(lengths), max(lengths)), lengths, advance=False)
        first.advance(lengths)
        first.sequences.captured = True  # as in replays of a graph: the host does not know the lengths
        for step in range(STEPS):
            where = f"step {step + 1} over a plan"
            full = [b for b, n in enumerate(lengths) if n + q_len > limit]
            after = [n + q_len if n and b not in full else n for b, n in enumerate(lengths)]
            plan = self._attempt(f"plan of {where}", first, lambda: self.variant.plan(first, q_len, uniform=False), overflow=bool(full))
            if plan is None:
                after = lengths
            else:
                for number, (cache, (whole, queries)) in enumerate(zip(caches, layers, strict=True), 1):
                    new = self.laid_out(whole.new(lengths, q_len), number)
                    found = self.call(cache, queries[step], new, plan=plan, lse=(step + number) % 2 == 0)
                    self._compare(f"layer {number}, {where}", found, whole.attend(queries[step], lengths, after), full)
                    self.same_lengths(f"layer {number}, {where}", cache, lengths)
            self._attempt(f"end of {where}", first, lambda: first.advance(q_len), overflow=bool(full))
            self.same_lengths(f"end of {where}", first, after)
            lengths = after
        for cache, (whole, _) in zip(caches, layers, strict=True):
            self.same_contents("after steps over a plan", self.variant.unpack(cache), whole.seen(lengths), lengths)
        first.reset([2])
        lengths[2] = 0
        self._drop_unseen_pages(first, lengths)
        plan = self.variant.plan(first, q_len, append=False, uniform=False)
        for cache, (whole, queries) in zip(caches, layers, strict=True):
            q = queries[STEPS]
            self._compare("attend over a plan after a reset", self.call(cache, q, plan=plan), whole.attend(q, lengths, lengths))

    def static(self) -> None:
        """Sequences of equal lengths whose residual becomes full in the second step, and that have no room for a fourth."""
        block, q_len = self.block, self.q_len
        full = -(-self.passed // block) * block + 2 * block + self.unpacked
        length, limit = full - 2 * q_len, full + q_len
        whole, queries = self._layer(BATCH, limit, 9)
        cache = self.poisoned_cache(BATCH, limit)
        self.variant.prefill(cache, *whole.new([0] * BATCH, length))
        cache.sequences.captured = True
        for step in range(STEPS + 1):
            where, q, lengths = f"step {step + 1} of equal lengths", queries[step], [length] * BATCH
            overflow = length + q_len > limit
            length += 0 if overflow else q_len
            new, out = self.laid_out(whole.new(lengths, q_len), step), torch.full_like(q, torch.nan)
            stays = step == 0  # so that the lengths advance afterwards, as in a layer of several; the residual has room for this step
            call = partial(self.call, cache, q, new, advance=not stays, lse=step % 2 == 0, out=out)
            found = self._attempt(where, cache, call, overflow=overflow) or (out, None)
            if stays:
                cache.advance(q_len)
            self._compare(where, found, whole.attend(q, lengths, [length] * BATCH), range(BATCH) if overflow else ())
            self.same_lengths(where, cache, [length] * BATCH)
        lengths = [length] * BATCH
        self.same_contents("after steps of equal lengths", self.variant.unpack(cache), whole.seen(lengths), lengths)
        self._drop_unseen_pages(cache, lengths)
        plan = self.variant.plan(cache, q_len, append=False, uniform=True)
        self._compare("attend of equal lengths", self.call(cache, queries[-1], plan=plan), whole.attend(queries[-1], lengths, lengths))

    def extended(self) -> None:
        """Extend attention over short sequences."""
        lengths = [self.unpacked + self.block + 5, 3]
        after = [length + EXTEND_TOKENS for length in lengths]
        whole, _ = self._layer(len(lengths), max(after), 11)
        cache = self.poisoned_cache(len(lengths), max(after))
        self.variant.prefill(cache, *whole.new([0] * len(lengths), max(lengths)), lengths)
        q = normal(self.spec, len(lengths), 1, q_len=EXTEND_TOKENS, seed=12).q.to(self.device)
        rounded = q.dtype if self.gpu else None  # torch's kernels read K and V in dtype
        where = f"decode of {EXTEND_TOKENS} tokens"
        found = self.formed(form(3), q, whole.new(lengths, EXTEND_TOKENS))(cache)
        self.comparison.output(where, *found, *whole.attend(q, lengths, after, rounded))
        self.same_lengths(where, cache, after)
        self.same_contents(f"after a {where}", self.variant.unpack(cache), whole.seen(after), after)
        if not self.places:  # else the cache may not keep what so many see
            where = f"attend of {EXTEND_TOKENS} queries over {after} tokens"
            self.comparison.output(where, *self.formed(form(1), q)(cache), *whole.attend(q, after, after, rounded))

    def _layer(self, batch: int, tokens: int, seed: int) -> Layer:
        """Data of a layer for `tokens` tokens per sequence, and the queries of its steps and of one `attend` after them."""
        inputs = normal(self.spec, batch, tokens, q_len=(STEPS + 2) * self.q_len, seed=seed)
        queries = [q.contiguous().to(self.device) for q in torch.split(inputs.q, self.q_len, dim=1)]
        return WholeSequences(self.spec, self.block, inputs.k.to(self.device), inputs.v.to(self.device)), queries

    def _attempt(self, where: str, cache: KVCache, call: Callable[[], T], *, overflow: bool) -> T | None:
        """The result of a call, after which the host must learn whether a sequence had no room; on the CPU the call itself raises."""
        if overflow and not self.gpu:
            with suppress(ValueError):
                call()
                raise CheckError(f"{where}: a sequence without room is not refused")
            return None
        result, told = call(), False
        if self.gpu:
            torch.cuda.synchronize(self.device)
        try:
            cache.sequences.overflow.check()
        except CacheMismatch:
            told = True
        if told != overflow:
            raise CheckError(f"{where}: the host is {'told' if told else 'not told'} that a sequence has no room")
        return result

    def _compare(self, where: str, got: Output, want: Pair, full: Sequence[int] = ()) -> None:
        """The output of all sequences but those without room, `full`, whose outputs are still poisoned."""
        rows = [b for b in range(len(got[0])) if b not in full]
        if rows:
            self.comparison.output(where, got[0][rows], None if got[1] is None else got[1][rows], want[0][rows], want[1][rows])
        if full and not bool(torch.isnan(got[0][list(full)]).all()):
            raise CheckError(f"{where}: the output of a sequence without room was written")

    def _drop_unseen_pages(self, cache: KVCache, lengths: Sequence[int]) -> None:
        """Remove the pages from the block table that lie entirely before the window of every query."""
        window, page = self.spec.attention.window, self.spec.cache.page
        if window is not None and page is not None and cache.block_table is not None:
            for b, length in enumerate(lengths):
                cache.block_table[b, : max(0, length - self.q_len + 1 - window) // page] = -1
