"""Checks of arguments; each error is one sentence."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from kvgen.errors import ToolchainMissing

INT32_MAX = 2**31 - 1
FLOAT32_MAX = (2 - 2**-23) * 2.0**127
LOG2_E = 1.4426950408889634


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


def recorded() -> bool:
    """Whether `torch.jit.trace` or `make_fx` records what torch computes: it would not record a module's call."""
    proxy = torch._C._TorchDispatchModeKey.PROXY
    return (
        torch._C._get_tracing_state() is not None
        or torch._C._get_dispatch_mode(proxy) is not None
        or torch._ops._get_dispatch_mode_pre_dispatch(proxy) is not None  # type: ignore[no-untyped-call]
    )


def eager() -> None:
    """Raises ValueError where torch records calls, or where what it allocates has no memory: a module's call would be lost, or crash."""
    if recorded() or not in_memory(torch.zeros(1, device="cpu")):
        raise ValueError(
            "kernels are called here while torch traces, fakes or transforms (torch.jit.trace, make_fx, FakeTensorMode, torch.func), which "
            "sees no kernel: use kvgen.integrations.torch_ops.Attention, whose operators torch takes whole"
        )


def in_memory(x: torch.Tensor) -> bool:
    """Whether the elements of a strided tensor lie at its address. `Arguments` repeats this inline for calls of decode steps."""
    if type(x) is not torch.Tensor and torch._C._dispatch_keys(x).has(torch._C.DispatchKey.Python):
        return False  # FakeTensor and other types whose elements Python code makes
    try:
        return x.data_ptr() != 0 or x.numel() == 0
    except RuntimeError:  # a tensor of torch.func, which wraps another one
        return False


def plain(name: str, x: Any) -> None:
    """Raises TypeError unless `x` is a torch tensor, ValueError unless a module that is given its address, shape and strides reads its
    elements there.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch tensor, not {type(x).__module__}.{type(x).__qualname__}")
    if x.is_nested or x.layout is not torch.strided or x.is_quantized:
        kind = "nested" if x.is_nested else "quantized" if x.is_quantized else str(x.layout).removeprefix("torch.").lstrip("_")
        raise ValueError(f"{name} must be a dense strided tensor, not a {kind} one")
    if not in_memory(x):
        raise ValueError(
            f"{name} has no memory that a kernel could access: it is a fake, zero, functionalized or meta tensor, a wrapper "
            f"({type(x).__name__}), one inside torch.func, or its storage is empty"
        )
    if x.is_neg() or x.is_conj():
        raise ValueError(f"{name} is a view that negates or conjugates on reading: give {name.rpartition(' ')[2]}.resolve_neg() instead")


def tensor(name: str, x: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
    """Raises TypeError unless `x` is a torch tensor, ValueError unless it has this shape, dtype and device, and is `plain`."""
    if not isinstance(x, torch.Tensor) or x.is_nested:  # a nested tensor has no shape
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


def apart(name: str, out: torch.Tensor, others: Sequence[tuple[str, torch.Tensor | None]]) -> None:
    """ValueError where `out` may share memory with itself or with one of `others`; for calls that no module checks."""
    if not out.is_contiguous() and torch._debug_has_internal_overlap(out) == 1:
        raise ValueError(f"{name} overlaps with itself")
    low, high = _span(out)
    for other_name, other in others:
        if other is None or other.numel() == 0:
            continue
        begin, end = _span(other)
        if begin < high and low < end:
            raise ValueError(f"{name} overlaps with {other_name}")


def _span(x: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else -1
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def most_scale(softcap: float) -> float:
    """The largest scale whose products the kernels' float32 holds: they multiply it by log2 e, or divide it by the soft cap."""
    return FLOAT32_MAX * min(1 / LOG2_E, softcap or 1.0)


def scale(value: Any, softcap: float) -> float:
    """`value` as a float whose products the kernels' float32 holds: any sign, 0 too."""
    if isinstance(value, bool | str | bytes | torch.Tensor):
        raise TypeError(f"scale must be a float, not {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError):
        raise TypeError(f"scale must be a float, not {value!r}") from None
    if not math.isfinite(number):
        raise ValueError(f"scale ({number}) must be finite")
    if abs(number) > most_scale(softcap):
        raise ValueError(f"scale ({number:g}) is beyond what float32 holds")
    return number


def is_whole(value: Any) -> bool:
    """Whether a value is one number, of Python or numpy, and not one for each sequence."""
    return not isinstance(value, torch.Tensor) and hasattr(value, "__index__") and not getattr(value, "shape", ())


def indices(name: str, given: torch.Tensor) -> None:
    """TypeError unless a tensor holds whole numbers: of a mask or of floats, torch would take the values as numbers of sequences."""
    if given.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, not {str(given.dtype).removeprefix('torch.')}")


def rows(name: str, given: Any, batch: int) -> torch.Tensor:
    """Numbers of sequences as a tensor of one dimension. Raises TypeError or ValueError; those on a GPU are not looked at."""
    if isinstance(given, torch.Tensor):
        plain(name, given)
        indices(name, given)
        if given.dim() != 1:
            raise ValueError(f"{name} must have one dimension, not {list(given.shape)}")
        if given.device.type != "cpu":
            return given
        given = given.tolist()
    elif not isinstance(given, Iterable) or isinstance(given, str | bytes):
        raise TypeError(f"{name} must be a tensor or a sequence of whole numbers, not {type(given).__name__}")
    return torch.tensor([whole(f"a number of {name}", row, 0, batch - 1) for row in given], dtype=torch.int64, device="cpu")


def lengths(name: str, given: Any, batch: int, tokens: int, meaning: str, device: torch.device) -> tuple[torch.Tensor, int, bool]:
    """New tokens per sequence as int32 [batch] on the device, the most of them, and whether the host knows that they are equal.

    Those on the host are checked to lie in 0..tokens, which is `meaning`. Those on a GPU are not looked at, so they have to be int32
    already.
    """
    if given is None:
        return torch.full((batch,), tokens, dtype=torch.int32, device=device), tokens, True
    if isinstance(given, torch.Tensor) and given.device.type != "cpu":
        tensor(name, given, (batch,), torch.int32, device)
        return given, tokens, False
    numbers = counts(name, given, batch, tokens, meaning)
    low, high = min(numbers), max(numbers)
    return torch.tensor(numbers, dtype=torch.int32, device=device), high, low == high


def counts(name: str, given: Any, batch: int, most: int, meaning: str) -> list[int]:
    """Numbers on the host, one for each sequence, in 0..most, which is `meaning`. Raises TypeError or ValueError."""
    numbers = _host_numbers(name, given)
    if len(numbers) != batch:
        raise ValueError(f"{name} must have shape [{batch}], not [{len(numbers)}]")
    low, high = min(numbers), max(numbers)
    if low < 0 or high > most:
        raise ValueError(f"{name} must lie in 0..{most}, {meaning}, not in {low}..{high}")
    return numbers


def _host_numbers(name: str, given: Any) -> list[int]:
    if isinstance(given, torch.Tensor) or hasattr(given, "__array__"):
        if isinstance(given, torch.Tensor):
            plain(name, given)
        kind = str(given.dtype).removeprefix("torch.")
        if not kind.startswith(("int", "uint")):
            raise TypeError(f"{name} must be whole numbers, not {kind}")
        if len(given.shape) != 1:
            raise ValueError(f"{name} must have one dimension, not {list(given.shape)}")
        return list(given.tolist())
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise TypeError(f"{name} must be a tensor or a sequence of whole numbers, not {type(given).__name__}")
    return [whole(f"{name}[{i}]", count, -INT32_MAX - 1, 2**63) for i, count in enumerate(given)]
