"""`kvgen bench`: compares a spec's kernel with others."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvgen.cli.app import app
from kvgen.cli.options import Arch, Json, Workloads, parse_seconds, require_writable, resolve_any_spec
from kvgen.cli.output import Ticker, microseconds, print_json, print_table
from kvgen.errors import MeasureError

if TYPE_CHECKING:
    from kvgen.arch import Target
    from kvgen.bench.run import Provider
    from kvgen.measure.measurement import TimingPolicy
    from kvgen.spec import KernelSpec, LinearSpec, MatrixSpec

OVER = 1.1
"""A run that takes longer than so many times its budget says so."""
NOTHING = "nothing was measured, for the reasons above"


@app.command()
def bench(
    spec_name: Annotated[str, typer.Argument(metavar="SPEC", help="A spec file, or the name of a preset.")],
    against: Annotated[list[str] | None, typer.Option("--against", metavar="NAME", help="Only providers that NAME is part of.")] = None,
    alone: Annotated[bool, typer.Option("--alone", help="No other providers: only kvgen and the read roofline.")] = False,
    arch: Arch = None,
    workload: Workloads = None,
    decode: Annotated[bool, typer.Option("--decode", help="Time decode (append, attend, flush) instead of attend.")] = False,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Turns of each provider; slow ones have fewer, at least 3.")] = 15,
    sustained: Annotated[
        float, typer.Option("--sustained", metavar="TIME", parser=parse_seconds, help="Load before each round, and no pauses in it.")
    ] = 0.0,
    budget: Annotated[
        float | None, typer.Option("--budget", metavar="TIME", parser=parse_seconds, help="Bound of wall-clock time, by fewer rounds.")
    ] = None,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Also write the rows to a file, as they are measured.")] = None,
    as_json: Json = False,
) -> None:
    """Compare a spec's kernel with torch, FlashInfer and the read roofline, A B C A B C … in one run."""
    if alone and against:
        raise typer.BadParameter("it leaves no other providers, and --against names some", param_hint="--alone")
    require_writable(csv)
    pin_threads()
    import torch

    from kvgen.measure.measurement import TimingPolicy
    from kvgen.spec import KernelSpec
    from kvgen.spec.target import resolve

    call = "decode" if decode else "attend"
    threads = torch.get_num_threads()
    policy = TimingPolicy(call, seconds=0.06, warmup_seconds=0.02, samples=15, sustained_seconds=sustained, threads=threads)  # type: ignore[arg-type]
    spec = resolve_any_spec(spec_name, arch, workload)
    target = resolve(spec.arch)
    if not isinstance(spec, KernelSpec):
        for option, given in {"--against": against, "--alone": alone, "--decode": decode, "--budget": budget}.items():
            if given:
                raise typer.BadParameter("it goes with a spec of attention", param_hint=option)
        _run_operation(spec, target, policy, rounds, csv, as_json=as_json)
        return
    rows = run(spec, target, [] if alone else _chosen(spec, target, against), policy, rounds, csv, budget, quiet=as_json)
    if not rows:
        raise MeasureError(NOTHING)
    if as_json:
        print_json(rows)
    else:
        show(rows)


def pin_threads() -> None:
    """Keep OpenMP threads, ours and torch's, on cores of their own. Without effect once torch is imported."""
    cores = os.sched_getaffinity(0)
    os.environ.setdefault("OMP_PROC_BIND", "true")
    import torch  # noqa: F401 - loads OpenMP, which binds this thread, too

    os.sched_setaffinity(0, cores)  # this thread starts the calls, and cores() counts its processors


def _chosen(spec: KernelSpec, target: Target, names: list[str] | None) -> list[Provider]:
    """The other providers whose `provider backend` contains one of the names. Raises BadParameter if none does."""
    from kvgen.bench.libraries import providers

    every = {f"{provider.name} {provider.backend}": provider for provider in providers(spec, target)}
    chosen = [provider for known, provider in every.items() if not names or any(name in known for name in names)]
    if not chosen:
        raise typer.BadParameter(f"no provider is called {' or '.join(names or ())}; there are: {', '.join(every)}")
    return chosen


def run(
    spec: KernelSpec,
    target: Target,
    others: list[Provider],
    policy: TimingPolicy,
    rounds: int,
    csv: Path | None,
    seconds: float | None = None,
    *,
    quiet: bool = False,
) -> list[dict[str, Any]]:
    """Records of kvgen's kernel, as `get_kernel` returns it, and of the other providers, which are also written to a file."""
    began = time.monotonic()
    from kvgen.api import get_kernel
    from kvgen.bench.run import Ours, compare, facts, frame, write_csv
    from kvgen.format.sizes import half_full
    from kvgen.measure.measurement import LEAST_ROUNDS

    kernel = get_kernel(spec)
    with Ticker(quiet=quiet) as ticker:
        rows = compare(
            spec, target, spec.workloads, [Ours(kernel), *others], lambda work: half_full(kernel.spec, kernel.layout, work.kv_len),
            policy=policy, rounds=rounds, told=_tell, seconds=None if seconds is None else seconds - (time.monotonic() - began),
            kept=lambda records: write_csv(csv, frame(records, facts(target, policy))) if csv and records else None,
            watch=lambda note, left: ticker.set(lambda passed: f"{spec.name}: {note}, about {max(0.0, left - passed):.0f} s left"),
        )  # fmt: skip
    if seconds is not None and (took := time.monotonic() - began) > OVER * seconds:
        _tell(f"it took {took:.0f} s of {seconds:.0f} s: {LEAST_ROUNDS} rounds of every provider at every workload need as long here")
    return rows


def _tell(*messages: str) -> None:
    for message in messages:
        typer.echo(message, err=True)


def show(rows: list[dict[str, Any]]) -> None:
    """A table per workload, fastest first."""
    from kvgen.spec import Workload

    columns = ["provider", "time", "to kvgen", "MB", "GB/s", "pure read", "of read speed", "relative L2"]
    while rows:
        work, name = rows[0]["workload"], rows[0]["spec"]
        mine, rows = [row for row in rows if row["workload"] == work], [row for row in rows if row["workload"] != work]
        ours = next((row["us"] for row in mine if row["provider"] == "kvgen"), None)
        table = [
            (
                f"{row['provider']} {row['backend']}",
                microseconds(row["us"]),
                f"{row['us'] / ours:.2f}x" if ours else "–",
                f"{row['bytes'] / 1e6:.1f}",
                f"{row['tb_s'] * 1e3:.1f}",
                microseconds(row["read_us"]),
                f"{row['read_fraction']:.0%}",
                f"{row['relative_l2']:.1e}",
            )
            for row in sorted(mine, key=lambda row: row["us"])
        ]
        print_table(f"{name} at {Workload(**work).key}", columns, table, right=columns[1:])
        typer.echo("")


def _run_operation(
    spec: LinearSpec | MatrixSpec, target: Target, policy: TimingPolicy, rounds: int, csv: Path | None, *, as_json: bool
) -> None:
    """A linear layer, or an operation on a matrix, beside others, printed."""
    import pandas as pd
    import torch

    from kvgen.bench.operations import compare
    from kvgen.bench.run import facts, write_csv

    records: list[dict[str, Any]] = []
    try:
        for record in compare(spec, target, policy, rounds):
            records.append(record)
            if csv:
                write_csv(csv, pd.DataFrame([{**one, **facts(target, policy)} for one in records]))
    except torch.OutOfMemoryError as error:
        if not records:
            raise MeasureError("no workload fits into the memory that is free") from error
        typer.echo(f"workloads after {records[-1]['workload']} do not fit into the memory that is free", err=True)
    if as_json:
        print_json(records)
        return
    ours = {one["workload"]: one["us"] for one in records if one["provider"] == "kvgen"}
    table = []
    for one in records:
        told = (microseconds(one["us"]), f"{one['us'] / ours[one['workload']]:.2f}x", f"{one['bytes'] / 1e6:.1f}")
        table.append((one["workload"], one["provider"], *told, f"{one['read_us'] / one['us']:.0%}"))
    columns = ["workload", "provider", "time", "to kvgen", "MB", f"of {records[-1]['provider']}"]
    print_table(spec.name, columns, table, right=columns[2:])
