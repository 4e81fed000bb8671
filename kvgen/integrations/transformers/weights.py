"""Models whose linear layers multiply by packed weights.

Projections to q, k and v become one product, and those to gate and up another, whose epilogue multiplies SiLU of gate by up where the MLP
does that.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvgen.api import get_linear_kernel
from kvgen.format.weights import Clip
from kvgen.integrations.linears import JointLinear, QuantizedLinear, gather, linear_spec
from kvgen.spec import LinearSpec

JOINTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Layers over one input, by the name of their joint product."""
Format = Mapping[str, Any] | LinearSpec
"""bits, group and zero of the field `linear` of a spec."""


@dataclass(frozen=True)
class Place:
    """Where a product stands in a model: the linear layers that it is made of, children of one module."""

    owner: str
    layers: tuple[str, ...]
    joint: str | None = None
    """The name of a joint product, a child of the same module."""
    gated: bool = False
    """Whether the module is an MLP that multiplies SiLU of gate by up."""

    @property
    def name(self) -> str:
        """Of the product in the model."""
        return self.path(self.joint or self.layers[0])

    @property
    def sources(self) -> list[str]:
        """The names of the layers in the model."""
        return [self.path(layer) for layer in self.layers]

    @property
    def singly(self) -> list[Place]:
        """The same layers as products of their own."""
        return [Place(self.owner, (layer,)) for layer in self.layers]

    def path(self, child: str) -> str:
        """The name of a child of the module in the model."""
        return f"{self.owner}.{child}" if self.owner else child


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up as one product with that epilogue."""

    def __init__(self, gate_up_proj: QuantizedLinear, down_proj: nn.Module) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up_proj, down_proj

    def forward(self, x: Tensor) -> Tensor:
        """x [..., channels] to the same shape."""
        out: Tensor = self.down_proj(self.gate_up_proj(x))
        return out


def quantize_weights(
    model: Any,
    spec: Format,
    *,
    head: Format | None = None,
    skip: Iterable[str] = (),
    join: bool = True,
    clip: Clip = "none",
    wide: str = "dequantize",
) -> dict[str, QuantizedLinear]:
    """Replace a model's linear layers, one by one and in place, with products over packed weights; these by their names in the model.

    `spec` says how weights are stored: `{"bits": 4, "group": 128, "zero": False}`, or a LinearSpec whose shape is ignored. `head` says it
    of the output head, which is left as it is by default; embeddings that are tied to it keep 16 bits. Layers whose name matches an
    expression of `skip` are left as they are. `join=False` makes a product of each layer. `clip` is that of `LinearKernel.quantize`,
    `wide` that of `QuantizedLinear`. Kernels are those of the model's device and dtype.

    Raises ValueError where a layer cannot have the format or weights are of several experts, before anything is changed, TypeError for what
    is no model of transformers, and as `get_linear_kernel` does.
    """
    top = name_of_head(model)
    patterns = [re.compile(pattern) for pattern in skip]

    def chosen(name: str) -> bool:
        return name != top and not any(pattern.search(name) for pattern in patterns)

    experts = [name for name in _stacked(model) if chosen(name)]
    if experts:
        raise ValueError(
            f"{experts[0]} has the matrices of several experts, and kernels multiply by one matrix: leave such weights as they are by "
            f"skip=[{experts[0].split('.')[-2]!r}]"
        )
    wanted = [(place, spec_of(model, place, spec)) for place in places(model, chosen, join)]
    if head is not None:
        wanted.append(_of_head(model, head))
    fetch(each for _, each in wanted)
    made = {place.name: _quantized(model, place, each, clip, wide) for place, each in wanted}
    gather(made.values())
    return made


def quantize_head(model: Any, form: Format, *, clip: Clip = "none", wide: str = "dequantize") -> QuantizedLinear:
    """Replace a model's output head alone; as `quantize_weights`."""
    return _quantized(model, *_of_head(model, form), clip, wide)


def quantized_linears(model: nn.Module) -> dict[str, QuantizedLinear]:
    """The products over packed weights of a model, by their names."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def name_of_head(model: Any) -> str:
    """The name of a model's output head; empty where it has none."""
    if not hasattr(model, "get_output_embeddings"):
        raise TypeError(f"a model of transformers is needed, not {type(model).__name__}; kvgen.integrations.linears has layers for others")
    head = model.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is head), "") if head is not None else ""


# --- what is replaced by what ------------------------------------------------------------------------------------------------


def places(model: nn.Module, chosen: Callable[[str], bool], join: bool) -> list[Place]:
    """The products that stand for a model's linear layers, of those whose names are chosen."""
    return [place for name, module in model.named_modules() for place in _of_module(name, module, chosen, join)]


def _stacked(model: nn.Module) -> list[str]:
    """The parameters that hold several matrices, as those of experts do; what convolves, or is broadcast over a batch, is another thing."""
    return [
        f"{owner}.{name}"
        for owner, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.squeeze().dim() > 2 and not hasattr(module, "kernel_size")
    ]


def _of_module(owner: str, module: nn.Module, chosen: Callable[[str], bool], join: bool) -> Iterator[Place]:
    linears = {child: layer for child, layer in module.named_children() if type(layer) is nn.Linear}
    left = [child for child in linears if chosen(Place(owner, (child,)).name)]
    for joint, names in JOINTS.items() if join else ():
        layers = tuple(name for name in names if name in left)
        if len(layers) > 1 and len({linears[name].in_features for name in layers}) == 1:
            yield Place(owner, layers, joint, gated=joint == "gate_up_proj" and _is_gated(module))
            left = [child for child in left if child not in layers]
    yield from (Place(owner, (child,)) for child in left)


def _is_gated(mlp: nn.Module) -> bool:
    """Whether a module computes down(silu(gate(x)) * up(x)): asked of a copy with small layers, because its code may compute anything."""
    if not isinstance(getattr(mlp, "down_proj", None), nn.Linear):
        return False
    probe = copy.copy(mlp)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(0)
        small = {name: nn.Linear(8, 8, bias=False) for name in ("gate_proj", "up_proj", "down_proj")}
        probe.__dict__["_modules"] = {**mlp._modules, **small}
        x = torch.randn(1, 3, 8)
        gate, up, down = small.values()
        try:
            found = probe(x)
        except Exception:  # it needs what it computes with: it is another MLP
            return False
        return isinstance(found, Tensor) and found.shape == x.shape and torch.allclose(found, down(functional.silu(gate(x)) * up(x)))


def spec_of(model: Any, place: Place, form: Format) -> LinearSpec:
    """The spec of a product in a format. Raises ValueError, with the layer's name, where its shape cannot have it."""
    layers = [model.get_submodule(name) for name in place.sources]
    fields = form.linear if isinstance(form, LinearSpec) else form
    wanted = fields if isinstance(fields, Mapping) else {name: getattr(fields, name) for name in ("bits", "group", "zero")}
    shape = {"n": sum(layer.out_features for layer in layers), "k": layers[0].in_features}
    return linear_spec(
        place.name,
        model.device,
        {
            **wanted,
            **shape,
            "dtype": str(model.dtype).removeprefix("torch."),
            "bias": any(layer.bias is not None for layer in layers),
            "epilogue": "silu_mul" if place.gated else "none",
        },
    )


def fetch(specs: Iterable[LinearSpec]) -> None:
    """Compile and verify the kernels of specs, several at a time. Raises as `get_linear_kernel` does."""
    every = list(dict.fromkeys(specs))
    with ThreadPoolExecutor(max(2, (os.cpu_count() or 2) // 2)) as pool:
        list(pool.map(get_linear_kernel, every))


def joint_bias(given: list[Tensor | None], sizes: list[int]) -> Tensor | None:
    """The bias of a joint product, zero for layers without one; None where none has one."""
    some = next((bias for bias in given if bias is not None), None)
    if some is None:
        return None
    parts = [some.new_zeros(size) if bias is None else bias for bias, size in zip(given, sizes, strict=True)]
    return torch.cat(parts).detach()


def put(model: Any, place: Place, spec: LinearSpec, packed: Tensor, bias: Tensor | None, wide: str) -> QuantizedLinear:
    """Make a product of its tensors and put it in place of its layers."""
    owner = model.get_submodule(place.owner)
    if len(place.layers) == 1 or place.gated:
        layer = QuantizedLinear(spec, packed, bias, wide=wide)
    else:
        sizes = [owner.get_submodule(name).out_features for name in place.layers]
        layer = joint = JointLinear(spec, packed, bias, sizes, wide=wide)
        for name, part in zip(place.layers, joint.parts(), strict=True):
            setattr(owner, name, part)
        owner.add_module(place.joint, joint)
    if place.gated:
        parent, _, child = place.owner.rpartition(".")
        setattr(model.get_submodule(parent), child, GatedMLP(layer, owner.down_proj))
    elif place.joint is None:
        setattr(owner, place.layers[0], layer)
    layer.place = place
    return layer.train(model.training)


def _of_head(model: Any, form: Format) -> tuple[Place, LinearSpec]:
    owner, _, layer = name_of_head(model).rpartition(".")
    if not isinstance(model.get_output_embeddings(), nn.Linear):
        raise ValueError(f"{type(model).__name__} has no head in 16 bits that could be quantized")
    place = Place(owner, (layer,))
    return place, spec_of(model, place, form)


@torch.no_grad()
def _quantized(model: Any, place: Place, spec: LinearSpec, clip: Clip, wide: str) -> QuantizedLinear:
    """Quantize the layers of a place; their 16-bit weights are freed, unless others hold them."""
    layers = [model.get_submodule(name) for name in place.sources]
    weight = torch.cat([layer.weight for layer in layers]) if len(layers) > 1 else layers[0].weight
    packed = get_linear_kernel(spec).quantize(weight, clip=clip)
    bias = joint_bias([layer.bias for layer in layers], [layer.out_features for layer in layers])
    return put(model, place, spec, packed, bias, wide)
