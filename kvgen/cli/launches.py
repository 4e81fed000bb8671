"""An entry's launches as a table: for each workload the winner, its speed-up, and the best launch of another back end."""

from __future__ import annotations

from typing import TYPE_CHECKING

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


def rows(entry: Entry) -> list[tuple[str, ...]]:
    """One row per launch, in the order of COLUMNS; further launches come last."""
    told: list[tuple[str, ...]] = []
    for launch in entry.launches:
        timing, rival = entry.timing(launch.workload), entry.rival(launch.workload)
        us, default, read = (timing.us, timing.default_us, timing.read_us) if timing else (None, None, None)
        faster = f"{default / us:.2f}x" if us and default else "–"
        fraction = f"{timing.read_fraction:.0%}" if timing and timing.read_fraction is not None else "–"
        behind = f"{rival[0]} {rival[1]:.2f}x" if rival else "–"
        times = (microseconds(us), microseconds(default), faster, microseconds(read), fraction)
        told.append((launch.workload.key, launch.backend, *times, behind, str(launch.params)))
    told += [("other calls", launch.backend, *["–"] * 6, str(launch.params)) for launch in entry.further]
    return told
