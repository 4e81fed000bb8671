"""Combinations that are refused, each with its reason and place; and their nearest neighbours, which are not."""

from __future__ import annotations

from typing import Any

import pytest

from kvgen.errors import SpecError
from kvgen.spec import load_spec
from tests.support.specs import base

KEY2 = {"key.bits": 2}
UNQUANTIZED = {"key.bits": 16, "value.bits": 16}
PER_TOKEN = {"key.axis": "token", "key.group": 64}
PAGED = {"cache.layout": "paged"}
ARRIVAL = "cache.quantize"
BOOST = "key.boost.fraction"


def work(*shapes: tuple[int, int, int]) -> dict[str, Any]:
    return {"workloads": [{"batch": batch, "kv_len": kv_len, "q_len": q_len} for batch, kv_len, q_len in shapes]}


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    """The small spec with other fields, by their paths."""
    data = base()
    for path, value in changes.items():
        *sections, name = path.split(".")
        section = data
        for inner in sections:
            section = section.setdefault(inner, {})
        section[name] = value
    return data


@pytest.mark.parametrize(
    ("bad", "path", "reason", "good"),
    [
        ({"attention.kv_heads": 3}, "attention.q_heads", r"q_heads \(4\) must be a multiple of kv_heads \(3\)", {"attention.kv_heads": 4}),
        ({"attention.softcap": 1e-9}, "attention.softcap", r"\(1e-09\) must be 0, .* or at least 0.001", {"attention.softcap": 0.001}),
        ({"value.group": 48}, "value.group", r"value.group \(48\) must divide head_dim \(64\)", {"value.group": 32}),
        ({"key.group": 40}, "key.group", "multiple of 16 tokens", {"key.group": 48}),
        ({**PAGED, "cache.page": 48}, "cache.page", r"page \(48\) must be a multiple of key.group \(32\)", {**PAGED, "cache.page": 96}),
        ({**PAGED, **PER_TOKEN, "cache.page": 40}, "cache.page", "must be a multiple of 16", {**PAGED, **PER_TOKEN, "cache.page": 48}),
        (PAGED, "cache.page", "a paged cache needs", {**PAGED, "cache.page": 64}),
        (
            {"key.scale": "head", "key.zero": True},
            "key.zero",
            r"a static scale \(head\) has no zero",
            {"key.scale": "head", "key.group": 5},
        ),
        ({"value.bits": 16, "value.scale": "tensor"}, "value.scale", "there are none with 16 bits", {"value.scale": "tensor"}),
        (
            {"key": {"type": "mxfp4", "scale": "head"}},
            "key.scale",
            "no second level of scales",
            {"key": {"type": "nvfp4", "scale": "head"}},
        ),
        ({"key": {"type": "nvfp4", "scale": "channel"}}, "key.scale", "not of a channel", {"key": {"type": "nvfp4"}}),
        ({"cache.page": 64}, "cache.page", "the layout is contiguous", {**PAGED, "cache.page": 64}),
        ({BOOST: 0.25}, BOOST, "but key.bits is 4", {**KEY2, BOOST: 0.25}),
        ({**KEY2, **PER_TOKEN, BOOST: 0.25}, BOOST, "key.axis must be channel", {**KEY2, **PER_TOKEN, BOOST: 0.0}),
        ({**KEY2, "key.zero": False, BOOST: 0.25}, BOOST, "key.zero must be true", {**KEY2, "key.zero": False}),
        ({**KEY2, BOOST: 1.0}, BOOST, "write bits: 4", {"key.bits": 4}),
        ({**KEY2, BOOST: 0.1}, BOOST, "0.1 of 64 channels is 6.4", {**KEY2, BOOST: 0.125}),
        ({**KEY2, BOOST: 1e-12}, BOOST, "not a whole number", {**KEY2, BOOST: 1 / 64}),
        ({**UNQUANTIZED, "cache.local": 8}, "cache.local", "nothing is quantized", {"value.bits": 16, "cache.local": 8}),
        ({**UNQUANTIZED, "cache.sink": 8}, "cache.sink", "nothing is quantized", {"key.bits": 16, "cache.sink": 8}),
        ({"cache.sink": 8, "attention.window": 64}, "cache.sink", "never looks back", {"cache.sink": 8}),
        ({"cache.local": 64, "attention.window": 64}, "cache.local", "never read", {"cache.local": 63, "attention.window": 64}),
        ({ARRIVAL: "arrival"}, "key.axis", "must be token with cache.quantize arrival", {**PER_TOKEN, ARRIVAL: "arrival"}),
        ({**PER_TOKEN, ARRIVAL: "arrival", "cache.sink": 4}, "cache.sink", "every token is quantized", {**PER_TOKEN, "cache.sink": 4}),
        ({"key.bits": 16, ARRIVAL: "arrival", "cache.rollback": 4}, "cache.rollback", "any number", {"key.bits": 16, ARRIVAL: "arrival"}),
        (work((1, 64, 2)), "workloads[0].q_len", r"is more than attention.q_len \(1\)", {**work((1, 64, 2)), "attention.q_len": 2}),
        ({**work((1, 2, 3)), "attention.q_len": 4}, "workloads[0].q_len", "new tokens", {**work((1, 3, 3)), "attention.q_len": 4}),
        (work((1, 64, 1), (1, 64, 1)), "workloads[1]", r"1x64 is listed twice, first as workloads\[0\]", work((1, 64, 1), (2, 64, 1))),
    ],
)
def test_rule(bad: dict[str, Any], path: str, reason: str, good: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=reason) as caught:
        load_spec(changed(bad))
    assert path in [issue.path for issue in caught.value.issues]
    load_spec(changed(good))


@pytest.mark.parametrize("dim", [112, 256])
def test_every_number_of_channels_can_be_boosted(dim: int) -> None:
    """Also those whose fraction times head_dim is no whole number in binary: 29 of 112."""
    for channels in range(1, dim):
        spec = load_spec(changed({**KEY2, BOOST: channels / dim, "attention.head_dim": dim, "value.bits": 16}))
        assert spec.key.boosted(dim) == channels
