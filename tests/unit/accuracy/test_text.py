"""Text as numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvgen.accuracy.text import BYTES, PIECE, corpus, sources
from kvgen.errors import KvgenError


def test_pieces_are_the_whole_text() -> None:
    text = "def f(x):\n    return x2 + 'ä∂' # done\n\n\tx\r\n"
    assert "".join(PIECE.findall(text)) == text


def test_frequent_pieces_have_numbers_and_others_are_bytes() -> None:
    made = corpus(["held out zz", *["a a a bb"] * 5], pieces=2)
    # " a" comes 10 times; "a" and " bb" 5 times each, of which " bb" is first in order, so "a" is written as its byte
    assert made.train[:4].tolist() == [ord("a"), BYTES, BYTES, BYTES + 1]
    assert made.vocabulary == BYTES + 2
    assert int(made.train.max()) < made.vocabulary


def test_every_sixteenth_file_is_held_out() -> None:
    made = corpus([f"word{'x' * index}" for index in range(32)], pieces=0)
    assert bytes(made.held_out.tolist()) == b"word" + b"word" + b"x" * 16


def test_another_text_has_another_digest() -> None:
    assert corpus(["a b"] * 20, 4).digest != corpus(["a c"] * 20, 4).digest


def test_the_library_of_this_python_is_found_without_packages_that_were_installed() -> None:
    found = sources()
    assert len(found) > 300
    assert any("class Counter(dict)" in text for text in found)


def test_an_installation_without_sources_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("x = 1")
    with pytest.raises(KvgenError, match="has 1 of them"):
        sources(tmp_path)
