"""Tensors whose memory does not hold their elements are refused by every call, by name; a call that torch traces is refused.

Each call runs in a forked child: one that reads address 0 ends its process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from kvgen.integrations import torch_ops
from kvgen.runtime.calls import Variant
from kvgen.runtime.kvcache import KVCache
from tests.support.cpu import spec_of, variant

Given = dict[str, Any]


class Dispatching(torch.Tensor):
    """Its elements are what Python code says."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*args, **(kwargs or {}))


def emptied(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def fake(x: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode() as mode:
        return mode.from_tensor(x)


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "negated": lambda x: torch._neg_view(-x),
    "zero": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    "fake": fake,
    "functionalized": torch._to_functional_tensor,
    "emptied": emptied,
    "sparse": lambda x: x.to_sparse(),
    "nested": lambda x: torch.nested.nested_tensor(list(x)),
    "meta": lambda x: x.to("meta"),
    "subclass": lambda x: torch.Tensor._make_subclass(Dispatching, x),
}


def whole(count: int, kind: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(count, dtype=kind)


def call_attend(v: Variant, c: KVCache, g: Given) -> Any:
    return v.attend(g["q"], c, g.get("out"), g.get("lse"))


CALLS: dict[str, tuple[Callable[[Variant, KVCache, Given], Any], Callable[[], Given]]] = {
    "attend": (call_attend, lambda: {"q": half(4), "out": half(4), "lse": torch.zeros(1, 4, 1)}),
    "extend": (call_attend, lambda: {"q": half(4, 5), "out": half(4, 5), "lse": torch.zeros(1, 4, 5)}),
    "decode": (
        lambda v, c, g: v.decode(g["q"], g["k_new"], g["v_new"], c, g["out"]),
        lambda: {"q": half(4), "k_new": half(2), "v_new": half(2), "out": half(4)},
    ),
    "prefill": (
        lambda v, c, g: v.prefill(c, g["k"], g["v"], g["lengths"]),
        lambda: {"k": half(2, 3), "v": half(2, 3), "lengths": whole(1)},
    ),
    "unpack": (lambda v, c, g: v.unpack(c, g["k"], g["v"]), lambda: {"k": half(2, 40), "v": half(2, 40)}),
    "advance": (lambda v, c, g: c.advance(g["tokens"]), lambda: {"tokens": whole(1)}),
    "crop": (lambda v, c, g: c.crop(g["tokens"]), lambda: {"tokens": whole(1)}),
    "reset": (lambda v, c, g: c.reset(g["rows"]), lambda: {"rows": whole(1)}),
    "reorder": (lambda v, c, g: c.reorder(g["index"]), lambda: {"index": whole(1, torch.int64)}),
}


def half(heads: int, count: int = 1) -> torch.Tensor:
    return torch.randn(1, count, heads, 64, generator=torch.Generator().manual_seed(heads)).half()


@pytest.fixture(scope="module")
def built() -> Variant:
    return variant(spec_of(k="16", v="16", cache={"rollback": 2}))


@pytest.fixture
def cache(built: Variant) -> KVCache:
    held = built.new_cache(1, 128)
    built.prefill(held, half(2, 40), half(2, 40))
    return held


def outcome(call: Callable[[], Any]) -> str:
    """Type and message of what a call raises in a forked child, "taken", or "died"."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = "taken"
        try:
            call()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode()[:4000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as said_by:
        text = said_by.read()
    return text if os.waitpid(child, 0)[1] == 0 else "died"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", list(CALLS))
def test_tensors_that_are_not_in_memory_as_they_read_are_refused(built: Variant, cache: KVCache, call: str) -> None:
    run, arguments = CALLS[call]

    def every() -> None:
        for argument, kind in product(arguments(), KINDS):
            given = arguments()
            if (kind == "nested" and given[argument].dim() < 2) or (kind == "meta" and argument in ("rows", "index")):
                continue  # torch nests matrices and more; numbers on another device are not looked at
            given[argument] = KINDS[kind](given[argument])
            with pytest.raises(ValueError, match=f"^{argument} "):
                run(built, cache, given)

    assert outcome(every) == "taken"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", list(CALLS))
def test_a_call_that_torch_records_is_refused(built: Variant, cache: KVCache, call: str) -> None:
    run, arguments = CALLS[call]
    given, x = arguments(), torch.zeros(2)

    def body(y: torch.Tensor) -> torch.Tensor:
        run(built, cache, {name: value for name, value in given.items() if name not in ("out", "lse")} | {"out": None})
        return (y + 1).sum()

    def fake_mode() -> None:
        with FakeTensorMode(allow_non_fake_inputs=True):
            body(x)

    ways: dict[str, Callable[[], Any]] = {
        "trace": lambda: torch.jit.trace(body, (x,), check_trace=False),  # type: ignore[no-untyped-call]
        "make_fx": lambda: make_fx(body)(x),
        "make_fx of operators": lambda: make_fx(body, pre_dispatch=True)(x),
        "fake mode": fake_mode,
        "functionalize": lambda: torch.func.functionalize(body)(x),
        "grad": lambda: torch.func.grad(body)(x),
    }

    def every() -> None:
        for way in ways.values():
            with pytest.raises(ValueError, match=r"kvgen\.integrations\.torch_ops\.Attention"):
                way()

    assert outcome(every) == "taken"


@pytest.mark.parametrize("kind", ["negated", "zero", "emptied", "sparse"])
def test_block_tables_and_operators_are_checked(kind: str) -> None:
    paged = variant(spec_of(k="16", v="16", page=64))
    table = torch.arange(2, dtype=torch.int32).reshape(1, 2)
    said = outcome(lambda: paged.new_cache(1, 128, block_table=KINDS[kind](table), pages=2))
    assert said.startswith("ValueError: block_table ")


def test_an_operator_reads_a_negated_query_rightly_where_it_is_traced(built: Variant, cache: KVCache) -> None:
    q = half(4)
    expected = built.attend(q, cache)
    attention = torch_ops.Attention(built, cache)
    assert torch.equal(attention.attend(torch._neg_view(-q))[0], expected)
    traced = make_fx(lambda x: attention.attend(x)[0])(torch.randn_like(q))
    assert torch.equal(traced(q), expected)
