"""Options that commands share, and how results are printed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from kvgen import arch
from kvgen.errors import printable
from kvgen.pages.numbers import microseconds as microseconds  # tables of commands and pages write a time alike

if TYPE_CHECKING:
    from kvgen.lower.base import Backend
    from kvgen.registry import Found
    from kvgen.spec import AnySpec, KernelSpec, MatrixShape, Workload

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
SpecName = Annotated[str, typer.Argument(metavar="SPEC", help="A spec file, or the name of a preset.")]
Arch = Annotated[str | None, typer.Option("--arch", metavar="ARCH", help=f"{', '.join(get_args(arch.Arch))} instead of the spec's own.")]
BackendNames = Annotated[list[str] | None, typer.Option("--backend", metavar="NAME", help="Only this back end; may be repeated.")]
Workloads = Annotated[
    list[str] | None,
    typer.Option(
        "--workload",
        metavar="BxL",
        help="Batch x tokens: 1x32768, 1x32k, 8x32768q4, 48x300-24576, 8x32768:sustained; of a matrix tokens x channels. May be repeated.",
    ),
]
WORD = 16
"""Characters of the longest words that tables do not cut: those of a key."""
_TOKENS = {"": 1, "k": 1 << 10, "m": 1 << 20}
_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False, default=str))


def print_line(text: str) -> None:
    """A line on stdout. Control characters in strings of entries, which a terminal would obey, are escapes."""
    typer.echo(printable(text))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[str] = ()) -> None:
    """A table on stdout; columns in `right` are right-aligned. Where a terminal is too narrow for its words, rows are lists."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    align_right = set(right)
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False)
    rows = [[_cell(cell) for cell in row] for row in rows]
    for column, cells in zip(columns, zip(columns, *rows, strict=True), strict=True):
        whole = all(len(cell) <= WORD and " " not in cell for cell in cells)  # a key that is cut cannot be copied
        table.add_column(column, justify="right" if column in align_right else "left", overflow="fold", no_wrap=whole)
    for row in rows:
        table.add_row(*map(escape, row))  # [build] is text, not a style
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    if console.is_terminal and _least_width(columns, rows) > console.width:
        _print_lists(title, columns, rows)
        return
    with console.capture() as drawn:
        console.print(table)
    typer.echo(drawn.get(), nl=False)  # rich would end the process with 1 where the output is a closed pipe


def _cell(text: str) -> str:
    """Text of a table without control characters; a cell may have several lines, as messages of compilers do."""
    return "\n".join(printable(line) for line in text.expandtabs().splitlines())


def _least_width(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> int:
    """Width below which a table would cut words of up to WORD characters."""
    longest = [max(len(word) for cell in column for word in [*cell.split(), ""]) for column in zip(columns, *rows, strict=True)]
    return sum(min(length, WORD) for length in longest) + 2 * (len(longest) - 1)


def _print_lists(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A line for each column of each row; the terminal wraps what is long, and no word is cut."""
    if title:
        typer.echo(title)
    for row in rows:
        for column, cell in zip(columns, row, strict=True):
            typer.echo(f"{column}: {cell}" if column else cell)
        typer.echo("")


def resolve_spec(name: str, arch: str | None = None, workloads: Sequence[str] | None = None) -> KernelSpec:
    """The spec of attention of a file or a preset, with arch and workloads replaced where given. Raises SpecError, BadParameter."""
    from kvgen.spec import load_spec

    return load_spec(resolve_any_spec(name, arch, workloads))  # type: ignore[arg-type]  # refuses other operations


def resolve_any_spec(name: str, arch: str | None = None, workloads: Sequence[str] | None = None) -> AnySpec:
    """The same for a spec of any operation; the workloads of a matrix are tokens x channels."""
    from kvgen.spec import MatrixSpec, load_any_spec, presets

    if Path(name).suffix in (".yaml", ".yml", ".json") or Path(name).exists():
        spec = load_any_spec(Path(name))
    elif name in presets():
        spec = presets()[name]
    else:
        raise typer.BadParameter(f"{name!r} is neither a file nor a preset; presets: {', '.join(presets())}")
    changes: dict[str, Any] = {}
    if arch is not None:
        changes["arch"] = arch
    if workloads:
        parse = parse_shape if isinstance(spec, MatrixSpec) else parse_workload
        changes["workloads"] = [parse(text).to_json() for text in workloads]
    return load_any_spec({**spec.to_json(), **changes}) if changes else spec


def parse_tokens(text: str) -> int:
    """`16384` or `16k`: a number of tokens, of which k are 1024 and m 1024 k. Raises BadParameter."""
    match = re.fullmatch(r"([0-9]{1,18})([km]?)", text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"{text!r:.80} is no number of tokens; write 16384 or 16k (k is 1024)")
    return int(match[1]) * _TOKENS[match[2]]


def parse_seconds(text: str) -> float:
    """A duration as `kvgen.tune.budget.parse_duration` reads it. Raises BadParameter."""
    from kvgen.tune.budget import parse_duration

    try:
        return parse_duration(str(text))  # typer gives the default to it, too
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def parse_bytes(text: str) -> float:
    """`36000`, `36KB` (1000 bytes each) or `36KiB` (1024): at least one byte. Raises BadParameter."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*(?:([kmg]i?)?b)?", text.strip().lower())
    size = float(match[1]) * _BYTES[match[2] or ""] if match else 0.0
    if size < 1:
        raise typer.BadParameter(f"{text!r:.80} is no size of at least one byte; write 36000, 36KB or 36KiB")
    return size


def parse_workload(text: str) -> Workload:
    """The workload of a name, as `kvgen.spec.traffic` reads it, with lengths as `parse_tokens` takes them. Raises BadParameter."""
    from kvgen.spec.traffic import parse

    try:
        return parse(_without_units(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def parse_shape(text: str) -> MatrixShape:
    """`131072x1024` or `128kx1024`: tokens x channels. Raises BadParameter."""
    from kvgen.errors import SpecError
    from kvgen.spec import MatrixShape

    match = re.fullmatch(r"(\d+)x(\d+)", _without_units(text))
    try:
        if match:
            return MatrixShape(tokens=int(match[1]), channels=int(match[2]))
    except SpecError as error:
        raise typer.BadParameter(f"shape {text!r} is out of range") from error
    raise typer.BadParameter(f"{text!r} is not a shape; write tokens x channels, e.g. 131072x1024")


def _without_units(name: str) -> str:
    """The name of a workload with its lengths in digits: `8x16k` is `8x16384`."""
    return re.sub(r"(?<![0-9.])[0-9]{1,18}[kKmM](?=[-xq:]|$)", lambda found: str(parse_tokens(found[0])), name)


def require_keys(keys: Sequence[str], known: Sequence[str]) -> None:
    """Raises RegistryMiss where no key of `known` begins with one of `keys`; it names those that look most like it."""
    from difflib import SequenceMatcher

    from kvgen.errors import RegistryMiss

    for key in keys:
        if not key or not any(one.startswith(key) for one in known):
            ranked = sorted(dict.fromkeys(known), key=lambda one: -SequenceMatcher(None, key, one[: len(key)]).ratio())
            close = f"; close ones: {', '.join(ranked[:3])}" if ranked else ": nothing is registered here"
            raise RegistryMiss(f"no entry has a key that begins with {key!r}{close}")


def require_good(matches: Sequence[Found]) -> None:
    """Raises RegistryMiss, with the reasons, where all entries that a key selects are damaged."""
    from kvgen.errors import RegistryMiss

    if all(one.entry is None for one in matches):
        raise RegistryMiss("; ".join(f"the {one.store} registry's entry {one.key} is damaged: {one.problem}" for one in matches))


def require_writable(*files: Path | None) -> None:
    """Raises HostError where a file cannot be written: before a command measures for minutes what it then could not write."""
    from kvgen.errors import host_errors

    for file in files:
        if file is not None:
            with host_errors("write", file):
                if not file.parent.exists():
                    file.parent.mkdir(parents=True)
                new = not file.exists()
                file.open("a").close()
                if new:
                    file.unlink()


def resolve_backends(names: Sequence[str] | None) -> list[Backend] | None:
    """The named back ends; None where none is named. Raises BadParameter for an unknown name, ToolchainMissing."""
    from kvgen.lower.backends import NAMES, get_backend

    for name in names or ():
        if name not in NAMES:
            raise typer.BadParameter(f"there is no back end {name!r}; choose from {', '.join(NAMES)}")
    return [get_backend(name) for name in names] if names else None
