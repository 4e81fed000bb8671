"""`kvgen space`: the search space of a spec, and what constraints and hints exclude."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvgen.cli.output import Arch, BackendNames, Json, SpecName, print_json, print_table, resolve_any_spec, resolve_backends

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvgen.arch import Target
    from kvgen.lower.base import Backend
    from kvgen.lower.schedule import Params
    from kvgen.spec import AnySpec

EXAMPLES = 5


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("space")(space)


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
    from kvgen.lower.backends import backends_for, refusal
    from kvgen.spec.target import resolve

    spec = resolve_any_spec(spec_name, arch)
    target = resolve(spec.arch)
    found: list[dict[str, Any]] = []
    refusals: list[UnsupportedError] = []
    for chosen in resolve_backends(backend) or backends_for(target):
        reason = refusal(chosen, spec, target)
        if reason:
            refusals.append(UnsupportedError(chosen.name, reason))
            continue
        found.append(_describe(spec, chosen, target, explain=explain, schedules=schedules))
    if not found:
        from kvgen.tune.contenders import no_backend

        for other in refusals[1:]:
            typer.echo(str(other), err=True)
        raise refusals[0] if refusals else no_backend(target)
    if as_json:
        print_json({"spec": spec.name, "target": target, "spaces": found, "refused": [str(error) for error in refusals]})
        return
    for data in found:
        _show(data)
    for error in refusals:
        typer.echo(str(error))


def _describe(spec: AnySpec, backend: Backend, target: Target, *, explain: bool, schedules: bool) -> dict[str, Any]:
    space = backend.space(spec, target)
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
        data["excluded"] = _grouped(space.excluded(), data["parameters"])
        data["unsearched"] = _grouped(space.unsearched(), data["parameters"])
    return data


def _grouped(found: Iterable[tuple[Params, list[str]]], parameters: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each reason, the number of schedules that it excludes, and a few of them. A layout stands for its schedules with all launches."""
    of_launch = {p["name"]: len(p["values"]) for p in parameters if p["part"] == "launch"}
    counts: Counter[str] = Counter()
    examples: dict[str, list[dict[str, Any]]] = {}
    for params, reasons in found:
        for reason in reasons:
            counts[reason] += 1 if of_launch.keys() & params.keys() else prod(of_launch.values())
            if len(examples.setdefault(reason, [])) < EXAMPLES:
                examples[reason].append(dict(params))
    return [{"reason": reason, "schedules": count, "examples": examples[reason]} for reason, count in counts.most_common()]


def _words(schedule: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for part in ("layout", "launch") for name, value in schedule[part].items())


def _show(data: dict[str, Any]) -> None:
    rows = [(p["part"], p["name"], " ".join(map(str, p["values"])), p["doc"]) for p in data["parameters"]]
    sizes = ", ".join(f"{count} at {key}" for key, count in data["launches"].items())
    title = f"{data['backend']}: {data['size']} of {data['raw_size']} schedules, {data['layouts']} layouts; by workload: {sizes}"
    print_table(title, ["part", "parameter", "values", "meaning"], rows)
    at: dict[str, list[str]] = {}
    for key, default in data["defaults"].items():
        at.setdefault(_words(default), []).append(key)
    for words, keys in at.items():
        typer.echo(f"default at {', '.join(keys)}: {words}")
    for default in data["untuned"]:
        typer.echo(f"where nothing is tuned: {_words(default)}")
    typer.echo("")
    for schedule in data.get("schedules", ()):
        typer.echo(_words(schedule))
    titles = {"excluded": "cannot be built", "unsearched": "can be built, not searched (build --all-schedules searches them)"}
    for name, title in titles.items():
        reasons = [
            (str(item["schedules"]), item["reason"], " ".join(f"{k}={v}" for k, v in item["examples"][0].items()))
            for item in data.get(name, ())
        ]
        if reasons:
            print_table(title, ["schedules", "because", "for example"], reasons, right=["schedules"])
