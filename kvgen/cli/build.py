"""`kvgen build`: lower, compile, tune, register."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvgen.cli.exit import Exit
from kvgen.cli.launches import print_launches
from kvgen.cli.output import (
    Arch,
    BackendNames,
    Json,
    Workloads,
    print_table,
    resolve_any_spec,
    resolve_backends,
)
from kvgen.cli.results import json_list
from kvgen.extras import require

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvgen.lower.base import Backend
    from kvgen.spec import AnySpec
    from kvgen.tune.budget import Budget
    from kvgen.tune.compile_only import CompileReport
    from kvgen.tune.result import TuningResult

DEFAULT_BUDGET = "10m"
FAILURES_SHOWN = 8
DETAIL_CHARS = 160


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("build")(build)


def build(
    specs: Annotated[list[str], typer.Argument(metavar="SPEC", help="Spec files, or names of presets.")],
    arch: Arch = None,
    budget: Annotated[
        str | None, typer.Option("--budget", metavar="TIME", help="Bound of wall-clock time, e.g. 90s, 5min, 1h30m; 10m by default.")
    ] = None,
    trials: Annotated[int | None, typer.Option("--trials", min=1, metavar="N", help="Bound of the number of measurements.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the order of the search.")] = 0,
    backend: BackendNames = None,
    workload: Workloads = None,
    devices: Annotated[str | None, typer.Option("--devices", metavar="all|0,1", help="GPUs to measure on; the first by default.")] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            "--storage", metavar="URL", help="Database of measurements that several hosts share, e.g. postgresql://user@host/name."
        ),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Ignore registered winners.")] = False,
    every: Annotated[bool, typer.Option("--all-schedules", help="Also search what the hints of the search spaces exclude.")] = False,
    compile_only: Annotated[
        bool, typer.Option("--compile-only", help="Compile all schedules without measuring; register the default as untuned.")
    ] = False,
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="With --compile-only: compiler processes.")] = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, metavar="N", help="With --compile-only: N schedules per back end, of differing parameters."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Tune specs for this machine and register the winners. Ctrl-C registers the best so far; a later run continues from there."""

    _agree(
        compile_only,
        {"--jobs": jobs, "--limit": limit},
        {
            "--budget": budget,
            "--trials": trials,
            "--devices": devices,
            "--storage": storage,
            "--fresh": fresh or None,
            "--all-schedules": every or None,
        },
    )
    chosen = [resolve_any_spec(name, arch, workload) for name in specs]
    if devices is not None:
        _require_gpu(chosen)
    require("kvgen build", "optuna")
    backends = resolve_backends(backend)
    if compile_only:
        _compile(chosen, backends, jobs, limit, as_json=as_json)
        return
    allowance, gpus, interrupted = _budget(budget, trials), _devices(devices), False
    with json_list(as_json) as results:
        for spec in chosen:
            result = _tune(spec, allowance, backends, seed, storage, gpus, fresh=fresh, all_schedules=every, quiet=as_json)
            results.append(result.to_json())
            if not as_json:
                show(result)
            interrupted = result.interrupted
            if interrupted:
                break
    if interrupted:
        raise typer.Exit(Exit.INTERRUPTED)


def _agree(compile_only: bool, compiling: Mapping[str, object], measuring: Mapping[str, object]) -> None:
    """Refuse options without effect: those of a search with --compile-only, and the other way round."""
    for name, value in (measuring if compile_only else compiling).items():
        if value is not None:
            raise typer.BadParameter(
                "nothing is measured with --compile-only" if compile_only else "it goes with --compile-only", param_hint=name
            )


def _require_gpu(specs: list[AnySpec]) -> None:
    """Refuse --devices, which would have no effect, where every spec is built for a CPU."""
    from kvgen.spec.target import resolve

    if all(resolve(spec.arch) == "cpu" for spec in specs):
        raise typer.BadParameter("--devices names GPUs, and this build is for cpu")


def _budget(text: str | None, trials: int | None) -> Budget:
    from kvgen.tune.budget import Budget, parse_duration

    try:
        seconds = parse_duration(text) if text else None if trials else parse_duration(DEFAULT_BUDGET)
        return Budget(trials, seconds)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _tune(
    spec: AnySpec,
    budget: Budget,
    backends: list[Backend] | None,
    seed: int,
    storage: str | None,
    devices: list[int] | None,
    *,
    fresh: bool,
    all_schedules: bool,
    quiet: bool,
) -> TuningResult:
    from kvgen.cli.live import ProgressView
    from kvgen.tune.tuner import tune

    with ProgressView(spec.name, quiet=quiet) as view:
        return tune(
            spec,
            budget=budget,
            backends=backends,
            seed=seed,
            storage=storage,
            progress=view,
            devices=devices,
            fresh=fresh,
            all_schedules=all_schedules,
        )


def _devices(text: str | None) -> list[int] | None:
    """Indices of GPUs; None for the current one."""
    if text is None:
        return None
    if text == "all":
        from kvgen._nvml import visible_gpus

        return list(range(len(visible_gpus())))
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"--devices is all or a list like 0,1, not {text!r}") from error


def show(result: TuningResult) -> None:
    """Print the winner beside the default and the runner-up, and the failures."""
    entry = result.entry
    print_launches(f"{entry.spec.name}: {entry.backend} on {entry.device.get('name')}, layout {entry.layout}", entry)
    show_failures([(r.kind, str(r.candidate), r.detail) for r in result.failures])
    for told in (*result.refusals, *result.notes):
        typer.echo(told)
    how = "interrupted; best so far" if result.interrupted else result.why
    typer.echo(f"{result.measured} measured, {result.known} known before, {result.seconds:.0f} s: {how}")
    typer.echo(f"registered {entry.key} in {result.path}")


def show_failures(failures: list[tuple[str, str, str]]) -> None:
    """Print (kind, candidate, detail) of failures, the first few of each kind."""
    if not failures:
        return
    shown: list[tuple[str, str, str]] = []
    for kind in dict.fromkeys(kind for kind, _, _ in failures):
        same = [item for item in failures if item[0] == kind]
        shown += [(kind, candidate, _first_line(detail)) for _, candidate, detail in same[:FAILURES_SHOWN]]
        if len(same) > FAILURES_SHOWN:
            shown.append((kind, f"and {len(same) - FAILURES_SHOWN} more", ""))
    print_table(f"{len(failures)} failed", ["kind", "candidate", "detail"], shown)


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0][:DETAIL_CHARS] if lines else ""


def _compile(specs: list[AnySpec], backends: list[Backend] | None, jobs: int | None, limit: int | None, *, as_json: bool) -> None:
    from kvgen.cli.live import ProgressView
    from kvgen.tune.compile_only import compile_space

    with json_list(as_json) as results:
        for spec in specs:
            with ProgressView(spec.name, quiet=as_json) as view:
                report = compile_space(spec, backends=backends, workers=jobs, limit=limit, progress=view)
            results.append(report.to_json())
            if not as_json:
                _show_compiled(report)


def _show_compiled(report: CompileReport) -> None:
    rows = [(p.kind, str(p.schedule), str(p.registers), str(p.spill_bytes), str(p.shared_bytes)) for p in report.outcomes]
    print_table(
        f"{report.spec.name}: {len(report.outcomes)} schedules for {report.target}, {report.seconds:.0f} s",
        ["outcome", "schedule", "registers", "spills B", "static smem B"],
        rows,
        right=["registers", "spills B", "static smem B"],
    )
    state = "tuned" if report.entry.timings else "untuned"
    typer.echo(f"registered {report.entry.key} ({report.entry.backend}, {state}) in {report.path}")
