"""Checks of the arguments of calls for one format: cheap comparisons first; messages are made only if one fails."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvgen.errors import CacheMismatch, UnsupportedError
from kvgen.format.dtypes import torch_dtype
from kvgen.format.window import cache_id, window_places
from kvgen.lower.extend import extend_refusal
from kvgen.runtime import checks
from kvgen.runtime.kvcache import KVCache

if TYPE_CHECKING:
    from kvgen.format.layout import Operand, PackedLayout
    from kvgen.runtime.extend import Call
    from kvgen.spec import KernelSpec

_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_Tensor = torch.Tensor
_layouts: dict[str, tuple[KernelSpec, PackedLayout]] = {}
"""The layouts of this process's kernels by their id in caches, to name a cache's format in an error."""
New = tuple[torch.Tensor, torch.Tensor]
"""K and V to be appended, [batch, tokens, kv_heads, head_dim]."""


class Arguments:
    """Checks tensors against a spec and a layout; each check raises TypeError, ValueError or CacheMismatch in one sentence."""

    __slots__ = ("_heads", "_kv_tail", "_layout_id", "_most_scale", "_q_tail", "_softcap", "_spec", "dtype", "scale", "sinks_needed")

    def __init__(self, spec: KernelSpec, layout: PackedLayout) -> None:
        self._spec = spec
        attention = spec.attention
        self.dtype = torch_dtype(attention.dtype)
        self.scale = 1.0 / math.sqrt(attention.head_dim)
        self._layout_id = cache_id(spec, layout)
        _layouts[self._layout_id] = spec, layout
        self._heads = attention.q_heads
        self._q_tail = (attention.q_heads, attention.head_dim)
        self._kv_tail = (attention.kv_heads, attention.head_dim)
        self._softcap = attention.softcap
        self.sinks_needed = attention.sinks
        self._most_scale = checks.most_scale(attention.softcap)

    def cache(self, cache: Any) -> None:
        """Raises TypeError for another type, CacheMismatch for a cache of another layout."""
        if not isinstance(cache, KVCache):
            raise TypeError(f"cache must be a KVCache, which new_cache makes, not {type(cache).__name__}")
        if cache.layout_id != self._layout_id:
            raise CacheMismatch(
                f"the cache is packed in {_shown(cache.layout_id)}, and this kernel reads {_shown(self._layout_id)}: make the cache with "
                "this kernel's new_cache"
            )

    def query(self, q: torch.Tensor, cache: KVCache) -> int:
        """The query tokens of a call, after checking query and cache. Caches of several layouts may share sequences and workspaces.

        A module checks dtype and device.
        """
        try:
            shape, sequences = q.shape, cache.sequences
            right = type(q) is _Tensor and q.data_ptr() and not q.is_neg()
            right = right and len(shape) == 4 and type(shape[1]) is int  # torch.jit.trace makes a tensor of it
            right = right and shape[0] == sequences.batch and shape[2:] == self._q_tail and cache.layout_id == self._layout_id
        except (AttributeError, RuntimeError):  # what is no tensor, and tensors without a shape or an address
            right, shape = False, torch.Size()
        if not right:
            self.cache(cache)
            checks.eager()
            shape = q.shape if isinstance(q, _Tensor) and not q.is_nested else shape
            checks.tensor("q", q, (cache.batch, shape[1] if len(shape) == 4 else 1, *self._q_tail), self.dtype, cache.device)
        return shape[1]

    def new(self, new: New, tokens: int, cache: KVCache) -> None:
        """K and V of a call with as many query tokens: their memory. A module checks shapes, dtypes and devices."""
        k, v = new
        try:
            if type(k) is type(v) is _Tensor and k.data_ptr() and v.data_ptr() and not (k.is_neg() or v.is_neg()):
                return
        except RuntimeError:  # a tensor without an address
            pass
        self._new(new, tokens, cache.batch, cache.device)

    def filling(
        self, cache: KVCache, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor | Sequence[int] | None, *, finite: bool
    ) -> tuple[int, torch.Tensor, int, bool]:
        """The tokens of a `prefill`, and its new lengths as `checks.lengths` gives them. `finite` waits for the device."""
        checks.plain("k", k)
        tokens = k.shape[1] if k.dim() == 4 else 0
        shape = (cache.batch, tokens, *self._kv_tail)
        checks.tensor("k", k, shape, self.dtype, cache.device)
        checks.tensor("v", v, shape, self.dtype, cache.device)
        if finite and not bool(torch.isfinite(k).all() & torch.isfinite(v).all()):
            raise ValueError("k or v holds infinities or NaNs, which have no quantized form")
        return tokens, *checks.lengths("lengths", lengths, cache.batch, tokens, "the tokens of k", cache.device)

    def outputs(
        self, q: torch.Tensor, cache: KVCache, out: torch.Tensor | None, lse: torch.Tensor | bool | None, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, float]:
        """The outputs of a call, checked or allocated, and its scale. The module checks the rest of `out`.

        What torch allocates, and the modes of torch, show whether it computes or records.
        """
        given = out is not None
        if out is None:
            out = torch.empty(q.shape, dtype=self.dtype, device=cache.device)
        try:
            right = type(out) is _Tensor and out.data_ptr() and not (_dispatch_modes() or _function_modes())
            right = right and not (given and (out.requires_grad or out.is_neg()))
        except (AttributeError, RuntimeError):
            right = False
        if not right:
            checks.eager()
            if given:
                checks.output("out", out, q.shape, self.dtype, q.device)
        if scale is None:
            scale = self.scale
        elif type(scale) is not float or not -self._most_scale <= scale <= self._most_scale:
            scale = checks.scale(scale, self._softcap)
        return out, None if lse is None else self._lse(lse, q), scale

    def sinks(self, sinks: torch.Tensor | None, cache: KVCache) -> None:
        """The learned sinks of a call, float32 [q_heads], given exactly where the spec has them. Raises TypeError or ValueError."""
        if sinks is None and self.sinks_needed:
            raise ValueError("this format has learned sinks (attention.sinks): give sinks=, float32 [q_heads]")
        if sinks is None:
            return
        if not self.sinks_needed:
            raise ValueError("sinks= was given, and this format has no learned sinks (attention.sinks)")
        checks.tensor("sinks", sinks, (self._heads,), torch.float32, cache.device)
        if not sinks.is_contiguous():
            raise ValueError(f"sinks must be contiguous, not of strides {list(sinks.stride())}")

    def tensors(self, q: torch.Tensor, new: New | None, cache: KVCache, out: torch.Tensor) -> None:
        """Check everything except overlaps: for calls that no module checks, and to name the argument that a module refused."""
        self.inputs(q, new, cache.batch, cache.device)
        checks.output("out", out, q.shape, self.dtype, cache.device)

    def inputs(self, q: torch.Tensor, new: New | None, batch: int, device: torch.device) -> None:
        """Check query, K and V of a call over a cache of `batch` sequences."""
        checks.plain("q", q)
        tokens = q.shape[1] if q.dim() == 4 else 1
        checks.tensor("q", q, (batch, tokens, *self._q_tail), self.dtype, device)
        if new is not None:
            self._new(new, tokens, batch, device)

    def extend(self, call: Call, cache: KVCache) -> None:
        """A call with more query tokens than modules are compiled for. Raises UnsupportedError if the GPU cannot compute it."""
        if reason := extend_refusal(self._spec, gpu=call.q.is_cuda):
            raise UnsupportedError("extend attention", reason, is_backend=False)
        if call.new is None:
            self._within_window(call, cache)
        self.tensors(call.q, call.new, cache, call.out)
        if cache.gpu is not None:  # on the CPU the module checks this
            read = [("q", call.q), *zip(("k_new", "v_new"), call.new or (), strict=False), *zip(_CACHE, cache.tensors, strict=True)]
            checks.apart("out", call.out, [*read, ("lse", call.lse)])
            if call.lse is not None:
                checks.apart("lse", call.lse, read)

    def _within_window(self, call: Call, cache: KVCache) -> None:
        """Raises ValueError if queries of an `attend` could see tokens whose places later ones have taken."""
        window, rollback = self._spec.attention.window, self._spec.cache.rollback
        places = window_places(self._spec, cache.block_tokens)
        if window is None or not places:
            return
        held, seen = places * cache.block_tokens - rollback, min(call.bound, call.q.shape[1] + window - 1)
        if seen > held:
            raise ValueError(
                f"attend with {call.q.shape[1]} query tokens sees {seen} tokens, and a contiguous cache with a window of {window} keeps "
                f"the newest {held}: give new tokens to decode with their queries, or use a paged cache"
            )

    def _new(self, new: New, tokens: int, batch: int, device: torch.device) -> None:
        shape = (batch, tokens, *self._kv_tail)
        for name, x in zip(("k_new", "v_new"), new, strict=True):
            checks.tensor(name, x, shape, self.dtype, device)

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


_CACHE = (
    "the cache's blocks",
    "the cache's K residual",
    "the cache's V residual",
    "the cache's lengths",
    "the cache's block table",
    "the cache's residual slots",
)


def _shown(layout_id: str) -> str:
    """A layout's id, and what is known of its format."""
    known = _layouts.get(layout_id)
    if known is None or not hasattr(known[1], "key"):  # an exported kernel knows no more of its layout than sizes
        return f"layout {layout_id}"
    spec, layout = known
    unpacked = [f"{name} {value}" for name in ("sink", "local", "rollback") if (value := getattr(spec.cache, name))]
    words = [f"K {_bits(layout.key)}", f"V {_bits(layout.value)}", f"blocks of {layout.tokens} tokens", *unpacked]
    return f"layout {layout_id} ({', '.join(words)})"


def _bits(operand: Operand) -> str:
    """The format of K or V in a few words."""
    if operand.bits == 16:
        return "16 bits"
    return f"{operand.bits} bits per {'channel' if operand.per_channel else 'token'} in groups of {operand.group}"
