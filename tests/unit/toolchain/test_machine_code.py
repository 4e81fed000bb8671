"""Modules compared by what they run."""

from __future__ import annotations

from pathlib import Path

from kvgen.lower.base import Source
from kvgen.toolchain import ArtifactCache, build
from kvgen.toolchain.machine_code import same_machine_code

TEXT = 'extern "C" int answer(int n) { return n * %s; }\n'


def module(tmp_path: Path, text: str, *flags: str) -> Path:
    return build(Source(text, "c++", "cpu", flags=("-O1", *flags)), ArtifactCache(tmp_path / "cache")).path


def test_comments_and_names_are_no_machine_code(tmp_path: Path):
    one = module(tmp_path, TEXT % 41)
    assert same_machine_code(one, module(tmp_path, "// a comment\n\n" + TEXT % 41))
    assert same_machine_code(one, module(tmp_path, (TEXT % 41).replace("answer", "reply")))


def test_other_instructions_or_constants_are(tmp_path: Path):
    assert not same_machine_code(module(tmp_path, TEXT % 41), module(tmp_path, TEXT % 43))
    table = 'extern "C" const int table[3] = {1, 2, %s};\n'
    assert not same_machine_code(module(tmp_path, table % 3), module(tmp_path, table % 4))


def test_what_cannot_be_read_differs(tmp_path: Path):
    whole = module(tmp_path, TEXT % 41)
    (tmp_path / "text").write_text("no ELF")
    (tmp_path / "half").write_bytes(whole.read_bytes()[:2000])
    assert not same_machine_code(whole, tmp_path / "text")
    assert not same_machine_code(tmp_path / "half", whole)
