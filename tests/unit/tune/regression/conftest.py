from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checking import Place


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path, monkeypatch)
