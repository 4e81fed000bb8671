"""Random calls over caches on a device, each compared with the fp64 reference: outputs, lengths, residual rows, packed bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from random import Random

import torch

from kvgen.errors import CacheMismatch
from kvgen.format.residual import first_held, most_rollback, window_places
from kvgen.runtime.calls import Variant
from kvgen.runtime.kvcache import KVCache, row_of
from kvgen.verify.calls import poison, poisoned
from kvgen.verify.lives import restored
from kvgen.verify.packing import token_bits
from kvgen.verify.tolerance import Comparison, relative_l2, tolerance
from tests.lives.draw import KINDS, drawn_query, drawn_sinks, drawn_tensor
from tests.support.packed import meaningful_bytes, sequence_blocks
from tests.support.reference import ReferenceCache

CALLS = 9
REPLAYS = 3
"""Of a captured step, at most."""
REPEATED = 0.3
"""Share of calls that are made twice, over the same cache."""


class Wrong(Exception):
    """What differs from the reference."""


def require(holds: bool, what: str) -> None:
    """Raises Wrong unless it holds."""
    if not holds:
        raise Wrong(what)


class Life:
    """Random calls over layers that share their sequences, on caches of one layout. A call takes any of the `launches`."""

    def __init__(self, launches: Sequence[Variant], draw: Random, device: str = "cpu", *, exact: bool = True) -> None:
        """`exact`: whether the launches carry the rounding errors that `exact_q: false` leaves out."""
        self.launches, self.draw, self.device = launches, draw, torch.device(device)
        self.spec, self.layout = launches[0].spec, launches[0].layout
        self.attention = self.spec.attention
        self.comparison = Comparison(self.spec, torch.device("cpu"), exact=exact)
        self.batch = draw.randint(1, 4)
        unpacked = self.spec.cache.unpacked + self.spec.cache.rollback
        tokens = min(draw.randint(1, 4) * self.layout.tokens, 1300) if draw.random() < 0.95 else 4500  # several splits
        self.room = tokens + unpacked + draw.randint(0, 40)
        self.caches = self._caches(draw.choice([1, 1, 1, 2]))
        self.references = [ReferenceCache(self.spec, self.batch, self.layout.tokens) for _ in self.caches]
        self.longest = [0] * self.batch
        self.kinds = [draw.choice(KINDS) for _ in range(2)]
        self.calls: list[str] = []

    def live(self) -> None:
        """Some calls. Raises Wrong at the first difference."""
        calls: list[Callable[[], None]] = [
            self.prefill, self.prefill, self.decode, self.decode, self.decode, self.attend, self.planned, self.crop, self.crop, self.reset,
            self.reorder, self.row, self.refused, self.clear, self.replayed,
        ]  # fmt: skip
        weights = [4, 4, 4, 4, 4, 4, 4, 3, 3, 1, 1, 2, 1, 0.3, 3]
        self.prefill()
        for _ in range(CALLS):
            self.draw.choices(calls, weights)[0]()
            self.lengths_agree()
            if self.draw.random() < 0.15:
                self.contents_agree()
        self.attend()
        self.contents_agree()

    # --- calls ---------------------------------------------------------------------------------------------------------

    def prefill(self) -> None:
        """Ragged, with counts on the host, as a tensor, or of all tokens."""
        size = self.draw.choice([5, self.layout.tokens, self.room])
        counts = [min(self.draw.randint(0, size), self.left) for _ in self.lengths]
        if self.draw.random() < 0.2:
            counts = [min(counts)] * self.batch
        self.said(f"prefill {counts}")
        tokens = max(counts) + self.draw.randint(0, 2)
        known = torch.tensor(counts, dtype=torch.int32)
        # the host does not look at counts on a GPU, so all of the tokens must fit
        given = self.draw.choice([counts, counts, known, known.to(self.device) if tokens <= self.left else known])
        shared = len(self.caches) > 1
        for cache, reference in zip(self.caches, self.references, strict=True):
            k, v = self.new(tokens)
            whole = set(counts) == {tokens} and self.draw.random() < 0.5
            self.launch().prefill(cache, *self.there(k, v), None if whole else given, advance=not shared)
            reference.prefill(k, v, torch.tensor(counts))
        if shared:
            self.caches[0].advance(counts)
        self.grown()

    def decode(self) -> None:
        """Without a plan: all sequences take part, empty ones too."""
        tokens = min(self.left, self.query_tokens())
        if tokens < 1:
            return
        self.said(f"decode {tokens}")
        shared = len(self.caches) > 1 or self.draw.random() < 0.1
        for cache, reference in zip(self.caches, self.references, strict=True):
            k, v = self.new(tokens)
            reference.append(k, v)
            self.called(cache, reference, tokens, new=(k, v), advance=not shared)
            reference.flush()
        if shared:
            self.caches[0].advance([tokens] * self.batch)
        self.grown()

    def attend(self) -> None:
        """With any number of queries that a contiguous cache with a window still holds the tokens of."""
        tokens = self.query_tokens()
        if window_places(self.spec, self.layout.tokens) and tokens > self.attention.q_len:
            tokens = self.attention.q_len
        self.said(f"attend {tokens}")
        for cache, reference in zip(self.caches, self.references, strict=True):
            self.called(cache, reference, tokens)

    def planned(self) -> None:
        """A step over a plan, in which empty sequences take no part."""
        tokens = self.draw.randint(1, self.attention.q_len)
        append = self.draw.random() < 0.7 and tokens <= self.left
        self.said(f"planned {'decode' if append else 'attend'} {tokens}")
        launch = self.launch()
        plan = launch.plan(self.caches[0], tokens, append=append)
        counts = [tokens if append and length else 0 for length in self.lengths]
        for cache, reference in zip(self.caches, self.references, strict=True):
            new = self.new(tokens) if append else None
            if new is not None:
                reference.append(*new, torch.tensor(counts))
            self.called(cache, reference, tokens, new=new, launch=launch, plan=plan)
            reference.flush()
        if append:
            self.caches[0].advance(tokens)
        self.grown()

    def replayed(self) -> None:
        """A step over a plan with drafts that are taken back, then replays of it, which a GPU has captured in a CUDA graph."""
        tokens = self.draw.randint(1, self.attention.q_len)
        times = 1 + min(REPLAYS, self.left // tokens - 1)
        if times < 2:
            return
        uniform = len(set(self.lengths)) == 1 and self.lengths[0] > 0 and self.draw.random() < 0.5
        self.said(f"replayed {'uniform ' if uniform else ''}{tokens}, {times} times")
        launch, scale, sinks, first = self.launch(), self.scale(), self.sinks(), self.caches[0]
        inputs = [self.there(self.query(tokens, reference), *self.new(tokens)) for reference in self.references]
        outputs = [self.results(q) for q, _, _ in inputs]
        taken = torch.zeros(self.batch, dtype=torch.int32, device=self.device)

        def step() -> None:
            plan = launch.plan(first, tokens, uniform=uniform)
            for cache, (q, k, v), (out, lse) in zip(self.caches, inputs, outputs, strict=True):
                launch.decode(q, k, v, cache, out=out, lse=lse, scale=scale, sinks=sinks, plan=plan)
            first.advance(tokens)
            if most_rollback(self.spec):
                first.crop(taken)

        run = step
        for number in range(times):
            there = torch.tensor([length > 0 for length in self.lengths])
            most = min(tokens, most_rollback(self.spec))
            back = [most // 2] * self.batch if uniform else [self.draw.randint(0, most) for _ in self.lengths]
            taken.copy_(torch.tensor(back) * there)
            wanted = []
            for reference, tensors in zip(self.references, inputs, strict=True):
                k, v = self.new(tokens)
                reference.append(k, v, there * tokens)
                q = self.query(tokens, reference)
                wanted.append(reference.attend(q, scale=scale, sinks=None if sinks is None else sinks.cpu()))
                reference.flush()
                for mine, fresh in zip(tensors, (q, k, v), strict=True):
                    mine.copy_(fresh)
            for result in (x for pair in outputs for x in pair):
                result.fill_(torch.nan)
            run()
            for results, want in zip(outputs, wanted, strict=True):
                self.comparison.output("replayed", *(x.cpu() for x in results), *want)
            self.grown()
            for reference in self.references:
                reference.crop(taken.cpu())
            self.lengths_agree()
            if number == 0:
                run = replayable(step, self.device)
        first.sequences.captured = False  # the graph is not replayed again
        first.bound = max(self.lengths)

    def crop(self) -> None:
        """As many tokens as may be taken back, or fewer."""
        rollback = most_rollback(self.spec)
        if not rollback:
            return
        most = [min(length, max(0, length - max(0, top - rollback))) for length, top in zip(self.lengths, self.longest, strict=True)]
        counts: int | list[int] = [self.draw.choice([n, self.draw.randint(0, n)]) for n in most]
        if self.draw.random() < 0.3:
            counts = min([n for n, length in zip(most, self.lengths, strict=True) if length], default=0)
        self.said(f"crop {counts}")
        self.caches[0].crop(counts)
        for reference in self.references:
            reference.crop(counts if isinstance(counts, int) else torch.tensor(counts, dtype=torch.int32))

    def reset(self) -> None:
        """Forget a sequence."""
        b = self.draw.randrange(self.batch)
        self.said(f"reset {b}")
        self.caches[0].reset([b])
        self.forgotten([b])

    def clear(self) -> None:
        """Forget all."""
        self.said("clear")
        self.caches[0].clear()
        self.forgotten(range(self.batch))

    def reorder(self) -> None:
        """Copy sequences over others."""
        if self.spec.cache.page is not None:
            return
        index = [self.draw.randrange(self.batch) for _ in range(self.batch)]
        self.said(f"reorder {index}")
        self.caches[0].reorder(index)
        self.longest = [self.longest[b] for b in index]
        for reference in self.references:
            for tensor in (reference.lengths, reference.flushed, reference.least, *reference.given):
                tensor.copy_(tensor[index])

    def row(self) -> None:
        """Prefill and decode one sequence alone."""
        b = self.draw.randrange(self.batch)
        fill = self.draw.randint(0, self.room - self.lengths[b])
        step = min(self.query_tokens(), self.room - self.lengths[b] - fill)
        self.said(f"row {b}: prefill {fill}, decode {step}")
        rows = row_of(self.caches, b)
        for tokens, queries in ((fill, 0), (step, step)):
            if not tokens:
                continue
            for row, reference in zip(rows, self.references, strict=True):
                k, v = self.new(tokens, 1)
                wide = [x.expand(self.batch, -1, -1, -1) for x in (k, v)]
                reference.append(*wide, torch.tensor([tokens if n == b else 0 for n in range(self.batch)]))
                if queries:
                    self.called(row, reference, queries, new=(k, v), only=b, advance=False)
                else:
                    self.launch().prefill(row, *self.there(k, v), advance=False)
                reference.flush()
            rows[0].advance([tokens])
        self.grown()

    def refused(self) -> None:
        """Calls for which a sequence has no room change nothing."""
        tokens, shared = self.room - max(self.lengths) + self.draw.randint(1, 3), len(self.caches) > 1
        self.said(f"refused {tokens}")
        k, v, q = self.there(*self.new(tokens), self.query(tokens, self.references[0]))
        sinks = self.sinks()
        self.raises(lambda: self.launch().decode(q, k, v, self.caches[0], sinks=sinks, advance=not shared))
        self.raises(lambda: self.launch().prefill(self.caches[0], k, v, advance=not shared))

    @staticmethod
    def raises(call: Callable[[], object]) -> None:
        """Wrong unless the call says that there is no room."""
        try:
            call()
        except (CacheMismatch, ValueError) as error:
            require("hold" in str(error) or "limit" in str(error), f"refused with: {error}")
        else:
            raise Wrong("a call without room is not refused")

    # --- one call ------------------------------------------------------------------------------------------------------

    def called(
        self,
        cache: KVCache,
        reference: ReferenceCache,
        tokens: int,
        *,
        new: tuple[torch.Tensor, torch.Tensor] | None = None,
        launch: Variant | None = None,
        only: int | None = None,
        **how: object,
    ) -> None:
        """A call of attention after the reference appended; `only`: of this sequence alone."""
        launch, sinks = launch or self.launch(), self.sinks()
        q, scale = self.query(tokens, reference), self.scale()
        extends_on_gpu = self.device.type == "cuda" and tokens > self.attention.q_len
        rounded = q.dtype if extends_on_gpu else None
        want, want_lse = reference.attend(q, scale=scale, sinks=None if sinks is None else sinks.cpu(), rounded=rounded)
        if only is not None:
            q, want, want_lse = q[only : only + 1], want[only : only + 1], want_lse[only : only + 1]
        query, fresh = self.there(q)[0], None if new is None else self.there(*new)

        def made() -> tuple[torch.Tensor, torch.Tensor]:
            out, lse = self.results(q)
            if fresh is None:
                launch.attend(query, cache, out=out, lse=lse, scale=scale, sinks=sinks, **how)
            else:
                launch.decode(query, *fresh, cache, out=out, lse=lse, scale=scale, sinks=sinks, **how)
            return out.cpu(), lse.cpu()

        twice = tokens <= self.attention.q_len and self.draw.random() < REPEATED
        with restored(cache) if twice else nullcontext():
            out, lse = made()
        self.comparison.output("output", out, lse, want, want_lse)
        if twice:
            for one, other in zip((out, lse), made(), strict=True):
                self.comparison.same_bits("a repeated call", one, other)

    def query_tokens(self) -> int:
        """Within what the kernel is compiled for, or extend attention."""
        most = self.attention.q_len
        return self.draw.choice([1, most, self.draw.randint(1, most), self.draw.randint(1, 90)])

    # --- comparisons ---------------------------------------------------------------------------------------------------

    def lengths_agree(self) -> None:
        """Of cache and reference."""
        got = self.caches[0].lengths.tolist()
        require(got == self.lengths, f"lengths are {got}, not {self.lengths}")

    def contents_agree(self) -> None:
        """Residual rows to the bit, packed blocks to the byte, and what `unpack` gives."""
        places, kept = window_places(self.spec, self.layout.tokens), meaningful_bytes(self.layout)
        for number, (cache, reference) in enumerate(zip(self.caches, self.references, strict=True)):
            want, rows = reference.packed(self.layout), reference.rows
            keys, values, packed, *residuals = (
                x.cpu() for x in (*self.launch().unpack(cache), cache.packed, cache.k_residual, cache.v_residual)
            )
            table = None if cache.block_table is None else cache.block_table.cpu()
            truth = reference.keys_values()
            for b, length in enumerate(self.lengths):
                where = f"layer {number}, sequence {b} of {length} tokens"
                first = first_held(self.spec, self.layout.tokens, max(length, self.longest[b] - most_rollback(self.spec)))
                got = sequence_blocks(packed, table, b)
                for block in range(first, rows.packed_blocks(length)):
                    mine, other = got[:, block % places if places else block], want[b, :, block]
                    if rows.arrival:
                        written = token_bits(self.layout, torch.arange(rows.block) < length - block * rows.block)
                        mine, other = mine & written, other & written
                    require(torch.equal(mine[:, kept], other[:, kept]), f"{where}: packed block {block}")
                unquantized = [*range(min(length, rows.sink)), *range(rows.first(length), length)]
                at = [rows.row(position) for position in unquantized]
                for mine, other in zip(residuals, reference.residual(), strict=True):
                    require(torch.equal(mine[b][:, at], other[b][:, at]), f"{where}: residual")
                held = [*range(min(length, rows.sink)), *range(max(rows.sink, rows.sink + first * self.layout.tokens), length)]
                for mine, other in zip((keys, values), truth, strict=True):
                    error = relative_l2(mine[b, held], other[b, held]) if held else 0.0
                    require(error <= tolerance(mine.dtype), f"{where}: unpacked")

    # --- help ----------------------------------------------------------------------------------------------------------

    @property
    def lengths(self) -> list[int]:
        """Of the reference."""
        lengths: list[int] = self.references[0].lengths.tolist()
        return lengths

    @property
    def left(self) -> int:
        """Tokens for which every sequence has room, as far as the host knows: of ragged counts it adds the largest."""
        return self.room - self.caches[0].bound

    def said(self, what: str) -> None:
        """Keep a call for the report."""
        self.calls.append(f"{what} at {self.lengths}")

    def launch(self) -> Variant:
        """Any of the launches."""
        return self.draw.choice(self.launches)

    def new(self, tokens: int, batch: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [batch, tokens, kv_heads, head_dim]."""
        size = (batch or self.batch, tokens, self.attention.kv_heads)
        k, v = (drawn_tensor(self.draw, kind, *size, self.spec) for kind in self.kinds)
        return k, v

    def query(self, tokens: int, reference: ReferenceCache) -> torch.Tensor:
        """For as many positions of every sequence."""
        return drawn_query(self.draw, self.spec, self.batch, tokens, reference.keys_values()[0])

    def sinks(self) -> torch.Tensor | None:
        """Learned sinks of a spec that has them."""
        drawn = drawn_sinks(self.draw, self.spec)
        return None if drawn is None else drawn.to(self.device)

    def scale(self) -> float | None:
        """The default, half of it, or a negative one."""
        plain: float = self.attention.head_dim**-0.5
        return self.draw.choice([None, None, 0.5 * plain, -plain])

    def there(self, *views: torch.Tensor) -> list[torch.Tensor]:
        """Views on the device, within the same memory as here."""
        return [placed(x, self.device) for x in views]

    def results(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Poisoned memory for what a call with q [batch, q_len, q_heads, head_dim] gives; the output has a gap between tokens."""
        batch, tokens, heads, dim = q.shape
        out = poisoned((batch, tokens, heads + 1, dim), q.dtype, self.device)[:, :, 1:]
        return out, poisoned((batch, heads, tokens), torch.float32, self.device)

    def grown(self) -> None:
        """Note the longest that each sequence has been."""
        self.longest = [max(pair) for pair in zip(self.longest, self.lengths, strict=True)]

    def forgotten(self, rows: Sequence[int]) -> None:
        """Sequences that are empty now."""
        for b in rows:
            self.longest[b] = 0
            for reference in self.references:
                reference.lengths[b] = reference.flushed[b] = reference.least[b] = 0

    def _caches(self, layers: int) -> list[KVCache]:
        """Poisoned caches; pages are shuffled among others."""
        page, table, pages = self.spec.cache.page, None, None
        if page is not None:
            need = -(-self.room // page)
            pages = self.batch * need + 3
            order = torch.randperm(pages, generator=torch.Generator().manual_seed(self.draw.getrandbits(30)))
            table = order[: self.batch * need].reshape(self.batch, need).to(torch.int32)
        first = poison(self.launches[0].new_cache(self.batch, self.room, self.device, table, pages))
        return [first, *(poison(self.launches[0].new_cache(like=first)) for _ in range(layers - 1))]


def placed(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same view on a device, where what lies around it is copied, too."""
    memory = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return memory.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def replayable(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The step, captured in a CUDA graph that its calls replay; on the CPU the step itself. On a GPU it was called once before."""
    if device.type == "cpu":
        return step
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
