"""Text that every Python installation has, the sources of its standard library, as numbers of pieces.

A piece is a word with the space before it, a line break with the indentation after it, a digit, or a run of signs. The most frequent
pieces have numbers of their own; others are written as the bytes of their UTF-8.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from kvgen.errors import KvgenError

PIECE = re.compile(r" ?[A-Za-z]+|\d|\n *|[^\sA-Za-z\d]+|\s")
BYTES = 256
HELD_OUT = 16
"""One file in so many is kept out of training."""
LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
"""Folders that are no part of the library or not in every installation."""
LEAST_FILES = 100


@dataclass(frozen=True)
class Corpus:
    """Token numbers, int64 [tokens] each, below `vocabulary`."""

    train: torch.Tensor
    held_out: torch.Tensor
    vocabulary: int
    digest: str
    """Of the text: installations differ by Python's version."""


def sources(root: Path | None = None) -> list[str]:
    """The library's source files in the order of their paths. Raises KvgenError where an installation has no sources."""
    folder = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    files = sorted(file for file in folder.rglob("*.py") if not LEFT_OUT.intersection(file.relative_to(folder).parts[:-1]))
    texts = [text for file in files if (text := _text(file))]
    if len(texts) < LEAST_FILES:
        raise KvgenError(f"the accuracy of a model is taken on the sources of Python's library, and {folder} has {len(texts)} of them")
    return texts


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def corpus(texts: Iterable[str], pieces: int) -> Corpus:
    """The corpus of some texts, whose `pieces` most frequent pieces have numbers; every 16th text is held out."""
    split = [PIECE.findall(text) for text in texts]
    train = [words for index, words in enumerate(split) if index % HELD_OUT]
    held_out = [words for index, words in enumerate(split) if not index % HELD_OUT]
    counted = Counter(word for words in train for word in words)
    frequent = sorted(counted, key=lambda word: (-counted[word], word))[:pieces]
    numbers = {word: BYTES + index for index, word in enumerate(frequent)}
    text = hashlib.sha256("".join(word for words in split for word in words).encode()).hexdigest()[:16]
    return Corpus(_numbered(train, numbers), _numbered(held_out, numbers), BYTES + pieces, text)


def _numbered(files: Iterable[list[str]], numbers: dict[str, int]) -> torch.Tensor:
    found: list[int] = []
    for words in files:
        for word in words:
            number = numbers.get(word)
            if number is None:
                found.extend(word.encode())
            else:
                found.append(number)
    return torch.tensor(found)
