"""The reference in fp64, on the device of its arguments: attention with every feature of the spec language, and what a cache holds
of known tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from kvgen.format.layout import PackedLayout, Rotation, rotation_of
from kvgen.format.residual import residual_rows
from kvgen.format.rotation import rotate, rotate_back
from kvgen.format.scales import trial_scales
from kvgen.spec import KernelSpec
from kvgen.verify.data import learned_sinks
from kvgen.verify.packing import dequantize, from_blocks, pack_blocks, quantize, to_blocks

MAX_SCORES = 1 << 23
"""Scores held at once: 64 MiB in fp64."""


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [batch, q_len, q_heads, head_dim] and LSE [batch, q_heads, q_len], both fp64; the LSE is a natural logarithm.

    q [batch, q_len, q_heads, head_dim] holds the queries of the last q_len positions; k and v [batch, tokens, kv_heads,
    head_dim]; `lengths` int [batch] counts the valid tokens (all, where None). Query i of a sequence of length n stands at
    position n - q_len + i and sees positions up to its own, with `window` only the last `window` of them. `scale` is
    1 / sqrt(head_dim) where None. `sinks` [q_heads] are logits that join the denominator only (after scale and softcap).
    A query that sees nothing gives 0, and LSE = its sink, or -inf.
    """
    batch, q_len, q_heads, _ = q.shape
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.zeros((batch, q_heads, q_len), dtype=torch.float64, device=q.device)
    for b, rows, first, found, logs in _parts(q, k, lengths, scale, softcap, window, sinks):
        values = v[b, first : found.shape[-1]].double().transpose(0, 1)
        seen = found[..., first:].reshape(len(values), q_heads // len(values) * found.shape[1], values.shape[1]) @ values
        out[b, rows] = seen.view(q_heads, found.shape[1], -1).transpose(0, 1)
        lse[b, :, rows] = logs
    return out, lse


def _parts(
    q: torch.Tensor,
    k: torch.Tensor,
    lengths: torch.Tensor | None,
    scale: float | None,
    softcap: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> Iterator[tuple[int, slice, int, torch.Tensor, torch.Tensor]]:
    """Every query once, in pieces of at most MAX_SCORES scores: sequence, rows, the first position that one of them sees, weights
    [q_heads, rows, length] and LSE [q_heads, rows]. Values before that position take no part, since 0 times a NaN is a NaN.
    """
    batch, q_len, q_heads, head_dim = q.shape
    if q_heads % k.shape[2]:
        raise ValueError(f"q_heads ({q_heads}) must be a multiple of kv_heads ({k.shape[2]})")
    for b in range(batch):
        length = k.shape[1] if lengths is None else int(lengths[b])
        keys, step = k[b, :length].double().permute(1, 2, 0), max(1, MAX_SCORES // (q_heads * max(length, 1)))
        for rows in (slice(start, min(start + step, q_len)) for start in range(0, q_len, step)):
            query = torch.arange(rows.start, rows.stop, device=q.device).unsqueeze(1) + length - q_len
            at = torch.arange(length, device=q.device)
            visible = (at <= query) if window is None else (at <= query) & (at > query - window)
            heads = q[b, rows].double().transpose(0, 1).reshape(len(keys), -1, head_dim)
            scores = (heads @ keys).view(q_heads, len(query), length) * (head_dim**-0.5 if scale is None else scale)
            if softcap > 0:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(~visible, -torch.inf)
            lse = torch.logsumexp(scores, -1) if length else scores.new_full(scores.shape[:-1], -torch.inf)
            if sinks is not None:
                lse = torch.logaddexp(lse, sinks.double().unsqueeze(1))
            first = 0 if window is None else max(0, length - q_len + rows.start - window + 1)
            yield b, rows, first, torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)), lse


Pair = tuple[torch.Tensor, torch.Tensor]


class WholeSequences:
    """K and V of whole sequences, [batch, tokens, kv_heads, head_dim] as they are appended, in any format of the spec language.

    What a cache holds follows from lengths. With `cache.quantize` arrival every token is quantized. Else positions below `cache.sink`
    stay in dtype; of the others, block i holds the positions
    sink + [i * block, (i + 1) * block). A block is quantized once all of its tokens are older than the `local` newest. Other tokens read
    back as appended. A rotated operand is rotated before all of that.
    """

    def __init__(self, spec: KernelSpec, block: int, k: torch.Tensor, v: torch.Tensor, scales: torch.Tensor | None = None) -> None:
        """`block` is the residual block size N_r in tokens, `scales` static ones, `trial_scales` where None. Raises ValueError if a group
        does not divide it.
        """
        self.spec, self.raw, self.rows = spec, (k, v), residual_rows(spec, block)
        self.scales = scales if scales is not None else trial_scales(spec, k.device)
        self.rotations = tuple(rotation_of(quant, spec.attention.head_dim) for quant in (spec.key, spec.value))
        self._read = self._read_all()

    @property
    def held(self) -> Pair:
        """K and V as a cache holds them before they are quantized: rotated."""
        k, v = (rotate(x, rotation) for x, rotation in zip(self.raw, self.rotations, strict=True))
        return k, v

    def packed(self, layout: PackedLayout) -> torch.Tensor:
        """All whole blocks: uint8 [batch, kv_heads, blocks, block_bytes]; also the last one, of tokens that are quantized as they arrive:
        zeros follow them.
        """
        held = [x[:, self.rows.sink :] for x in self.held]
        if self.rows.arrival:
            held = [torch.cat([x, x.new_zeros(x.shape[0], -x.shape[1] % layout.tokens, *x.shape[2:])], 1) for x in held]
        k, v = (to_blocks(x, layout.tokens) for x in held)
        return pack_blocks(layout, k, v, None if self.scales is None else self.scales[:, :, None, None])

    def seen(self, packed_upto: Sequence[int], rounded: torch.dtype | None = None) -> Pair:
        """K and V in fp64 as attention sees them, with the blocks quantized that are due at lengths [batch], and rotated back.

        `rounded`: the type to which what the cache holds is rounded first.
        """
        token = torch.arange(self.raw[0].shape[1], device=self.raw[0].device)
        end = torch.tensor([self.rows.first(length) for length in packed_upto], device=token.device).unsqueeze(1)
        packed = ((token >= self.rows.sink) & (token < end))[..., None, None]
        found = (torch.where(packed, read, held.double()) for read, held in zip(self._read, self.held, strict=True))
        k, v = (
            rotate_back(x if rounded is None else x.to(rounded).double(), rotation)
            for x, rotation in zip(found, self.rotations, strict=True)
        )
        return k, v

    def attend(
        self,
        q: torch.Tensor,
        packed_upto: Sequence[int],
        lengths: Sequence[int],
        rounded: torch.dtype | None = None,
        *,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> Pair:
        """Output [batch, q_len, q_heads, head_dim] and LSE [batch, q_heads, q_len] (fp64) of the last q_len positions of `lengths`, with
        the blocks quantized that are due at `packed_upto`: after a step its lengths, in a `decode` those before it. Where tokens are
        quantized as they arrive, all are, whatever `packed_upto`.

        `sinks` [q_heads] are `learned_sinks` where None. `rounded`: the type to which K and V are rounded first, as extend attention on a
        GPU does.
        """
        k, v = self.seen(lengths if self.rows.arrival else packed_upto, rounded)
        att, sinks = self.spec.attention, learned_sinks(self.spec, q.device) if sinks is None else sinks
        early = q.is_cuda and q.shape[1] <= att.q_len  # not in extend attention, whose queries torch rotates
        q = rotate_back(rotated_query(q, self.rotations[0], early=early), self.rotations[0])
        return attend(q, k, v, torch.tensor(lengths), scale=scale, softcap=att.softcap, window=att.window, sinks=sinks)

    def new(self, starts: Sequence[int], count: int) -> Pair:
        """`count` tokens of every sequence from its own start, K and V [batch, count, kv_heads, head_dim]; zeros past the data."""
        padded = (torch.cat([x, x.new_zeros((x.shape[0], count, *x.shape[2:]))], 1) for x in self.raw)
        k, v = (torch.stack([x[b, start : start + count] for b, start in enumerate(starts)]) for x in padded)
        return k, v

    def drafted(self, kept: Sequence[int]) -> WholeSequences:
        """The sequences with other tokens from `kept[b]` on, which will be taken back. No block may hold them yet, unless they are
        quantized as they arrive."""
        token = torch.arange(self.raw[0].shape[1], device=self.raw[0].device)
        draft = (token >= torch.tensor(kept, device=token.device).unsqueeze(1))[..., None, None]
        other = copy.copy(self)
        other.raw = (torch.where(draft, -self.raw[0], self.raw[0]), torch.where(draft, -self.raw[1], self.raw[1]))
        if self.rows.arrival:
            other._read = other._read_all()
        return other

    def _read_all(self) -> tuple[torch.Tensor, ...]:
        """K and V as `_read_back` gives them."""
        each = (None, None) if self.scales is None else self.scales[:, :, None, None]
        return tuple(self._read_back(*one) for one in zip(self.held, (self.spec.key, self.spec.value), each, strict=True))

    def _read_back(self, x: torch.Tensor, quant: Any, scale: torch.Tensor | None) -> torch.Tensor:
        """K or V with all whole blocks quantized, fp64."""
        if quant.bits == 16:
            return x.double()
        blocks = to_blocks(x[:, self.rows.sink :], 1 if self.rows.arrival else self.rows.block)
        read = from_blocks(dequantize(quantize(blocks, quant, getattr(quant, "boost", None), scale), quant))
        sink, end = self.rows.sink, self.rows.sink + read.shape[1]
        return torch.cat([x[:, :sink].double(), read, x[:, end:].double()], 1)


def rotated_query(q: torch.Tensor, rotation: Rotation | None, *, early: bool) -> torch.Tensor:
    """The query as a kernel rotates it, and rounds it to its type; in fp64. `early`: before a factor of sqrt(1/2), where the block has one
    (docs/numerics.md).
    """
    if rotation is None:
        return q.double()
    factor = 2**0.5 if early and rotation.block.bit_length() % 2 == 0 else 1.0
    return (rotate(q.float(), rotation) * factor).to(q.dtype).double() / factor
