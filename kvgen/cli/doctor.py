"""`kvgen doctor`: what this machine can build and run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvgen.cli.exit import Exit
from kvgen.cli.output import Json, print_json, print_table

if TYPE_CHECKING:
    from kvgen.registry import Store


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor")(doctor)


def doctor(as_json: Json = False) -> None:
    """Show compilers, GPU, back ends, extras, integrations, cache and registries here. Exit code 3 if no CPU kernel can be built."""

    facts = examine()
    if as_json:
        print_json(facts)
    else:
        print_table("", ["", "", "what"], [("ok" if f["ok"] else "--", f["name"], f["detail"]) for f in facts["checks"]])
        for name, path in facts["places"].items():
            typer.echo(f"{name}: {path}")
    if not facts["targets"]:
        raise typer.Exit(Exit.NO_KERNEL)


def examine() -> dict[str, Any]:
    """The results of `doctor`: checks, folders, and the targets that can be built on this machine."""
    from kvgen import __version__
    from kvgen._nvml import gpu_capability
    from kvgen.arch import GPUS
    from kvgen.extras import EXTRAS
    from kvgen.integrations.usable import INTEGRATIONS
    from kvgen.lower.backends import NAMES
    from kvgen.registry import stores, user_store
    from kvgen.registry.device import here
    from kvgen.toolchain import ArtifactCache
    from kvgen.toolchain.compilers import find_gxx, find_nvcc

    checks = [
        _check("g++", lambda: f"{find_gxx()} ({find_gxx().path})"),
        _check("nvcc", lambda: f"{find_nvcc()} ({find_nvcc().path})"),
        _check("CPU", lambda: f"{here('cpu')['name']}, {here('cpu')['threads']} threads"),
        _check("GPU", _gpu),
        _check("torch", _torch),
    ]
    checks += [_check(f"back end {name}", partial(_backend, name)) for name in NAMES]
    checks += [_check(f"kvgen[{extra}]", partial(_packages, extra, packages)) for extra, packages in EXTRAS.items()]
    checks += [_check(f"integration {name}", ask) for name, ask in INTEGRATIONS.items()]
    good = {check["name"] for check in checks if check["ok"]}
    targets = ["cpu"] if {"g++", "back end cpu"} <= good else []
    if "nvcc" in good and {"back end cuda", "back end tilelang"} & good:
        targets += GPUS
    places = {"cache": f"{ArtifactCache().root}{_unwritable(ArtifactCache().root)}"}
    for store in stores():
        places[f"{store.name} registry"] = f"{store.root} ({_entries(store)})"
        if store.name == user_store().name:
            places[f"{store.name} registry"] += _unwritable(store.root)
    capability = gpu_capability()
    return {"kvgen": __version__, "checks": checks, "places": places, "targets": targets, "gpu_capability": capability}


def _entries(store: Store) -> str:
    """How many entries a store has, or why that is not known."""
    from kvgen.errors import HostError

    try:
        entries = store.all()
    except HostError as error:
        return str(error)
    damaged = sum(1 for one in entries if one.entry is None)
    return f"{len(entries)} entries" + (f", {damaged} damaged" if damaged else "")


def _check(name: str, ask: Callable[[], str]) -> dict[str, Any]:
    from kvgen.errors import KvgenError

    try:
        return {"name": name, "ok": True, "detail": ask()}
    except KvgenError as error:
        return {"name": name, "ok": False, "detail": str(error)}


def _unwritable(folder: Path) -> str:
    """That a folder, or the one in which it would be made, cannot be written; nothing where it can."""
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not there.is_dir():
        return f": {there} is no folder"
    return "" if os.access(there, os.W_OK) else f": {there} cannot be written"


def _gpu() -> str:
    from kvgen._nvml import gpu_capability
    from kvgen.arch import target_of
    from kvgen.errors import ToolchainMissing
    from kvgen.registry.device import here

    capability = gpu_capability()
    if capability is None:
        raise ToolchainMissing("no NVIDIA GPU is visible: kernels for the CPU only, GPU kernels with --compile-only")
    target = target_of(capability)
    device = here(target)
    return f"{device.get('name')}, {target}, driver {device.get('driver')}"


def _backend(name: str) -> str:
    from kvgen.errors import ToolchainMissing
    from kvgen.lower.backends import get_backend

    backend = get_backend(name)
    if (reason := backend.missing()) is not None:
        raise ToolchainMissing(reason)
    return f"for {', '.join(backend.targets)}"


def _packages(extra: str, packages: Sequence[str]) -> str:
    from importlib.metadata import version

    from kvgen.extras import require

    require(f"kvgen[{extra}]", *packages)
    return ", ".join(f"{package} {version(package)}" for package in packages)


def _torch() -> str:
    import torch

    return f"{torch.__version__}, " + (f"CUDA {torch.version.cuda}" if torch.cuda.is_available() else "no CUDA device")
