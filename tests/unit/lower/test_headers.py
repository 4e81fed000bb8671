"""Rules for the sources that modules are made of: headers, and the text that instantiates them."""

from __future__ import annotations

from kvgen._resources import templates

MOST_LINES = 250
SOURCES = (".hpp", ".cuh", ".cpp.jinja", ".cu.jinja")


def test_no_header_is_longer_than_a_reader_takes_in() -> None:
    lines = {
        path.relative_to(templates()): len(path.read_text().splitlines()) for path in templates().rglob("*") if path.name.endswith(SOURCES)
    }
    assert lines
    assert {path: count for path, count in lines.items() if count > MOST_LINES} == {}
