"""`kvgen list`, `show` and `why`: registered entries, and the choice for a spec."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvgen.cli.app import Exit, app
from kvgen.cli.options import Arch, Json, SpecName, Workloads, parse_for, require_good, resolve_any_spec
from kvgen.cli.output import describe, microseconds, print_json, print_launches, print_line, print_table

if TYPE_CHECKING:
    from kvgen.registry import Found
    from kvgen.registry.entry import Entry
    from kvgen.registry.select import Selection, Serving
    from kvgen.spec import AnySpec, AnyWorkload


@app.command("list")
def list_entries(as_json: Json = False) -> None:
    """List every entry of the user's, the site's and the packaged registry."""
    from kvgen.registry import stores

    found = [one for store in stores() for one in store.all()]
    if as_json:
        print_json([_summary(one) for one in found])
    elif not found:
        typer.echo("nothing is registered yet: kvgen build SPEC tunes a kernel")
    else:
        print_table("", ["key", "registry", "spec", "back end", "device", "times"], [_row(one) for one in found])


def _summary(one: Found) -> dict[str, Any]:
    data: dict[str, Any] = {"key": one.key, "registry": one.store, "path": str(one.path), "problem": one.problem}
    if (entry := one.entry) is not None:
        data |= {"spec": entry.spec.name, "backend": entry.backend, "arch": entry.arch, "device": dict(entry.device)}
        data["launches"] = entry.standings()
        data["timings"] = [{k: v for k, v in timing.to_json().items() if k != "samples"} for timing in entry.timings]
        data["timed_with_others"] = entry.timed_with_others
        data["tuned"] = entry.made == "tuned"
    return data


def _row(one: Found) -> tuple[str, ...]:
    if (entry := one.entry) is None:
        return one.key, one.store, "", "", "", f"damaged: {one.problem}"
    mixed = len({launch.backend for _, launch in entry.tuned}) > 1
    won = [f"{row['workload']} {microseconds(row['us'])}{' ' + row['backend'] if mixed else ''}" for row in entry.standings() if row["us"]]
    times = (", ".join(won) or "untuned") + (" (of other sources)" if entry.timed_with_others else "")
    times += " (disturbed)" if entry.disturbed else ""
    return one.key, one.store, entry.spec.name, f"{entry.backend} {entry.arch}", str(entry.device.get("name", "")), times


@app.command()
def show(
    key: Annotated[str, typer.Argument(metavar="KEY", help="Key of an entry, or the beginning of one.")],
    source: Annotated[bool, typer.Option("--source", help="Print the sources of the launches, as kvgen renders them.")] = False,
    as_json: Json = False,
) -> None:
    """Show one entry: schedule, resources, times, provenance."""
    from kvgen.errors import RegistryMiss
    from kvgen.registry import find

    matches = find(key)
    if not matches:
        raise RegistryMiss(f"no entry has a key that begins with {key}")
    require_good(matches)
    found = {one.entry.key: (one, one.entry) for one in reversed(matches) if one.entry is not None}
    if len(found) > 1:
        raise typer.BadParameter(f"{key} is ambiguous: {', '.join(sorted(found))}")
    ((one, entry),) = found.values()
    if as_json:
        about = {"path": str(one.path), "registry": one.store, "timed_with_others": entry.timed_with_others}
        data = {**entry.to_json(), **about}
        print_json({**data, "sources": [rendered.text for rendered in entry.sources]} if source else data)
    elif source:
        for index, (launch, rendered) in enumerate(zip(entry.launches, entry.sources, strict=True)):
            print_line(f"// launch {index}: {launch.backend} {launch.params}")
            typer.echo(rendered.text)
    else:
        _print_entry(entry, one)


def _print_entry(entry: Entry, one: Found) -> None:
    made = f"{entry.made} on {entry.device['name']}" if entry.device.get("name") else entry.made
    made += ", never tuned" if not entry.timings else ", times of other sources" if entry.timed_with_others else ""
    print_line(f"{entry.spec.name}  {entry.key}  ({one.store} registry)")
    print_line(describe(entry.spec))
    print_line(f"{entry.backend} for {entry.arch}, {made}; layout {entry.layout} ({entry.layout_id})")
    typer.echo("")
    print_launches("", entry)
    for work, much in entry.disturbed.items():
        print_line(f"{work}: the samples differ by {much:.0%}: something disturbed them, so this is not tuned")
    if why := entry.provenance.get("why"):
        typer.echo("")
        print_line(f"decision: {why}")
    kernels = [
        (str(index), name, str(used.registers), str(used.spill_bytes), str(used.shared_bytes))
        for index, launch in enumerate(entry.launches)
        for name, used in (launch.resources.kernels.items() if launch.resources else ())
    ]
    if kernels:
        print_table("\nresources", ["launch", "kernel", "registers", "spills B", "static smem B"], kernels)
    facts = {
        "relative L2": {key: f"{found['relative_l2']:.1e}" for key, found in entry.accuracy.items() if "relative_l2" in found},
        "provenance": {key: value for key, value in entry.provenance.items() if not isinstance(value, (dict, list))},
        "toolchain": entry.toolchain,
    }
    for title, told in facts.items():
        if shown := ", ".join(f"{k} {v}" for k, v in told.items() if v is not None):
            typer.echo("")
            print_line(f"{title}: {shown}")
    typer.echo("")
    print_line(str(one.path))


@app.command()
def why(spec_name: SpecName, arch: Arch = None, workload: Workloads = None, as_json: Json = False) -> None:
    """Show which entry get_kernel returns for a spec, why, and which launch each workload takes. Exit code 3 if there is none."""
    from kvgen.registry.select import select, serving, serving_entry
    from kvgen.spec.target import resolve

    spec = resolve_any_spec(spec_name, arch)
    target = resolve(spec.arch)
    answers: list[dict[str, Any]] = []
    for work in [_served(spec, name) for name in workload] if workload else [None]:
        selection, backend, served = select(spec, target, work), None, []
        if selection.how != "none":
            chosen, selection = serving_entry(spec, target, selection)
            backend, works = chosen.backend, [work] if work else spec.workloads
            served = [one for one in (serving(chosen, spec, each) for each in works) if one is not None]
        entry = selection.entry
        answers.append({
            "workload": work.key if work else None, "how": selection.how, "key": entry.key if entry else None, "backend": backend,
            "launches": entry.standings() if entry else [], "serving": [one.to_json() for one in served],
            "why": [*selection.refusals, *selection.why], "cautions": list(selection.cautions),
        })  # fmt: skip
        if not as_json:
            _print_answer(f"{spec.name}{f' at {work.key}' if work else ''} on {target}", selection, served)
    if as_json:
        print_json(answers)
    if any(answer["key"] is None for answer in answers):
        raise typer.Exit(Exit.NO_KERNEL)


def _served(spec: AnySpec, name: str) -> AnyWorkload:
    """The workload of a name, if a launch serves it. Raises BadParameter."""
    from kvgen.registry.select import require_compiled
    from kvgen.spec import KernelSpec, Workload

    work = parse_for(spec, name)
    if isinstance(spec, KernelSpec) and isinstance(work, Workload):
        try:
            require_compiled(spec, work)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--workload") from error
    return work


def _print_answer(asked: str, selection: Selection, served: list[Serving]) -> None:
    entry = selection.entry
    told = f", entry {entry.key}" if entry else f": {'; '.join(selection.refusals)}" if selection.refusals else ""
    print_line(f"{asked}: {selection.how}{told}")
    for reason in (*selection.why, *selection.cautions):
        print_line(f"  {reason}")
    if entry:
        typer.echo("")
        print_launches("", entry)
    if served:
        typer.echo("")
    for one in served:
        launch, timing = f"{one.launch.backend} {one.launch.params}", one.timing
        taken = f"launch {one.index} ({launch})" if entry else launch  # the number is of use where `kvgen show` lists the launches
        known = [(f"{microseconds(one.modelled_us)} modelled", one.modelled_us)]
        if timing is not None:
            known += [(microseconds(timing.us), timing.us), (f"{timing.read_fraction or 0:.0%} of the read's speed", timing.read_fraction)]
            known += [(f"the default {microseconds(timing.default_us)}", timing.default_us)]
            known += [(f"{timing.watts or 0:.0f} W", timing.watts), (f"{timing.clock_mhz or 0:.0f} MHz", timing.clock_mhz)]
        measured = [text for text, value in known if value is not None]
        measured += ["unmeasured"] if timing is None else []
        print_line(", ".join([f"{one.workload.key} takes {taken}: {one.why}", *measured]))
