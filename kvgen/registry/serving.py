"""Which launch of an entry serves a workload, and what was measured there: `kvgen why`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvgen.registry.entry import Entry, Launch, call_of
from kvgen.spec import KernelSpec, Workload
from kvgen.spec.timing import Timing


@dataclass(frozen=True)
class Serving:
    """The launch that calls of a workload take."""

    workload: Workload
    index: int
    launch: Launch
    why: str
    modelled_us: float | None
    """Of the launch, by the model that chose it; None where the launch was tuned for the workload."""
    timing: Timing | None
    """What was measured at the workload; None where nothing was."""

    def to_json(self) -> dict[str, Any]:
        """Plain data; times in µs, None where they were not measured."""
        timing = self.timing
        return {
            "workload": self.workload.key,
            "launch": self.index,
            "backend": self.launch.backend,
            "params": dict(self.launch.params),
            "why": self.why,
            "modelled_us": self.modelled_us,
            "us": timing.us if timing else None,
            "read_fraction": timing.read_fraction if timing else None,
            "default_us": timing.default_us if timing else None,
            "watts": timing.watts if timing else None,
            "clock_mhz": timing.clock_mhz if timing else None,
        }


def require_compiled(spec: KernelSpec, work: Workload) -> None:
    """Raises ValueError for more query tokens than the launches of a spec are compiled for: another algorithm serves such calls."""
    q_len, most = work.q_len, spec.attention.q_len
    if q_len > most:
        raise ValueError(f"q_len ({q_len}) is more than attention.q_len ({most}): calls with more query tokens are extend attention")


def serving(entry: Entry, spec: KernelSpec, work: Workload) -> Serving:
    """The launch for a workload, given the traffic of `spec`."""
    look_up, call = entry.look_up(spec), call_of(work)
    index = look_up.launch(*call)
    launch = entry.every_launch[index]
    if index < len(entry.launches) and launch.workload.key == work.key and entry.timings:
        return Serving(work, index, launch, f"tuned for {work.key}", None, entry.timing(work))
    times = look_up.times(call.batch, call.longest, call.tokens)
    others = [us for number, us in enumerate(times) if entry.every_launch[number].params != launch.params]
    why = f"of the least modelled time, the next one has {min(others) / times[index]:.2f} times as much" if others else "the only launch"
    return Serving(work, index, launch, why, times[index], None)
