from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kvgen.bench.results import Result
from kvgen.registry import Store
from kvgen.report.page import render
from kvgen.toolchain import ArtifactCache
from kvgen.tune.budget import Budget
from kvgen.tune.tuner import TuningResult, tune
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
