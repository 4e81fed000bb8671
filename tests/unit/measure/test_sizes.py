"""Sizes beyond small caches: what is reserved is not touched, and faults that small caches do not show are found."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from kvgen.errors import CheckError
from kvgen.lower.base import FUNCTIONS
from kvgen.measure.compare import Comparison
from kvgen.measure.filled import SparseCache, reserved
from kvgen.measure.job import CheckPolicy
from kvgen.measure.memory import resident_bytes
from kvgen.measure.sizes import Crowd, Far, SizeCheck
from kvgen.runtime.module import load
from kvgen.runtime.variant import Variant
from kvgen.spec import KernelSpec
from tests.support.cpu import spec_of
from tests.support.cpu import variant as compiled
from tests.support.naive import naive_artifact, naive_layout, naive_spec
from tests.unit.measure.test_filled import contents

CPU = torch.device("cpu")


def wrapped(paged: bool = False, **wrappers: Callable[..., object]) -> Variant:
    """The naive module, with some of its functions wrapped: wrapper(function, *args)."""
    module = load(naive_artifact().path)
    functions = {name: getattr(module, name) for name in FUNCTIONS}
    for name, wrapper in wrappers.items():
        functions[name] = lambda *args, f=functions[name], w=wrapper: w(f, *args)
    spec = naive_spec(paged)
    return Variant(spec, naive_layout(spec), SimpleNamespace(**functions, set_threads=None))  # type: ignore[arg-type]


def checked(kind: type[SizeCheck], variant: Variant) -> SizeCheck:
    return kind(variant, CPU, CheckPolicy(most_tokens=1024), Comparison(variant.spec, CPU))


def test_reserved_memory_is_zero_and_takes_none() -> None:
    before = resident_bytes()
    x = reserved((1 << 30, 6), torch.float16, CPU)
    x[-1, -1] = 1
    assert x[:: 1 << 26].sum() == 0
    assert x[-1].tolist() == [0, 0, 0, 0, 0, 1]
    assert resident_bytes() - before < 64 << 20


@pytest.mark.parametrize("spec", [spec_of(k="8c32s", v="4t32s"), spec_of(page=64), spec_of(k="4c64", window=200)], ids=str)
def test_a_sparse_cache_reads_as_its_marks_and_zeros(spec: KernelSpec) -> None:
    variant = compiled(spec)
    tokens = variant.layout.tokens
    filled = SparseCache(variant, 3, 20 * tokens, CPU, [0, 3, 18])
    packed = filled.cache.packed
    begins = packed[-1].data_ptr() - packed.data_ptr()
    assert begins > 1 << 32
    if filled.cache.block_table is not None:
        assert filled.cache.block_table.max() == packed.shape[0] - 1 > 1 << 16
    if spec.attention.window is None:
        k, v = contents(filled, 2, 19 * tokens)
        got = filled.contents(2, 19)
        assert torch.equal(k[0].transpose(0, 1), got[0])
        assert torch.equal(v[0].transpose(0, 1), got[1])
        shown = got[0].unflatten(1, (-1, tokens)).abs().sum((0, 2, 3)).nonzero().flatten().tolist()
        assert shown == [0, 3, 18]


@pytest.mark.parametrize("kind", [Far, Crowd])
@pytest.mark.parametrize("paged", [False, True])
def test_a_right_module_passes(kind: type[SizeCheck], paged: bool) -> None:
    checked(kind, wrapped(paged)).run()  # type: ignore[attr-defined]


def forgets_far_lengths(f, *args) -> None:
    f(*args)
    args[6][1100:] -= 1


def swallows_nan(f, *args) -> None:
    f(*args)
    args[7].nan_to_num_(0.0)


def spreads_nan(f, *args) -> None:
    f(*args)
    if bool(args[7].isnan().any()):
        args[7][1] = torch.nan


@pytest.mark.parametrize(
    ("kind", "function", "fault", "message"),
    [
        (Crowd, "pack", forgets_far_lengths, "attend over 1203 sequences: relative l2"),
        (Far, "attend", swallows_nan, "a NaN in q: output that sees it is a number"),
        (Far, "attend", spreads_nan, "a NaN in q: output that does not see it has other bits"),
    ],
)
def test_faults_are_found(kind: type[SizeCheck], function: str, fault: Callable[..., object], message: str) -> None:
    with pytest.raises(CheckError, match=message):
        checked(kind, wrapped(**{function: fault})).run()  # type: ignore[attr-defined]
