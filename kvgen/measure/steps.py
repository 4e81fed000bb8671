"""Verifies decode steps: lengths shared by several layers, sequences that are empty or have no room, missing pages.

`PlannedSteps` simulates a captured batch of a serving engine: two layers, one plan per step, lengths that advance at its end.
`StaticSteps` uses the static scheduler with sequences of equal lengths, until there is no room. Both compare every output with the fp64
reference, and check that a step does not change other memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from kvgen.errors import CacheMismatch, CheckError
from kvgen.format.window import first_held, window_places
from kvgen.lower.extend import extend_refusal
from kvgen.measure.call_forms import form, formed, laid_out
from kvgen.measure.compare import NAN_BYTE, Comparison, poison, poisoned
from kvgen.measure.job import CheckPolicy
from kvgen.measure.life import Life, whole_tokens
from kvgen.measure.scenario import query_lengths
from kvgen.runtime.kvcache import KVCache
from kvgen.runtime.variant import Variant
from kvgen.verify.data import learned_sinks, normal

T = TypeVar("T")
Lengths = tuple[int, ...]
LAYERS = 2
STEPS = 3
LONGEST_WINDOW = 2048


@dataclass(frozen=True)
class StepCheck:
    """Common to both: a variant, a device, and the limits of a comparison."""

    variant: Variant
    device: torch.device
    policy: CheckPolicy
    comparison: Comparison

    @property
    def q_len(self) -> int:
        """Query tokens of a step: the most that the kernel takes."""
        return len(query_lengths(self.variant.spec))

    @property
    def passed(self) -> int:
        """Tokens that a window leaves behind in a sequence some blocks longer; of long windows that costs too much, and none is passed."""
        window = self.variant.spec.attention.window
        return window if window is not None and window <= LONGEST_WINDOW else 0

    @property
    def unpacked(self) -> int:
        """Tokens of a sequence that are never packed."""
        return self.variant.spec.cache.unpacked

    @property
    def sinks(self) -> torch.Tensor | None:
        """Learned sinks, of a spec that has them."""
        return learned_sinks(self.variant.spec, self.device)

    def life(self, batch: int, tokens: int, seed: int) -> tuple[Life, torch.Tensor]:
        """Data of a layer for at least `tokens` tokens per sequence, and the queries of its steps and of one `attend` after them."""
        layout = self.variant.layout
        whole = whole_tokens(self.variant.spec, layout, tokens)
        inputs = normal(self.variant.spec, batch, whole, q_len=(STEPS + 2) * self.q_len, seed=self.policy.seed + seed)
        q, k, v = (x.to(self.device) for x in (inputs.q, inputs.k, inputs.v))
        return Life.of(self.variant.spec, layout, k, v), q

    def first_cache(self, batch: int, max_len: int) -> KVCache:
        """A cache whose memory is all NaN, with another page of NaN before its first page, where index -1 (a missing page) would read."""
        cache = self.variant.new_cache(batch, max_len, self.device)
        if cache.block_table is not None:
            pages, *page = cache.packed.shape
            cache.packed = cache.packed.new_full((pages + 1, *page), NAN_BYTE)[1:]
        return poison(cache)

    def outputs(self, q: torch.Tensor, *, lse: bool = True) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Poisoned output and, with `lse`, LSE of a query."""
        heads = (q.shape[0], q.shape[2], q.shape[1])
        return poisoned(q.shape, q.dtype, self.device), poisoned(heads, torch.float32, self.device) if lse else None

    def attempt(self, where: str, cache: KVCache, call: Callable[[], T], *, overflow: bool) -> T | None:
        """The result of a call, after which the host must learn whether a sequence had no room; on the CPU the call itself raises."""
        if overflow and self.device.type == "cpu":
            with suppress(ValueError):
                call()
                raise CheckError(f"{where}: a sequence without room is not refused")
            return None
        result = call()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        told = False
        try:
            cache.sequences.overflow.check()
        except CacheMismatch:
            told = True
        if told != overflow:
            raise CheckError(f"{where}: the host is {'told' if told else 'not told'} that a sequence has no room")
        return result

    def same_lengths(self, where: str, cache: KVCache, want: Lengths) -> None:
        """The lengths on the device."""
        got = tuple(cache.lengths.tolist())
        if got != want:
            raise CheckError(f"{where}: lengths are {list(got)}, not {list(want)}")

    def compare(
        self, where: str, got: tuple[torch.Tensor, torch.Tensor | None], want: tuple[torch.Tensor, torch.Tensor], rows: list[int]
    ) -> None:
        """The output of some sequences."""
        lse = None if got[1] is None else got[1][rows]
        self.comparison.output(where, got[0][rows], lse, want[0][rows], want[1][rows])

    def untouched(self, where: str, out: torch.Tensor, rows: list[int]) -> None:
        """Check that the outputs of sequences without room are still poisoned."""
        if rows and not bool(torch.isnan(out[rows]).all()):
            raise CheckError(f"{where}: the output of a sequence without room was written")

    def contents(self, where: str, cache: KVCache, life: Life, lengths: Lengths) -> None:
        """K and V that the cache holds, up to each length: a contiguous cache with a sliding window forgets what the window has passed."""
        got = self.variant.unpack(cache)
        tokens, block = min(got[0].shape[1], life.raw[0].shape[1]), self.variant.layout.tokens
        gone = torch.tensor([first_held(self.variant.spec, block, length) * block for length in lengths])
        token = torch.arange(tokens)
        past = ((token >= torch.tensor(lengths).unsqueeze(1)) | (token < gone.unsqueeze(1))).to(self.device)[..., None, None]
        held = [x[:, :tokens].masked_fill(past, 0.0) for x in (*got, *life.seen(lengths))]
        for name, mine, want in (("K", held[0], held[2]), ("V", held[1], held[3])):
            self.comparison.sequences("unpack", f"{where}: unpacked {name}", mine, want)


@dataclass(frozen=True)
class PlannedSteps(StepCheck):
    """Two layers over a batch with empty sequences; the longest sequence has room for one step, another one for two."""

    def run(self) -> None:
        """Raises CheckError at the first wrong number."""
        block, q_len = self.variant.layout.tokens, self.q_len
        begin = self.passed + self.unpacked
        limit = begin + 3 * block + 7
        lengths: Lengths = (limit - q_len, 0, self.unpacked + block - 1, begin + 2 * block + 5, 1, limit - 2 * q_len, 0)
        layers = [self.life(len(lengths), limit + q_len, seed) for seed in range(1, LAYERS + 1)]
        first = self.first_cache(len(lengths), limit)
        caches = [first, *(poison(self.variant.new_cache(like=first)) for _ in range(LAYERS - 1))]
        for cache, (life, _) in zip(caches, layers, strict=True):
            self.variant.prefill(cache, *life.both((0,) * len(lengths), max(lengths)), lengths, advance=False)
        first.advance(lengths)
        first.sequences.captured = True  # as in replays of a graph: the host does not know the lengths
        for step in range(STEPS):
            lengths = self._step(step, caches, layers, lengths, limit)
        for cache, (life, _) in zip(caches, layers, strict=True):
            self.contents("after steps over a plan", cache, life, lengths)
        self._after_reset(caches, layers, lengths)

    def _step(self, step: int, caches: list[KVCache], layers: list[tuple[Life, torch.Tensor]], lengths: Lengths, limit: int) -> Lengths:
        """One step of all layers; the lengths after it."""
        variant, q_len, where = self.variant, self.q_len, f"step {step + 1} over a plan"
        full = [b for b, n in enumerate(lengths) if n + q_len > limit]
        after = tuple(n + q_len if n and b not in full else n for b, n in enumerate(lengths))
        plan = self.attempt(f"plan of {where}", caches[0], lambda: variant.plan(caches[0], q_len, uniform=False), overflow=bool(full))
        if plan is None:
            self.attempt(f"end of {where}", caches[0], lambda: caches[0].advance(q_len), overflow=True)
            self.same_lengths(where, caches[0], lengths)
            return lengths
        for number, (cache, (life, queries)) in enumerate(zip(caches, layers, strict=True), 1):
            q = queries[:, step * q_len : (step + 1) * q_len].contiguous()
            out, lse = self.outputs(q, lse=(step + number) % 2 == 0)
            k, v = (laid_out(x, at, self.device) for at, x in enumerate(life.both(lengths, q_len), number))
            variant.decode(q, k, v, cache, out=out, lse=lse, sinks=self.sinks, plan=plan)
            want = life.attend(q, lengths, after)
            self.compare(f"layer {number}, {where}", (out, lse), want, [b for b in range(len(lengths)) if b not in full])
            self.untouched(f"layer {number}, {where}", out, full)
            self.same_lengths(f"layer {number}, {where}", cache, lengths)
        self.attempt(f"end of {where}", caches[0], lambda: caches[0].advance(q_len), overflow=bool(full))
        self.same_lengths(f"end of {where}", caches[0], after)
        return after

    def _after_reset(self, caches: list[KVCache], layers: list[tuple[Life, torch.Tensor]], lengths: Lengths) -> None:
        """Empty a sequence, remove the pages before a window, and attend in all layers with one plan."""
        caches[0].reset([2])
        lengths = tuple(0 if b == 2 else n for b, n in enumerate(lengths))
        drop_unseen_pages(self.variant, caches[0], lengths, self.q_len)
        plan = self.variant.plan(caches[0], self.q_len, append=False, uniform=False)
        for cache, (life, queries) in zip(caches, layers, strict=True):
            q = queries[:, STEPS * self.q_len : (STEPS + 1) * self.q_len].contiguous()
            got = self.outputs(q)
            self.variant.attend(q, cache, out=got[0], lse=got[1], sinks=self.sinks, plan=plan)
            self.compare("attend over a plan after a reset", got, life.attend(q, lengths, lengths), list(range(len(lengths))))


@dataclass(frozen=True)
class StaticSteps(StepCheck):
    """Sequences of equal lengths whose residual becomes full in the second step, and that have no room for a fourth."""

    batch: int = 2

    def run(self) -> None:
        """Raises CheckError at the first wrong number."""
        block, q_len = self.variant.layout.tokens, self.q_len
        full = -(-self.passed // block) * block + 2 * block + self.unpacked
        length, limit = full - 2 * q_len, full + q_len
        life, queries = self.life(self.batch, limit + q_len, 9)
        cache = self.first_cache(self.batch, limit)
        lengths: Lengths = (length,) * self.batch
        self.variant.prefill(cache, *life.both((0,) * self.batch, length))
        cache.sequences.captured = True  # as in replays of a graph: the host does not know the lengths
        for step in range(STEPS + 1):
            lengths = self._step(step, cache, life, queries[:, step * q_len : (step + 1) * q_len].contiguous(), lengths, limit)
        self.contents("after steps of equal lengths", cache, life, lengths)
        drop_unseen_pages(self.variant, cache, lengths, q_len)
        q = queries[:, -q_len:].contiguous()
        got = self.outputs(q)
        plan = self.variant.plan(cache, q_len, append=False, uniform=True)
        self.variant.attend(q, cache, out=got[0], lse=got[1], sinks=self.sinks, plan=plan)
        self.compare("attend of equal lengths", got, life.attend(q, lengths, lengths), list(range(self.batch)))

    def _step(self, step: int, cache: KVCache, life: Life, q: torch.Tensor, lengths: Lengths, limit: int) -> Lengths:
        """One step, in which each sequence advances by itself; the lengths after it."""
        where, q_len = f"step {step + 1} of equal lengths", self.q_len
        full = lengths[0] + q_len > limit
        after = lengths if full else tuple(n + q_len for n in lengths)
        out, lse = self.outputs(q, lse=step % 2 == 0)
        k, v = (laid_out(x, at, self.device) for at, x in enumerate(life.both(lengths, q_len), step))
        stays = step == 0  # so that the lengths advance afterwards, as in a layer of several; the residual has room for this step
        decode = partial(self.variant.decode, q, k, v, cache, out=out, lse=lse, sinks=self.sinks, advance=not stays)
        self.attempt(where, cache, decode, overflow=full)
        if stays:
            cache.advance(q_len)
        if full:
            self.untouched(where, out, list(range(self.batch)))
        else:
            self.compare(where, (out, lse), life.attend(q, lengths, after), list(range(self.batch)))
        self.same_lengths(where, cache, after)
        return after


@dataclass(frozen=True)
class ExtendSteps(StepCheck):
    """Extend attention: more query tokens than a GPU's kernel takes or a CPU's block of query rows holds, over short sequences."""

    tokens: int = 72

    def run(self) -> None:
        """Raises CheckError at the first wrong number."""
        spec, block = self.variant.spec, self.variant.layout.tokens
        gpu = self.device.type == "cuda"
        if extend_refusal(spec, gpu=gpu):
            return
        lengths: Lengths = (self.unpacked + block + 5, 3)
        after = tuple(length + self.tokens for length in lengths)
        life, _ = self.life(len(lengths), max(after), 11)
        cache = self.first_cache(len(lengths), max(after))
        self.variant.prefill(cache, *life.both((0,) * len(lengths), max(lengths)), lengths)
        q = normal(spec, len(lengths), 1, q_len=self.tokens, seed=self.policy.seed + 12).q.to(self.device)
        rounded = q.dtype if gpu else None  # torch's kernels read K and V in dtype
        seen = life.attend(q, lengths, after, rounded)
        call = formed(form(3), self.variant, self.device, q, life.both(lengths, self.tokens), self.sinks)
        self.comparison.output(f"decode of {self.tokens} tokens", *call.run(self.variant, cache), *seen)
        self.same_lengths(f"decode of {self.tokens} tokens", cache, after)
        self.contents(f"after a decode of {self.tokens} tokens", cache, life, after)
        if not window_places(spec, block):  # else the cache may not keep what so many see
            call = formed(form(1), self.variant, self.device, q, None, self.sinks)
            where = f"attend of {self.tokens} queries over {list(after)} tokens"
            self.comparison.output(where, *call.run(self.variant, cache), *life.attend(q, after, after, rounded))


def drop_unseen_pages(variant: Variant, cache: KVCache, lengths: Lengths, q_len: int) -> None:
    """Remove the pages from the block table that lie entirely before the window of every query."""
    window, page = variant.spec.attention.window, variant.spec.cache.page
    if window is None or page is None or cache.block_table is None:
        return
    for b, length in enumerate(lengths):
        cache.block_table[b, : max(0, length - q_len + 1 - window) // page] = -1
