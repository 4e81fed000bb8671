"""Verifies sizes beyond those of life cycles: far tokens, pages and bytes, and many sequences; and inputs that hold a NaN.

Caches are zeros in memory that is reserved and not touched (`filled.reserved`), but for a few blocks and tokens, so that large ones cost
little. What they hold is known, and every output is compared with fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from kvgen.errors import CheckError
from kvgen.format.residual import ResidualRows, residual_rows
from kvgen.format.window import window_places
from kvgen.measure.compare import NAN_BYTE, Comparison, poisoned
from kvgen.measure.filled import Output, SparseCache, most_reserved, reserved, reserved_blocks
from kvgen.measure.job import CheckPolicy
from kvgen.measure.scenario import query_lengths
from kvgen.runtime.executable import Plan
from kvgen.runtime.kvcache import KVCache
from kvgen.runtime.variant import Variant
from kvgen.spec import KernelSpec
from kvgen.verify.cache import ReferenceCache
from kvgen.verify.data import Inputs, learned_sinks, normal
from kvgen.verify.packing import OPERANDS, pack_blocks, read_codes

CROWD, LEAST_CROWD = 1203, 133
DIFFERENT = 17
"""Sequences of a crowd with data of their own; the others repeat these. It is odd, so that no power of two of them is a period."""
ALL = slice(None)
NEW_TOKENS = 3
"""Tokens of the prefills here, at most."""
SAMPLED = (0, 60, 125, 1020, 1095)
"""Sequences of a crowd from which on DIFFERENT ones are compared; and the last."""


@dataclass(frozen=True)
class SizeCheck:
    """Common to both: a variant, a device, and the limits of a comparison."""

    variant: Variant
    device: torch.device
    policy: CheckPolicy
    comparison: Comparison

    @property
    def spec(self) -> KernelSpec:
        """Of the variant."""
        return self.variant.spec

    @property
    def rows(self) -> ResidualRows:
        """Which tokens are unquantized."""
        return residual_rows(self.spec, self.variant.layout.tokens)

    @property
    def queries(self) -> int:
        """Query tokens of `attend`: as many as a launch takes, on the CPU at least two unless a sliding window forgets what they see."""
        most = len(query_lengths(self.spec))
        return most if self.device.type == "cuda" or window_places(self.spec, self.rows.block) else max(2, most)

    def schedulers(self) -> tuple[tuple[str, bool], ...]:
        """On a GPU both must give the same numbers; whether the host takes all lengths for equal."""
        return (("", False),) if self.device.type == "cpu" else ((", with a plan", False), (", by the static scheduler", True))

    def call(
        self,
        cache: KVCache,
        q: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor] | None,
        *,
        advance: bool = False,
        plan: Plan | None = None,
    ) -> Output:
        """`attend`, or with `new` K and V `decode`, into poisoned outputs."""
        out = poisoned(q.shape, q.dtype, self.device)
        lse = poisoned((q.shape[0], q.shape[2], q.shape[1]), torch.float32, self.device)
        sinks = learned_sinks(self.spec, self.device)
        if new is None:
            self.variant.attend(q, cache, out=out, lse=lse, sinks=sinks, plan=plan)
        else:
            self.variant.decode(q, *new, cache, out=out, lse=lse, sinks=sinks, advance=advance)
        return out, lse

    def attend(self, where: str, cache: KVCache, q: torch.Tensor, want: Output, bad: int, rows: torch.Tensor | slice = ALL) -> None:
        """`attend` by every scheduler, and again with a NaN in the last query token and head of sequence `bad`. `rows` are compared."""
        tainted = q.clone()
        tainted[bad, -1, -1, -1] = torch.nan
        for how, uniform in self.schedulers():
            cache.sequences.uniform = uniform
            clean, lossy = self.call(cache, q, None), self.call(cache, tainted, None)
            self.comparison.output(f"{where}{how}", *picked(clean, rows), *want)
            lost = [torch.zeros_like(x, dtype=torch.bool) for x in clean]
            lost[0][bad, -1, -1], lost[1][bad, -1, -1] = True, True
            self.only_lost(f"{where}{how}, a NaN in q", lossy, clean, lost, rows)
        if self.device.type == "cpu":  # whose calls take a plan only where one is given
            few = min(q.shape[1], len(query_lengths(self.spec)))
            plan = self.variant.plan(cache, few, append=False, uniform=False)
            planned = self.call(cache, q[:, -few:], None, plan=plan)
            self.comparison.output(f"{where} over a plan", *picked(planned, rows), want[0][:, -few:], want[1][..., -few:])
        cache.sequences.uniform = False

    def decode(
        self, where: str, cache: KVCache, data: Inputs, want: Output, bad: tuple[int, int, int], rows: torch.Tensor | slice = ALL
    ) -> None:
        """`decode` of one token, before which it is called with a NaN in q, new K and new V of the sequences `bad`, which changes nothing
        that the other call does not write.
        """
        group, (of_q, of_k, of_v) = self.spec.attention.group, bad
        q, k, v = (x.clone() for x in (data.q, data.k, data.v))
        q[of_q, 0, 0, -1] = k[of_k, 0, 0, -1] = v[of_v, 0, -1, 1] = torch.nan
        tainted = self.call(cache, q, (k, v))
        clean = self.call(cache, data.q, (data.k, data.v), advance=True)
        self.comparison.output(where, *picked(clean, rows), *want)
        lost = [torch.zeros_like(x, dtype=torch.bool) for x in clean]
        lost[0][of_q, 0, 0] = lost[0][of_k, 0, :group] = lost[0][of_v, 0, -group:, 1] = True
        lost[1][of_q, 0] = lost[1][of_k, :group] = True
        spared = torch.zeros_like(lost[0])
        if self.device.type == "cuda":  # whose codes of up to 4 bits share registers with those of another channel
            spared[of_v, 0, -group:] = True
        self.only_lost(f"{where}, a NaN in q, new K and new V", tainted, clean, lost, rows, spared)

    def only_lost(
        self,
        where: str,
        got: Output,
        clean: Output,
        lost: list[torch.Tensor],
        rows: torch.Tensor | slice,
        spared: torch.Tensor | None = None,
    ) -> None:
        """Raises CheckError unless of some sequences what `lost` names, bool like `got`, is NaN, and all else has the bits that it has
        without a NaN, but for what `spared` names of the output. On a GPU the rows of a KV head move their maxima together, so other rows
        of it may be rounded differently.
        """
        got, clean, gone = picked(got, rows), picked(clean, rows), (lost[0][rows], lost[1][rows])
        unknown = (gone[0] if spared is None else gone[0] | spared[rows], gone[1])
        excepted = gone
        if self.device.type == "cuda":
            heads = gone[1].any(-1) | gone[0].any(-1).any(1)  # [sequences, q_heads]
            heads = heads.view(len(heads), -1, self.spec.attention.group).any(-1).repeat_interleave(self.spec.attention.group, 1)
            excepted = (heads[:, None, :, None].expand_as(gone[0]), heads[:, :, None].expand_as(gone[1]))
            (out, lse), (want, want_lse) = ([x.masked_fill(there, 0) for x, there in zip(y, unknown, strict=True)] for y in (got, clean))
            self.comparison.output(f"{where}, rows that do not see it", out, lse, want.double(), want_lse.double())
        for name, mine, was, seen, other in zip(("output", "LSE"), got, clean, gone, excepted, strict=True):
            if not bool(mine[seen].isnan().all()):
                raise CheckError(f"{where}: {name} that sees it is a number")
            whole = {2: torch.int16, 4: torch.int32}[mine.element_size()]
            if not torch.equal(*(x.view(whole).masked_fill(other, 0) for x in (mine, was))):
                raise CheckError(f"{where}: {name} that does not see it has other bits")


def picked(output: Output, rows: torch.Tensor | slice) -> Output:
    """Some sequences of an output."""
    return output[0][rows], output[1][rows]


class Far(SizeCheck):
    """Four sequences of very unequal lengths, one of them empty; the last lies far behind, has twice the tokens of other long ones, and
    fills a block.
    """

    def run(self) -> None:
        """Raises CheckError at the first wrong number."""
        rows, unpacked, block = self.rows, self.spec.cache.unpacked, self.rows.block
        far = max(2 * self.policy.most_tokens, 32 * block)
        length = rows.first(far) + rows.local + block - 1  # one token more packs a block
        middle = far * 3 // 32
        lengths = (0, unpacked + block + 5, unpacked + middle, length)
        target = rows.packed_blocks(length)
        seen = max(0, length - (self.spec.attention.window or length)) // block  # the window begins in this block
        edges = [0, 1, 2, *(edge // block + by for edge in (middle, 1 << 15, 1 << 16) for by in (-1, 0)), seen - 1, seen, seen + 1]
        marked = [at for at in (*edges, *range(target - 4, target + 1)) if 0 <= at <= target]
        filled = SparseCache(self.variant, len(lengths), length + block + 1, self.device, marked)
        cache = filled.cache
        data = normal(self.spec, len(lengths), NEW_TOKENS, q_len=1, seed=8)
        data = Inputs(*(x.to(self.device) for x in (data.q, data.k, data.v)))
        new = (data.k[:, :1].contiguous(), data.v[:, :1].contiguous())
        block_wanted = self._block_after(filled, data, length)
        q = normal(self.spec, len(lengths), 1, q_len=self.queries, seed=5).q.to(self.device)
        filled.set(lengths)
        self.attend(f"attend over {list(lengths)} tokens", cache, q, filled.attend(q, lengths), len(lengths) - 1)
        where = f"decode over {list(lengths)} tokens"
        want = filled.attend(data.q, lengths, new)
        self._packs(where, filled, target, block_wanted, lambda: self.decode(where, cache, Inputs(data.q, *new), want, (1, 3, 2)))
        if cache.lengths.tolist() != [n + 1 for n in lengths]:
            raise CheckError(f"{where}: lengths are {cache.lengths.tolist()}")
        filled.restore()
        filled.set(lengths)
        counts = (0, 0, 1, NEW_TOKENS)
        where = f"prefill behind {list(lengths)} tokens"
        self._packs(where, filled, target, block_wanted, lambda: self.variant.prefill(cache, data.k, data.v, counts))
        self._unpack(filled)

    def _packs(self, where: str, filled: SparseCache, target: int, want: torch.Tensor, call: Callable[[], None]) -> None:
        """Compare the block that a call packs at the end of the last sequence."""
        packed, table = filled.cache.packed, filled.cache.block_table
        if table is None:
            place = (-1, slice(None), target % (window_places(self.spec, self.rows.block) or target + 1))
        else:
            page, inner = divmod(target, packed.shape[2])
            place = (int(table[-1, page]), slice(None), inner)
        packed[place] = NAN_BYTE
        call()
        for which in OPERANDS:
            if self.variant.layout.operand(which).quantized:
                codes = read_codes(self.variant.layout, which, want)
                self.comparison.codes(f"after {where}", self.variant.layout, which, packed[place], codes)

    def _block_after(self, filled: SparseCache, data: Inputs, length: int) -> torch.Tensor:
        """The block that the next token of the last sequence completes, packed by the reference: uint8 [kv_heads, block_bytes]."""
        first = self.rows.first(length)
        held = [self.rows.row(position) for position in range(first, min(first + self.rows.block, length))]
        k, v = (
            torch.cat([residual[-1][:, held], new[-1, : self.rows.block - len(held)].transpose(0, 1)], 1)
            for residual, new in ((filled.cache.k_residual, data.k), (filled.cache.v_residual, data.v))
        )
        return pack_blocks(self.variant.layout, k, v)

    def _unpack(self, filled: SparseCache) -> None:
        """The first blocks of the last sequence, without the others: what they unpack to."""
        if window_places(self.spec, self.rows.block):
            return  # later blocks lie in their places
        rows, count = self.rows, 3
        length = self.spec.cache.unpacked + count * rows.block
        filled.set([0] * (filled.cache.batch - 1) + [length])
        got = self.variant.unpack(filled.cache)
        for name, mine, want in zip(("K", "V"), got, filled.contents(filled.cache.batch - 1, count), strict=True):
            held = mine[-1:, rows.sink : rows.sink + count * rows.block]
            self.comparison.sequences("unpack", f"unpacked {name} of the last sequence", held, want.transpose(0, 1)[None])


@dataclass(frozen=True)
class _Members:
    """The different sequences of a crowd, on one device, and what the reference makes of them."""

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    data: Inputs
    step: Inputs
    attend: Output
    decode: Output
    lengths: tuple[int, ...]
    read: tuple[torch.Tensor, torch.Tensor]
    """K and V in the end, fp64 [different, longest, kv_heads, head_dim]."""


class Crowd(SizeCheck):
    """More than 1,100 sequences: most have a few tokens, some are empty or fill a block."""

    def run(self) -> None:
        """Raises CheckError at the first wrong number."""
        members = _members(self.spec, self.rows.block, self.queries, self.device.type)
        cache = self._cache(max(members.lengths))
        batch = cache.batch
        index = torch.arange(batch) % DIFFERENT
        at = index.tolist()
        index = index.to(self.device)
        starts, counts = ([numbers[n] for n in at] for numbers in (members.starts, members.counts))
        cache.lengths.copy_(torch.tensor(starts, dtype=torch.int32))
        cache.bound, cache.sequences.uniform = max(starts), False
        self.variant.prefill(cache, members.data.k[index], members.data.v[index], counts)
        groups = [start for start in (*SAMPLED, batch - DIFFERENT) if start + DIFFERENT <= batch]
        chosen = torch.tensor(sorted({start + n for start in groups for n in range(DIFFERENT)}), device=self.device)
        where, q = f"{batch} sequences", members.data.q[index]
        last = batch - 1 - (batch - 1 - 5) % DIFFERENT  # a sequence with tokens
        self.attend(f"attend over {where}", cache, q, picked(members.attend, index[chosen]), last, chosen)
        step = Inputs(*(x[index] for x in (members.step.q, members.step.k, members.step.v)))
        want, bad = picked(members.decode, index[chosen]), (last, last - 1, last + 1 - DIFFERENT)
        self.decode(f"decode over {where}", cache, step, want, bad, chosen)
        if cache.lengths.tolist() != [members.lengths[n] for n in at]:
            raise CheckError(f"decode over {where}: wrong lengths")
        self._unpack(cache, members, index, chosen[-DIFFERENT:])

    def _unpack(self, cache: KVCache, members: _Members, index: torch.Tensor, chosen: torch.Tensor) -> None:
        """What some of the sequences unpack to, and whether a step back shortens all."""
        if self.spec.cache.rollback:
            whole = cache.lengths.clone()
            cache.crop(1)
            if not torch.equal(cache.lengths, whole - 1):
                raise CheckError(f"a crop of {cache.batch} sequences: wrong lengths")
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
    full, cache = spec.cache.unpacked + block, ReferenceCache(spec, DIFFERENT, block)
    starts = (0, 0, full - 1, full - 1, full, *[0] * (DIFFERENT - 5))
    counts = (0, 0, 2, 0, 1, *(1 + n % NEW_TOKENS for n in range(DIFFERENT - 5)))
    data, step = (normal(spec, DIFFERENT, tokens, q_len=q_len, seed=seed) for tokens, q_len, seed in ((NEW_TOKENS, queries, 9), (1, 1, 10)))
    nothing = torch.zeros(DIFFERENT, full, *data.k.shape[2:], dtype=data.k.dtype)
    cache.prefill(nothing, nothing, torch.tensor(starts))
    cache.prefill(data.k, data.v, torch.tensor(counts))
    sinks = learned_sinks(spec)
    attended = cache.attend(data.q, sinks=sinks)
    decoded = cache.decode(step.q, step.k, step.v, sinks=sinks)

    def here(*tensors: torch.Tensor) -> Iterator[torch.Tensor]:
        return (x.to(device) for x in tensors)

    attend_out, attend_lse, decode_out, decode_lse, k, v = here(*attended, *decoded, *cache.keys_values())
    lengths = tuple(cache.lengths.tolist())
    return _Members(
        starts, counts, Inputs(*here(data.q, data.k, data.v)), Inputs(*here(step.q, step.k, step.v)), (attend_out, attend_lse),
        (decode_out, decode_lse), lengths, (k, v),
    )  # fmt: skip
