"""Parallel compilations: compiler processes, each watched by a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed

from kvgen._machine import cores
from kvgen.errors import CompileError, CompilerCrash
from kvgen.lower.base import Source
from kvgen.toolchain.artifact import Artifact
from kvgen.toolchain.cache import ArtifactCache
from kvgen.toolchain.compile import COMPILE_TIMEOUT_S, build, cached
from kvgen.toolchain.compilers import compiler_for


def build_many(
    sources: Sequence[Source],
    workers: int | None = None,
    cache: ArtifactCache | None = None,
    *,
    ptx_only: bool | None = None,
    timeout_s: float = COMPILE_TIMEOUT_S,
) -> Iterator[tuple[int, Artifact | CompileError | CompilerCrash]]:
    """Yield (index, artifact or the compiler's error) as compilations end; `workers` defaults to the CPUs of this process.

    Closing the iterator drops compilations that have not started. Raises ToolchainMissing before anything is compiled,
    HostError if the disk or this machine fails.
    """
    cache = cache or ArtifactCache()
    for language in {source.language for source in sources}:
        compiler_for(language)
    with ThreadPoolExecutor(max_workers=workers or cores(), thread_name_prefix="compile") as pool:
        futures: dict[Future[Artifact], int] = {}
        for index, source in enumerate(sources):
            futures[pool.submit(build, source, cache, ptx_only=ptx_only, timeout_s=timeout_s)] = index
        try:
            for future in as_completed(futures):
                error = future.exception()
                yield futures[future], error if isinstance(error, (CompileError, CompilerCrash)) else future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def build_all(sources: Iterable[Source], cache: ArtifactCache, starting: Callable[[int], object]) -> dict[str, Artifact]:
    """Artifacts by source id: from the cache, or compiled in parallel, each distinct source once.

    `starting` is called with the number of compilations before the first, and not at all if there are none. The first failure
    is raised, and compilations that have not started are dropped. Raises as `build` does.
    """
    distinct = {source.id: source for source in sources}
    found = {key: artifact for key, source in distinct.items() if (artifact := cached(source, cache)) is not None}
    missing = [source for key, source in distinct.items() if key not in found]
    if missing:
        starting(len(missing))
    for index, result in build_many(missing, cache=cache):
        if not isinstance(result, Artifact):
            raise result
        found[missing[index].id] = result
    return found
