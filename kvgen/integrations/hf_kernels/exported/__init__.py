"""Attention over a quantized KV cache: kernels that kvgen generated, loadable with Hugging Face `kernels`.

    kernel = kernels.get_local_kernel(Path("..."))
    cache = kernel.new_cache(batch, max_len)
    kernel.prefill(cache, k, v)
    out = kernel.decode(q, k_new, v_new, cache)

`kernel.spec` says what the kernels compute: heads, dtype, bits of K and V, layout of the cache. Only torch and apache-tvm-ffi are needed.
Each function is the method of the same name of `kvgen.get_kernel(...)`, whose code is in `_kvgen`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvgen.errors import CacheMismatch, KvgenError, ToolchainMissing, UnsupportedError
from kvgen.runtime.executable import Plan
from kvgen.runtime.kvcache import KVCache

from ._ops import calls_of, calls_on, spec

__all__ = [
    "CacheMismatch",
    "KVCache",
    "KvgenError",
    "Plan",
    "ToolchainMissing",
    "UnsupportedError",
    "attend",
    "decode",
    "new_cache",
    "plan",
    "prefill",
    "prepare",
    "spec",
    "unpack",
]


def new_cache(
    batch: int | None = None,
    max_len: int | None = None,
    device: torch.device | str | None = None,
    block_table: torch.Tensor | None = None,
    pages: int | None = None,
    *,
    like: KVCache | None = None,
) -> KVCache:
    """An empty cache for `batch` sequences of up to `max_len` tokens; with `like`, another layer over the same sequences.

    `device` defaults to the block table's, else to the CPU or the current GPU. Paged formats take a `block_table`, int32
    [batch, max_pages], into a pool of `pages` pages; without one, every sequence gets pages of its own. The cache's `advance`, `crop`,
    `reset`, `clear` and `reorder` change its lengths.

    Raises ValueError on sizes below 1 and on tables that do not fit, ToolchainMissing where no library of this folder runs on the device.
    """
    if like is not None:
        return calls_of(like).new_cache(batch, max_len, device, block_table, pages, like=like)
    calls, where = calls_on(device if device is not None or block_table is None else block_table.device)
    return calls.new_cache(batch, max_len, where, block_table, pages)


def prepare(cache: KVCache) -> None:
    """Allocate workspaces for a cache of other kernels of the same layout, before a CUDA graph is captured. `new_cache` does it too."""
    calls_of(cache).prepare(cache)


def prefill(
    cache: KVCache,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor | Sequence[int] | None = None,
    *,
    check_finite: bool = False,
    advance: bool = True,
) -> None:
    """Append the first `lengths[b]` tokens (all by default) of `k` and `v` [batch, tokens, kv_heads, head_dim], quantizing full blocks.

    Where several caches share lengths, every layer appends with `advance=False`, and `cache.advance(lengths)` writes them once.
    Raises CacheMismatch where the cache could be too small, ValueError on wrong tensors.
    """
    calls_of(cache).prefill(cache, k, v, lengths, check_finite=check_finite, advance=advance)


def plan(
    cache: KVCache,
    q_len: int = 1,
    *,
    append: bool = True,
    bound: int | None = None,
    uniform: bool | None = None,
    tokens: int | None = None,
) -> Plan:
    """The work distribution of a step, once for all layers: `decode(..., plan=plan)` in each, then `cache.advance(q_len)`.

    `uniform` promises equal lengths above 0; `bound` is what no length exceeds after the step, `tokens` the number of all
    sequences together, about, by which a launch is chosen. With `append=False` it is for `attend`.
    """
    return calls_of(cache).plan(cache, q_len, append=append, bound=bound, uniform=uniform, tokens=tokens)


def decode(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    cache: KVCache,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | bool | None = None,
    scale: float | None = None,
    *,
    sinks: torch.Tensor | None = None,
    plan: Plan | None = None,
    advance: bool = True,
) -> Any:
    """Append `k_new` and `v_new` [batch, q_len, kv_heads, head_dim], attend causally with `q` [batch, q_len, q_heads, head_dim], and
    pack a block that became full.

    Returns out, shaped like q, or (out, lse) where `lse` is true or a tensor to fill: float32 [batch, q_heads, q_len], natural
    logarithm. `scale` multiplies q·k (default 1/sqrt(head_dim)). `sinks`, float32 [q_heads], are given exactly where `spec.attention.sinks`
    is true. Without `advance`, or with a plan, lengths stay as they are, and `cache.advance(q_len)` ends the step. Raises CacheMismatch
    where the cache is too small, ValueError on wrong tensors, or on a plan of another step.
    """
    return calls_of(cache).decode(q, k_new, v_new, cache, out, lse, scale, sinks=sinks, plan=plan, advance=advance)


def attend(
    q: torch.Tensor,
    cache: KVCache,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | bool | None = None,
    scale: float | None = None,
    *,
    sinks: torch.Tensor | None = None,
    plan: Plan | None = None,
) -> Any:
    """Attend with `q` [batch, q_len, q_heads, head_dim], the last q_len positions of each sequence; nothing is appended.

    Returns and raises as `decode` does.
    """
    return calls_of(cache).attend(q, cache, out, lse, scale, sinks=sinks, plan=plan)


def unpack(cache: KVCache, k: torch.Tensor | None = None, v: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as the kernels see them, [batch, longest, kv_heads, head_dim]; zeros (or what `k`, `v` held) past each length."""
    return calls_of(cache).unpack(cache, k, v)
