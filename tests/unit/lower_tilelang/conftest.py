"""These tests lower with TileLang, where it is installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.gpu_words import spec_of, workload_of
from kvgen.lower.schedule import Value
from tests.unit.lower_tilelang.emulate import Emulated, emulated, schedule


@pytest.fixture(scope="session")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Emulated]:
    """`kernel(words, block=..., warps=..., ...)`: a lowered kernel, compiled for the emulator."""
    made: dict[str, Emulated] = {}

    def make(words: str, block: int = 128, **launch: Value) -> Emulated:
        key = f"{words} {block} {launch}"
        if key not in made:
            folder: Path = tmp_path_factory.mktemp("kernel")
            made[key] = emulated(spec_of(words, "sm80", [workload_of("2x512")]), schedule(block, **launch), folder)
        return made[key]

    return make
