"""A kernel: one cache format with its compiled launches, called on torch tensors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from kvgen.arch import Target
from kvgen.reference.layout import PackedLayout
from kvgen.registry.entry import Entry, Launch
from kvgen.registry.select import Selection
from kvgen.runtime import checks
from kvgen.runtime.kvcache import KVCache
from kvgen.runtime.launch import Variant, usable_device
from kvgen.runtime.plan import Plan
from kvgen.spec import KernelSpec, Workload
from kvgen.spec.distance import coordinates, coordinates_of, nearest


class Kernel:
    """Attention over a quantized KV cache. `get_kernel` makes it; caches of one layout may be shared between kernels.

    Shapes: q and out [batch, q_len, q_heads, head_dim]; k, v, k_new and v_new [batch, tokens, kv_heads, head_dim], all of the
    spec's dtype; lse float32 [batch, q_heads, q_len], natural logarithm. Each call takes the launch tuned for the workload
    nearest to (batch, the cache's bound of length, q_len), which the host knows (`kvgen.spec.distance`); it never waits for the device.
    """

    def __init__(
        self, spec: KernelSpec, target: Target, selection: Selection, layout: PackedLayout, launches: Sequence[tuple[Workload, Variant]]
    ) -> None:
        self.spec = spec
        self.target = target
        self.selection = selection
        self.layout = layout
        self._launches = [variant for _, variant in launches]
        self._variants = list(dict.fromkeys(self._launches))
        self._only = self._variants[0] if len(self._variants) == 1 else None
        self._tuned = [coordinates_of(workload) for workload, _ in launches]

    @property
    def entry(self) -> Entry | None:
        """The registry's entry that this kernel comes from; None if it is a back end's default."""
        return self.selection.entry

    def __repr__(self) -> str:
        return f"<Kernel {self.spec.name} for {self.target}: {self.selection.how}, layout {self.layout.id}>"

    def new_cache(
        self,
        batch: int | None = None,
        max_len: int | None = None,
        device: torch.device | str | None = None,
        block_table: torch.Tensor | None = None,
        pages: int | None = None,
        *,
        like: KVCache | None = None,
    ) -> KVCache:
        """An empty cache for `batch` sequences of up to `max_len` tokens, with a workspace for every launch of any back end.

        With `like`, and no other argument, the cache shares the sequences of another one: lengths, block table and workspaces. The
        layers of a model thus have common lengths, which advance once per step (`plan`, `KVCache.advance`).

        Paged formats take a `block_table`, int32 [batch, max_pages], into a pool of `pages` pages; without one, every sequence
        gets pages of its own. `device` defaults to the table's, else to the CPU or the current GPU by architecture.
        Raises ValueError on sizes below 1, on a table of the wrong shape, and on pages for a contiguous format, TypeError where neither
        sizes nor `like` are given, CacheMismatch where blocks or pages of `like` hold another number of tokens.
        """
        if like is not None:
            if any(given is not None for given in (batch, max_len, device, block_table, pages)):
                raise TypeError("new_cache(like=...) takes everything else from the other cache")
            cache = self._variants[0].cache_like(like)
        elif batch is None or max_len is None:
            raise TypeError("new_cache needs batch and max_len, or like=")
        else:
            cache = self._variants[0].new_cache(batch, max_len, self._device(device, block_table), block_table, pages)
        for variant in self._variants[1:]:
            variant.prepare(cache)
        return cache

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
        """Append the first `lengths[b]` tokens (all by default) of each sequence of `k` and `v`, quantizing full blocks.

        If several caches share lengths, every layer appends with `advance=False`, and `cache.advance(lengths)` writes them once.
        `check_finite` looks for infinities and NaNs first, which waits for the device. Raises CacheMismatch where the cache is
        of another layout or could be too small, ValueError on wrong tensors and on numbers that are not finite.
        """
        variant = self._only or (self._pick(cache, cache.bound, 1) if isinstance(cache, KVCache) else self._variants[0])
        variant.prefill(cache, k, v, lengths, check_finite=check_finite, advance=advance)

    def plan(self, cache: KVCache, q_len: int = 1, *, append: bool = True, bound: int | None = None, uniform: bool | None = None) -> Plan:
        """The work distribution of a step, for `decode` (or, without `append`, `attend`) with `q_len` query tokens over present lengths.

        It is made once, on the device, and given to every layer's `decode(..., plan=plan)`; `cache.advance(q_len)` ends the step. Within a
        CUDA graph all of this is captured, and replays follow the lengths. Sequences without tokens take no part: nothing is appended,
        and their output is 0. Of sequences that have no room for the step nothing is written, and the next call raises.

        `uniform` promises that all lengths are equal and above 0 (or declines to): then the step has a static schedule and needs no plan
        on the device. By default the host says what it knows, and within a capture, whose replays it does not see, it promises nothing.
        `bound` is what no length exceeds after the step, for a captured one during all replays (by default `max_len`); it sizes a static
        schedule, and no result depends on it.

        Raises CacheMismatch for a cache of another layout or too small, ValueError on a q_len that the kernel does not hold.
        """
        variant = self._only or self._variants[0]  # its checks raise for an argument that is not a cache
        if self._only is None and isinstance(cache, KVCache):
            length = cache.bound + (q_len if append else 0) if bound is None else bound
            variant = self._pick(cache, length, q_len)
        return variant.plan(cache, q_len, append=append, bound=bound, uniform=uniform)

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
        """Append `k_new` and `v_new`, attend causally with `q`, and pack a block that became full.

        Without a `plan` lengths advance by the new tokens; with one they stay as they are (see `plan`).
        `scale` multiplies q·k (default 1/sqrt(head_dim)). Returns out, or (out, lse) where `lse` is true or a tensor to fill.
        More query tokens than the spec's `attention.q_len` are extend attention: on a GPU the cache is dequantized, at most
        1 GiB at a time, and torch's kernels run over that and the new tokens. Such a call waits once for the device, to know the
        lengths, except while a CUDA graph is captured.

        Raises CacheMismatch for a cache of another layout or too small, UnsupportedError for extend attention that the
        GPU cannot compute (sliding windows, soft caps), ValueError on wrong tensors, on a plan of another step, kernel or cache, and
        without a plan if caches share lengths.
        """
        variant = self._only or (self._of_plan(plan) if plan is not None else self._for_call(q, cache, appended=True))
        return variant.decode(q, k_new, v_new, cache, out, lse, scale, plan=plan)

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
        """Attend with `q`, the last q_len positions of each sequence; nothing is appended. Returns and raises as `decode` does."""
        variant = self._only or (self._of_plan(plan) if plan is not None else self._for_call(q, cache, appended=False))
        return variant.attend(q, cache, out, lse, scale, plan=plan)

    def unpack(self, cache: KVCache, k: torch.Tensor | None = None, v: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as the kernel sees them, [batch, longest, kv_heads, head_dim]; zeros (or what `k`, `v` held) past each length.

        Raises CacheMismatch for a cache of another layout.
        """
        return self._variants[0].unpack(cache, k, v)

    def variant(self, workload: Workload) -> Variant:
        """The compiled launch that a call of this shape takes."""
        return self._launches[self._nearest(workload.batch, workload.kv_len, workload.q_len)]

    def launch(self, workload: Workload) -> Launch | None:
        """The entry's launch for a workload: back end and schedule. None if the kernel is a back end's default."""
        index = self._nearest(workload.batch, workload.kv_len, workload.q_len)
        return self.entry.launches[index] if self.entry is not None else None

    def set_threads(self, count: int) -> None:
        """Threads of the following calls, for CPU kernels: at most one for each processor of the machine.

        Raises ValueError out of range and for other kernels, TypeError if it is not an integer.
        """
        if self.target != "cpu":
            raise ValueError(f"set_threads({count}): threads belong to CPU kernels, and this one is for {self.target}")
        count = checks.whole("threads", count, 1, os.cpu_count() or 1)
        for variant in self._variants:
            if variant.module.set_threads is not None:
                variant.module.set_threads(count)

    # --- choice of launch ------------------------------------------------------------------------------------------------

    def _of_plan(self, plan: Plan) -> Variant:
        """The launch that a plan was made for. If it belongs to another kernel, any launch, which then refuses the plan."""
        return plan.variant if plan.variant in self._variants else self._variants[0]

    def _for_call(self, q: torch.Tensor, cache: KVCache, *, appended: bool) -> Variant:
        """The variant for a call. If q or the cache has the wrong type, any variant, whose checks then raise."""
        try:
            tokens = q.shape[1]
            bound = cache.bound
        except (AttributeError, IndexError):
            return self._variants[0]
        return self._pick(cache, bound + tokens if appended else bound, tokens)

    def _pick(self, cache: KVCache, length: int, tokens: int) -> Variant:
        if cache.gpu is not None and torch.cuda.is_current_stream_capturing():
            length = cache.max_len  # the graph is replayed while the cache grows
        return self._launches[self._nearest(cache.batch, length, tokens)]

    def _nearest(self, batch: int, length: int, tokens: int) -> int:
        """Index of the launch tuned for the nearest workload, as `kvgen.spec.distance` counts."""
        return nearest(self._tuned, coordinates(batch, length, tokens))

    def _device(self, device: torch.device | str | None, block_table: torch.Tensor | None) -> torch.device | None:
        """The device of a new cache: `device` or the block table's, which must be of the kernel's kind. None: the current GPU."""
        if device is None and isinstance(block_table, torch.Tensor):
            device = block_table.device
        if device is None:
            return torch.device("cpu") if self.target == "cpu" else None
        where = usable_device(device)
        if (where.type == "cpu") != (self.target == "cpu"):
            raise ValueError(f"this kernel is for {self.target}, and its caches cannot be on {where}")
        return where
