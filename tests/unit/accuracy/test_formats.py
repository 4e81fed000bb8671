"""The named formats, the table that ships, and the formats that fit a model."""

from __future__ import annotations

from itertools import pairwise

from kvgen.accuracy import SAME_AS, SHORT, Model, formats, options, read_table
from kvgen.spec import presets


def test_every_format_has_specs_of_its_own_and_a_preset_without_one_has_a_twin() -> None:
    llama = Model.named("llama-3.1-8b")
    made = [tuple(part.spec.format_id for part in llama.parts(name, "float16")) for name in formats()]
    assert len(set(made)) == len(made)
    stored = {name: {part: spec.format()[part] for part in ("key", "value", "cache")} for name, spec in presets().items()}
    assert all(stored[name] == stored[same] for name, same in SAME_AS.items())
    assert set(presets()) - set(SAME_AS) <= set(formats())
    assert set(SHORT) <= set(formats())


def test_first_and_last_layers_may_have_8_bits() -> None:
    ends, inner = Model.named("llama-3.1-8b").parts("int4-ends-8")
    assert (ends.layers, ends.spec.key.bits, ends.spec.value.bits) == (4, 8, 8)
    assert (inner.layers, inner.spec.key.bits, inner.spec.value.bits) == (28, 4, 4)
    assert "ends.layers is a number from 1 to 1" in str(Model.named("3x8/2x64").refused("int4-ends-8"))


def test_the_table_that_ships_is_of_todays_formats_and_has_the_orders_that_are_known() -> None:
    table = read_table()
    assert set(table.index) - {"transformers"} <= set(formats())
    kl = table.kl
    assert kl["k8v8"] < kl["bitdecoding-int4"] < kl["bitdecoding-int2"]
    assert kl["k4v2"] < kl["k2v4"], "K needs the bits more than V"
    assert kl["kitty-pro"] < kl["kitty-no-boost"]
    assert kl["saw-int4"] < kl["turbomind-int4"], "a rotation pays for K per token"


def test_only_formats_that_no_other_one_beats_are_options() -> None:
    front = options(Model.named("llama-3.1-8b"), read_table())
    names = [one.name for one in front]
    assert {"kitty-pro", "k8v4", "16-bit"} <= set(names)
    assert "turbomind-int4" not in names, "bitdecoding-int4 is as small and costs less"
    for smaller, larger in pairwise(front):
        assert smaller.token_bytes < larger.token_bytes
        assert smaller.quality["kl"] > larger.quality["kl"]


def test_sizes_are_those_of_all_layers() -> None:
    (int4,) = options(Model.named("llama-3.1-8b"), read_table().loc[["bitdecoding-int4"]])
    assert (int4.token_bytes, int4.bits) == (34 * 1024, 4.25)
    gpt = options(Model.named("gpt-oss-20b"), read_table())
    assert all(len(one.parts) == (4 if "ends" in one.name else 2) for one in gpt)
    assert not {"kitty", "kitty-pro"} & {one.name for one in gpt}, "their local tokens are the whole window"
