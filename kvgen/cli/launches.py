"""An entry's launches as a table: for each workload the winner, its speed-up, and the best launch of another back end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from kvgen.cli.output import microseconds, print_table

if TYPE_CHECKING:
    from kvgen.registry.entry import Entry

COLUMNS = ("workload", "back end", "tuned", "default", "speed-up", "pure read", "of read speed", "runner-up", "launch")


def print_launches(title: str, entry: Entry) -> None:
    """Print the table; times that were not measured are dashes. The runner-up's factor is its time over the winner's."""
    from kvgen.spec import MatrixSpec

    copies = isinstance(entry.spec, MatrixSpec)
    columns = [name.replace("pure read", "copy").replace("read", "copy") if copies else name for name in COLUMNS]
    print_table(title, columns, rows(entry), right=columns[2:7])
    if told := dispatch_told(entry):
        typer.echo(told)


def rows(entry: Entry) -> list[tuple[str, ...]]:
    """One row per launch, in the order of COLUMNS; launches that serve workloads of the grid alone come last."""
    from kvgen.registry.serving import shares

    told: list[tuple[str, ...]] = []
    for launch in entry.launches:
        timing, rival = entry.timing(launch.workload), entry.rival(launch.workload)
        us, default, read = (timing.us, timing.default_us, timing.read_us) if timing else (None, None, None)
        faster = f"{default / us:.2f}x" if us and default else "–"
        fraction = f"{timing.read_fraction:.0%}" if timing and timing.read_fraction is not None else "–"
        behind = f"{rival[0]} {rival[1]:.2f}x" if rival else "–"
        times = (microseconds(us), microseconds(default), faster, microseconds(read), fraction)
        told.append((launch.workload.key, launch.backend, *times, behind, str(launch.params)))
    served = shares(entry)
    for index, launch in list(enumerate(entry.every_launch))[len(entry.launches) :]:
        cells = f"{served[index]} cell{'s' if served[index] > 1 else ''}"
        what = f"{cells} of the grid" if served[index] else "all other calls"
        told.append((what, launch.backend, *["–"] * 6, str(launch.params)))
    return told


def dispatch_told(entry: Entry) -> str:
    """One line about the dispatch table; empty without one."""
    table = entry.dispatch
    if table is None or not table.cells:
        return ""
    skipped = f", {len(table.skipped)} were not" if table.skipped else ""
    worst = f"; worst regret {table.worst_regret:.2f}" if table.worst_regret else ""
    return f"dispatch: {len(table.members)} launches over {len(table.cells)} measured workloads{skipped}{worst}"
