"""Rotary embedding with the rotation of a format, in one kernel: as torch computes it, over views, and within a graph."""

from __future__ import annotations

import pytest
import torch

from kvgen import UnsupportedError, load_spec, rotary
from kvgen.format.layout import Rotation
from kvgen.integrations.rotary import plain


@pytest.mark.parametrize(("dtype", "dim", "pairs", "block"), [("float16", 128, 64, 128), ("bfloat16", 96, 16, 32), ("bfloat16", 64, 32, 0)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_kernel_is_what_torch_computes(dtype: str, dim: int, pairs: int, block: int, interleaved: bool) -> None:
    attention = {"q_heads": 8, "kv_heads": 2, "head_dim": dim, "dtype": dtype}
    key = {"bits": 4, "rotate": {"block": block, "applied": "caller"}} if block else {"bits": 4}
    spec = load_spec({"name": "rotary", "attention": attention, "key": key, "value": {"bits": 4, "group": dim}})
    torch.manual_seed(0)
    both = torch.randn(3, 37, 12, dim, device="cuda").to(getattr(torch, dtype))  # q, k and v as one projection gives them
    q, k = both[:, :, :8], both[:, :, 8:10]
    cos, sin = (torch.randn(500, pairs, device="cuda") for _ in range(2))
    positions = torch.randint(0, 500, (3, 37), device="cuda")
    found = rotary(q, k, cos, sin, positions, spec, interleaved=interleaved)
    rotation = Rotation(block, True) if block else None
    for x, out in zip((q, k), found, strict=True):
        want = plain(x, cos, sin, positions, interleaved, rotation)
        assert (out.float() - want.float()).norm() / want.float().norm() < (2e-5 if dtype == "float16" else 2e-4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = rotary(q, k, cos, sin, positions, spec, interleaved=interleaved)
    positions.copy_(torch.randint(0, 500, (3, 37), device="cuda"))
    graph.replay()
    fresh = rotary(q, k, cos, sin, positions, spec, interleaved=interleaved)
    assert all(torch.equal(one, other) for one, other in zip(again, fresh, strict=True))
    assert not torch.equal(again[0], found[0])


def test_pairs_that_are_no_multiple_of_8_are_refused() -> None:
    x, table = torch.randn(5, 2, 64, device="cuda").half(), torch.randn(9, 12, device="cuda")
    with pytest.raises(UnsupportedError, match="multiples of 8"):
        rotary(x, x, table, table, torch.arange(5, device="cuda"))
