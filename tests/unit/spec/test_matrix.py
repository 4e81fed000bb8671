"""Specs of operations on a matrix."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvgen.errors import SpecError
from kvgen.spec import MatrixShape, MatrixSpec, dump_spec, load_any_spec, load_spec, presets
from kvgen.spec.workloads import apart_across_formats, distance

TEXT = "operation: quantize\narch: cpu\nworkloads:\n  - {tokens: 2048, channels: 128}\n"


def test_a_spec_with_an_operation_is_one_of_a_matrix(tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(TEXT)
    for source in (TEXT, file, {"operation": "quantize", "arch": "cpu", "workloads": [{"tokens": 2048, "channels": 128}]}):
        for _ in range(2):  # validated, and from the record of it
            spec = load_any_spec(source)
            assert isinstance(spec, MatrixSpec)
            assert (spec.matrix.dtype, spec.matrix.bits, spec.workloads[0].key) == ("float32", 8, "2048x128")
    assert load_any_spec(dump_spec(spec)) == spec


def test_the_format_says_what_is_timed_and_over_which_type() -> None:
    one = load_any_spec(TEXT)
    assert load_any_spec(TEXT.replace("2048", "4096")).format_id == one.format_id
    assert load_any_spec(TEXT.replace("quantize", "dequantize")).format_id != one.format_id
    assert load_any_spec(TEXT + "matrix: {dtype: float16}\n").format_id != one.format_id


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"operation": "quantise"}, r"operation: must be one of quantize, dequantize.*did you mean quantize"),
        ({"matrix": {"bits": 4}}, r"matrix.bits: must be 8, not 4"),
        ({"matrix": {"axis": "token"}}, r"matrix.axis: must be channel, not"),
        ({"attention": {}}, r"attention: unknown field"),
        ({"workloads": [{"tokens": 0, "channels": 1}]}, r"workloads\[0\].tokens: must be greater than 0"),
        ({"workloads": [{"tokens": 4, "channels": 1}] * 2}, r"workloads\[1\]: 4x1 is listed twice, first as workloads\[0\]"),
        ({"workloads": [{"tokens": 4, "channels": 1}] * 2 + [{"tokens": "x", "channels": 1}]}, r"(?s)tokens: must be.*4x1 is listed twice"),
        ({"workloads": [{"batch": 1, "kv_len": 4}]}, r"workloads\[0\].tokens: required"),
    ],
)
def test_a_mistake_is_told_with_its_place(change: dict[str, object], told: str) -> None:
    with pytest.raises(SpecError, match=told):
        load_any_spec({"operation": "quantize", **change})


def test_attention_and_matrices_are_not_mistaken_for_each_other() -> None:
    with pytest.raises(SpecError, match="an operation on a matrix, and attention is asked for"):
        load_spec(TEXT)


def test_shapes_are_as_far_apart_as_their_channels_and_elements() -> None:
    small, wide, same = (MatrixShape(tokens=t, channels=c) for t, c in ((64, 64), (32, 128), (64, 64)))
    assert distance(small, same) == 0
    assert distance(small, wide) == 1
    spec = load_any_spec(TEXT)
    assert apart_across_formats(spec, small, spec, wide) == 1
    attention = presets()["kitty"]
    assert apart_across_formats(attention, attention.workloads[0], attention, attention.workloads[0]) == 0
