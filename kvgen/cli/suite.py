"""`kvgen bench --suite int8-kernels`: the INT8 per-channel paper's tables, with its figures beside ours."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvgen.cli.output import microseconds, parse_shape, print_json, print_table

if TYPE_CHECKING:
    from kvgen.arch import Target
    from kvgen.bench.int8_kernels import Row, ShapeErrors
    from kvgen.measure.job import TimingPolicy
    from kvgen.spec import MatrixShape

SUITE = "int8-kernels"
COLUMNS = ("shape", "tokens", "channels", "variant", "target", "call", "us", "nbytes", "roofline_us", "fraction")
NOTE = (
    "x CPU: time of one thread of the CPU over kvgen's kernel. of roofline: time of a copy (scales: a read) of the bytes that the call\n"
    "must move, over kvgen's kernel. paper: Tesla T4, and one thread of a Xeon Gold 6148; – where its text gives no number."
)


def run_suite(
    suite: str | None,
    spec_name: str | None,
    arch: str | None,
    shapes: Sequence[str] | None,
    policy: TimingPolicy,
    rounds: int,
    csv: Path | None,
    *,
    as_json: bool,
) -> None:
    """Run the suite and print it. Raises BadParameter."""
    if suite is None:
        raise typer.BadParameter(f"name a SPEC, or --suite {SUITE}")
    if suite != SUITE or spec_name is not None:
        raise typer.BadParameter(f"there is one suite, {SUITE}, and it takes no SPEC", param_hint="--suite")
    from kvgen.bench import int8_kernels
    from kvgen.spec.target import resolve

    target = resolve(arch) if arch is not None else resolve("native")  # type: ignore[arg-type]  # get_matrix_kernel refuses others
    entrants = [*(int8_kernels.paper_entrants(target) if target != "cpu" else ())]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for one in dict.fromkeys((target, int8_kernels.BESIDE)):
            entrants += int8_kernels.fetched_entrants(one)
    for warning in caught:
        typer.echo(str(warning.message), err=True)
    chosen = _chosen(shapes)
    kept = writing(csv, target) if csv is not None else lambda _: None
    rows, errors = int8_kernels.run(entrants, chosen, policy, rounds, lambda reason: typer.echo(reason, err=True), kept)
    if as_json:
        print_json({"rows": [_plain(row) for row in rows], "errors": [{"shape": e.shape, **vars(e.errors)} for e in errors]})
    else:
        show(rows, errors)


def _chosen(shapes: Sequence[str] | None) -> list[tuple[str, MatrixShape]]:
    from kvgen.bench.int8_paper import SHAPES
    from kvgen.spec import MatrixShape

    if not shapes:
        return [(name, MatrixShape(tokens=tokens, channels=channels)) for name, tokens, channels in SHAPES]
    names = {f"{tokens}x{channels}": name for name, tokens, channels in SHAPES}
    return [(names.get(text, ""), parse_shape(text)) for text in shapes]


def _plain(row: Row) -> dict[str, Any]:
    return {**vars(row), "fraction": row.fraction}


def writing(path: Path, target: Target) -> Callable[[Sequence[Row]], None]:
    """What writes rows as they are measured to a CSV file, with the machine, driver and date in columns that repeat."""
    from datetime import datetime, timezone

    from kvgen import __version__
    from kvgen.csvfile import CsvFile
    from kvgen.registry.device import here

    devices = {one: here(one) for one in dict.fromkeys((target, "cpu"))}
    date = datetime.now(timezone.utc).date().isoformat()
    file = CsvFile(path)

    def line(row: Row) -> dict[str, Any]:
        data, device = _plain(row), devices[row.target]
        data |= {"us": round(row.us, 3), "roofline_us": round(row.roofline_us, 3), "fraction": round(row.fraction, 4)}
        facts = {"device": device.get("name", ""), "driver": device.get("driver", ""), "kvgen": __version__, "date": date}
        return {**{column: data[column] for column in COLUMNS}, **facts}

    return lambda rows: file.add([line(row) for row in rows])


def show(rows: Sequence[Row], errors: Sequence[ShapeErrors]) -> None:
    """A table per call, and one of errors."""
    from kvgen.bench.int8_paper import vectorized_ms

    variants = list(dict.fromkeys(row.variant for row in rows))
    for call in dict.fromkeys(row.call for row in rows):
        table = []
        for key in dict.fromkeys((row.tokens, row.channels) for row in rows):
            mine = {row.variant: row for row in rows if (row.tokens, row.channels) == key and row.call == call}
            shape = f"{key[0]}x{key[1]}"
            times = [microseconds(mine[name].us) if name in mine else "–" for name in variants]
            table.append((shape, *times, *_summary(mine), _paper(vectorized_ms(shape))))
        columns = ["shape", *variants, "GB/s", "of roofline", "x CPU", "paper: vectorized"]
        print_table(call, columns, table, right=columns[1:])
        typer.echo("")
    _show_errors(errors)
    typer.echo(NOTE)


def _summary(mine: dict[str, Row]) -> tuple[str, str, str]:
    """Bandwidth of kvgen's fastest entrant, its share of the roofline, and its factor over one thread of the CPU."""
    from kvgen.bench.int8_kernels import OURS

    ours = [row for name, row in mine.items() if name.startswith(OURS)]
    if not ours:
        return "–", "–", "–"
    best = min(ours, key=lambda row: row.us)
    single = next((row.us for row in ours if row.variant == f"{OURS}, 1 thread"), None)
    return f"{best.nbytes / best.us / 1e3:.0f}", f"{best.fraction:.0%}", f"{single / best.us:.0f}" if single else "–"


def _paper(milliseconds: float | None) -> str:
    return "–" if milliseconds is None else f"{milliseconds:.1f} ms"


def _show_errors(errors: Sequence[ShapeErrors]) -> None:
    from kvgen.bench.int8_paper import ATTENTION_ERROR, MAX_ABS_ERROR

    table = [
        (
            one.shape,
            f"{one.errors.l2:.4g}",
            f"{one.errors.max_abs:.5f}",
            f"{MAX_ABS_ERROR:.5f}",
            f"{one.errors.attention:.4f}",
            f"{ATTENTION_ERROR[one.shape]:.4f}" if one.shape in ATTENTION_ERROR else "–",
        )
        for one in errors
    ]
    columns = ["shape", "L2 error", "max abs error", "paper", "attention error", "paper"]
    print_table("errors (values uniform in [-1, 1))", columns, table, right=columns[1:])
    typer.echo("")
