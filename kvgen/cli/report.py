"""`kvgen report`: an HTML page about registered entries."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvgen.cli.output import Json, print_json, require_good, require_keys
from kvgen.errors import host_errors
from kvgen.extras import require
from kvgen.files import write_whole
from kvgen.pages.page import ACCURACY, REPORT


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("report")(report)


def report(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The page to write.")] = Path(REPORT),
    keys: Annotated[
        list[str] | None, typer.Option("--key", metavar="KEY", help="Only entries whose key begins with KEY; may be repeated.")
    ] = None,
    bench: Annotated[
        list[Path] | None,
        typer.Option("--bench", metavar="FILE", help="Rows of `kvgen bench --csv`: shows other libraries; may be repeated."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write an HTML page about registered entries: times beside the read roofline, heat maps over batch and length, searches, failures."""
    require("kvgen report", "optuna")
    from dataclasses import asdict

    from kvgen.bench.results import read_results
    from kvgen.registry import stores
    from kvgen.report.page import render
    from kvgen.report.studies import study_views
    from kvgen.toolchain import ArtifactCache

    results = [result for file in bench or () for result in read_results(file)]
    cache = ArtifactCache()
    every = [one for store in reversed(stores()) for one in store.all()]
    require_keys(keys or [], [one.key for one in every])
    for key in keys or []:
        require_good([one for one in every if one.key.startswith(key)])
    chosen = [one for one in every if not keys or one.key.startswith(tuple(keys))]
    for one in chosen:
        if one.entry is None:
            typer.echo(f"left out: {one.label}: {one.problem}", err=True)
    entries = list({one.key: one.entry for one in chosen if one.entry is not None}.values())
    if as_json:
        print_json([{"key": e.key, "spec": e.spec.name, "studies": [asdict(view) for view in study_views(e, cache)]} for e in entries])
        return
    page = render(entries, cache, results, accuracy=ACCURACY if (output.parent / ACCURACY).is_file() else None)
    with host_errors("write the page", output):
        write_whole(output, page)
    typer.echo(f"wrote {output} (entries: {len(entries)})")
