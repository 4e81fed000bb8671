"""Malformed specs: a SpecError each, never anything else. `python -m tests.attacks.specs` tries thousands more, and gives each a second."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.attacks import spec_nasties, specs
from tests.attacks.spec_mutants import mutants

TEXTS = dict(spec_nasties.texts())


@pytest.fixture(autouse=True)
def _on_any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of the command is for a processor that does nothing else; what grows without bound takes longer than this limit, too."""
    monkeypatch.setattr(specs, "SECONDS", 60.0)


def refused(name: str, source: Any) -> bool:
    return specs.attempt(name, source)[0]


def test_texts_written_to_do_harm() -> None:
    assert all(refused(name, text) for name, text in list(TEXTS.items())[::3])


def test_objects_written_to_do_harm() -> None:
    assert all(refused(name, data) for name, data in spec_nasties.objects())


def test_files_that_are_no_specs(tmp_path: Path) -> None:
    assert all(refused(name, path) for name, path in spec_nasties.files(tmp_path))


def test_examples_with_something_changed() -> None:
    made = mutants(seed=20)
    assert sum(refused(*next(made)) for _ in range(250)) > 200


def test_random_bytes(tmp_path: Path) -> None:
    rng = random.Random(0)
    file = tmp_path / "noise.yaml"
    for size in (1, 10, 100, 1000, 10_000):
        file.write_bytes(rng.randbytes(size))
        assert refused(f"{size} bytes", file)
