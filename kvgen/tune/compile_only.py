"""Compiles a search space where nothing can be run: what each schedule takes of the device; modules stay in the cache."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvgen.arch import Target
from kvgen.errors import CompileError, CompilerCrash
from kvgen.lower.backend import Backend, Sources
from kvgen.lower.schedule import Schedule
from kvgen.plaindata import Json
from kvgen.spec import AnySpec
from kvgen.spec.target import resolve
from kvgen.toolchain import Artifact, ArtifactCache
from kvgen.toolchain.compile import build_many
from kvgen.tune.budget import Progress, Watch
from kvgen.tune.candidates import contenders


@dataclass(frozen=True)
class CompileOutcome(Json):
    """How one schedule compiled: `ok`, `spills`, `compile_error` or `compiler_crash`; resources are the maximum over its kernels."""

    schedule: Schedule
    kind: str
    registers: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0
    detail: str = ""


def compile_space(
    spec: AnySpec,
    target: Target | None = None,
    *,
    backends: Sequence[Backend] | None = None,
    workers: int | None = None,
    limit: int | None = None,
    progress: Watch = lambda _: None,
    cache: ArtifactCache | None = None,
) -> list[CompileOutcome]:
    """Compile the spec's schedules without running them. A later tuning finds their modules in the cache.

    With `limit`, the defaults and a random choice of others, so many per back end. Raises ToolchainMissing without a compiler,
    UnsupportedError where no back end takes the spec, CompileError where no schedule compiles, HostError where the disk fails: before
    anything is compiled if the cache cannot be written.
    """
    target, cache, began = target or resolve(spec.arch), cache or ArtifactCache(), time.monotonic()
    found, _ = contenders(spec, target, backends)
    cache.require_writable()
    sources = Sources(spec, target, {c.backend.name: c.backend for c in found})
    schedules: list[Schedule] = []
    for c in found:
        rest = [schedule for schedule in c.space.schedules() if schedule not in c.defaults]
        if limit is not None:
            rest = random.Random(0).sample(rest, min(len(rest), max(0, limit - len(c.defaults))))
        schedules += [*c.defaults, *rest]
    outcomes: dict[int, CompileOutcome] = {}
    for index, result in build_many([sources.of(schedule) for schedule in schedules], workers, cache):
        outcomes[index] = outcome = _outcome(schedules[index], result)
        failures = Counter(one.kind for one in outcomes.values() if one.kind != "ok")
        passed = time.monotonic() - began
        progress(Progress("compiling", str(outcome.schedule), len(outcomes), len(schedules), 0, failures, {}, passed, None))
    if not any(one.kind in ("ok", "spills") for one in outcomes.values()):
        raise CompileError("no schedule compiles", next((one.detail for one in outcomes.values()), "the space has none"))
    return [outcome for _, outcome in sorted(outcomes.items())]


def _outcome(schedule: Schedule, result: Artifact | Exception) -> CompileOutcome:
    if not isinstance(result, Artifact):
        return CompileOutcome(schedule, "compiler_crash" if isinstance(result, CompilerCrash) else "compile_error", detail=str(result))
    kernels, spills = result.resources.kernels.values(), result.resources.spill_bytes
    registers, shared = (max((getattr(one, name) for one in kernels), default=0) for name in ("registers", "shared_bytes"))
    return CompileOutcome(schedule, "spills" if spills else "ok", registers, spills, shared)
