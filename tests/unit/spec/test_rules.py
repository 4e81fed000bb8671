"""Combinations that are refused, each with its reason and place; and their nearest neighbours, which are not."""

from __future__ import annotations

from typing import Any

import pytest

from kvgen.errors import SpecError
from kvgen.spec import load_spec
from tests.support.specs import base

KEY2 = {"bits": 2, "axis": "channel", "group": 32}
TOKEN = {"bits": 4, "axis": "token", "group": 64}


def attention(**changes: Any) -> dict[str, Any]:
    return {"q_heads": 4, "kv_heads": 2, "head_dim": 64, **changes}


@pytest.mark.parametrize(
    ("bad", "path", "reason", "good"),
    [
        (
            {"attention": attention(kv_heads=3)},
            "attention.q_heads",
            r"q_heads \(4\) must be a multiple of kv_heads \(3\)",
            {"attention": attention(kv_heads=4)},
        ),
        (
            {"value": {**TOKEN, "group": 48}},
            "value.group",
            r"value.group \(48\) must divide head_dim \(64\)",
            {"value": {**TOKEN, "group": 32}},
        ),
        (
            {"key": {"bits": 4, "axis": "channel", "group": 40}},
            "key.group",
            "multiple of 16 tokens",
            {"key": {"bits": 4, "axis": "channel", "group": 48}},
        ),
        (
            {"cache": {"layout": "paged", "page": 48}},
            "cache.page",
            r"page \(48\) must be a multiple of key.group \(32\)",
            {"cache": {"layout": "paged", "page": 96}},
        ),
        (
            {"cache": {"layout": "paged", "page": 40}, "key": TOKEN},
            "cache.page",
            r"page \(40\) must be a multiple of 16",
            {"cache": {"layout": "paged", "page": 48}, "key": TOKEN},
        ),
        ({"cache": {"layout": "paged"}}, "cache.page", "a paged cache needs", {"cache": {"layout": "paged", "page": 64}}),
        ({"cache": {"page": 64}}, "cache.page", "the layout is contiguous", {"cache": {"layout": "paged", "page": 64}}),
        (
            {"key": {**KEY2, "bits": 4, "boost": {"fraction": 0.25}}},
            "key.boost.fraction",
            "but key.bits is 4",
            {"key": {**KEY2, "boost": {"fraction": 0.25}}},
        ),
        (
            {"key": {**TOKEN, "bits": 2, "boost": {"fraction": 0.25}}},
            "key.boost.fraction",
            "key.axis must be channel",
            {"key": {**TOKEN, "bits": 2, "boost": {"fraction": 0.0}}},
        ),
        (
            {"key": {**KEY2, "zero": False, "boost": {"fraction": 0.25}}},
            "key.boost.fraction",
            "key.zero must be true",
            {"key": {**KEY2, "zero": False}},
        ),
        ({"key": {**KEY2, "boost": {"fraction": 1.0}}}, "key.boost.fraction", "write bits: 4", {"key": {**KEY2, "bits": 4}}),
        (
            {"key": {**KEY2, "boost": {"fraction": 0.1}}},
            "key.boost.fraction",
            r"0.1 of 64 channels is 6.4",
            {"key": {**KEY2, "boost": {"fraction": 0.125}}},
        ),
        (
            {"cache": {"local": 8}, "key": {"bits": 16}, "value": {"bits": 16}},
            "cache.local",
            "nothing is quantized",
            {"cache": {"local": 8, "rollback": 8}, "value": {"bits": 16}},
        ),
        (
            {"cache": {"sink": 8}, "key": {"bits": 16}, "value": {"bits": 16}},
            "cache.sink",
            "nothing is quantized",
            {"cache": {"sink": 8}, "key": {"bits": 16}},
        ),
        (
            {"cache": {"sink": 8}, "attention": attention(window=64)},
            "cache.sink",
            "never looks back",
            {"cache": {"sink": 8}},
        ),
        (
            {"cache": {"local": 64}, "attention": attention(window=64)},
            "cache.local",
            "older tokens are never read",
            {"cache": {"local": 63}, "attention": attention(window=64)},
        ),
        (
            {"workloads": [{"batch": 1, "kv_len": 64, "q_len": 2}]},
            "workloads[0].q_len",
            r"q_len \(2\) is more than attention.q_len \(1\)",
            {"workloads": [{"batch": 1, "kv_len": 64, "q_len": 2}], "attention": attention(q_len=2)},
        ),
        (
            {"workloads": [{"batch": 1, "kv_len": 2, "q_len": 3}], "attention": attention(q_len=4)},
            "workloads[0].q_len",
            "which counts the new tokens",
            {"workloads": [{"batch": 1, "kv_len": 3, "q_len": 3}], "attention": attention(q_len=4)},
        ),
        (
            {"attention": attention(softcap=1e-9)},
            "attention.softcap",
            r"softcap \(1e-09\) must be 0, which switches it off, or at least 0.001",
            {"attention": attention(softcap=0.001)},
        ),
        (
            {"workloads": [{"batch": 1, "kv_len": 64}, {"batch": 1, "kv_len": 64, "weight": 2.0}]},
            "workloads[1]",
            r"1x64 is listed twice, first as workloads\[0\]",
            {"workloads": [{"batch": 1, "kv_len": 64}, {"batch": 2, "kv_len": 64}]},
        ),
    ],
)
def test_rule(bad: dict[str, Any], path: str, reason: str, good: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=reason) as caught:
        load_spec(base(**bad))
    assert path in [issue.path for issue in caught.value.issues]
    load_spec(base(**good))


def test_every_broken_rule_is_an_issue_of_its_own() -> None:
    with pytest.raises(SpecError) as caught:
        load_spec(
            base(key={"bits": 4, "axis": "channel", "group": 40}, value={**TOKEN, "group": 48}, cache={"layout": "paged", "page": 64})
        )
    assert [issue.path for issue in caught.value.issues] == ["key.group", "cache.page", "value.group"]


@pytest.mark.parametrize("dim", [112, 176, 208, 256])
def test_every_number_of_channels_can_be_boosted(dim: int) -> None:
    """Also those whose fraction times head_dim is no whole number in binary: 29 of 112."""
    for channels in range(1, dim):
        key = {**KEY2, "boost": {"fraction": channels / dim}}
        spec = load_spec(base(attention=attention(head_dim=dim), key=key, value={"bits": 16}))
        assert spec.key.boosted(dim) == channels


@pytest.mark.parametrize("fraction", [1e-12, 1 - 1e-12, 0.3])
def test_a_fraction_is_of_some_channels_and_not_of_all(fraction: float) -> None:
    with pytest.raises(SpecError, match="not a whole number"):
        load_spec(base(key={**KEY2, "boost": {"fraction": fraction}}))
