"""A compiled variant on torch tensors: caches, argument checks, calls.

Streams: wherever a torch tensor on a GPU is an argument, TVM-FFI asks torch for the current stream of its device, by the DLPack
exchange API or, where torch has none, by `torch._C._cuda_getCurrentRawStream`. It hands it to the module as its environment's
stream (`TVMFFIEnvGetStream`) for the time of the call, and neither way synchronizes. So nothing is to be done here, and calls
inside a `torch.cuda.graph` are captured.

Threads: every call holds the lock of its cache (`KVCache.turns`) until the module has returned, so that calls over one cache run in some
order, each as if it were alone. The bound grows once the module has taken the call, so a refused call leaves it as it was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from uuid import uuid4

import torch

from kvgen.errors import CacheMismatch, ToolchainMissing, UnsupportedError
from kvgen.lower.prompts import prompt_refusal
from kvgen.reference.layout import PackedLayout
from kvgen.spec import KernelSpec
from kvgen.toolchain import checks, prompt
from kvgen.toolchain.kvcache import KVCache as KVCache
from kvgen.toolchain.module import Module

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


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
        self._softcap = attention.softcap
        self._most_scale = checks.most_scale(attention.softcap)
        self._key = uuid4().hex  # of this variant's workspaces, in any process

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
        batch, max_len = checks.whole("batch", batch, 1), checks.whole("max_len", max_len, 1)
        pages = pages if pages is None else checks.whole("pages", pages, 1)
        if block_table is not None and not isinstance(block_table, torch.Tensor):
            raise TypeError(f"block_table must be a torch tensor, not {type(block_table).__name__}")
        where = usable_device(device) if device is not None else self._default_device(block_table)
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
        if cache.gpu is not None:
            cache.turns.follow(cache.gpu)  # other streams wait for the lengths and the workspace to be zero
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
            with torch.cuda.device(cache.gpu) if cache.gpu is not None else nullcontext():
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
        self._check_layout(cache)
        tokens = k.shape[1] if isinstance(k, torch.Tensor) and k.dim() == 4 else 0
        shape = (cache.batch, tokens, *self._kv_tail)
        checks.tensor("k", k, shape, self.dtype, cache.device)
        checks.tensor("v", v, shape, self.dtype, cache.device)
        if check_finite and not bool(torch.isfinite(k).all() & torch.isfinite(v).all()):
            raise ValueError("k or v holds infinities or NaNs, which have no quantized form")
        new, longest = checks.lengths(lengths, cache.batch, tokens, cache.device)
        with cache.turns.lock:
            bound = cache.after(longest)
            if tokens:
                if cache.gpu is not None:
                    cache.turns.follow(cache.gpu)
                self.module.pack(k, v, new, *cache.tensors)
            cache.bound = bound

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
        workspace = self._check_call(q, cache)
        tokens = q.shape[1]
        try:
            kv_shape = (cache.batch, tokens, *self._kv_tail)
            right = k_new.shape == kv_shape and v_new.shape == kv_shape and k_new.dtype == self.dtype and v_new.dtype == self.dtype
        except AttributeError:
            right = False
        if not right:
            self._check_new(k_new, v_new, tokens, cache)
        if out is None:
            out = torch.empty(q.shape, dtype=self.dtype, device=cache.device)
        else:
            self._check_out(out, q)
        if lse is not None:
            lse = self._lse(lse, q)
        if scale is None:
            scale = self.scale
        elif type(scale) is not float or not -self._most_scale <= scale <= self._most_scale:
            scale = checks.scale(scale, self._softcap)
        with cache.turns.lock:
            bound = cache.after(tokens)
            if cache.gpu is not None:
                cache.turns.follow(cache.gpu)
            if tokens > self._most_q:
                self._prompt(q, (k_new, v_new), cache, out, lse, scale, bound)
            else:
                try:
                    self.module.decode(
                        q, k_new, v_new, cache.packed, cache.k_residual, cache.v_residual, cache.lengths, cache.block_table,
                        out, lse, workspace, scale, _launch_bound(cache, bound),
                    )  # fmt: skip
                except Exception:
                    self._check_tensors(q, (k_new, v_new), cache, out)  # says more than a module can
                    raise
            cache.bound = bound
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
            out = torch.empty(q.shape, dtype=self.dtype, device=cache.device)
        else:
            self._check_out(out, q)
        if lse is not None:
            lse = self._lse(lse, q)
        if scale is None:
            scale = self.scale
        elif type(scale) is not float or not -self._most_scale <= scale <= self._most_scale:
            scale = checks.scale(scale, self._softcap)
        with cache.turns.lock:
            if cache.gpu is not None:
                cache.turns.follow(cache.gpu)
            if q.shape[1] > self._most_q:
                self._prompt(q, None, cache, out, lse, scale, cache.bound)
            else:
                try:
                    self.module.attend(
                        q, cache.packed, cache.k_residual, cache.v_residual, cache.lengths, cache.block_table,
                        out, lse, workspace, scale, _launch_bound(cache, cache.bound),
                    )  # fmt: skip
                except Exception:
                    self._check_tensors(q, None, cache, out)
                    raise
        return out if lse is None else (out, lse)

    def _prompt(
        self,
        q: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor] | None,
        cache: KVCache,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        scale: float,
        bound: int,
    ) -> None:
        """A call with more query tokens than the kernel is compiled for."""
        if reason := prompt_refusal(self.spec, "sm90" if q.is_cuda else "cpu"):
            raise UnsupportedError("prompt", reason)
        self._check_tensors(q, new, cache, out)
        if cache.gpu is not None:  # on the CPU the module checks this
            read = [("q", q), *zip(("k_new", "v_new"), new or (), strict=False), *zip(_CACHE, cache.tensors, strict=True)]
            checks.apart("out", out, [*read, ("lse", lse)])
            if lse is not None:
                checks.apart("lse", lse, read)
        prompt.run(self.module, cache.tensors, prompt.Call(q, new, out, lse, scale, _launch_bound(cache, bound)))

    def unpack(self, cache: KVCache, k: torch.Tensor | None = None, v: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Dequantized K and V, [batch, bound, kv_heads, head_dim]; zeros (or what `k`, `v` held) past each length."""
        self._check_layout(cache)
        shape = (cache.batch, max(1, cache.bound), *self._kv_tail)
        k = torch.zeros(shape, dtype=self.dtype, device=cache.device) if k is None else k
        v = torch.zeros(shape, dtype=self.dtype, device=cache.device) if v is None else v
        with cache.turns.lock:
            if cache.gpu is not None:
                cache.turns.follow(cache.gpu)
            self.module.unpack(*cache.tensors, k, v)
        return k, v

    # --- checks: cheap comparisons first, words only once something is wrong ---------------------------------------------

    def _check_call(self, q: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """The workspace of a call whose query and cache are right."""
        try:
            workspace = cache.workspaces.get(self._key)
            shape = q.shape
            right = q.dtype == self.dtype and len(shape) == 4 and shape[0] == cache.batch and shape[2:] == self._q_tail
            right = right and q.device == cache.device
        except AttributeError:
            right, shape = False, torch.Size()
        if not right:
            if not isinstance(cache, KVCache):
                raise TypeError(f"cache must be a KVCache, which new_cache makes, not {type(cache).__name__}")
            checks.tensor("q", q, (cache.batch, shape[1] if len(shape) == 4 else 1, *self._q_tail), self.dtype, cache.device)
        return self.prepare(cache) if workspace is None else workspace

    def _check_out(self, out: torch.Tensor, q: torch.Tensor) -> None:
        """Check what a module cannot see of an output; the rest it checks itself."""
        try:
            if not (out.requires_grad or out.is_neg()):
                return
        except AttributeError:
            pass
        checks.output("out", out, q.shape, self.dtype, q.device)

    def _lse(self, lse: torch.Tensor | bool, q: torch.Tensor) -> torch.Tensor | None:
        """The tensor that a caller's `lse` asks to fill."""
        if lse is False:
            return None
        shape = (q.shape[0], self._heads, q.shape[1])
        if lse is True:
            return torch.empty(shape, dtype=torch.float32, device=q.device)
        checks.output("lse", lse, shape, torch.float32, q.device)
        if not lse.is_contiguous():
            raise ValueError(f"lse must be contiguous, not of strides {list(lse.stride())}")
        return lse

    def _check_new(self, k_new: torch.Tensor, v_new: torch.Tensor, tokens: int, cache: KVCache) -> None:
        shape = (cache.batch, tokens, *self._kv_tail)
        checks.tensor("k_new", k_new, shape, self.dtype, cache.device)
        checks.tensor("v_new", v_new, shape, self.dtype, cache.device)

    def _check_tensors(self, q: torch.Tensor, new: tuple[torch.Tensor, torch.Tensor] | None, cache: KVCache, out: torch.Tensor) -> None:
        """Everything but overlaps, for calls that no module checks and those that it refused."""
        checks.tensor("q", q, q.shape, self.dtype, cache.device)
        if new is not None:
            self._check_new(*new, q.shape[1], cache)
        checks.output("out", out, q.shape, self.dtype, cache.device)

    def _check_layout(self, cache: KVCache) -> None:
        if not isinstance(cache, KVCache):
            raise TypeError(f"cache must be a KVCache, which new_cache makes, not {type(cache).__name__}")
        if cache.layout_id != self._layout_id:
            raise CacheMismatch(f"the cache is packed in layout {cache.layout_id}, and this kernel reads layout {self._layout_id}")


_CACHE = ("the cache's blocks", "the cache's K residual", "the cache's V residual", "the cache's lengths", "the cache's block table")


def usable_device(device: torch.device | str | int) -> torch.device:
    """`device` with its index, if kernels run there. ValueError for what is no CPU or GPU, ToolchainMissing for a GPU that is not here."""
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device must be a torch device, not {device!r}") from None
    if where.type == "cpu":
        return torch.device("cpu")
    if where.type != "cuda":
        raise ValueError(f"kernels run on the CPU and on CUDA devices, not on {where}")
    if not torch.cuda.is_available():
        raise ToolchainMissing(f"device {where} is asked for, and torch {torch.__version__} finds no CUDA device here")
    index = torch.cuda.current_device() if where.index is None else where.index
    if index >= torch.cuda.device_count():
        raise ToolchainMissing(f"device {where} is asked for, and torch finds {torch.cuda.device_count()} CUDA devices here")
    return torch.device("cuda", index)


def _capturing(cache: KVCache) -> bool:
    """Whether calls on the cache are being captured in a CUDA graph."""
    return cache.gpu is not None and torch.cuda.is_current_stream_capturing()


def _launch_bound(cache: KVCache, bound: int) -> int:
    """Lengths that a launch must be sized for: a captured launch is replayed while the cache grows to its capacity."""
    return cache.max_len if _capturing(cache) else bound or 1
