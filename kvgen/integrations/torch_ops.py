"""`kvgen::attend` and `kvgen::decode`: kernels as torch operators, so that torch.compile takes them whole.

An operator names its module by the path of the compiled library.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from kvgen.errors import KvgenError, UnsupportedError
from kvgen.runtime import checks, extend
from kvgen.runtime.calls import SHARED, Calls
from kvgen.runtime.executable import Arguments, Executable, New
from kvgen.runtime.kvcache import KVCache, Tensors
from kvgen.runtime.sequences import CallOrder, OverflowFlag, Sequences

_launches: dict[str, tuple[Executable, Arguments]] = {}
"""The launches of this process's Attention modules, and the checks of their calls, by the path of the compiled library."""
_sequences: WeakValueDictionary[int, Sequences] = WeakValueDictionary()
"""Of the caches of these modules, by the address of their blocks."""
_NAMES = ("q", "k_new", "v_new", "packed", "k_residual", "v_residual", "lengths", "block_table", "workspace", "sinks")


@torch.library.custom_op("kvgen::attend", mutates_args=("workspace",))
def attend(
    q: Tensor, packed: Tensor, k_residual: Tensor, v_residual: Tensor, lengths: Tensor, block_table: Tensor | None, workspace: Tensor,
    sinks: Tensor | None, module: str, scale: float, max_len: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of q over a cache's tensors; shapes and types are those of `docs/abi.md`. Nothing is appended."""
    return _run(q, None, (packed, k_residual, v_residual, lengths, block_table, None, None), workspace, sinks, module, scale, max_len)


@torch.library.custom_op("kvgen::decode", mutates_args=("packed", "k_residual", "v_residual", "lengths", "workspace"))
def decode(
    q: Tensor, k_new: Tensor, v_new: Tensor, packed: Tensor, k_residual: Tensor, v_residual: Tensor, lengths: Tensor,
    block_table: Tensor | None, workspace: Tensor, sinks: Tensor | None, module: str, scale: float, max_len: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Append k_new and v_new to a cache's tensors; (out, lse) of q over them. `lengths` grow in place."""
    return _run(
        q, (k_new, v_new), (packed, k_residual, v_residual, lengths, block_table, None, None), workspace, sinks, module, scale, max_len
    )


@attend.register_fake
@decode.register_fake
def _outputs(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    """Empty out, like q, and lse, float32 [batch, q_heads, q_len]."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return out, torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32, device=q.device)


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

        Raises CacheMismatch if the cache has another layout than the kernel, TypeError if one of them is something else, UnsupportedError
        for a format with static scales, ValueError on wrong sinks or a scale that is not finite, and where the cache shares its lengths
        with others: every Attention would advance them.
        """
        super().__init__()
        if not isinstance(kernel, Calls):
            raise TypeError(f"kernel must be a kernel, which get_kernel returns, not {type(kernel).__name__}")
        checks.eager()
        launch = kernel.launch_at_capacity(cache, checks.whole("q_len", q_len, 1))
        sequences = cache.sequences
        if sequences.shared:
            raise ValueError(SHARED.format(call="Attention", way="a cache of its own for each Attention"))
        arguments = Arguments(kernel.spec, kernel.layout)
        arguments.sinks(sinks, cache)
        if cache.scales is not None:
            raise UnsupportedError("an Attention", "the operators take no static scales (key.scale, value.scale)", is_backend=False)
        tensors = (cache.packed, cache.k_residual, cache.v_residual, cache.lengths, cache.block_table, launch.workspace(cache), sinks)
        for name, tensor in zip(_NAMES[3:], tensors, strict=True):
            self.register_buffer(name, tensor, persistent=False)
        self.module = f"{launch.module.path}#{kernel.spec.attention.q_len}"
        self.scale = kernel.scale if scale is None else checks.finite_scale(scale, kernel.spec.attention.softcap)
        self.max_len = cache.max_len
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
        out: Tensor = decode(q, k_new, v_new, *self._rest())[0]
        return out

    def attend(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse) of q [batch, q_len, q_heads, head_dim], the last positions of each sequence, without appending.

        out is like q, lse float32 [batch, q_heads, q_len], natural logarithm. Raises as `forward` does.
        """
        out, lse = attend(q, *self._rest())
        return out, lse

    def _rest(self) -> tuple[object, ...]:
        """An operator's arguments from `packed` on."""
        return *(getattr(self, name) for name in _NAMES[3:]), self.module, self.scale, self.max_len


# --- how an operator runs --------------------------------------------------------------------------------------------------


def _run(
    q: Tensor, new: New | None, tensors: Tensors, workspace: Tensor, sinks: Tensor | None, path: str, scale: float, max_len: int
) -> tuple[Tensor, Tensor]:
    """Both operators: `decode` where there is `new` K and V, else `attend`. Raises KvgenError for a module that no Attention has."""
    for name, x in zip(_NAMES, (q, *(new or (None, None)), *tensors[:5], workspace, sinks), strict=True):
        if x is not None:
            checks.plain(name, x)
    if path not in _launches:
        raise KvgenError(f"no Attention of this process has the module {path}: a compiled graph runs where its Attention was made")
    (launch, arguments), lengths, (order, flag) = _launches[path], tensors[3], _order_of(tensors[0])
    attention = arguments.spec.attention
    with order.lock:
        flag.check()
        if q.is_cuda:
            order.follow(q.device.index)
        try:
            out, lse = _outputs(q)
            batch, q_len = q.shape[:2]
            if q_len > attention.q_len:
                arguments.named(q, new, None, len(lengths), lengths.device)  # torch's kernels would take another batch
                call = extend.Call(q, new, out, lse, sinks, scale, max_len, max_len, flag.address, attention.softcap, attention.window)
                extend.run(launch.module, tensors, call)
                return out, lse
            plan = None  # of one sequence there is none, and the CPU's modules make their own
            if batch > 1 and q.is_cuda:
                plan = launch.plan(lengths, q_len, max_len, flag.address, append=new is not None, skip_empty=False)
            launch.run(q, new, tensors, (out, lse, sinks, workspace, plan, scale, max_len), max_len, flag.address, advance=True)
        except Exception:
            arguments.named(q, new, None, len(lengths), lengths.device)  # which argument the module refused
            raise
    return out, lse


def _order_of(packed: Tensor) -> tuple[CallOrder, OverflowFlag]:
    """The order of all calls over the cache with these blocks, of operators and of kernels, and its flag of a step without room."""
    found = _sequences.get(packed.data_ptr())
    return (found.call_order, found.overflow) if found is not None else _of_copies(packed.data_ptr(), packed.is_cuda)


@cache
def _of_copies(place: int, gpu: bool) -> tuple[CallOrder, OverflowFlag]:  # noqa: ARG001 – the key
    """Of a cache at an address that torch or `copy` made of an Attention's."""
    return CallOrder(), OverflowFlag(gpu)
