"""`kvgen::attend` and `kvgen::decode`: kernels as torch operators, so that torch.compile takes them whole.

An operator names its module by the path of the compiled library: a compiled graph that another process reads back finds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakValueDictionary

import torch

from kvgen.runtime import checks, extend
from kvgen.runtime.arguments import Arguments
from kvgen.runtime.calls import Calls
from kvgen.runtime.kvcache import KVCache
from kvgen.runtime.module import Module, load
from kvgen.runtime.sequences import CallOrder, OverflowFlag

_modules: dict[str, Module] = {}
_call_orders: WeakValueDictionary[int, CallOrder] = WeakValueDictionary()
"""Call orders of the caches of this process's Attention modules, by the address of their blocks."""
_unbound: dict[int, CallOrder] = {}
"""Call orders of caches that only a graph from another process refers to."""


def _module(path: str) -> Module:
    found = _modules.get(path)
    if found is None:
        found = _modules[path] = load(Path(path))
    return found


@contextmanager
def _in_order(packed: torch.Tensor) -> Iterator[None]:
    """Serialize a call with all other calls over the cache with these blocks, of operators and of kernels."""
    place = packed.data_ptr()
    call_order = _call_orders.get(place)
    if call_order is None:
        call_order = _unbound.setdefault(place, CallOrder())
    with call_order.lock:
        if packed.is_cuda:
            call_order.follow(packed.device.index)
        yield


_overflows: dict[bool, OverflowFlag] = {}
"""Overflow flags of all caches of the operators: one for the CPU, one for GPUs."""


def _overflow(gpu: bool) -> OverflowFlag:
    if gpu not in _overflows:
        _overflows[gpu] = OverflowFlag(gpu)
    return _overflows[gpu]


def _plan(module: Module, q: torch.Tensor, lengths: torch.Tensor, max_len: int, overflow: OverflowFlag | None) -> torch.Tensor | None:
    """The plan of a call, which appends where `overflow` is given; of one sequence there is none."""
    batch, q_len = q.shape[:2]
    if batch == 1 or not q.is_cuda:
        return None
    append = int(overflow is not None)
    plan = torch.empty(int(module.plan_size(batch, max_len, q_len)), dtype=torch.int32, device=q.device)
    module.plan(lengths, plan, q_len, append, 0, max_len, overflow.address if overflow is not None else 0)
    return plan


def _outputs(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Empty out, like q, and lse, float32 [batch, q_heads, q_len]."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return out, torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32, device=q.device)


@torch.library.custom_op("kvgen::attend", mutates_args=("workspace",))
def attend(
    q: torch.Tensor,
    packed: torch.Tensor,
    k_residual: torch.Tensor,
    v_residual: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor | None,
    workspace: torch.Tensor,
    sinks: torch.Tensor | None,
    module: str,
    scale: float,
    max_len: int,
    most_q: int,
    softcap: float = 0.0,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of q over a cache's tensors; shapes and types are those of `docs/abi.md`. Nothing is appended.

    More query tokens than `most_q`, those that the module is compiled for, are extend attention, which needs the spec's `softcap` and
    `window`.
    """
    out, lse = _outputs(q)
    cache = (packed, k_residual, v_residual, lengths, block_table, None)
    with _in_order(packed):
        if q.shape[1] > most_q:
            extend.run(_module(module), cache, extend.Call(q, None, out, lse, sinks, scale, max_len, max_len, 0, softcap, window))
        else:
            plan = _plan(_module(module), q, lengths, max_len, None)
            _module(module).attend(q, *cache, out, lse, sinks, workspace, plan, scale, max_len)
    return out, lse


@torch.library.custom_op("kvgen::decode", mutates_args=("packed", "k_residual", "v_residual", "lengths", "workspace"))
def decode(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    packed: torch.Tensor,
    k_residual: torch.Tensor,
    v_residual: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor | None,
    workspace: torch.Tensor,
    sinks: torch.Tensor | None,
    module: str,
    scale: float,
    max_len: int,
    most_q: int,
    softcap: float = 0.0,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append k_new and v_new to a cache's tensors; (out, lse) of q over them. `lengths` grow in place; `most_q` as for `attend`."""
    out, lse = _outputs(q)
    cache = (packed, k_residual, v_residual, lengths, block_table, None)
    with _in_order(packed):
        flag = _overflow(q.is_cuda)
        flag.check()
        if q.shape[1] > most_q:
            call = extend.Call(q, (k_new, v_new), out, lse, sinks, scale, max_len, max_len, flag.address, softcap, window)
            extend.run(_module(module), cache, call)
        else:
            plan = _plan(_module(module), q, lengths, max_len, flag)
            _module(module).decode(q, k_new, v_new, *cache, out, lse, sinks, workspace, plan, scale, max_len, max_len, flag.address, 1)
    return out, lse


@attend.register_fake
def _(q: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return _outputs(q)


@decode.register_fake
def _(q: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return _outputs(q)


class Attention(torch.nn.Module):
    """A kernel bound to a cache, as a module that torch.compile(fullgraph=True) takes and a CUDA graph captures.

    The launch is that of a step captured over the cache now: for its full capacity, of equal lengths if the host knows them to be equal.
    Memory of extend attention is sized for the capacity, too. The host does not track lengths here: the device refuses a step beyond the
    capacity, writes nothing, and the next call raises CacheMismatch.
    """

    packed: torch.Tensor
    k_residual: torch.Tensor
    v_residual: torch.Tensor
    lengths: torch.Tensor
    block_table: torch.Tensor | None
    workspace: torch.Tensor
    sinks: torch.Tensor | None

    def __init__(
        self, kernel: Calls, cache: KVCache, q_len: int = 1, scale: float | None = None, sinks: torch.Tensor | None = None
    ) -> None:
        """`sinks`, float32 [q_heads], are the learned logits of a format that has them.

        Raises CacheMismatch if the cache has another layout than the kernel, ValueError on wrong sinks.
        """
        super().__init__()
        launch = kernel.launch_at_capacity(cache, q_len)
        tensors = {"packed": cache.packed, "k_residual": cache.k_residual, "v_residual": cache.v_residual, "lengths": cache.lengths}
        Arguments(kernel.spec, kernel.layout).sinks(sinks, cache)
        for name, tensor in {**tensors, "block_table": cache.block_table, "workspace": launch.workspace(cache), "sinks": sinks}.items():
            self.register_buffer(name, tensor, persistent=False)
        self.module = str(launch.module.path)
        self.call_order = _call_orders[cache.packed.data_ptr()] = cache.call_order
        attention = kernel.spec.attention
        self.scale = kernel.scale if scale is None else checks.scale(scale, attention.softcap)
        self.max_len = cache.max_len
        self.most_q, self.softcap, self.window = attention.q_len, attention.softcap, attention.window
        _modules[self.module] = launch.module

    def forward(self, q: torch.Tensor, k_new: torch.Tensor, v_new: torch.Tensor) -> torch.Tensor:
        """Append this step's tokens and attend: q and the result [batch, q_len, q_heads, head_dim]."""
        out: torch.Tensor = decode(q, k_new, v_new, *self._cache(), *self._constants())[0]
        return out

    def attend(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of q, the last positions of each sequence, without appending."""
        out, lse = attend(q, *self._cache(), *self._constants())
        return out, lse

    def _cache(
        self,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
        return self.packed, self.k_residual, self.v_residual, self.lengths, self.block_table, self.workspace, self.sinks

    def _constants(self) -> tuple[str, float, int, int, float, int | None]:
        return self.module, self.scale, self.max_len, self.most_q, self.softcap, self.window
