"""Comparisons: all providers are timed A B C A B C … in one process, with the same threads, beside the read roofline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from kvgen import __version__
from kvgen.arch import Target
from kvgen.bench.provider import Case, Entrant, Provider
from kvgen.errors import ToolchainMissing, UnsupportedError, host_errors
from kvgen.files import write_whole
from kvgen.measure import read_roofline
from kvgen.measure.inputs import NoRoom
from kvgen.measure.job import LEAST_ROUNDS, LOAD_SECONDS, TimingPolicy
from kvgen.measure.power import Power, metered
from kvgen.registry.device import here
from kvgen.spec import KernelSpec, Workload

if TYPE_CHECKING:
    import pandas as pd

ROUNDS = 15
READ_ROUNDS = 5
SLOW_SECONDS = 1.5
"""A provider that has taken this long is not timed in further rounds than LEAST_ROUNDS, unless it is timed under load."""
Record = dict[str, Any]


@dataclass
class Series:
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
    kept: Callable[[Sequence[Record]], None] = lambda _: None,
) -> list[Record]:
    """A record of every provider at every workload, as docs/cli.md describes them.

    `length` gives the tokens that a workload stands for; `told` is called with the reason if a provider cannot run, once for each reason
    and workload, and for each library that is not installed; `kept` is given all records so far after every workload.
    """
    said: set[str] = set()
    records: list[Record] = []
    for workload in workloads:
        case = Case(spec, workload, target, length(workload))
        series: list[Series] = []
        for provider in providers:
            try:
                if workload.shortest < workload.kv_len and provider.name != "kvgen":
                    raise UnsupportedError(provider.name, "its sequences have one length")
                series.append(Series(provider, provider.prepare(case)))
            except (UnsupportedError, ToolchainMissing, NoRoom) as error:  # noqa: PERF203 - the others go on
                reason = f"{workload.key}: {error.backend}: {error.reason}" if isinstance(error, UnsupportedError) else str(error)
                if reason not in said:
                    said.add(reason)
                    told(reason)
        _take_turns(series, target, policy.under(workload.load), rounds)
        records += [_record(case, one) for one in series]
        kept(records)
    return records


def _take_turns(series: Sequence[Series], target: Target, policy: TimingPolicy, rounds: int) -> None:
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
                one.reads.append(read_roofline.read_us(target, one.entrant.nbytes, policy))


def too_slow(number: int, spent: float, policy: TimingPolicy) -> bool:
    """Whether what has taken `spent` seconds is left out of round `number`."""
    return number >= LEAST_ROUNDS and spent > SLOW_SECONDS and not policy.sustained_seconds


def _record(case: Case, one: Series) -> Record:
    us, read_us, nbytes, w = median(one.samples), median(one.reads), one.entrant.nbytes, case.workload
    unequal = {"lengths": w.lengths.to_json()} if w.shortest < w.kv_len else {}
    return {
        "provider": one.provider.name, "backend": one.entrant.backend or one.provider.backend, "spec": case.spec.name,
        "workload": {"batch": w.batch, "kv_len": w.kv_len, "q_len": w.q_len, **unequal, **({"load": w.load} if w.load != "rested" else {})},
        "us": round(us, 3), "bytes": nbytes, "tb_s": round(nbytes / us / 1e6, 5), "read_us": round(read_us, 3),
        "read_fraction": round(read_us / us, 4), "relative_l2": one.entrant.error(), "watts": one.power.watts,
        "clock_mhz": one.power.clock_mhz, "rounds": len(one.samples),
    }  # fmt: skip


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
    import torch

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
