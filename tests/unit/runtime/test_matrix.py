"""Matrix kernels refuse tensors that are not in memory as they read, before the module is called."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kvgen.runtime.matrix import MatrixVariant
from tests.support.cpu import matrix_spec


def reached(*_: Any) -> None:
    raise AssertionError("the module was called")


MODULE: Any = SimpleNamespace(scales=reached, quantize=reached, dequantize=reached)
GIVEN = {
    "scales": {"x": torch.ones(4, 3), "out": torch.ones(3)},
    "quantize": {"x": torch.ones(4, 3), "scales": torch.ones(3), "codes": torch.ones(4, 3, dtype=torch.int8)},
    "dequantize": {"codes": torch.ones(4, 3, dtype=torch.int8), "scales": torch.ones(3), "out": torch.ones(4, 3)},
}


@pytest.mark.parametrize(("call", "name"), [(call, name) for call, given in GIVEN.items() for name in given])
def test_tensors_without_plain_memory_are_refused(call: str, name: str) -> None:
    kernel = MatrixVariant(matrix_spec(), MODULE)
    given = GIVEN[call]
    for bad in (
        torch._neg_view(given[name]),
        torch._efficientzerotensor(given[name].shape, dtype=given[name].dtype),
        torch._to_functional_tensor(given[name]),
        given[name].to_sparse(),
    ):
        with pytest.raises(ValueError, match=f"^{call}: {name} "):
            getattr(kernel, call)(**{**given, name: bad})
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ValueError, match="torch_ops.Attention"):
        getattr(kernel, call)(**given)
