"""Lowering in a process of its own: TileLang aborts on some inputs, may hang, and costs seconds to import.

What was lowered once is kept by request, TileLang's version and this package's source, so that it is had again without TileLang.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock

import kvgen
from kvgen._resources import user_cache
from kvgen.arch import GPUS, Target
from kvgen.children import run
from kvgen.digest import canonical_json, digest, files_digest
from kvgen.errors import HOST_REASONS, CompileError, CompilerCrash, HostError, ToolchainMissing, host_errors
from kvgen.files import read_json
from kvgen.lower.schedule import Schedule
from kvgen.lower.tilelang.support import missing, tilelang_version
from kvgen.lower.tilelang.traits import make_traits
from kvgen.spec import KernelSpec

TIMEOUT_S = 240.0
MOST_BYTES = 1 << 24
"""Largest size of a kept result, in bytes."""
LOG_CHARS = 4000
HOST_PARAMETERS = frozenset({"splits"})
"""Parameters of a launch that leave the device's program alone."""


@dataclass(frozen=True)
class Program:
    """A device kernel as text. `parameters` are the names of its arguments in the order in which it takes them."""

    name: str
    text: str
    parameters: tuple[str, ...]
    shared_bytes: int


@dataclass(frozen=True)
class Lowered:
    """The kernels of a variant: with the static scheduler, and with a plan."""

    static: Program
    planned: Program

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Lowered:
        """What the worker answers. Raises KeyError."""
        programs = (
            Program(each["name"], each["text"], tuple(each["parameters"]), each["shared_bytes"])
            for each in (data["static"], data["planned"])
        )
        return cls(*programs)


def request_of(spec: KernelSpec, schedule: Schedule, target: Target) -> str:
    """What `worker` reads: the format, the schedule without what concerns the host alone, and the architecture."""
    launch = {name: value for name, value in schedule.launch.items() if name not in HOST_PARAMETERS}
    return canonical_json(
        {
            "spec": {**spec.format(), "name": "kernel"},
            "schedule": {**schedule.to_json(), "launch": launch},
            "arch": f"sm_{GPUS[target].number}",
        }
    )


def lower_apart(spec: KernelSpec, schedule: Schedule, target: Target, timeout_s: float = TIMEOUT_S) -> Lowered:
    """The kernels of a schedule.

    Raises ToolchainMissing without TileLang, CompileError where it fails, aborts or takes longer than `timeout_s`, HostError where
    the disk fails, CompilerCrash where it is killed.
    """
    request = request_of(spec, schedule, target)
    numbers = asdict(make_traits(spec, schedule))  # what programs are built from, of whatever module
    identity = [request, numbers, tilelang_version(), program_digest(schedule.launch.text("form"))]
    file = user_cache() / "lowered" / f"{digest(identity)}.json"
    return _read(file) or _lower_once(request, file, timeout_s)


@cache
def program_digest(form: str) -> str:
    """Digest of the sources that decide what is lowered for a form."""
    package = Path(__file__).parent
    pieces = [file for part in sorted({"mma", form}) for file in (package / part).glob("*.py")]
    return files_digest([package / "traits.py", package / "worker.py", *pieces])


def _lower_once(request: str, file: Path, timeout_s: float) -> Lowered:
    """Lower and keep. Processes that want the same kernels at the same time wait for the one that began."""
    if reason := missing():
        raise ToolchainMissing(reason)
    with host_errors("write", file):
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(file.with_suffix(".lock"))
        lock.acquire()
    try:
        kept = _read(file)
        if kept is None:
            kept = _run(request, timeout_s)
            _write(file, kept)
        return kept
    finally:
        lock.release()


def _run(request: str, timeout_s: float) -> Lowered:
    command = [sys.executable, "-m", "kvgen.lower.tilelang.worker"]
    root = str(Path(kvgen.__file__).resolve().parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    # TileLang makes its folders at import, in the home directory unless it is told where.
    own = {"TILELANG_CACHE_DIR": str(user_cache() / "tilelang")}
    environment = {**own, **os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
    try:
        with host_errors("run", Path(sys.executable)):
            done = run(command, timeout_s, request, env=environment)
    except subprocess.TimeoutExpired:
        raise CompileError(f"TileLang took longer than {timeout_s:g} s and was stopped") from None
    if done.returncode == -signal.SIGKILL:
        raise CompilerCrash("TileLang was ended by SIGKILL, for want of memory perhaps")
    if done.returncode and (reason := HOST_REASONS.search(done.stderr)):
        raise HostError(f"TileLang could not work: {reason[0]}")
    if done.returncode:
        raise CompileError(f"TileLang failed with exit status {done.returncode}", done.stderr[-LOG_CHARS:])
    return Lowered.from_json(json.loads(done.stdout))


def _read(file: Path) -> Lowered | None:
    try:
        return Lowered.from_json(read_json(file, MOST_BYTES))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(file: Path, lowered: Lowered) -> None:
    with host_errors("write", file):
        part = file.with_suffix(f".{os.getpid()}.part")  # of the process that holds the lock
        try:
            part.write_text(json.dumps(asdict(lowered)))
            part.replace(file)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
