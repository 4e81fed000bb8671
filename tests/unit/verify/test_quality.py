"""What formats cost."""

from __future__ import annotations

from typing import Any

import pytest

from kvgen.spec import load_spec
from kvgen.verify.data import structured
from kvgen.verify.quality import Quality, format_quality, quality
from tests.support.specs import base


def of(**sections: Any) -> Quality:
    spec = load_spec(base(**sections))
    return quality(spec, structured(spec, 1, 200, logit=10.0), block=32)


def token(bits: int) -> dict[str, Any]:
    return {"bits": bits, "axis": "token", "group": 64}


def test_an_unquantized_cache_costs_nothing() -> None:
    found = of(key={"bits": 16}, value={"bits": 16})
    assert found.relative_l2 == 0
    assert found.weights_l1 == 0


def test_more_bits_cost_less() -> None:
    errors = [of(key=token(bits), value=token(bits)) for bits in (8, 4, 2)]
    assert errors[0].relative_l2 < errors[1].relative_l2 < errors[2].relative_l2
    assert errors[0].weights_l1 < errors[1].weights_l1 < errors[2].weights_l1 < 2


def test_scales_per_channel_stand_outlier_channels_better() -> None:
    per_channel = {"bits": 4, "axis": "channel", "group": 32}
    assert of(key=per_channel).weights_l1 < of(key=token(4)).weights_l1


@pytest.mark.parametrize(
    "sections",
    [
        {"key": {"bits": 2, "axis": "channel", "group": 1008}},
        {"key": {"bits": 4, "axis": "token", "group": 64}, "cache": {"layout": "paged", "page": 48}},
    ],
    ids=["long-groups", "odd-pages"],
)
def test_the_quality_of_every_format_is_of_blocks_that_were_packed(sections: dict[str, Any]) -> None:
    attention = {"q_heads": 1, "kv_heads": 1, "head_dim": 64}
    found = format_quality(load_spec(base(attention=attention, **sections)))
    assert found["normal"]["weights_l1"] > 0
    assert found["structured"]["relative_l2"] > 0
