"""Calls with more query tokens than a kernel is compiled for: prompts over a cache, and chunks of a prompt.

A CPU module takes any number of query tokens, given a workspace for them. A decode kernel of a GPU does not, and should not: with
hundreds of queries the products of attention cost more than reading the cache. There, the cache is dequantized into 16-bit
tensors, a part of its sequences and KV heads at a time, and torch's flash attention runs over them: causal, aligned to the end of
each sequence, with lengths that stay on the device. No host synchronization, so a prompt can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvgen.toolchain.module import Module

DEQUANTIZED_BYTES = 1 << 30
"""Most memory that dequantized K and V take at a time, unless one head of one sequence needs more."""

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]
"""packed, k_residual, v_residual, lengths, block_table of a cache."""


@dataclass(frozen=True)
class Call:
    """A call's tensors, shaped as in `docs/abi.md`; `new` is K and V to be appended, None for `attend`.

    `bound` is what no length exceeds after the call.
    """

    q: torch.Tensor
    new: tuple[torch.Tensor, torch.Tensor] | None
    out: torch.Tensor
    lse: torch.Tensor | None
    scale: float
    bound: int


def run(module: Module, cache: Tensors, call: Call) -> None:
    """Fill `call.out` and `call.lse`; append `call.new`, if there is any, after attending over it in dtype."""
    (on_gpu if call.q.is_cuda else on_cpu)(module, cache, call)


def on_cpu(module: Module, cache: Tensors, call: Call) -> None:
    """The module's own kernel, with a workspace for this call."""
    batch, tokens = call.q.shape[:2]
    size = int(module.workspace_bytes(batch, call.bound, tokens))
    workspace = torch.zeros(max(16, size), dtype=torch.uint8)
    if call.new is None:
        module.attend(call.q, *cache, call.out, call.lse, workspace, call.scale, call.bound)
    else:
        module.decode(call.q, *call.new, *cache, call.out, call.lse, workspace, call.scale, call.bound)


def on_gpu(module: Module, cache: Tensors, call: Call) -> None:
    """Dequantize and attend part by part, then pack what is new."""
    batch, tokens = call.q.shape[:2]
    heads = cache[1].shape[1]
    group = call.q.shape[2] // heads
    for part in parts(batch, heads, call.bound * call.q.shape[3] * 2 * call.q.element_size()):
        k, v, used = _dequantized(module, cache, call, part)
        shared = slice(part.heads.start * group, part.heads.stop * group)
        out, lse = flash(call.q[part.batch, :, shared], k, v, used, call.scale)
        call.out[part.batch, :, shared] = out
        if call.lse is not None:
            call.lse[part.batch, shared] = lse
        del k, v, out, lse  # before the next part takes as much
    if call.new is not None:
        counts = torch.full((batch,), tokens, dtype=torch.int32, device=call.q.device)
        module.pack(*call.new, counts, *cache)


@dataclass(frozen=True)
class Part:
    """Some sequences with all KV heads, or one sequence with some of them."""

    batch: slice
    heads: slice


def parts(batch: int, heads: int, head_bytes: int) -> Iterator[Part]:
    """Cuts of about equal size that dequantize at most DEQUANTIZED_BYTES; `head_bytes` are those of K and V of one head."""
    fit = max(1, DEQUANTIZED_BYTES // max(1, head_bytes))
    if fit >= heads:
        for rows in _even(batch, fit // heads):
            yield Part(rows, slice(0, heads))
        return
    for b in range(batch):
        for some in _even(heads, fit):
            yield Part(slice(b, b + 1), some)


def _even(count: int, most: int) -> Iterator[slice]:
    pieces = -(-count // most)
    return (slice(count * i // pieces, count * (i + 1) // pieces) for i in range(pieces))


def _dequantized(module: Module, cache: Tensors, call: Call, part: Part) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K and V [sequences, bound, heads, head_dim] of a part, the new tokens behind the old ones, and their lengths, int32.

    What lies past a length is not initialized.
    """
    packed, k_residual, v_residual, lengths, table = cache
    b, h = part.batch, part.heads
    lengths = lengths[b]
    room = (2, h.stop - h.start, b.stop - b.start, call.bound, call.q.shape[3])
    k, v = torch.empty(room, dtype=call.q.dtype, device=call.q.device).permute(0, 2, 3, 1, 4)  # the tokens of a head lie together
    blocks = packed[:, h] if table is not None else packed[b, h]
    module.unpack(blocks, k_residual[b, h], v_residual[b, h], lengths, None if table is None else table[b], k, v)
    if call.new is None:
        return k, v, lengths
    count = call.q.shape[1]
    row = torch.arange(lengths.shape[0], device=lengths.device).unsqueeze(1)
    place = lengths.long().unsqueeze(1) + torch.arange(count, device=lengths.device)
    for whole, fresh in zip((k, v), call.new, strict=True):
        whole[row, place] = fresh[b, :, h]
    return k, v, lengths + count


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, used: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of q [batch, q_len, q_heads, head_dim], the last positions of the first `used[b]` tokens of k and v.

    Returns out like q and LSE [batch, q_heads, q_len], float32; a query that sees nothing has 0 and -inf.
    """
    batch, tokens, heads, _ = q.shape
    room = k.shape[1]
    steps = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    rows = (x.flatten(0, 1) for x in (q.contiguous(), k, v))
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *rows, steps * tokens, steps * room, tokens, room, 0.0, True, False, scale=scale, seqused_k=used
    )  # fmt: skip
    lse = lse.reshape(heads, batch, tokens).transpose(0, 1)
    return out.reshape(q.shape), lse.masked_fill(lse == torch.inf, -torch.inf)
