"""What makes two specs the same format; specs of operations on a matrix; the JSON schemas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvgen.errors import SpecError
from kvgen.spec import LinearSpec, MatrixSpec, dump_spec, load_any_spec, load_spec, schema
from tests.support.specs import base

DOCS = Path(__file__).parents[3] / "docs"
QUANT = {"bits": 2, "axis": "channel", "group": 32}
MATRIX = "operation: quantize\narch: cpu\nworkloads:\n  - {tokens: 2048, channels: 128}\n"


def format_id(**sections: Any) -> str:
    return load_spec(base(**sections)).format_id


@pytest.mark.parametrize(
    "sections",
    [
        {"key": {"bits": 8, "axis": "channel", "group": 32}},
        {"key": {"bits": 4, "axis": "channel", "group": 64}},
        {"key": {"bits": 4, "axis": "channel", "group": 32, "zero": False}},
        {"cache": {"sink": 4}},
        {"attention": {"q_heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": "bfloat16"}},
    ],
)
def test_what_changes_the_numbers_changes_the_format(sections: dict[str, Any]) -> None:
    assert format_id(**sections) != format_id()


def test_fields_that_say_nothing_do_not_change_the_format() -> None:
    assert format_id() == format_id(name="other", arch="sm90", workloads=[{"batch": 9, "kv_len": 9}])
    assert format_id(key={"bits": 16}) == format_id(key={"bits": 16, "axis": "token", "group": 7, "zero": False})
    assert format_id(key=QUANT) == format_id(key={**QUANT, "boost": {"select": "range"}})
    boosts = [{"fraction": 0.25}, {"fraction": 0.25 + 1e-14}, {"fraction": 0.5}, {"fraction": 0.25, "select": "range"}]
    ids = [format_id(key={**QUANT, "boost": boost}) for boost in boosts]
    assert ids[0] == ids[1]
    assert len({format_id(key=QUANT), *ids}) == 4


def test_a_spec_with_an_operation_is_one_of_a_matrix() -> None:
    spec = load_any_spec(MATRIX)
    assert isinstance(spec, MatrixSpec)
    assert (spec.matrix.dtype, spec.matrix.bits, spec.workloads[0].key) == ("float32", 8, "2048x128")
    assert load_any_spec(dump_spec(spec)) == load_any_spec(spec.to_json()) == spec
    assert load_any_spec(MATRIX.replace("2048", "4096")).format_id == spec.format_id
    assert load_any_spec(MATRIX.replace("quantize", "dequantize")).format_id != spec.format_id
    with pytest.raises(SpecError, match="an operation on a matrix, and attention is asked for"):
        load_spec(MATRIX)


def test_a_linear_layer_is_a_format_of_its_shape_and_epilogue() -> None:
    text = "operation: linear\nlinear: {n: 4096, k: 4096, group: row}\n"
    spec = load_any_spec(text)
    assert isinstance(spec, LinearSpec)
    assert [work.key for work in spec.workloads] == [f"rows{rows}" for rows in (1, 4, 8, 16, 32, 64, 128)]
    assert load_any_spec(dump_spec(spec)) == load_any_spec(spec.to_json()) == spec
    assert load_any_spec(f"{text}workloads: [{{rows: 3}}]").format_id == spec.format_id
    assert load_any_spec(text.replace("row", "64")).format_id != spec.format_id
    with pytest.raises(SpecError, match=r"of a linear layer, and attention is asked for.*get_linear_kernel takes it"):
        load_spec(text)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"operation": "quantise"}, r"operation: must be one of quantize, dequantize.*did you mean quantize"),
        ({"matrix": {"bits": 4}}, r"matrix.bits: must be 8, not 4"),
        ({"attention": {}}, r"attention: unknown field"),
        ({"workloads": [{"tokens": 4, "channels": 1}] * 2}, r"4x1 is listed twice"),
        ({"workloads": [{"batch": 1, "kv_len": 4}]}, r"workloads\[0\].tokens: required"),
        ({"operation": "linear", "linear": {"n": 48, "k": 192}}, r"linear.k: k \(192\) must be a multiple of group \(128\)"),
        (
            {"operation": "linear", "linear": {"n": 48, "k": 128, "epilogue": "silu_mul"}},
            r"n \(48\) must be a multiple of 32 with silu_mul",
        ),
        (
            {"operation": "linear", "linear": {"n": 40, "k": 64, "group": 32}},
            r"linear.n: must be a multiple of 16.*\n.*one of 64, 128, row",
        ),
    ],
)
def test_a_mistake_of_an_operation_is_told_with_its_place(change: dict[str, object], told: str) -> None:
    with pytest.raises(SpecError, match=told):
        load_any_spec({"operation": "quantize", **change})


def test_the_committed_schemas_are_current_and_describe_every_field() -> None:
    """As data: releases of pydantic write 0 and 0.0, and keys in another order."""
    for name, data in (("spec", schema.json_schema()), ("matrix", schema.matrix_schema()), ("linear", schema.linear_schema())):
        file = DOCS / f"kvgen-{name}.schema.json"
        assert json.loads(file.read_text()) == json.loads(json.dumps(data)), f"run: kvgen schema [--matrix | --linear] > {file}"
        for part in [data, *data["$defs"].values()]:
            assert part["additionalProperties"] is False
            assert all(field.get("description") for field in part["properties"].values())
