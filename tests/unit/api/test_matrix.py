"""From a spec of a matrix to its kernel: tuned, registered, chosen, called."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvgen.api import FallbackWarning, get_kernel, get_matrix_kernel
from kvgen.errors import SpecError
from kvgen.lower.backend import get_backend
from kvgen.measure.measurement import Candidate
from kvgen.registry.select import misfits
from kvgen.registry.store import Store
from kvgen.toolchain import ArtifactCache
from kvgen.tune.budget import Budget
from kvgen.tune.tuner import tune
from kvgen.verify import matrix as reference
from tests.support.cpu import matrix_spec
from tests.support.tuning import FakeRunner


def cost(candidate: Candidate) -> float:
    """Small tiles for few tokens."""
    small = candidate.workload.key == "64x128"
    return 100.0 + abs(candidate.schedule.launch.integer("rows") - (16 if small else 64))


def test_a_matrix_kernel_is_tuned_registered_and_fetched(places: Path, modules: Path) -> None:
    spec = matrix_spec(shapes=("64x128", "4096x128"))
    store = Store(places)
    result = tune(
        spec, "cpu", Budget(trials=4), backends=[get_backend("cpu")], cache=ArtifactCache(modules), store=store, runner=FakeRunner(cost)
    )
    (found,) = store.find(spec)
    assert found.entry == result.entry
    assert found.path.name == "quantize-float32-8c.json"
    assert misfits(found.entry) == []
    assert not found.entry.outdated

    kernel = get_matrix_kernel(spec)
    assert kernel.selection.how == "exact"
    assert kernel is get_matrix_kernel(spec)
    x = reference.uniform(50, 37, torch.float32, "cpu")
    codes, scales = kernel.quantize(x)
    assert torch.equal(scales, reference.scales(x))
    assert torch.equal(codes, reference.codes(x, scales))
    assert torch.equal(kernel.dequantize(codes, scales), reference.dequantized(codes, scales, torch.float32))
    assert kernel.variant(60, 128).module is kernel.variant(64, 128).module
    with pytest.raises(ValueError, match="at least 1"):
        kernel.set_threads(0)
    with pytest.raises(TypeError, match="x must be a torch tensor, not builtins.list"):
        kernel.quantize([1.0])  # type: ignore[arg-type]
    assert get_matrix_kernel(matrix_spec(shapes=("128x128",))).selection.how == "nearest"


def test_where_nothing_is_tuned_the_default_says_so(places: Path) -> None:
    with pytest.warns(FallbackWarning, match="nothing is tuned for this format on cpu; using cpu's default schedule"):
        kernel = get_matrix_kernel(matrix_spec("dequantize", "bfloat16"))
    x = reference.uniform(5, 3, torch.bfloat16, "cpu")
    codes, scales = kernel.quantize(x)
    assert torch.equal(kernel.dequantize(codes, scales), reference.dequantized(codes, scales, torch.bfloat16))


def test_each_operation_has_its_own_fetch() -> None:
    with pytest.raises(SpecError, match="get_matrix_kernel takes it"):
        get_kernel({"operation": "quantize"})
    with pytest.raises(SpecError, match="this spec is of attention, and an operation on a matrix is asked for"):
        get_matrix_kernel({"preset": "kitty", "attention": {"q_heads": 8, "kv_heads": 8, "head_dim": 64}, "value": {"group": 64}})
