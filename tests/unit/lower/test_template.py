"""Rendering, headers that a source reaches, and identity by tokens: what no compiler sees changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvgen._resources import root
from kvgen.errors import KvgenError
from kvgen.lower.template import headers_digest, reached_headers, render, tokens_digest

TEXT = """#pragma once
#include "a.h"  // for b
#define TWICE(x) ((x) + (x))
/* of a
   kernel */
inline float f(int n) { return n++ + +1'000 * 1.5e-3f + '"' + "//" [0]; }
"""
SAME = {
    "a comment": TEXT.replace("// for b", '// of another word, "quoted" it\'s'),
    "spacing": TEXT.replace(" { ", "\n{\n\n  ").replace("n++ + +1", "n++   +\t+1"),
    "a line directive": '#line 1 "module.cu.jinja"\n' + TEXT.replace("inline", '#line 7 "other.cu"\ninline'),
    "a continued line": TEXT.replace("((x)", "\\\n  ((x)"),
    "no comments": TEXT.replace("/* of a\n   kernel */\n", "").replace("  // for b", ""),
}
OTHER = {
    "a number": TEXT.replace("1.5e-3f", "1.5e-4f"),
    "an operator": TEXT.replace("n++ + +1", "n+ + + +1"),
    "joined words": TEXT.replace("inline float", "inlinefloat"),
    "a string": TEXT.replace('"//"', '"/ /"'),
    "a macro of no arguments": TEXT.replace("TWICE(x)", "TWICE (x)"),
    "the end of a directive": TEXT.replace("#pragma once\n#include", "#pragma once #include"),
    "a comment that opens": TEXT.replace("kernel */", "kernel"),
}


@pytest.mark.parametrize("change", [*SAME, *OTHER])
def test_what_no_compiler_sees_changes_nothing_and_all_else_does(change: str) -> None:
    text = {**SAME, **OTHER}[change]
    assert text != TEXT
    assert (tokens_digest(text) == tokens_digest(TEXT)) == (change in SAME)


def test_an_edited_header_is_read_again(tmp_path: Path) -> None:
    header = tmp_path / "a.h"
    digests = []
    for text in (TEXT, TEXT + "// more\n", TEXT + "int more;\n"):
        header.write_text(text)
        digests.append(headers_digest([header]))
    assert digests[0] == digests[1] != digests[2]


def test_an_undefined_name_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "a.cpp.jinja").write_text("constexpr int group = {{ group_sz }};\n")
    monkeypatch.setenv("KVGEN_DATA_DIR", str(tmp_path))
    root.cache_clear()
    with pytest.raises(KvgenError, match=r"a\.cpp\.jinja: UndefinedError: 'group_sz' is undefined"):
        render("a.cpp.jinja", group_size=4)
    root.cache_clear()


def test_headers_are_followed_through_includes(tmp_path: Path) -> None:
    (tmp_path / "kvgen").mkdir()
    for name, text in (("a.hpp", '#include "kvgen/b.hpp"\n#include <vector>\n'), ("b.hpp", '  # include "kvgen/a.hpp"\n'), ("c.hpp", "")):
        (tmp_path / "kvgen" / name).write_text(text)
    found = reached_headers('#include "kvgen/a.hpp"\n#include "elsewhere.hpp"\n', [tmp_path])
    assert [path.name for path in found] == ["a.hpp", "b.hpp"]
