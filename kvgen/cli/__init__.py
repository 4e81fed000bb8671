"""The command `kvgen`. Every command imports its modules when it runs, so that `--help` is fast."""

from __future__ import annotations

from kvgen.cli.app import main

__all__ = ["main"]
