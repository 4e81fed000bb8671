"""The named formats, the table that ships, and the formats that fit a model."""

from __future__ import annotations

from itertools import pairwise

import pandas as pd
import pytest

from kvgen.accuracy import ERRORS, SAME_AS, SHIPPED, Model, formats, options, read_table, records, suite
from kvgen.spec import presets


def test_every_preset_has_a_row_or_a_twin_that_stores_the_same_codes() -> None:
    assert len({spec.format_id for spec in suite().values()}) == len(suite())
    stored = {name: {part: spec.format()[part] for part in ("key", "value", "cache")} for name, spec in presets().items()}
    assert all(stored[name] == stored[same] for name, same in SAME_AS.items())
    assert set(presets()) - set(SAME_AS) <= set(suite())


def test_the_table_that_ships_is_of_todays_formats() -> None:
    table = pd.read_csv(SHIPPED).set_index("format")
    assert list(table.index) == list(formats())
    (record,) = records({"k4v2": suite()["k4v2"]})
    for name in ("bits", "unquantized_tokens", *ERRORS):
        assert table.loc["k4v2", name] == pytest.approx(record[name], rel=1e-3), name


def test_only_formats_that_no_other_one_beats_are_options() -> None:
    front = options(Model.named("llama-3.1-8b"), read_table())
    names = [one.name for one in front]
    assert {"bitdecoding-int4", "kitty", "int8-per-channel"} <= set(names)
    assert "turbomind-int4" not in names, "bitdecoding-int4 is as small and has smaller errors"
    for smaller, larger in pairwise(front):
        assert smaller.token_bytes < larger.token_bytes
        assert smaller.errors["error"] > larger.errors["error"]


def test_sizes_are_those_of_all_layers() -> None:
    (int4,) = (one for one in options(Model.named("llama-3.1-8b"), read_table()) if one.name == "bitdecoding-int4")
    assert (int4.token_bytes, int4.bits) == (34 * 1024, 4.25)
    gpt = options(Model.named("gpt-oss-20b"), read_table())
    assert all(len(one.parts) == 2 for one in gpt)
    assert not {"kitty", "kitty-pro"} & {one.name for one in gpt}, "their local tokens are the whole window"
