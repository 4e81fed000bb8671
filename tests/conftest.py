"""What every test shares: an environment of its own, the same on every machine, and what a marker needs."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("kvgen", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("kvgen")

SCRATCH = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "kvgen-tests"
"""Compiled modules are kept here from run to run, unless `KVGEN_CACHE_DIR` says where: in a folder that no other user can write."""
READ_BY_TERMINALS = ("FORCE_COLOR", "NO_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "COLUMNS", "LINES", "TTY_COMPATIBLE", "TTY_INTERACTIVE")


def _require_own(folder: Path) -> None:
    """Create a folder for this user alone. Raises UsageError where another user owns it or could write to it: modules in it are run."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise pytest.UsageError(f"{folder} is no folder of this user alone: remove it, or set KVGEN_CACHE_DIR")


def _own_environment() -> None:
    """Tests neither read nor write the user's files, and print as to a pipe. It holds for the processes that they start, too."""
    for name in (*READ_BY_TERMINALS, "KVGEN_DATA_DIR", "KVGEN_DEBUG"):
        os.environ.pop(name, None)
    _require_own(SCRATCH)
    os.environ.setdefault("KVGEN_CACHE_DIR", str(SCRATCH / "cache"))
    os.environ["KVGEN_REGISTRY_DIR"] = str(SCRATCH / "no-user-registry")
    os.environ["KVGEN_SITE_DIR"] = str(SCRATCH / "no-site-registry")
    # Small tensors are faster on one thread: beside other processes the threads of torch take ten times as long, waiting for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


_own_environment()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `nvcc` where there is none. Only the search for it may skip: a test that fails to compile fails.

    Files of slow tests come first, so that no worker is left with one when the others have finished.
    """
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    from kvgen.errors import ToolchainMissing
    from kvgen.toolchain.compilers import find_nvcc

    marked = [item for item in items if item.get_closest_marker("nvcc")]
    if not marked:
        return
    try:
        find_nvcc()
    except ToolchainMissing as error:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=str(error)))
