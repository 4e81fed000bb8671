"""Calls with more query tokens than a kernel is compiled for: prompts over a cache, and chunks of a prompt.

A CPU module takes any number of query tokens, given a workspace for them. A decode kernel of a GPU does not, and should not: with
hundreds of queries the products of attention cost more than reading the cache. There, the cache is dequantized into 16-bit
tensors, a part of its sequences and KV heads at a time, and torch's kernels run over them. What every query of every sequence sees,
whole thousands of tokens, goes to cuDNN, the fastest; the rest to flash attention, causal to the end of each sequence, with lengths
that stay on the device. Both are merged by their LSE. For the shortest length the host waits for the device once per call; while a
CUDA graph is captured it does not, and flash attention does everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvgen.toolchain.module import Module

PREFIX_STEP = 1024
"""Tokens of the prefix come in steps: cuDNN plans anew for every shape."""
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
    prefix = common_prefix(cache, call)
    for part in parts(batch, heads, call.bound * call.q.shape[3] * 2 * call.q.element_size()):
        k, v, used = _dequantized(module, cache, call, part)
        shared = slice(part.heads.start * group, part.heads.stop * group)
        q, out = call.q[part.batch, :, shared], call.out[part.batch, :, shared]
        lse = attend(q, k, v, used, call.scale, prefix, out)
        if call.lse is not None:
            call.lse[part.batch, shared] = lse
        del k, v, lse  # before the next part takes as much
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


def common_prefix(cache: Tensors, call: Call) -> int:
    """Tokens that every query sees, in whole steps; 0 where cuDNN cannot be used. Waits for the device."""
    tokens = call.q.shape[1]
    if call.bound - tokens < PREFIX_STEP or not dense_fits(call.q):
        return 0
    before = 0 if call.new is None else tokens
    return max(0, int(cache[3].min()) + before - tokens) // PREFIX_STEP * PREFIX_STEP


def dense_fits(q: torch.Tensor) -> bool:
    """Whether cuDNN takes tensors like q [batch, q_len, q_heads, head_dim], and the host may wait."""
    if torch.cuda.is_current_stream_capturing():
        return False
    heads = q.transpose(1, 2)
    one = heads[:, :1]
    return torch.backends.cuda.can_use_cudnn_attention(torch.backends.cuda.SDPAParams(heads, one, one, None, 0.0, False, True))


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, used: torch.Tensor, scale: float, prefix: int, out: torch.Tensor
) -> torch.Tensor:
    """Fill `out` with causal attention of q, the last positions of each sequence; the LSE, as `flash` gives it."""
    own, own_lse = flash(q, k, v, used, scale, prefix)
    if prefix == 0:
        out.copy_(own)
        return own_lse
    old, old_lse = dense(q, k[:, :prefix], v[:, :prefix], scale)
    weight = torch.sigmoid(old_lse - own_lse).transpose(1, 2).unsqueeze(-1).to(q.dtype)
    out.copy_(torch.lerp(own, old, weight))
    return torch.logaddexp(old_lse, own_lse)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q over all of k and v by cuDNN: out like q, and LSE [batch, q_heads, q_len]."""
    out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), None, True, 0.0, False, False, scale=scale
    )[:2]
    return out.transpose(1, 2), lse.reshape(q.shape[0], q.shape[2], q.shape[1])


def flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, used: torch.Tensor, scale: float, first: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of q [batch, q_len, q_heads, head_dim], the last positions of tokens `first` to `used[b]` of k and v.

    Returns out like q and LSE [batch, q_heads, q_len], float32; a query that sees nothing has 0 and -inf.
    """
    batch, tokens, heads, _ = q.shape
    room = k.shape[1]
    steps = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    rows = (x.flatten(0, 1) for x in (q.contiguous(), k, v))
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *rows, steps * tokens, steps * room + first, tokens, room - first, 0.0, True, False, scale=scale, seqused_k=used - first
    )  # fmt: skip
    lse = lse.reshape(heads, batch, tokens).transpose(0, 1)
    return out.reshape(q.shape), lse.masked_fill(lse == torch.inf, -torch.inf)
