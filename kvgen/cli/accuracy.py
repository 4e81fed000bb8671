"""`kvgen accuracy`: what formats cost in quality."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from kvgen.arch import Arch
from kvgen.cli.exit import Exit
from kvgen.cli.output import Arch as ArchOption
from kvgen.cli.output import Json, parse_tokens, print_json, print_table, require_writable, resolve_spec

if TYPE_CHECKING:
    from kvgen.accuracy.run import Table
    from kvgen.spec import KernelSpec


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("accuracy")(accuracy)


def _length(text: str) -> int:
    """Tokens of a sequence, of which the first 256 are a prompt. Raises BadParameter."""
    tokens = parse_tokens(text)
    if tokens < 257:
        raise typer.BadParameter(f"{tokens} is not in the range x>=257")
    return tokens


def accuracy(
    specs: Annotated[
        list[str] | None,
        typer.Argument(metavar="SPEC", help="Spec files, presets, or formats of the suite, like k4v2; by default all of the suite."),
    ] = None,
    arch: ArchOption = None,
    model: Annotated[
        str | None, typer.Option("--model", help="The transformer: small (default on a CPU) or large (default on a GPU).")
    ] = None,
    lengths: Annotated[
        list[int] | None, typer.Option("--length", parser=_length, metavar="N", help="Tokens per sequence, e.g. 2k; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of model, training and data.")] = 0,
    again: Annotated[bool, typer.Option("--train-again", help="Train even if the weights are in the cache.")] = False,
    registered: Annotated[
        bool, typer.Option("--registered", help="Measure the formats of the user's registry, and record the result in its entries.")
    ] = False,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Also write the rows to a file, as they are measured.")] = None,
    curve: Annotated[Path | None, typer.Option("--curve", metavar="FILE", help="Write the model's loss curve as CSV.")] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page of tables and pictures.")] = None,
    png: Annotated[Path | None, typer.Option("--png", metavar="FILE", help="Write the picture, and a dark one as FILE-dark.")] = None,
    as_json: Json = False,
) -> None:
    """Measure what formats cost in quality: perplexity of a small transformer over kvgen's kernels, and errors of outputs.

    Exit code 1 if a kernel is further from the reference than its dtype allows.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch loads OpenMP: threads that spin take the cores from each other
    if html or png:
        from kvgen.extras import require

        require("a picture of `kvgen accuracy`", "matplotlib")
    from dataclasses import replace

    from kvgen.accuracy.recipe import LARGE, RECIPES, SMALL
    from kvgen.spec.target import resolve

    if model is not None and model not in RECIPES:
        raise typer.BadParameter(f"--model is {' or '.join(RECIPES)}, not {model!r}")
    if registered and specs:
        raise typer.BadParameter("--registered takes the formats of the registry, and SPEC others")
    require_writable(csv, curve, html, png)
    target = resolve(_known(arch))
    recipe = replace(RECIPES[model] if model else SMALL if target == "cpu" else LARGE, seed=seed)
    chosen = _registered() if registered else _named(specs)

    from kvgen.accuracy.run import table
    from kvgen.accuracy.times import entry_times
    from kvgen.runtime.device import require_device

    require_device(target)
    found = table(
        chosen, target, recipe, lengths=lengths, times=entry_times(chosen), seed=seed, again=again, told=_told, kept=_writing(csv)
    )
    if registered and not found.wrong(chosen):
        from kvgen.accuracy.record import record
        from kvgen.registry import user_store

        for path in record(user_store(), found):
            _told(f"recorded in {path}")
    if as_json:
        from kvgen.accuracy.orders import orders

        rows, judged = [row.to_json() for row in found.rows], [order.to_json() for order in orders(found.rows)]
        print_json({"rows": rows, "orders": judged, "facts": found.facts})
    else:
        show(found)
    _write(found, curve, html, png)
    _exit_if_wrong(found, chosen)


def _told(message: str) -> None:
    typer.echo(message, err=True)


def _known(name: str | None) -> Arch:
    """The target's name. Raises BadParameter."""
    known = get_args(Arch)
    if name is not None and name not in known:
        raise typer.BadParameter(f"--arch is one of {', '.join(known)}, not {name!r}")
    return cast(Arch, name or "native")


def _named(names: list[str] | None) -> dict[str, KernelSpec]:
    """Specs by their names. Raises BadParameter for an unknown name, and where two specs have the same."""
    from kvgen.accuracy.suite import suite
    from kvgen.spec import presets

    if not names:
        return suite()
    found: dict[str, KernelSpec] = {}
    for name in names:
        if not (name in suite() or name in presets() or Path(name).suffix or Path(name).is_file()):
            raise typer.BadParameter(
                f"{name!r} is neither a file nor a format; formats: {', '.join(dict.fromkeys([*suite(), *presets()]))}"
            )
        spec = suite()[name] if name in suite() else resolve_spec(name)
        if spec.name in found:
            raise typer.BadParameter(f"two specs are called {spec.name!r}")
        found[spec.name] = spec
    return found


def _registered() -> dict[str, KernelSpec]:
    """The specs of attention in the user's registry by the key of their entry."""
    from kvgen.registry import user_store
    from kvgen.spec import KernelSpec

    entries = [one.entry for one in user_store().all() if one.entry is not None]
    found = {entry.key: spec for entry in entries if isinstance(spec := entry.spec, KernelSpec)}
    if not found:
        raise typer.BadParameter(f"{user_store().root} has no entries")
    return found


def _writing(csv: Path | None) -> Callable[[Table], None]:
    """What writes the rows of each format to the file, if there is one, as the table grows."""
    if csv is None:
        return lambda _: None
    from kvgen.accuracy.row import csv_rows
    from kvgen.csvfile import CsvFile

    file, written = CsvFile(csv), 0

    def kept(found: Table) -> None:
        nonlocal written
        file.add(csv_rows(found.rows[written:], found.facts))
        written = len(found.rows)

    return kept


def _write(found: Table, curve: Path | None, html: Path | None, png: Path | None) -> None:
    from kvgen.accuracy.train import write_curve
    from kvgen.errors import host_errors
    from kvgen.files import write_whole

    if curve is not None:
        write_curve(curve, found.curve, {name: found.facts[name] for name in ("model", "text", "device", "torch", "kvgen", "date")})
    if html is not None:
        from kvgen.accuracy.page import page

        with host_errors("write", html):
            write_whole(html, page(found.rows, found.facts))
    if png is not None:
        from kvgen.accuracy.picture import write_pngs

        write_pngs(png, found.rows)


def show(found: Table) -> None:
    """A table per length, the nearest to an unquantized cache first, and the papers' orders."""
    from kvgen.accuracy.orders import orders

    columns = ["format", "bits", "perplexity", "increase", "same first", "divergence e-3"]
    columns += ["normal L2", "cosine", "structured L2", "cosine", "weights L1", "kernel"]
    for length in sorted({row.length for row in found.rows}):
        rows = sorted((row for row in found.rows if row.length == length), key=lambda row: row.divergence)
        cells = [
            (
                row.name,
                f"{row.bits:.3f}",
                f"{row.perplexity:.4f}",
                f"{row.increase:+.3%} ± {row.increase_error:.3%}",
                f"{row.agreement:.2%}",
                f"{1000 * row.divergence:.3g}",
                f"{row.normal_l2:.4f}",
                f"{row.normal_cosine:.4f}",
                f"{row.structured_l2:.4f}",
                f"{row.structured_cosine:.4f}",
                f"{row.structured_weights_l1:.4f}",
                f"{row.kernel_error:.1e}",
            )
            for row in rows
        ]
        print_table(f"{length} tokens; perplexity over 16 bits: {rows[0].unquantized_perplexity:.4f}", columns, cells, right=columns[1:])
        typer.echo("")
    judged = orders(found.rows)
    if judged:
        columns = ["claim", "measured (divergence e-3)", "result"]
        print_table("what the papers say", columns, [(one.claim, one.measured, one.result) for one in judged])


def _exit_if_wrong(found: Table, specs: dict[str, KernelSpec]) -> None:
    wrong = found.wrong(specs)
    for name, error in wrong.items():
        typer.echo(f"kvgen: {name}: its kernel is {error:.1e} from the reference over the same cache, in one head or more", err=True)
    if wrong:
        raise typer.Exit(Exit.REGRESSION)
