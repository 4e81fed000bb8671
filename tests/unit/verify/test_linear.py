"""The check of linear layers refuses every planted fault of a module that computes in torch, and takes the right one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvgen.errors import CheckError
from kvgen.format import weights
from kvgen.format.weights import Canonical
from kvgen.runtime.linear import LinearVariant
from kvgen.spec import LinearFormat, LinearSpec
from kvgen.verify import CheckPolicy
from kvgen.verify.linear import LinearCheck, LinearWorkloadCheck

Weights = Callable[[Canonical], Canonical]


def nothing(value: Any) -> Any:
    return value


class InTorch:
    """A module over packed weights for GPUs: what it makes of the weight, of x and of the sums may be wrong."""

    set_threads = expand = None

    def __init__(self, linear: LinearFormat, weight: Weights = nothing, x: Any = nothing, sums: Any = nothing, bias: bool = True) -> None:
        self.linear_format, self.weight, self.x, self.sums, self.bias = linear, weight, x, sums, bias
        self.calls = 0

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> None:
        linear = self.linear_format
        spec = LinearSpec(arch="sm90", linear=linear)
        self.calls += 1
        codes, scales, zeros = self.weight(weights.unpack(spec, packed, "sm90"))
        zeros = torch.full(scales.shape, 1 << linear.bits - 1) if zeros is None else zeros
        grouped = (codes.view(linear.n, linear.groups, -1).float() - zeros.unsqueeze(2).float()) * scales.unsqueeze(2).float()
        y = self.sums(self.x(x.float()) @ grouped.view(linear.n, linear.k).T)
        if bias is not None and self.bias:
            y = y + bias.float()
        if linear.epilogue == "silu_mul":
            gate, up = y.chunk(2, 1)
            y = torch.nn.functional.silu(gate) * up
        out.copy_(y if residual is None else y + residual.float())


def checked(linear: LinearFormat, module: InTorch | None = None, **faults: Any) -> float:
    module = module or InTorch(linear, **faults)
    variant = LinearVariant(LinearSpec(arch="sm90", linear=linear), module, "sm90", 16)  # type: ignore[arg-type]
    variant.device_type = "cpu"
    accuracy: dict[str, float] = {}
    check = LinearCheck(variant, "cpu", CheckPolicy(repeats=2), accuracy)
    check.prepare()
    check.run()
    LinearWorkloadCheck(variant, "rows16", check.case, accuracy).run()
    return accuracy["relative_l2"]


def layer(**linear: Any) -> LinearFormat:
    return LinearFormat(**{"n": 64, "k": 256, "group": 64, "zero": True, "bias": True, **linear})


@pytest.mark.parametrize(
    "linear",
    [
        layer(),
        layer(dtype="bfloat16", bits=8, group="row", epilogue="silu_mul"),
        layer(zero=False, bias=False, epilogue="add", group=128),
        layer(bits=8, zero=False, epilogue="silu_mul"),
    ],
)
def test_the_right_module_passes(linear: LinearFormat) -> None:
    assert checked(linear) < (4e-3 if linear.dtype == "bfloat16" else 3e-4)


def one_code(weight: Canonical) -> Canonical:
    codes = weight.codes.clone()
    codes[37, 201] ^= 4
    return weight._replace(codes=codes)


FAULTS: dict[str, dict[str, Any]] = {
    "a code with a wrong bit": {"weight": one_code},
    "two channels swapped": {"weight": lambda w: w._replace(codes=w.codes[:, [1, 0, *range(2, 256)]])},
    "rows g and g + 8 swapped": {"weight": lambda w: w._replace(codes=w.codes.view(4, 2, 8, 256).flip(1).reshape(64, 256))},
    "the scale of the group before": {"weight": lambda w: w._replace(scales=w.scales.roll(1, 1))},
    "the scale of another row": {"weight": lambda w: w._replace(scales=w.scales.roll(1, 0))},
    "zeros of the group before": {"weight": lambda w: w._replace(zeros=w.zeros.roll(1, 1))},
    "zeros one too large": {"weight": lambda w: w._replace(zeros=w.zeros + 1)},
    "scales without their sign": {"weight": lambda w: w._replace(scales=w.scales.abs())},
    "the last channels left out": {"x": lambda x: torch.cat([x[:, :-16], torch.zeros_like(x[:, -16:])], 1)},
    "x in 8 bits": {"x": lambda x: x.to(torch.float8_e4m3fn).float()},
    "a row taken twice": {"x": lambda x: torch.cat([x[:-1], x[:1]]) if len(x) > 2 else x},
    "outliers clamped": {"x": lambda x: x.clamp(-60, 60)},
    "a sum left out": {"sums": lambda y: y.index_fill(1, torch.tensor([17]), 0.0)},
    "no bias": {"bias": False},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_refused(fault: str) -> None:
    with pytest.raises(CheckError, match=r"rows of 256 channels.*output \[\d+, \d+\] is"):
        checked(layer(), **FAULTS[fault])


class Loose(InTorch):
    """A module that is right, and does what it may not."""

    def __init__(self, linear: LinearFormat, how: str) -> None:
        super().__init__(linear)
        self.how = how

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> None:
        super().linear(x, packed, bias, residual, out)
        if self.how == "beside" and out.stride(0) > out.shape[1]:
            out.as_strided((1, 1), (1, 1), out.storage_offset() + out.shape[1]).zero_()
        if self.how == "behind":
            out.as_strided((1, 1), (1, 1), out.storage_offset() + out.shape[0] * out.stride(0)).zero_()
        if self.how == "unsteady" and out.numel():
            out[0] *= 1 + 1e-3 * (self.calls % 2)


@pytest.mark.parametrize(
    ("how", "told"), [("beside", "around out were written"), ("behind", "around out were written"), ("unsteady", "gave other bits")]
)
def test_writes_beyond_out_and_unsteady_bits_are_refused(how: str, told: str) -> None:
    with pytest.raises(CheckError, match=told):
        checked(layer(), Loose(layer(), how))
