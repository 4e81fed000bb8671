"""`kvgen bench`: compares a spec's kernel with torch, FlashInfer and ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from kvgen.cli.output import Arch, Json, Workloads, microseconds, parse_seconds, print_json, print_table, require_writable, resolve_spec
from kvgen.cli.suite import run_suite

if TYPE_CHECKING:
    from kvgen.arch import Target
    from kvgen.bench.provider import Provider
    from kvgen.bench.run import Row
    from kvgen.measure.job import Call, TimingPolicy
    from kvgen.spec import KernelSpec


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("bench")(bench)


def bench(
    spec_name: Annotated[str | None, typer.Argument(metavar="SPEC", help="A spec file, or the name of a preset.")] = None,
    suite: Annotated[
        str | None, typer.Option("--suite", metavar="NAME", help="int8-kernels: the INT8 paper's kernels, instead of a SPEC.")
    ] = None,
    against: Annotated[
        list[str] | None, typer.Option("--against", metavar="NAME", help="Only providers whose name contains NAME; may be repeated.")
    ] = None,
    alone: Annotated[bool, typer.Option("--alone", help="No other providers: only kvgen and the read roofline.")] = False,
    arch: Arch = None,
    workload: Workloads = None,
    decode: Annotated[bool, typer.Option("--decode", help="Time decode (append, attend, flush) instead of attend.")] = False,
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, help="One median per provider and round; slow ones have fewer, at least 3.")
    ] = 15,
    sustained: Annotated[
        float,
        typer.Option(
            "--sustained", metavar="TIME", parser=parse_seconds, help="Sustained timing: load before each round, and no pauses in it."
        ),
    ] = 0.0,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Also write the rows to a file, as they are measured.")] = None,
    as_json: Json = False,
) -> None:
    """Compare a spec's kernel with torch, FlashInfer, ONNX Runtime and the read roofline, A B C A B C … in one run."""
    for option, given in {"--against": against, "--alone": alone, "--decode": decode}.items():
        if suite is not None and given:
            raise typer.BadParameter("it goes with a SPEC, not with --suite", param_hint=option)
    if alone and against:
        raise typer.BadParameter("it leaves no other providers, and --against names some", param_hint="--alone")
    require_writable(csv)
    pin_threads()
    if spec_name is None or suite is not None:
        policy = _policy("attend", sustained)
        run_suite(suite, spec_name, arch, workload, policy, rounds, csv, as_json=as_json)
        return
    from kvgen.spec.target import resolve

    spec = resolve_spec(spec_name, arch, workload)
    target = resolve(spec.arch)
    policy = _policy("decode" if decode else "attend", sustained)
    others = [] if alone else providers(spec, target, against)
    rows = run(spec, target, others, policy, rounds, kept=_writing(csv, target, policy))
    if not rows:
        from kvgen.errors import MeasureError

        raise MeasureError("nothing was measured, for the reasons above")
    if as_json:
        print_json([row.to_json() for row in rows])
    else:
        show(rows)


def pin_threads() -> None:
    """Keep OpenMP threads, ours and torch's, on cores of their own. Without effect once torch is imported."""
    import os

    cores = os.sched_getaffinity(0)
    os.environ.setdefault("OMP_PROC_BIND", "true")
    import torch  # noqa: F401 - loads OpenMP, which binds this thread, too

    os.sched_setaffinity(0, cores)  # this thread starts the calls, and cores() counts its processors


def _writing(csv: Path | None, target: Target, policy: TimingPolicy) -> Callable[[Sequence[Row]], None]:
    """What writes the rows of each workload to the file, if there is one."""
    if csv is None:
        return lambda _: None
    from kvgen.bench.run import csv_rows
    from kvgen.csvfile import CsvFile

    file, about = CsvFile(csv), facts(target, policy)
    return lambda rows: file.add(csv_rows(rows, about))


def _policy(call: str, sustained: float) -> TimingPolicy:
    import torch

    from kvgen.measure.job import TimingPolicy

    return TimingPolicy(
        cast("Call", call), seconds=0.06, warmup_seconds=0.02, samples=15, sustained_seconds=sustained, threads=torch.get_num_threads()
    )


def run(
    spec: KernelSpec,
    target: Target,
    others: list[Provider],
    policy: TimingPolicy,
    rounds: int,
    *,
    kept: Callable[[Sequence[Row]], None] = lambda _: None,
) -> list[Row]:
    """Rows of kvgen's kernel, as `get_kernel` returns it, and of the other providers; `kept` is given those of each workload."""
    import warnings

    from kvgen.api import get_kernel
    from kvgen.bench.ours import Ours
    from kvgen.bench.run import compare
    from kvgen.measure.bytes import half_full

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernel = get_kernel(spec)
    for warning in caught:
        typer.echo(str(warning.message), err=True)
    return compare(
        spec,
        target,
        spec.workloads,
        [Ours(kernel), *others],
        lambda work: half_full(kernel.spec, kernel.layout, work.kv_len),
        policy=policy,
        rounds=rounds,
        told=lambda message: typer.echo(message, err=True),
        kept=kept,
    )


def providers(spec: KernelSpec, target: Target, names: list[str] | None) -> list[Provider]:
    """The other providers for a target whose `provider backend` contains one of the names. Raises BadParameter if none does."""
    from kvgen.bench.flashinfer import FlashInfer
    from kvgen.bench.onnx_gqa import OnnxGqa
    from kvgen.bench.torch_sdpa import cpu_providers, cuda_providers

    gpu: list[Provider] = [*cuda_providers(spec.attention.dtype), FlashInfer(), FlashInfer(fp8=True)]
    every = [*cpu_providers(), OnnxGqa(8), OnnxGqa(4)] if target == "cpu" else gpu
    if not names:
        return every
    chosen = [provider for provider in every if any(name in f"{provider.name} {provider.backend}" for name in names)]
    if not chosen:
        known = ", ".join(f"{provider.name} {provider.backend}" for provider in every)
        raise typer.BadParameter(f"no provider is called {' or '.join(names)}; there are: {known}")
    return chosen


def facts(target: Target, policy: TimingPolicy) -> dict[str, Any]:
    """Facts of machine and measurement, which every table of results contains."""
    from datetime import datetime, timezone

    import torch

    from kvgen import __version__
    from kvgen.registry.device import here

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


def show(rows: list[Row]) -> None:
    """A table per workload, fastest first."""
    for key in dict.fromkeys(row.workload.key for row in rows):
        mine = [row for row in rows if row.workload.key == key]
        ours = next((row.us for row in mine if row.provider == "kvgen"), None)
        table = [
            (
                f"{row.provider} {row.backend}",
                microseconds(row.us),
                f"{row.us / ours:.2f}x" if ours else "–",
                f"{row.nbytes / 1e6:.1f}",
                f"{row.tb_s * 1e3:.1f}",
                microseconds(row.read_us),
                f"{row.read_fraction:.0%}",
                f"{row.relative_l2:.1e}",
            )
            for row in sorted(mine, key=lambda row: row.us)
        ]
        columns = ["provider", "time", "to kvgen", "MB", "GB/s", "pure read", "of read speed", "relative L2"]
        print_table(f"{mine[0].spec} at {key}", columns, table, right=columns[1:])
        typer.echo("")
