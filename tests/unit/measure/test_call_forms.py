"""The forms of calls cover the optional arguments of `decode`, and a fault in one of them is found."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import combinations, product
from types import SimpleNamespace

import pytest
import torch

from kvgen.errors import CheckError
from kvgen.lower.base import FUNCTIONS
from kvgen.runtime.calls import Calls
from kvgen.runtime.module import load
from kvgen.runtime.variant import Variant
from kvgen.verify import CheckPolicy
from kvgen.verify.calls import LAYOUTS, OPTIONS, Form, form, formed, laid_out
from kvgen.verify.check import ATTENDS, TURNS, check
from tests.support.naive import naive_artifact, naive_layout, naive_spec

POLICY = CheckPolicy(long_tokens=200, most_tokens=2048)


def test_every_optional_argument_of_decode_has_values() -> None:
    """An argument that is added to `decode` needs values, or a reason here: sinks are given exactly where the spec has them."""
    optional = {name for name, one in inspect.signature(Calls.decode).parameters.items() if one.default is not inspect.Parameter.empty}
    assert optional == {*OPTIONS, "sinks", "plan", "advance"} - {"end"}


def values(one: Form) -> tuple[object, ...]:
    return one.lse, one.out, one.scale, one.end


def test_nine_forms_pair_all_values_of_any_two_options() -> None:
    nine = [values(form(number // 3 * 2, number % 3)) for number in range(ATTENDS)]
    for (a, first), (b, second) in combinations(enumerate(OPTIONS.values()), 2):
        assert {(one[a], one[b]) for one in nine} == set(product(first, second))


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


def variant(**wrapped: Callable[..., object]) -> Variant:
    module = load(naive_artifact().path)
    functions = {name: getattr(module, name) for name in FUNCTIONS}
    for name, wrapper in wrapped.items():
        functions[name] = lambda *args, f=functions[name], w=wrapper: w(f, *args)
    spec = naive_spec()
    return Variant(spec, naive_layout(spec), SimpleNamespace(**functions, set_threads=None))  # type: ignore[arg-type]


def larger_without_lse(f, *args) -> None:
    f(*args)
    if args[10] is None:
        args[9].mul_(1.12)


def default_scale(f, *args) -> None:
    f(*args[:14], 32**-0.5, *args[15:])


def advances_always(f, *args) -> None:
    f(*args[:-1], 1)


def loses_the_65th_token(f, q, *args) -> None:
    f(q, *args)
    args[8][:, 64:65] = 0


@pytest.mark.parametrize("fault", [larger_without_lse, default_scale, advances_always, loses_the_65th_token])
def test_a_fault_in_one_form_of_decode_is_found(fault: Callable[..., object]) -> None:
    with pytest.raises(CheckError):
        check(variant(decode=fault), "cpu", POLICY)


@pytest.mark.parametrize("end", OPTIONS["end"])
def test_a_formed_call_advances_every_sequence_that_has_tokens(end: str) -> None:
    good, spec = variant(), naive_spec()
    heads, dim = spec.attention.kv_heads, spec.attention.head_dim
    cache = good.new_cache(2, 64, "cpu")
    q, kv = torch.randn(2, 2, 4, dim), torch.randn(2, 2, heads, dim)
    good.prefill(cache, torch.randn(2, 3, heads, dim), torch.randn(2, 3, heads, dim))
    want = good.decode(q, kv, kv, cache, advance=False)
    out, lse = formed(Form(None, "strided", 2.0, end, 0), good, torch.device("cpu"), q, (kv, kv), None).run(good, cache)
    assert cache.lengths.tolist() == [5, 5]
    assert lse is None
    assert torch.allclose(out, want, atol=1e-6)
