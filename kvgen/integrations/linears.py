"""`QuantizedLinear`: a linear layer over packed weights as a torch module, in eager models, CUDA graphs and under torch.compile.

In compiled models a product is one opaque operator, `kvgen::linear`, which knows its `Product` by a name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvgen.api import get_linear_kernel
from kvgen.errors import KvgenError, SpecError
from kvgen.format.dtypes import torch_dtype
from kvgen.runtime.kvcache import new_bytes
from kvgen.runtime.linear import LinearVariant
from kvgen.spec import LinearSpec, load_any_spec

_products: WeakValueDictionary[str, Product] = WeakValueDictionary()
"""Of this process, by the name that compiled graphs know them by."""
_numbers = count()


class Product:
    """y = epilogue(x W^T + bias) for the packed weights of one spec, with any number of rows.

    Kernels are compiled for a few rows. A call with more than `rows` dequantizes the whole weight into temporary memory ([n, k] in the
    spec's dtype, freed when the call is over) and multiplies with torch, unless `wide` says otherwise.
    """

    def __init__(self, spec: LinearSpec, *, wide: str = "dequantize", name: str | None = None) -> None:
        """`name` is what compiled graphs know it by, by default a number. Raises as `QuantizedLinear` does."""
        if wide not in ("dequantize", "refuse", "invariant"):
            raise ValueError(f'wide must be "dequantize", "refuse" or "invariant", not {wide!r:.40}')
        if spec.linear.epilogue == "add":
            raise ValueError(f"{spec.name}: the epilogue is none or silu_mul")
        self.spec, self.wide = spec, wide
        kernel = get_linear_kernel(spec)
        if wide == "invariant" and kernel.target == "cpu":
            raise ValueError(f"{spec.name}: a CPU's kernel chooses its instructions by the number of rows, so it is not invariant")
        self.kernel: LinearVariant = kernel.variant(kernel.rows) if wide == "invariant" else kernel
        self.rows = self.kernel.rows
        """Most rows of a call that takes the kernel; with 0 every call dequantizes."""
        self.wide_calls = 0
        """Calls with more rows."""
        self.name = str(next(_numbers)) if name is None else name
        _products[self.name] = self

    def __call__(self, x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., k] to [..., features]; one operator where torch compiles. Raises ValueError on wrong tensors, and for a gradient."""
        if torch.compiler.is_compiling():
            out: Tensor = linear(x, packed, bias, self.name, self.kernel.features)
            return out
        return self.run(x, packed, bias)

    def run(self, x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        """A call outside of a compiled graph."""
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError("kvgen's kernels have no gradient: call the model within torch.no_grad()")
        rows = x.reshape(-1, self.spec.linear.k)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        if len(rows) > self.rows and (self.wide != "invariant" or not self.rows):
            return self._wide(rows, packed, bias).view(*x.shape[:-1], self.kernel.features)
        out = torch.empty((*x.shape[:-1], self.kernel.features), dtype=x.dtype, device=x.device)
        y = out.view(-1, self.kernel.features)
        for first in range(0, len(rows), max(1, self.rows)):
            part = slice(first, first + self.rows)
            self.kernel(rows[part], packed, bias=bias, out=y[part])
        return out

    def _wide(self, rows: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        if self.wide == "refuse":
            raise ValueError(f"{self.spec.name}: {len(rows)} rows, and its kernel is compiled for {self.kernel.rows} at most")
        self.wide_calls += 1
        out = functional.linear(rows, self.kernel.dequantize(packed), bias)
        if self.spec.linear.epilogue == "none":
            return out
        gate, up = out.chunk(2, -1)
        return functional.silu(gate).mul_(up)


class QuantizedLinear(nn.Module):
    """y = epilogue(x W^T + bias) with W packed: x [..., k] to [..., n], or n / 2 with the epilogue silu_mul; x and y of the spec's dtype.

    **Rows.** Kernels are compiled for a few rows. A call with more than `rows`, such as a prompt, dequantizes the whole weight into
    temporary memory ([n, k] in the spec's dtype) and multiplies with torch. `wide_calls` counts these calls; a layer that is made with
    `wide="refuse"` raises ValueError in place of them. With `wide="invariant"` all calls take the launch for the most rows, as many rows at
    a time: the bits of a row of y then depend on no other row.
    """

    packed: Tensor
    bias: Tensor | None
    place: Any = None
    """Where `quantize_weights` put it in a model."""

    def __init__(self, spec: LinearSpec, packed: Tensor, bias: Tensor | None = None, *, wide: str = "dequantize") -> None:
        """`packed` is what the spec's kernel packs, `bias` [n] in the spec's dtype where `linear.bias` is set.

        Raises as `get_linear_kernel` does, and ValueError for a bias that the spec does not have, or lacks, for another `wide`, and for
        `wide="invariant"` on a CPU.
        """
        super().__init__()
        if (bias is not None) != spec.linear.bias:
            raise ValueError(f"{spec.name}: bias is given where linear.bias says so")
        self.spec, self.product = spec, Product(spec, wide=wide)
        self.register_buffer("packed", packed)
        self.register_buffer("bias", None if bias is None else bias.contiguous())
        self.in_features, self.out_features = spec.linear.k, spec.linear.features

    @property
    def kernel(self) -> LinearVariant:
        """What multiplies by the packed weight."""
        return self.product.kernel

    @property
    def wide_calls(self) -> int:
        """Calls with more rows than the kernel takes."""
        return self.product.wide_calls

    def extra_repr(self) -> str:
        linear = self.spec.linear
        return f"{self.in_features}, {self.out_features}, bits={linear.bits}, group={linear.group}, epilogue={linear.epilogue}"

    def forward(self, x: Tensor) -> Tensor:
        """x [..., k] to [..., out_features]. Raises ValueError on wrong tensors, and where a gradient is asked for."""
        return self.product(x, self.packed, self.bias)

    def dequantize(self) -> Tensor:
        """The matrix that is meant, [n, k] in the spec's dtype: with silu_mul the rows of gate, then those of up."""
        return self.kernel.dequantize(self.packed)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        """What `to`, `half` and the like do to every module: nothing here. Raises TypeError where a layer would change."""
        del recurse
        changed = fn(self.packed.new_empty(0, dtype=torch_dtype(self.spec.linear.dtype)))
        if changed.dtype != torch_dtype(self.spec.linear.dtype) or changed.device != self.packed.device:
            raise TypeError(
                f"{self.spec.name} stays {self.spec.linear.dtype} on {self.packed.device}: quantize the model where it runs, in its dtype"
            )
        return self


def linear_spec(name: str, device: torch.device, fields: Mapping[str, Any]) -> LinearSpec:
    """A spec of these fields for a device. Raises ValueError, with the layer's name."""
    data = {
        "name": f"linear-{fields['n']}x{fields['k']}",
        "operation": "linear",
        "arch": "cpu" if device.type == "cpu" else "native",
        "linear": dict(fields),
    }
    try:
        spec = load_any_spec(data)
    except SpecError as error:
        told = "; ".join(f"{issue.path}: {issue.message}" for issue in error.issues)
        raise ValueError(f"{name}: {told}: give it another group, or leave it as it is by skip") from None
    if not isinstance(spec, LinearSpec):
        raise TypeError(f"{name}: {type(spec).__name__} is no spec of a linear layer")
    return spec


def gather(layers: Iterable[QuantizedLinear]) -> None:
    """Move the packed weights of layers on a CPU into one piece of memory with huge pages, for which each alone is too small."""
    mine = [layer for layer in layers if layer.packed.device.type == "cpu"]
    sizes = [-(-layer.packed.numel() // 64) * 64 for layer in mine]
    pieces = new_bytes(sum(sizes), torch.device("cpu")).split(sizes)  # type: ignore[no-untyped-call]
    for layer, piece in zip(mine, pieces, strict=True):
        layer.packed = piece[: layer.packed.numel()].copy_(layer.packed)


class JointLinear(QuantizedLinear):
    """Several linear layers over the same input as one product. `parts()` are modules in place of the layers.

    The first part that is given an input multiplies for all of them.
    """

    def __init__(self, spec: LinearSpec, packed: Tensor, bias: Tensor | None, sizes: Sequence[int], *, wide: str = "dequantize") -> None:
        """`sizes` are the output channels of the layers, in the order of their rows in the weight."""
        super().__init__(spec, packed, bias, wide=wide)
        self.sizes = tuple(sizes)
        self.held: tuple[Tensor, tuple[Tensor, ...]] | None = None
        """The input whose products are not all taken yet, and they."""

    def parts(self) -> list[Part]:
        """A module for each layer."""
        return [Part(self, index) for index in range(len(self.sizes))]


class Part(nn.Module):
    """One layer of a `JointLinear`, which owns the tensors. It has none."""

    def __init__(self, joint: JointLinear, index: int) -> None:
        super().__init__()
        self._joint = (joint,)  # in a tuple, it is no submodule: it has its place in the model
        self._index, self._last = index, index == len(joint.sizes) - 1
        self.in_features, self.out_features = joint.in_features, joint.sizes[index]

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, part {self._index + 1} of {len(self._joint[0].sizes)}"

    def forward(self, x: Tensor) -> Tensor:
        """As `QuantizedLinear.forward`: a view of the joint product."""
        joint = self._joint[0]
        held = joint.held
        if held is None or held[0] is not x:
            held = x, joint(x).split(joint.sizes, -1)
        joint.held = None if self._last else held
        return held[1][self._index]


@torch.library.custom_op("kvgen::linear", mutates_args=())
def linear(x: Tensor, packed: Tensor, bias: Tensor | None, product: str, n: int) -> Tensor:
    """A `Product` in a compiled model: x [..., k] to [..., n]. Raises KvgenError for one that is no more."""
    del n
    found = _products.get(product)
    if found is None:
        raise KvgenError("a compiled graph runs where its layers were made, and as long as they are there")
    return found.run(x, packed, bias)


@linear.register_fake
def _(x: Tensor, packed: Tensor, bias: Tensor | None, product: str, n: int) -> Tensor:  # noqa: ARG001
    return torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
