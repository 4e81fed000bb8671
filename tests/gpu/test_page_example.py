"""The example of docs/kernels.md, ALiBi as a score modifier: the page's own text on a GPU, against the formula in fp64."""

from __future__ import annotations

import pytest
import torch

from kvgen.runtime.calls import Variant
from kvgen.runtime.module import load
from kvgen.toolchain import build
from kvgen.verify.tolerance import relative_l2, tolerance
from tests.gpu.oracle import attend, contents, filled, normal
from tests.support.kernel_cases import KernelCase
from tests.unit.lower_cuda.page_example import WORDS, alibi, with_alibi

CASE, QUERIES = KernelCase(WORDS), 2
UNEQUAL, EQUAL = (700, 0, 127, 300, 9000), (9000, 9000, 9000)


@pytest.fixture(scope="module")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Variant:
    """The default schedule with the page's header."""
    return Variant(CASE.spec, CASE.layout, load(build(with_alibi(CASE.source(), tmp_path_factory.mktemp("alibi"))).path))


@pytest.mark.parametrize("uniform", [None, True, False], ids=["no plan", "static", "planned"])
@pytest.mark.parametrize("lengths", [UNEQUAL, EQUAL], ids=["unequal", "equal"])
def test_alibi_through_the_seam_agrees_with_its_formula(variant: Variant, lengths: tuple[int, ...], uniform: bool | None) -> None:
    """Without a plan, with one whose schedule is static (no result depends on its promise), and with one made on the device."""
    a = CASE.spec.attention
    cache, q = filled(variant, lengths, max(lengths) + 200), normal(3, len(lengths), QUERIES, a.q_heads, a.head_dim, dtype=variant.dtype)
    plan = None if uniform is None else variant.plan(cache, QUERIES, append=False, uniform=uniform)
    out = variant.attend(q, cache, plan=plan)
    held = [contents(variant.layout, cache, b, length) for b, length in enumerate(lengths)]
    want = torch.stack([alibi(q[b], *tokens) for b, tokens in enumerate(held)])
    assert relative_l2(out, want) <= tolerance(variant.dtype)
    plain = torch.stack([attend(variant.spec, q[b], *tokens)[0] for b, tokens in enumerate(held)])
    assert relative_l2(out, plain) > 0.1, "the slopes must matter"
