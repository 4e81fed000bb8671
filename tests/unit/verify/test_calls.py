"""The forms of calls cover the optional arguments of `decode`."""

from __future__ import annotations

import inspect
from itertools import combinations, product

import pytest
import torch

from kvgen.runtime.calls import Calls
from kvgen.verify.calls import LAYOUTS, OPTIONS, CallCheck, Form, form, laid_out
from kvgen.verify.lives import ATTENDS, TURNS
from tests.support.naive import naive_variant


def test_every_optional_argument_of_decode_has_values() -> None:
    """An argument that is added to `decode` needs values, or a reason here: sinks are given exactly where the spec has them."""
    optional = {name for name, one in inspect.signature(Calls.decode).parameters.items() if one.default is not inspect.Parameter.empty}
    assert optional == {*OPTIONS, "sinks", "plan", "advance"} - {"end"}


def test_nine_forms_pair_all_values_of_any_two_options() -> None:
    nine = [form(number // 3 * 2, number % 3) for number in range(ATTENDS)]
    for (a, first), (b, second) in combinations(OPTIONS.items(), 2):
        assert {(getattr(one, a), getattr(one, b)) for one in nine} == set(product(first, second))


@pytest.mark.parametrize("step", range(8))
def test_a_step_has_every_kind_of_lse_and_of_end(step: int) -> None:
    forms = [form(step, turn, scenario) for turn in range(TURNS) for scenario in range(2)]
    assert {one.lse for one in forms} == set(OPTIONS["lse"])
    assert {one.end for one in forms} == set(OPTIONS["end"])
    assert len({one.scale for one in forms}) > 1


def test_layouts_differ_in_all_strides_and_hold_the_same_numbers() -> None:
    x = torch.randn(3, 5, 4, 32)
    views = [laid_out(x, layout, torch.device("cpu")) for layout in range(LAYOUTS)]
    assert all(torch.equal(x, view) for view in views)
    for one, other in combinations(views, 2):
        assert all(a != b for a, b in zip(one.stride()[:3], other.stride()[:3], strict=True))


@pytest.mark.parametrize("end", OPTIONS["end"])
def test_a_formed_call_advances_every_sequence_that_has_tokens(end: str) -> None:
    good = naive_variant()
    heads, dim = good.spec.attention.kv_heads, good.spec.attention.head_dim
    cache = good.new_cache(2, 64, "cpu")
    q, kv = torch.randn(2, 2, 4, dim), torch.randn(2, 2, heads, dim)
    good.prefill(cache, torch.randn(2, 3, heads, dim), torch.randn(2, 3, heads, dim))
    want = good.decode(q, kv, kv, cache, advance=False)
    out, lse = CallCheck(good, "cpu").formed(Form(None, "strided", 2.0, end, 0), q, (kv, kv))(cache)
    assert cache.lengths.tolist() == [5, 5]
    assert lse is None
    assert torch.allclose(out, want, atol=1e-6)
