"""Sizes beyond those of small caches: a long prompt, far tokens, pages and bytes, and many sequences; and inputs that hold a NaN.

Caches are zeros in memory that is reserved and not touched (`filled.reserved`), but for a few blocks and tokens, so that large ones cost
little. What they hold is known, and every output is compared with fp64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from kvgen.errors import CheckError
from kvgen.format.residual import first_held
from kvgen.format.rotation import rotate, rotate_back
from kvgen.format.scales import trial_scales
from kvgen.runtime.kvcache import KVCache
from kvgen.spec import KernelSpec
from kvgen.verify.calls import NAN_BYTE, CallCheck, Pair, query_lengths
from kvgen.verify.data import normal
from kvgen.verify.filled import SparseCache, most_reserved, reserved, reserved_blocks
from kvgen.verify.lives import packed_blocks
from kvgen.verify.packing import pack_blocks, unpack_blocks
from kvgen.verify.reference import WholeSequences
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
        """The prompt, its different blocks as the reference packs them, and their order in every head."""
        block, heads, dim, cache_spec = self.block, self.spec.attention.kv_heads, self.spec.attention.head_dim, self.spec.cache
        count = max(PREFILL_BLOCKS, -(-PREFILL_TOKENS // block))
        turns = torch.rand(heads, -(-count // DIFFERENT_BLOCKS), DIFFERENT_BLOCKS, generator=torch.Generator().manual_seed(7))
        order = turns.argsort(-1).flatten(1)[:, :count].to(self.device)  # of the blocks of a head
        data = normal(self.spec, 1, DIFFERENT_BLOCKS * block + self.unpacked, seed=6)
        given, pieces = [], []
        for x in (data.k, data.v):
            tokens = x[0, :, 0].to(self.device)
            pieces.append(tokens[self.unpacked :].reshape(DIFFERENT_BLOCKS, block, dim))
            sink, rest = (part.expand(heads, -1, -1) for part in torch.split(tokens[: self.unpacked], [cache_spec.sink, cache_spec.local]))
            given.append(torch.cat([sink, pieces[-1][order].flatten(1, 2), rest], 1).transpose(0, 1)[None])
        self._prompt, self._order = (given[0], given[1]), order
        self._scales = trial_scales(self.spec, self.device)
        if self._scales is not None:
            self._scales = self._scales[:, :, None, None]
        self._heads = torch.arange(heads if self._scales is not None else 1, device=self.device).unsqueeze(1)
        """Every head has other codes where its static scales are others."""
        k, v = (rotate(x, op.rotation).expand(len(self._heads), -1, -1, -1) for x, op in zip(pieces, self.layout.operands, strict=True))
        self._packed = pack_blocks(self.layout, k, v, self._scales)

    def run(self) -> None:
        """Raises CheckError at the first wrong number."""
        block, cache_spec, given, packed, order = self.block, self.spec.cache, self._prompt, self._packed, self._order
        count = order.shape[1]
        cache = self.variant.new_cache(1, given[0].shape[1], self.device)
        cache.packed = reserved(cache.packed.shape, torch.uint8, self.device)  # zeros, so that equal blocks have equal padding
        self.variant.prefill(cache, *self.laid_out(given, 1))
        first = first_held(self.spec, block, given[0].shape[1])
        blocks, want = packed_blocks(self, cache, count)[0, :, first:count], packed[self._heads, order[:, first:]]
        if not torch.equal(blocks, want):
            self.same_codes("of a long prompt", blocks, want)
        read = unpack_blocks(self.layout, packed, given[0].dtype, self._scales)
        for name, got, pieces_read, op in zip(("K", "V"), self.variant.unpack(cache), read, self.layout.operands, strict=True):
            mine = got[0, cache_spec.sink + first * block : cache_spec.sink + count * block].transpose(0, 1)
            exact = rotate_back(pieces_read.to(given[0].dtype), op.rotation)[self._heads, order[:, first:]].flatten(1, 2)
            if not torch.equal(mine, exact):
                self.comparison.sequences("unpack", f"unpacked {name} of a long prompt", mine, exact.double())


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
        bad_q[of_q, 0, 0, -1] = torch.nan
        if not self.rows.arrival:  # else they are quantized before a query sees them, and a NaN has no code
            bad_k[of_k, 0, 0, -1] = bad_v[of_v, 0, -1, 1] = torch.nan
        tainted = self.call(cache, bad_q, (bad_k, bad_v), advance=False)
        clean = self.call(cache, q, new)
        self.comparison.output(where, *picked(clean, rows), *want)
        lost, spared = unmarked(clean), unmarked(clean)[0]
        rotation = self.layout.value.rotation
        channels = slice(1, 2) if rotation is None else slice(rotation.block)
        lost[0][of_q, 0, 0] = lost[1][of_q, 0] = True
        if not self.rows.arrival:
            lost[0][of_k, 0, :group] = lost[0][of_v, 0, -group:, channels] = lost[1][of_k, :group] = True
        if self.gpu and not self.rows.arrival:  # whose codes of up to 4 bits share registers with those of another channel
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
        length = rows.almost_full(far)
        middle = far * 3 // 32
        lengths = (0, unpacked + block + 5, unpacked + middle, length)
        target = rows.filling(length)
        seen = max(0, length - (self.spec.attention.window or length)) // block  # the window begins in this block
        edges = [0, 1, 2, *(edge // block + by for edge in (middle, 1 << 15, 1 << 16) for by in (-1, 0)), seen - 1, seen, seen + 1]
        marked = [at for at in (*edges, *range(target - 4, target + 1)) if 0 <= at <= target]
        filled = SparseCache(self.variant, len(lengths), length + block + 1, self.device, marked)
        cache, inputs = filled.cache, normal(self.spec, len(lengths), NEW_TOKENS, q_len=1, seed=8)
        first_q, k, v = (x.to(self.device) for x in (inputs.q, inputs.k, inputs.v))
        new = (k[:, :1].contiguous(), v[:, :1].contiguous())
        wanted = filled.next_block(slice(-1, None), length, k, v)[0]
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
        if self.places:  # later blocks lie in the places of the first ones
            return
        filled.set([0] * (len(lengths) - 1) + [unpacked + 3 * block])
        for name, mine, right in zip(("K", "V"), self.variant.unpack(cache), filled.contents(len(lengths) - 1, 3), strict=True):
            held = mine[-1:, rows.sink : rows.sink + 3 * block]
            self.comparison.sequences("unpack", f"unpacked {name} of the last sequence", held, right.transpose(0, 1)[None])

    def _packs(self, where: str, filled: SparseCache, target: int, want: torch.Tensor, call: Callable[[], None]) -> None:
        """Compare the block that a call packs at the end of the last sequence."""
        packed, place = filled.cache.packed, filled.place(target)
        if not self.rows.arrival:
            kept = packed[place]
            kept[-1] = NAN_BYTE
            packed[place] = kept
        call()
        self.same_codes(f"after {where}", packed[place][-1], want)


@dataclass(frozen=True)
class _Members:
    """The different sequences of a crowd: zeros, then some new tokens by a prefill, then a step of one token and one of all that a launch
    takes. Three of them pack a block, or have one.
    """

    whole: WholeSequences
    lengths: list[list[int]]
    """Of the zeros, after the prefill, and after each step."""
    queries: list[torch.Tensor]
    """Of `attend` after the prefill, and of the steps; with the results."""
    results: list[Pair]


class Crowd(SizeCheck):
    """More than 1,100 sequences: most have a few tokens, some are empty or fill a block."""

    def prepare(self) -> None:
        """See `_members`."""
        _members(self.spec, self.block, self.queries, self.device.type)

    def run(self) -> None:
        """Raises CheckError at the first wrong number."""
        members = _members(self.spec, self.block, self.queries, self.device.type)
        cache = self._cache(max(members.lengths[-1]))
        batch = cache.batch
        at = [number % DIFFERENT for number in range(batch)]
        index = torch.tensor(at, device=self.device)
        lengths = [[of[n] for n in at] for of in members.lengths]
        cache.lengths.copy_(torch.tensor(lengths[0], dtype=torch.int32))
        cache.bound, cache.sequences.uniform = max(lengths[0]), False
        new = [
            [x[index] for x in members.whole.new(start, tokens)]
            for start, tokens in zip(members.lengths, (NEW_TOKENS, 1, members.queries[2].shape[1]), strict=False)
        ]
        self.variant.prefill(cache, new[0][0], new[0][1], [end - start for start, end in zip(lengths[0], lengths[1], strict=True)])
        groups = [start for start in (*SAMPLED, batch - DIFFERENT) if start + DIFFERENT <= batch]
        chosen = torch.tensor(sorted({start + n for start in groups for n in range(DIFFERENT)}), device=self.device)
        last = batch - 1 - (batch - 1 - 5) % DIFFERENT  # a sequence with tokens
        q, one, most = (x[index] for x in members.queries)
        want = [picked(result, index[chosen]) for result in members.results]
        self.attend(f"attend over {batch} sequences", cache, q, want[0], last, chosen)
        where = f"decode over {batch} sequences"
        self.decode(where, cache, one, (new[1][0], new[1][1]), want[1], (last, last - 1, last + 1 - DIFFERENT), chosen)
        self.same_lengths(where, cache, lengths[2])
        where = f"decode of {most.shape[1]} tokens over {batch} sequences"
        self.comparison.output(where, *picked(self.call(cache, most, (new[2][0], new[2][1]), advance=False), chosen), *want[2])
        cache.advance([most.shape[1]] * batch)
        self.same_lengths(where, cache, lengths[3])
        if most_taken := self.spec.cache.rollback:
            taken = [min(number % (most_taken + 1), length) for number, length in enumerate(lengths[3])]
            cache.crop(taken)
            left = [length - some for length, some in zip(lengths[3], taken, strict=True)]
            self.same_lengths(f"a crop of {batch} sequences", cache, left)
            cache.lengths.copy_(torch.tensor(lengths[3]))
        chosen = chosen[-DIFFERENT:]
        others = torch.ones(batch, dtype=torch.bool, device=self.device)
        others[chosen] = False
        cache.lengths.masked_fill_(others, 0)
        shape = (batch, max(lengths[3]), *new[0][0].shape[2:])
        got = self.variant.unpack(cache, *(reserved(shape, self.variant.dtype, self.device) for _ in range(2)))
        want_k, want_v = members.whole.seen(members.lengths[-1])
        pair, ends = (want_k[index[chosen]], want_v[index[chosen]]), [lengths[3][n] for n in chosen.tolist()]
        self.same_contents(f"of {batch} sequences", (got[0][chosen], got[1][chosen]), pair, ends)

    def _cache(self, longest: int) -> KVCache:
        """Zeros, of as many sequences as there is room for; pages lie backwards."""
        one = self.variant.new_cache(1, longest, self.device)
        batch = max(LEAST_CROWD, min(CROWD, most_reserved(self.device) // one.nbytes))
        cache = self.variant.new_cache(batch, longest, self.device)
        cache.packed = reserved_blocks(cache.packed.shape, self.variant, self.device, exact=True)
        cache.k_residual, cache.v_residual = (reserved(cache.k_residual.shape, self.variant.dtype, self.device) for _ in range(2))
        if cache.block_table is not None:
            cache.block_table.copy_(cache.block_table.flip(0, 1))
        return cache


@lru_cache(maxsize=2)
def _members(spec: KernelSpec, block: int, queries: int, device: str) -> _Members:
    """Those of a spec."""
    full, most = spec.cache.unpacked + block, len(query_lengths(spec))
    starts = [0, 0, full - 1, full - 1, full, *[0] * (DIFFERENT - 5)]
    counts = [0, 0, 2, 0, 1, *(1 + n % NEW_TOKENS for n in range(DIFFERENT - 5))]
    before = [start + count for start, count in zip(starts, counts, strict=True)]
    lengths = [starts, before, [length + 1 for length in before], [length + 1 + most for length in before]]
    inputs = normal(spec, DIFFERENT, max(lengths[-1]), q_len=queries + 1 + most, seed=9)
    q, k, v = (x.to(device) for x in (inputs.q, inputs.k, inputs.v))
    for b, start in enumerate(starts):
        k[b, :start] = v[b, :start] = 0
    whole, parts = WholeSequences(spec, block, k, v), torch.split(q, [queries, 1, most], 1)
    results = [whole.attend(part, lengths[max(1, n)], lengths[n + 1]) for n, part in enumerate(parts)]
    return _Members(whole, lengths, list(parts), results)
