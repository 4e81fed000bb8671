"""Jobs and outcomes of worker processes, as plain data that is sent between processes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from kvgen import __version__
from kvgen._nvml import gpu_identity
from kvgen.arch import Target, device_type
from kvgen.digest import digest
from kvgen.format.layout import PackedLayout
from kvgen.lower.schedule import Schedule, layout_of
from kvgen.plaindata import Facts, Json
from kvgen.spec import AnySpec, AnyWorkload, KernelSpec
from kvgen.spec.timing import Timing
from kvgen.toolchain.compilers import machine

Kind = Literal["ok", "unsupported", "compile_error", "wrong", "crash", "timeout", "oom"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Call = Literal["attend", "decode"]
Load = Literal["rested", "sustained"]
LOAD_SECONDS = 0.3
"""Seconds without pauses after which a sustained load is timed: power and clocks have settled then."""
LEAST_ROUNDS = 3
"""Rounds of a final that are always measured, however short the time."""


@dataclass(frozen=True, slots=True)
class CheckPolicy:
    """How a variant is verified, besides at the workloads of its job."""

    seed: int = 0
    """Seed of the data."""
    steps: int = 3
    """Least number of decode steps of a life cycle; there is one for every number of query tokens that the spec allows."""
    repeats: int = 3
    """Calls that must agree bit for bit."""
    long_tokens: int = 1000
    """Tokens, at least, of the long scenario."""
    most_tokens: int = 1 << 16
    """Tokens, at most, of the long sequences that `attend` reads."""
    workloads_only: bool = False
    """Skip the checks that do not depend on a workload: the artifact has passed them."""


@dataclass(frozen=True, slots=True)
class TimingPolicy:
    """How a variant is timed. Times of different policies are not comparable."""

    call: Call = "attend"
    seconds: float = 0.3
    """Time spent on the samples of one workload."""
    warmup_seconds: float = 0.05
    samples: int = 30
    """Most samples of one workload."""
    cold_bytes: int | None = None
    """Bytes that are touched between two uses of an input; None: `kvgen.measure.device.cold_bytes`."""
    read: bool = False
    """Also time the read roofline for the same bytes."""
    sustained_seconds: float = 0.0
    """CUDA: sustained timing after this many seconds of load; 0: idle-rested timing."""
    threads: int | None = None
    """CPU: threads of the module; None leaves its default."""

    def under(self, load: Load) -> TimingPolicy:
        """The policy for a workload of this load: a sustained one is timed after LOAD_SECONDS of it, unless the policy says how long."""
        if load == "rested" or self.sustained_seconds:
            return self
        return replace(self, sustained_seconds=LOAD_SECONDS)


@dataclass(frozen=True)
class Job(Json):
    """Verify (unless `check` is None), at every workload too, and time there (unless `timing` is None) one compiled variant."""

    spec: AnySpec
    schedule: Schedule
    target: Target
    artifact: Path
    workloads: tuple[AnyWorkload, ...]
    check: CheckPolicy | None = field(default_factory=CheckPolicy)
    timing: TimingPolicy | None = field(default_factory=TimingPolicy)

    @property
    def device(self) -> str:
        """The torch device type that the variant runs on."""
        return device_type(self.target)

    @property
    def use(self) -> str:
        """Digest of what a verification of the artifact holds for, besides its bytes: format, layout and rounding, kvgen, machine, GPU."""
        gpu = {} if self.device == "cpu" else gpu_identity()
        exact = self.schedule.exact
        return digest([__version__, self.spec.format_id, dict(self.schedule.layout), exact, machine(self.target), gpu])

    def layout(self) -> PackedLayout:
        """The packed layout of the schedule's layout part. Raises as `layout_of` does, and TypeError for an operation on a matrix."""
        if not isinstance(self.spec, KernelSpec):
            raise TypeError(f"{self.spec.operation} has no packed layout")
        return layout_of(self.spec, self.schedule.layout)


@dataclass(frozen=True)
class Outcome(Json):
    """The result of a job. `detail` describes a failure in one sentence; `accuracy` has the largest errors."""

    kind: Kind
    detail: str = ""
    timings: tuple[Timing, ...] = ()
    accuracy: Facts = field(default_factory=dict)
    seconds: float = 0.0
    """Seconds of the job, without importing torch and computing references."""

    @property
    def ok(self) -> bool:
        """Right, and timed where that was asked."""
        return self.kind == "ok"
