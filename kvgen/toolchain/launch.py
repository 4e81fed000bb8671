"""A compiled variant on torch tensors: caches, argument checks, calls.

Streams: wherever a torch tensor on a GPU is an argument, TVM-FFI asks torch for the current stream of its device, by the DLPack
exchange API or, where torch has none, by `torch._C._cuda_getCurrentRawStream`. It hands it to the module as its environment's
stream (`TVMFFIEnvGetStream`) for the time of the call, and neither way synchronizes. So nothing is to be done here, and calls
inside a `torch.cuda.graph` are captured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

from kvgen.errors import CacheMismatch, UnsupportedError
from kvgen.lower.prompts import prompt_refusal
from kvgen.reference.layout import PackedLayout
from kvgen.spec import KernelSpec
from kvgen.toolchain import prompt
from kvgen.toolchain.module import Module

_serial = count()
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(slots=True, eq=False)
class KVCache:
    """Quantized keys and values of `batch` sequences; shapes are those of `docs/abi.md`.

    `bound` is what the host knows of the lengths: no sequence is longer. It grows by the tokens of every call; lengths
    themselves stay on the device.
    """

    packed: torch.Tensor
    k_residual: torch.Tensor
    v_residual: torch.Tensor
    lengths: torch.Tensor
    block_table: torch.Tensor | None
    layout_id: str
    batch: int
    max_len: int
    bound: int = 0
    workspaces: dict[int, torch.Tensor] = field(default_factory=dict, repr=False)

    @property
    def device(self) -> torch.device:
        """Where the tensors live."""
        return self.packed.device

    @property
    def tensors(self) -> prompt.Tensors:
        """What modules take of a cache, in the order of their arguments."""
        return self.packed, self.k_residual, self.v_residual, self.lengths, self.block_table

    @property
    def nbytes(self) -> int:
        """Bytes of packed blocks and residuals."""
        return sum(t.numel() * t.element_size() for t in (self.packed, self.k_residual, self.v_residual))

    def grow(self, tokens: int) -> int:
        """Count `tokens` more tokens per sequence; the new bound. Raises CacheMismatch beyond `max_len`.

        Replays of a captured graph do not come by here: whoever replays calls it, once per replayed decode.
        """
        bound = self.bound + tokens
        if bound > self.max_len:
            raise CacheMismatch(f"the cache holds {self.max_len} tokens per sequence, and {bound} could be needed after {tokens} more")
        self.bound = bound
        return bound

    def clear(self) -> None:
        """Forget every token; memory is kept."""
        self.lengths.zero_()
        self.bound = 0


class Variant:
    """One module on torch tensors of a fixed format; several variants may share caches of one layout."""

    def __init__(self, spec: KernelSpec, layout: PackedLayout, module: Module) -> None:
        attention = spec.attention
        self.spec = spec
        self.layout = layout
        self.module = module
        self.dtype = DTYPES[attention.dtype]
        self.scale = 1.0 / math.sqrt(attention.head_dim)
        self._layout_id = layout.id
        self._q_tail = (attention.q_heads, attention.head_dim)
        self._kv_tail = (attention.kv_heads, attention.head_dim)
        self._heads = attention.q_heads
        self._most_q = attention.q_len
        self._attend = module.attend
        self._decode = module.decode
        self._key = next(_serial)

    def new_cache(
        self,
        batch: int,
        max_len: int,
        device: torch.device | str | None = None,
        block_table: torch.Tensor | None = None,
        pages: int | None = None,
    ) -> KVCache:
        """An empty cache for up to `max_len` tokens of each of `batch` sequences, with the workspace of this variant.

        Paged formats take a `block_table`, int32 [batch, max_pages], into a pool of `pages` pages; without one, sequence b
        owns pages b * max_pages and following. `device` defaults to the table's, else to the CPU or the current GPU by arch.
        """
        if batch < 1 or max_len < 1:
            raise ValueError(f"batch ({batch}) and max_len ({max_len}) must be at least 1")
        where = torch.device(device) if device is not None else self._default_device(block_table)
        layout, dim = self.layout, self.layout.head_dim
        heads = self._kv_tail[0]
        page = self.spec.cache.page
        if page is None:
            if block_table is not None or pages is not None:
                raise ValueError("block_table and pages belong to paged caches, and this format is contiguous")
            blocks = max(1, -(-max_len // layout.tokens))
            shape = (batch, heads, blocks, layout.block_bytes)
        else:
            block_table, pages = self._page_table(batch, -(-max_len // page), block_table, pages, where)
            shape = (pages, heads, page // layout.tokens, layout.block_bytes)
        residual = (batch, heads, layout.tokens, dim)
        cache = KVCache(
            packed=torch.empty(shape, dtype=torch.uint8, device=where),
            k_residual=torch.empty(residual, dtype=self.dtype, device=where),
            v_residual=torch.empty(residual, dtype=self.dtype, device=where),
            lengths=torch.zeros(batch, dtype=torch.int32, device=where),
            block_table=block_table,
            layout_id=self._layout_id,
            batch=batch,
            max_len=max_len,
        )
        self.prepare(cache)
        return cache

    def _default_device(self, block_table: torch.Tensor | None) -> torch.device:
        if block_table is not None:
            return block_table.device
        on_cpu = self.spec.arch == "cpu" or not torch.cuda.is_available()
        return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())

    @staticmethod
    def _page_table(batch: int, need: int, table: torch.Tensor | None, pages: int | None, device: torch.device) -> tuple[torch.Tensor, int]:
        """A checked or fresh block table on the device, and the size of its pool."""
        if table is None:
            table = torch.arange(batch * need, dtype=torch.int32, device=device).reshape(batch, need)
            pages = pages if pages is not None else batch * need
            if pages < batch * need:
                raise ValueError(f"{batch} sequences of {need} pages need {batch * need} pages, not {pages}")
            return table, pages
        if table.dtype != torch.int32 or table.dim() != 2 or table.shape[0] != batch or table.shape[1] < need:
            raise ValueError(f"block_table must be int32 [{batch}, {need} or more], not {table.dtype} {list(table.shape)}")
        if pages is None:
            raise ValueError("a block_table needs `pages`, the size of its pool")
        return table.to(device).contiguous(), pages

    def prepare(self, cache: KVCache) -> torch.Tensor:
        """This variant's workspace for a cache, allocated once; the first call does it where nobody did before.

        Raises CacheMismatch for a cache of another layout, and while a graph is captured, which would zero it at every replay.
        """
        workspace = cache.workspaces.get(self._key)
        if workspace is None:
            self._check_layout(cache)
            if _capturing(cache):
                raise CacheMismatch("the cache has no workspace for this kernel yet: call prepare(cache) before the graph is captured")
            with torch.cuda.device(cache.device) if cache.packed.is_cuda else nullcontext():
                size = int(self.module.workspace_bytes(cache.batch, cache.max_len, self._most_q))
            workspace = torch.zeros(max(16, size), dtype=torch.uint8, device=cache.device)
            cache.workspaces[self._key] = workspace
        return workspace

    def release(self, cache: KVCache) -> None:
        """Give this variant's workspace of a cache back; a captured graph must not outlive it."""
        cache.workspaces.pop(self._key, None)

    def prefill(
        self,
        cache: KVCache,
        k: torch.Tensor,
        v: torch.Tensor,
        lengths: torch.Tensor | Sequence[int] | None = None,
        *,
        check_finite: bool = False,
    ) -> None:
        """Append `k` and `v` [batch, tokens, kv_heads, head_dim], of each sequence the first `lengths[b]` tokens (all by default).

        Lengths given on the host tighten the cache's bound. Raises CacheMismatch where the cache could be too small,
        ValueError on wrong tensors and, with `check_finite` (which synchronizes), on infinite or undefined numbers.
        """
        tokens = k.shape[1] if k.dim() == 4 else 0
        self._check_tensor("k", k, (cache.batch, tokens, *self._kv_tail), cache)
        self._check_tensor("v", v, (cache.batch, tokens, *self._kv_tail), cache)
        self._check_layout(cache)
        if check_finite and not bool(torch.isfinite(k).all() & torch.isfinite(v).all()):
            raise ValueError("k or v holds infinities or NaNs, which have no quantized form")
        longest = tokens
        if lengths is None:
            new = torch.full((cache.batch,), tokens, dtype=torch.int32, device=cache.device)
        else:
            new = torch.as_tensor(lengths, dtype=torch.int32)
            if tuple(new.shape) != (cache.batch,):
                raise ValueError(f"lengths must have shape [{cache.batch}], not {list(new.shape)}")
            if new.device.type == "cpu":
                low, longest = int(new.min()), int(new.max())
                if low < 0 or longest > tokens:
                    raise ValueError(f"lengths must lie in 0..{tokens}, the tokens of k, not in {low}..{longest}")
            new = new.to(cache.device)
        cache.grow(longest)
        if tokens:
            self.module.pack(k, v, new, *cache.tensors)

    def decode(
        self,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        cache: KVCache,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | bool | None = None,
        scale: float | None = None,
    ) -> Any:
        """Append `k_new`, `v_new` [batch, q_len, kv_heads, head_dim], attend with `q` [batch, q_len, q_heads, head_dim], flush.

        Returns `out`, shaped and typed like `q`; with `lse` true or a float32 [batch, q_heads, q_len] tensor, (out, lse). More
        query tokens than `attention.q_len` of the spec are a prompt: a GPU then dequantizes the cache, at most 1 GiB at a time,
        and calls torch's kernels; the host waits once, for the lengths. Raises CacheMismatch for a cache of another
        layout or too small, UnsupportedError for a prompt that the GPU cannot attend, ValueError on wrong tensors.
        """
        tokens = q.shape[1]
        workspace = self._check_call(q, cache)
        kv_shape = (cache.batch, tokens, *self._kv_tail)
        if k_new.shape != kv_shape or v_new.shape != kv_shape or k_new.dtype != self.dtype or v_new.dtype != self.dtype:
            self._check_tensor("k_new", k_new, kv_shape, cache)
            self._check_tensor("v_new", v_new, kv_shape, cache)
        if out is None:
            out = torch.empty(q.shape, dtype=self.dtype, device=q.device)
        if lse is True:
            lse = torch.empty((cache.batch, self._heads, tokens), dtype=torch.float32, device=q.device)
        elif lse is False:
            lse = None
        if tokens > self._most_q:
            return self._prompt(q, (k_new, v_new), cache, out, lse, scale)
        self._decode(
            q, k_new, v_new, cache.packed, cache.k_residual, cache.v_residual, cache.lengths, cache.block_table,
            out, lse, workspace, self.scale if scale is None else scale, _launch_bound(cache, cache.grow(tokens)),
        )  # fmt: skip
        return out if lse is None else (out, lse)

    def attend(
        self,
        q: torch.Tensor,
        cache: KVCache,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | bool | None = None,
        scale: float | None = None,
    ) -> Any:
        """Attend with `q` [batch, q_len, q_heads, head_dim], the last q_len positions of each sequence; nothing is appended.

        Returns and raises as `decode` does.
        """
        workspace = self._check_call(q, cache)
        if out is None:
            out = torch.empty(q.shape, dtype=self.dtype, device=q.device)
        if lse is True:
            lse = torch.empty((cache.batch, self._heads, q.shape[1]), dtype=torch.float32, device=q.device)
        elif lse is False:
            lse = None
        if q.shape[1] > self._most_q:
            return self._prompt(q, None, cache, out, lse, scale)
        self._attend(
            q, cache.packed, cache.k_residual, cache.v_residual, cache.lengths, cache.block_table,
            out, lse, workspace, self.scale if scale is None else scale, _launch_bound(cache, cache.bound),
        )  # fmt: skip
        return out if lse is None else (out, lse)

    def _prompt(
        self,
        q: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor] | None,
        cache: KVCache,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        scale: float | None,
    ) -> Any:
        """A call with more query tokens than the kernel is compiled for."""
        if reason := prompt_refusal(self.spec, "sm90" if q.is_cuda else "cpu"):
            raise UnsupportedError("prompt", reason)
        bound = _launch_bound(cache, cache.bound if new is None else cache.grow(q.shape[1]))
        call = prompt.Call(q, new, out, lse, self.scale if scale is None else scale, bound)
        prompt.run(self.module, cache.tensors, call)
        return out if lse is None else (out, lse)

    def unpack(self, cache: KVCache, k: torch.Tensor | None = None, v: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Dequantized K and V, [batch, bound, kv_heads, head_dim]; zeros (or what `k`, `v` held) past each length."""
        self._check_layout(cache)
        shape = (cache.batch, max(1, cache.bound), *self._kv_tail)
        k = torch.zeros(shape, dtype=self.dtype, device=cache.device) if k is None else k
        v = torch.zeros(shape, dtype=self.dtype, device=cache.device) if v is None else v
        self.module.unpack(*cache.tensors, k, v)
        return k, v

    # --- checks: cheap comparisons first, words only once something is wrong ---------------------------------------------

    def _check_call(self, q: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """The workspace of a call whose query and cache are right."""
        workspace = cache.workspaces.get(self._key)
        if workspace is None:
            workspace = self.prepare(cache)
        shape = q.shape
        if q.dtype != self.dtype or len(shape) != 4 or shape[0] != cache.batch or shape[2:] != self._q_tail:
            self._check_tensor("q", q, (cache.batch, shape[1] if len(shape) == 4 else 1, *self._q_tail), cache)
        if q.device != cache.packed.device:
            self._check_tensor("q", q, tuple(shape), cache)
        return workspace

    def _check_layout(self, cache: KVCache) -> None:
        if cache.layout_id != self._layout_id:
            raise CacheMismatch(f"the cache is packed in layout {cache.layout_id}, and this kernel reads layout {self._layout_id}")

    def _check_tensor(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...], cache: KVCache) -> None:
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {list(shape)}, not {list(tensor.shape)}")
        if tensor.dtype != self.dtype:
            raise ValueError(f"{name} must be {self.dtype}, not {tensor.dtype}")
        if tensor.device != cache.device:
            raise ValueError(f"{name} is on {tensor.device}, and the cache on {cache.device}")


def _capturing(cache: KVCache) -> bool:
    """Whether calls on the cache are being captured in a CUDA graph."""
    return cache.packed.is_cuda and torch.cuda.is_current_stream_capturing()


def _launch_bound(cache: KVCache, bound: int) -> int:
    """Lengths that a launch must be sized for: a captured launch is replayed while the cache grows to its capacity."""
    return cache.max_len if _capturing(cache) else bound or 1
