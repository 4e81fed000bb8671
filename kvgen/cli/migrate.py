"""`kvgen migrate`: entries of the older schema, rewritten in place."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvgen.cli.exit import Exit
from kvgen.cli.output import Json, print_json

if TYPE_CHECKING:
    from kvgen.registry.migrate import Migration


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("migrate")(migrate)


def migrate(
    path: Annotated[Path | None, typer.Argument(metavar="PATH", help="A registry's folder; the user's by default.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the changes, and write nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Rewrite a registry's entries of the previous schema in place. Exit code 1 if one could not be migrated."""
    from kvgen.registry import Store, user_store
    from kvgen.registry.migrate import migrate as migrate_store

    if path is not None and not path.is_dir():
        raise typer.BadParameter(f"{path} is no folder")
    store = user_store() if path is None else Store(path, str(path))
    if path is not None and not store.all():
        raise typer.BadParameter(store.without_entries())
    found = migrate_store(store, dry_run=dry_run)
    if as_json:
        print_json([one.to_json() for one in found])
    else:
        for one in found:
            _tell(one, "would migrate" if dry_run else "migrated")
        if not found:
            typer.echo(f"{store.root}: nothing to migrate")
    if any(one.problem for one in found):
        raise typer.Exit(Exit.REGRESSION)


def _tell(one: Migration, done: str) -> None:
    name = f"{one.key} {one.spec}".strip()
    if one.problem is not None:
        typer.echo(f"{name}: stays as it is: {one.problem}\n  {one.path}")
        return
    typer.echo(f"{name}: {done}")
    for change in one.changes:
        typer.echo(f"  {change}")
