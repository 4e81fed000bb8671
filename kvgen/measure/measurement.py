"""What a worker is asked (`Job`), what it answers (`Measurement`), and how two series of times compare. Plain data, without torch."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from kvgen import __version__
from kvgen._machine import ask, cores, gpu_identity, llc_bytes, nvml_device
from kvgen.arch import Target, device_type
from kvgen.digest import digest
from kvgen.errors import MeasureError
from kvgen.lower.schedule import Params, Schedule
from kvgen.plaindata import Facts, Json
from kvgen.spec import AnySpec, AnyWorkload
from kvgen.toolchain.compilers import cpu_features, cpu_name, machine
from kvgen.verify import CheckPolicy

VerdictKind = Literal["faster", "same", "slower", "unclear"]
Kind = Literal["ok", "unsupported", "compile_error", "wrong", "crash", "timeout", "oom"]
Call = Literal["attend", "decode"]
Load = Literal["rested", "sustained"]
LOAD_SECONDS = 0.3
"""Seconds without pauses after which a sustained load is timed: power and clocks have settled then."""
LEAST_ROUNDS = 3
"""Rounds of a final that are always measured, however short the time."""
MIN_EFFECT = 0.02
CONFIDENCE = 0.95
RESAMPLES = 2000


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
    """Bytes that are touched between two uses of an input; None: `kvgen.measure.timer.cold_bytes`."""
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
    """Verify (unless `check` is None) and time (unless `timing` is None) one compiled variant at a workload.

    Without a workload it is verified by the checks that need none.
    """

    spec: AnySpec
    schedule: Schedule
    target: Target
    artifact: Path
    workload: AnyWorkload | None = None
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


Key = tuple[str, str]
"""(schedule id, workload key)."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One schedule at one workload."""

    schedule: Schedule
    workload: AnyWorkload

    @property
    def key(self) -> Key:
        """Identity of the measurement."""
        return self.schedule.id, self.workload.key

    @property
    def backend(self) -> str:
        """Name of the back end."""
        return self.schedule.backend

    @property
    def layout(self) -> Params:
        """The layout part: caches packed for it serve every launch over it, of any back end."""
        return self.schedule.layout

    def measured(self, kind: Kind, detail: str = "", **facts: Any) -> Measurement:
        """A measurement of this candidate; `facts` are its other fields."""
        return Measurement(kind, detail, self.schedule, self.workload, **facts)

    def __str__(self) -> str:
        return f"{self.schedule} at {self.workload.key}"


@dataclass(frozen=True)
class Measurement(Json):
    """What came of one candidate (a schedule, compiled to a module) at one workload: verified, and timed where that was asked.

    A worker fills all fields but the last two, which the process that compiled the module adds.
    """

    kind: Kind
    detail: str = ""
    """Describes a failure in one sentence."""
    schedule: Schedule | None = None
    workload: AnyWorkload | None = None
    samples: tuple[float, ...] = ()
    """µs per call; of interleaved measurements, one a round."""
    read_us: float | None = None
    """A pure read of the same bytes in the same run; of an operation on a matrix, a copy that moves them."""
    watts: float | None = None
    """Power of the GPU, if the workload's load is sustained."""
    clock_mhz: float | None = None
    """Clock of its multiprocessors then."""
    accuracy: Facts = field(default_factory=dict)
    """The largest errors by name."""
    seconds: float = 0.0
    """Wall-clock time that it took."""
    module: str = ""
    """sha256 of the compiled module: what is said here is of no other one."""
    resources: Facts = field(default_factory=dict)
    """What the compiler reported of the module."""

    @property
    def ok(self) -> bool:
        """Right, and timed where that was asked."""
        return self.kind == "ok"

    @property
    def us(self) -> float | None:
        """Median of the samples; None where it was not timed."""
        return median(self.samples) if self.samples else None

    @property
    def cost(self) -> float:
        """`us`; infinite for a failure, and for what was not timed."""
        return median(self.samples) if self.ok and self.samples else math.inf

    @property
    def read_fraction(self) -> float | None:
        """Share of the read's speed that the kernel reaches: 1 is as fast as reading alone."""
        return None if self.read_us is None or not self.samples else self.read_us / median(self.samples)

    @property
    def timed(self) -> bool:
        """Right, and timed."""
        return self.ok and bool(self.samples)

    @property
    def candidate(self) -> Candidate:
        """What was measured. Schedule and workload are given."""
        assert self.schedule is not None
        assert self.workload is not None
        return Candidate(self.schedule, self.workload)

    @property
    def key(self) -> Key:
        """Identity of what was measured."""
        return self.candidate.key


def fingerprint(target: Target) -> dict[str, Any]:
    """The device that a target's kernels run on: JSON-able facts that change only when the machine does.

    Of a CPU: kind, name, cores (of this process), features (digest) and last-level cache in bytes. Of a GPU: kind, what NVML reports of
    name, driver and power limit, and what torch does of name, SMs and memory, in which parts of a GPU differ.
    """
    if target == "cpu":
        return {"kind": "cpu", "name": cpu_name(), "cores": cores(), "features": digest(cpu_features()), "llc_bytes": llc_bytes()}
    with nvml_device() as found:
        limit = found and ask(found[0].nvmlDeviceGetEnforcedPowerLimit, found[1])
    facts: dict[str, Any] = {"kind": "cuda", **gpu_identity(), **({"power_limit_w": limit // 1000} if limit else {})}
    import torch

    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        facts |= {"name": gpu.name, "sms": gpu.multi_processor_count, "memory_bytes": gpu.total_memory}
    return facts


@dataclass(frozen=True, slots=True)
class Verdict:
    """New time over old time: the ratio of medians and its interval. Below 1 is faster."""

    kind: VerdictKind
    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.kind} ({self.ratio:.3f}, {self.low:.3f} to {self.high:.3f})"


def compare(new: Sequence[float], old: Sequence[float], *, min_effect: float = MIN_EFFECT) -> Verdict:
    """Bootstrap of median(new) / median(old), in any unit of time, with an interval of CONFIDENCE.

    Two series of the same size are treated as pairs of interleaved rounds and drawn together, so that drift of the machine
    cancels. faster: the whole interval lies under 1 - min_effect; slower: over 1 + min_effect; same: between the two; else
    unclear, as are fewer than LEAST_ROUNDS samples. Raises MeasureError without samples, or with samples that are not positive.
    """
    if not new or not old or min(*new, *old) <= 0:
        raise MeasureError("a comparison needs samples of both sides, all above 0")
    draw, draws = random.Random(0), []
    for _ in range(RESAMPLES):
        mine = draw.choices(range(len(new)), k=len(new))
        theirs = mine if len(new) == len(old) else draw.choices(range(len(old)), k=len(old))
        draws.append(median([new[i] for i in mine]) / median([old[i] for i in theirs]))
    draws.sort()
    tail = (1 - CONFIDENCE) / 2
    low, high = draws[int(tail * RESAMPLES)], draws[int((1 - tail) * RESAMPLES)]
    kind: VerdictKind = "unclear"
    if min(len(new), len(old)) < LEAST_ROUNDS:  # too few to know how much they vary
        pass
    elif high < 1 - min_effect:
        kind = "faster"
    elif low > 1 + min_effect:
        kind = "slower"
    elif low >= 1 - min_effect and high <= 1 + min_effect:
        kind = "same"
    return Verdict(kind, median(new) / median(old), low, high)
