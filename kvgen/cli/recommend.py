"""`kvgen recommend`: the formats that fit a model and a budget. `kvgen spec`: the specs of a model's layers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvgen.cli.output import Json, microseconds, parse_bytes, print_json, print_line, print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgen.accuracy.recommend import Model, Option, Part
    from kvgen.registry.entry import Entry

DTYPES = ("float16", "bfloat16", "float32")

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A Hugging Face config.json or its folder, a name like llama-3.1-8b, or layers x query / KV heads x head_dim."
    ),
]
DType = Annotated[str | None, typer.Option("--dtype", help=f"Instead of the configuration's: {', '.join(DTYPES)}.")]
Kind = Annotated[str | None, typer.Option("--layers", metavar="TYPE", help="Only the spec of these layers, e.g. sliding_attention.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", metavar="DIR", help="Write a file for each kind of layer into this folder.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("recommend")(recommend)
    app.command("spec")(spec)


def spec(
    model_name: ModelName,
    form: Annotated[str, typer.Option("--format", metavar="FORMAT", help="A format that `kvgen accuracy` lists.")] = "bitdecoding-int4",
    dtype: DType = None,
    kind: Kind = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Print the spec of a model's layers as YAML. Where layers differ, choose some by --layers, or write a file for each kind with -o."""
    _emit(_model(model_name), form, dtype, kind, output, as_json=as_json)


def recommend(
    model_name: ModelName,
    budget: Annotated[
        float | None,
        typer.Option("--budget-bytes-per-token", metavar="N", parser=parse_bytes, help="Bound of a packed token in all layers, e.g. 36KB."),
    ] = None,
    increase: Annotated[
        str | None, typer.Option("--max-perplexity-increase", metavar="X", help="Bound of the rise of perplexity, e.g. 0.5% or 0.005.")
    ] = None,
    dtype: DType = None,
    table: Annotated[
        Path | None, typer.Option("--table", metavar="FILE", help="A table of `kvgen accuracy --csv` instead of the one that ships.")
    ] = None,
    chosen: Annotated[str | None, typer.Option("--spec", metavar="FORMAT", help="Only the spec of this format, as `kvgen spec`.")] = None,
    kind: Kind = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """List the formats that fit a bound of memory or of quality, with their entries, and print the specs of the best.

    Only formats on the Pareto front of size and quality are listed. Exit code 3 if none fits.
    """
    from kvgen.accuracy.recommend import best, options, read_csv, refused, results
    from kvgen.accuracy.suite import formats
    from kvgen.errors import KvgenError, RegistryMiss

    model = _model(model_name)
    if budget is None and increase is None and chosen is None:
        raise typer.BadParameter("give --budget-bytes-per-token, --max-perplexity-increase or --spec")
    if chosen is not None:
        if budget is not None or increase is not None or table is not None:
            raise typer.BadParameter("--spec names the format, so it goes with no bound and no table")
        _emit(model, chosen, dtype, kind, output, as_json=as_json)
        return
    if kind is not None or output is not None:
        raise typer.BadParameter("--layers and -o go with --spec, which names the format")
    _require_dtype(dtype)
    file = table or results()
    rows, facts = read_csv(file)
    found = options(model, rows, budget=budget, increase=_fraction(increase), dtype=dtype)
    impossible = {name: why for name in dict.fromkeys(row.name for row in rows if row.name in formats()) if (why := refused(model, name))}
    if not found:
        all_options = options(model, rows, dtype=dtype)
        if not all_options:
            told = "; ".join(f"{name}: {why}" for name, why in impossible.items()) or f"formats: {', '.join(formats())}"
            raise KvgenError(f"{file} has no format of the suite that fits {model.name}: {told}")
        raise RegistryMiss(f"no format of {file.name} fits {model.name}: {_nearest(all_options, budget, increase)}")
    pick = best(found, budget)
    if as_json:
        data = [option.to_json() for option in found]
        print_json({"formats": data, "best": pick.row.name, "measured": facts, "impossible": impossible})
        return
    _show(found, model)
    for why in dict.fromkeys(impossible.values()):
        print_line(f"left out: {', '.join(name for name, reason in impossible.items() if reason == why)}: {why}")
    source = f"the {facts.get('model')} model of `kvgen accuracy` ({facts.get('device')}, {facts.get('date')})"
    typer.echo("")
    print_line(f"Perplexity is that of {source}: it compares formats, and does not predict that of {model.name}.")
    typer.echo("")
    print_line(f"# {pick.row.name}: {_entries(pick.entries) or 'not tuned yet: kvgen build'}")
    typer.echo("---\n".join(part.to_yaml(model) for part in pick.parts), nl=False)


def _model(text: str) -> Model:
    """The model of a name, a configuration or a shape. Raises BadParameter for what is none, UnsupportedError for what kvgen has not."""
    from kvgen.accuracy.recommend import Model
    from kvgen.errors import KvgenError, SpecError, UnsupportedError

    try:
        return Model.named(text)
    except (SpecError, UnsupportedError):
        raise
    except KvgenError as error:
        raise typer.BadParameter(str(error)) from error


def _require_dtype(dtype: str | None) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise typer.BadParameter(f"--dtype is one of {', '.join(DTYPES)}, not {dtype!r}")


def _emit(model: Model, form: str, dtype: str | None, kind: str | None, output: Path | None, *, as_json: bool) -> None:
    """Print the one spec that is asked for, or write a file for each."""
    from kvgen.accuracy.suite import formats
    from kvgen.errors import host_errors
    from kvgen.files import write_whole

    if form not in formats():
        raise typer.BadParameter(f"there is no format {form!r}; formats: {', '.join(formats())}")
    _require_dtype(dtype)
    every = model.parts(form, dtype)
    parts = [part for part in every if kind in (None, part.kind)]
    if not parts:
        raise typer.BadParameter(f"{model.name} has no layers of type {kind}, but {_kinds(every)}", param_hint="--layers")
    if output is not None:
        files = [output / f"{part.spec.name}.yaml" for part in parts]
        with host_errors("write", output):
            output.mkdir(parents=True, exist_ok=True)
            for file, part in zip(files, parts, strict=True):
                write_whole(file, part.to_yaml(model))
        if as_json:
            print_json([{"file": str(file), "kind": one.kind, "layers": one.layers} for file, one in zip(files, parts, strict=True)])
        else:
            for file, part in zip(files, parts, strict=True):
                print_line(f"{file}: {part.layers} layers ({part.kind})")
        return
    if len(parts) > 1:
        raise typer.BadParameter(
            f"the layers of {model.name} have {len(parts)} specs, {_kinds(parts)}: write a file for each with -o DIR, or choose one by "
            "--layers"
        )
    if as_json:
        print_json(parts[0].spec.to_json())
    else:
        typer.echo(parts[0].to_yaml(model), nl=False)


def _kinds(parts: Sequence[Part]) -> str:
    return " and ".join(f"{part.kind} ({part.layers})" for part in parts)


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


def _show(found: list[Option], model: Model) -> None:
    rows = [
        (
            option.row.name,
            f"{option.token_bytes:.0f}",
            f"{option.bits:.3f}",
            str(option.unquantized_tokens),
            f"{option.row.increase:+.3%} ± {option.row.increase_error:.3%}",
            f"{option.row.agreement:.2%}",
            " / ".join(microseconds(us) for us in option.step_us) if any(option.step_us) else "–",
            _entries(option.entries) or "–",
        )
        for option in found
    ]
    columns = ["format", "bytes per token", "bits", "tokens kept in 16 bits", "perplexity", "same first", "8x32768 on a GPU", "entries"]
    print_table(f"formats for {model.name}", columns, rows, right=columns[1:-1])


def _entries(entries: tuple[Entry, ...]) -> str:
    return ", ".join(f"{entry.key} ({entry.device.get('name')})" for entry in entries)
