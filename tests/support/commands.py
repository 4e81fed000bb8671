"""The command `kvgen` in processes of its own, with a cache and a registry of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 280
"""Within what pytest gives a test; commands take some seconds on a machine that has nothing else to do."""

TINY = """
name: tiny
arch: cpu
attention: {q_heads: 2, kv_heads: 1, head_dim: 32, dtype: float32}
key:   {bits: 4, axis: channel, group: 32}
value: {bits: 4, axis: token, group: 32}
workloads: [{batch: 1, kv_len: 256}]
"""


class Machine:
    """A user with empty folders; `environment` is what its processes see."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environment = {
            "KVGEN_MACHINE": '{"llc_bytes": 1048576}',  # past a small cache little memory is cold
            **os.environ,
            "KVGEN_CACHE_DIR": str(root / "cache"),
            "KVGEN_REGISTRY_DIR": str(root / "registry"),
            "KVGEN_SITE_DIR": str(root / "site"),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        root.mkdir(parents=True, exist_ok=True)
        self.spec = root / "tiny.yaml"
        self.spec.write_text(TINY)

    def command(self, *words: object) -> list[str]:
        return [sys.executable, "-m", "kvgen", *map(str, words)]

    def start(self, *words: object) -> subprocess.Popen[str]:
        """Start a command. It hears SIGINT even where the tests run in the background, whose processes inherit that it is ignored."""
        return subprocess.Popen(
            self.command(*words),
            env=self.environment,
            cwd=self.root,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - no other thread forks here
        )

    def run(self, *words: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run to the end; the exit code must be `code`, and no traceback shows."""
        done = subprocess.run(
            self.command(*words), env=self.environment, cwd=self.root, text=True, capture_output=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        return done

    def json(self, *words: object, code: int = 0) -> Any:
        return json.loads(self.run(*words, "--json", code=code).stdout)

    def python(self, text: str) -> Any:
        """What a program prints as JSON."""
        done = subprocess.run(
            [sys.executable, "-c", text], env=self.environment, cwd="/", text=True, capture_output=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)
