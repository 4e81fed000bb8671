"""`kvgen build`: lower, compile, tune, register."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from kvgen.cli.app import Exit, app
from kvgen.cli.options import Arch, BackendNames, Json, Workloads, parse_seconds, resolve_any_spec, resolve_backends
from kvgen.cli.output import Ticker, microseconds, print_json, print_launches, print_table

if TYPE_CHECKING:
    from kvgen.tune.budget import Progress
    from kvgen.tune.compile_only import CompileOutcome
    from kvgen.tune.tuner import TuningResult

DEFAULT_SECONDS = 600.0
FAILURES_SHOWN = 8
"""Of each kind."""
DETAIL_CHARS = 160


@app.command()
def build(
    specs: Annotated[list[str], typer.Argument(metavar="SPEC", help="Spec files, or names of presets.")],
    arch: Arch = None,
    budget: Annotated[
        float | None, typer.Option("--budget", metavar="TIME", parser=parse_seconds, help="Bound of time for each SPEC; 10m by default.")
    ] = None,
    trials: Annotated[int | None, typer.Option("--trials", min=1, metavar="N", help="Bound of the number of measurements.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the order of the search.")] = 0,
    backend: BackendNames = None,
    workload: Workloads = None,
    devices: Annotated[str | None, typer.Option("--devices", metavar="all|0,1", help="GPUs to measure on; the first by default.")] = None,
    storage: Annotated[str | None, typer.Option("--storage", metavar="URL", help="Database of measurements that hosts share.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Ignore registered winners.")] = False,
    every: Annotated[bool, typer.Option("--all-schedules", help="Also search what the hints of the search spaces exclude.")] = False,
    compile_only: Annotated[bool, typer.Option("--compile-only", help="Compile all schedules without measuring.")] = False,
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="With --compile-only: compiler processes.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="With --compile-only: schedules per back end.")] = None,
    as_json: Json = False,
) -> None:
    """Tune specs for this machine and register the winners. Ctrl-C registers the best so far; a later run continues from there."""
    from kvgen._machine import visible_gpus
    from kvgen.spec.target import resolve
    from kvgen.tune.budget import Budget
    from kvgen.tune.compile_only import compile_space
    from kvgen.tune.tuner import tune

    searching = {"--budget": budget, "--trials": trials, "--devices": devices, "--storage": storage}
    searching |= {"--fresh": fresh or None, "--all-schedules": every or None}
    for option, value in (searching if compile_only else {"--jobs": jobs, "--limit": limit}).items():
        if value is not None:
            reason = "nothing is measured with --compile-only" if compile_only else "it goes with --compile-only"
            raise typer.BadParameter(reason, param_hint=option)
    chosen = [resolve_any_spec(name, arch, workload) for name in specs]
    if devices is not None and all(resolve(spec.arch) == "cpu" for spec in chosen):
        raise typer.BadParameter("--devices names GPUs, and this build is for cpu")
    try:
        bounds = Budget(trials, budget if budget is not None or trials else DEFAULT_SECONDS)
        gpus = range(len(visible_gpus())) if devices == "all" else [int(part) for part in devices.split(",")] if devices else None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    backends, results = resolve_backends(backend), []
    for spec in chosen:
        if compile_only:
            with Ticker(quiet=as_json) as ticker:
                outcomes = compile_space(spec, backends=backends, workers=jobs, limit=limit, progress=shown(spec.name, ticker))
            results.append({"spec": spec.name, "target": resolve(spec.arch), "outcomes": [one.to_json() for one in outcomes]})
            if not as_json:
                show_compiled(spec.name, outcomes)
            continue
        with Ticker(quiet=as_json) as ticker:
            result = tune(
                spec, budget=bounds, backends=backends, seed=seed, storage=storage, progress=shown(spec.name, ticker), fresh=fresh,
                all_schedules=every, devices=None if gpus is None else list(gpus),
            )  # fmt: skip
        results.append(result.to_json())
        if not as_json:
            show(result)
        if result.interrupted:
            break
    if as_json:
        print_json(results)
    if not compile_only and result.interrupted:
        raise typer.Exit(Exit.INTERRUPTED)


def show(result: TuningResult) -> None:
    """Print the winner beside the default, and the first failures of each kind."""
    entry = result.entry
    print_launches(f"{entry.spec.name}: {entry.backend} on {entry.device.get('name')}, layout {entry.layout}", entry)
    failures: list[tuple[str, str, str]] = []
    for kind in dict.fromkeys(one.kind for one in result.failures):
        same = [one for one in result.failures if one.kind == kind]
        failures += [(kind, str(one.candidate), one.detail.strip().partition("\n")[0][:DETAIL_CHARS]) for one in same[:FAILURES_SHOWN]]
        failures += [(kind, f"and {len(same) - FAILURES_SHOWN} more", "")] if len(same) > FAILURES_SHOWN else []
    if failures:
        print_table(f"{len(result.failures)} failed", ["kind", "candidate", "detail"], failures)
    for told in (*result.refusals, *result.notes):
        typer.echo(told)
    how = "interrupted; best so far" if result.interrupted else result.why
    typer.echo(f"{result.measured} measured, {result.known} known before, {result.seconds:.0f} s: {how}")
    typer.echo(f"registered {entry.key} in {result.path}")


def show_compiled(name: str, outcomes: list[CompileOutcome]) -> None:
    """Print what every schedule takes."""
    rows = [(p.kind, str(p.schedule), str(p.registers), str(p.spill_bytes), str(p.shared_bytes)) for p in outcomes]
    columns = ["outcome", "schedule", "registers", "spills B", "static smem B"]
    print_table(f"{name}: {len(outcomes)} schedules", columns, rows, right=columns[2:])
    for kind, first in {one.kind: one for one in reversed(outcomes) if one.detail}.items():
        typer.echo(f"{kind}, {first.schedule}: {first.detail}")


def shown(title: str, ticker: Ticker) -> Callable[[Progress], None]:
    """Shows a build's progress."""

    def later(progress: Progress, passed: float) -> str:
        left = None if progress.left is None else max(0.0, progress.left - passed)
        return line(title, replace(progress, elapsed=progress.elapsed + passed, left=left))

    return lambda progress: ticker.set(partial(later, progress))


def line(title: str, progress: Progress) -> str:
    """Where the run is: phase, trials, failures, time, and the best of every workload."""
    planned = f" of {progress.planned}" if progress.planned is not None else ""
    failed = ", ".join(f"{count} {kind}" for kind, count in sorted(progress.failures.items()))
    parts = [progress.phase, f"{progress.done}{planned} measured", f"{progress.known} known" if progress.known else ""]
    parts += [f"failed: {failed}" if failed else "", f"{progress.elapsed:.0f} s"]
    parts += [f"{progress.left:.0f} s left" if progress.left is not None else ""]
    best = ", ".join(f"{key} {microseconds(one.us)}" for key, one in sorted(progress.best.items()))
    return f"{title}: {', '.join(part for part in parts if part)}" + (f"; best {best}" if best else "")
