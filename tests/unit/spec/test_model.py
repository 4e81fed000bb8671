"""What makes two specs the same format."""

from __future__ import annotations

from typing import Any

import pytest

from kvgen.digest import digest
from kvgen.spec import AttentionSpec, BoostSpec, QuantSpec, Workload, dump_spec, load_spec
from tests.support.specs import base


def format_id(**sections: Any) -> str:
    return load_spec(base(**sections)).format_id


def test_name_arch_and_workloads_are_not_part_of_the_format() -> None:
    assert format_id() == format_id(name="other", arch="sm90", workloads=[{"batch": 9, "kv_len": 9}])


@pytest.mark.parametrize(
    "sections",
    [
        {"key": {"bits": 8, "axis": "channel", "group": 32}},
        {"key": {"bits": 4, "axis": "channel", "group": 64}},
        {"key": {"bits": 4, "axis": "channel", "group": 32, "zero": False}},
        {"value": {"bits": 4, "axis": "token", "group": 32}},
        {"cache": {"sink": 4}},
        {"attention": {"q_heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": "bfloat16"}},
    ],
)
def test_what_changes_the_numbers_changes_the_format(sections: dict[str, Any]) -> None:
    assert format_id(**sections) != format_id()


def test_fields_that_say_nothing_do_not_change_the_format() -> None:
    assert format_id(key={"bits": 16}) == format_id(key={"bits": 16, "axis": "token", "group": 7, "zero": False})
    quant = {"bits": 2, "axis": "channel", "group": 32}
    assert format_id(key=quant) == format_id(key={**quant, "boost": {"select": "range"}})
    assert format_id(key=quant) != format_id(key={**quant, "boost": {"fraction": 0.25}})
    assert format_id(key={**quant, "boost": {"fraction": 0.25, "select": "range"}}) != format_id(key={**quant, "boost": {"fraction": 0.25}})


def test_short_names_and_derived_values() -> None:
    assert Workload(batch=8, kv_len=1024).key == "8x1024"
    assert Workload(batch=8, kv_len=1024, q_len=4).key == "8x1024q4"
    assert load_spec(base()).attention.group == 2
    assert not QuantSpec(bits=16, axis="token").quantized
    assert QuantSpec(bits=8, axis="token").quantized


def test_the_sign_of_a_zero_says_nothing() -> None:
    heads = {"q_heads": 4, "kv_heads": 2, "head_dim": 64}
    quant = {"bits": 2, "axis": "channel", "group": 32}
    for section, zero, negative in (
        ("attention", {**heads, "softcap": 0.0}, {**heads, "softcap": -0.0}),
        ("key", {**quant, "boost": {"fraction": 0.0}}, {**quant, "boost": {"fraction": -0.0}}),
    ):
        one, two = load_spec(base(**{section: zero})), load_spec(base(**{section: negative}))
        assert one.format_id == two.format_id
        assert one == two
        assert dump_spec(one) == dump_spec(two)
        assert digest(one.to_json()) == digest(two.to_json())
    assert str(AttentionSpec(**heads, softcap=-0.0).softcap) == str(BoostSpec(fraction=-0.0).fraction) == "0.0"
    assert load_spec(dump_spec(load_spec(base())).replace("softcap: 0.0", "softcap: -0.0")).format_id == format_id()
