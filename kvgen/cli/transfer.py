"""`kvgen export`: kernels for programs without kvgen. `kvgen report`: a page about registered entries."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvgen.cli.app import app
from kvgen.cli.options import Json, Keys, require_good, require_keys, resolve_spec
from kvgen.cli.output import print_json


@app.command()
def report(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The page to write.")] = Path("kvgen-report.html"),
    keys: Keys = None,
    as_json: Json = False,
) -> None:
    """Write an HTML page about registered entries: times beside the read roofline, searches, failures."""
    from kvgen.extras import require

    require("kvgen report", "matplotlib")
    import json

    from kvgen import results
    from kvgen.errors import host_errors, printable
    from kvgen.files import write_whole
    from kvgen.registry import stores
    from kvgen.results import render

    every = [one for store in reversed(stores()) for one in store.all()]
    require_keys(keys or [], [one.key for one in every])
    for key in keys or []:
        require_good([one for one in every if one.key.startswith(key)])
    chosen = [one for one in every if not keys or one.key.startswith(tuple(keys))]
    for one in chosen:
        if one.entry is None:
            typer.echo(printable(f"left out: {one.label}: {one.problem}"), err=True)
    entries = {one.key: one.entry for one in chosen if one.entry is not None}
    if as_json:
        print_json([
            {"key": key, "spec": entry.spec.name, "trials": json.loads(results.trials(key).to_json(orient="records"))}
            for key, entry in entries.items()
        ])  # fmt: skip
        return
    with host_errors("write the page", output):
        write_whole(output, render(chosen))
    typer.echo(f"wrote {output} (entries: {len(entries)})")


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write.")],
    spec: Annotated[str, typer.Argument(metavar="SPEC", help="A spec file, or the name of a preset.")],
    arch: Annotated[list[str] | None, typer.Option("--arch", metavar="ARCH", help="A target; may be repeated.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="The kernel's name; the spec's by default.")] = None,
    version: Annotated[int, typer.Option("--version", min=0, help="The kernel's version.")] = 1,
    as_json: Json = False,
) -> None:
    """Write a spec's kernels to a folder for Hugging Face `kernels`."""
    found = resolve_spec(spec)
    from kvgen.integrations.hf_kernels import export_kernel
    from kvgen.spec.target import resolve

    targets = [resolve(resolve_spec(spec, one).arch) for one in arch or [found.arch]]
    done = export_kernel(found, targets, folder, name=name, version=version, tell=lambda line: typer.echo(line, err=True))
    if as_json:
        print_json(done.to_json())
        return
    for build in done.builds:
        tuned = f"tuned on {build['tuned']['device']}" if build["tuned"] else "not tuned"
        typer.echo(f"{build['name']}: {tuned}; {build['verified']}")
    typer.echo(f"wrote {done.folder} ({', '.join(done.variants)})")
