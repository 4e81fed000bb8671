"""Parallel compilations: compiler processes, each watched by a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from functools import partial
from types import TracebackType
from typing import TypeVar

from kvgen._machine import cores
from kvgen.children import Children
from kvgen.errors import CompileError, CompilerCrash
from kvgen.lower.base import Source
from kvgen.toolchain.artifact import Artifact
from kvgen.toolchain.cache import ArtifactCache
from kvgen.toolchain.compile import COMPILE_TIMEOUT_S, build, cached
from kvgen.toolchain.compilers import compiler_for

T = TypeVar("T")
P = TypeVar("P", bound="CompilePool")


class CompilePool:
    """Threads that each run one compiler at a time; `workers` defaults to the CPUs of this process.

    Leaving the context drops what has not started and waits for the rest, or ends it if an exception leaves the context.
    """

    def __init__(
        self, cache: ArtifactCache, workers: int | None = None, *, ptx_only: bool | None = None, timeout_s: float = COMPILE_TIMEOUT_S
    ) -> None:
        self.workers = workers or cores()
        self._cache, self._ptx_only, self._timeout_s = cache, ptx_only, timeout_s
        self._children = Children()
        self._threads = ThreadPoolExecutor(self.workers, "compile", self._children.adopt)

    def __enter__(self: P) -> P:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self.stop()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def stop(self) -> None:
        """End the compilers that run, and drop what has not started."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._children.kill()

    def run(self, task: Callable[[], T]) -> Future[T]:
        """Queue a task for one of the threads."""
        return self._threads.submit(task)

    def build(self, source: Source) -> Artifact:
        """Compile in this thread, unless the cache has the artifact. Raises as `kvgen.toolchain.build` does."""
        return build(source, self._cache, ptx_only=self._ptx_only, timeout_s=self._timeout_s)


def build_many(
    sources: Sequence[Source],
    workers: int | None = None,
    cache: ArtifactCache | None = None,
    *,
    ptx_only: bool | None = None,
    timeout_s: float = COMPILE_TIMEOUT_S,
) -> Iterator[tuple[int, Artifact | CompileError | CompilerCrash]]:
    """Yield (index, artifact or the compiler's error) as compilations end; `workers` defaults to the CPUs of this process.

    Closing the iterator ends the compilations. Raises ToolchainMissing before anything is compiled,
    HostError if the disk or this machine fails.
    """
    for language in {source.language for source in sources}:
        compiler_for(language)
    with CompilePool(cache or ArtifactCache(), workers, ptx_only=ptx_only, timeout_s=timeout_s) as pool:
        futures = {pool.run(partial(pool.build, source)): index for index, source in enumerate(sources)}
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
