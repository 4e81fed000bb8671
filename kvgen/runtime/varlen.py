"""Rows of many query tokens on a GPU, many rows in a call: queries lie in one run, [tokens, heads, head_dim], and so do K and V.

Rows without a past attend over their own K and V (`own`). Of others the cache is dequantized, some rows or some KV heads at a time, at most
SCRATCH_BYTES of a row and TOTAL_BYTES of all, and FlashAttention's varlen call runs over it (`cached`). A row that would need more, or
whose few queries would leave most multiprocessors idle, is cut into pieces of its past, which are merged by their LSE (`_by_pieces`). The
host decides by bounds of the lengths: it waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvgen.format.rotation import rotate
from kvgen.runtime.extend import aligned

if TYPE_CHECKING:
    from kvgen.format.layout import Rotation
    from kvgen.runtime.kvcache import Tensors
    from kvgen.runtime.module import Module
    from kvgen.runtime.paged import PagedCalls, Rows, Store

SCRATCH_BYTES = 64 << 20
"""Most memory that dequantized K and V of a row take at a time."""
TOTAL_BYTES = 256 << 20
"""The same of all rows of a call."""
ROOM_STEP = 1024
"""Tokens in which the room of dequantized K and V grows, so that an allocator finds what it had."""
Q_TILE = 128
"""Query tokens of a head that a CTA of FlashAttention takes."""
BUSY = 128
"""CTAs that keep a GPU busy."""

Partial = tuple[Tensor, Tensor]
"""Attention over some tokens: out [tokens, heads, head_dim], and LSE [heads, tokens], float32, of -inf (or inf) where there are none."""
Flash = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, float, bool, int | None], Partial]
"""Attention of rows by a varlen kernel: q, k, v, where each row's queries and tokens begin (int32 [rows + 1]), the most queries and
tokens of a row, the scale, whether it is causal (queries are a row's last tokens), and the tokens of a sliding window. It caps scores
itself where the format does.
"""


def torch_flash(
    q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, k_starts: Tensor, most_q: int, most_k: int, scale: float, causal: bool,
    window: int | None,
) -> Partial:  # fmt: skip
    """torch's flash attention."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, q_starts, k_starts, most_q, most_k, 0.0, causal, False, scale=scale,
        window_size_left=None if window is None else window - 1,
    )  # fmt: skip
    return out, lse


@dataclass(frozen=True)
class Queries:
    """Some rows of a step."""

    q: Tensor
    """[tokens, q_heads, head_dim]."""
    out: Tensor
    starts: Tensor
    """int32 [rows + 1] on the device, from 0 on: where each row's tokens begin."""
    counts: Sequence[int]
    """Tokens of each row."""
    scale: float
    sinks: Tensor | None
    """float32 [q_heads]."""


class Varlen:
    """The calls of a paged format."""

    def __init__(self, calls: PagedCalls, flash: Flash = torch_flash) -> None:
        spec, layout = calls.kernel.spec, calls.kernel.layout
        self._module: Module = calls.kernel._distinct[0].module
        self._flash, self._page, self._dtype, self._device = flash, calls.page, calls.kernel.dtype, calls.device
        attention, cache = spec.attention, spec.cache
        self._heads, self._dim, self._window = attention.kv_heads, layout.head_dim, attention.window
        self._group = attention.q_heads // attention.kv_heads
        self._shifts = not (cache.sink or cache.local or cache.rollback or attention.window)
        """Whether a sequence's tokens from a page on are those of a sequence that begins there."""
        self._turns = [turn_of(rotation, self._dim, self._dtype, self._device) for rotation in layout.rotations]

    def own(self, queries: Queries, k: Tensor, v: Tensor) -> None:
        """Rows over their own tokens alone, k and v [tokens, kv_heads, head_dim]: their sequences have no others."""
        most = max(queries.counts)
        q, scale = _positive(queries.q, queries.scale)
        starts = queries.starts
        found = self._flash(aligned(q), aligned(k), aligned(v), starts, starts, most, most, scale, True, self._window)
        _finish(found, queries.out, queries.sinks)

    def cached(self, queries: Queries, store: Store, rows: Rows, bounds: Sequence[int]) -> None:
        """Rows over all of their sequences, which are written already and have at most `bounds` tokens."""
        q, scale = _positive(queries.q, queries.scale)
        turn, back = self._turns
        if turn is not None:
            q, scale = q @ turn[0], scale * turn[1]
        cache, first = rows.over(store), [0]
        for count in queries.counts:
            first.append(first[-1] + count)
        ctas = self._heads * self._group * sum(-(-count // Q_TILE) for count in queries.counts)
        for part, heads, pieces in self._parts(queries.counts, bounds, idle=ctas < BUSY):
            shared = slice(heads.start * self._group, heads.stop * self._group)
            mine = slice(first[part.start], first[part.stop])
            some, counts = aligned(q[mine, shared]), queries.counts[part]
            if pieces:
                found = self._by_pieces(some, cache, part, heads, bounds[part.start], scale)
            else:
                lengths, pages = rows.lengths[part], rows.block_table[part]
                k, v, k_starts = self._dequantized(cache, part, heads, lengths, pages, sum(bounds[part]))
                starts = queries.starts[part.start : part.stop + 1] - first[part.start]
                found = self._flash(some, k, v, starts, k_starts, max(counts), max(bounds[part]), scale, True, self._window)
                del k, v  # before the next part takes as much
            found = found[0] if back is None else _rotated_back(found[0], *back), found[1]
            _finish(found, queries.out[mine, shared], None if queries.sinks is None else queries.sinks[shared])

    def _parts(self, counts: Sequence[int], bounds: Sequence[int], *, idle: bool) -> Iterator[tuple[slice, slice, bool]]:
        """Rows, KV heads, and whether they are read in pieces: as many neighbours as fit, or one row alone."""
        every, token, first = slice(0, self._heads), self._heads * self._token_bytes, 0
        for b, bound in enumerate(bounds):
            alone = bound * token > SCRATCH_BYTES or (idle and self._shifts)
            if b > first and (alone or sum(bounds[first : b + 1]) * token > TOTAL_BYTES):
                yield slice(first, b), every, False
                first = b
            if alone:
                pieces = self._shifts and (idle or bound * self._token_bytes > SCRATCH_BYTES)
                cuts = self._cuts(counts[b], bound, pieces=pieces)
                for i in range(cuts):
                    yield slice(b, b + 1), slice(self._heads * i // cuts, self._heads * (i + 1) // cuts), pieces
                first = b + 1
        if first < len(bounds):
            yield slice(first, len(bounds)), every, False

    def _cuts(self, count: int, bound: int, *, pieces: bool) -> int:
        """Cuts of the KV heads, so that a row fits: all of it, or the pages that hold its queries, and float32 outputs that are merged."""
        held = (count + 2 * self._page if pieces else bound) * self._heads * self._token_bytes
        merged = 16 * count * self._heads * self._group * self._dim if pieces else 0
        return min(self._heads, max(1, -(-held // SCRATCH_BYTES), -(-merged // TOTAL_BYTES)))

    @property
    def _token_bytes(self) -> int:
        """Of dequantized K and V of a token of one KV head."""
        return 2 * self._dim * self._dtype.itemsize

    def _dequantized(
        self, cache: Tensors, rows: slice, heads: slice, lengths: Tensor, pages: Tensor, room: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """K and V [tokens, heads, head_dim] of some rows of these lengths, one row after the other, and where each begins. No more than
        `room` tokens are written.
        """
        packed, k_held, v_held, _, _, slots, scales = cache
        room = -(-room // ROOM_STEP) * ROOM_STEP
        shape = heads.stop - heads.start, room, self._dim
        # V of tokens that are masked is multiplied by 0: what lies behind a row's tokens, and before its window, has to be finite
        made = (new(shape, dtype=self._dtype, device=self._device) for new in (torch.empty, torch.zeros))
        k, v = (x.transpose(0, 1) for x in made)  # the tokens of a head lie together
        starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)).clamp_(max=room)
        places = None if slots is None else slots[rows]
        if heads.stop - heads.start < self._heads:
            found = rows if places is None else places.long()
            k_held, v_held, places = k_held[found][:, heads].contiguous(), v_held[found][:, heads].contiguous(), None
            scales = None if scales is None else scales[:, heads].contiguous()
        elif places is None:
            k_held, v_held = k_held[rows], v_held[rows]
        self._module.unpack(packed[:, heads], k_held, v_held, lengths, pages, places, scales, starts, k, v)
        return k, v, starts

    def _by_pieces(self, q: Tensor, cache: Tensors, rows: slice, heads: slice, bound: int, scale: float) -> Partial:
        """One row over its newest pages, which hold all of its queries, and over pieces of the others, which every query sees whole."""
        count, page = len(q), self._page
        lengths, table = cache[3][rows], cache[4][rows]  # type: ignore[index]
        past = (lengths - count).clamp_(min=0) // page * page  # tokens of the other pages
        newest = 1 - (-count // page)
        numbers = (past // page).long() + torch.arange(newest, device=self._device)
        pages = table.gather(1, numbers.clamp_(max=table.shape[1] - 1)[None])
        k, v, k_starts = self._dequantized(cache, rows, heads, lengths - past, pages, newest * page)
        out, lse = self._flash(q, k, v, self._equal(count, 1), k_starts, count, newest * page, scale, True, None)
        out = out.float()
        most = max(1, SCRATCH_BYTES // ((heads.stop - heads.start) * self._token_bytes * page))  # pages of a piece
        splits = min(16, -(-2 * BUSY // (q.shape[1] * -(-count // Q_TILE))))  # so that few queries keep a GPU busy
        many = q.repeat(splits, 1, 1)
        for first in range(0, -(-bound // page), most):
            pages = table[:, first : first + most]
            room = pages.shape[1] * page
            here = (past - first * page).clamp_(0, room)
            k, v, _ = self._dequantized(cache, rows, heads, here, pages, room)
            k_starts = (here.long() * torch.arange(splits + 1, device=self._device) // splits).int()
            found, part = self._flash(many, k, v, self._equal(count, splits), k_starts, count, room, scale, False, None)
            parts = _empty(part).view(-1, splits, count)
            weights = torch.softmax(parts, 1).nan_to_num_().permute(1, 2, 0).unsqueeze(-1)
            more, part = (found.view(splits, count, *found.shape[1:]) * weights).sum(0), torch.logsumexp(parts, 1)
            out.addcmul_(more - out, torch.sigmoid(part - lse).T.unsqueeze(-1))
            lse = torch.logaddexp(lse, part)
            del k, v  # before the next piece takes as much
        return out, lse

    def _equal(self, count: int, rows: int) -> Tensor:
        """Where rows of equally many tokens begin."""
        return torch.arange(0, count * rows + 1, count, dtype=torch.int32, device=self._device)


def _empty(lse: Tensor) -> Tensor:
    """-inf where there are no tokens, for which some kernels give inf."""
    return lse.masked_fill(lse == torch.inf, -torch.inf)


def _rotated_back(out: Tensor, matrix: Tensor, factor: float) -> Tensor:
    """[tokens, heads, head_dim] by the matrix of a rotation, rounded once."""
    return torch.addmm(out.new_zeros(1), out.flatten(0, 1), matrix.T.to(out.dtype), beta=0, alpha=factor).view(out.shape)


def _finish(found: Partial, out: Tensor, sinks: Tensor | None) -> None:
    """Fill `out`; with the sinks' part in the denominators, if there are any."""
    out.copy_(found[0])
    if sinks is not None:
        out.mul_(torch.sigmoid(_empty(found[1]) - sinks.unsqueeze(-1)).T.unsqueeze(-1))


def _positive(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """The query and a positive scale: kernels multiply -inf, the score of what is masked, by it."""
    return (q, scale) if scale > 0 else (q * (-1 if scale else 0), -scale or 1.0)


def turn_of(rotation: Rotation | None, channels: int, like: torch.dtype, device: torch.device) -> tuple[Tensor, float] | None:
    """A rotation as a matrix of 1, -1 and 0, exact in any dtype, and its factor."""
    if rotation is None:
        return None
    factor = float(rotation.block) ** -0.5
    return (rotate(torch.eye(channels, dtype=torch.float64), rotation) / factor).round().to(like).to(device), factor
