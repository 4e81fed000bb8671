"""Extend attention: calls with more query tokens than a kernel is compiled for (prompts over a cache, chunked prefill).

A CPU module takes any number of query tokens, given a workspace for them. A decode kernel of a GPU does not: with hundreds of queries,
the MMAs cost more than reading the cache. There the cache is dequantized into 16-bit tensors, some sequences and KV heads at a time, and
torch's kernels run over them. cuDNN, the fastest, attends over the prefix that every query of every sequence sees, and over the new tokens
where their causal mask is square; flash attention has the rest, and everything where there is a sliding window, where the shape is unlikely
to recur, while a CUDA graph is captured, or where cuDNN is disabled (`torch.backends.cuda.enable_cudnn_sdp`). The two results are merged by
their LSE in float32. Only for cuDNN the host waits, once per call, for the lengths.

torch's kernels know no soft cap and no heads of more than 256 channels: there matrix products in float32 compute everything (`_products`).
Learned sinks join the softmax at the end: the output is multiplied by sigmoid(LSE - sink), and the LSE becomes logaddexp(LSE, sink).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvgen.errors import UnsupportedError
from kvgen.format.residual import window_places
from kvgen.format.rotation import rotate, rotate_back
from kvgen.lower.modifier import extend_refusal
from kvgen.runtime.executable import Arguments, New
from kvgen.runtime.kvcache import KVCache, Tensors
from kvgen.runtime.module import Module

if TYPE_CHECKING:
    from kvgen.format.layout import Rotation

PREFIX_STEP = 1024
"""Tokens in which the prefix and the room of dequantized K and V grow; for shorter caches the host does not wait."""
PLANNED = 128
"""cuDNN attends over the new tokens, and over whole prefixes of equal lengths, if their numbers are multiples of this.

cuDNN plans anew for every shape and stride, which takes longer than most calls, and keeps the plan. The layers of a model and chunks of
one size share plans; any other number of tokens would wait for a plan of its own.
"""
DEQUANTIZED_BYTES = 1 << 30
"""Most memory that dequantized K and V take at a time, unless one head of one sequence needs more."""
FLASH_CHANNELS = 256
"""Channels per head, at most, of torch's flash attention."""
SCORE_BYTES = 1 << 28
"""Most memory of float32 scores of `_products` at a time, unless one query needs more; weights and masks take about as much again."""


@dataclass(frozen=True)
class Call:
    """A call's tensors, shaped as in `docs/abi.md`; `new` is K and V to be appended, None for `attend`.

    `bound`: no length exceeds it after the call.
    """

    q: Tensor
    new: New | None
    out: Tensor
    lse: Tensor | None
    sinks: Tensor | None
    """A logit per query head, float32 [q_heads]."""
    scale: float
    bound: int
    limit: int
    """Most tokens of a sequence."""
    overflow: int
    """Address of the int32 that is set to 1 if a sequence has no room."""
    softcap: float = 0.0
    window: int | None = None
    rotations: tuple[Rotation | None, Rotation | None] = (None, None)
    """Of K and of V, before they are stored."""
    advance: bool = True
    """Whether the lengths count the new tokens; if not, `advance` of the module does, once for all layers."""
    waits: bool = True
    """Whether the host may wait for the lengths."""

    def of(self, rows: slice, heads: slice, group: int) -> Call:
        """The call for some sequences and KV heads, with `group` query heads per KV head; q and `new` are aligned for torch's kernels."""
        shared = slice(heads.start * group, heads.stop * group)
        return replace(
            self,
            q=aligned(self.q[rows, :, shared]),
            new=None if self.new is None else (aligned(self.new[0][rows, :, heads]), aligned(self.new[1][rows, :, heads])),
            out=self.out[rows, :, shared],
            lse=None if self.lse is None else self.lse[rows, shared],
            sinks=None if self.sinks is None else self.sinks[shared],
        )


def aligned(x: Tensor) -> Tensor:
    """The same numbers, copied unless rows are dense and begin at multiples of 16 bytes."""
    size = x.element_size()
    plain = x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and not any(step * size % 16 for step in x.stride()[:-1])
    return x if plain else x.clone(memory_format=torch.contiguous_format)


def check(call: Call, cache: KVCache, arguments: Arguments) -> None:
    """Raises UnsupportedError if a GPU cannot compute the call, ValueError on wrong tensors, and if an `attend` could see tokens that a
    contiguous cache with a window no longer keeps.
    """
    spec = arguments.spec
    if reason := extend_refusal(spec, gpu=call.q.is_cuda):
        raise UnsupportedError("extend attention", reason, is_backend=False)
    places = window_places(spec, cache.block_tokens)
    if call.new is None and call.window is not None and places:
        held = places * cache.block_tokens - spec.cache.rollback  # tokens that are quantized as they arrive have no such places
        seen = min(call.bound, call.q.shape[1] + call.window - 1)
        if seen > held:
            raise ValueError(
                f"attend with {call.q.shape[1]} query tokens sees {seen} tokens, and a contiguous cache with a window of {call.window} "
                f"keeps the newest {held}: give new tokens to decode with their queries, or use a paged cache"
            )
    arguments.named(call.q, call.new, call.out, cache.batch, cache.device)
    if cache.gpu is None:
        return  # the module checks what else there is
    if not call.out.is_contiguous() and torch._debug_has_internal_overlap(call.out) == 1:
        raise ValueError("out overlaps with itself")
    given = {"q": call.q, "k_new": call.new and call.new[0], "v_new": call.new and call.new[1], "lse": call.lse, "out": call.out}
    of_cache = zip(("blocks", "K residual", "V residual", "lengths", "block table"), cache.tensors, strict=False)
    spans = {name: _span(x) for name, x in (*given.items(), *((f"the cache's {name}", x) for name, x in of_cache)) if x is not None}
    for written in ("out", "lse"):
        low, high = spans.get(written, (0, 0))
        for name, (begin, end) in spans.items():
            if name != written and begin < high and low < end:
                raise ValueError(f"{written} overlaps with {name}")


def _span(x: Tensor) -> tuple[int, int]:
    """The addresses from the first element of a tensor to behind its last."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else -1
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def run(module: Module, cache: Tensors, call: Call) -> None:
    """Fill `call.out` and `call.lse`; append `call.new`, if there is any, after attending over it in dtype."""
    (on_gpu if call.q.is_cuda else on_cpu)(module, cache, call)


def on_cpu(module: Module, cache: Tensors, call: Call) -> None:
    """The module's own kernel, with a workspace for this call."""
    batch, tokens = call.q.shape[:2]
    size = int(module.workspace_bytes(batch, call.bound, tokens))
    workspace = torch.zeros(max(16, size), dtype=torch.uint8, device="cpu")
    rest = (call.out, call.lse, call.sinks, workspace, None, call.scale, call.bound)
    if call.new is None:
        module.attend(call.q, *cache, *rest)
    else:
        module.decode(call.q, *call.new, *cache, *rest, call.limit, call.overflow, int(call.advance))


def on_gpu(module: Module, cache: Tensors, call: Call) -> None:
    """Dequantize and attend part by part, then pack the new tokens."""
    if call.new is not None and cache[1].shape[2] == 0:
        _written_first(module, cache, call, call.new)
        return
    if call.scale <= 0:  # flash attention multiplies -inf, the score of what is masked, by the scale, which the query takes instead
        call = replace(call, q=call.q * (-1 if call.scale else 0), scale=-call.scale or 1.0)
    batch, tokens, q_heads, dim = call.q.shape
    heads = cache[1].shape[1]
    plain = not by_products(call) and call.window is None
    given, (of_k, of_v) = call, call.rotations
    new = call.new and (rotate(call.new[0], of_k), rotate(call.new[1], of_v))
    call = replace(call, q=rotate(call.q, of_k), new=new)  # as the cache holds them
    room = -(-call.bound // PREFIX_STEP) * PREFIX_STEP if call.bound >= PREFIX_STEP else call.bound
    cut: Cut = 0, False
    if call.waits and plain and tokens % PLANNED == 0 and call.bound >= PREFIX_STEP and dense_fits(call.q):
        cut = cut_of(cache[3].tolist(), tokens, call.new is not None)
    kept: list[tuple[Tensor, Tensor]] = []
    if call.new is not None and call.bound >= call.limit:  # a sequence may have no room, as far as the host knows: its outputs stay
        kept = [(x, x.clone()) for x in (call.out, call.lse) if x is not None]
    copies = 3 if by_products(call) else 1  # which needs K and V in float32 too
    for rows, some in parts(batch, heads, copies * room * dim * 2 * call.q.element_size()):
        mine = call.of(rows, some, q_heads // heads)
        k, v = _dequantized(module, cache, rows, some, room, call.q, zeroed=not plain)
        attend(mine, k, v, cache[3][rows], cut)
        del k, v  # before the next part takes as much
    if of_v is not None:
        call.out.copy_(rotate_back(call.out, of_v))
    for x, before in kept:
        full = cache[3] + tokens > call.limit
        x.copy_(torch.where(full.view(-1, *[1] * (x.dim() - 1)), before, x))
    if given.new is not None:
        counts = torch.full((batch,), tokens, dtype=torch.int32, device=call.q.device)
        module.pack(*given.new, counts, None, *cache, call.limit, call.overflow, int(call.advance))


def _written_first(module: Module, cache: Tensors, call: Call, new: New) -> None:
    """The same where tokens are quantized as they arrive: they are written, and then attended with all others. Of sequences without room
    nothing changes.
    """
    tokens, lengths = call.q.shape[1], cache[3]
    module.pack(*new, torch.full_like(lengths, tokens), None, *cache, call.limit, call.overflow, 0)
    fits = lengths <= call.limit - tokens
    after = torch.where(fits, lengths + tokens, lengths)
    kept = [(x, x.clone()) for x in (call.out, call.lse) if x is not None] if call.bound >= call.limit else []
    on_gpu(module, (*cache[:3], after, *cache[4:]), replace(call, new=None))
    for x, before in kept:
        x.copy_(torch.where(fits.view(-1, *[1] * (x.dim() - 1)), x, before))
    if call.advance:
        lengths.copy_(after)


def parts(batch: int, heads: int, head_bytes: int) -> Iterator[tuple[slice, slice]]:
    """Cuts of about equal size that dequantize at most DEQUANTIZED_BYTES: some sequences with all KV heads, or one sequence with some of
    them. `head_bytes` are those of K and V of one head.
    """

    def even(count: int, most: int) -> list[slice]:
        pieces = -(-count // most)
        return [slice(count * i // pieces, count * (i + 1) // pieces) for i in range(pieces)]

    fit = max(1, DEQUANTIZED_BYTES // max(1, head_bytes))
    for rows in even(batch, max(1, fit // heads)):
        for some in even(heads, min(fit, heads)):
            yield rows, some


def _dequantized(
    module: Module, cache: Tensors, rows: slice, heads: slice, room: int, like: Tensor, *, zeroed: bool
) -> tuple[Tensor, Tensor]:
    """K and V [sequences, room, heads, head_dim] of a part. Past each length, and where a sliding window has passed, they are zero if
    `zeroed`, else uninitialized: kernels that mask these tokens by a weight of 0 need finite numbers (0 * NaN = NaN).
    """
    packed, k_held, v_held, lengths, table, slots, scales = cache
    shape = (2, heads.stop - heads.start, rows.stop - rows.start, room, like.shape[3])
    new = torch.zeros if zeroed else torch.empty
    k, v = new(shape, dtype=like.dtype, device=like.device).permute(0, 2, 3, 1, 4)  # the tokens of a head lie together
    blocks, pages = (packed[rows, heads], None) if table is None else (packed[:, heads], table[rows])
    k_residual, v_residual = (x[rows, heads] if slots is None else x[slots[rows].long()][:, heads] for x in (k_held, v_held))
    module.unpack(blocks, k_residual, v_residual, lengths[rows], pages, None, _of(scales, heads), None, k, v)
    return k, v


def _of(scales: Tensor | None, heads: slice) -> Tensor | None:
    """Static scales of some KV heads."""
    return None if scales is None else scales[:, heads].contiguous()


# --- who attends over what -------------------------------------------------------------------------------------------------


Cut = tuple[int, bool]
"""cuDNN attends over so many first tokens of each sequence; and whether also over the rest, the new tokens, whose mask is square."""


def cut_of(lengths: list[int], tokens: int, appended: bool) -> Cut:
    """The division between cuDNN and flash attention for `tokens` queries at the end of these lengths, or `appended` to them."""
    shortest = min(lengths) - (0 if appended else tokens)
    if min(lengths) == max(lengths) and shortest >= 0 and shortest % PLANNED == 0:
        return shortest, True
    return max(0, shortest) // PREFIX_STEP * PREFIX_STEP, False


def dense_fits(q: Tensor) -> bool:
    """Whether cuDNN supports tensors like q [batch, q_len, q_heads, head_dim], and the host may wait."""
    if torch.cuda.is_current_stream_capturing():
        return False
    heads = q.transpose(1, 2)
    one = heads[:, :1]
    return torch.backends.cuda.can_use_cudnn_attention(torch.backends.cuda.SDPAParams(heads, one, one, None, 0.0, False, True))


def attend(call: Call, k: Tensor, v: Tensor, lengths: Tensor, cut: Cut) -> None:
    """Fill `call.out` and `call.lse` of a part, whose K and V have `lengths` tokens and room for the new ones."""
    q, tokens, (past, square) = call.q, call.q.shape[1], cut
    lse = call.lse
    if lse is None and call.sinks is not None:
        lse = torch.empty(q.shape[0], q.shape[2], tokens, dtype=torch.float32, device=q.device)
    prefix = dense(q, k[:, :past], v[:, :past], call.scale) if past else None
    if by_products(call):
        rest = _products(q, k, v, _held(call, k, v, lengths), call.bound, call.scale, call.softcap, call.window)
    elif square:
        own = call.new or (k[:, past : past + tokens], v[:, past : past + tokens])
        rest = dense(q, *own, call.scale, causal=True)
    else:
        rest = flash(q, k, v, _held(call, k, v, lengths), call.scale, past, call.window)
    if prefix is not None:
        merge(prefix, rest, call.out, lse)
    else:
        call.out.copy_(rest[0])
        if lse is not None:
            lse.copy_(rest[1].masked_fill(rest[1] == torch.inf, -torch.inf))  # flash attention returns inf for a query that sees nothing
    if call.sinks is not None and lse is not None:
        join_sinks(call.out, lse, call.sinks)


def _held(call: Call, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """Write the new tokens behind the old ones; returns the new lengths, int32."""
    if call.new is None:
        return lengths
    batch, count = call.q.shape[:2]
    room = k.shape[1]
    row = torch.arange(batch, device=lengths.device).unsqueeze(1)
    place = lengths.long().unsqueeze(1) + torch.arange(count, device=lengths.device)
    place.clamp_(max=room - 1)  # of a sequence without room, whose output is dropped
    for whole, fresh in zip((k, v), call.new, strict=True):
        whole[row, place] = fresh
    return (lengths + count).clamp(max=room)


Partial = tuple[Tensor, Tensor]
"""Attention over some of the tokens: out like q, and LSE [batch, q_heads, q_len], float32."""


def merge(one: Partial, other: Partial, out: Tensor, lse: Tensor | None) -> None:
    """Fill `out` and `lse` with attention over the tokens of both, each of which every query sees some of.

    Computed in float32 and rounded once, in two passes over `out`.
    """
    weight = torch.sigmoid(one[1] - other[1]).transpose(1, 2).unsqueeze(-1)
    rest = torch.addcmul(other[0], other[0], weight, value=-1)  # float32, as weight is
    torch.addcmul(rest, one[0], weight, out=out)
    if lse is not None:
        torch.logaddexp(one[1], other[1], out=lse)


def join_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Add a logit per head [q_heads] to the denominators of `out` and `lse`, in place. It has no value, so it only scales the output.

    A query that sees nothing keeps its output of 0, and its LSE becomes the sink.
    """
    sinks = sinks.unsqueeze(-1)
    out.mul_(torch.sigmoid(lse - sinks).transpose(1, 2).unsqueeze(-1))
    torch.logaddexp(lse, sinks, out=lse)


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool = False) -> Partial:
    """Attention of q [batch, q_len, q_heads, head_dim] over all of k and v, or causal over as many tokens as q has, by cuDNN."""
    out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), None, True, 0.0, causal, False, scale=scale
    )[:2]
    return out.transpose(1, 2), lse.reshape(q.shape[0], q.shape[2], q.shape[1])


def flash(q: Tensor, k: Tensor, v: Tensor, used: Tensor, scale: float, first: int = 0, window: int | None = None) -> Partial:
    """Causal attention of q [batch, q_len, q_heads, head_dim], the last positions of tokens `first` to `used[b]` of k and v.

    With a `window`, a query sees only that many tokens, its own included. A query that sees nothing gets 0, and an LSE of inf.
    """
    batch, tokens, heads, _ = q.shape
    room = k.shape[1]

    def starts(begin: int, step: int) -> Tensor:
        return torch.arange(begin, begin + step * batch + 1, step, dtype=torch.int32, device=q.device)

    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(x.flatten(0, 1) for x in (q, k, v)), starts(0, tokens), starts(first, room), tokens, room - first, 0.0, True, False,
        scale=scale, seqused_k=used - first if first else used, window_size_left=None if window is None else window - 1,
    )  # fmt: skip
    return out.reshape(q.shape), lse.reshape(heads, batch, tokens).transpose(0, 1)


def by_products(call: Call) -> bool:
    """Whether torch's kernels lack the soft cap or the channels, so that `_products` computes everything."""
    return bool(call.softcap) or call.q.shape[-1] > FLASH_CHANNELS


def _products(
    q: Tensor, k: Tensor, v: Tensor, used: Tensor, bound: int, scale: float, softcap: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """Causal attention of q [batch, q_len, q_heads, head_dim], the last positions of the first `used[b]` tokens of k and v.

    k and v are [batch, room, kv_heads, head_dim], finite everywhere; `used` is int32 [batch] on the device, for which the host does not
    wait, and at most `bound`. With a `softcap` scores become softcap * tanh(score / softcap). With a `window`, a query sees only that many
    tokens, its own included. Returns out like q, and the LSE [batch, q_heads, q_len], float32; a query that sees nothing gives 0 and -inf.
    """
    batch, tokens, q_heads, dim = q.shape
    heads = k.shape[2]
    group = q_heads // heads
    out = torch.empty_like(q)
    lse = torch.empty(batch, q_heads, tokens, dtype=torch.float32, device=q.device)
    step = max(1, SCORE_BYTES // (4 * q_heads * bound))
    for b in range(batch):
        keys, values = (x[b, :bound].transpose(0, 1).float() for x in (k, v))  # [kv_heads, bound, head_dim]
        for first in range(0, tokens, step):
            rows = slice(first, min(first + step, tokens))
            seen = min(bound, max(1, bound - tokens + rows.stop))  # later tokens no query of these rows sees
            queries = (q[b, rows].float() * (scale / (softcap or 1.0))).transpose(0, 1)
            scores = queries.reshape(heads, -1, dim) @ keys[:, :seen].transpose(1, 2)
            if softcap:
                scores = scores.tanh_().mul_(softcap)
            scores = scores.view(heads, group, -1, seen).masked_fill_(~_visible(used[b] - tokens, rows, seen, window), -torch.inf)
            part = torch.logsumexp(scores, -1)
            weights = scores.sub_(part.masked_fill(part == -torch.inf, 0.0).unsqueeze(-1)).exp_()
            found = (weights.flatten(1, 2) @ values[:, :seen]).view(q_heads, -1, dim)
            out[b, rows] = found.transpose(0, 1).to(q.dtype)
            lse[b, :, rows] = part.flatten(0, 1)
    return out, lse


def _visible(before: Tensor, rows: slice, seen: int, window: int | None) -> Tensor:
    """Whether queries `rows`, the first query of all following `before` tokens, see each of the first tokens: bool [rows, seen]."""
    position = before + torch.arange(rows.start, rows.stop, device=before.device).unsqueeze(1)
    token = torch.arange(seen, device=before.device)
    visible = token <= position
    return visible if window is None else visible & (token > position - window)
