"""`kvgen list`, `show` and `why`: registered entries, and the choice for a spec."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from kvgen.cli.describe import describe
from kvgen.cli.exit import Exit
from kvgen.cli.launches import print_launches
from kvgen.cli.output import (
    Arch,
    Json,
    SpecName,
    Workloads,
    microseconds,
    parse_shape,
    parse_workload,
    print_json,
    print_line,
    print_table,
    require_good,
    resolve_any_spec,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgen.arch import Target
    from kvgen.registry import Found
    from kvgen.registry.entry import Entry
    from kvgen.registry.select import Selection
    from kvgen.registry.serving import Serving
    from kvgen.spec import AnySpec, AnyWorkload, KernelSpec, Workload


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("list")(list_entries)
    app.command("show")(show)
    app.command("why")(why)


def list_entries(as_json: Json = False) -> None:
    """List every entry of the user's, the site's and the packaged registry."""
    from kvgen.registry import stores

    found = [one for store in stores() for one in store.all()]
    if as_json:
        print_json([_summary(one) for one in found])
        return
    if not found:
        typer.echo("nothing is registered yet: kvgen build SPEC tunes a kernel")
        return
    rows = []
    for one in found:
        entry = one.entry
        key = one.key
        if entry is None:
            rows.append((key, one.store, "", "", "", f"damaged: {one.problem}"))
            continue
        mixed = len({launch.backend for launch in entry.launches}) > 1
        won = [(f"{row['workload']} {microseconds(row['us'])}", row["backend"]) for row in entry.standings() if row["us"]]
        times = ", ".join(f"{time} {backend}" if mixed else time for time, backend in won) or "untuned"
        times += " (of other sources)" if entry.timed_with_others else ""
        rows.append((key, one.store, entry.spec.name, f"{entry.backend} {entry.arch}", str(entry.device.get("name", "")), times))
    print_table("", ["key", "registry", "spec", "back end", "device", "times"], rows)


def _summary(one: Found) -> dict[str, Any]:
    data: dict[str, Any] = {"key": one.key, "registry": one.store, "path": str(one.path), "problem": one.problem}
    if one.entry is not None:
        entry = one.entry
        data |= {"spec": entry.spec.name, "backend": entry.backend, "arch": entry.arch, "device": dict(entry.device)}
        data["launches"] = entry.standings()
        data["timings"] = [{k: v for k, v in timing.to_json().items() if k != "samples"} for timing in entry.timings]
        data["timed_with_others"] = entry.timed_with_others
        data["tuned"] = bool(entry.provenance.get("tuned", bool(entry.timings)))
    return data


def show(
    key: Annotated[str, typer.Argument(metavar="KEY", help="Key of an entry, or the beginning of one.")],
    source: Annotated[bool, typer.Option("--source", help="Print the rendered source.")] = False,
    as_json: Json = False,
) -> None:
    """Show one entry: schedule, resources, times, provenance."""
    from kvgen.errors import RegistryMiss
    from kvgen.registry import find

    matches = find(key)
    if not matches:
        raise RegistryMiss(f"no entry has a key that begins with {key}")
    require_good(matches)
    found = [one for one in matches if one.entry is not None]
    if len({one.entry.key for one in found if one.entry}) > 1:
        raise typer.BadParameter(f"{key} is ambiguous: {', '.join(sorted(one.key for one in found))}")
    one = found[0]
    entry = one.entry
    assert entry is not None
    if as_json:
        about = {"path": str(one.path), "registry": one.store, "timed_with_others": entry.timed_with_others}
        data = {**entry.to_json(), **about, "resources": entry.resources()}
        print_json({**data, "texts": {file: code.text for file, code in entry.codes.items()}} if source else data)
    elif source:
        for file, code in sorted(entry.codes.items()):
            typer.echo(f"// {file}\n{code.text}")
    else:
        _print_entry(entry, one)


def _print_entry(entry: Entry, one: Found) -> None:
    print_line(f"{entry.spec.name}  {entry.key}  ({one.store} registry)")
    print_line(describe(entry.spec))
    print_line(f"{entry.backend} for {entry.arch}, {_made(entry)}; layout {entry.layout} ({entry.layout_id})")
    typer.echo("")
    print_launches("", entry)
    if why := entry.provenance.get("why"):
        _print_apart(f"decision: {why}")
    other = (entry.runner_up or {}).get("layout")
    if other:
        times = ", ".join(f"{key} {one['backend']} {microseconds(one['us'])}" for key, one in other["launches"].items())
        print_line(f"next best layout: {' '.join(f'{k}={v}' for k, v in other['layout'].items())}: {times}")
    kernels = [
        (file, name, str(used["registers"]), str(used["spill_bytes"]), str(used["shared_bytes"]))
        for file, resources in entry.resources().items()
        for name, used in resources["kernels"].items()
    ]
    if kernels:
        print_table("\nresources", ["source", "kernel", "registers", "spills B", "static smem B"], kernels)
    errors = {key: f"{found['relative_l2']:.1e}" for key, found in entry.accuracy.items() if "relative_l2" in found}
    told = {key: value for key, value in entry.provenance.items() if not isinstance(value, (dict, list))}
    for title, facts in (
        ("relative L2", errors),
        ("quality of the format", _quality(entry)),
        ("provenance", told),
        ("toolchain", entry.toolchain),
    ):
        if shown := ", ".join(f"{k} {v}" for k, v in facts.items() if v is not None):  # operations on a matrix have no quality
            _print_apart(f"{title}: {shown}")
    _print_apart(str(one.path))


def _made(entry: Entry) -> str:
    """How an entry was made, and where; one that was compiled without a device is of none."""
    device = entry.device.get("name")
    where = f"{entry.made} on {device}" if device else entry.made
    if not entry.timings:
        return f"{where}, never tuned"
    return f"{where}, times of other sources" if entry.timed_with_others else where


def _print_apart(text: str) -> None:
    """A line below an empty one."""
    typer.echo("")
    print_line(text)


def _quality(entry: Entry) -> dict[str, str]:
    """What the format costs, in short; nothing of an operation on a matrix."""
    from kvgen.registry.facts import Quality

    if entry.quality is None:
        return {}
    quality = Quality.from_json(entry.quality)
    outputs = {"normal": quality.outputs.normal, "structured": quality.outputs.structured}
    told = {f"{kind} data L2": f"{errors.relative_l2:.4f}" for kind, errors in outputs.items()}
    lengths = sorted(quality.model.lengths.items()) if quality.model else []
    return told | {f"perplexity at {length}": f"{found.increase:+.3%}" for length, found in lengths}


def why(spec_name: SpecName, arch: Arch = None, workload: Workloads = None, as_json: Json = False) -> None:
    """Show which entry get_kernel returns for a spec, why, and which launch each workload takes. Exit code 3 if there is none."""
    from kvgen.spec.target import resolve

    spec = resolve_any_spec(spec_name, arch)
    target = resolve(spec.arch)
    answers = [_Answer.of(spec, target, work) for work in _wanted(spec, workload)]
    if as_json:
        print_json([answer.to_json() for answer in answers])
    else:
        for answer in answers:
            _print_answer(answer, f"{spec.name}{f' at {answer.workload.key}' if answer.workload else ''} on {target}")
    if any(answer.selection.entry is None for answer in answers):
        raise typer.Exit(Exit.NO_KERNEL)


def _wanted(spec: AnySpec, names: list[str] | None) -> Sequence[AnyWorkload | None]:
    """The workloads that are asked about; None alone stands for all of the spec's. Raises BadParameter."""
    from kvgen.spec import MatrixSpec

    if not names:
        return [None]
    if isinstance(spec, MatrixSpec):
        return [parse_shape(name) for name in names]
    return [_served_workload(spec, name) for name in names]


def _served_workload(spec: KernelSpec, name: str) -> Workload:
    """The workload of a name, if a launch serves it. Raises BadParameter."""
    from kvgen.registry.serving import require_compiled

    work = parse_workload(name)
    try:
        require_compiled(spec, work)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--workload") from error
    return work


class _Answer(NamedTuple):
    """What `get_kernel` takes for a workload, or for all of a spec's."""

    workload: AnyWorkload | None
    selection: Selection
    backend: str | None
    """Of the entry or the default; None where no back end gives a kernel."""
    serving: list[Serving]

    @classmethod
    def of(cls, spec: AnySpec, target: Target, work: AnyWorkload | None) -> _Answer:
        from kvgen.registry.default import serving_entry
        from kvgen.registry.select import select

        selection = select(spec, target, work)
        if selection.how == "none":
            return cls(work, selection, None, [])
        entry, selection = serving_entry(spec, target, selection)
        return cls(work, selection, entry.backend, _served(entry, spec, [work] if work else spec.workloads))

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        entry = self.selection.entry
        return {
            "workload": self.workload.key if self.workload else None,
            "how": self.selection.how,
            "key": entry.key if entry else None,
            "backend": self.backend,
            "launches": entry.standings() if entry else [],
            "serving": [one.to_json() for one in self.serving],
            "why": [*self.selection.refusals, *self.selection.why],
            "cautions": list(self.selection.cautions),
        }


def _served(entry: Entry, spec: AnySpec, works: Sequence[AnyWorkload]) -> list[Serving]:
    """The launches that calls take; empty for a matrix, whose calls take the launch of the nearest shape."""
    from kvgen.registry.serving import serving
    from kvgen.spec import MatrixSpec, Workload

    return [] if isinstance(spec, MatrixSpec) else [serving(entry, spec, work) for work in works if isinstance(work, Workload)]


def _print_answer(answer: _Answer, asked: str) -> None:
    selection = answer.selection
    entry = selection.entry
    told = f", entry {entry.key}" if entry else f": {'; '.join(selection.refusals)}" if selection.refusals else ""
    print_line(f"{asked}: {selection.how}{told}")
    for reason in (*selection.why, *selection.cautions):
        print_line(f"  {reason}")
    if entry:
        typer.echo("")
        print_launches("", entry)
    if answer.serving:
        typer.echo("")
    for one in answer.serving:
        print_line(_serving_line(one, numbered=entry is not None))


def _serving_line(one: Serving, *, numbered: bool) -> str:
    """Which launch serves a workload, and what was measured there. The number is of use where `kvgen show` lists the launches."""
    launch, timing = f"{one.launch.backend} {one.launch.params}", one.timing
    told = [f"{one.workload.key} takes {f'launch {one.index} ({launch})' if numbered else launch}: {one.why}"]
    if one.modelled_us is not None:
        told.append(f"{microseconds(one.modelled_us)} modelled")
    if timing is not None:
        told.append(microseconds(timing.us))
        told += [f"{timing.read_fraction:.0%} of the read's speed"] if timing.read_fraction is not None else []
        told += [f"the default {microseconds(timing.default_us)}"] if timing.default_us is not None else []
        told += [f"{timing.watts:.0f} W"] if timing.watts is not None else []
        told += [f"{timing.clock_mhz:.0f} MHz"] if timing.clock_mhz is not None else []
    return ", ".join(told)
