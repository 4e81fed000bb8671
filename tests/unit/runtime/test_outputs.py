"""What a call may write to: `out` and `lse` that lie on other memory of the call, or on themselves, are refused by every module."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvgen.runtime.calls import Variant
from kvgen.runtime.kvcache import KVCache
from tests.support.cpu import spec_of, variant

Make = Callable[[torch.Tensor, KVCache], torch.Tensor]


@pytest.fixture(scope="module")
def built() -> Variant:
    return variant(spec_of())


@pytest.fixture
def cache(built: Variant) -> KVCache:
    held = built.new_cache(1, 128)
    k, v = torch.randn(2, 1, 40, 2, 64, generator=torch.Generator().manual_seed(1)).half()
    built.prefill(held, k, v)
    return held


@pytest.fixture
def q() -> torch.Tensor:
    return torch.randn(1, 1, 4, 64, generator=torch.Generator().manual_seed(2)).half()


@pytest.mark.parametrize(
    ("out", "reason"),
    [
        (lambda q, c: q, "attend: out overlaps with q"),
        (lambda q, c: torch.empty(1, 1, 1, 64).half().expand(1, 1, 4, 64), "attend: out overlaps with itself"),
        (lambda q, c: c.k_residual.view(-1)[:256].view(1, 1, 4, 64), "attend: out overlaps with k_residual"),
        (lambda q, c: c.packed.view(-1)[:512].view(torch.float16).view(1, 1, 4, 64), "attend: out overlaps with packed"),
        (lambda q, c: q.float(), r"^out must be torch.float16, not torch.float32$"),
        (lambda q, c: q.to("meta"), "^out is on meta, and the cache on cpu$"),
    ],
)
def test_outputs_that_cannot_be_written_are_refused(built: Variant, cache: KVCache, q: torch.Tensor, out: Make, reason: str) -> None:
    before = q.clone()
    with pytest.raises(ValueError, match=reason):
        built.attend(q, cache, out=out(q, cache))
    assert torch.equal(q, before)
    assert cache.bound == 40


def test_new_tokens_and_the_logsumexp_are_no_place_for_the_output(built: Variant, cache: KVCache, q: torch.Tensor) -> None:
    new = torch.randn(1, 1, 2, 64).half()
    both = torch.zeros(1, 1, 6, 64).half()
    with pytest.raises(ValueError, match="decode: out overlaps with k_new"):
        built.decode(q, both[:, :, 2:4], new, cache, out=both[:, :, :4])
    with pytest.raises(ValueError, match="decode: lse overlaps with v_new"):
        built.decode(q, new.clone(), new, cache, lse=new.view(-1)[:8].view(torch.float32).view(1, 4, 1))
    memory = torch.zeros(256).half()
    with pytest.raises(ValueError, match="attend: out overlaps with lse"):
        built.attend(q, cache, out=memory.view(1, 1, 4, 64), lse=memory[:8].view(torch.float32).view(1, 4, 1))
    assert cache.bound == 40
    assert cache.lengths.tolist() == [40]
