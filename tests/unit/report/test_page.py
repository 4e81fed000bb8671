from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kvgen.bench.results import Result
from kvgen.registry import Store
from kvgen.report.page import render
from kvgen.report.plane import REGRET, cells, kinds, maps
from kvgen.toolchain import ArtifactCache
from kvgen.tune.budget import Budget
from kvgen.tune.result import TuningResult
from kvgen.tune.tuner import tune
from tests.support.grids import cell, with_grid, with_table
from tests.support.tuning import FakeBackend, FakeRunner, tiny_spec

VOID = {"meta", "link", "br", "img", "source"}


class Balanced(HTMLParser):
    """Every element is closed in order, and nothing is fetched from elsewhere."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert tag != "script"
        assert "src" not in given
        self.ids |= {given["id"] or ""} if "id" in given else set()
        self.links |= {given["href"] or ""} if "href" in given else set()
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> ArtifactCache:
    return ArtifactCache(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory, cache: ArtifactCache) -> TuningResult:
    runner = FakeRunner(outcome=lambda candidate: "crash" if candidate.schedule.launch["threads"] == 8 else "ok")
    store = Store(tmp_path_factory.mktemp("registry"))
    return tune(tiny_spec(), "cpu", Budget(), backends=[FakeBackend()], store=store, cache=cache, runner=runner)


def test_the_page_shows_times_search_and_failures(result: TuningResult, cache: ArtifactCache):
    page = render([result.entry], cache)
    read = Balanced(page)
    assert {f"#{result.entry.key}"} <= read.links
    assert result.entry.key in read.ids
    for text in ("142 µs (.35)", "232 µs (.22)", "made to fail: crash", "11 candidates, 2 of them failed", "layout.block"):
        assert text in page
    assert page.count("best time of the search so far at") == 2


def test_an_entry_without_a_grid_says_so(result: TuningResult, cache: ArtifactCache):
    assert "No grid of the plane" in render([with_table(result.entry, None)], cache)


def test_the_page_needs_no_network_and_has_both_modes(result: TuningResult, cache: ArtifactCache):
    page = render([result.entry], cache)
    assert "http" not in page
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page


def test_figures_do_not_break_from_their_units(result: TuningResult, cache: ArtifactCache):
    page = render([result.entry], cache)
    tables = re.sub(r"<svg.*?</svg>|<figcaption.*?</figcaption>", "", page, flags=re.DOTALL)
    assert "142\N{NO-BREAK SPACE}µs" in tables
    assert not re.search(r"\d (µs|ms|s|W|MHz)\b", tables)


def test_without_a_record_of_the_search_the_page_says_so(result: TuningResult, tmp_path: Path):
    empty = ArtifactCache(tmp_path)
    assert "is not in this machine&#39;s cache" in render([result.entry], empty) or "is not in this machine's cache" in render(
        [result.entry], empty
    )
    assert "Nothing is registered yet" in render([], empty)


def test_other_libraries_stand_beside_where_they_were_measured_here(result: TuningResult, cache: ArtifactCache):
    device = str(result.entry.device["name"])

    def one(backend: str, us: float, **other: Any) -> Result:
        facts = {"spec": "tiny", "batch": 2, "kv_len": 512, "q_len": 1, "load": "", "device": device, "date": "2026-01-01", **other}
        return Result("torch", backend, us=us, read_us=100.0, **facts)

    rows = [
        one("sdpa-fp32-gqa", 464.0),
        one("sdpa-bf16-gqa", 928.0),
        one("sdpa-fp16-gqa", 90.0, device="another"),
        one("x", 80.0, load="after 1 s"),
    ]
    page = render([result.entry], cache, rows)
    assert "464 µs (.22)" in page
    assert "2.0 times as fast as torch fp32" in page
    assert not re.search(r"928 µs|90 µs|80 µs", page)


def test_what_names_hold_is_escaped(result: TuningResult, cache: ArtifactCache):
    device = str(result.entry.device["name"])
    row = Result("<b>library</b>", "x", "tiny", 2, 512, 1, 464.0, 100.0, "", device, "2026-01-01")
    page = render([result.entry], cache, [row])
    assert "&lt;b&gt;library" in page
    assert "<b>library" not in page


def test_a_page_about_accuracy_is_linked(result: TuningResult, cache: ArtifactCache):
    for entries in ([], [result.entry]):
        assert "kvgen-accuracy.html" in Balanced(render(entries, cache, accuracy="kvgen-accuracy.html")).links
        assert "kvgen-accuracy.html" not in render(entries, cache)


def test_the_grid_becomes_maps_and_what_is_beside_it_a_table(result: TuningResult, cache: ArtifactCache):
    entry = with_grid(
        result.entry,
        cell("1x512", 0, [10.0, 20.0], 10.0),
        cell("8x1024", 1, [None, 12.0], 10.0),
        cell("1x1024", 0, [10.0, 20.0], 10.0),
        cell("8x512", 1, [20.0, 10.0], 10.0),
        cell("8x64-4096", 1, [9.0, 8.0], 8.0),
        cell("1x1024:sustained", 0, [11.0, 20.0], 10.0, watts=640.2, clock_mhz=1540.0),
        cell("4x1024", 0, [None, 12.0], 12.0),
        skipped={"1024x512": "the time was over.", "512x512": "the time was over."},
    )
    found = {one.name: one for one in cells(entry)}
    assert "4x1024" not in found  # its launch has no time there
    assert (found["8x1024"].regret, found["8x1024"].read_fraction, found["8x1024"].letter) == (1.2, 0.5, "B")
    mapped, apart = kinds(found.values())
    assert {traffic: len(same) for traffic, same in mapped.items()} == {"equal lengths": 4}
    assert [one.name for one in apart] == ["8x64-4096", "1x1024:sustained"]
    page = render([entry], cache)
    Balanced(page)
    assert "6 workloads were measured" in page
    assert "2 not measured: the time was over." in page
    assert "The worst is 1.20×, at 8x1024" in page
    assert "8x1024: launch B, 12 µs, .50 of the read" in page
    assert "640\N{NO-BREAK SPACE}W" in page
    assert "1540\N{NO-BREAK SPACE}MHz" in page
    assert "No grid of the plane" not in page
    assert "1.20×</b><span>worst regret" in page


def test_what_failed_over_the_grid_is_told(result: TuningResult, tmp_path: Path):
    failed = {"backend": "cuda", "kind": "wrong", "count": 3, "example": "cuda[w=4] at 16x512", "detail": "bits <differ>"}
    entry = replace(result.entry, provenance={**result.entry.provenance, "grid": {"cells": 9, "launches": 2, "failed": [failed]}})
    page = render([entry], ArtifactCache(tmp_path))  # without the record of a search
    Balanced(page)
    assert re.search(r">wrong</td><td class=\"n\">3</td><td class=\"keep\">cuda</td><td class=\"keep\">the grid</td>", page)
    assert "bits &lt;differ&gt;" in page
    assert "cuda[w=4] at 16x512" in page
    assert "What failed, and why" not in render([replace(entry, provenance={})], ArtifactCache(tmp_path))


def test_unequal_lengths_have_maps_of_their_own(result: TuningResult):
    ragged = [cell(f"{2 << i}x{32 << j}-{2048 << j}", 0, [1.0, 1.0], 1.0) for i in range(2) for j in range(2)]
    mapped, apart = kinds(cells(with_grid(result.entry, *ragged, cell("1x512q4", 0, [1.0, 1.0], 1.0))))
    assert list(mapped) == ["unequal lengths, from 1/64 of the longest"]
    assert [one.traffic for one in apart] == ["equal lengths, 4 query tokens"]
    (read, regret) = maps(mapped["unequal lengths, from 1/64 of the longest"])  # one launch serves all of them
    assert "longest sequence, tokens" in regret.svg
    assert read.svg.count('class="edge"') == 1


def test_a_color_is_that_of_the_number_as_it_is_written():
    assert [REGRET.group(value) for value in (1.0, 1.004, 1.012, 1.2, 9.0)] == [0, 0, 1, 4, 5]
    assert REGRET.group(1.0149) == REGRET.group(1.0101)
