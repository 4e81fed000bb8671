"""GPU tests: skipped where there is no device; all points of a run are compiled at once, before the first test."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.points import Point, compile_points

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies here as `gpu`, and skip it without a device."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compile the points that the selected tests take as parameters."""
    if not torch.cuda.is_available() or session.config.option.collectonly:
        return
    found = [value for item in session.items for value in getattr(getattr(item, "callspec", None), "params", {}).values()]
    compile_points(value for value in found if isinstance(value, Point))
