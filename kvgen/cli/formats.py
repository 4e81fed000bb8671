"""`kvgen presets` and `schema`: the language of specs. `spec`, `recommend` and `accuracy`: formats for a model, and what they cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvgen.cli.app import app
from kvgen.cli.options import Json, require_writable
from kvgen.cli.output import describe, print_json, print_line, print_table

if TYPE_CHECKING:
    from kvgen.accuracy import Model, Part

DTYPES = ("float16", "bfloat16", "float32")

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A Hugging Face config.json or its folder, a name like llama-3.1-8b, or layers x query / KV heads x head_dim."
    ),
]
DType = Annotated[str | None, typer.Option("--dtype", help=f"Instead of the configuration's: {', '.join(DTYPES)}.")]


@app.command()
def presets(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Print this preset as YAML.")] = None, as_json: Json = False
) -> None:
    """List the named formats (BitDecoding, TurboMind, QServe, Kitty, KIVI, PyTorch's INT4 GQA), or print one as YAML."""
    from kvgen.spec import dump_spec
    from kvgen.spec import presets as all_presets

    known = all_presets()
    if name is not None and name not in known:
        raise typer.BadParameter(f"there is no preset {name!r}; presets: {', '.join(known)}")
    shown = {name: known[name]} if name is not None else known
    if as_json:
        print_json({key: spec.to_json() for key, spec in shown.items()})
    elif name is not None:
        typer.echo(dump_spec(known[name]), nl=False)
    else:
        print_table("", ["preset", "format"], [(key, describe(spec)) for key, spec in shown.items()])


@app.command()
def schema(
    matrix: Annotated[bool, typer.Option("--matrix", help="The schema of operations on a matrix.")] = False,
    linear: Annotated[bool, typer.Option("--linear", help="The schema of linear layers.")] = False,
) -> None:
    """Print a JSON schema of the spec language, for editors."""
    from kvgen.spec.schema import json_schema, linear_schema, matrix_schema

    print_json(matrix_schema() if matrix else linear_schema() if linear else json_schema())


@app.command()
def accuracy(
    specs: Annotated[
        list[str] | None,
        typer.Argument(metavar="SPEC", help="Names of formats, or spec files, whose heads are the model's; by default all, on a CPU some."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="DIR|ID", help="A causal model of transformers instead of SmolLM2-135M.")
    ] = None,
    texts: Annotated[list[Path] | None, typer.Option("--text", metavar="FILE", help="Instead of the texts; may be repeated.")] = None,
    context: Annotated[
        int | None, typer.Option("--context", metavar="N", min=512, help="Tokens of the longest context; by default 8192, on a CPU 1024.")
    ] = None,
    passages: Annotated[int | None, typer.Option("--passages", metavar="N", min=1, help="Of each text; by default 10, on a CPU 2.")] = None,
    questions: Annotated[
        int | None, typer.Option("--questions", metavar="N", min=1, help="For each kind, length and depth; by default 100, on a CPU 2.")
    ] = None,
    ends: Annotated[
        int | None, typer.Option("--layers-in-8-bits", metavar="N", min=1, help="Give so many first and so many last layers 8 bits.")
    ] = None,
    weights: Annotated[
        list[str] | None,
        typer.Option("--weights", metavar="NAME", help="Quantize the weights, too: int4, int8, int4-mse … or all; may be repeated."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of passages, questions and intervals.")] = 0,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help=f"Of the model: {', '.join(DTYPES)}; by default its own, on a CPU float32.")
    ] = None,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Also write all figures, as they are measured.")] = None,
    as_json: Json = False,
) -> None:
    """Measure what formats cost a language model: perplexity, KL divergence, greedy tokens and retrieval, over kvgen's kernels."""
    require_writable(csv)
    if dtype is not None and dtype not in DTYPES:
        raise typer.BadParameter(f"--dtype is one of {', '.join(DTYPES)}, not {dtype!r}")
    import pandas as pd

    from kvgen.accuracy import BESIDE_WEIGHTS, SHORT, evaluate, formats, weight_formats
    from kvgen.accuracy.texts import given_texts, packaged_texts
    from kvgen.bench.run import write_csv

    chosen = {} if not specs else _named(specs)
    kinds = list(weight_formats()) if weights == ["all"] else list(dict.fromkeys(weights or ()))
    if unknown := [name for name in kinds if name not in weight_formats()]:
        raise typer.BadParameter(f"there is no format of weights {unknown[0]!r}; formats: {', '.join(weight_formats())}, or all")
    read = given_texts(texts) if texts else packaged_texts()
    subject = evaluate.load(model, dtype)
    gpu = subject.device.type == "cuda"
    usually = BESIDE_WEIGHTS if kinds else formats() if gpu else SHORT
    chosen = chosen or {name: form for name, form in formats().items() if name in usually}
    if ends is not None:
        eight = {"layers": ends, "key": {"bits": 8}, "value": {"bits": 8}}
        chosen = {f"{name}-ends-8": {**form, "ends": eight} for name, form in chosen.items()}
    usual = (min(subject.limit, 8192), 10, 100) if gpu else (min(subject.limit, 1024), 2, 2)
    sizes = evaluate.Sizes(context or usual[0], passages or usual[1], questions or usual[2], seed)

    def kept(records: list[dict[str, Any]]) -> None:
        if csv is not None:
            write_csv(csv, pd.DataFrame(records))

    records = evaluate.evaluate(subject, chosen, read, sizes, lambda line: typer.echo(line, err=True), kept, kinds)
    frame = pd.DataFrame(records)
    if as_json:
        print_json(records)
        return
    longest = frame[(frame.text == "all") & (frame.context == sizes.context)].set_index(["weights", "format", "measure"]).sort_index()
    rows = []
    for kind, name in frame[["weights", "format"]].drop_duplicates().itertuples(index=False):
        mine = longest.loc[kind, name]

        def told(measure: str, form: str, mine: pd.DataFrame = mine) -> str:
            one = mine.loc[measure]
            return f"{one.value:{form}} ({one.low:{form}} to {one.high:{form}})"

        shares = [told(measure, ".1%") for measure in ("agreement", "passkey", "pairs")]
        size = [f"{mine.bits.iloc[0]:.3f}", str(mine.unquantized_tokens.iloc[0])]
        rows.append(
            [
                *([kind] if kinds else []),
                name,
                *size,
                f"{mine.loc['perplexity'].value:.3f}",
                told("increase", "+.2%"),
                told("kl", ".2g"),
                *shares,
            ]
        )
    measures = ["bits", "tokens in 16 bits", "perplexity", "increase", "KL, nats", "greedy tokens", "passkeys", "pairs"]
    columns = [*(["weights"] if kinds else []), "format", *measures]
    print_table(f"{subject.name} at {sizes.context} tokens, 95 % intervals", columns, rows, right=measures)


def _named(names: list[str]) -> dict[str, dict[str, Any]]:
    """Formats by their names, as mappings without heads. Raises BadParameter for an unknown name, and where two have the same."""
    from kvgen.accuracy import SAME_AS, formats
    from kvgen.spec.load import read_mapping

    found: dict[str, dict[str, Any]] = {}
    for given in names:
        name, form = given, formats().get(given, {"preset": given} if given in SAME_AS else None)
        if form is None and not (Path(given).suffix or Path(given).is_file()):
            raise typer.BadParameter(f"{given!r} is neither a file nor a format; formats: {', '.join([*formats(), *SAME_AS])}")
        if form is None:
            data = read_mapping(Path(given))
            name = str(data.get("name", Path(given).stem))
            form = {part: data[part] for part in ("preset", "key", "value", "cache", "ends") if part in data}
        if name in found:
            raise typer.BadParameter(f"two formats are called {name!r}")
        found[name] = form
    return found


@app.command()
def spec(
    model_name: ModelName,
    form: Annotated[str, typer.Option("--format", metavar="FORMAT", help="A format that `kvgen accuracy` lists.")] = "bitdecoding-int4",
    dtype: DType = None,
    kind: Annotated[str | None, typer.Option("--layers", metavar="TYPE", help="Only these layers, e.g. sliding_attention.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="DIR", help="Write a file for each kind of layer.")] = None,
    as_json: Json = False,
) -> None:
    """Print the spec of a model's layers as YAML. Where layers differ, choose some by --layers, or write a file for each kind with -o."""
    from kvgen.accuracy import formats
    from kvgen.errors import host_errors
    from kvgen.files import write_whole

    model = _model(model_name, dtype)
    if form not in formats():
        raise typer.BadParameter(f"there is no format {form!r}; formats: {', '.join(formats())}")
    every = model.parts(form, dtype)
    parts = [part for part in every if kind in (None, part.kind)]
    if not parts:
        raise typer.BadParameter(f"{model.name} has no layers of type {kind}, but {_kinds(every)}", param_hint="--layers")
    if output is not None:
        files = {output / f"{part.spec.name}.yaml": part for part in parts}
        if there := next((file for file in files if file.exists()), None):
            raise typer.BadParameter(f"{there} exists, and may have been edited: delete it, or choose another folder", param_hint="-o")
        with host_errors("write", output):
            output.mkdir(parents=True, exist_ok=True)
            for file, part in files.items():
                write_whole(file, part.to_yaml(model))
        if as_json:
            print_json([{"file": str(file), "kind": part.kind, "layers": part.layers} for file, part in files.items()])
        else:
            for file, part in files.items():
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


def _bytes(text: str) -> int:
    """`36000`, `36KB` (1000 bytes each) or `36KiB` (1024). Raises BadParameter."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        size = TypeAdapter(ByteSize).validate_python(text)
    except ValidationError:
        size = ByteSize(0)
    if size < 1:
        raise typer.BadParameter(f"{text!r:.80} is no size of at least one byte; write 36000, 36KB or 36KiB")
    return int(size)


@app.command()
def recommend(
    model_name: ModelName,
    budget: Annotated[
        int | None,
        typer.Option(
            "--budget-bytes-per-token", metavar="SIZE", parser=_bytes, help="Of a packed token in all layers, such as 36KB or 36KiB."
        ),
    ] = None,
    most: Annotated[float | None, typer.Option("--max-kl", metavar="X", min=0.0, help="Of the KL divergence that the table shows.")] = None,
    dtype: DType = None,
    as_json: Json = False,
) -> None:
    """List the formats that fit a bound of memory or of KL divergence, and print the specs of the best.

    Only formats that no other one beats in both size and KL divergence are listed. Exit code 3 if none fits.
    """
    model = _model(model_name, dtype)
    if budget is None and most is None:
        raise typer.BadParameter("give --budget-bytes-per-token or --max-kl")
    from kvgen.accuracy import formats, options, read_table
    from kvgen.errors import KvgenError, RegistryMiss

    figures = read_table()
    front = options(model, figures, dtype)
    impossible = {name: why for name in figures.index if name in formats() and (why := model.refused(name))}
    if not front:
        told = "; ".join(f"{name}: {why}" for name, why in impossible.items()) or f"formats: {', '.join(formats())}"
        raise KvgenError(f"no named format fits {model.name}: {told}")
    found = [one for one in front if (budget is None or one.token_bytes <= budget) and (most is None or one.quality["kl"] <= most)]
    if not found:
        smallest, least = min(one.token_bytes for one in front), min(one.quality["kl"] for one in front)
        raise RegistryMiss(
            f"no format fits {model.name}: the smallest takes {smallest:.0f} bytes per token, and the least KL divergence is {least:.3g}"
        )
    best = found[-1] if budget is not None else found[0]
    if as_json:
        print_json({"formats": [option.to_json() for option in found], "best": best.name, "impossible": impossible})
        return
    rows = []
    for one in found:
        quality = [f"{one.quality['kl']:.2g}", f"{one.quality['increase']:+.2%}", f"{one.quality['agreement']:.1%}"]
        rows.append([one.name, f"{one.token_bytes:.0f}", f"{one.bits:.3f}", str(one.unquantized_tokens), *quality])
    columns = ["format", "bytes per token", "bits", "tokens in 16 bits", "KL, nats", "perplexity", "greedy tokens"]
    print_table(f"formats for {model.name}", columns, rows, right=columns[1:])
    for why in dict.fromkeys(impossible.values()):
        print_line(f"left out: {', '.join(name for name, reason in impossible.items() if reason == why)}: {why}")
    typer.echo("\nThe figures are those of SmolLM2-135M: they order formats. `kvgen accuracy --model` measures your model.\n")
    typer.echo("---\n".join(part.to_yaml(model) for part in best.parts), nl=False)


def _model(text: str, dtype: str | None) -> Model:
    """The model of a name, a configuration or a shape. Raises BadParameter for what is none, UnsupportedError for what kvgen has not."""
    from kvgen.accuracy import Model
    from kvgen.errors import KvgenError, SpecError, UnsupportedError

    if dtype is not None and dtype not in DTYPES:
        raise typer.BadParameter(f"--dtype is one of {', '.join(DTYPES)}, not {dtype!r}")
    try:
        return Model.named(text)
    except (SpecError, UnsupportedError):
        raise
    except KvgenError as error:
        raise typer.BadParameter(str(error)) from error


def _kinds(parts: list[Part]) -> str:
    return " and ".join(f"{part.kind} ({part.layers})" for part in parts)
