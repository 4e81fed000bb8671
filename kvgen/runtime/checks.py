"""Checks of the arguments of calls: cheap comparisons first, and one sentence as the message if one fails."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvgen.errors import CacheMismatch, ToolchainMissing, UnsupportedError
from kvgen.format.dtypes import torch_dtype
from kvgen.format.window import cache_id, window_places
from kvgen.lower.modifier import extend_refusal

if TYPE_CHECKING:
    from kvgen.format.layout import PackedLayout
    from kvgen.runtime.extend import Call
    from kvgen.runtime.kvcache import KVCache
    from kvgen.spec import KernelSpec

INT32_MAX = 2**31 - 1
FLOAT32_MAX = (2 - 2**-23) * 2.0**127
LOG2_E = 1.4426950408889634
New = tuple[Tensor, Tensor]
"""K and V to be appended, [batch, tokens, kv_heads, head_dim]."""
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_CACHE = ("blocks", "K residual", "V residual", "lengths", "block table", "residual slots")


class Arguments:
    """Checks tensors against a spec and a layout; each check raises TypeError, ValueError or CacheMismatch in one sentence.

    `query`, `new` and `outputs` are in every decode step. They check what a module cannot: that an address holds what torch would read.
    """

    def __init__(self, spec: KernelSpec, layout: PackedLayout) -> None:
        attention = spec.attention
        self._spec = spec
        self.dtype = torch_dtype(attention.dtype)
        self.scale = 1.0 / math.sqrt(attention.head_dim)
        self.sinks_needed = attention.sinks
        self._layout_id = cache_id(spec, layout)
        self._q_tail = (attention.q_heads, attention.head_dim)
        self._kv_tail = (attention.kv_heads, attention.head_dim)
        self._most_scale = _most_scale(attention.softcap)

    def query(self, q: Tensor, cache: KVCache) -> int:
        """The query tokens of a call, after checking query and cache. A module checks dtype and device."""
        try:
            shape, sequences = q.shape, cache.sequences
            right = type(q) is Tensor and q.data_ptr() and not q.is_neg()
            right = right and len(shape) == 4 and type(shape[1]) is int  # torch.jit.trace makes a tensor of it
            right = right and shape[0] == sequences.batch and shape[2:] == self._q_tail and cache.layout_id == self._layout_id
        except (AttributeError, RuntimeError):  # what is no tensor, and tensors without a shape or an address
            right, shape = False, torch.Size()
        if not right:
            self.cache(cache)
            eager()
            shape = q.shape if isinstance(q, Tensor) and not q.is_nested else shape
            tensor("q", q, (cache.batch, shape[1] if len(shape) == 4 else 1, *self._q_tail), self.dtype, cache.device)
        return shape[1]

    def new(self, new: New, tokens: int, cache: KVCache) -> None:
        """K and V of a call with as many query tokens: their memory. A module checks shapes, dtypes and devices."""
        k, v = new
        try:
            if type(k) is type(v) is Tensor and k.data_ptr() and v.data_ptr() and not (k.is_neg() or v.is_neg()):
                return
        except RuntimeError:  # a tensor without an address
            pass
        self._new(new, tokens, cache.batch, cache.device)

    def outputs(
        self, q: Tensor, cache: KVCache, out: Tensor | None, lse: Tensor | bool | None, scale: float | None
    ) -> tuple[Tensor, Tensor | None, float]:
        """The outputs of a call, checked or allocated, and its scale. The module checks the rest of `out`.

        What torch allocates, and the modes of torch, show whether it computes or records.
        """
        given = out is not None
        if out is None:
            out = torch.empty(q.shape, dtype=self.dtype, device=cache.device)
        try:
            right = type(out) is Tensor and out.data_ptr() and not (_dispatch_modes() or _function_modes())
            right = right and not (given and (out.requires_grad or out.is_neg()))
        except (AttributeError, RuntimeError):
            right = False
        if not right:
            eager()
            if given:
                output("out", out, q.shape, self.dtype, q.device)
        if scale is None:
            scale = self.scale
        elif type(scale) is not float or not -self._most_scale <= scale <= self._most_scale:
            scale = finite_scale(scale, self._spec.attention.softcap)
        return out, None if lse is None else self._lse(lse, q), scale

    def cache(self, cache: Any) -> None:
        """Raises TypeError for another type, CacheMismatch for a cache of another layout."""
        from kvgen.runtime.kvcache import KVCache

        if not isinstance(cache, KVCache):
            raise TypeError(f"cache must be a KVCache, which new_cache makes, not {type(cache).__name__}")
        if cache.layout_id != self._layout_id:
            raise CacheMismatch(
                f"the cache is packed in layout {cache.layout_id}, and this kernel reads layout {self._layout_id}: make the cache with "
                "this kernel's new_cache"
            )

    def filling(self, cache: KVCache, k: Tensor, v: Tensor, *, finite: bool) -> int:
        """The tokens of a `prefill`. `finite` waits for the device."""
        plain("k", k)
        tokens = k.shape[1] if k.dim() == 4 else 0
        for name, x in (("k", k), ("v", v)):
            tensor(name, x, (cache.batch, tokens, *self._kv_tail), self.dtype, cache.device)
        if finite and not bool(torch.isfinite(k).all() & torch.isfinite(v).all()):
            raise ValueError("k or v holds infinities or NaNs, which have no quantized form")
        return tokens

    def sinks(self, sinks: Tensor | None, cache: KVCache) -> None:
        """The learned sinks of a call, float32 [q_heads], given exactly where the spec has them."""
        if sinks is None and self.sinks_needed:
            raise ValueError("this format has learned sinks (attention.sinks): give sinks=, float32 [q_heads]")
        if sinks is None:
            return
        if not self.sinks_needed:
            raise ValueError("sinks= was given, and this format has no learned sinks (attention.sinks)")
        tensor("sinks", sinks, self._q_tail[:1], torch.float32, cache.device)
        if not sinks.is_contiguous():
            raise ValueError(f"sinks must be contiguous, not of strides {list(sinks.stride())}")

    def inputs(self, q: Tensor, new: New | None, batch: int, device: torch.device) -> None:
        """Query, K and V of a call over `batch` sequences: where no module checks them, and to name what a module refused."""
        plain("q", q)
        tokens = q.shape[1] if q.dim() == 4 else 1
        tensor("q", q, (batch, tokens, *self._q_tail), self.dtype, device)
        if new is not None:
            self._new(new, tokens, batch, device)

    def extend(self, call: Call, cache: KVCache) -> None:
        """A call with more query tokens than modules are compiled for. Raises UnsupportedError if the GPU cannot compute it, ValueError if
        an `attend` could see tokens whose places in a contiguous cache with a window later ones have taken.
        """
        if reason := extend_refusal(self._spec, gpu=call.q.is_cuda):
            raise UnsupportedError("extend attention", reason, is_backend=False)
        window, places = self._spec.attention.window, window_places(self._spec, cache.block_tokens)
        if call.new is None and window is not None and places:
            held = places * cache.block_tokens - self._spec.cache.rollback
            seen = min(call.bound, call.q.shape[1] + window - 1)
            if seen > held:
                raise ValueError(
                    f"attend with {call.q.shape[1]} query tokens sees {seen} tokens, and a contiguous cache with a window of {window} "
                    f"keeps the newest {held}: give new tokens to decode with their queries, or use a paged cache"
                )
        self.inputs(call.q, call.new, cache.batch, cache.device)
        output("out", call.out, call.q.shape, self.dtype, cache.device)
        if cache.gpu is not None:  # on the CPU the module checks this
            held_by_cache = ((f"the cache's {name}", x) for name, x in zip(_CACHE, cache.tensors, strict=True))
            read = [("q", call.q), *zip(("k_new", "v_new"), call.new or (), strict=False), *held_by_cache]
            _apart("out", call.out, [*read, ("lse", call.lse)])
            if call.lse is not None:
                _apart("lse", call.lse, read)

    def _new(self, new: New, tokens: int, batch: int, device: torch.device) -> None:
        for name, x in zip(("k_new", "v_new"), new, strict=True):
            tensor(name, x, (batch, tokens, *self._kv_tail), self.dtype, device)

    def _lse(self, lse: Tensor | bool, q: Tensor) -> Tensor | None:
        """The tensor that a caller's `lse` asks to fill."""
        if lse is False:
            return None
        shape = (q.shape[0], q.shape[2], q.shape[1])
        if lse is True:
            return torch.empty(shape, dtype=torch.float32, device=q.device)
        output("lse", lse, shape, torch.float32, q.device)
        if not lse.is_contiguous():
            raise ValueError(f"lse must be contiguous, not of strides {list(lse.stride())}")
        return lse


# --- tensors ---------------------------------------------------------------------------------------------------------------


def eager() -> None:
    """Raises ValueError where torch records calls, or where what it allocates has no memory: a module's call would be lost, or crash."""
    proxy = torch._C._TorchDispatchModeKey.PROXY
    recorded = (
        torch._C._get_tracing_state() is not None
        or torch._C._get_dispatch_mode(proxy) is not None
        or torch._ops._get_dispatch_mode_pre_dispatch(proxy) is not None  # type: ignore[no-untyped-call]
    )
    if recorded or not _in_memory(torch.zeros(1, device="cpu")):
        raise ValueError(
            "kernels are called here while torch traces, fakes or transforms (torch.jit.trace, make_fx, FakeTensorMode, torch.func), which "
            "sees no kernel: use kvgen.integrations.torch_ops.Attention, whose operators torch takes whole"
        )


def _in_memory(x: Tensor) -> bool:
    """Whether the elements of a strided tensor lie at its address. `Arguments` repeats this inline for calls of decode steps."""
    if type(x) is not Tensor and torch._C._dispatch_keys(x).has(torch._C.DispatchKey.Python):
        return False  # FakeTensor and other types whose elements Python code makes
    try:
        return x.data_ptr() != 0 or x.numel() == 0
    except RuntimeError:  # a tensor of torch.func, which wraps another one
        return False


def plain(name: str, x: Any) -> None:
    """Raises TypeError unless `x` is a torch tensor, ValueError unless a module that is given its address, shape and strides reads its
    elements there.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch tensor, not {type(x).__module__}.{type(x).__qualname__}")
    if x.is_nested or x.layout is not torch.strided or x.is_quantized:
        kind = "nested" if x.is_nested else "quantized" if x.is_quantized else str(x.layout).removeprefix("torch.").lstrip("_")
        raise ValueError(f"{name} must be a dense strided tensor, not a {kind} one")
    if not _in_memory(x):
        raise ValueError(
            f"{name} has no memory that a kernel could access: it is a fake, zero, functionalized or meta tensor, a wrapper "
            f"({type(x).__name__}), one inside torch.func, or its storage is empty"
        )
    if x.is_neg() or x.is_conj():
        raise ValueError(f"{name} is a view that negates or conjugates on reading: give {name.rpartition(' ')[2]}.resolve_neg() instead")


def tensor(name: str, x: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
    """Raises TypeError unless `x` is a torch tensor, ValueError unless it has this shape, dtype and device, and is `plain`."""
    if not isinstance(x, Tensor) or x.is_nested:  # a nested tensor has no shape
        plain(name, x)
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {list(shape)}, not {list(x.shape)}")
    if x.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, not {x.dtype}")
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}, and the cache on {device}")
    plain(name, x)


def output(name: str, x: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
    """`tensor`, and ValueError for a tensor that torch would differentiate through."""
    tensor(name, x, shape, dtype, device)
    if x.requires_grad:
        raise ValueError(f"{name} requires a gradient, and kernels have none: give {name}.detach() instead")


def matrix(call: str, **given: Tensor | None) -> None:
    """The tensors of an operation on a matrix by their names; the first is the matrix. A module checks shapes, types and devices."""
    eager()
    for i, (name, x) in enumerate(given.items()):
        if x is None and i:
            continue
        plain(f"{call}: {name}", x)
        if i == 0 and x is not None and x.ndim != 2:
            raise ValueError(f"{call}: {name} must be a matrix [tokens, channels], and has {x.ndim} dimensions")


def _apart(name: str, out: Tensor, others: Sequence[tuple[str, Tensor | None]]) -> None:
    """ValueError where `out` may share memory with itself or with one of `others`; for calls that no module checks."""
    if not out.is_contiguous() and torch._debug_has_internal_overlap(out) == 1:
        raise ValueError(f"{name} overlaps with itself")
    low, high = _span(out)
    for other_name, other in others:
        if other is not None and other.numel():
            begin, end = _span(other)
            if begin < high and low < end:
                raise ValueError(f"{name} overlaps with {other_name}")


def _span(x: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else -1
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


# --- numbers ---------------------------------------------------------------------------------------------------------------


def whole(name: str, value: Any, least: int, most: int = INT32_MAX) -> int:
    """`value` as an int in least..most. TypeError if it is not an integer (bools and floats are refused), ValueError if out of range."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {value!r} ({type(value).__name__})") from None
    if number < least:
        raise ValueError(f"{name} ({number}) must be at least {least}")
    if number > most:
        raise ValueError(f"{name} ({number}) must be at most {most}")
    return number


def is_whole(value: Any) -> bool:
    """Whether a value is one number, of Python or numpy, and not one for each sequence."""
    return not isinstance(value, Tensor) and hasattr(value, "__index__") and not getattr(value, "shape", ())


def finite_scale(value: Any, softcap: float) -> float:
    """`value` as a float whose products the kernels' float32 holds: any sign, 0 too."""
    if isinstance(value, bool | str | bytes | Tensor):
        raise TypeError(f"scale must be a float, not {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError):
        raise TypeError(f"scale must be a float, not {value!r}") from None
    if not math.isfinite(number):
        raise ValueError(f"scale ({number}) must be finite")
    if abs(number) > _most_scale(softcap):
        raise ValueError(f"scale ({number:g}) is beyond what float32 holds")
    return number


def _most_scale(softcap: float) -> float:
    """Kernels multiply a scale by log2 e, or divide it by the soft cap, in float32."""
    return FLOAT32_MAX * min(1 / LOG2_E, softcap or 1.0)


def lengths(name: str, given: Any, batch: int, tokens: int, meaning: str, device: torch.device) -> tuple[Tensor, int, bool]:
    """New tokens per sequence as int32 [batch] on the device, the most of them, and whether the host knows that they are equal.

    Those on the host are checked to lie in 0..tokens, which is `meaning`. Those on a GPU are not looked at, so they have to be int32
    already.
    """
    if given is None:
        return torch.full((batch,), tokens, dtype=torch.int32, device=device), tokens, True
    if isinstance(given, Tensor) and given.device.type != "cpu":
        tensor(name, given, (batch,), torch.int32, device)
        return given, tokens, False
    numbers = counts(name, given, batch, tokens, meaning)
    return torch.tensor(numbers, dtype=torch.int32, device=device), max(numbers), len(set(numbers)) == 1


def counts(name: str, given: Any, batch: int, most: int, meaning: str) -> list[int]:
    """Numbers on the host, one for each sequence, in 0..most, which is `meaning`. Raises TypeError or ValueError."""
    numbers = _host_numbers(name, given)
    if len(numbers) != batch:
        raise ValueError(f"{name} must have shape [{batch}], not [{len(numbers)}]")
    low, high = min(numbers), max(numbers)
    if low < 0 or high > most:
        raise ValueError(f"{name} must lie in 0..{most}, {meaning}, not in {low}..{high}")
    return numbers


def sequence_numbers(name: str, given: Any, batch: int, count: int | None = None) -> Tensor:
    """Numbers of sequences, `count` of them, as an integer tensor of one dimension; those on a GPU are not looked at.

    Raises TypeError or ValueError: of a mask or of floats, torch would take the values as numbers of sequences.
    """
    if not isinstance(given, Tensor) or given.device.type == "cpu":
        numbers = [whole(f"a number of {name}", n, 0, batch - 1) for n in _host_numbers(name, given)]
        found = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    elif given.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, not {str(given.dtype).removeprefix('torch.')}")
    else:
        found = given
    if found.dim() != 1 or (count is not None and len(found) != count):
        raise ValueError(f"{name} must have shape [{'n' if count is None else count}], not {list(found.shape)}")
    return found


def _host_numbers(name: str, given: Any) -> list[int]:
    if isinstance(given, Tensor) or hasattr(given, "__array__"):
        if isinstance(given, Tensor):
            plain(name, given)
        kind = str(given.dtype).removeprefix("torch.")
        if not kind.startswith(("int", "uint")):
            raise TypeError(f"{name} must be whole numbers, not {kind}")
        if len(given.shape) != 1:
            raise ValueError(f"{name} must have one dimension, not {list(given.shape)}")
        return list(given.tolist())
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | dict):
        raise TypeError(f"{name} must be a tensor or a sequence of whole numbers, not {type(given).__name__}")
    return [whole(f"{name}[{i}]", count, -INT32_MAX - 1, 2**63) for i, count in enumerate(given)]


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
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = where.index if where.index is not None else torch.cuda.current_device() if found else 0
    if index >= found:
        raise ToolchainMissing(f"device {where} is asked for, and torch {torch.__version__} finds {found} CUDA devices here")
    return torch.device("cuda", index)
