"""The dispatch table of an entry: which of its launches serves which batch and number of tokens, as it was measured over a grid. Where
nothing was, it has the back end's defaults instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvgen.lower.schedule import Params
from kvgen.plaindata import Json
from kvgen.spec import AnyWorkload, Workload
from kvgen.spec.dispatch import Measured
from kvgen.spec.timing import Timing, require_times
from kvgen.spec.traffic import parse
from kvgen.spec.waves import Waves


@dataclass(frozen=True)
class Launch:
    """A launch of an entry: back end and parameters. `file` names the code.

    `workload` is the one that it was tuned for; of a launch that serves workloads of the grid alone, the smallest of them.
    """

    workload: AnyWorkload
    backend: str
    params: Params
    file: str


@dataclass(frozen=True)
class Cell(Json):
    """One workload of the grid. Times are in µs per call."""

    workload: str
    """Its name, as `Workload.key` writes it."""
    launch: int
    """Index of the launch that serves it: the fastest of the portfolio, or the plain schedule or a workload's winner that is nearly as
    fast.
    """
    us: tuple[float | None, ...]
    """Of every launch in `DispatchTable.members`; None where it was not measured."""
    best_us: float
    """Of the fastest of the launches that were measured over the whole grid, from which the portfolio was chosen. What only the search or
    the screened workloads measured does not count.
    """
    read_us: float | None = None
    """A pure read of the same bytes in the same run."""
    watts: float | None = None
    """Of the GPU under the launch that serves, if the load was sustained."""
    clock_mhz: float | None = None
    """Of its multiprocessors then."""

    @property
    def work(self) -> Workload:
        """The workload. Raises ValueError if the name is none."""
        return parse(self.workload)


@dataclass(frozen=True)
class DispatchTable(Json):
    """A portfolio of launches and the measured workloads that each of them serves.

    Launches are numbered: those of the entry's workloads first, then `launches`.
    """

    launches: tuple[Launch, ...]
    """Launches beyond those of the entry's workloads."""
    default: int
    """Index of the launch for calls far from every workload of `cells` or `defaults`: the plain schedule, or of a table from before there
    was one, the default.
    """
    members: tuple[int, ...]
    """Indices of the launches of the portfolio, each launch once. Of a table of defaults, of all launches."""
    cells: tuple[Cell, ...]
    """What was measured over the grid; nothing if there are `defaults`."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Workloads of the grid that were not measured, each with the reason."""
    worst_regret: float | None = None
    """The largest ratio of a serving launch's time to the fastest launch's, over all cells."""
    waves: tuple[Waves | None, ...] = ()
    """Of every launch in `members`, how its CTAs fill the GPU; None where they do not run in waves. Empty: not known."""
    defaults: Mapping[str, int] = field(default_factory=dict)
    """Where the grid was not measured: by its workloads, the index of the launch that is the default there."""

    def time(self, cell: Cell, index: int) -> float | None:
        """µs of a launch at a cell; None where it was not measured."""
        return cell.us[self.members.index(index)] if index in self.members else None

    @property
    def filling(self) -> dict[int, Waves]:
        """`waves` by index of launch."""
        return {index: waves for index, waves in zip(self.members, self.waves, strict=False) if waves is not None}

    def measured(self) -> list[Measured]:
        """The cells for the look-up, with losses of the members beside the launch that serves; without cells the defaults, with none."""
        guessed = [Measured(parse(key), index) for key, index in self.defaults.items()]
        return [Measured(cell.work, cell.launch, self._losses(cell)) for cell in self.cells] or guessed

    def _losses(self, cell: Cell) -> list[tuple[int, float]]:
        served = self.time(cell, cell.launch)
        if served is None:
            return []
        others = ((index, us) for index, us in zip(self.members, cell.us, strict=True) if us is not None and index != cell.launch)
        return [(index, max(1.0, us / served)) for index, us in others]

    def regret(self, cell: Cell) -> float | None:
        """Time of the launch that serves a cell, over the time of the fastest launch that was measured there."""
        us = self.time(cell, cell.launch)
        return us / cell.best_us if us is not None else None

    def timing(self, workload: Workload) -> Timing | None:
        """Of the launch that serves a workload of the grid; None for another workload."""
        for cell in self.cells:
            if cell.workload == workload.key and (us := self.time(cell, cell.launch)) is not None:
                return Timing(workload, us, (), cell.read_us, self.time(cell, self.default))
        return None

    def check(self, tuned: int) -> None:
        """Raises ValueError if the table does not fit `tuned` launches of workloads, or has workloads or times that are none."""
        count = tuned + len(self.launches)
        for index in (self.default, *self.members, *(cell.launch for cell in self.cells), *self.defaults.values()):
            if not 0 <= index < count:
                raise ValueError(f"its dispatch table names launch {index} of {count}")
        if len(set(self.members)) != len(self.members):
            raise ValueError("its dispatch table has a launch twice in its portfolio")
        if self.waves and len(self.waves) != len(self.members):
            raise ValueError("its dispatch table does not say of every launch how its CTAs fill the GPU")
        if not all(waves.possible for waves in self.waves if waves is not None):
            raise ValueError("its dispatch table has launches without CTAs, or without tokens")
        for cell in self.cells:
            if len(cell.us) != len(self.members):
                raise ValueError(f"its dispatch table has no times of {cell.workload}")
            require_times(f"its dispatch table at {cell.workload}", *cell.us, cell.best_us, cell.read_us)
            _ = cell.work
        for key in self.defaults:
            parse(key)


def smallest(served: Iterable[Workload]) -> Workload | None:
    """Of the workloads that a launch serves, the one that the launch is named after: of the fewest tokens. None of none."""
    return min(served, key=lambda work: (work.batch * work.kv_len, work.key), default=None)
