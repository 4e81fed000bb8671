"""`kvgen recommend`: the formats that fit a model and a budget."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvgen.cli.output import Json, microseconds, print_json, print_table

if TYPE_CHECKING:
    from kvgen.accuracy.recommend import Option
    from kvgen.registry.entry import Entry


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("recommend")(recommend)


def recommend(
    model: Annotated[
        str, typer.Argument(metavar="MODEL-SHAPE", help="Layers x query heads / KV heads x head_dim, e.g. 32x32/8x128, or llama-3.1-8b.")
    ],
    budget: Annotated[
        float | None,
        typer.Option("--budget-bytes-per-token", metavar="N", min=1, help="Bound of the bytes of a packed token in all layers."),
    ] = None,
    increase: Annotated[
        str | None, typer.Option("--max-perplexity-increase", metavar="X", help="Bound of the rise of perplexity, e.g. 0.5% or 0.005.")
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="Of the printed spec: float16 or bfloat16.")] = "float16",
    table: Annotated[
        Path | None, typer.Option("--table", metavar="FILE", help="A table of `kvgen accuracy --csv` instead of the one that ships.")
    ] = None,
    chosen: Annotated[str | None, typer.Option("--spec", metavar="FORMAT", help="Print only the spec of this format, as YAML.")] = None,
    as_json: Json = False,
) -> None:
    """List the formats that fit a bound of memory or of quality, with their entries, and print the spec of the best.

    Only formats on the Pareto front of size and quality are listed. Exit code 3 if none fits.
    """
    from kvgen.accuracy.recommend import best, model_shape, options, read_csv, results, spec_for
    from kvgen.accuracy.suite import suite
    from kvgen.errors import KvgenError, RegistryMiss
    from kvgen.spec import dump_spec

    try:
        shape = model_shape(model)
    except KvgenError as error:
        raise typer.BadParameter(str(error)) from error
    if budget is None and increase is None and chosen is None:
        raise typer.BadParameter("give --budget-bytes-per-token, --max-perplexity-increase or --spec")
    if dtype not in ("float16", "bfloat16"):
        raise typer.BadParameter(f"--dtype is float16 or bfloat16, not {dtype!r}")
    if chosen is not None:
        if chosen not in suite():
            raise typer.BadParameter(f"there is no format {chosen!r}; formats: {', '.join(suite())}")
        if budget is not None or increase is not None or table is not None:
            raise typer.BadParameter("--spec names the format, so it goes with no bound and no table")
        spec = spec_for(chosen, shape, dtype)  # type: ignore[arg-type]
        if as_json:
            print_json(spec.to_json())
        else:
            typer.echo(dump_spec(spec), nl=False)
        return
    file = table or results()
    rows, facts = read_csv(file)
    found = options(shape, rows, budget=budget, increase=_fraction(increase), dtype=dtype)  # type: ignore[arg-type]
    if not found:
        all_options = options(shape, rows, dtype=dtype)  # type: ignore[arg-type]
        if not all_options:
            raise KvgenError(f"{file} has no format of the suite: {', '.join(suite())}")
        raise RegistryMiss(f"no format of {file.name} fits {model}: {_nearest(all_options, budget, increase)}")
    pick = best(found, budget)
    if as_json:
        print_json({"formats": [option.to_json() for option in found], "best": pick.row.name, "measured": facts})
        return
    _show(found, model)
    source = f"the {facts.get('model')} model of `kvgen accuracy` ({facts.get('device')}, {facts.get('date')})"
    typer.echo(f"\nPerplexity is that of {source}: it compares formats, and does not predict that of {model}.\n")
    typer.echo(f"# {pick.row.name}: {_entries(pick.entries) or 'not tuned yet: kvgen build'}")
    typer.echo(dump_spec(pick.spec), nl=False)


def _nearest(found: list[Option], budget: float | None, increase: str | None) -> str:
    """What the formats nearest to the bounds need."""
    parts = []
    if budget is not None:
        parts.append(f"the smallest takes {min(one.token_bytes for one in found):.0f} bytes per token")
    if increase is not None:
        parts.append(f"perplexity rises by {min(one.worst_increase for one in found):.3%} at least")
    return ", and ".join(parts)


def _fraction(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError as error:
        raise typer.BadParameter(f"--max-perplexity-increase is a number like 0.5% or 0.005, not {text!r}") from error
    if not 0 <= value < float("inf"):
        raise typer.BadParameter(f"--max-perplexity-increase must be 0 or more, not {text!r}")
    return value


def _show(found: list[Option], model: str) -> None:
    rows = [
        (
            option.row.name,
            f"{option.token_bytes:.0f}",
            f"{option.bits:.3f}",
            str(option.unquantized_tokens),
            f"{option.row.increase:+.3%} ± {option.row.increase_error:.3%}",
            f"{option.row.agreement:.2%}",
            microseconds(option.row.step_us),
            _entries(option.entries) or "–",
        )
        for option in found
    ]
    columns = ["format", "bytes per token", "bits", "tokens kept in 16 bits", "perplexity", "same first", "8x32768 on a GPU", "entries"]
    print_table(f"formats for {model}", columns, rows, right=columns[1:-1])


def _entries(entries: tuple[Entry, ...]) -> str:
    return ", ".join(f"{entry.key} ({entry.device.get('name')})" for entry in entries)
