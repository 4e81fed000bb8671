"""The JSON schema that editors use."""

from __future__ import annotations

import json
from pathlib import Path

from kvgen.spec import schema
from kvgen.spec.presets import FORMATS

COMMITTED = Path(__file__).parents[3] / "docs" / "kvgen-spec.schema.json"


def test_the_committed_schema_is_current() -> None:
    """As data: releases of pydantic write 0 and 0.0, and keys in another order."""
    current = json.loads(schema.dumps(schema.json_schema()))
    assert json.loads(COMMITTED.read_text()) == current, "run: python -m kvgen.spec.schema > docs/kvgen-spec.schema.json"
    matrix, file = json.loads(schema.dumps(schema.matrix_schema())), COMMITTED.with_name("kvgen-matrix.schema.json")
    assert json.loads(file.read_text()) == matrix, "run: python -m kvgen.spec.schema matrix > docs/kvgen-matrix.schema.json"


def test_every_field_is_described_and_nothing_else_is_allowed() -> None:
    for data in (schema.json_schema(), schema.matrix_schema()):
        for part in [data, *data["$defs"].values()]:
            assert part["additionalProperties"] is False
            for name, field in part["properties"].items():
                assert field.get("description"), name


def test_choices_and_presets_are_listed() -> None:
    data = schema.json_schema()
    assert data["$defs"]["KeySpec"]["properties"]["bits"]["enum"] == [2, 4, 8, 16]
    assert data["properties"]["preset"]["enum"] == list(FORMATS)
    assert data["required"] == ["attention"]
    assert data["then"]["required"] == ["key", "value"]
