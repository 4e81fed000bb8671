"""`kvgen check`: do registered entries still hold?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvgen.cli.exit import Exit
from kvgen.cli.output import Json, print_json, print_table

if TYPE_CHECKING:
    from kvgen.registry import Store


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("check")(check)


def check(
    registry: Annotated[Path | None, typer.Argument(metavar="[REGISTRY]", help="A registry's folder.")] = None,
    key: Annotated[list[str] | None, typer.Option("--key", metavar="KEY", help="Only entries whose key begins so.")] = None,
    arch: Annotated[list[str] | None, typer.Option("--arch", metavar="ARCH", help="Only entries for this target.")] = None,
    speed: Annotated[bool, typer.Option("--speed", help="Time changed sources against the registered ones, too.")] = False,
    accept: Annotated[bool, typer.Option("--accept", help="Write what renders and compiles now in place of what was registered.")] = False,
    as_json: Json = False,
) -> None:
    """Render, compile and verify every entry of the user's and the packaged registry, or of REGISTRY, again.

    Exit code 1 where one is damaged or regressed and was not accepted. What does not compile, or is wrong, cannot be.
    """

    results: list[dict[str, Any]] = []
    bad = accepted = 0
    for store in _stores(registry):
        wrong, mended, told = _check_store(store, key or [], arch or [], speed=speed, accept=accept)
        bad += wrong
        accepted += mended
        results += told
    if as_json:
        print_json(results)
    elif not results:
        typer.echo("nothing is registered here")
    else:
        rows = [(r["key"], r["spec"], r["arch"], f["aspect"], f["status"], f["detail"]) for r in results for f in r["findings"]]
        print_table("", ["key", "spec", "arch", "aspect", "status", "detail"], rows)
        typer.echo(_summary(results, bad) + (f"; of these accepted: {accepted}" if accept else ""))
    if bad > accepted:
        raise typer.Exit(Exit.REGRESSION)


def _summary(results: list[dict[str, Any]], bad: int) -> str:
    """How many entries were checked and regressed; files that are not as a manifest lists them are none."""
    from kvgen.registry.manifest import MANIFEST

    files = sum(one["key"] == MANIFEST for one in results)
    differing = f", files not as the manifest lists them: {files}" if files else ""
    return f"{len(results) - files} entries, {bad - files} regressed{differing}"


def _stores(registry: Path | None) -> list[Store]:
    from kvgen.registry import Store, packaged_store, user_store

    if registry is None:
        return [user_store(), packaged_store()]
    if not registry.is_dir():
        raise typer.BadParameter(f"there is no folder {registry}")
    return [Store(registry, registry.name)]


def _check_store(store: Store, keys: list[str], archs: list[str], *, speed: bool, accept: bool) -> tuple[int, int, list[dict[str, Any]]]:
    """How much is damaged or regressed, how much of that was accepted, and what is told of each entry."""
    from kvgen.registry import packaged_store
    from kvgen.registry.manifest import MANIFEST, manifest_problems, write_manifest
    from kvgen.tune.regression import check_entry

    told: list[dict[str, Any]] = []
    bad = accepted = 0
    shipped = (store.root / MANIFEST).exists() or store.root == packaged_store().root
    for problem in manifest_problems(store.root) if shipped and store.all() else []:
        bad += 1
        told.append(_finding(MANIFEST, store.name, problem))
    for found in store.all():
        entry = found.entry
        if entry is None:
            bad += 1
            told.append(_finding(found.path.name.split(".")[0], store.name, f"damaged: {found.problem}"))
            continue
        if (keys and not any(entry.key.startswith(key) for key in keys)) or (archs and entry.arch not in archs):
            continue
        checked = check_entry(entry, speed=speed)
        bad += checked.regressed
        told.append({**checked.to_json(), "registry": store.name})
        if accept and checked.renewed is not None:
            accepted += checked.regressed
            if checked.renewed != entry:
                store.put(checked.renewed)
    if accept and shipped:
        write_manifest(store.root)
        accepted += sum(one["key"] == MANIFEST for one in told)
    return bad, accepted, told


def _finding(key: str, store: str, problem: str) -> dict[str, Any]:
    finding = {"aspect": "registry", "status": "regressed", "detail": problem}
    return {"key": key, "spec": "", "arch": "", "registry": store, "regressed": True, "findings": [finding]}
