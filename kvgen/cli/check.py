"""`kvgen check`: checks whether registered entries still hold."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvgen.cli.app import Exit, app
from kvgen.cli.options import Json, Keys, require_keys
from kvgen.cli.output import print_json, print_table

if TYPE_CHECKING:
    from kvgen.registry import Found, Store
    from kvgen.tune.regression import Checked


@app.command()
def check(
    registry: Annotated[Path | None, typer.Argument(metavar="REGISTRY", help="A registry's folder.")] = None,
    keys: Keys = None,
    arch: Annotated[list[str] | None, typer.Option("--arch", metavar="ARCH", help="Only entries for this target; may be repeated.")] = None,
    speed: Annotated[bool, typer.Option("--speed", help="Also time entries whose modules are not the registered ones.")] = False,
    accept: Annotated[bool, typer.Option("--accept", help="Replace registered sources and resources by the present ones.")] = False,
    as_json: Json = False,
) -> None:
    """Check whether entries still hold: render, compile and verify those of the user's and the packaged registry, or of REGISTRY.

    Exit code 1 if an entry is damaged, or regressed and was not accepted: it is different, wrong or slower, or get_kernel would
    not use it. Otherwise 3 if this machine failed: its disk, compiler or workers. If only a device is missing, 0, and the last line says
    so.
    """
    from kvgen.measure.worker import Worker
    from kvgen.tune.regression import check_registry, summary

    keys, archs = keys or [], arch or []
    results: list[Checked] = []
    try:
        with Worker() as worker:
            for store, found in _read(registry, keys):
                results += check_registry(store, found, worker, keys=keys, archs=archs, speed=speed, accept=accept, compiling=compiling)
    except KeyboardInterrupt:
        if results and not as_json:  # half of a JSON array would pass for all of it
            _print(results)
            typer.echo(f"so far: {summary(results, accept=accept)}")
        raise
    if archs and not results:
        raise typer.BadParameter(f"no {'such entry' if keys else 'entry'} is for {' or '.join(archs)}")
    if as_json:
        print_json([result.to_json() for result in results])
    elif not results:
        typer.echo("nothing is registered here")
    else:
        _print(results)
        typer.echo(summary(results, accept=accept))
    if any(result.bad for result in results):
        raise typer.Exit(Exit.REGRESSION)
    if any(result.environment for result in results):
        raise typer.Exit(Exit.NO_KERNEL)


def _read(registry: Path | None, keys: list[str]) -> list[tuple[Store, list[Found]]]:
    """The registries, each with its entries. Raises BadParameter for a selection that matches nothing, HostError."""
    from kvgen.registry import Store, packaged_store, user_store

    if registry is not None and not registry.is_dir():
        raise typer.BadParameter(f"there is no folder {registry}")
    stores = [user_store(), packaged_store()] if registry is None else [Store(registry, registry.resolve().name)]
    read = [(store, store.all()) for store in stores]
    known = [one.key for _, found in read for one in found]
    if registry is not None and not known:
        raise typer.BadParameter(f"{registry} holds no entries: is it a registry's folder?")
    require_keys(keys, known)
    return read


def compiling(count: int) -> None:
    """Say on stderr that so many kernels are compiled first."""
    typer.echo(f"compiling {count} {'kernel' if count == 1 else 'kernels'} (cached afterwards)", err=True)


def _print(results: list[Checked]) -> None:
    rows = [(one.key, one.spec, one.arch, found.aspect, found.status, found.detail) for one in results for found in one.findings]
    print_table("", ["key", "spec", "arch", "aspect", "status", "detail"], rows)
