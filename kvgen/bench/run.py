"""Comparisons: all providers are timed A B C A B C … in one process, with the same threads, beside the read roofline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from pydantic import Field, computed_field

from kvgen.arch import Target
from kvgen.bench.case import Case
from kvgen.bench.provider import Entrant, Provider
from kvgen.csvfile import CsvFile
from kvgen.errors import ToolchainMissing, UnsupportedError
from kvgen.measure.inputs import NoRoom
from kvgen.measure.job import LEAST_ROUNDS, LOAD_SECONDS, TimingPolicy
from kvgen.measure.power import Power, metered
from kvgen.plaindata import Json, Written, rounded
from kvgen.spec import KernelSpec, Workload
from kvgen.spec.model import EQUAL

ROUNDS = 15
READ_ROUNDS = 5
SLOW_SECONDS = 1.5
"""A provider that has taken this long is not timed in further rounds than LEAST_ROUNDS, unless it is timed under load."""
COLUMNS = (
    "provider",
    "backend",
    "spec",
    "batch",
    "kv_len",
    "q_len",
    "lengths",
    "us",
    "bytes",
    "tb_s",
    "read_us",
    "read_fraction",
    "relative_l2",
    "watts",
    "clock_mhz",
    "rounds",
)


def _told(work: Workload) -> dict[str, Any]:
    """A workload without its weight, and without what is equal and rested."""
    usual = {"lengths": EQUAL.to_json(), "load": "rested"}
    return {name: value for name, value in work.to_json().items() if name != "weight" and usual.get(name) != value}


@dataclass(frozen=True)
class Row(Json):
    """One provider at one workload. Times are medians in µs per call; `tb_s` is 10^12 bytes per second."""

    provider: str
    backend: str
    spec: str
    workload: Annotated[Workload, Written(_told)]
    us: Annotated[float, rounded(3)]
    nbytes: Annotated[int, Field(alias="bytes")]
    read_us: Annotated[float, rounded(3)]
    relative_l2: float
    watts: float | None = None
    """Power of the GPU, under a sustained load."""
    clock_mhz: float | None = None
    """Clock of its multiprocessors then."""
    rounds: int = 0
    """Rounds in which it was timed."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def tb_s(self) -> Annotated[float, rounded(5)]:
        """Bytes that must be read, over the time."""
        return self.nbytes / self.us / 1e6

    @computed_field  # type: ignore[prop-decorator]
    @property
    def read_fraction(self) -> Annotated[float, rounded(4)]:
        """Time of the read roofline for the same bytes over the kernel's time."""
        return self.read_us / self.us


@dataclass
class _Series:
    """An entrant's samples so far."""

    provider: Provider
    entrant: Entrant
    samples: list[float] = field(default_factory=list)
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
    told: Callable[[str], None] = lambda _: None,
    kept: Callable[[Sequence[Row]], None] = lambda _: None,
) -> list[Row]:
    """Rows of every provider at every workload. `length` gives the tokens that a workload stands for; `told` is called
    with the reason if a provider cannot run, once for each reason and workload, and for each library that is not installed;
    `kept` is given the rows of every workload once they are measured.
    """
    said: set[str] = set()
    rows: list[Row] = []
    for workload in workloads:
        case = Case(spec, workload, target, length(workload))
        series: list[_Series] = []
        for provider in providers:
            try:
                if workload.shortest < workload.kv_len and provider.name != "kvgen":
                    raise UnsupportedError(provider.name, "its sequences have one length")
                series.append(_Series(provider, provider.prepare(case)))
            except (UnsupportedError, ToolchainMissing, NoRoom) as error:  # noqa: PERF203 - the others go on
                reason = f"{workload.key}: {error.backend}: {error.reason}" if isinstance(error, UnsupportedError) else str(error)
                if reason not in said:
                    said.add(reason)
                    told(reason)
        _interleave(series, target, policy.under(workload.load), rounds)
        new = [_row(case, one) for one in series]
        kept(new)
        rows += new
    return rows


def _interleave(series: Sequence[_Series], target: Target, policy: TimingPolicy, rounds: int) -> None:
    import time

    from kvgen.measure.read_roofline import read_us

    for number in range(rounds):
        for one in series:
            if too_slow(number, one.spent, policy):
                continue
            started = time.monotonic()
            if policy.sustained_seconds and target != "cpu":
                with metered() as one.power:
                    one.samples.append(median(one.entrant.sample(policy)))
            else:
                one.samples.append(median(one.entrant.sample(policy)))
            one.spent += time.monotonic() - started
            if number < READ_ROUNDS:
                one.reads.append(read_us(target, one.entrant.nbytes, policy))


def too_slow(number: int, spent: float, policy: TimingPolicy) -> bool:
    """Whether what has taken `spent` seconds is left out of round `number`."""
    return number >= LEAST_ROUNDS and spent > SLOW_SECONDS and not policy.sustained_seconds


def _row(case: Case, one: _Series) -> Row:
    return Row(
        one.provider.name,
        one.entrant.backend or one.provider.backend,
        case.spec.name,
        case.workload,
        median(one.samples),
        one.entrant.nbytes,
        median(one.reads),
        one.entrant.error(),
        one.power.watts,
        one.power.clock_mhz,
        len(one.samples),
    )


def csv_rows(rows: Iterable[Row], facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows for a CSV file; `facts` (machine, date, versions) are columns that repeat."""
    found = []
    for row in rows:
        data = row.to_json()
        data |= data.pop("workload")
        data["lengths"] = "equal" if "lengths" not in data else f"{row.workload.shortest}-{row.workload.kv_len}"
        own = dict(facts)
        if data.get("load") == "sustained" and facts.get("load") == "burst":
            own["load"] = f"after {LOAD_SECONDS:g} s of load"
        found.append({**{column: data[column] for column in COLUMNS}, **own})
    return found


def write_csv(path: Path, rows: Iterable[Row], facts: Mapping[str, Any]) -> None:
    """Rows that were measured, as a CSV file."""
    CsvFile(path).add(csv_rows(rows, facts))
