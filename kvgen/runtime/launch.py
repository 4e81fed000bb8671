"""A compiled variant on torch tensors: caches, argument checks, calls.

Streams: for every call with torch tensors on a GPU, TVM-FFI asks torch for the current stream (by the DLPack exchange API or, where torch
has none, by `torch._C._cuda_getCurrentRawStream`) and sets it as its environment's stream (`TVMFFIEnvGetStream`). Neither way
synchronizes. This module therefore does nothing about streams, and calls inside a `torch.cuda.graph` are captured.

Threads: every call holds the lock of its cache (`KVCache.call_order`) until the module has returned, so calls over one cache run one after
the other. The bound grows only after the module has accepted the call, so a refused call leaves it unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from uuid import uuid4

import torch

from kvgen.errors import CacheMismatch, ToolchainMissing, UnsupportedError
from kvgen.lower.extend import extend_refusal
from kvgen.reference.layout import PackedLayout
from kvgen.runtime import checks, extend
from kvgen.runtime.kvcache import KVCache as KVCache
from kvgen.runtime.module import Module
from kvgen.runtime.plan import Plan
from kvgen.runtime.sequences import Sequences
from kvgen.spec import KernelSpec

SHARED = "{call} would advance lengths that several caches share, once for each of them: {way}"
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
        self._plan_sizes: dict[tuple[int, int], int] = {}
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
        layout = self.layout
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
        sequences = Sequences(torch.zeros(batch, dtype=torch.int32, device=where), block_table, batch, max_len, self.module)
        cache = self._allocate(shape, sequences)
        if cache.gpu is not None:
            cache.call_order.follow(cache.gpu)  # other streams wait for the lengths and the workspace to be zero
        self.prepare(cache)
        return cache

    def cache_like(self, other: KVCache) -> KVCache:
        """An empty cache of this variant's layout whose sequences are those of `other`: another layer of the same model.

        Lengths, block table and workspace are shared; they advance once per step for all. Raises CacheMismatch where pages or blocks of
        the two layouts hold other numbers of tokens.
        """
        layout, packed = self.layout, other.packed
        if other.k_residual.shape[2] != layout.tokens or (self.spec.cache.page is None) != (other.block_table is None):
            raise CacheMismatch("caches that share lengths must have blocks and pages of the same numbers of tokens")
        shape = (packed.shape[0], self._kv_tail[0], packed.shape[2], layout.block_bytes)
        if other.block_table is not None and packed.shape[2] * layout.tokens != self.spec.cache.page:
            raise CacheMismatch("caches that share a block table must have pages of the same number of tokens")
        cache = self._allocate(shape, other.sequences)
        self.prepare(cache)
        return cache

    def _allocate(self, shape: tuple[int, ...], sequences: Sequences) -> KVCache:
        device, layout = sequences.lengths.device, self.layout
        residual = (sequences.batch, self._kv_tail[0], layout.tokens, layout.head_dim)
        return KVCache(
            packed=torch.empty(shape, dtype=torch.uint8, device=device),
            k_residual=torch.empty(residual, dtype=self.dtype, device=device),
            v_residual=torch.empty(residual, dtype=self.dtype, device=device),
            layout_id=self._layout_id,
            sequences=sequences,
        )

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
        """This variant's workspace for a cache, allocated once; by the first call, unless `prepare` was called before.

        Raises CacheMismatch for a cache of another layout, and while a graph is captured, which would zero it at every replay.
        """
        workspace = cache.workspaces.get(self._key)
        if workspace is None:
            self._check_layout(cache)
            if cache.sequences.capturing:
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
        advance: bool = True,
    ) -> None:
        """Append `k` and `v` [batch, tokens, kv_heads, head_dim], of each sequence the first `lengths[b]` tokens (all by default).

        Without `advance` the lengths stay as they are, so that every layer that shares them appends at the same place; `cache.advance`
        writes them then. Lengths given on the host tighten the cache's bound.

        Raises CacheMismatch where the cache could be too small, ValueError on wrong tensors, where lengths that several caches share would
        advance, and, with `check_finite` (which synchronizes), on infinite or undefined numbers.
        """
        self._check_layout(cache)
        tokens = k.shape[1] if isinstance(k, torch.Tensor) and k.dim() == 4 else 0
        shape = (cache.batch, tokens, *self._kv_tail)
        checks.tensor("k", k, shape, self.dtype, cache.device)
        checks.tensor("v", v, shape, self.dtype, cache.device)
        if check_finite and not bool(torch.isfinite(k).all() & torch.isfinite(v).all()):
            raise ValueError("k or v holds infinities or NaNs, which have no quantized form")
        new, longest, uniform = checks.lengths(lengths, cache.batch, tokens, cache.device)
        sequences = cache.sequences
        if advance and sequences.shared:
            raise ValueError(SHARED.format(call="prefill", way="prefill(..., advance=False) in every layer, then cache.advance(lengths)"))
        with sequences.call_order.lock:
            sequences.overflow.check()
            bound = sequences.after(longest)
            if not tokens:
                return
            if cache.gpu is not None:
                sequences.call_order.follow(cache.gpu)
            self.module.pack(k, v, new, *cache.tensors, sequences.max_len, sequences.overflow.address, int(advance))
            if advance:
                sequences.appended(bound, uniform=uniform)

    def plan(self, cache: KVCache, q_len: int = 1, *, append: bool = True, bound: int | None = None, uniform: bool | None = None) -> Plan:
        """The plan of a step over the present lengths: see `Kernel.plan`."""
        self.prepare(cache)
        q_len = checks.whole("q_len", q_len, 1, self._most_q)
        sequences = cache.sequences
        with sequences.call_order.lock:
            sequences.overflow.check()
            known = sequences.after(q_len if append else 0)
            capturing = sequences.capturing
            numbers = None
            if uniform is None:  # a static step also appends to empty sequences, and replays follow lengths that the host does not know
                uniform = sequences.uniform and sequences.bound > 0 and not capturing
            if cache.gpu is None or not uniform:
                if cache.gpu is not None:
                    sequences.call_order.follow(cache.gpu)
                numbers = self._planned(sequences, q_len, append=append, skip_empty=True)
            bound = known if bound is None else checks.whole("bound", bound, 0)
            return Plan(self, sequences, q_len, append, max(1, bound), numbers, sequences.version, capturing)

    def _planned(self, sequences: Sequences, q_len: int, *, append: bool, skip_empty: bool) -> torch.Tensor:
        """The numbers of a plan, which the device computes."""
        key = (sequences.batch, q_len)
        size = self._plan_sizes.get(key)
        if size is None:
            with torch.cuda.device(sequences.gpu) if sequences.gpu is not None else nullcontext():
                size = self._plan_sizes[key] = int(self.module.plan_size(sequences.batch, sequences.max_len, q_len))
        numbers = torch.empty(size, dtype=torch.int32, device=sequences.lengths.device)
        self.module.plan(sequences.lengths, numbers, q_len, int(append), int(skip_empty), sequences.max_len, sequences.overflow.address)
        return numbers

    def _numbers(self, sequences: Sequences, plan: Plan | None, q_len: int, *, append: bool) -> torch.Tensor | None:
        """The numbers of the caller's plan; without one those of a plan of the call's own. None for the static scheduler, and on the
        CPU, whose modules plan for themselves."""
        if plan is not None:
            return plan.numbers
        if sequences.gpu is None or sequences.batch == 1 or sequences.uniform:
            return None
        return self._planned(sequences, q_len, append=append, skip_empty=not append)

    def _outputs(
        self, q: torch.Tensor, cache: KVCache, out: torch.Tensor | None, lse: torch.Tensor | bool | None, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, float]:
        """The outputs of a call, checked or allocated, and its scale."""
        if out is None:
            out = torch.empty(q.shape, dtype=self.dtype, device=cache.device)
        else:
            self._check_out(out, q)
        if scale is None:
            scale = self.scale
        elif type(scale) is not float or not -self._most_scale <= scale <= self._most_scale:
            scale = checks.scale(scale, self._softcap)
        return out, None if lse is None else self._lse(lse, q), scale

    def decode(
        self,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        cache: KVCache,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | bool | None = None,
        scale: float | None = None,
        *,
        plan: Plan | None = None,
    ) -> Any:
        """Append `k_new`, `v_new` [batch, q_len, kv_heads, head_dim], attend with `q` [batch, q_len, q_heads, head_dim], flush.

        Returns `out`, shaped and typed like `q`; with `lse` true or a float32 [batch, q_heads, q_len] tensor, (out, lse). With a `plan`
        the lengths stay as they are, so that every layer appends at the same place, and sequences without tokens take no part; without
        one they advance. More query tokens than `attention.q_len` of the spec are extend attention: a GPU then dequantizes the
        cache, at most 1 GiB at a time, and calls torch's kernels; the host waits once, for the lengths.

        Raises CacheMismatch for a cache of another layout or too small, or if an earlier step had no room; UnsupportedError for extend
        attention that the GPU cannot compute; ValueError on wrong tensors, for a plan of another step, and without one if caches share
        lengths.
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
        out, lse, scale = self._outputs(q, cache, out, lse, scale)
        sequences = cache.sequences
        with sequences.call_order.lock:
            sequences.overflow.check()
            if plan is not None:
                plan.check(self, sequences, tokens, append=True)
            elif sequences.shared:
                raise ValueError(SHARED.format(call="decode", way="plan, decode(..., plan=plan) in every layer, cache.advance(q_len)"))
            bound = sequences.after(tokens) if plan is None else plan.bound
            if cache.gpu is not None:
                sequences.call_order.follow(cache.gpu)
            if tokens > self._most_q:
                self._extend(q, (k_new, v_new), cache, out, lse, scale, bound)
            else:
                try:
                    numbers = self._numbers(sequences, plan, tokens, append=True)
                    self.module.decode(
                        q, k_new, v_new, cache.packed, cache.k_residual, cache.v_residual, sequences.lengths, sequences.block_table, None,
                        out, lse, workspace, numbers, scale, bound or 1, sequences.max_len, sequences.overflow.address,
                        int(plan is None),
                    )  # fmt: skip
                except Exception:
                    self._check_tensors(q, (k_new, v_new), cache, out)  # says more than a module can
                    raise
            if plan is None:
                sequences.appended(bound)
        return out if lse is None else (out, lse)

    def attend(
        self,
        q: torch.Tensor,
        cache: KVCache,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | bool | None = None,
        scale: float | None = None,
        *,
        plan: Plan | None = None,
    ) -> Any:
        """Attend with `q` [batch, q_len, q_heads, head_dim], the last q_len positions of each sequence; nothing is appended.

        Returns and raises as `decode` does.
        """
        workspace = self._check_call(q, cache)
        out, lse, scale = self._outputs(q, cache, out, lse, scale)
        sequences, tokens = cache.sequences, q.shape[1]
        with sequences.call_order.lock:
            sequences.overflow.check()
            if plan is not None:
                plan.check(self, sequences, tokens, append=False)
            if cache.gpu is not None:
                sequences.call_order.follow(cache.gpu)
            bound = plan.bound if plan is not None else sequences.after(0)
            if tokens > self._most_q:
                self._extend(q, None, cache, out, lse, scale, bound)
            else:
                try:
                    numbers = self._numbers(sequences, plan, tokens, append=False)
                    self.module.attend(
                        q, cache.packed, cache.k_residual, cache.v_residual, sequences.lengths, sequences.block_table, None,
                        out, lse, workspace, numbers, scale, bound or 1,
                    )  # fmt: skip
                except Exception:
                    self._check_tensors(q, None, cache, out)
                    raise
        return out if lse is None else (out, lse)

    def _extend(
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
        if reason := extend_refusal(self.spec, gpu=q.is_cuda):
            raise UnsupportedError("extend attention", reason)
        self._check_tensors(q, new, cache, out)
        if cache.gpu is not None:  # on the CPU the module checks this
            read = [("q", q), *zip(("k_new", "v_new"), new or (), strict=False), *zip(_CACHE, cache.tensors, strict=True)]
            checks.apart("out", out, [*read, ("lse", lse)])
            if lse is not None:
                checks.apart("lse", lse, read)
        extend.run(
            self.module, cache.tensors, extend.Call(q, new, out, lse, scale, bound or 1, cache.max_len, cache.sequences.overflow.address)
        )

    def unpack(self, cache: KVCache, k: torch.Tensor | None = None, v: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Dequantized K and V, [batch, longest, kv_heads, head_dim]; zeros (or what `k`, `v` held) past each length.

        Without `k` and `v` it waits for the device, which knows the longest length; while a CUDA graph is captured they are max_len long.
        """
        self._check_layout(cache)
        sequences = cache.sequences
        with sequences.call_order.lock:
            if cache.gpu is not None:
                sequences.call_order.follow(cache.gpu)
            if k is None or v is None:
                longest = sequences.max_len if sequences.capturing else int(sequences.lengths.max())
                shape = (cache.batch, max(1, longest), *self._kv_tail)
                k = torch.zeros(shape, dtype=self.dtype, device=cache.device) if k is None else k
                v = torch.zeros(shape, dtype=self.dtype, device=cache.device) if v is None else v
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
        """Check properties of an output that a module cannot see; the module checks the rest."""
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


_CACHE = (
    "the cache's blocks",
    "the cache's K residual",
    "the cache's V residual",
    "the cache's lengths",
    "the cache's block table",
    "the cache's residual slots",
)


def usable_device(device: torch.device | str | int) -> torch.device:
    """`device` with its index, if kernels run there. ValueError for other types, ToolchainMissing for a GPU that does not exist."""
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
