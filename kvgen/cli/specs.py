"""`kvgen presets` and `kvgen schema`: the language itself."""

from __future__ import annotations

from typing import Annotated

import typer

from kvgen.cli.describe import describe
from kvgen.cli.output import Json, print_json, print_table


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("presets")(presets)
    app.command("schema")(schema)


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


def schema(matrix: Annotated[bool, typer.Option("--matrix", help="The schema of operations on a matrix.")] = False) -> None:
    """Print a JSON schema of the spec language, for editors."""
    from kvgen.spec.schema import json_schema, matrix_schema

    print_json(matrix_schema() if matrix else json_schema())
