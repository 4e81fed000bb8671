"""The compiled launches of an entry: as they were tuned if these modules are here, else compiled from the entry's own sources."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from kvgen.errors import ToolchainMissing
from kvgen.lower.backend import Source
from kvgen.registry.entry import Code, Entry, Launch
from kvgen.toolchain import Artifact, ArtifactCache
from kvgen.toolchain.compilers import machine

LOG = logging.getLogger("kvgen")
"""For information that needs no action. Without a handler, Python prints messages from WARNING on to stderr."""


Ready = Callable[[str, Artifact], object]
"""Called with the file of launches and their module as soon as it is there."""


def modules(entry: Entry, ready: Ready = lambda *_: None, starting: Callable[[], object] = lambda: None) -> dict[str, Path]:
    """Shared libraries by the file of the launches that they were compiled from. `starting` is called before the first compilation.

    The module that was measured is taken if the cache has it, it runs on this machine, and the headers are unchanged; then no compiler is
    needed. If the headers have changed, the schedule is rendered again, because an old source may not fit new headers.
    Raises ToolchainMissing, CompileError.
    """
    cache = ArtifactCache()
    cache.require_executable()
    found: dict[str, Path] = {}
    missing: dict[str, Source] = {}
    for launch in entry.every_launch:
        if launch.file in found or launch.file in missing:
            continue
        code = entry.codes[launch.file]
        tuned = tuned_module(entry, code, cache)
        if tuned is not None:
            found[launch.file] = tuned.path
            ready(launch.file, tuned)
        else:
            missing[launch.file] = entry.source(code) or _rendered(entry, launch)
    return found | _compiled(missing, cache, ready, starting) if missing else found


def tuned_module(entry: Entry, code: Code, cache: ArtifactCache) -> Artifact | None:
    """The module that a launch was measured as, if the cache has it, it runs here and its headers are unchanged."""
    if code.artifact is None or code.machine != machine(entry.arch) or entry.source(code) is None:
        return None
    return cache.get(code.artifact)


def sources(entry: Entry) -> dict[str, Source]:
    """Sources by the file of the launches: the entry's own, rendered again where kvgen's headers have changed."""
    return {launch.file: entry.source(entry.codes[launch.file]) or _rendered(entry, launch) for launch in entry.every_launch}


def _rendered(entry: Entry, launch: Launch) -> Source:
    from kvgen.lower.backend import get_backend

    return get_backend(launch.backend).lower(entry.spec, entry.schedule(launch), entry.arch)


def _compiled(sources: Mapping[str, Source], cache: ArtifactCache, ready: Ready, starting: Callable[[], object]) -> dict[str, Path]:
    """Compiled in parallel if the cache lacks them."""
    from kvgen.toolchain.compile import build_all

    files = {source.id: file for file, source in sources.items()}

    def compiling(count: int) -> None:
        target = next(iter(sources.values())).target
        LOG.warning("kvgen: compiling %d kernel%s for %s (first use; cached afterwards)", count, "s" if count > 1 else "", target)
        starting()

    try:
        artifacts = build_all(sources.values(), cache, compiling, lambda key, artifact: ready(files[key], artifact))
    except ToolchainMissing as error:
        raise ToolchainMissing(f"the kernel is not compiled on this machine yet, and cannot be: {error}") from error
    return {file: artifacts[source.id].path for file, source in sources.items()}
