"""Static scales: their one form, what is refused, and calibration."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvgen.format.calibration import calibrated_scales
from kvgen.format.scales import static_scales
from kvgen.verify.reference import WholeSequences
from tests.support.cpu import spec_of

SPEC = spec_of(k="4@channel", v="8@head")
K, V = torch.rand(2, 64) + 0.1, torch.tensor([0.5, 2.0])


def test_scales_have_one_form_and_formats_one_id_whatever_has_no_effect() -> None:
    both = static_scales(SPEC, K, V.reshape(2, 1, 1))
    assert both is not None
    assert torch.equal(both[0], K)
    assert torch.equal(both[1], V[:, None].expand(2, 64))
    half = static_scales(spec_of(k="4c32", v="e4m3@tensor"), None, 0.25)
    assert half is not None
    assert half.unique().tolist() == [0.25, 1.0]
    assert static_scales(spec_of(), None, None) is None
    ids = {spec_of(k=k).format_id for k in ("8@head", "8@tensor", "4@head", "e4m3@head", "8c32s")}
    assert len(ids) == 5


@pytest.mark.parametrize(
    ("k", "v", "reason"),
    [
        (None, V, "key.scale of this format is channel: give scales="),
        (K[:, :32], V, r"its scales are \[2, 64\], not \[2, 32\]"),
        (V, V, r"key.scale is channel: its scales are \[2, 64\], not \[2\]"),
        (K, 1.0, r"value.scale is head: its scales are \[2\], not \[\]"),
        (K, -V, "the scales of value must be finite and above 0"),
        (K, V * torch.nan, "finite and above 0"),
        (K * 0, V, "the scales of key must be finite and above 0"),
    ],
)
def test_what_does_not_fit_the_format_is_refused(k: Any, v: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        static_scales(SPEC, k, v)


def test_scales_that_blocks_hold_are_not_given() -> None:
    with pytest.raises(ValueError, match="value.scale of this format is dynamic: its blocks hold them"):
        static_scales(spec_of(k="8@head"), V, V)


def test_calibrated_scales_saturate_nothing() -> None:
    """The error of every number is at most half a step, of K as it is rotated."""
    spec = spec_of(k="8@channel~64", v="8@head", dtype="float32")
    k, v = torch.randn(2, 2, 64, 2, 64, generator=torch.Generator().manual_seed(3)) * torch.logspace(-2, 2, 64)
    scales = static_scales(spec, *calibrated_scales(spec, k, v))
    assert scales is not None
    whole = WholeSequences(spec, 32, k, v, scales)
    for read, held, scale in zip(whole._read, whole.held, scales, strict=True):
        assert ((read - held).abs() <= scale.double() * 0.5001).all()
    two_levels, _ = calibrated_scales(spec_of(k="nvfp4@head", dtype="float32"), k, v)
    assert torch.equal(two_levels, k.abs().amax((0, 1, 3)) / (6 * 448)), "the largest code times the largest scale of a group"
