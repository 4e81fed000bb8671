"""Lowering in a process of its own: TileLang aborts on some inputs, may hang, and costs seconds to import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import kvgen
from kvgen.digest import canonical_json
from kvgen.errors import CompileError
from kvgen.lower.base import Target
from kvgen.lower.schedule import Schedule
from kvgen.spec import KernelSpec

TIMEOUT_S = 120.0
LOG_CHARS = 4000


@dataclass(frozen=True)
class Lowered:
    """A device kernel as text. `parameters` are the names of its arguments in the order in which it takes them."""

    name: str
    text: str
    parameters: tuple[str, ...]
    shared_bytes: int


def lower_apart(spec: KernelSpec, schedule: Schedule, target: Target, timeout_s: float = TIMEOUT_S) -> Lowered:
    """The kernel of a schedule. Raises CompileError where TileLang fails, dies or takes longer than `timeout_s`."""
    request = {"spec": {**spec.format(), "name": "kernel"}, "schedule": schedule.to_json(), "target": target}
    return _lower(canonical_json(request), timeout_s)


@lru_cache(maxsize=64)
def _lower(request: str, timeout_s: float) -> Lowered:
    command = [sys.executable, "-m", "kvgen.lower.tilelang.worker"]
    root = str(Path(kvgen.__file__).resolve().parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(command, input=request, capture_output=True, text=True, timeout=timeout_s, env=environment, check=False)
    except subprocess.TimeoutExpired:
        raise CompileError(f"TileLang took longer than {timeout_s:g} s and was stopped") from None
    if done.returncode:
        raise CompileError(f"TileLang failed with exit status {done.returncode}", done.stderr[-LOG_CHARS:])
    answer = json.loads(done.stdout)
    return Lowered(answer["name"], answer["text"], tuple(answer["parameters"]), answer["shared_bytes"])
