"""The compiler flags that back ends ask for beyond the toolchain's own. An entry that asks for any other is refused: a flag may
name a program to run or a file to read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvgen.lower.backend import Language

CPU = ("-fopenmp", "-Wno-psabi", "-fvisibility=hidden", "-fvisibility-inlines-hidden")
"""Only the exported functions are visible, so no vector crosses a library border, and modules share no inline variable: the linker would
merge those of all modules of a process.
"""
TILELANG = ("-diag-suppress=550",)

ALLOWED: Mapping[Language, frozenset[str]] = {"c++": frozenset(CPU), "cuda": frozenset(TILELANG)}


def refused(language: Language, flags: Iterable[str]) -> str | None:
    """The first flag that no back end emits for a language; None if all are known."""
    return next((flag for flag in flags if flag not in ALLOWED[language]), None)
