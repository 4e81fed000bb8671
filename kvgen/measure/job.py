"""Jobs and outcomes of worker processes, as plain data that is sent between processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from kvgen.arch import Target, device_type
from kvgen.lower.schedule import Schedule, layout_of
from kvgen.reference.layout import PackedLayout
from kvgen.spec import KernelSpec, Workload
from kvgen.spec.timing import Timing

Kind = Literal["ok", "unsupported", "compile_error", "wrong", "crash", "timeout", "oom"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Call = Literal["attend", "decode"]
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
    """Bytes that are touched between two uses of an input; None: enough to evict the device's last-level cache."""
    read: bool = False
    """Also time the read roofline for the same bytes."""
    sustained_seconds: float = 0.0
    """CUDA: sustained timing after this many seconds of load; 0: idle-rested timing."""
    threads: int | None = None
    """CPU: threads of the module; None leaves its default."""


@dataclass(frozen=True)
class Job:
    """Verify (unless `check` is None), at every workload too, and time there (unless `timing` is None) one compiled variant."""

    spec: KernelSpec
    schedule: Schedule
    target: Target
    artifact: Path
    workloads: tuple[Workload, ...]
    check: CheckPolicy | None = field(default_factory=CheckPolicy)
    timing: TimingPolicy | None = field(default_factory=TimingPolicy)

    @property
    def device(self) -> str:
        """The torch device type that the variant runs on."""
        return device_type(self.target)

    def layout(self) -> PackedLayout:
        """The packed layout of the schedule's layout part."""
        return layout_of(self.spec, self.schedule.layout)

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` reads it back."""
        return {
            "spec": self.spec.model_dump(mode="json"),
            "schedule": self.schedule.to_json(),
            "target": self.target,
            "artifact": str(self.artifact),
            "workloads": [work.model_dump(mode="json") for work in self.workloads],
            "check": None if self.check is None else asdict(self.check),
            "timing": None if self.timing is None else asdict(self.timing),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Job:
        """Inverse of `to_json`. Raises KeyError, TypeError or ValueError on other data."""
        return cls(
            spec=KernelSpec.model_validate(data["spec"]),
            schedule=Schedule.from_json(data["schedule"]),
            target=data["target"],
            artifact=Path(data["artifact"]),
            workloads=tuple(Workload.model_validate(work) for work in data["workloads"]),
            check=None if data["check"] is None else CheckPolicy(**data["check"]),
            timing=None if data["timing"] is None else TimingPolicy(**data["timing"]),
        )


@dataclass(frozen=True)
class Outcome:
    """The result of a job. `detail` describes a failure in one sentence; `accuracy` has the largest errors."""

    kind: Kind
    detail: str = ""
    timings: tuple[Timing, ...] = ()
    accuracy: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    """Seconds of the job, without importing torch and computing references."""

    @property
    def ok(self) -> bool:
        """Right, and timed where that was asked."""
        return self.kind == "ok"

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` reads it back."""
        return {
            "kind": self.kind,
            "detail": self.detail,
            "timings": [timing.to_json() for timing in self.timings],
            "accuracy": dict(self.accuracy),
            "seconds": self.seconds,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Outcome:
        """Inverse of `to_json`. Raises KeyError, TypeError or ValueError on other data."""
        if data["kind"] not in KINDS:
            raise ValueError(f"unknown outcome {data['kind']!r}")
        timings = tuple(Timing.from_json(timing) for timing in data["timings"])
        return cls(data["kind"], str(data["detail"]), timings, dict(data["accuracy"]), float(data["seconds"]))
