"""What a reference divides by: on a GPU, torch multiplies by the rounded reciprocal of a number, which gives other bits than a division."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvgen.spec import presets
from kvgen.verify import matrix
from kvgen.verify.quantize import quantize


class Divisors(TorchDispatchMode):
    """Records what tensors are divided by."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.div, torch.ops.aten.div_, torch.ops.aten.true_divide):
            self.found.append(args[1])
        return func(*args, **(kwargs or {}))


@contextmanager
def only_tensors() -> Iterator[None]:
    with Divisors() as divisors:
        yield
    assert divisors.found
    assert all(isinstance(one, torch.Tensor) for one in divisors.found)


def test_scales_of_a_matrix_are_divided_by_a_tensor() -> None:
    x = matrix.uniform(7, 5, torch.float32, "cpu")
    with only_tensors():
        matrix.codes(x, matrix.scales(x))


@pytest.mark.parametrize("name", presets())
def test_quantization_divides_by_tensors(name: str) -> None:
    spec = presets()[name]
    x = torch.randn(2, 128, spec.attention.head_dim).to(torch.float16)
    for quant, boost in ((spec.key, spec.key.boost), (spec.value, None)):
        with only_tensors():
            quantize(x, quant, boost)
