"""`kvgen export` and `kvgen import`: entries and compiled modules for machines without a compiler."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvgen.cli.output import Json, print_json

if TYPE_CHECKING:
    from kvgen.registry.transfer import ArchiveContents


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("export")(export)
    app.command("import")(import_)


def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The archive to write, e.g. kernels.tar.gz.")],
    keys: Annotated[list[str] | None, typer.Argument(metavar="[KEY...]", help="Beginnings of keys; all by default.")] = None,
    as_json: Json = False,
) -> None:
    """Write entries of the user's registry and their compiled modules to a file."""
    from kvgen.registry import transfer, user_store
    from kvgen.toolchain import ArtifactCache

    found = [one for one in user_store().all() if not keys or any(one.path.name.startswith(key) for key in keys)]
    _tell(transfer.export_archive(found, file, ArtifactCache()), f"wrote {file}", as_json=as_json)


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `kvgen export` wrote.")],
    sha256: Annotated[str | None, typer.Option("--sha256", metavar="HEX", help="Refuse a file with another digest.")] = None,
    as_json: Json = False,
) -> None:
    """Read an archive: entries go into the user's registry, compiled modules into the cache.

    A module is native code: it runs in your process, and kvgen does not know its author. docs/trust.md says what is checked.
    """
    from kvgen.registry import transfer, user_store
    from kvgen.toolchain import ArtifactCache

    if not file.is_file():
        raise typer.BadParameter(f"there is no file {file}")
    if sha256 is not None and re.fullmatch(r"[0-9a-fA-F]{64}", sha256) is None:
        raise typer.BadParameter("a sha256 is 64 hexadecimal digits", param_hint="--sha256")
    pin = sha256.lower() if sha256 else None
    _tell(transfer.import_archive(file, user_store(), ArtifactCache(), pin), f"took {file} in", as_json=as_json)


def _tell(contents: ArchiveContents, done: str, *, as_json: bool) -> None:
    if as_json:
        print_json(contents.to_json())
        return
    typer.echo(f"{done}: {len(contents.entries)} entries, {len(contents.modules)} modules (sha256 {contents.sha256})")
    for machine in contents.origins:
        typer.echo(f"modules (native code) compiled on: {machine}")
    for reason in contents.left_out:
        typer.echo(f"left out: {reason}")
