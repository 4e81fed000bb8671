"""Tokens of C++: what is the same code has the same digest, and what is not has another."""

from __future__ import annotations

import pytest

from kvgen.lower.template import headers_digest, tokens_digest

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


@pytest.mark.parametrize("text", SAME.values(), ids=SAME)
def test_what_no_compiler_sees_changes_nothing(text):
    assert text != TEXT
    assert tokens_digest(text) == tokens_digest(TEXT)


@pytest.mark.parametrize("text", OTHER.values(), ids=OTHER)
def test_what_a_compiler_sees_changes_the_digest(text):
    assert tokens_digest(text) != tokens_digest(TEXT)


def test_an_edited_header_is_read_again(tmp_path):
    header = tmp_path / "a.h"
    digests = []
    for text in (TEXT, TEXT + "// more\n", TEXT + "int more;\n"):
        header.write_text(text)
        digests.append(headers_digest([header]))
    assert digests[0] == digests[1] != digests[2]
