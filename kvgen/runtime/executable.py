"""What a call over a cache takes: a loaded module with its workspaces, a plan, and arguments that were checked."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
from torch import Tensor

from kvgen.errors import CacheMismatch
from kvgen.format.dtypes import torch_dtype
from kvgen.format.residual import cache_id
from kvgen.runtime import checks
from kvgen.runtime.kvcache import KVCache, Tensors
from kvgen.runtime.module import Module
from kvgen.runtime.sequences import Sequences

if TYPE_CHECKING:
    from kvgen.format.layout import PackedLayout
    from kvgen.spec import KernelSpec

New = tuple[Tensor, Tensor]
"""K and V to be appended, [batch, tokens, kv_heads, head_dim]."""
Rest = tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None, float, int]
"""out, lse, sinks, workspace, plan, scale, and a bound of the lengths after a call."""
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack


class Executable:
    """One module; several executables, of one module too, may share caches of one layout."""

    def __init__(self, module: Module, most_q: int) -> None:
        """`most_q` is the number of query tokens that the module is compiled for."""
        self.module = module
        self.key = uuid4().hex
        """Names its workspaces, in any process."""
        self._most_q = most_q
        self._plan_sizes: dict[tuple[int | None, int, int, int], int] = {}

    def workspace(self, cache: KVCache) -> Tensor:
        """The workspace for a cache, and for all caches that share its sequences; allocated once.

        Raises CacheMismatch if it would be allocated while a graph is captured, because every replay would zero it.
        """
        workspace = cache.sequences.workspaces.get(self.key)
        if workspace is None:
            if cache.sequences.capturing:
                raise CacheMismatch("the cache has no workspace for this kernel yet: call prepare(cache) before the graph is captured")
            workspace = cache.sequences.workspaces[self.key] = self.new_workspace(cache.device, cache.batch, cache.max_len)
        return workspace

    def new_workspace(self, device: torch.device, batch: int, max_len: int) -> Tensor:
        """Zeros, for calls over up to `batch` sequences of up to `max_len` tokens that run one after the other."""
        gpu = device.index if device.type == "cuda" else None
        with _on(gpu):
            size = int(self.module.workspace_bytes(batch, max_len, self._most_q))
        workspace = torch.zeros(max(16, size), dtype=torch.uint8, device=device)
        if gpu is not None:  # once for each workspace: calls on other streams need not wait for the zeros
            torch.cuda.current_stream(gpu).synchronize()
        return workspace

    def release(self, cache: KVCache) -> None:
        """Give the workspace for a cache back; a captured graph must not outlive it."""
        cache.sequences.workspaces.pop(self.key, None)

    def plan(self, lengths: Tensor, q_len: int, max_len: int, overflow: int, *, append: bool, skip_empty: bool) -> Tensor:
        """The numbers of a plan, which the device computes: int32, as `docs/abi.md` says. At `overflow` it says that there is no room."""
        size = self.plan_size(lengths.device.index if lengths.is_cuda else None, len(lengths), max_len, q_len)
        numbers = torch.empty(size, dtype=torch.int32, device=lengths.device)
        self.module.plan(lengths, numbers, q_len, int(append), int(skip_empty), max_len, overflow)
        return numbers

    def plan_size(self, gpu: int | None, batch: int, max_len: int, q_len: int) -> int:
        """Numbers of a plan; a larger batch has no fewer."""
        key = (gpu, batch, max_len, q_len)  # it depends on the GPU's number of multiprocessors
        size = self._plan_sizes.get(key)
        if size is None:
            with _on(gpu):
                size = self._plan_sizes[key] = int(self.module.plan_size(batch, max_len, q_len))
        return size

    def run(self, q: Tensor, new: New | None, cache: Tensors, rest: Rest, max_len: int, overflow: int, *, advance: bool) -> None:
        """The module's `attend`, or with `new` K and V its `decode`; with `advance` lengths count `new`. Lengths and plan are the caller's.

        Without a plan all lengths are equal, or there is one; the CPU's modules plan for themselves.
        """
        if new is None:
            self.module.attend(q, *cache, *rest)
        else:
            self.module.decode(q, *new, *cache, *rest, max_len, overflow, int(advance))


def _on(gpu: int | None) -> torch.cuda.device | nullcontext[None]:
    """The device context for functions of a module that take no tensor."""
    return torch.cuda.device(gpu) if gpu is not None else nullcontext()


@dataclass(frozen=True, eq=False)
class Plan:
    """Which KV tiles each CTA attends to in a step, for one launch and the lengths of one moment.

    `Kernel.plan` makes it. It is valid until lengths change: in every layer of a step, before `cache.advance`. One that was captured in a
    CUDA graph is valid within that graph, whose replays compute it anew.
    """

    launch: Executable
    sequences: Sequences
    q_len: int
    append: bool
    """Whether it is for `decode`, which appends q_len tokens, or for `attend`."""
    bound: int
    """No length exceeds it after the step."""
    numbers: Tensor | None
    """int32, as `docs/abi.md` says; None for the static scheduler."""
    version: int
    captured: bool

    def check(self, sequences: Sequences, q_len: int, *, append: bool) -> None:
        """Raises ValueError if the plan was made for another call."""
        reason = None
        if self.sequences is not sequences:
            reason = "for another cache, which does not share these lengths"
        elif self.q_len != q_len or self.append != append:
            made, taken = (f"{'decode' if a else 'attend'} with {n} query tokens" for a, n in ((self.append, self.q_len), (append, q_len)))
            reason = f"for {made}, and the call is {taken}"
        elif self.captured != sequences.capturing:
            reason = (
                "within a CUDA graph, whose replays compute it" if self.captured else "outside of this CUDA graph: replays would not follow"
            )
        elif self.version != sequences.version:
            reason = "before lengths changed: make one for every step"
        if reason is not None:
            raise ValueError(f"the plan was made {reason}")


class Arguments:
    """Checks tensors against a spec and a layout; each check raises TypeError, ValueError or CacheMismatch in one sentence."""

    def __init__(self, spec: KernelSpec, layout: PackedLayout) -> None:
        attention = spec.attention
        self.spec = spec
        self.dtype = torch_dtype(attention.dtype)
        self.scale = 1.0 / math.sqrt(attention.head_dim)
        self._layout_id = cache_id(spec, layout)
        self._q_tail = (attention.q_heads, attention.head_dim)
        self._kv_tail = (attention.kv_heads, attention.head_dim)
        self._most_scale = checks.most_scale(attention.softcap)

    def call(
        self,
        q: Tensor,
        new: New | None,
        cache: KVCache,
        out: Tensor | None,
        lse: Tensor | bool | None,
        scale: float | None,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, float]:
        """The outputs of a call, allocated where they are not given, and its scale.

        In a decode step this checks what a module cannot: that an address holds what torch would read, and that torch computes and does not
        record. The module checks shapes, dtypes and devices; `named` then says which argument it refused.
        """
        try:
            shape = q.shape
            right = len(shape) == 4 and type(shape[1]) is int  # torch.jit.trace makes a tensor of it
            right = right and shape[0] == cache.sequences.batch and shape[2:] == self._q_tail and cache.layout_id == self._layout_id
            right = right and not (_dispatch_modes() or _function_modes())
            for x in (q,) if new is None else (q, *new):
                right = right and type(x) is Tensor and x.data_ptr() != 0 and not x.is_neg()
            if out is not None:
                right = right and type(out) is Tensor and out.data_ptr() != 0 and not (out.requires_grad or out.is_neg())
            elif right:
                out = torch.empty(shape, dtype=self.dtype, device=cache.device)
                right = type(out) is Tensor and out.data_ptr() != 0
        except (AttributeError, RuntimeError):  # what is no tensor, and tensors without a shape or an address
            right = False
        if not right:
            self.cache(cache)
            checks.eager()
            self.named(q, new, out, cache.batch, cache.device)
        if out is None:
            out = torch.empty(q.shape, dtype=self.dtype, device=cache.device)
        if scale is None:
            scale = self.scale
        elif type(scale) is not float or not -self._most_scale <= scale <= self._most_scale:
            scale = checks.finite_scale(scale, self.spec.attention.softcap)
        if sinks is not None or self.spec.attention.sinks:
            self.sinks(sinks, cache)
        return out, None if lse is None else self._lse(lse, q), scale

    def named(self, q: Tensor, new: New | None, out: Tensor | None, batch: int, device: torch.device) -> None:
        """All of a call's tensors over `batch` sequences: what no module checks, and to name what a module refused."""
        checks.plain("q", q)
        tokens = q.shape[1] if q.dim() == 4 else 1
        checks.tensor("q", q, (batch, tokens, *self._q_tail), self.dtype, device)
        for name, x in zip(("k_new", "v_new"), new or (), strict=False):
            checks.tensor(name, x, (batch, tokens, *self._kv_tail), self.dtype, device)
        if out is not None:
            checks.output("out", out, q.shape, self.dtype, device)

    def cache(self, cache: Any) -> None:
        """Raises TypeError for another type, CacheMismatch for a cache of another layout."""
        if not isinstance(cache, KVCache):
            raise TypeError(f"cache must be a KVCache, which new_cache makes, not {type(cache).__name__}")
        if cache.layout_id != self._layout_id:
            raise CacheMismatch(
                f"the cache is packed in layout {cache.layout_id}, and this kernel reads layout {self._layout_id}: make the cache with "
                "this kernel's new_cache"
            )

    def filling(self, cache: KVCache, k: Tensor, v: Tensor, *, finite: bool) -> int:
        """The tokens of a `prefill`. `finite` waits for the device."""
        checks.plain("k", k)
        tokens = k.shape[1] if k.dim() == 4 else 0
        for name, x in (("k", k), ("v", v)):
            checks.tensor(name, x, (cache.batch, tokens, *self._kv_tail), self.dtype, cache.device)
        if finite and not bool(torch.isfinite(k).all() & torch.isfinite(v).all()):
            raise ValueError("k or v holds infinities or NaNs, which have no quantized form")
        return tokens

    def sinks(self, sinks: Tensor | None, cache: KVCache) -> None:
        """The learned sinks of a call, float32 [q_heads], given exactly where the spec has them."""
        if (sinks is not None) != self.spec.attention.sinks:
            raise ValueError(
                "this format has learned sinks (attention.sinks): give sinks=, float32 [q_heads]"
                if sinks is None
                else "sinks= was given, and this format has no learned sinks (attention.sinks)"
            )
        if sinks is not None:
            checks.tensor("sinks", sinks, self._q_tail[:1], torch.float32, cache.device)
            checks.contiguous("sinks", sinks)

    def _lse(self, lse: Tensor | bool, q: Tensor) -> Tensor | None:
        """The tensor that a caller's `lse` asks to fill."""
        if lse is False:
            return None
        shape = (q.shape[0], q.shape[2], q.shape[1])
        if lse is True:
            return torch.empty(shape, dtype=torch.float32, device=q.device)
        checks.output("lse", lse, shape, torch.float32, q.device)
        checks.contiguous("lse", lse)
        return lse
