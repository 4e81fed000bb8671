"""Checks of the arguments of calls: cheap comparisons first, and one sentence as the message if one fails."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvgen.errors import ToolchainMissing

INT32_MAX = 2**31 - 1
FLOAT32_MAX = (2 - 2**-23) * 2.0**127
LOG2_E = 1.4426950408889634


def eager() -> None:
    """Raises ValueError where torch records calls, or where what it allocates has no memory: a module's call would be lost, or crash."""
    proxy = torch._C._TorchDispatchModeKey.PROXY
    recorded = (
        torch._C._get_tracing_state() is not None
        or torch._C._get_dispatch_mode(proxy) is not None
        or torch._ops._get_dispatch_mode_pre_dispatch(proxy) is not None  # type: ignore[no-untyped-call]
    )
    modes = torch._C._len_torch_dispatch_stack() > 0 or torch._C._functorch.maybe_current_level() is not None
    if recorded or (modes and not _in_memory(torch.zeros(1, device="cpu"))):  # torch.zeros takes longer than all else here
        raise ValueError(
            "kernels are called here while torch traces, fakes or transforms (torch.jit.trace, make_fx, FakeTensorMode, torch.func), which "
            "sees no kernel: use kvgen.integrations.torch_ops.Attention, whose operators torch takes whole"
        )


def _in_memory(x: Tensor) -> bool:
    """Whether the elements of a strided tensor lie at its address. `Arguments.call` repeats this inline."""
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


def contiguous(name: str, x: Tensor) -> None:
    """Raises ValueError unless the elements of a tensor lie side by side."""
    if not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous, not of strides {list(x.stride())}")


def matrix(call: str, **given: Tensor | None) -> None:
    """The tensors of an operation on a matrix by their names; the first is the matrix. A module checks shapes, types and devices."""
    eager()
    for i, (name, x) in enumerate(given.items()):
        if x is None and i:
            continue
        plain(f"{call}: {name}", x)
        if i == 0 and x is not None and x.ndim != 2:
            raise ValueError(f"{call}: {name} must be a matrix [tokens, channels], and has {x.ndim} dimensions")


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


def finite_scale(value: Any, softcap: float) -> float:
    """`value` as a float whose products the kernels' float32 holds: any sign, 0 too. Raises TypeError or ValueError."""
    if isinstance(value, bool | str | bytes | Tensor) or not hasattr(value, "__float__"):
        raise TypeError(f"scale must be a float, not {value!r}")
    if not abs(value) <= most_scale(softcap):  # NaN, infinities and large integers too
        raise ValueError(f"scale ({value!r:.20}) must be finite, and a number that float32 holds")
    return float(value)


def most_scale(softcap: float) -> float:
    """Kernels multiply a scale by log2 e, or divide it by the soft cap, in float32."""
    return FLOAT32_MAX * min(1 / LOG2_E, softcap or 1.0)


def change(
    tokens: Any, batch: int, room: int, meaning: str, device: torch.device, most: int = INT32_MAX
) -> tuple[Tensor | None, int, list[int] | None]:
    """The arguments of a change of lengths, and what the host knows of them: `numbers` of at most `room`, one for each sequence, or one
    number of at most `most` for every sequence that has tokens.
    """
    if not isinstance(tokens, Tensor) and hasattr(tokens, "__index__") and not getattr(tokens, "shape", ()):  # of Python or numpy
        number = whole("tokens", tokens, 0, most)
        return None, number, [number]
    counts, known = numbers("tokens", tokens, batch, room, meaning, device)
    return counts, 0, known


def numbers(
    name: str, given: Any, count: int | None, most: int, meaning: str, device: torch.device, dtype: torch.dtype = torch.int32
) -> tuple[Tensor, list[int] | None]:
    """Whole numbers, `count` of them, as a tensor of one dimension on the device, and on the host.

    Those on the host are checked to lie in 0..most, which is `meaning`. Those on a GPU are not looked at, and the host does not know them.
    Raises TypeError for masks, floats and what are no numbers, ValueError for others.
    """
    eager()
    if isinstance(given, Tensor):
        plain(name, given)
    try:
        found = given if isinstance(given, Tensor) else torch.as_tensor(given, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be a tensor or a sequence of whole numbers, not {type(given).__name__}: {error}") from None
    kind = str(found.dtype).removeprefix("torch.")
    if not kind.startswith(("int", "uint")) and (found.numel() or isinstance(given, Tensor)):  # an empty list is float32
        raise TypeError(f"{name} must be whole numbers, not {kind}")
    if found.dim() != 1 or (count is not None and len(found) != count):
        raise ValueError(f"{name} must have shape [{'n' if count is None else count}], not {list(found.shape)}")
    if found.device.type != "cpu":
        if found.device != device:
            raise ValueError(f"{name} is on {found.device}, and the cache on {device}")
        if found.dtype not in (torch.int32, dtype):  # larger numbers would be cut without a word
            raise TypeError(f"{name} must be int32 on a GPU, not {kind}")
        return found.to(dtype), None
    known: list[int] = found.to(torch.int64).tolist()
    if known and not 0 <= min(known) <= max(known) <= most:
        raise ValueError(f"{name} must lie in 0..{most}, {meaning}, not in {min(known)}..{max(known)}")
    return torch.tensor(known, dtype=dtype, device=device), known


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
