"""Damaged archives are refused, and killed commands leave what is whole (`python -m tests.attacks.kills`: as many as one likes)."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from kvgen.lower import backend
from tests.attacks import archives
from tests.support.commands import ROOT


def test_no_damaged_archive_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("get_backend", "backends_for"):  # the script puts others in their place
        monkeypatch.setattr(backend, name, getattr(backend, name))
    before = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (1 << 30), before[1]))  # a bomb that is not refused shows here
    try:
        refused, failures = archives.attack(tmp_path, 3 * len(archives.DAMAGES), seed=7)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert failures == []
    assert set(refused) == set(archives.DAMAGES)


@pytest.mark.slow
def test_killed_commands_leave_what_is_whole():
    """In a process of its own: it puts a made-up back end and made-up measurements in place."""
    command = [sys.executable, "-m", "tests.attacks.kills", "--count", "5", "--seed", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("5 kills")
    assert " 0 failures" in done.stdout
