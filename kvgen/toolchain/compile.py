"""Source to artifact: through the cache, or by running the compiler."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

from kvgen.children import run
from kvgen.errors import HOST_REASONS, CompileError, CompilerCrash, HostError, ToolchainMissing, host_errors
from kvgen.lower.base import Source
from kvgen.toolchain.artifact import Artifact, Resources
from kvgen.toolchain.cache import ArtifactCache
from kvgen.toolchain.compilers import Compiler, compiler_for, machine
from kvgen.toolchain.probe import probe
from kvgen.toolchain.ptxas import parse_ptxas

COMPILE_TIMEOUT_S = 600.0
LOG_CHARS = 20_000
PASS_DIED = re.compile(r"([\w ]*signal terminated program \w+|'?\w+'? died due to signal \d+)")
"""Messages of g++ and nvcc if a signal ended one of their passes."""


def ptx_only_default() -> bool:
    """`KVGEN_PTX_ONLY`: emit PTX and no machine code, to run variants of older architectures on a newer GPU."""
    return os.environ.get("KVGEN_PTX_ONLY", "") not in ("", "0")


def build(
    source: Source, cache: ArtifactCache | None = None, *, ptx_only: bool | None = None, timeout_s: float = COMPILE_TIMEOUT_S
) -> Artifact:
    """The artifact of a source, from the cache (also one that was imported), else compiled.

    A new module is loaded once, in a process of its own, before it is stored. Raises ToolchainMissing without a compiler,
    CompileError (with its log) where the compiler refuses, takes too long or writes no module, HostError where this machine fails:
    its disk is full or cannot be written, or a compiler is killed.
    """
    cache = cache or ArtifactCache()
    ptx_only = ptx_only_default() if ptx_only is None else ptx_only
    found = cached(source, cache, ptx_only=ptx_only)
    if found is not None:
        return found
    compiler = compiler_for(source.language)
    key = compiler.key(source, ptx_only=ptx_only)
    with cache.lock(key):
        artifact = cache.get(key) or _compile(source, compiler, key, cache, ptx_only, timeout_s)
    cache.name(source.id, key, _named_for(source, ptx_only))
    return artifact


def cached(source: Source, cache: ArtifactCache, *, ptx_only: bool | None = None) -> Artifact | None:
    """The artifact of a source from the cache, imported or compiled here; None if it has to be compiled.

    What was compiled here counts for the same compiler alone, or where there is none. Raises ToolchainMissing where the cache has nothing
    and there is no compiler, HostError where the cache is mounted noexec.
    """
    cache.require_executable()
    ptx_only = ptx_only_default() if ptx_only is None else ptx_only
    named = cache.named(source.id, _named_for(source, ptx_only))
    if named is not None and named.origin:
        return named
    try:
        compiler = compiler_for(source.language)
    except ToolchainMissing:
        if named is None:
            raise
        return named
    return cache.get(compiler.key(source, ptx_only=ptx_only))


def _named_for(source: Source, ptx_only: bool) -> str:
    """The machines on which the cache finds a module by its source alone."""
    return machine(source.target) + ("-ptx" if ptx_only else "")


def _compile(source: Source, compiler: Compiler, key: str, cache: ArtifactCache, ptx_only: bool, timeout_s: float) -> Artifact:
    with cache.scratch() as folder:
        file = folder / ("kernel.cu" if source.language == "cuda" else "kernel.cpp")
        with host_errors("write", file):
            file.write_text(source.text, encoding="utf-8")
        output = folder / "out.so"
        started = time.monotonic()
        log = run_compiler(compiler.command(source, file, output, ptx_only=ptx_only), folder, timeout_s)
        seconds = time.monotonic() - started
        probe(output, source.functions, str(compiler))
        kernels = parse_ptxas(log) if source.language == "cuda" else {}
        return cache.put(key, output, Resources(str(compiler), seconds, kernels), {file.name: source.text, "log.txt": log})


def run_compiler(command: list[str], folder: Path, timeout_s: float) -> str:
    """Run a compiler with its temporary files in `folder`; returns its output. Raises CompileError, HostError.

    Its whole group is killed after `timeout_s` seconds.
    """
    environment = {**os.environ, "TMPDIR": str(folder), "LC_ALL": "C"}
    try:
        with host_errors("run", Path(command[0])):
            done = run(command, timeout_s, cwd=folder, env=environment, stderr=subprocess.STDOUT)
    except subprocess.TimeoutExpired:
        raise CompileError(f"{Path(command[0]).name} took longer than {timeout_s:g} s and was stopped") from None
    if done.returncode:
        raise _failure(Path(command[0]).name, done.returncode, done.stdout, folder)
    return done.stdout


def _failure(name: str, status: int, log: str, folder: Path) -> CompileError | HostError:
    """The error that a compiler's exit status and messages mean: it refused the source, or this machine failed."""
    if status < 0:
        return CompilerCrash(f"{name} was ended by {signal.Signals(-status).name}", folder)
    if reason := HOST_REASONS.search(log):
        return HostError(f"{name} could not work in {folder}: {reason[0]}", folder)
    if died := PASS_DIED.search(log):
        return CompilerCrash(f"{name} failed: {died[0].strip()}", folder)
    return CompileError(f"{name} failed with exit status {status}", log[:LOG_CHARS])
