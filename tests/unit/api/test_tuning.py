"""`kvgen.build`: arguments that are refused before anything is searched."""

from __future__ import annotations

from typing import Any

import pytest

import kvgen


@pytest.mark.parametrize("backends", [[], (), "cpu"])
def test_back_ends_are_names(spec: Any, backends: Any) -> None:
    with pytest.raises(ValueError, match=r"^backends must be names, such as .*, or None for all, not "):
        kvgen.build(spec, backends=backends, trials=1)
