"""The JSON schema that editors use."""

from __future__ import annotations

import json
from pathlib import Path

from kvgen.spec import schema
from kvgen.spec.presets import FORMATS

COMMITTED = Path(__file__).parents[3] / "docs" / "kvgen-spec.schema.json"


def test_the_committed_schema_is_current() -> None:
    """As data: releases of pydantic write 0 and 0.0, and keys in another order."""
    assert json.loads(COMMITTED.read_text()) == json.loads(schema.dumps()), "run: python -m kvgen.spec.schema > docs/kvgen-spec.schema.json"


def test_every_field_is_described_and_nothing_else_is_allowed() -> None:
    data = schema.json_schema()
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
