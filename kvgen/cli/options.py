"""Options that commands share, and how names of specs, workloads and sizes are read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from kvgen import arch

if TYPE_CHECKING:
    from kvgen.lower.backend import Backend
    from kvgen.registry import Found
    from kvgen.spec import AnySpec, AnyWorkload, KernelSpec, LinearShape, MatrixShape, Workload

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
SpecName = Annotated[str, typer.Argument(metavar="SPEC", help="A spec file, or the name of a preset.")]
Arch = Annotated[str | None, typer.Option("--arch", metavar="ARCH", help=f"{', '.join(get_args(arch.Arch))} instead of the spec's own.")]
BackendNames = Annotated[list[str] | None, typer.Option("--backend", metavar="NAME", help="Only this back end; may be repeated.")]
Keys = Annotated[list[str] | None, typer.Option("--key", metavar="KEY", help="Only entries whose key begins with KEY; may be repeated.")]
Workloads = Annotated[
    list[str] | None,
    typer.Option(
        "--workload",
        metavar="BxL",
        help="Batch x tokens: 1x32768, 1x32k, 8x32768q4, 48x300-24576, 8x32768:sustained; of a matrix tokens x channels; of a linear layer "
        "rows16. May be repeated.",
    ),
]


def resolve_spec(name: str, arch: str | None = None, workloads: Sequence[str] | None = None) -> KernelSpec:
    """The spec of attention of a file or a preset, with arch and workloads replaced where given. Raises SpecError, BadParameter."""
    from kvgen.spec import load_spec

    return load_spec(resolve_any_spec(name, arch, workloads))  # type: ignore[arg-type]  # refuses other operations


def resolve_any_spec(name: str, arch: str | None = None, workloads: Sequence[str] | None = None) -> AnySpec:
    """The same for a spec of any operation; the workloads of a matrix are tokens x channels, those of a linear layer rows."""
    from kvgen.spec import load_any_spec, presets

    if Path(name).suffix in (".yaml", ".yml", ".json") or Path(name).exists():
        spec = load_any_spec(Path(name))
    elif name in presets():
        spec = presets()[name]
    else:
        raise typer.BadParameter(f"{name!r} is neither a file nor a preset; presets: {', '.join(presets())}")
    changes: dict[str, Any] = {"arch": arch} if arch is not None else {}
    if workloads:
        changes["workloads"] = [parse_for(spec, text).to_json() for text in workloads]
    return load_any_spec({**spec.to_json(), **changes}) if changes else spec


def resolve_backends(names: Sequence[str] | None) -> list[Backend] | None:
    """The named back ends; None where none is named. Raises BadParameter for an unknown name, ToolchainMissing."""
    from kvgen.lower.backend import NAMES, get_backend

    for name in names or ():
        if name not in NAMES:
            raise typer.BadParameter(f"there is no back end {name!r}; choose from {', '.join(NAMES)}")
    return [get_backend(name) for name in names] if names else None


def parse_for(spec: AnySpec, text: str) -> AnyWorkload:
    """The workload of a name, of the kind that a spec has. Raises BadParameter."""
    from kvgen.spec import LinearSpec, MatrixSpec

    if isinstance(spec, LinearSpec):
        return parse_rows(text)
    return parse_shape(text) if isinstance(spec, MatrixSpec) else parse_workload(text)


def parse_workload(text: str) -> Workload:
    """The workload of a name, as `kvgen.spec.workloads` reads it; lengths may be `16k`. Raises BadParameter."""
    from kvgen.spec.workloads import parse

    try:
        return parse(_in_digits(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def parse_shape(text: str) -> MatrixShape:
    """`131072x1024` or `128kx1024`: tokens x channels. Raises BadParameter."""
    from kvgen.errors import SpecError
    from kvgen.spec import MatrixShape

    match = re.fullmatch(r"(\d+)x(\d+)", _in_digits(text))
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a shape; write tokens x channels, e.g. 131072x1024")
    try:
        return MatrixShape(tokens=int(match[1]), channels=int(match[2]))
    except SpecError as error:
        raise typer.BadParameter(f"shape {text!r} is out of range") from error


def parse_rows(text: str) -> LinearShape:
    """`rows16` or `16`: rows of a linear layer's input. Raises BadParameter."""
    from kvgen.errors import SpecError
    from kvgen.spec import LinearShape

    match = re.fullmatch(r"(?:rows)?(\d{1,9})", text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is no number of rows; write rows16 or 16")
    try:
        return LinearShape(rows=int(match[1]))
    except SpecError as error:
        raise typer.BadParameter(f"{text!r} is out of range: 1 to 128 rows") from error


def _in_digits(name: str) -> str:
    """The name of a workload with its lengths in digits: `8x16k` is `8x16384`; k is 1024, m is 1024 k."""
    units = {"k": 1 << 10, "m": 1 << 20}
    return re.sub(r"(?<![0-9.])([0-9]{1,18})([kKmM])(?=[-xq:]|$)", lambda found: str(int(found[1]) * units[found[2].lower()]), name)


def parse_seconds(text: str) -> float:
    """A duration as `kvgen.tune.budget.parse_duration` reads it. Raises BadParameter."""
    from kvgen.tune.budget import parse_duration

    try:
        return parse_duration(str(text))  # typer gives the default to it, too
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def require_keys(keys: Sequence[str], known: Sequence[str]) -> None:
    """Raises RegistryMiss where no key of `known` begins with one of `keys`; it names those that look most like it."""
    from difflib import get_close_matches

    from kvgen.errors import RegistryMiss

    for key in keys:
        if not key or not any(one.startswith(key) for one in known):
            close = ", ".join(get_close_matches(key, sorted(set(known)), cutoff=0.0)) or "none, nothing is registered here"
            raise RegistryMiss(f"no entry has a key that begins with {key!r}; close ones: {close}")


def require_good(matches: Sequence[Found]) -> None:
    """Raises RegistryMiss, with the reasons, where all entries that a key selects are damaged."""
    from kvgen.errors import RegistryMiss

    if all(one.entry is None for one in matches):
        raise RegistryMiss("; ".join(f"the {one.store} registry's entry {one.key} is damaged: {one.problem}" for one in matches))


def require_writable(file: Path | None) -> None:
    """Raises HostError where a file cannot be written: before a command measures for minutes what it then could not write."""
    from kvgen.errors import host_errors

    if file is not None:
        with host_errors("write", file):
            file.parent.mkdir(parents=True, exist_ok=True)
            new = not file.exists()
            file.open("a").close()
            if new:
                file.unlink()
