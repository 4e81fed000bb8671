from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvgen.cli import main
from tests.support.commands import TINY


class Answer:
    """What a command printed, and how it ended; `err` without the frames that typer draws, on one line in `said`."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err
        self.said = " ".join(err.replace("│", " ").split())

    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def kvgen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """Run commands with empty registries, in a folder that holds `tiny.yaml`."""
    for name in ("CACHE", "REGISTRY", "SITE"):
        monkeypatch.setenv(f"KVGEN_{name}_DIR", str(tmp_path / name.lower()))
    (tmp_path / "tiny.yaml").write_text(TINY)
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> Answer:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        captured = capsys.readouterr()
        return Answer(int(ended.value.code or 0), captured.out, captured.err)

    return run
