"""Sizes beyond those of life cycles: a long prompt, far tokens, pages and bytes, and many sequences; and inputs that hold a NaN.

Caches are zeros in memory that is reserved and not touched (`filled.reserved`), but for a few blocks and tokens, so that large ones cost
little. What they hold is known, and every output is compared with fp64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from kvgen.errors import CheckError
from kvgen.format.layout import PackedLayout
from kvgen.format.window import first_held
from kvgen.runtime.kvcache import KVCache
from kvgen.spec import KernelSpec
from kvgen.verify.cache import ReferenceCache
from kvgen.verify.calls import NAN_BYTE, CallCheck, Pair, query_lengths
from kvgen.verify.data import learned_sinks, normal
from kvgen.verify.filled import SparseCache, most_reserved, reserved, reserved_blocks
from kvgen.verify.lives import packed_blocks
from kvgen.verify.packing import pack_blocks, unpack_blocks
from kvgen.verify.tolerance import WHOLE

PREFILL_BLOCKS, PREFILL_TOKENS = 136, 20480
"""Least size of a prefill in one call: more blocks than 128, and a long prompt."""
DIFFERENT_BLOCKS = 12
"""Blocks of which such a prompt is made, in another order for every head; the reference packs these alone."""
CROWD, LEAST_CROWD = 1203, 133
DIFFERENT = 17
"""Sequences of a crowd with data of their own; the others repeat these. It is odd, so that no power of two of them is a period."""
SAMPLED = (0, 60, 125, 1020, 1095)
"""Sequences of a crowd from which on DIFFERENT ones are compared; and the last."""
NEW_TOKENS = 3
"""Tokens of the prefills here, at most."""
ALL = slice(None)

Rows = torch.Tensor | slice


class LongPrompt(CallCheck):
    """Compare every block of a long prompt with the reference's, packed and unpacked."""

    def prepare(self) -> None:
        """See `long_prompt`."""
        long_prompt(self.spec, self.layout, self.device.type)

    def run(self) -> None:
        """Raises CheckError at the first wrong number."""
        prompt = long_prompt(self.spec, self.layout, self.device.type)
        tokens, full = prompt.k.shape[1], prompt.packed.shape[1]
        cache = self.variant.new_cache(1, tokens, self.device)
        cache.packed = reserved(cache.packed.shape, torch.uint8, self.device)  # zeros, so that equal blocks have equal padding
        self.variant.prefill(cache, *self.laid_out((prompt.k, prompt.v), 1))
        first = first_held(self.spec, self.block, tokens)
        blocks, want = packed_blocks(self, cache, full)[0, :, first:full], prompt.packed[:, first:]
        if not torch.equal(blocks, want):
            self.same_codes("of a long prompt", blocks, want)
        for name, got, read in zip(("K", "V"), self.variant.unpack(cache), prompt.read, strict=True):
            mine, exact = got[:, self.rows.sink :][:, first * self.block : full * self.block], read[:, first * self.block :]
            if not torch.equal(mine, exact):
                pair = (mine[0].transpose(0, 1), exact[0].transpose(0, 1).double())
                self.comparison.sequences("unpack", f"unpacked {name} of a long prompt", *pair)


@dataclass(frozen=True)
class Prompt:
    """One sequence of many packed blocks, in little memory: head h has the tokens of the head before it from its second block on.

    All of its tensors are views in which the heads overlap.
    """

    k: torch.Tensor
    """[1, tokens, kv_heads, head_dim]."""
    v: torch.Tensor
    packed: torch.Tensor
    """By the reference: uint8 [kv_heads, blocks, block_bytes]."""
    read: Pair
    """K and V as they read back, in their dtype: [1, tokens in blocks, kv_heads, head_dim]."""


@lru_cache(maxsize=2)
def long_prompt(spec: KernelSpec, layout: PackedLayout, device: str) -> Prompt:
    """The prompt of a layout; its tokens beyond the sink and the local ones are whole blocks."""
    block, heads, dim, sink = layout.tokens, spec.attention.kv_heads, spec.attention.head_dim, spec.cache.sink
    count = max(PREFILL_BLOCKS, -(-PREFILL_TOKENS // block))
    turns = torch.rand(-(-(count + heads) // DIFFERENT_BLOCKS), DIFFERENT_BLOCKS, generator=torch.Generator().manual_seed(7))
    order = turns.argsort(-1).flatten().to(device)
    data = normal(spec, 1, DIFFERENT_BLOCKS * block + spec.cache.unpacked, seed=6)

    def shifted(x: torch.Tensor, tokens: int) -> torch.Tensor:
        return x.as_strided((1, tokens, heads, dim), (x.numel(), dim, block * dim, 1))

    given, pieces = [], []
    for x in (data.k, data.v):
        tokens = x[0, :, 0].to(device)
        rest = tokens[DIFFERENT_BLOCKS * block :]
        pieces.append(tokens[: DIFFERENT_BLOCKS * block].reshape(DIFFERENT_BLOCKS, block, dim))
        whole = torch.cat([rest[:sink], pieces[-1][order].flatten(0, 1), rest[sink:]])
        given.append(shifted(whole, count * block + spec.cache.unpacked))
    packed = pack_blocks(layout, *pieces)
    read_k, read_v = (x.to(data.k.dtype)[order].flatten(0, 1) for x in unpack_blocks(layout, packed, data.k.dtype))
    nbytes = layout.block_bytes
    lying = packed[order].as_strided((heads, count, nbytes), (nbytes, nbytes, 1))
    return Prompt(given[0], given[1], lying, (shifted(read_k, count * block), shifted(read_v, count * block)))


class SizeCheck(CallCheck):
    """Calls over large caches, with and without a NaN. Of `Rows` of the sequences outputs are compared."""

    @property
    def queries(self) -> int:
        """Query tokens of `attend`: as many as a launch takes, on the CPU at least two unless a sliding window forgets what they see."""
        most = len(query_lengths(self.spec))
        return most if self.gpu or self.places else max(2, most)

    def attend(self, where: str, cache: KVCache, q: torch.Tensor, want: Pair, bad: int, rows: Rows = ALL) -> None:
        """`attend` by every scheduler, and again with a NaN in the last query token and head of sequence `bad`."""
        tainted = q.clone()
        tainted[bad, -1, -1, -1] = torch.nan
        for how, uniform in self.schedulers():
            cache.sequences.uniform = uniform
            clean, lossy = self.call(cache, q), self.call(cache, tainted)
            self.comparison.output(f"{where}{how}", *picked(clean, rows), *want)
            lost = unmarked(clean)
            lost[0][bad, -1, -1], lost[1][bad, -1, -1] = True, True
            self.only_lost(f"{where}{how}, a NaN in q", lossy, clean, lost, rows)
        if not self.gpu:  # whose calls take a plan only where one is given
            few = min(q.shape[1], len(query_lengths(self.spec)))
            plan = self.variant.plan(cache, few, append=False, uniform=False)
            planned = self.call(cache, q[:, -few:], plan=plan)
            self.comparison.output(f"{where} over a plan", *picked(planned, rows), want[0][:, -few:], want[1][..., -few:])
        cache.sequences.uniform = False

    def decode(
        self, where: str, cache: KVCache, q: torch.Tensor, new: Pair, want: Pair, bad: tuple[int, int, int], rows: Rows = ALL
    ) -> None:
        """`decode` of one token, before which it is called with a NaN in q, new K and new V of the sequences `bad`, which changes nothing
        that the other call does not write.
        """
        group, (of_q, of_k, of_v) = self.spec.attention.group, bad
        bad_q, bad_k, bad_v = (x.clone() for x in (q, *new))
        bad_q[of_q, 0, 0, -1] = bad_k[of_k, 0, 0, -1] = bad_v[of_v, 0, -1, 1] = torch.nan
        tainted = self.call(cache, bad_q, (bad_k, bad_v), advance=False)
        clean = self.call(cache, q, new)
        self.comparison.output(where, *picked(clean, rows), *want)
        lost, spared = unmarked(clean), unmarked(clean)[0]
        lost[0][of_q, 0, 0] = lost[0][of_k, 0, :group] = lost[0][of_v, 0, -group:, 1] = True
        lost[1][of_q, 0] = lost[1][of_k, :group] = True
        if self.gpu:  # whose codes of up to 4 bits share registers with those of another channel
            spared[of_v, 0, -group:] = True
        self.only_lost(f"{where}, a NaN in q, new K and new V", tainted, clean, lost, rows, spared)

    def only_lost(self, where: str, got: Pair, clean: Pair, lost: Pair, rows: Rows, spared: torch.Tensor | None = None) -> None:
        """Raises CheckError unless of some sequences what `lost` names, bool like `got`, is NaN, and all else has the bits that it has
        without a NaN, but for what `spared` names of the output. On a GPU the rows of a KV head move their maxima together, so other rows
        of it may be rounded differently.
        """
        got, clean, gone = picked(got, rows), picked(clean, rows), picked(lost, rows)
        excepted = gone
        if self.gpu:
            group = self.spec.attention.group
            heads = gone[1].any(-1) | gone[0].any(-1).any(1)  # [sequences, q_heads]
            heads = heads.view(len(heads), -1, group).any(-1).repeat_interleave(group, 1)
            excepted = (heads[:, None, :, None].expand_as(gone[0]), heads[:, :, None].expand_as(gone[1]))
            unknown = (gone[0] if spared is None else gone[0] | spared[rows], gone[1])
            (out, lse), (want, want_lse) = ([x.masked_fill(there, 0) for x, there in zip(y, unknown, strict=True)] for y in (got, clean))
            self.comparison.output(f"{where}, rows that do not see it", out, lse, want.double(), want_lse.double())
        for name, mine, was, seen, other in zip(("output", "LSE"), got, clean, gone, excepted, strict=True):
            if not bool(mine[seen].isnan().all()):
                raise CheckError(f"{where}: {name} that sees it is a number")
            whole = WHOLE[mine.element_size()]
            if not torch.equal(*(x.view(whole).masked_fill(other, 0) for x in (mine, was))):
                raise CheckError(f"{where}: {name} that does not see it has other bits")


def picked(output: Pair, rows: Rows) -> Pair:
    """Some sequences of an output."""
    return output[0][rows], output[1][rows]


def unmarked(output: Pair) -> Pair:
    """False for every number of an output."""
    return torch.zeros_like(output[0], dtype=torch.bool), torch.zeros_like(output[1], dtype=torch.bool)


class Far(SizeCheck):
    """Four sequences of very unequal lengths, one of them empty; the last lies far behind, has twice the tokens of other long ones, and
    fills a block.
    """

    def run(self) -> None:
        """Raises CheckError at the first wrong number."""
        rows, unpacked, block = self.rows, self.unpacked, self.block
        far = max(2 * self.policy.most_tokens, 32 * block)
        length = rows.first(far) + rows.local + block - 1  # one token more packs a block
        middle = far * 3 // 32
        lengths = (0, unpacked + block + 5, unpacked + middle, length)
        target = rows.packed_blocks(length)
        seen = max(0, length - (self.spec.attention.window or length)) // block  # the window begins in this block
        edges = [0, 1, 2, *(edge // block + by for edge in (middle, 1 << 15, 1 << 16) for by in (-1, 0)), seen - 1, seen, seen + 1]
        marked = [at for at in (*edges, *range(target - 4, target + 1)) if 0 <= at <= target]
        filled = SparseCache(self.variant, len(lengths), length + block + 1, self.device, marked)
        cache, inputs = filled.cache, normal(self.spec, len(lengths), NEW_TOKENS, q_len=1, seed=8)
        first_q, k, v = (x.to(self.device) for x in (inputs.q, inputs.k, inputs.v))
        new = (k[:, :1].contiguous(), v[:, :1].contiguous())
        wanted = filled.next_block(torch.tensor([len(lengths) - 1], device=self.device), length, k, v)[0]
        q = normal(self.spec, len(lengths), 1, q_len=self.queries, seed=5).q.to(self.device)
        filled.set(lengths)
        self.attend(f"attend over {list(lengths)} tokens", cache, q, filled.attend(q, lengths), len(lengths) - 1)
        where = f"decode over {list(lengths)} tokens"
        want = filled.attend(first_q, lengths, new)
        self._packs(where, filled, target, wanted, lambda: self.decode(where, cache, first_q, new, want, (1, 3, 2)))
        self.same_lengths(where, cache, [n + 1 for n in lengths])
        filled.restore()
        filled.set(lengths)
        where = f"prefill behind {list(lengths)} tokens"
        self._packs(where, filled, target, wanted, lambda: self.variant.prefill(cache, k, v, (0, 0, 1, NEW_TOKENS)))
        if not self.places:  # else later blocks lie in the places of the first ones
            self._unpack(filled, 3)

    def _packs(self, where: str, filled: SparseCache, target: int, want: torch.Tensor, call: Callable[[], None]) -> None:
        """Compare the block that a call packs at the end of the last sequence."""
        packed, place = filled.cache.packed, filled.place(target)
        kept = packed[place]
        kept[-1] = NAN_BYTE
        packed[place] = kept
        call()
        self.same_codes(f"after {where}", packed[place][-1], want)

    def _unpack(self, filled: SparseCache, count: int) -> None:
        """The first blocks of the last sequence, without the others: what they unpack to."""
        filled.set([0] * (filled.cache.batch - 1) + [self.unpacked + count * self.block])
        got = self.variant.unpack(filled.cache)
        for name, mine, want in zip(("K", "V"), got, filled.contents(filled.cache.batch - 1, count), strict=True):
            held = mine[-1:, self.rows.sink : self.rows.sink + count * self.block]
            self.comparison.sequences("unpack", f"unpacked {name} of the last sequence", held, want.transpose(0, 1)[None])


@dataclass(frozen=True)
class _Members:
    """The different sequences of a crowd, on one device, and what the reference makes of them: tokens before, tokens of a prefill, inputs
    [q, k, v] of the prefill with the `attend` after it, and of a step.
    """

    starts: list[int]
    counts: list[int]
    data: list[torch.Tensor]
    step: list[torch.Tensor]
    attend: Pair
    decode: Pair
    lengths: list[int]
    read: Pair
    """K and V in the end, fp64 [different, longest, kv_heads, head_dim]."""


class Crowd(SizeCheck):
    """More than 1,100 sequences: most have a few tokens, some are empty or fill a block."""

    def prepare(self) -> None:
        """See `_members`."""
        _members(self.spec, self.block, self.queries, self.device.type)

    def run(self) -> None:
        """Raises CheckError at the first wrong number."""
        members = _members(self.spec, self.block, self.queries, self.device.type)
        cache = self._cache(max(members.lengths))
        batch = cache.batch
        at = [number % DIFFERENT for number in range(batch)]
        index = torch.tensor(at, device=self.device)
        starts, counts, lengths = ([numbers[n] for n in at] for numbers in (members.starts, members.counts, members.lengths))
        cache.lengths.copy_(torch.tensor(starts, dtype=torch.int32))
        cache.bound, cache.sequences.uniform = max(starts), False
        q, k, v = (x[index] for x in members.data)
        self.variant.prefill(cache, k, v, counts)
        groups = [start for start in (*SAMPLED, batch - DIFFERENT) if start + DIFFERENT <= batch]
        chosen = torch.tensor(sorted({start + n for start in groups for n in range(DIFFERENT)}), device=self.device)
        where = f"{batch} sequences"
        last = batch - 1 - (batch - 1 - 5) % DIFFERENT  # a sequence with tokens
        self.attend(f"attend over {where}", cache, q, picked(members.attend, index[chosen]), last, chosen)
        q, k, v = (x[index] for x in members.step)
        want, bad = picked(members.decode, index[chosen]), (last, last - 1, last + 1 - DIFFERENT)
        self.decode(f"decode over {where}", cache, q, (k, v), want, bad, chosen)
        self.same_lengths(f"decode over {where}", cache, lengths)
        self._unpack(cache, members, index, chosen[-DIFFERENT:])

    def _unpack(self, cache: KVCache, members: _Members, index: torch.Tensor, chosen: torch.Tensor) -> None:
        """What some of the sequences unpack to, and whether a step back shortens all."""
        if self.spec.cache.rollback:
            whole = cache.lengths.clone()
            cache.crop(1)
            self.same_lengths(f"a crop of {cache.batch} sequences", cache, (whole - 1).tolist())
            cache.lengths.copy_(whole)
        others = torch.ones(cache.batch, dtype=torch.bool, device=self.device)
        others[chosen] = False
        cache.lengths.masked_fill_(others, 0)
        shape = (cache.batch, *members.read[0].shape[1:])
        got = self.variant.unpack(cache, *(reserved(shape, self.variant.dtype, self.device) for _ in range(2)))
        for name, mine, want in zip(("K", "V"), got, members.read, strict=True):
            self.comparison.sequences("unpack", f"unpacked {name} of {cache.batch} sequences", mine[chosen], want[index[chosen]])

    def _cache(self, longest: int) -> KVCache:
        """Zeros, of as many sequences as there is room for; pages lie backwards."""
        one = self.variant.new_cache(1, longest, self.device)
        batch = max(LEAST_CROWD, min(CROWD, most_reserved(self.device) // one.nbytes))
        cache = self.variant.new_cache(batch, longest, self.device)
        cache.packed = reserved_blocks(cache.packed.shape, self.variant, self.device)
        cache.k_residual, cache.v_residual = (reserved(cache.k_residual.shape, self.variant.dtype, self.device) for _ in range(2))
        if cache.block_table is not None:
            cache.block_table.copy_(cache.block_table.flip(0, 1))
        return cache


@lru_cache(maxsize=2)
def _members(spec: KernelSpec, block: int, queries: int, device: str) -> _Members:
    """Zeros, then some new tokens by a prefill, then one by a step: three of the sequences pack a block, or have one."""
    full, cache, sinks = spec.cache.unpacked + block, ReferenceCache(spec, DIFFERENT, block), learned_sinks(spec)
    starts = [0, 0, full - 1, full - 1, full, *[0] * (DIFFERENT - 5)]
    counts = [0, 0, 2, 0, 1, *(1 + n % NEW_TOKENS for n in range(DIFFERENT - 5))]
    data, step = (normal(spec, DIFFERENT, tokens, q_len=q_len, seed=seed) for tokens, q_len, seed in ((NEW_TOKENS, queries, 9), (1, 1, 10)))
    nothing = torch.zeros(DIFFERENT, full, *data.k.shape[2:], dtype=data.k.dtype)
    cache.prefill(nothing, nothing, torch.tensor(starts))
    cache.prefill(data.k, data.v, torch.tensor(counts))

    def here(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return [x.to(device) for x in tensors]

    out, lse = here(*cache.attend(data.q, sinks=sinks))
    step_out, step_lse = here(*cache.decode(step.q, step.k, step.v, sinks=sinks))
    k, v = here(*cache.keys_values())
    inputs = here(data.q, data.k, data.v), here(step.q, step.k, step.v)
    return _Members(starts, counts, *inputs, (out, lse), (step_out, step_lse), cache.lengths.tolist(), (k, v))
