"""The reference of operations on a matrix, and the INT8 paper's metrics."""

from __future__ import annotations

import math

import pytest
import torch

from kvgen.spec import KeySpec
from kvgen.verify import matrix as reference
from kvgen.verify.packing import quantize


def test_codes_are_those_of_a_symmetric_group_of_all_tokens() -> None:
    x = reference.uniform(64, 48, torch.float32, "cpu") * torch.logspace(-3, 2, 48)
    x[:, 7] = 0
    group = quantize(x, KeySpec(bits=8, axis="channel", group=64, zero=False))
    scale = reference.scales(x)
    assert torch.equal(scale, group.scale[0])
    assert torch.equal(reference.codes(x, scale).int(), group.codes.int() - 128)


@pytest.mark.parametrize("channels", [128, 2048])
def test_the_papers_errors(channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "CHUNK", 1 << 16)
    x = reference.uniform(512, channels, torch.float32, "cpu")
    scale = reference.scales(x)
    found = reference.errors(x, reference.dequantized(reference.codes(x, scale), scale, torch.float32))
    step = 1 / 127
    assert found.max_abs == pytest.approx(step / 2, rel=0.01)
    assert found.l2 == pytest.approx(step / math.sqrt(12) * math.sqrt(x.numel()), rel=0.03)
    assert found.attention == pytest.approx(0.095 * math.sqrt(channels / 8192), rel=0.15)  # the paper's, which grows like sqrt(D)
    nothing = reference.errors(x, x)
    assert (nothing.l2, nothing.max_abs, nothing.attention) == (0, 0, 0)
