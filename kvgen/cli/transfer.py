"""`kvgen export` and `kvgen import`: kernels for other machines. `kvgen report`: a page about them."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvgen.cli.app import app
from kvgen.cli.options import Json, Keys, require_good, require_keys, resolve_spec
from kvgen.cli.output import print_json, print_line

if TYPE_CHECKING:
    from kvgen.registry.archive import ArchiveContents


class Format(str, Enum):
    """What `kvgen export` writes."""

    ARCHIVE = "archive"
    HF_KERNELS = "hf-kernels"


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
    place: Annotated[Path, typer.Argument(metavar="FILE|DIR", help="The archive to write; with hf-kernels the folder.")],
    names: Annotated[list[str] | None, typer.Argument(metavar="KEY|SPEC", help="Beginnings of keys; with hf-kernels one spec.")] = None,
    form: Annotated[Format, typer.Option("--format", help="For `kvgen import`, or a folder for Hugging Face `kernels`.")] = Format.ARCHIVE,
    arch: Annotated[list[str] | None, typer.Option("--arch", metavar="ARCH", help="With hf-kernels: a target; may be repeated.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="With hf-kernels: the kernel's name; the spec's by default.")] = None,
    version: Annotated[int | None, typer.Option("--version", min=0, help="With hf-kernels: the kernel's version; 1 by default.")] = None,
    as_json: Json = False,
) -> None:
    """Write entries of the user's registry and their compiled modules to a file, or a spec's kernels to a folder for `kernels`."""
    if form is Format.HF_KERNELS:
        _export_kernel(place, names or [], arch, name, 1 if version is None else version, as_json=as_json)
        return
    for option, value in {"--arch": arch, "--name": name, "--version": version}.items():
        if value is not None:
            raise typer.BadParameter("it goes with --format hf-kernels", param_hint=option)
    from kvgen.registry import archive, user_store
    from kvgen.toolchain import ArtifactCache

    every = user_store().all()
    require_keys(names or [], [one.key for one in every])
    found = [one for one in every if not names or one.key.startswith(tuple(names))]
    _tell(archive.export_archive(found, place, ArtifactCache()), f"wrote {place}", as_json=as_json)


def _export_kernel(folder: Path, names: list[str], arch: list[str] | None, name: str | None, version: int, *, as_json: bool) -> None:
    if len(names) != 1:
        raise typer.BadParameter("hf-kernels takes one spec: kvgen export --format hf-kernels DIR SPEC", param_hint="SPEC")
    spec = resolve_spec(names[0])
    from kvgen.integrations.hf_kernels import export_kernel
    from kvgen.spec.target import resolve

    targets = [resolve(resolve_spec(names[0], one).arch) for one in arch or [spec.arch]]
    done = export_kernel(spec, targets, folder, name=name, version=version, tell=lambda line: typer.echo(line, err=True))
    if as_json:
        print_json(done.to_json())
        return
    for build in done.builds:
        tuned = f"tuned on {build['tuned']['device']}" if build["tuned"] else "not tuned"
        typer.echo(f"{build['name']}: {tuned}; {build['verified']}")
    typer.echo(f"wrote {done.folder} ({', '.join(done.variants)})")


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `kvgen export` wrote.")],
    sha256: Annotated[str | None, typer.Option("--sha256", metavar="HEX", help="Refuse a file with another digest.")] = None,
    as_json: Json = False,
) -> None:
    """Read an archive: entries go into the user's registry, compiled modules into the cache.

    A module is native code, which runs in your process, and an archive does not say who made it: docs/trust.md says what is checked.
    """
    from kvgen.registry import archive, user_store
    from kvgen.toolchain import ArtifactCache

    if not file.is_file():
        raise typer.BadParameter(f"{file} is no plain file" if file.exists() else f"there is no file {file}")
    if sha256 is not None and re.fullmatch(r"[0-9a-fA-F]{64}", sha256) is None:
        raise typer.BadParameter("a sha256 is 64 hexadecimal digits", param_hint="--sha256")
    pin = sha256.lower() if sha256 else None
    _tell(archive.import_archive(file, user_store(), ArtifactCache(), pin), f"took {file} in", as_json=as_json)


def _tell(contents: ArchiveContents, done: str, *, as_json: bool) -> None:
    if as_json:
        print_json(contents.to_json())
        return
    typer.echo(f"{done} (entries: {len(contents.entries)}, modules: {len(contents.modules)}, sha256: {contents.sha256})")
    for machine in contents.origins:
        typer.echo(f"modules (native code) compiled on: {machine}")
    for reason in contents.left_out:
        print_line(f"left out: {reason}")
