"""Source to artifact: through the cache, or by running compilers, several at a time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from types import TracebackType

from kvgen._machine import cores
from kvgen.children import Children, run
from kvgen.errors import HOST_REASONS, CompileError, CompilerCrash, HostError, ToolchainMissing, host_errors
from kvgen.lower.backend import Source
from kvgen.toolchain.cache import Artifact, ArtifactCache, KernelResources, Resources
from kvgen.toolchain.compilers import Compiler, compiler_for, machine

COMPILE_TIMEOUT_S = 600.0
LOG_CHARS = 20_000
PASS_DIED = re.compile(r"([\w ]*signal terminated program \w+|'?\w+'? died due to signal \d+)")
"""Messages of g++ and nvcc if a signal ended one of their passes."""


def build(source: Source, cache: ArtifactCache | None = None) -> Artifact:
    """The artifact of a source, from the cache, else compiled.

    Raises ToolchainMissing without a compiler, CompileError (with its log) where the compiler refuses, takes too long or writes no module,
    HostError where this machine fails: its disk is full or cannot be written, or a compiler is killed.
    """
    cache = cache or ArtifactCache()
    if (found := cached(source, cache)) is not None:
        return found
    compiler = compiler_for(source.language)
    key = compiler.key(source)
    with cache.lock(key):
        artifact = cache.get(key) or _compile(source, compiler, key, cache)
    cache.name(source.id, key, machine(source.target))
    return artifact


def cached(source: Source, cache: ArtifactCache) -> Artifact | None:
    """The artifact of a source from the cache; None if it has to be compiled.

    A module counts for the compiler that made it, or where there is none. Raises ToolchainMissing where the cache has nothing
    and there is no compiler, HostError where the cache is mounted noexec.
    """
    cache.require_executable()
    try:
        return cache.get(compiler_for(source.language).key(source))
    except ToolchainMissing:
        if (named := cache.named(source.id, machine(source.target))) is None:
            raise
        return named


def _compile(source: Source, compiler: Compiler, key: str, cache: ArtifactCache) -> Artifact:
    with cache.scratch() as folder:
        file = folder / ("kernel.cu" if source.language == "cuda" else "kernel.cpp")
        with host_errors("write", file):
            file.write_text(source.text, encoding="utf-8")
        output = folder / "out.so"
        started = time.monotonic()
        log = run_compiler(compiler.command(source, file, output), folder)
        seconds = round(time.monotonic() - started, 3)
        if not output.is_file():
            raise CompileError(f"{compiler} ended well and wrote no module")
        kernels = parse_ptxas(log) if source.language == "cuda" else {}
        return cache.put(key, output, Resources(str(compiler), seconds, kernels), {file.name: source.text, "log.txt": log})


def run_compiler(command: list[str], folder: Path, timeout_s: float = COMPILE_TIMEOUT_S) -> str:
    """Run a compiler with its temporary files in `folder`; returns its output. Raises CompileError, HostError.

    Its whole group is killed after `timeout_s` seconds.
    """
    name, environment = Path(command[0]).name, {**os.environ, "TMPDIR": str(folder), "LC_ALL": "C"}
    try:
        with host_errors("run", Path(command[0])):
            done = run(command, timeout_s, cwd=folder, env=environment, stderr=subprocess.STDOUT)
    except subprocess.TimeoutExpired:
        raise CompileError(f"{name} took longer than {timeout_s:g} s and was stopped") from None
    status, log = done.returncode, str(done.stdout)
    if status < 0:
        raise CompilerCrash(f"{name} was ended by {signal.Signals(-status).name}", folder)
    if status and (reason := HOST_REASONS.search(log)):
        raise HostError(f"{name} could not work in {folder}: {reason[0]}", folder)
    if status and (died := PASS_DIED.search(log)):
        raise CompilerCrash(f"{name} failed: {died[0].strip()}", folder)
    if status:
        raise CompileError(f"{name} failed with exit status {status}", log[:LOG_CHARS])
    return log


class CompilePool(ThreadPoolExecutor):
    """Threads that each run one compiler at a time; `workers` defaults to the CPUs of this process.

    Leaving the context drops what has not started and waits for the rest, or ends it if an exception leaves the context.
    """

    def __init__(self, workers: int | None = None) -> None:
        self.workers, self._children = workers or cores(), Children()
        super().__init__(self.workers, "compile", self._children.adopt)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self.stop()
        self.shutdown(wait=True, cancel_futures=True)

    def stop(self) -> None:
        """End the compilers that run, and drop what has not started."""
        self.shutdown(wait=False, cancel_futures=True)
        self._children.kill()


def build_many(
    sources: Sequence[Source], workers: int | None = None, cache: ArtifactCache | None = None
) -> Iterator[tuple[int, Artifact | CompileError | CompilerCrash]]:
    """Yield (index, artifact or the compiler's error) as compilations end; `workers` defaults to the CPUs of this process.

    Closing the iterator ends the compilations. Raises ToolchainMissing before anything is compiled,
    HostError if the disk or this machine fails.
    """
    for language in {source.language for source in sources}:
        compiler_for(language)
    cache = cache or ArtifactCache()
    with CompilePool(workers) as pool:
        futures = {pool.submit(build, source, cache): index for index, source in enumerate(sources)}
        for future in as_completed(futures):
            error = future.exception()
            yield futures[future], error if isinstance(error, (CompileError, CompilerCrash)) else future.result()


def build_all(
    sources: Iterable[Source],
    cache: ArtifactCache,
    starting: Callable[[int], object],
    ready: Callable[[str, Artifact], object] = lambda *_: None,
) -> dict[str, Artifact]:
    """Artifacts by source id: from the cache, or compiled in parallel, each distinct source once.

    `starting` is called with the number of compilations before the first, and not at all if there are none; `ready` with the id and
    the artifact of each source as soon as it is there. The first failure is raised, and the other compilations end. Raises as `build`
    does.
    """
    distinct = {source.id: source for source in sources}
    found = {key: artifact for key, source in distinct.items() if (artifact := cached(source, cache)) is not None}
    missing = [source for key, source in distinct.items() if key not in found]
    if missing:
        starting(len(missing))
    for key, artifact in found.items():
        ready(key, artifact)
    for index, result in build_many(missing, cache=cache):
        if not isinstance(result, Artifact):
            raise result
        found[missing[index].id] = result
        ready(missing[index].id, result)
    return found


# --- what a CUDA kernel uses -----------------------------------------------------------------------------------------------

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_SCOPES = re.compile(r"\(\w+\)(?=[\w-])|\(anonymous namespace\)::|\b\w+::")
_REGISTERS = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")


def parse_ptxas(log: str) -> dict[str, KernelResources]:
    """Resources by short kernel name, from the output of `nvcc -Xptxas -v`."""
    raw: dict[str, dict[str, int]] = {}
    current: dict[str, int] = {}
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            current = raw.setdefault(entry[1], {})
        elif stack := _STACK.search(line):
            current.update(stack_bytes=int(stack[1]), spill_bytes=int(stack[2]) + int(stack[3]))
        elif used := _REGISTERS.search(line):
            current.update(registers=int(used[1]), shared_bytes=int(used[2] or 0))
            current = {}  # functions that are no kernels follow
    return {name: KernelResources(**values) for name, values in zip(short_names(list(raw)), raw.values(), strict=True)}


def short_names(mangled: list[str]) -> list[str]:
    """Readable unique names, `decode<4, Half>` for `void kvgen::decode<4, kvgen::Half>(int*)`; as they are where c++filt is missing."""
    try:
        names = run(["c++filt", "-p"], 60.0, "\n".join(mangled)).stdout.split("\n")[: len(mangled)]
    except OSError:
        return mangled
    short = [_SCOPES.sub("", name) for name in names]
    return short if len(set(short)) == len(short) else mangled
