"""Loads a compiled module once, in a process that may crash, before it is trusted.

The process imports nothing but ctypes. TVM-FFI's library is loaded first, as it is wherever modules run; all symbols of the
module must then resolve. A CUDA module links the CUDA runtime statically and loads without a GPU, PTX or not.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from kvgen.children import run
from kvgen.errors import CompileError, CompilerCrash, host_errors

TIMEOUT_S = 120.0
PROGRAM = """
import ctypes, os, resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
ffi, module, *names = sys.argv[1:]
ctypes.CDLL(ffi, os.RTLD_NOW | os.RTLD_GLOBAL)
try:
    library = ctypes.CDLL(module, os.RTLD_NOW | os.RTLD_LOCAL)
except OSError as error:
    sys.exit(f"it cannot be loaded: {error}")
missing = [name for name in names if not hasattr(library, "__tvm_ffi_" + name)]
if missing:
    sys.exit("it lacks " + ", ".join(missing))
print("loaded", flush=True)
os._exit(0)
"""


def probe(module: Path, functions: Sequence[str], compiler: str) -> None:
    """Raise CompileError if the module does not load or lacks one of `functions`, HostError if that cannot be tested."""
    if not module.is_file():
        raise CompileError(f"{compiler} ended well and wrote no module")
    command = [sys.executable, "-I", "-S", "-c", PROGRAM, str(_ffi_library()), str(module), *functions]
    with host_errors("start a process to load", module):
        try:
            done = run(command, TIMEOUT_S, cwd=module.parent, env={**os.environ, "OMP_NUM_THREADS": "1"})
        except subprocess.TimeoutExpired:
            raise CompileError(f"{compiler} wrote a module that does not load: it takes longer than {TIMEOUT_S:g} s") from None
    if done.returncode == -signal.SIGKILL:
        raise CompilerCrash("the process that loads a new module was killed, for want of memory perhaps", module)
    if done.returncode < 0:
        raise CompileError(f"{compiler} wrote a module that crashes when it is loaded ({signal.Signals(-done.returncode).name})")
    if done.returncode or done.stdout != "loaded\n":
        reason = done.stderr.strip().replace(str(module), "it") or f"exit status {done.returncode}"
        raise CompileError(f"{compiler} wrote what is no module: {reason[-2000:]}")


@cache
def _ffi_library() -> Path:
    from tvm_ffi import libinfo

    return Path(libinfo.find_libtvm_ffi())
