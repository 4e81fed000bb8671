"""What is exported for each target: the entry that `get_kernel` would take there, and its compiled libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvgen.arch import GPUS, Target, device_type
from kvgen.errors import CheckError, HostError, KvgenError
from kvgen.integrations.hf_kernels.levels import CpuLevel, cpu_levels
from kvgen.lower.base import Source
from kvgen.measure.worker import Worker
from kvgen.registry.default import serving_entry
from kvgen.registry.entry import Entry
from kvgen.registry.modules import sources
from kvgen.registry.select import select
from kvgen.runtime.device import cannot_run_here
from kvgen.spec import KernelSpec
from kvgen.toolchain import Artifact, ArtifactCache
from kvgen.toolchain.compile import build_all, ptx_only_default
from kvgen.toolchain.compilers import cpu_features
from kvgen.tune.regression.numerics import check_numerics

Tell = Callable[[str], object]


@dataclass(frozen=True)
class Build:
    """The compiled launches of an entry for one kind of device."""

    entry: Entry
    cautions: tuple[str, ...]
    """Why the entry is perhaps not the fastest."""
    level: CpuLevel | None
    """None for a GPU."""
    libraries: Mapping[str, Artifact]
    """By the file of a launch."""
    verified: str
    """What verification found on this machine, or why it was not run."""

    @property
    def target(self) -> Target:
        """Target of the entry."""
        return self.entry.arch

    @property
    def name(self) -> str:
        """Target, or level of the processor; names the libraries."""
        return self.level.name if self.level is not None else self.target

    def library(self, file: str) -> str:
        """File name of a launch's library in the exported folder."""
        return f"{file.rpartition('.')[0]}-{self.name}.so"


def compiled(spec: KernelSpec, targets: Iterable[Target], tell: Tell) -> list[Build]:
    """Choose, compile and, where this machine can run them, verify the libraries of all targets, the newest machines first.

    Raises UnsupportedError where no back end supports the spec, CompileError, ToolchainMissing, CheckError for a wrong
    result, and HostError where a library that this machine runs could not be verified.
    """
    if ptx_only_default():
        raise KvgenError("KVGEN_PTX_ONLY is set, and exported libraries hold machine code: unset it")
    order = [*reversed(GPUS), "cpu"]
    plans = [_Plan.of(spec, target) for target in sorted(set(targets), key=order.index)]
    cache = ArtifactCache()
    every = [source for plan in plans for level in plan.levels for source in plan.sources(level).values()]
    artifacts = build_all(every, cache, lambda count: tell(f"compiling {count} libraries"))
    with Worker() as worker:
        return [plan.build(level, artifacts, worker) for plan in plans for level in plan.levels]


@dataclass(frozen=True)
class _Plan:
    """A target with the entry that serves it."""

    entry: Entry
    cautions: tuple[str, ...]

    @classmethod
    def of(cls, spec: KernelSpec, target: Target) -> _Plan:
        entry, selection = serving_entry(spec, target, select(spec, target))
        # where and how it was tuned compared with this machine says nothing of the machines that will load the export
        return cls(entry, tuple(caution for caution in selection.cautions if not caution.startswith("tuned ")))

    @property
    def levels(self) -> Sequence[CpuLevel | None]:
        return cpu_levels() if self.entry.arch == "cpu" else (None,)

    def sources(self, level: CpuLevel | None) -> dict[str, Source]:
        flags = level.flags if level is not None else ()
        return {file: replace(source, flags=(*source.flags, *flags)) for file, source in sources(self.entry).items()}

    def build(self, level: CpuLevel | None, artifacts: Mapping[str, Artifact], worker: Worker) -> Build:
        libraries = {file: artifacts[source.id] for file, source in self.sources(level).items()}
        reason = cannot_run_here(self.entry.arch) if level is None else _lacks(level)
        if reason is not None:
            return Build(self.entry, self.cautions, level, libraries, f"not run here: {reason}")
        found = check_numerics(self.entry, libraries, worker)
        if found.status == "regressed":
            raise CheckError(f"the library for {level.name if level else self.entry.arch} is wrong: {found.detail}")
        if found.status != "good":
            raise HostError(f"the library for {level.name if level else self.entry.arch} could not be verified: {found.detail}")
        verified = f"verified on this {device_type(self.entry.arch)}: {found.detail}"
        return Build(self.entry, self.cautions, level, libraries, verified)


def _lacks(level: CpuLevel) -> str | None:
    has = set(cpu_features().split())
    absent = [name for name in level.instructions if name not in has]
    return f"this processor has no {', '.join(absent)}" if absent else None
