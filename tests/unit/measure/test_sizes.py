"""Sizes beyond small caches: what is reserved is not touched, and faults that small caches do not show are found."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from kvgen.measure.compare import Comparison
from kvgen.measure.sizes import Crowd, Far, SizeCheck

from kvgen.errors import CheckError
from kvgen.lower.base import FUNCTIONS
from kvgen.measure.memory import resident_bytes
from kvgen.runtime.module import load
from kvgen.runtime.variant import Variant
from kvgen.verify import CheckPolicy
from kvgen.verify.filled import SparseCache, reserved
from tests.support.naive import naive_artifact, naive_layout, naive_spec
from tests.unit.measure.test_filled import naive

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


@pytest.mark.parametrize("paged", [False, True])
def test_a_sparse_cache_reads_as_its_marks_and_zeros(paged: bool) -> None:
    variant = naive(paged)
    tokens = variant.layout.tokens
    filled = SparseCache(variant, 3, 20 * tokens, CPU, [0, 3, 18])
    packed, table = filled.cache.packed, filled.cache.block_table
    assert packed[-1].data_ptr() - packed.data_ptr() > 1 << 32
    if table is not None:
        assert table.max() == packed.shape[0] - 1 > 1 << 16
        assert table.unique().numel() == table.numel()
    filled.set([0, 0, 19 * tokens])
    read = variant.unpack(filled.cache)
    want = filled.contents(2, 19)
    for mine, x in zip(read, want, strict=True):
        assert torch.equal(mine[2].transpose(0, 1).double(), x)
    shown = want[0].unflatten(1, (-1, tokens)).abs().sum((0, 2, 3)).nonzero().flatten().tolist()
    assert shown == [0, 3, 18]


@pytest.mark.parametrize(("kind", "paged"), [(Far, False), (Far, True), (Crowd, True)])
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
