"""Compiled launches on torch tensors: the calls over caches of one packed layout.

TVM-FFI sets torch's current stream as its environment's for every call with tensors on a GPU, so that calls inside a `torch.cuda.graph` are
captured. Every call holds the lock of its cache (`CallOrder`) until the module has returned. The host's bound of the lengths grows only
after the module has accepted the call, so a refused call leaves it unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvgen.format.rotation import rotate_back
from kvgen.format.scales import static_scales, trial_scales
from kvgen.runtime import checks, kvcache
from kvgen.runtime.executable import Arguments, Executable, New, Plan
from kvgen.runtime.kvcache import KVCache
from kvgen.spec.dispatch import Dispatch

if TYPE_CHECKING:
    from kvgen.format.layout import PackedLayout
    from kvgen.runtime.module import Module
    from kvgen.spec import KernelSpec

SHARED = "{call} would advance lengths that several caches share, once for each of them: {way}"


UNWRITTEN = 0x7FD3
"""16 bits that no computation gives: a NaN, or each half of one, with a payload."""


def _marked(like: Tensor) -> Tensor:
    """A tensor that shows which of its tokens were written."""
    found = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    found.view(torch.int16).fill_(UNWRITTEN)
    return found


class Calls:
    """Attention over quantized KV caches of one layout; a call takes the launch that `dispatch` names."""

    def __init__(self, spec: KernelSpec, layout: PackedLayout, launches: Sequence[Executable], dispatch: Dispatch | None = None) -> None:
        """`dispatch` gives indices of the launches; one launch alone needs none. A launch may be there more than once."""
        self.spec = spec
        self.layout = layout
        self._arguments = Arguments(spec, layout)
        self._launches = tuple(launches)
        self._distinct = tuple(dict.fromkeys(launches))
        self._only = self._distinct[0] if len(self._distinct) == 1 else None
        self._dispatch = dispatch or Dispatch(())
        self._most_q = spec.attention.q_len

    @property
    def dtype(self) -> torch.dtype:
        """Of q, K, V and out."""
        return self._arguments.dtype

    @property
    def scale(self) -> float:
        """The default factor of q·k: 1 / sqrt(head_dim)."""
        return self._arguments.scale

    # --- caches ----------------------------------------------------------------------------------------------------------

    def new_cache(
        self,
        batch: int | None = None,
        max_len: int | None = None,
        device: torch.device | str | None = None,
        block_table: Tensor | None = None,
        pages: int | None = None,
        *,
        like: KVCache | None = None,
        scales: tuple[Any, Any] | None = None,
    ) -> KVCache:
        """An empty cache for `batch` sequences of up to `max_len` tokens, with a workspace for every launch of any back end.

        With `like`, and no other argument but `scales`, the cache is another layer over the sequences of that one: lengths, block table,
        workspaces.
        Paged formats take a `block_table`, int32 [batch, max_pages], into a pool of `pages` pages; without one, every sequence
        gets pages of its own. `device` defaults to the table's, else to the CPU or the current GPU by architecture.

        `scales` are those of K and of V where `key.scale` or `value.scale` of the format is static, else None: numbers or float32
        tensors, one number for the granularity `tensor`, [kv_heads] for `head`, [kv_heads, head_dim] for `channel`. Layers have their own.

        Raises TypeError or ValueError on wrong sizes, tables or scales and on pages for a contiguous format, CacheMismatch where `like`
        has other blocks or pages.
        """
        checks.eager()
        given = (None, None) if scales is None else scales
        if not isinstance(given, (tuple, list)) or len(given) != 2:
            raise TypeError("scales are a pair, of K and of V")
        if like is not None:
            if any(given is not None for given in (batch, max_len, device, block_table, pages)):
                raise TypeError("new_cache(like=...) takes everything else from the other cache")
            cache = kvcache.cache_like(
                self.spec, self.layout, like, self._scales(given, like.device if isinstance(like, KVCache) else torch.device("cpu"))
            )
        elif batch is None or max_len is None:
            raise TypeError("new_cache needs batch and max_len, or like=")
        else:
            if block_table is not None:
                checks.plain("block_table", block_table)
            where = self._device(block_table.device if device is None and block_table is not None else device)
            module = self._distinct[0].module
            of_cache = self._scales(given, where)
            cache = kvcache.new_cache(self.spec, self.layout, module, batch, max_len, pages, block_table, where, of_cache)
        self.prepare(cache)
        return cache

    def _scales(self, given: Sequence[Any], device: torch.device) -> Tensor | None:
        """The static scales of a new cache, given for K and for V."""
        return static_scales(self.spec, given[0], given[1], device)

    def prepare(self, cache: KVCache) -> None:
        """Allocate this kernel's workspaces for a cache, which the first call of each launch must not do while a CUDA graph is captured.

        Raises CacheMismatch for a cache of another layout, and while a graph is captured.
        """
        self._arguments.cache(cache)
        checks.eager()
        for launch in self._distinct:
            launch.workspace(cache)

    def _device(self, device: torch.device | str | None) -> torch.device:
        """Where a new cache lies: `device`, by default the CPU or the current GPU by architecture."""
        if device is None:
            device = "cpu" if self.spec.arch == "cpu" or not torch.cuda.is_available() else "cuda"
        return checks.usable_device(device)

    # --- calls -----------------------------------------------------------------------------------------------------------

    def prefill(
        self,
        cache: KVCache,
        k: Tensor,
        v: Tensor,
        lengths: Tensor | Sequence[int] | None = None,
        *,
        check_finite: bool = False,
        advance: bool = True,
    ) -> None:
        """Append the first `lengths[b]` tokens (all by default) of each sequence of `k` and `v`, quantizing full blocks.

        `k` and `v` are [batch, tokens, kv_heads, head_dim], of the spec's dtype; `lengths` int32 [batch], or numbers on the host.
        If several caches share lengths, every layer appends with `advance=False`, and `cache.advance(lengths)` writes them once.
        `check_finite` looks for infinities and NaNs first, which waits for the device.

        Raises CacheMismatch where the cache is of another layout or could be too small, ValueError on wrong tensors, on numbers that are
        not finite, and where lengths that several caches share would advance.
        """
        self._arguments.cache(cache)
        checks.eager()
        sequences = cache.sequences
        known: list[int] | None
        tokens = self._arguments.filling(cache, k, v, finite=check_finite)
        if lengths is None:
            new, known = torch.full((cache.batch,), tokens, dtype=torch.int32, device=cache.device), [tokens]
        else:
            new, known = checks.numbers("lengths", lengths, cache.batch, tokens, "the tokens of k", cache.device)
        if advance and sequences.shared:
            raise ValueError(SHARED.format(call="prefill", way="prefill(..., advance=False) in every layer, then cache.advance(lengths)"))
        launch, uniform = self._only or self._launch(cache, cache.bound, 1), known is not None and len(set(known)) == 1
        with sequences.in_order():
            sequences.check()
            bound = sequences.after(tokens if known is None else max(known), None if uniform else new)
            if not tokens:
                return
            launch.module.pack(k, v, new, None, *cache.tensors, sequences.max_len, sequences.overflow.address, int(advance))
            if advance:
                sequences.appended(bound, uniform=uniform)

    def plan(
        self,
        cache: KVCache,
        q_len: int = 1,
        *,
        append: bool = True,
        bound: int | None = None,
        uniform: bool | None = None,
        tokens: int | None = None,
    ) -> Plan:
        """The work distribution of a step, for `decode` (or, without `append`, `attend`) with `q_len` query tokens over present lengths.

        It is made once, on the device, and given to every layer's `decode(..., plan=plan)`; `cache.advance(q_len)` ends the step. Replays
        of a CUDA graph that captured all of this follow the lengths. Sequences without tokens take no part, and their output is 0. Of
        sequences that have no room nothing is written, and the next call raises.

        `uniform` promises that all lengths are equal and above 0: such a step has a static schedule. By default the host says what it
        knows, and nothing within a capture. `bound` is what no length exceeds after the step, in replays too (by default `max_len`), and
        `tokens` the number of all sequences together, about: a launch is chosen by them, and no result depends on them.

        Raises CacheMismatch for a cache of another layout or too small, ValueError on numbers below 0 and on more query tokens than
        `attention.q_len` of the spec, which are extend attention.
        """
        self._arguments.cache(cache)
        q_len = checks.whole("q_len", q_len, 1)
        if q_len > self._most_q:
            way = f"decode(..., advance=False) in every layer, then cache.advance([{q_len}] * batch)" if append else "attend(q, cache)"
            raise ValueError(
                f"q_len ({q_len}) is more than the spec's attention.q_len ({self._most_q}): more tokens are extend attention, which takes "
                f"no plan: {way}"
            )
        if bound is not None:
            bound = checks.whole("bound", bound, 0)
        if tokens is not None:
            tokens = checks.whole("tokens", tokens, 0)
        sequences, grown = cache.sequences, q_len if append else 0
        with sequences.in_order():
            sequences.check()
            known = sequences.after(grown)
            capturing = sequences.capturing
            if uniform is None:  # the static scheduler appends to empty sequences too, and a capture outlives what the host knows
                uniform = sequences.uniform and sequences.bound > 0 and not capturing
            launch = self._only or self._launch(cache, cache.bound + grown, q_len, bound=bound, total=tokens, equal=uniform)
            launch.workspace(cache)
            numbers = None
            if cache.gpu is None or not uniform:
                flag = sequences.overflow.address
                numbers = launch.plan(sequences.lengths, q_len, cache.max_len, flag, append=append, skip_empty=True)
            return Plan(launch, sequences, q_len, append, max(1, known if bound is None else bound), numbers, sequences.version, capturing)

    def decode(
        self,
        q: Tensor,
        k_new: Tensor,
        v_new: Tensor,
        cache: KVCache,
        out: Tensor | None = None,
        lse: Tensor | bool | None = None,
        scale: float | None = None,
        *,
        sinks: Tensor | None = None,
        plan: Plan | None = None,
        advance: bool = True,
    ) -> Any:
        """Append `k_new` and `v_new`, attend causally with `q`, and pack a block that became full.

        `q` and out are [batch, q_len, q_heads, head_dim], `k_new` and `v_new` [batch, q_len, kv_heads, head_dim], all of the spec's
        dtype. Returns out, or (out, lse) where `lse` is true or a tensor to fill: float32 [batch, q_heads, q_len], natural logarithm.
        `scale` multiplies q·k (default 1/sqrt(head_dim)). `sinks`, float32 [q_heads], are given exactly where `attention.sinks` is true.

        Lengths advance by the new tokens, except with a `plan` (see `plan`) or with `advance=False`, for layers that share a chunk of a
        prompt: sequences without tokens take part in that, and `cache.advance([q_len] * batch)` ends it. More query tokens than
        `attention.q_len` are extend attention, without a plan: on a GPU the cache is dequantized for torch's kernels, at most 1 GiB at a
        time, and the host waits once for the lengths, except while a CUDA graph is captured.

        Raises CacheMismatch for a cache of another layout or too small, or if an earlier step had no room, UnsupportedError for extend
        attention in float32 on a GPU, ValueError on wrong tensors, on a plan of another step, kernel or cache, and where lengths that
        several caches share would advance.
        """
        return self._call(q, (k_new, v_new), cache, out, lse, scale, sinks, plan, advance=advance)

    def attend(
        self,
        q: Tensor,
        cache: KVCache,
        out: Tensor | None = None,
        lse: Tensor | bool | None = None,
        scale: float | None = None,
        *,
        sinks: Tensor | None = None,
        plan: Plan | None = None,
    ) -> Any:
        """Attend with `q` [batch, q_len, q_heads, head_dim], the last q_len positions of each sequence; nothing is appended.

        Returns and raises as `decode` does; also ValueError if a contiguous cache with a sliding window no longer keeps what they see.
        """
        return self._call(q, None, cache, out, lse, scale, sinks, plan)

    def unpack(self, cache: KVCache, k: Tensor | None = None, v: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """K and V as the kernel sees them, [batch, longest, kv_heads, head_dim]; zeros (or what `k`, `v` held) past each length. What is
        stored rotated is rotated back.

        Without `k` and `v` it waits for the device, which knows the longest length; while a CUDA graph is captured they are max_len long.
        Raises CacheMismatch for a cache of another layout.
        """
        self._arguments.cache(cache)
        for name, given in (("k", k), ("v", v)):
            if given is not None:
                checks.plain(name, given)
        sequences, attention = cache.sequences, self.spec.attention
        with sequences.in_order():
            if k is None or v is None:
                longest = sequences.max_len if sequences.capturing else int(sequences.lengths.max())
                shape = (cache.batch, max(1, longest), attention.kv_heads, attention.head_dim)
                k = torch.zeros(shape, dtype=self.dtype, device=cache.device) if k is None else k
                v = torch.zeros(shape, dtype=self.dtype, device=cache.device) if v is None else v
            rotated = [None if rotation is None else _marked(x) for x, rotation in zip((k, v), self.layout.rotations, strict=True)]
            stored = [x if found is None else found for x, found in zip((k, v), rotated, strict=True)]
            self._distinct[0].module.unpack(*cache.tensors, None, *stored)
        for x, found, rotation in zip((k, v), rotated, self.layout.rotations, strict=True):
            if found is not None:
                written = (found.view(torch.int16) != UNWRITTEN).any(-1, keepdim=True)
                x.copy_(torch.where(written, rotate_back(found, rotation), x))
        return k, v

    # --- one call --------------------------------------------------------------------------------------------------------

    def _call(
        self,
        q: Tensor,
        new: New | None,
        cache: KVCache,
        out: Tensor | None,
        lse: Tensor | bool | None,
        scale: float | None,
        sinks: Tensor | None,
        plan: Plan | None,
        *,
        advance: bool = True,
    ) -> Any:
        """`decode`, or `attend` where there is no new K and V."""
        out, lse, scale = self._arguments.call(q, new, cache, out, lse, scale, sinks)
        sequences, tokens = cache.sequences, q.shape[1]
        appended = 0 if new is None else tokens
        if plan is None:
            launch = self._only or self._launch(cache, sequences.longest + appended, tokens)
        elif not isinstance(plan, Plan):
            raise TypeError(f"plan must be a Plan, which kernel.plan returns, not {type(plan).__name__}")
        elif (launch := plan.launch) not in self._distinct:
            raise ValueError("the plan was made by another kernel")
        workspace = sequences.workspaces.get(launch.key)
        if workspace is None:
            workspace = launch.workspace(cache)
        with sequences.call_order.lock:
            if cache.gpu is not None:
                sequences.call_order.follow(cache.gpu)
            sequences.check()
            max_len, flag, numbers = sequences.max_len, sequences.overflow.address, None
            if plan is not None:
                plan.check(sequences, tokens, append=new is not None)
                advance, bound, numbers = False, plan.bound, plan.numbers
            else:
                advance = advance and appended > 0
                if advance and sequences.shared:
                    raise ValueError(SHARED.format(call="decode", way="plan, decode(..., plan=plan) in every layer, cache.advance(q_len)"))
                bound = sequences.after(appended) or 1
            if tokens > self._most_q:
                from kvgen.runtime import extend  # most processes only decode

                attention = self.spec.attention
                shape = attention.softcap, attention.window, self.layout.rotations
                call = extend.Call(q, new, out, lse, sinks, scale, bound, max_len, flag, *shape, advance)
                extend.check(call, cache, self._arguments)
                extend.run(launch.module, cache.tensors, call)
            else:
                try:
                    if plan is None and cache.gpu is not None and sequences.batch > 1 and not sequences.uniform:
                        numbers = launch.plan(sequences.lengths, tokens, max_len, flag, append=appended > 0, skip_empty=new is None)
                    tensors = (
                        cache.packed,
                        cache.k_residual,
                        cache.v_residual,
                        sequences.lengths,
                        sequences.block_table,
                        None,
                        cache.scales,
                    )
                    launch.run(q, new, tensors, (out, lse, sinks, workspace, numbers, scale, bound), max_len, flag, advance=advance)
                except Exception:
                    self._arguments.named(q, new, out, cache.batch, cache.device)  # which argument the module refused
                    raise
            if advance:
                sequences.appended(bound)
        return out if lse is None else (out, lse)

    # --- choice of launch ------------------------------------------------------------------------------------------------

    def launch_at_capacity(self, cache: KVCache, q_len: int = 1) -> Executable:
        """The launch of a captured step over a cache, for its capacity. Raises CacheMismatch for a cache of another layout."""
        self._arguments.cache(cache)
        return self._launch(cache, cache.max_len, q_len)

    def launch_for(self, batch: int, length: int, q_len: int = 1) -> Executable:
        """The launch for `batch` sequences of up to `length` tokens, of which nothing more is known."""
        return self._launches[self._dispatch.launch(batch, length, min(q_len, self._most_q), None, equal=False)]

    def _launch(
        self,
        cache: KVCache,
        length: int,
        tokens: int,
        *,
        bound: int | None = None,
        total: int | None = None,
        equal: bool | None = None,
    ) -> Executable:
        """The launch of the dispatch table for what the host knows: at most `length` tokens per sequence, unless the caller knows better:
        `bound`, and `total` of all sequences. `equal`: whether the step has a static schedule; None: if lengths are known to be equal.
        """
        if bound is not None:
            length = bound
        elif cache.sequences.capturing:
            length = cache.max_len  # the graph is replayed while the cache grows
        if total is None and (equal or cache.sequences.uniform or cache.batch == 1):
            total = cache.batch * length
        return self._launches[self._dispatch.launch(cache.batch, length, min(tokens, self._most_q), total, equal=equal)]


class Variant(Calls):
    """The calls of one module, for all workloads; several variants may share caches of one layout."""

    def __init__(self, spec: KernelSpec, layout: PackedLayout, module: Module) -> None:
        self.module = module
        self.executable = Executable(module, spec.attention.q_len)
        super().__init__(spec, layout, [self.executable])

    def _scales(self, given: Sequence[Any], device: torch.device) -> Tensor | None:
        """Verification and timing need no calibration: scales that were not given are `trial_scales`."""
        return trial_scales(self.spec, device) if given[0] is None and given[1] is None else super()._scales(given, device)

    def workspace(self, cache: KVCache) -> Tensor:
        """The workspace for a cache. Raises as `prepare` does."""
        self.prepare(cache)
        return self.executable.workspace(cache)

    def release(self, cache: KVCache) -> None:
        """Give the workspace for a cache back; a captured graph must not outlive it."""
        self.executable.release(cache)
