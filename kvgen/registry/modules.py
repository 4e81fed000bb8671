"""The compiled launches of an entry: as they were tuned if these modules are here, else compiled from what kvgen renders."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from kvgen.errors import ToolchainMissing
from kvgen.lower.backend import Source
from kvgen.registry.entry import Entry, Launch
from kvgen.toolchain import Artifact, ArtifactCache
from kvgen.toolchain.compilers import machine

LOG = logging.getLogger("kvgen")
"""For information that needs no action. Without a handler, Python prints messages from WARNING on to stderr."""

Ready = Callable[[int, Artifact], object]
"""Called with the index of a launch and its module as soon as it is there."""


def modules(entry: Entry, ready: Ready = lambda *_: None, starting: Callable[[], object] = lambda: None) -> list[Path]:
    """Shared libraries of the launches, in their order. `starting` is called before the first compilation.

    The module that was measured is taken if the cache has it, it runs on this machine, and the launch renders to the same tokens; then no
    compiler is needed. Raises ToolchainMissing, CompileError, and as `Entry.sources` does.
    """
    cache = ArtifactCache()
    cache.require_executable()
    found: dict[int, Artifact] = {}
    missing: dict[str, tuple[Source, list[int]]] = {}
    for index, (launch, source) in enumerate(zip(entry.launches, entry.sources, strict=True)):
        if (tuned := tuned_module(launch, source, cache)) is not None:
            found[index] = tuned
            ready(index, tuned)
        else:
            missing.setdefault(source.id, (source, []))[1].append(index)

    def compiling(count: int) -> None:
        LOG.warning("kvgen: compiling %d kernel%s for %s (first use; cached afterwards)", count, "s" if count > 1 else "", entry.arch)
        starting()

    def compiled(key: str, artifact: Artifact) -> None:
        for index in missing[key][1]:
            found[index] = artifact
            ready(index, artifact)

    if missing:
        from kvgen.toolchain.compile import build_all

        try:
            build_all([source for source, _ in missing.values()], cache, compiling, compiled)
        except ToolchainMissing as error:
            raise ToolchainMissing(f"the kernel is not compiled on this machine yet, and cannot be: {error}") from error
    return [found[index].path for index in range(len(entry.launches))]


def tuned_module(launch: Launch, source: Source, cache: ArtifactCache) -> Artifact | None:
    """The module that a launch was measured as, if the cache has it, it runs here and the source of today has the same tokens."""
    if launch.artifact is None or launch.machine != machine(source.target) or source.fingerprint != launch.fingerprint:
        return None
    return cache.get(launch.artifact)
