"""The folders of templates, search spaces and shipped entries: `kvgen/_data` in a wheel, beside the package in a checkout."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from kvgen.errors import KvgenError


@cache
def root() -> Path:
    """The folder that holds `templates/`, `search_spaces/` and `generated/`.

    `KVGEN_DATA_DIR` overrides it. Raises KvgenError if the installation is incomplete.
    """
    override = os.environ.get("KVGEN_DATA_DIR")
    package = Path(__file__).resolve().parent
    for candidate in [Path(override).absolute()] if override else [package / "_data", package.parent]:
        if (candidate / "templates").is_dir():
            return candidate
    if override:
        raise KvgenError(f"KVGEN_DATA_DIR is {override}, which has no folder templates: unset it, or point it at a checkout")
    raise KvgenError("kvgen's templates are missing: reinstall it, or point KVGEN_DATA_DIR at a checkout")


def templates() -> Path:
    """Jinja templates and the device headers they instantiate."""
    return root() / "templates"


def search_spaces() -> Path:
    """Search-space files, one per back end, and one more for its operations on a matrix."""
    return root() / "search_spaces"


def generated() -> Path:
    """The winners that ship with kvgen."""
    return root() / "generated"


def user_cache() -> Path:
    """The folder of everything that can be made again: `KVGEN_CACHE_DIR`, or kvgen's folder in the user's cache."""
    override = os.environ.get("KVGEN_CACHE_DIR")
    if override:
        return Path(override).absolute()
    from platformdirs import user_cache_path

    return user_cache_path("kvgen")
