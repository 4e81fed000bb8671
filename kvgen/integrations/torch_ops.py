"""`kvgen::attend` and `kvgen::decode`: kernels as torch operators, so that torch.compile takes them whole.

An operator names its module by the path of the compiled library: a compiled graph that another process reads back finds it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from kvgen.runtime import checks, extend
from kvgen.runtime.calls import SHARED, Calls
from kvgen.runtime.checks import Arguments
from kvgen.runtime.executable import Executable
from kvgen.runtime.kvcache import KVCache
from kvgen.runtime.module import load
from kvgen.runtime.sequences import CallOrder, OverflowFlag, Sequences

_launches: dict[str, tuple[Executable, Arguments | None]] = {}
"""Launches and the checks of their calls by the module's path; one that no Attention of this process has is without checks."""
_sequences: WeakValueDictionary[int, Sequences] = WeakValueDictionary()
"""Of the caches of this process's Attention modules, by the address of their blocks."""
_unbound: dict[int, tuple[CallOrder, OverflowFlag]] = {}
"""Of caches that only a graph from another process refers to, likewise."""
_NAMES = ("q", "k_new", "v_new", "packed", "k_residual", "v_residual", "lengths", "block_table", "workspace", "sinks")


@torch.library.custom_op("kvgen::attend", mutates_args=("workspace",))
def attend(
    q: Tensor,
    packed: Tensor,
    k_residual: Tensor,
    v_residual: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    workspace: Tensor,
    sinks: Tensor | None,
    module: str,
    scale: float,
    max_len: int,
    most_q: int,
    softcap: float = 0.0,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of q over a cache's tensors; shapes and types are those of `docs/abi.md`. Nothing is appended.

    More query tokens than `most_q`, those that the module is compiled for, are extend attention, which needs the spec's `softcap` and
    `window`.
    """
    tensors = (packed, k_residual, v_residual, lengths, block_table)
    return _run(q, None, tensors, workspace, sinks, module, scale, max_len, most_q, softcap, window)


@torch.library.custom_op("kvgen::decode", mutates_args=("packed", "k_residual", "v_residual", "lengths", "workspace"))
def decode(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    packed: Tensor,
    k_residual: Tensor,
    v_residual: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    workspace: Tensor,
    sinks: Tensor | None,
    module: str,
    scale: float,
    max_len: int,
    most_q: int,
    softcap: float = 0.0,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Append k_new and v_new to a cache's tensors; (out, lse) of q over them. `lengths` grow in place; `most_q` as for `attend`."""
    tensors = (packed, k_residual, v_residual, lengths, block_table)
    return _run(q, (k_new, v_new), tensors, workspace, sinks, module, scale, max_len, most_q, softcap, window)


@attend.register_fake
def _(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _outputs(q)


@decode.register_fake
def _(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _outputs(q)


class Attention(torch.nn.Module):
    """A kernel bound to a cache, as a module that torch.compile(fullgraph=True) takes and a CUDA graph captures.

    The launch is that of a step captured over the cache now: for its full capacity, of equal lengths if the host knows them to be equal.
    Memory of extend attention is sized for the capacity, too. The host does not track lengths here, so from now on the cache's `bound` is
    its `max_len`. A GPU refuses a step beyond the capacity, writes nothing, and the next call raises CacheMismatch.
    """

    packed: Tensor
    k_residual: Tensor
    v_residual: Tensor
    lengths: Tensor
    block_table: Tensor | None
    workspace: Tensor
    sinks: Tensor | None

    def __init__(self, kernel: Calls, cache: KVCache, q_len: int = 1, scale: float | None = None, sinks: Tensor | None = None) -> None:
        """`q_len` is the number of query tokens of the steps by which the launch is chosen; calls may have others. `scale` multiplies q·k
        (default 1/sqrt(head_dim)). `sinks`, float32 [q_heads], are the learned logits of a format that has them.

        Raises CacheMismatch if the cache has another layout than the kernel, TypeError if one of them is something else, ValueError on
        wrong sinks or a scale that is not finite, and where the cache shares its lengths with others: every Attention would advance them.
        """
        super().__init__()
        if not isinstance(kernel, Calls):
            raise TypeError(f"kernel must be a kernel, which get_kernel returns, not {type(kernel).__name__}")
        checks.eager()
        launch = kernel.launch_at_capacity(cache, checks.whole("q_len", q_len, 1))
        sequences, attention = cache.sequences, kernel.spec.attention
        if sequences.shared:
            raise ValueError(SHARED.format(call="Attention", way="a cache of its own for each Attention"))
        arguments = Arguments(kernel.spec, kernel.layout)
        arguments.sinks(sinks, cache)
        tensors = (cache.packed, cache.k_residual, cache.v_residual, cache.lengths, cache.block_table, launch.workspace(cache), sinks)
        for name, tensor in zip(_NAMES[3:], tensors, strict=True):
            self.register_buffer(name, tensor, persistent=False)
        self.module = str(launch.module.path)
        self.scale = kernel.scale if scale is None else checks.finite_scale(scale, attention.softcap)
        self.max_len = cache.max_len
        self.most_q, self.softcap, self.window = attention.q_len, attention.softcap, attention.window
        self.sequences = _sequences[cache.packed.data_ptr()] = sequences
        _launches[self.module] = launch, arguments
        with sequences.call_order.lock:
            sequences.captured = True
            sequences.appended(sequences.bound)  # a batch of which this is one sequence (`row_of`) learns it, too

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Attention:
        """What `to`, `half` and the like do to every module of a model: nothing here. Raises TypeError where a tensor would change."""
        for name, tensor in self.named_buffers(recurse=recurse):
            changed = fn(tensor.new_empty(0))  # not the tensor itself, which may be gigabytes
            if changed.dtype != tensor.dtype or changed.device != tensor.device:
                raise TypeError(
                    f"{name} stays {tensor.dtype} on {tensor.device}, as the cache has it: make the Attention when the model has its "
                    "dtype and its device"
                )
        return self

    def forward(self, q: Tensor, k_new: Tensor, v_new: Tensor) -> Tensor:
        """Append this step's tokens and attend causally.

        q and the result are [batch, q_len, q_heads, head_dim], `k_new` and `v_new` [batch, q_len, kv_heads, head_dim], all of the spec's
        dtype; more query tokens than `attention.q_len` are extend attention.

        Raises CacheMismatch where an earlier step had no room on a GPU, ValueError where this one has none on the CPU, and on wrong
        tensors.
        """
        out: Tensor = decode(q, k_new, v_new, *self._cache(), *self._constants())[0]
        return out

    def attend(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse) of q [batch, q_len, q_heads, head_dim], the last positions of each sequence, without appending.

        out is like q, lse float32 [batch, q_heads, q_len], natural logarithm. Raises as `forward` does.
        """
        out, lse = attend(q, *self._cache(), *self._constants())
        return out, lse

    def _cache(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:
        return self.packed, self.k_residual, self.v_residual, self.lengths, self.block_table, self.workspace, self.sinks

    def _constants(self) -> tuple[str, float, int, int, float, int | None]:
        return self.module, self.scale, self.max_len, self.most_q, self.softcap, self.window


# --- how an operator runs --------------------------------------------------------------------------------------------------


def _run(
    q: Tensor,
    new: tuple[Tensor, Tensor] | None,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    workspace: Tensor,
    sinks: Tensor | None,
    path: str,
    scale: float,
    max_len: int,
    most_q: int,
    softcap: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Both operators: `decode` where there is `new` K and V, else `attend`. `tensors` are the cache's, without the reserved one."""
    for name, x in zip(_NAMES, (q, *(new or (None, None)), *tensors, workspace, sinks), strict=True):
        if x is not None:
            checks.plain(name, x)
    if path not in _launches:
        _launches[path] = Executable(load(Path(path)), most_q), None
    launch, arguments = _launches[path]
    lengths, (order, flag) = tensors[3], _order_of(tensors[0])
    with order.lock:
        flag.check()
        if q.is_cuda:
            order.follow(q.device.index)
        try:
            out, lse = _outputs(q)
            batch, q_len = q.shape[:2]
            if q_len > most_q:
                if arguments is not None:
                    arguments.named(q, new, None, len(lengths), lengths.device)  # torch's kernels would take another batch
                call = extend.Call(q, new, out, lse, sinks, scale, max_len, max_len, flag.address, softcap, window)
                extend.run(launch.module, (*tensors, None), call)
                return out, lse
            plan = None  # of one sequence there is none, and the CPU's modules make their own
            if batch > 1 and q.is_cuda:
                plan = launch.plan(lengths, q_len, max_len, flag.address, append=new is not None, skip_empty=False)
            given = (out, lse, sinks, workspace, plan, scale, max_len, max_len, flag.address)
            launch.run(q, new, (*tensors, None), *given, advance=True)
        except Exception:
            if arguments is not None:
                arguments.named(q, new, None, len(lengths), lengths.device)  # which argument the module refused
            raise
    return out, lse


def _order_of(packed: Tensor) -> tuple[CallOrder, OverflowFlag]:
    """The order of all calls over the cache with these blocks, of operators and of kernels, and its flag of a step without room."""
    place = packed.data_ptr()
    found = _sequences.get(place)
    if found is not None:
        return found.call_order, found.overflow
    if place not in _unbound:
        _unbound[place] = CallOrder(), OverflowFlag(packed.is_cuda)
    return _unbound[place]


def _outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    """Empty out, like q, and lse, float32 [batch, q_heads, q_len]."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return out, torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32, device=q.device)
