"""`kvgen doctor`: what this machine can build and run. `kvgen space`: the schedules that a spec may have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvgen.cli.app import Exit, app
from kvgen.cli.options import Arch, BackendNames, Json, SpecName, resolve_any_spec, resolve_backends
from kvgen.cli.output import print_json, print_table

if TYPE_CHECKING:
    from kvgen.arch import Target
    from kvgen.lower.backend import Backend
    from kvgen.lower.schedule import Schedule
    from kvgen.registry import Store
    from kvgen.spec import AnySpec


@app.command()
def space(
    spec_name: SpecName,
    explain: Annotated[bool, typer.Option("--explain", help="List what constraints and hints exclude, with reasons.")] = False,
    schedules: Annotated[bool, typer.Option("--schedules", help="List every schedule.")] = False,
    arch: Arch = None,
    backend: BackendNames = None,
    as_json: Json = False,
) -> None:
    """Show the search space of a spec: parameters, constraints, hints, sizes."""
    from kvgen.errors import UnsupportedError
    from kvgen.lower.backend import backends_for, refusal
    from kvgen.spec.target import resolve

    spec = resolve_any_spec(spec_name, arch)
    target = resolve(spec.arch)
    found: list[dict[str, Any]] = []
    refusals: list[UnsupportedError] = []
    for chosen in resolve_backends(backend) or backends_for(target):
        if reason := refusal(chosen, spec, target):
            refusals.append(UnsupportedError(chosen.name, reason))
        else:
            found.append(_space(spec, chosen, target, explain=explain, schedules=schedules))
    if not found:
        for other in refusals[1:]:
            typer.echo(str(other), err=True)
        raise refusals[0]
    if as_json:
        print_json({"spec": spec.name, "target": target, "spaces": found, "refused": [str(error) for error in refusals]})
        return
    for data in found:
        _print_space(data)
    for error in refusals:
        typer.echo(str(error))


def _space(spec: AnySpec, backend: Backend, target: Target, *, explain: bool, schedules: bool) -> dict[str, Any]:
    space = backend.space(spec, target).searched
    layouts = space.layouts()
    data = {
        **space.to_json(),
        "defaults": {work.key: backend.default(spec, target, work).to_json() for work in spec.workloads},
        "untuned": [schedule.to_json() for schedule in backend.defaults(spec, target)],
        "layouts": len(layouts),
        "launches": {work.key: sum(len(space.launches(layout, work)) for layout in layouts) for work in spec.workloads},
    }
    if schedules:
        data["schedules"] = [schedule.to_json() for schedule in space.schedules()]
    if explain:
        data["excluded"], data["unsearched"] = (_by_reason(space.excluded(hints=hints)) for hints in (False, True))
    return data


def _by_reason(found: Iterable[tuple[Schedule, list[str]]]) -> list[dict[str, Any]]:
    """Each reason, the number of schedules that it excludes, and the first one."""
    counts: Counter[str] = Counter()
    examples: dict[str, dict[str, Any]] = {}
    for schedule, reasons in found:
        counts.update(reasons)
        for reason in reasons:
            examples.setdefault(reason, schedule.to_json())
    return [{"reason": reason, "schedules": count, "example": examples[reason]} for reason, count in counts.most_common()]


def _print_space(data: dict[str, Any]) -> None:
    def words(schedule: dict[str, Any]) -> str:
        return " ".join(f"{name}={value}" for part in ("layout", "launch") for name, value in schedule[part].items())

    sizes = ", ".join(f"{count} at {key}" for key, count in data["launches"].items())
    title = f"{data['backend']}: {data['size']} of {data['raw_size']} schedules, {data['layouts']} layouts; by workload: {sizes}"
    rows = [(p["part"], p["name"], " ".join(map(str, p["values"])), p["doc"]) for p in data["parameters"]]
    print_table(title, ["part", "parameter", "values", "meaning"], rows)
    keys: dict[str, list[str]] = {}
    for key, default in data["defaults"].items():
        keys.setdefault(words(default), []).append(key)
    for default, at in keys.items():
        typer.echo(f"default at {', '.join(at)}: {default}")
    for default in data["untuned"]:
        typer.echo(f"where nothing is tuned: {words(default)}")
    typer.echo("")
    for schedule in data.get("schedules", ()):
        typer.echo(words(schedule))
    titles = {"excluded": "cannot be built", "unsearched": "can be built, not searched (build --all-schedules searches them)"}
    for name, title in titles.items():
        if reasons := data.get(name):
            told = [(str(one["schedules"]), one["reason"], words(one["example"])) for one in reasons]
            print_table(title, ["schedules", "because", "for example"], told, right=["schedules"])


@app.command()
def doctor(as_json: Json = False) -> None:
    """Show compilers, GPU, back ends, extras, cache and registries here. Exit code 3 if no CPU kernel can be built."""
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
    from importlib.metadata import version

    import torch

    from kvgen import __version__
    from kvgen._machine import gpu_capability
    from kvgen.arch import GPUS, target_of
    from kvgen.errors import KvgenError, ToolchainMissing
    from kvgen.extras import EXTRAS, require
    from kvgen.lower.backend import NAMES, get_backend
    from kvgen.registry import stores
    from kvgen.registry.entry import here
    from kvgen.toolchain import ArtifactCache
    from kvgen.toolchain.compilers import find_gxx, find_nvcc

    capability = gpu_capability()

    def gpu() -> str:
        if capability is None:
            raise ToolchainMissing("no NVIDIA GPU is visible: kernels for the CPU only, GPU kernels with --compile-only")
        target = target_of(capability)
        return f"{here(target).get('name')}, {target}, driver {here(target).get('driver')}"

    def backend(name: str) -> str:
        found = get_backend(name)
        if (reason := found.missing()) is not None:
            raise ToolchainMissing(reason)
        return f"for {', '.join(found.targets)}"

    def packages(extra: str) -> str:
        require(f"kvgen[{extra}]", *EXTRAS[extra])
        return ", ".join(f"{package} {version(package)}" for package in EXTRAS[extra])

    def entries(store: Store) -> str:
        found = store.all()
        damaged = sum(one.entry is None for one in found)
        return f"{store.root} ({len(found)} entries" + (f", {damaged} damaged)" if damaged else ")")

    def told(ask: Callable[[], str]) -> tuple[bool, str]:
        try:
            return True, ask()
        except KvgenError as error:
            return False, str(error)

    asked: dict[str, Callable[[], str]] = {
        "g++": lambda: f"{find_gxx()} ({find_gxx().path})",
        "nvcc": lambda: f"{find_nvcc()} ({find_nvcc().path})",
        "CPU": lambda: f"{here('cpu')['name']}, {here('cpu')['threads']} threads",
        "GPU": gpu,
        "torch": lambda: f"{torch.__version__}, " + (f"CUDA {torch.version.cuda}" if torch.cuda.is_available() else "no CUDA device"),
        **{f"back end {name}": partial(backend, name) for name in NAMES},
        **{f"kvgen[{extra}]": partial(packages, extra) for extra in EXTRAS},
    }
    checks = [{"name": name, "ok": ok, "detail": detail} for name, (ok, detail) in ((name, told(ask)) for name, ask in asked.items())]
    good = {check["name"] for check in checks if check["ok"]}
    targets = ["cpu"] if {"g++", "back end cpu"} <= good else []
    if "nvcc" in good and {"back end cuda", "back end tilelang"} & good:
        targets += GPUS
    places = {"cache": str(ArtifactCache().root), **{f"{store.name} registry": told(partial(entries, store))[1] for store in stores()}}
    return {"kvgen": __version__, "checks": checks, "places": places, "targets": targets, "gpu_capability": capability}
