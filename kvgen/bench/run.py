"""Comparisons: all providers are timed A B C A B C … in one process, with the same threads, beside the read roofline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

import torch

from kvgen import __version__
from kvgen.api.kernel import Kernel
from kvgen.arch import Target
from kvgen.errors import ToolchainMissing, UnsupportedError, host_errors
from kvgen.files import write_whole
from kvgen.format.dtypes import DTYPES
from kvgen.measure import read_roofline
from kvgen.measure.inputs import NoRoom, WorkloadInputs
from kvgen.measure.measurement import LEAST_ROUNDS, LOAD_SECONDS, TimingPolicy
from kvgen.measure.perform import rounds_within
from kvgen.measure.timer import Power, metered, timer_for
from kvgen.registry.entry import here
from kvgen.spec import KernelSpec, Workload
from kvgen.verify.data import learned_sinks
from kvgen.verify.reference import attend
from kvgen.verify.tolerance import relative_l2

if TYPE_CHECKING:
    import pandas as pd

ROUNDS = 15
READ_ROUNDS = 5
SLOW_SECONDS = 1.5
"""What has taken this long is not timed in further rounds than LEAST_ROUNDS."""
SEQUENCES_CHECKED = 2
Record = dict[str, Any]


@dataclass
class Series:
    """What takes turns with others: `sample` gives a round's samples in µs, `read` those of reading (or copying) the same bytes."""

    sample: Callable[[TimingPolicy], Iterable[float]]
    read: Callable[[TimingPolicy], float] | None
    medians: list[float] = field(default_factory=list)
    """Of each round."""
    reads: list[float] = field(default_factory=list)
    power: Power = field(default_factory=Power)
    """Of the GPU in the last round, under a sustained load."""
    spent: float = 0.0


def compare(
    spec: KernelSpec,
    target: Target,
    workloads: Iterable[Workload],
    providers: Sequence[Provider],
    length: Callable[[Workload], int],
    *,
    policy: TimingPolicy,
    rounds: int = ROUNDS,
    seconds: float | None = None,
    told: Callable[[str], None] = lambda _: None,
    kept: Callable[[Sequence[Record]], None] = lambda _: None,
    watch: Callable[[str, float], None] = lambda *_: None,
) -> list[Record]:
    """A record of every provider at every workload, as docs/cli.md describes them.

    `length` gives the tokens that a workload stands for; `told` is called with the reason if a provider cannot run, once for each reason
    and workload, and for each library that is not installed; `kept` is given all records so far after every workload; `watch` is told after
    every round where the run is, and about how many seconds it still takes. With `seconds`, each workload has an equal part of the time
    that is left, and at least LEAST_ROUNDS.
    """
    said: set[str] = set()
    records: list[Record] = []
    works, until = list(workloads), None if seconds is None else time.monotonic() + seconds
    for place, workload in enumerate(works):
        began, parts = time.monotonic(), len(works) - place
        end = None if until is None else began + (until - began) / parts
        case = Case(spec, workload, target, length(workload))
        entrants: list[tuple[Provider, Entrant]] = []
        for provider in providers:
            try:
                if workload.shortest < workload.kv_len and provider.name != "kvgen":
                    raise UnsupportedError(provider.name, "its sequences have one length")
                entrants.append((provider, provider.prepare(case)))
            except (UnsupportedError, ToolchainMissing, NoRoom) as error:  # noqa: PERF203 - the others go on
                reason = f"{workload.key}: {error.backend}: {error.reason}" if isinstance(error, UnsupportedError) else str(error)
                if reason not in said:
                    said.add(reason)
                    told(reason)
        series = [Series(one.sample, partial(read_roofline.read_us, target, one.nbytes)) for _, one in entrants]

        told_of = partial(_told_of, watch, workload.key, rounds, parts, until, began, time.monotonic())
        take_turns(series, target, policy.under(workload.load), rounds, end, told_of)
        records += [_record(case, *entrant, one) for entrant, one in zip(entrants, series, strict=True)]
        kept(records)
    return records


def _told_of(
    watch: Callable[[str, float], None], key: str, rounds: int, parts: int, until: float | None, began: float, ready: float, number: int
) -> None:
    """Tell that a round is done of the first of `parts` workloads, which began then and was ready to be timed later."""
    now = time.monotonic()
    left = parts * (ready - began + (now - ready) / (number + 1) * rounds) - (now - began)
    watch(f"{key}, round {number + 1} of {rounds}", left if until is None else min(left, max(0.0, until - now)))


def take_turns(
    series: Sequence[Series],
    target: Target,
    policy: TimingPolicy,
    rounds: int,
    end: float | None = None,
    done: Callable[[int], None] = lambda _: None,
) -> None:
    """Time all series A B C A B C …, until the time `end`; what is slow has fewer rounds, unless it is timed under load. `done` is called
    after every round.
    """
    for number in rounds_within(rounds, end):
        for one in series:
            if number >= LEAST_ROUNDS and one.spent > SLOW_SECONDS and not policy.sustained_seconds:
                continue
            started = time.monotonic()
            if policy.sustained_seconds and target != "cpu":
                with metered() as one.power:
                    one.medians.append(median(one.sample(policy)))
            else:
                one.medians.append(median(one.sample(policy)))
            one.spent += time.monotonic() - started
            if number < READ_ROUNDS and one.read is not None:
                one.reads.append(one.read(policy))
        done(number)


def _record(case: Case, provider: Provider, entrant: Entrant, one: Series) -> Record:
    us, read_us, w = median(one.medians), median(one.reads), case.workload
    unequal = {"lengths": w.lengths.to_json()} if w.shortest < w.kv_len else {}
    return {
        "provider": provider.name, "backend": entrant.backend or provider.backend, "spec": case.spec.name,
        "workload": {"batch": w.batch, "kv_len": w.kv_len, "q_len": w.q_len, **unequal, **({"load": w.load} if w.load != "rested" else {})},
        "us": round(us, 3), "bytes": entrant.nbytes, "tb_s": round(entrant.nbytes / us / 1e6, 5), "read_us": round(read_us, 3),
        "read_fraction": round(read_us / us, 4), "relative_l2": entrant.error(), "watts": one.power.watts,
        "clock_mhz": one.power.clock_mhz, "rounds": len(one.medians),
    }  # fmt: skip


# --- providers ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entrant:
    """A provider that is ready to run a case."""

    sample: Callable[[TimingPolicy], tuple[float, ...]]
    """One round: samples in µs per call, over inputs that are not in the device's cache."""
    nbytes: int
    """Bytes that a call must read."""
    error: Callable[[], float]
    """Relative L2 of the output against fp64 attention over what was read."""
    backend: str = ""
    """The variant of the provider that is used for this case, if it has several."""


class Provider(Protocol):
    """One way to compute the attention: `name` is the library, `backend` its variant."""

    name: str
    backend: str

    def prepare(self, case: Case) -> Entrant:
        """Raises UnsupportedError, with the reason, if it cannot run the case, ToolchainMissing if it is not installed."""
        ...


@dataclass(frozen=True)
class Case:
    """One workload on one device. Sequences have `length` tokens: the workload's, with a half-full residual of kvgen's layout."""

    spec: KernelSpec
    workload: Workload
    target: Target
    length: int
    _made: dict[tuple[str, torch.dtype], torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return torch.device("cpu" if self.target == "cpu" else "cuda")

    @property
    def checked(self) -> int:
        """Sequences whose output is compared with the reference."""
        return min(SEQUENCES_CHECKED, self.workload.batch)

    def tensors(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Standard normal q [batch, q_len, q_heads, head_dim], K and V [batch, length, kv_heads, head_dim], made once."""
        a = self.spec.attention
        shapes = {"q": (self.workload.q_len, a.q_heads), "k": (self.length, a.kv_heads), "v": (self.length, a.kv_heads)}
        for seed, (name, (tokens, heads)) in enumerate(shapes.items()):
            if (name, dtype) not in self._made:
                random = torch.Generator(self.device).manual_seed(seed)
                out = torch.empty((self.workload.batch, tokens, heads, a.head_dim), dtype=dtype, device=self.device)
                for sequence in out:  # the whole in float32 might not fit
                    sequence.copy_(torch.randn(sequence.shape, generator=random, device=self.device))
                self._made[name, dtype] = out
        return self._made["q", dtype], self._made["k", dtype], self._made["v", dtype]

    def sampler(self, calls: Sequence[Callable[[], torch.Tensor]]) -> Callable[[TimingPolicy], tuple[float, ...]]:
        """An entrant's `sample` over these calls in turn."""
        return partial(timer_for(self.device).time, calls)

    def error(self, out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
        """Relative L2 of an output [batch, q_len, q_heads, head_dim] against fp64 attention of the first sequences, with sinks."""
        q, k, v, out = (x[: self.checked] for x in (q, k, v, out))
        lengths = torch.full((self.checked,), k.shape[1], dtype=torch.int32)
        a, sinks = self.spec.attention, learned_sinks(self.spec, q.device)
        return relative_l2(out, attend(q, k, v, lengths, softcap=a.softcap, window=a.window, sinks=sinks)[0])


class Ours:
    """kvgen's kernel as `get_kernel` gives it: `attend`, or `decode` with append and flush."""

    name = "kvgen"

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.backend = kernel.entry.backend if kernel.entry else "default"

    def prepare(self, case: Case) -> Entrant:
        """See `Provider`. The entrant names the back end of the launch that serves the case."""
        variant, launch = self.kernel.variant(case.workload), self.kernel.launch(case.workload)
        inputs = WorkloadInputs(variant, case.workload, case.device)

        def error() -> float:
            """Against attention over the cache as the kernel reads it: packed blocks dequantized, the other tokens unchanged."""
            q, k, v = (x[: case.checked] for x in case.tensors(DTYPES[case.spec.attention.dtype]))
            cache = self.kernel.new_cache(case.checked, case.length, case.device)
            self.kernel.prefill(cache, k, v)
            out = variant.attend(q, cache, sinks=learned_sinks(case.spec, case.device))
            return case.error(out, q, *self.kernel.unpack(cache))

        return Entrant(lambda policy: inputs.time(variant, policy), inputs.nbytes, error, launch.backend if launch else "")


# --- tables -------------------------------------------------------------------------------------------------------------------


def frame(records: Sequence[Record], about: Record) -> pd.DataFrame:
    """Records of `compare` as a table, with the facts of the run in columns that repeat."""
    import pandas as pd

    rows = []
    for record in records:
        row, work = {**record, **about}, record["workload"]
        if work.get("load") == "sustained" and about["load"] == "burst":
            row["load"] = f"after {LOAD_SECONDS:g} s of load"
        row["lengths"] = f"{work['lengths']['min']}-{work['kv_len']}" if "lengths" in work else "equal"
        rows.append({**row, "batch": work["batch"], "kv_len": work["kv_len"], "q_len": work["q_len"]})
    columns = [name for name in [*records[0], *about] if name != "workload"]
    columns[3:3] = ["batch", "kv_len", "q_len", "lengths"]
    return pd.DataFrame(rows)[columns]


def write_csv(file: Path, table: pd.DataFrame) -> None:
    """Replace a file by a table, figures of six digits; it is whole at any time. Raises HostError where it cannot be written."""
    with host_errors("write", file):
        write_whole(file, table.to_csv(index=False, float_format="%.6g", lineterminator="\n"))


def facts(target: Target, policy: TimingPolicy) -> Record:
    """Facts of machine and measurement, which every table of results contains."""
    device = here(target)
    load = f"after {policy.sustained_seconds:g} s of load" if policy.sustained_seconds else "burst"
    return {
        "call": policy.call,
        "load": load if target != "cpu" else "",
        "device": device.get("name"),
        "threads": torch.get_num_threads() if target == "cpu" else "",
        "driver": device.get("driver", ""),
        "torch": torch.__version__,
        "kvgen": __version__,
        "date": datetime.now(timezone.utc).date().isoformat(),
    }
