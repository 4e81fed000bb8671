"""Schedules of any back end to sources and modules, many at once: TileLang takes seconds for each, in a process of its own."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from kvgen.arch import Target
from kvgen.digest import canonical_json
from kvgen.errors import CompileError, CompilerCrash, KvgenError
from kvgen.lower.backends import get_backend
from kvgen.lower.base import Source
from kvgen.lower.schedule import Schedule, layout_of
from kvgen.spec import KernelSpec
from kvgen.toolchain import Artifact, ArtifactCache, build
from kvgen.toolchain.pool import build_many

if TYPE_CHECKING:
    from kvgen.runtime.variant import Variant

Point = tuple[KernelSpec, Schedule]
Built = Artifact | CompileError | CompilerCrash


def lower_all(points: Sequence[Point], target: Target, workers: int) -> list[Source | KvgenError]:
    """Source of each point, or why there is none; points that differ in name and workloads alone are lowered one after the other.

    So the second finds what TileLang gave for the first, which kvgen keeps below KVGEN_CACHE_DIR.
    """
    locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
    keys = [canonical_json({"spec": spec.format(), "schedule": schedule.to_json()}) for spec, schedule in points]
    held = [locks[key] for key in keys]

    def lower(point: Point, lock: threading.Lock) -> Source | KvgenError:
        spec, schedule = point
        try:
            with lock:
                return get_backend(schedule.backend).lower(spec, schedule, target)
        except KvgenError as error:
            return error

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lower, points, held))


def build_sources(
    sources: Sequence[Source], workers: int, *, ptx_only: bool | None = None
) -> list[Artifact | CompileError | CompilerCrash]:
    """The artifact of each source, or what its compiler failed with; each distinct source is compiled once."""
    distinct = list(dict.fromkeys(sources))
    built = dict(build_many(distinct, workers, ArtifactCache(), ptx_only=ptx_only))
    by_source = {source: built[index] for index, source in enumerate(distinct)}
    return [by_source[source] for source in sources]


def attend_usage(artifact: Artifact) -> tuple[int, int]:
    """Registers and spilled bytes of a module's `attend` kernel with the most registers."""
    kernels = [kernel for name, kernel in artifact.resources.kernels.items() if "attend" in name]
    worst = max(kernels, key=lambda kernel: kernel.registers, default=None)
    return (worst.registers, worst.spill_bytes) if worst else (0, 0)


def default_variant(spec: KernelSpec) -> Variant:
    """The CUDA back end's default schedule of a spec, compiled for this GPU and loaded."""
    from kvgen.runtime.module import load
    from kvgen.runtime.variant import Variant

    backend = get_backend("cuda")
    schedule = backend.default(spec, "sm90")
    return Variant(spec, layout_of(spec, schedule.layout), load(build(backend.lower(spec, schedule, "sm90")).path))
