"""Quantized weights out of checkpoints: tensors of GPTQ, AWQ and compressed-tensors as codes, scales and zeros, bit for bit.

All of them mean W[n, k] = scale[n, k / group] * (code[n, k] - zero[n, k / group]). They differ in the axis along which codes are packed
into words of 32 bits, in the order within a word, and in what stands for zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from kvgen.errors import UnsupportedError, host_errors
from kvgen.extras import require
from kvgen.format.weights import middle
from kvgen.spec.layers import read_config

GROUPS = (64, 128)
"""Channels that share a scale in kvgen's kernels, where a whole row does not."""
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of an AWQ word that holds its n-th column."""
_SUFFIXES = {"gptq": "qweight", "awq": "qweight", "compressed-tensors": "weight_packed"}


@dataclass(frozen=True)
class Weight:
    """A quantized matrix W[n, k] = scales * (codes - zeros) of a linear layer."""

    bits: int
    codes: Tensor
    """uint8 [n, k], 0 .. 15 or 0 .. 255, one in a byte."""
    scales: Tensor
    """[n, groups], of the checkpoint's type."""
    zeros: Tensor | None
    """uint8 [n, groups]; None where all of them are the middle, 8 or 128."""

    @property
    def group(self) -> int | Literal["row"]:
        """Channels that share a scale."""
        return "row" if self.scales.shape[1] == 1 else self.codes.shape[1] // self.scales.shape[1]

    def in_groups(self, group: int) -> Weight:
        """The same matrix with the scales of larger groups, or of a row, repeated. Raises ValueError unless `group` divides them."""
        times, rest = divmod(self.codes.shape[1] // self.scales.shape[1], group)
        if rest or not times:
            raise ValueError(f"groups of {self.codes.shape[1] // self.scales.shape[1]} channels are not made of groups of {group}")
        zeros = None if self.zeros is None else self.zeros.repeat_interleave(times, 1)
        return replace(self, scales=self.scales.repeat_interleave(times, 1), zeros=zeros)

    def with_zeros(self) -> Weight:
        """The same matrix with zeros that are written out."""
        if self.zeros is not None:
            return self
        return replace(self, zeros=torch.full(self.scales.shape, middle(self.bits), dtype=torch.uint8, device=self.codes.device))


def kernel_group(name: str, group: int | Literal["row"]) -> int | Literal["row"]:
    """The groups of kernels for a layer with groups of so many channels: larger ones are repeated. Raises UnsupportedError for others."""
    if group == "row":
        return group
    for mine in reversed(GROUPS):
        if group % mine == 0:
            return mine
    raise UnsupportedError(name, f"groups of {group} channels; kvgen's kernels take multiples of 64, or a row", is_backend=False)


def in_kernel_groups(name: str, weight: Weight) -> Weight:
    """The weight in groups that kernels have. Raises UnsupportedError where there are none."""
    group = kernel_group(name, weight.group)
    return weight if group in ("row", weight.group) else weight.in_groups(int(group))


def gptq(qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None = None, *, v2: bool = False) -> Weight:
    """Of GPTQ: qweight int32 [k / per word, n], qzeros int32 [groups, n / per word], scales [groups, n], g_idx [k] the groups of channels.

    Version 1 of the format stores zeros less one, modulo 2^bits; `v2` stores them as they are. Raises UnsupportedError where channels
    are in another order than groups (desc_act with `g_idx`) and for other bits than 4 and 8, ValueError for shapes that disagree.
    """
    groups, n = scales.shape
    bits = _bits("qzeros", 32 * qzeros.shape[1], n)
    codes = _unpacked(qweight, bits, 0).T
    k = codes.shape[1]
    _agree("qweight", codes.shape[0] == n and k % groups == 0, qweight, f"scales {list(scales.shape)} of {bits} bits")
    _agree("qzeros", qzeros.shape[0] == groups, qzeros, f"scales {list(scales.shape)}")
    if g_idx is not None and g_idx.numel():
        _in_order("g_idx", g_idx, k, k // groups)
    zeros = _unpacked(qzeros, bits, 1)
    zeros = zeros if v2 else (zeros.int() + 1).bitwise_and_((1 << bits) - 1).to(torch.uint8)
    return _weight(bits, codes, scales.T, zeros.T)


def awq(qweight: Tensor, qzeros: Tensor | None, scales: Tensor) -> Weight:
    """Of AWQ's GEMM layout: qweight int32 [k, n / 8], qzeros int32 [groups, n / 8], scales [groups, n].

    A word holds 8 columns, its nibbles those of 0, 2, 4, 6, 1, 3, 5, 7. Raises ValueError for shapes that disagree: AWQ's other layouts
    (GEMV, Marlin) have other ones.
    """
    groups, n = scales.shape
    k = qweight.shape[0]
    _agree("qweight", 8 * qweight.shape[1] == n and k % groups == 0, qweight, f"scales {list(scales.shape)}")
    order = torch.tensor(AWQ_ORDER, device=qweight.device)

    def columns(words: Tensor) -> Tensor:
        return _unpacked(words, 4, 1).view(len(words), -1, 8)[..., order].flatten(1)

    if qzeros is not None:
        _agree("qzeros", tuple(qzeros.shape) == (groups, n // 8), qzeros, f"scales {list(scales.shape)}")
    return _weight(4, columns(qweight).T, scales.T, None if qzeros is None else columns(qzeros).T)


def compressed(
    weight_packed: Tensor,
    weight_scale: Tensor,
    weight_shape: Tensor,
    weight_zero_point: Tensor | None = None,
    weight_g_idx: Tensor | None = None,
) -> Weight:
    """Of compressed-tensors' pack-quantized format: weight_packed int32 [n, k / per word], weight_scale [n, groups], (n, k).

    weight_zero_point is int32 [n / per word, groups], packed along n, or int8 [n, groups]. Codes and zeros are signed before they are
    packed: both are offset by 2^(bits - 1). Raises as `gptq`.
    """
    n, k = (int(size) for size in weight_shape.tolist())
    bits = _bits("weight_packed", 32 * weight_packed.shape[1], k)
    codes = _unpacked(weight_packed, bits, 1)
    _agree("weight_packed", codes.shape[0] == n, weight_packed, f"weight_shape {[n, k]}")
    scales = weight_scale.view(n, -1) if weight_scale.numel() % n == 0 else weight_scale
    _agree("weight_scale", scales.shape[0] == n and k % scales.shape[1] == 0, weight_scale, f"weight_shape {[n, k]}")
    groups = scales.shape[1]
    if weight_g_idx is not None and weight_g_idx.numel() and not bool((weight_g_idx == -1).all()):  # -1: made, and never filled
        _in_order("weight_g_idx", weight_g_idx, k, k // groups)
    zeros = weight_zero_point
    if zeros is not None and zeros.dtype == torch.int32:
        zeros = _unpacked(zeros, bits, 0)[:n]  # the last word may hold fewer rows
    elif zeros is not None:
        zeros = (zeros.int() + middle(bits)).to(torch.uint8).view(n, -1)
    if zeros is not None:
        _agree("weight_zero_point", zeros.shape == scales.shape, zeros, f"weight_scale {list(scales.shape)}")
    return _weight(bits, codes, scales, zeros)


def _weight(bits: int, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> Weight:
    if zeros is not None and bool((zeros == middle(bits)).all()):
        zeros = None
    return Weight(bits, codes.contiguous(), scales.contiguous(), None if zeros is None else zeros.contiguous())


def _unpacked(words: Tensor, bits: int, axis: int) -> Tensor:
    """uint8 codes of int32 words along an axis of a matrix; the lowest bits of a word are the first code."""
    if words.dtype != torch.int32 or words.dim() != 2:
        raise ValueError(f"packed codes are int32 matrices, not {words.dtype} {list(words.shape)}")
    whole = words.T.contiguous() if axis == 0 else words.contiguous()
    codes = whole.view(torch.uint8)  # of a little-endian word: the first byte has the lowest bits
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    return codes.T if axis == 0 else codes


def _bits(name: str, bits: int, elements: int) -> int:
    found, rest = divmod(bits, elements)
    if rest or found not in (4, 8):
        raise UnsupportedError("weights", f"{name} has {bits / elements:.3g} bits for an element; kvgen takes 4 and 8", is_backend=False)
    return found


def _agree(name: str, right: bool, x: Tensor, other: str) -> None:
    if not right:
        raise ValueError(f"{name} of shape {list(x.shape)} does not fit {other}")


def _in_order(name: str, g_idx: Tensor, k: int, group: int) -> None:
    _agree(name, g_idx.shape == (k,), g_idx, f"{k} channels")
    if not torch.equal(g_idx.long(), torch.arange(k, device=g_idx.device) // group):
        reason = f"channels are not in the order of their groups ({name}: act-order, desc_act), and kvgen's kernels read them in order"
        raise UnsupportedError("weights", reason, is_backend=False)


# --- a folder of files -----------------------------------------------------------------------------------------------------


class Checkpoint:
    """A folder with `config.json` and `*.safetensors`, whose tensors are read when they are asked for."""

    def __init__(self, folder: Path | str) -> None:
        """Raises UnsupportedError for a quantization that kvgen does not read, ValueError for what are no safetensors, or none."""
        require("reading a checkpoint", "safetensors")
        self.folder = Path(folder)
        self.config = dict(read_config(self.folder))
        self.method, self.v2 = method_of(self.config.get("quantization_config"))
        self._files: dict[str, Path] = {}
        for file in sorted(self.folder.glob("*.safetensors")):
            with opened(file) as tensors:
                self._files.update(dict.fromkeys(tensors.keys(), file))
        if not self._files:
            raise ValueError(f"{self.folder} holds no *.safetensors")

    @property
    def quantized(self) -> tuple[str, ...]:
        """The names of quantized layers, without `.qweight` or `.weight_packed`."""
        suffix = "." + _SUFFIXES.get(self.method or "", "")
        return tuple(name.removesuffix(suffix) for name in self._files if self.method and name.endswith(suffix))

    @property
    def plain(self) -> tuple[str, ...]:
        """The names of all tensors that belong to no quantized layer's codes."""
        parts = (*_GPTQ, *_AWQ) if self.method != "compressed-tensors" else _COMPRESSED
        taken = {f"{name}.{part}" for name in self.quantized for part in parts}
        return tuple(name for name in self._files if name not in taken)

    def tensor(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """A tensor by its name. Raises KeyError."""
        with opened(self._files[name], device) as tensors:
            found: Tensor = tensors.get_tensor(name)
        return found

    def weight(self, name: str, device: torch.device | str = "cpu") -> Weight:
        """The matrix of a quantized layer. Raises as the functions of its format do, with the layer's name, and KeyError."""
        given = _COMPRESSED if self.method == "compressed-tensors" else _GPTQ if self.method == "gptq" else _AWQ
        parts = {part: self.tensor(f"{name}.{part}", device) for part in given if f"{name}.{part}" in self._files}
        try:
            if self.method == "gptq":
                return gptq(**parts, v2=self.v2)
            return compressed(**parts) if self.method == "compressed-tensors" else awq(**{"qzeros": None, **parts})  # type: ignore[arg-type]
        except TypeError:
            missing = [f"{name}.{part}" for part in given[:3] if part not in parts]
            raise ValueError(f"{self.folder} lacks {', '.join(missing)}") from None
        except UnsupportedError as error:
            raise UnsupportedError(name, error.reason, is_backend=False) from None
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None


_GPTQ = ("qweight", "qzeros", "scales", "g_idx")
_AWQ = ("qweight", "scales", "qzeros")
_COMPRESSED = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")


@contextmanager
def opened(file: Path, device: torch.device | str = "cpu") -> Iterator[Any]:
    """A file of safetensors. Raises ValueError for another one, HostError where it cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with host_errors("read", file), safe_open(file, framework="pt", device=str(device)) as tensors:
            yield tensors
    except SafetensorError as error:
        raise ValueError(f"{file} is no file of safetensors: {error!s:.200}") from None


def method_of(quantization: Any) -> tuple[str | None, bool]:
    """How weights are quantized by a configuration, None for not at all, and whether GPTQ's zeros are stored as they are.

    Raises UnsupportedError, by name, for what kvgen does not compute.
    """
    if not isinstance(quantization, Mapping):
        return None, False
    method, reason = str(quantization.get("quant_method")), None
    if method == "gptq":
        form = str(quantization.get("checkpoint_format", "gptq"))
        if form not in ("gptq", "gptq_v2"):
            reason = f"GPTQ's checkpoint_format {form!r:.40}; kvgen reads gptq and gptq_v2"
        return _checked(reason, method, form == "gptq_v2")
    if method == "awq":
        version = str(quantization.get("version", "gemm")).lower()
        if version != "gemm":
            reason = f"AWQ's version {version!r:.40}; kvgen reads gemm"
        return _checked(reason, method, False)
    if method == "compressed-tensors":
        return _checked(_compressed_refusal(quantization), method, False)
    return _checked(f"quant_method {method!r:.40}; kvgen reads {', '.join(_SUFFIXES)}", method, False)


def _compressed_refusal(quantization: Mapping[str, Any]) -> str | None:
    """Why weights of compressed-tensors are not read."""
    schemes = [scheme for scheme in (quantization.get("config_groups") or {}).values() if isinstance(scheme, Mapping)]
    forms = {str(scheme.get("format") or quantization.get("format")) for scheme in schemes} or {str(quantization.get("format"))}
    if forms != {"pack-quantized"}:
        return f"compressed-tensors' format {', '.join(sorted(forms)):.60}; kvgen reads pack-quantized"
    if any(scheme.get("input_activations") for scheme in schemes):
        return "compressed-tensors with quantized activations (input_activations), which keep 16 bits here"
    if quantization.get("transform_config"):
        return "compressed-tensors with transforms of activations (transform_config)"
    if (quantization.get("sparsity_config") or {}).get("format", "dense") != "dense":
        return "compressed-tensors with sparse weights (sparsity_config)"
    return None


def _checked(reason: str | None, method: str, v2: bool) -> tuple[str, bool]:
    if reason is not None:
        raise UnsupportedError("weights", f"the checkpoint has {reason}", is_backend=False)
    return method, v2
