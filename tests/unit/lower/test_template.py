"""Rendering: undefined names are refused, compilers are told the template's lines, headers are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvgen._resources import root
from kvgen.errors import KvgenError
from kvgen.lower.template import reached_headers, render

TEMPLATE = """\
int first;
{% for name in names %}
int {{ name }};
int of_{{ name }};
{% endfor %}
{% if names %}

int last = {{ cpp(flag) }};
{% endif %}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "templates").mkdir()
    monkeypatch.setenv("KVGEN_DATA_DIR", str(tmp_path))
    root.cache_clear()
    yield tmp_path / "templates"
    root.cache_clear()


def line_of(text: str, needle: str, template: str) -> int:
    """The line that a compiler would name for the line that holds `needle`."""
    line = 0
    for entry in text.splitlines():
        if entry.startswith("#line "):
            number, name = entry.split()[1:]
            assert name == f'"{template}"'
            line = int(number) - 1
            continue
        line += 1
        if needle in entry:
            return line
    raise AssertionError(needle)


def test_compilers_are_told_the_lines_of_the_template(folder: Path) -> None:
    (folder / "a.cpp.jinja").write_text(TEMPLATE)
    text = render("a.cpp.jinja", names=["x", "y"], flag=True)
    for needle, line in (("int first", 1), ("int x", 3), ("int of_x", 4), ("int y", 3), ("int of_y", 4), ("int last = true", 8)):
        assert line_of(text, needle, "a.cpp.jinja") == line
    assert text.count("#line") == 4


def test_python_templates_have_no_line_directives(folder: Path) -> None:
    (folder / "a.py.jinja").write_text(TEMPLATE)
    assert render("a.py.jinja", names=["x"], flag=1) == "int first;\nint x;\nint of_x;\n\nint last = 1;\n"


def test_an_undefined_name_is_refused_by_name(folder: Path) -> None:
    (folder / "a.cpp.jinja").write_text("constexpr int group = {{ group_sz }};\n")
    with pytest.raises(KvgenError, match=r"a\.cpp\.jinja: UndefinedError: 'group_sz' is undefined"):
        render("a.cpp.jinja", group_size=4)
    with pytest.raises(KvgenError, match=r"missing\.jinja"):
        render("missing.jinja")


def test_headers_are_followed_through_includes(tmp_path: Path) -> None:
    (tmp_path / "kvgen").mkdir()
    for name, text in (("a.hpp", '#include "kvgen/b.hpp"\n#include <vector>\n'), ("b.hpp", '  # include "kvgen/a.hpp"\n'), ("c.hpp", "")):
        (tmp_path / "kvgen" / name).write_text(text)
    found = reached_headers('#include "kvgen/a.hpp"\n#include "elsewhere.hpp"\n', [tmp_path])
    assert [path.name for path in found] == ["a.hpp", "b.hpp"]
