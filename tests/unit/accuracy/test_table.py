"""The suite, rows, orders, the front, pictures, pages and recommendations, from made-up and committed figures."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvgen.accuracy import recommend
from kvgen.accuracy.orders import COMES_OUT, CONTRADICTED, OPEN, orders
from kvgen.accuracy.pareto import bits, front, step_us
from kvgen.accuracy.recipe import SMALL
from kvgen.accuracy.row import Row, longest, read_csv, write_csv
from kvgen.accuracy.suite import SAME_AS, for_model, suite, unquantized
from kvgen.errors import HostError, KvgenError
from kvgen.format.sizes import bits_per_element
from kvgen.spec import load_spec, presets
from tests.support.specs import base


def row(name: str = "x", *, divergence: float = 1e-3, error: float = 1e-5, increase: float = 0.001, **more: object) -> Row:
    plain = Row(name, 4.0, 1024, 10.0, 9.9, increase, 0.0, 0.99, divergence, error, *[0.1, 0.9, 0.1] * 2, kernel_error=1e-4)
    return replace(plain, **more)  # type: ignore[arg-type]


def test_the_suite_has_every_format_once_and_every_preset() -> None:
    assert len(suite()) >= 12
    assert len({spec.format_id for spec in suite().values()}) == len(suite())
    stored = {name: {part: spec.format()[part] for part in ("key", "value", "cache")} for name, spec in presets().items()}
    for name, same in SAME_AS.items():
        assert stored[name] == stored[same]
    assert set(presets()) - set(SAME_AS) <= set(suite())


def test_a_format_takes_the_models_heads_and_keeps_its_own_bits() -> None:
    for spec in suite().values():
        made = for_model(spec, SMALL.shape, "cpu")
        assert (made.attention.q_heads, made.attention.head_dim) == (4, 128)
        assert bits_per_element(made) == bits_per_element(spec)
        assert unquantized(made).attention == made.attention


def test_groups_that_do_not_fit_the_models_heads_are_refused() -> None:
    wide = load_spec(base(attention={"q_heads": 4, "kv_heads": 2, "head_dim": 256}, value={"bits": 4, "axis": "token", "group": 256}))
    with pytest.raises(KvgenError, match="value.group is 256 channels, and the heads .* have 128"):
        for_model(wide, SMALL.shape, "cpu")


def test_rows_come_back_from_a_file(tmp_path: Path) -> None:
    rows = [row("a", step_us=12.5), row("b", divergence=1.23456789e-7)]
    write_csv(tmp_path / "t.csv", rows, {"device": "d", "date": "2026-01-01"})
    back, facts = read_csv(tmp_path / "t.csv")
    assert back == [rows[0], replace(rows[1], divergence=1.23457e-7)]
    assert facts == {"device": "d", "date": "2026-01-01"}


def test_files_that_are_no_table_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("name,bits\nx,many\n")
    with pytest.raises(KvgenError, match="is no table of `kvgen accuracy --csv`"):
        read_csv(tmp_path / "other.csv")
    (tmp_path / "empty.csv").write_text("name,bits\n")
    with pytest.raises(KvgenError, match="has no rows"):
        read_csv(tmp_path / "empty.csv")
    with pytest.raises(HostError):
        read_csv(tmp_path / "none.csv")


def test_orders_come_out_are_contradicted_or_not_told_apart() -> None:
    def result(kitty: float, error: float = 1e-5) -> str:
        (order,) = orders([row("kitty", divergence=kitty, error=error), row("kitty-pro", divergence=1e-3)])
        return order.result

    assert (result(2e-3), result(5e-4), result(1.01e-3), result(2e-3, 1e-3)) == (COMES_OUT, CONTRADICTED, OPEN, OPEN)


def test_a_format_is_close_within_a_limit() -> None:
    found = [orders([row("bitdecoding-int4", increase=increase, increase_error=0.002)])[0].result for increase in (0.001, 0.02, 0.009)]
    assert found == [COMES_OUT, CONTRADICTED, OPEN]


def test_orders_are_judged_at_the_largest_length() -> None:
    short = [row("kitty", divergence=1e-4, length=512), row("kitty-pro", divergence=1e-3, length=512)]
    long = [row("kitty", divergence=1e-3), row("kitty-pro", divergence=1e-4)]
    assert orders(short + long)[0].result == COMES_OUT
    assert [one.length for one in longest(short + long)] == [1024, 1024]


def test_the_front_has_what_no_other_beats() -> None:
    rows = [row("a", bits=2, divergence=3e-3), row("b", bits=2, divergence=2e-3), row("c", bits=3, divergence=2e-3), row("d", bits=4)]
    assert [one.name for one in front(rows, bits)] == ["b", "d"]
    assert [one.name for one in front([*rows, row("e", bits=1, step_us=5.0)], step_us)] == ["e"]


def test_the_committed_table_has_at_least_twelve_formats_and_the_facts_of_its_machine() -> None:
    rows, facts = read_csv(recommend.results())
    assert len({one.name for one in rows}) >= 12
    assert {one.name for one in rows} == set(suite())
    assert facts["device"]
    assert facts["date"]
    for one in rows:
        assert one.bits == pytest.approx(bits_per_element(suite()[one.name]), rel=1e-5)
        assert one.kernel_error < 2e-3
        assert one.divergence > 0


def test_every_paper_order_has_a_result_in_the_committed_table() -> None:
    from kvgen.accuracy.orders import CLAIMS

    assert len(orders(read_csv(recommend.results())[0])) == len(CLAIMS)


# --- recommendations ------------------------------------------------------------------------------------------------------


def test_a_budget_takes_the_best_that_fits_and_a_limit_the_smallest() -> None:
    shape = recommend.Model.named("32x32/8x128")
    rows = [
        row("bitdecoding-int2", bits=2.25, divergence=1e-2, increase=0.02),
        row("bitdecoding-int4", bits=4.25, divergence=1e-4, increase=0.001),
        row("turbomind-int4", bits=4.25, divergence=1e-3, increase=0.002),
        row("int8-per-channel", bits=8.125, divergence=1e-6, increase=0.0),
    ]
    every = recommend.options(shape, rows, budget=1e9)
    assert [one.row.name for one in every] == ["bitdecoding-int2", "bitdecoding-int4", "int8-per-channel"]
    assert every[1].token_bytes == 34816
    fits = recommend.options(shape, rows, budget=34816)
    assert recommend.best(fits, 34816).row.name == "bitdecoding-int4"
    good = recommend.options(shape, rows, increase=0.005)
    assert recommend.best(good, None).row.name == "bitdecoding-int4"
    assert recommend.options(shape, rows, budget=100) == []
    noisy = [replace(one, increase_error=0.01) for one in rows]
    assert recommend.options(shape, noisy, increase=0.005) == []


def test_tuned_entries_of_the_format_are_named() -> None:
    (found,) = recommend.options(recommend.Model.named("32x32/8x128"), [row("kitty")], budget=1e9)
    assert [entry.spec.name for entry in found.entries] == ["kitty"]
    assert found.unquantized_tokens == 160
    assert json.dumps(found.to_json())


def test_layers_of_two_kinds_count_each() -> None:
    sliding, full = recommend.Model.named("gpt-oss-20b").parts("bitdecoding-int4")
    assert (sliding.layers, sliding.spec.attention.window, full.layers, full.spec.attention.window) == (12, 128, 12, None)
    assert (full.spec.value.group, full.spec.key.group, full.spec.attention.dtype) == (64, 128, "bfloat16")
    (found,) = recommend.options(recommend.Model.named("gpt-oss-20b"), [row("bitdecoding-int4"), row("kitty")], budget=1e9)
    assert found.token_bytes == 24 * 8 * (64 + 4 * 64 / 128 + 4)  # codes, a group of K's tokens for each channel, a group of V's channels
    assert recommend.refused(recommend.Model.named("gpt-oss-20b"), "kitty")


# --- pages and pictures ---------------------------------------------------------------------------------------------------


def test_a_page_holds_both_pictures_and_every_format(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from kvgen.accuracy.page import page
    from kvgen.accuracy.picture import svg, write_pngs

    rows, facts = read_csv(recommend.results())
    made = page(rows, facts)
    assert all(f"<code>{name}</code>" in made for name in suite())
    assert made.count("data:image/svg+xml;base64,") == 2
    assert "http" not in made.replace("http-equiv", "")
    assert facts["device"] in made
    assert base64.b64encode(svg(rows, "dark").encode()).decode() in made  # the same bytes again
    files = write_pngs(tmp_path / "a.png", rows[:6])
    assert [file.name for file in files] == ["a.png", "a-dark.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


def test_names_in_the_picture_cover_no_other_name_and_no_point() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.text import Text

    from kvgen.accuracy.picture import figure

    made = figure(read_csv(recommend.results())[0], "light")
    made.draw_without_rendering()
    for axes in made.axes:
        marks = [axes.transData.transform(text.xy) for text in axes.texts]
        names = [Text.get_window_extent(text) for text in axes.texts]  # without the line that leads to the point
        assert len(names) >= 10
        for one, name in enumerate(names):
            assert not any(name.overlaps(other) for other in names[:one])
            assert not any(name.contains(*mark) for mark in marks)
            assert axes.get_window_extent().xmin <= name.xmin


def test_a_picture_without_matplotlib_names_the_line_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvgen import extras
    from kvgen.accuracy.picture import figure
    from kvgen.errors import ToolchainMissing

    monkeypatch.setattr(extras, "find_spec", lambda package: None)
    with pytest.raises(ToolchainMissing, match=r"pip install 'kvgen\[picture\]'"):
        figure([row()], "light")
