"""The compilers: their location, flags and identity.

CUDA modules link the CUDA runtime statically, and no module links `libtvm_ffi.so`: `import tvm_ffi` has loaded it by then.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from kvgen._machine import cpuinfo
from kvgen.arch import GPUS, Target
from kvgen.digest import digest
from kvgen.errors import ToolchainMissing
from kvgen.lower.backend import Language, Source

CUDA_WHEELS = "nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-cccl nvidia-cuda-runtime"
CXX_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-march=native", "-fno-math-errno", "-fno-trapping-math")
NVCC_FLAGS = ("-O3", "-std=c++17", "--expt-relaxed-constexpr", "-Xptxas", "-v", "-shared", "-Xcompiler", "-fPIC", "-cudart", "static")
PTXAS_THREADS = ("-Xptxas", "--split-compile=4")
"""ptxas compiles a module's kernels in parallel, which leaves their instructions the same: the artifact's key omits it."""
OBEYED = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN", "CPATH", "CPLUS_INCLUDE_PATH", "GCC_EXEC_PREFIX", "COMPILER_PATH")
"""Variables by which compilers of this machine may be told to compile otherwise."""


@dataclass(frozen=True)
class Compiler:
    """A compiler found on this machine."""

    name: Literal["g++", "nvcc"]
    path: Path
    version: str
    link: tuple[str, ...] = ()
    """Flags for its own libraries and its host compiler, if they are not at the usual place: paths, which the key leaves out."""
    host: str = ""
    """nvcc's host compiler, as its key has it."""

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    def flags(self, source: Source) -> tuple[str, ...]:
        """Flags of one compilation, without input, output and include folders."""
        if self.name == "g++":
            return (*CXX_FLAGS, *source.flags)
        gpu = GPUS[source.target]
        sm, compute = f"sm_{gpu.number}", f"compute_{gpu.number}"
        code = sm if gpu.specific else f"[{sm},{compute}]"  # with PTX where later architectures can run it
        return (*NVCC_FLAGS, "-gencode", f"arch={compute},code={code}", *source.flags)

    def command(self, source: Source, file: Path, output: Path) -> list[str]:
        """The whole command line that compiles `file` to the shared library `output`."""
        include = [f"-I{folder}" for folder in (*source.include, *tvm_ffi_include())]
        parallel = PTXAS_THREADS if self.name == "nvcc" else ()
        return [str(self.path), *self.flags(source), *self.link, *parallel, *include, str(file), "-o", str(output)]

    def key(self, source: Source) -> str:
        """Digest of all that decides the compiled bytes: source, headers, compilers, flags, CPU features, FFI headers."""
        own = {name: value for name in OBEYED if (value := os.environ.get(name))}
        return digest([source.id, str(self), self.host, self.flags(source), own, machine(source.target)])


def compiler_for(language: Language) -> Compiler:
    """The compiler of a language. Raises ToolchainMissing."""
    return find_nvcc() if language == "cuda" else find_gxx()


@cache
def find_gxx() -> Compiler:
    """g++ from `CXX`, else from PATH. Raises ToolchainMissing, also for a `CXX` that is none: another compiler would surprise."""
    named = os.environ.get("CXX")
    path = shutil.which(named or "g++")
    if path is None and not named:
        raise ToolchainMissing("g++ was not found: install it (Debian and Ubuntu: apt install g++), or point CXX at one")
    version = _output(path, "-dumpfullversion", "-dumpversion").strip() if path else ""
    if path is None or not re.fullmatch(r"\d+(\.\d+)*", version):
        what = f"CXX is {named!r}, which is" if named else f"{path} is"
        raise ToolchainMissing(f"{what} no g++ that answers -dumpversion: unset CXX, or point it at a g++")
    return Compiler("g++", Path(path).absolute(), version)  # it runs in a folder of its own


@cache
def find_nvcc() -> Compiler:
    """nvcc from PATH, then CUDA_HOME, then the NVIDIA wheels of this Python. Raises ToolchainMissing."""
    home = os.environ.get("CUDA_HOME")
    wheel = nvcc_wheel()
    candidates = [shutil.which("nvcc"), home and shutil.which("nvcc", path=f"{home}/bin"), wheel and str(wheel / "bin" / "nvcc")]
    path = next((found for found in candidates if found), None)
    if path is None:
        raise ToolchainMissing(
            f"nvcc was not found on PATH, in CUDA_HOME or among the NVIDIA wheels: install kvgen[cuda] ({CUDA_WHEELS}, all of one version)"
        )
    host = find_gxx()
    release = re.search(r"\bV(\d+\.\d+\.\d+)", _output(path, "--version"))
    if release is None:
        raise ToolchainMissing(f"{path} does not answer --version like an nvcc does")
    prefix = Path(path).resolve().parent.parent
    link = (f"-L{prefix / 'lib'}",) if wheel is not None and prefix == wheel.resolve() else ()
    other = ("-ccbin", str(host.path)) if os.environ.get("CXX") else ()  # else nvcc finds the g++ of PATH itself
    return Compiler("nvcc", Path(path).absolute(), release.group(1), (*link, *other), str(host))


def nvcc_wheel() -> Path | None:
    """The prefix (`.../nvidia/cu13`) that holds `bin/nvcc` and `nvvm/bin/cicc` from wheels, or None."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for nvcc in sorted(Path(folder).glob("*/bin/nvcc"), reverse=True):
            prefix = nvcc.parent.parent
            if (prefix / "nvvm" / "bin" / "cicc").exists():
                return prefix
    return None


@cache
def cpu_name() -> str:
    """The processor's name, as the system reports it."""
    named = (line.partition(":")[2].strip() for line in cpuinfo() if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()  # platform.processor() starts a process


@cache
def cpu_features() -> str:
    """The CPU's model and feature flags from /proc/cpuinfo, on which `-march=native` depends."""
    lines = cpuinfo()
    if not lines:
        return platform.processor()
    wanted = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part", "cache size")
    return "\n".join(line for line in lines if line.split("\t")[0].split(":")[0].strip() in wanted)


def machine(target: Target) -> str:
    """Digest of the properties of a machine that a compiled module depends on: the CPU's instructions, the version of TVM-FFI."""
    return digest([platform.machine(), cpu_features() if target == "cpu" else "", tvm_ffi_version()])


@cache
def tvm_ffi_include() -> tuple[Path, ...]:
    """Include folders of the TVM-FFI C ABI and DLPack."""
    from tvm_ffi import libinfo

    folders = (libinfo.find_include_path(), libinfo.find_dlpack_include_path())
    return tuple(dict.fromkeys(Path(folder) for folder in folders))


@cache
def tvm_ffi_version() -> str:
    """Version of the installed TVM-FFI, whose headers modules are compiled against."""
    from importlib.metadata import version

    return version("apache-tvm-ffi")


def _output(*command: str) -> str:
    """The output of a command; empty where it does not run to a good end."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""
