"""The plane of batch and length as heat maps: how near to the read roofline, how much is lost, which launch serves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from kvgen.pages.heat_map import Colors, Place, heat_map
from kvgen.pages.numbers import factor, fraction, microseconds
from kvgen.registry import dispatch
from kvgen.registry.entry import Entry
from kvgen.report.charts import Chart

READ = Colors("b", (0.5, 0.6, 0.7, 0.8, 0.9), fraction)
REGRET = Colors("w", (1.01, 1.02, 1.05, 1.1, 1.25), lambda value: f"{value:.2f}" if value < 9.95 else f"{value:.0f}")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
LAUNCH = Colors("c", (0.5, 1.5, 2.5, 3.5, 4.5), lambda value: LETTERS[int(value)])
FEWEST_CELLS = 4
"""Least number of cells of a map."""


@dataclass(frozen=True)
class Cell:
    """One measured workload of the grid: times in µs of the launch that serves it, of the fastest launch there, and of the read."""

    name: str
    place: Place
    traffic: str
    """What else distinguishes it: lengths, query tokens."""
    sustained: bool
    us: float
    best_us: float
    read_us: float | None
    launch: int
    """Number of the launch in the entry's portfolio."""
    watts: float | None = None
    clock_mhz: float | None = None

    @property
    def equal(self) -> bool:
        """Whether all sequences have one length."""
        return "-" not in self.name

    @property
    def letter(self) -> str:
        """Name of the launch on the page."""
        return LETTERS[self.launch]

    @property
    def regret(self) -> float:
        """Time of the launch that serves it over the fastest launch's."""
        return self.us / self.best_us

    @property
    def read_fraction(self) -> float | None:
        """Time of the read over the time of the launch."""
        return self.read_us / self.us if self.read_us is not None else None

    @property
    def hint(self) -> str:
        """All of it in words."""
        read = f", {fraction(self.read_fraction)} of the read's speed" if self.read_us is not None else ""
        return f"{self.name}: launch {self.letter}, {microseconds(self.us)}{read}, regret {factor(self.regret)}"


def cells(entry: Entry) -> list[Cell]:
    """The measured grid of an entry's dispatch table, without workloads whose launch has no time there; empty without a table."""
    table = entry.dispatch
    return [] if table is None else [cell for one in table.cells if (cell := _cell(one, table)) is not None]


def _cell(one: dispatch.Cell, table: dispatch.DispatchTable) -> Cell | None:
    work, us = one.work, table.time(one, one.launch)
    if us is None:
        return None
    unequal = work.shortest < work.kv_len
    traffic = f"unequal lengths, from 1/{round(work.kv_len / work.shortest)} of the longest" if unequal else "equal lengths"
    traffic += f", {work.q_len} query tokens" if work.q_len > 1 else ""
    place, number = (work.batch, work.kv_len), table.members.index(one.launch)
    sustained = work.load == "sustained"
    return Cell(one.workload, place, traffic, sustained, us, one.best_us, one.read_us, number, one.watts, one.clock_mhz)


def kinds(found: Iterable[Cell]) -> tuple[dict[str, list[Cell]], list[Cell]]:
    """The cells by kind of traffic, in the order of the grid; and those apart: sustained, or of a kind that has too few for a map."""
    every = list(found)
    by_traffic: dict[str, list[Cell]] = {}
    for cell in every:
        if not cell.sustained:
            by_traffic.setdefault(cell.traffic, []).append(cell)
    mapped = {traffic: same for traffic, same in by_traffic.items() if len(same) >= FEWEST_CELLS}
    return mapped, [cell for cell in every if cell.sustained or cell.traffic not in mapped]


def maps(same: Sequence[Cell]) -> list[Chart]:
    """The maps of the cells of one kind of traffic: read fraction, regret, and launch where there are several."""
    read = [cell for cell in same if cell.read_fraction is not None]
    charts = []
    if read:
        least = min(read, key=lambda cell: cell.read_fraction or 0.0)
        told = f"Speed over that of a pure read; 1 is the limit. The least is {fraction(least.read_fraction)}, at {least.name}."
        charts.append(Chart("Read fraction", told, _map(read, READ, lambda cell: cell.read_fraction or 0.0, "read fraction", least)))
    worst = max(same, key=lambda cell: cell.regret)
    told = f"Time of the launch that serves, over the fastest launch measured there. The worst is {factor(worst.regret)}, at {worst.name}."
    charts.append(Chart("Regret", told, _map(same, REGRET, lambda cell: cell.regret, "regret", worst)))
    if len({cell.launch for cell in same}) > 1:
        chart = _map(same, LAUNCH, lambda cell: float(cell.launch), "launch")
        charts.append(Chart("Launch", "Which launch of the portfolio serves.", chart))
    return charts


def _map(same: Sequence[Cell], colors: Colors, value: Callable[[Cell], float], label: str, marked: Cell | None = None) -> Markup:
    columns, rows = (sorted({cell.place[axis] for cell in same}) for axis in (0, 1))
    values, hints = {cell.place: value(cell) for cell in same}, {cell.place: cell.hint for cell in same}
    axes = {"across": "batch", "down": "tokens per sequence" if same[0].equal else "longest sequence, tokens"}
    edges = frozenset([marked.place] if marked else [])
    return heat_map(columns, rows, values, colors, f"{label} by batch and tokens", **axes, hints=hints, marked=edges)
