"""Lowering in a process of its own: TileLang aborts on some inputs, may hang, and costs seconds to import.

What was lowered once is kept by its sizes, TileLang's version and this package's source, so that it is had again without TileLang. `main`
is that process: a spec and a schedule on standard input, the device kernels on standard output, both as JSON.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import kvgen
from kvgen._resources import user_cache
from kvgen.children import run
from kvgen.digest import canonical_json, digest, files_digest
from kvgen.errors import HOST_REASONS, CompileError, CompilerCrash, HostError, ToolchainMissing, host_errors
from kvgen.extras import install_line
from kvgen.files import write_whole
from kvgen.lower.schedule import Schedule
from kvgen.lower.tilelang.sizes import Sizes, sizes_of
from kvgen.plaindata import Json
from kvgen.spec import KernelSpec

OLDEST = "0.1.15"
"""The first TileLang that lowers the programs: older ones do not keep what a loop defines."""
TIMEOUT_S = 600.0
LOG_CHARS = 4000
ARCH = "sm_80"
"""The programs use nothing that came later; nvcc compiles them for the target."""
PASSES = {
    "tl.disable_thread_storage_sync": True,  # the program places every barrier itself
    "tl.disable_safe_memory_legalize": True,  # and every bound: extents are run-time numbers
    "tl.disable_data_race_check": True,
    "tl.disable_out_of_bound_warning": True,
    "tl.disable_warp_specialized": True,
}
KERNEL = 'extern "C" __global__'


@dataclass(frozen=True)
class Program(Json):
    """A device kernel as text. `parameters` are the names of its arguments in the order in which it takes them."""

    name: str
    text: str
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Lowered(Json):
    """The kernels of a variant: with the static scheduler, and with a plan."""

    static: Program
    planned: Program


def missing() -> str | None:
    """Why TileLang cannot be used here, with the line that installs it, or None. It is not imported."""
    found = _installed()
    if found is None:
        return f"tilelang is not installed: {install_line('tilelang')}"
    return None if _release(found) >= _release(OLDEST) else f"tilelang {found} is installed, and its programs need {OLDEST} or newer"


def tilelang_version() -> str:
    """The TileLang that lowers here. Another one may print other text, so it is part of what kernels are kept by."""
    return _installed() or OLDEST


def lower_apart(spec: KernelSpec, schedule: Schedule, timeout_s: float = TIMEOUT_S) -> Lowered:
    """The kernels of a schedule, which are the same for every target.

    Raises ToolchainMissing without TileLang, CompileError where it fails, aborts or takes longer than `timeout_s`, HostError where
    the disk fails, CompilerCrash where it is killed.
    """
    identity = [asdict(sizes_of(spec, schedule)), tilelang_version(), _program_digest()]
    file = user_cache() / "lowered" / f"{digest(identity)}.json"
    with suppress(OSError, ValueError):  # nothing is kept, or another version of kvgen kept it
        return Lowered.from_json(json.loads(file.read_bytes()))
    if reason := missing():
        raise ToolchainMissing(reason)
    request = canonical_json({"spec": {**spec.format(), "name": "kernel"}, "schedule": schedule.to_json()})
    text = _run(request, timeout_s)
    with host_errors("write", file):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, text)
    return Lowered.from_json(json.loads(text))


@cache
def _program_digest() -> str:
    """Digest of the sources that decide what is lowered."""
    return files_digest(Path(__file__).parent / name for name in ("program.py", "sizes.py", "isolate.py"))


def _run(request: str, timeout_s: float) -> str:
    """The worker's answer."""
    command = [sys.executable, "-c", "from kvgen.lower.tilelang.isolate import main; main()"]
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
    return done.stdout


def _installed() -> str | None:
    try:
        return version("tilelang")
    except PackageNotFoundError:
        return None


def _release(text: str) -> tuple[int, ...]:
    """The numbers of a version: (0, 1, 15) for 0.1.15.post1."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


# --- in the other process ------------------------------------------------------------------------------------------------


def lowered(sizes: Sizes) -> dict[str, Any]:
    """The answer to a request: both programs, run through TileLang."""
    import tilelang
    from tvm.target import Target

    from kvgen.lower.tilelang.program import program

    found = {}
    for which in ("static", "planned"):
        function = program(sizes, planned=which == "planned").with_attr("global_symbol", f"attend_{which}")
        cuda = Target({"kind": "cuda", "arch": ARCH})
        with tilelang.tvm.transform.PassContext(opt_level=3, config=PASSES), cuda:
            artifact = tilelang.lower(function, target=cuda)
        (kernel,) = artifact.device_mod.functions.values()
        text = artifact.kernel_source
        found[which] = {
            "name": str(kernel.attrs["global_symbol"]),
            "text": text[text.index(KERNEL) :].rstrip() + "\n",
            "parameters": [str(parameter.name) for parameter in kernel.params],
        }
    return found


def main() -> None:
    """Answer one request. Only the answer goes to standard output, whatever TileLang prints."""
    answer_to = os.dup(1)
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    sizes = sizes_of(KernelSpec(**request["spec"]), Schedule.from_json(request["schedule"]))
    with os.fdopen(answer_to, "w") as answer:
        json.dump(lowered(sizes), answer)
