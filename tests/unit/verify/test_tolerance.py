"""Errors of outputs."""

from __future__ import annotations

import math

import pytest
import torch

from kvgen.errors import CheckError
from kvgen.format.layout import packed_layout
from kvgen.format.places import code_bits, param_offsets
from kvgen.verify.packing import pack_blocks
from kvgen.verify.tolerance import Comparison, relative_l2, row_tolerance, worst_relative_l2
from tests.support.cpu import spec_of
from tests.support.specs import kv4_spec


def test_a_single_row_of_float16_has_the_limit_of_all() -> None:
    """Except for a schedule that leaves out rounding errors, and in the other types."""
    assert row_tolerance("float16") == row_tolerance(torch.float16) == 2e-3
    assert row_tolerance("float16", exact=False) == 2e-2
    assert row_tolerance("bfloat16") == pytest.approx(0.1)


def test_verification_refuses_a_row_that_all_rows_together_hide() -> None:
    want, lse = torch.ones(1, 1, 64, 16), torch.zeros(1, 1, 64)
    got = want.clone()
    got[0, 0, 5] += 5e-3
    spec, device = kv4_spec(attention={"dtype": "float16"}), torch.device("cpu")
    Comparison(spec, device, exact=False).output("here", got, lse, want.double(), lse.double())
    with pytest.raises(CheckError, match="worst row is 0.005, and at most 0.002"):
        Comparison(spec, device).output("here", got, lse, want.double(), lse.double())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_infinitely_wrong(bad: float) -> None:
    got = torch.tensor([1.0, bad])
    assert relative_l2(got, torch.tensor([1.0, 2.0])) == math.inf
    assert worst_relative_l2(got.unsqueeze(0), torch.tensor([[1.0, 2.0]])) == math.inf


def test_the_lse_of_nothing_is_right() -> None:
    lse = torch.tensor([1.0, -math.inf])
    assert relative_l2(lse, lse) == 0
    assert relative_l2(torch.tensor([1.0, 0.0]), lse) == math.inf


def test_one_bad_row_among_many_shows() -> None:
    want = torch.ones(1000, 8)
    got = want.clone()
    got[7] = 0
    assert relative_l2(got, want) < 0.04
    assert worst_relative_l2(got, want) == pytest.approx(1.0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", ["code", "scale", "zero"])
def test_every_part_of_a_packed_block_is_compared(kind: str, device: str) -> None:
    """On a GPU a few scales and zeros may be off by one step, and none by more."""
    layout = packed_layout(spec_of(), 32, "simd")
    blocks = pack_blocks(layout, *torch.randn(2, 1, 2, 40, 32, layout.head_dim, generator=torch.Generator().manual_seed(0)).half())
    comparison = Comparison(spec_of(), torch.device(device))
    comparison.codes("here", layout, "key", blocks, blocks)
    place = (
        int(code_bits(layout, "key")[3, 5]) // 8
        if kind == "code"
        else int(param_offsets(layout, "key")[("scale", "zero").index(kind)].flatten()[5])
    )
    wrong, near = blocks.clone(), blocks.clone()
    wrong[0, 1, 7, place] ^= 0xFF
    near[0, 1, 7, place] ^= 1
    with pytest.raises(CheckError, match="codes of key here: "):
        comparison.codes("here", layout, "key", wrong, blocks)
    if kind != "code" and device == "cuda":
        comparison.codes("here", layout, "key", near, blocks)
