"""Killed commands leave what is whole (`python -m tests.attacks.kills`: as many as one likes)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.commands import ROOT


@pytest.mark.slow
def test_killed_commands_leave_what_is_whole():
    """In a process of its own: it puts a made-up back end and made-up measurements in place."""
    command = [sys.executable, "-m", "tests.attacks.kills", "--count", "5", "--seed", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("5 kills")
    assert " 0 failures" in done.stdout
