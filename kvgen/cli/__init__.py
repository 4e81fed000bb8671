"""The command `kvgen`. Every command imports what it needs when it runs, so that `--help` is instant."""

from __future__ import annotations

from kvgen.cli.app import main

__all__ = ["main"]
