"""The fewest launches with the least worst regret over measured workloads: a set cover over a matrix of times. Pure functions.

The *regret* of a launch at a cell (a measured workload) is its time over that of the cell's fastest launch. A set of launches has at each
cell the regret of its best member. Among sets of at most `most` launches the one with the least worst regret is wanted, and the smallest
set that comes close to it. If that regret is not good enough, a few cells set it, and the remaining places go to launches that lower the
mean regret.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from statistics import fmean

MOST = 6
"""Launches of a portfolio."""
SIZES = range(4, 10)
"""Of sets whose worst regret an entry records."""
ENOUGH = 1.03
"""Worst regret that is good enough: no further launch is added for less."""
GAIN = 0.01
"""A smaller set is taken if its worst regret is at most this part above that of the best set of MOST launches."""
TIED = 1.01
"""A launch within this factor of the fastest is as good: the plain schedule serves, if it is one."""
WORTH = 0.002
"""Least decrease of the mean logarithm of the regrets for which a set is changed: less is noise."""

Matrix = Sequence[Sequence[float]]
"""By launch, by cell; infinite where a launch was not measured."""


@dataclass(frozen=True)
class Portfolio:
    """Chosen launches, and which of them serves each cell."""

    launches: tuple[int, ...]
    serves: tuple[int, ...]
    """By cell, the launch."""
    worst: float
    """Largest regret over the cells."""


def choose(
    regret: Matrix,
    keep: Collection[int] = (),
    limits: Mapping[int, float] | None = None,
    *,
    most: int = MOST,
    enough: float = ENOUGH,
) -> Portfolio:
    """A portfolio of at most `most` launches that contains `keep`, of which the first is the plain schedule.

    `limits` are bounds of the regret at some cells, by their index: they are held whatever it takes, even if more than `most` launches are
    needed. Cells that no launch of the matrix serves within its limit raise ValueError, as does an empty matrix.
    """
    if not regret or not regret[0]:
        raise ValueError("there is nothing to choose from")
    kept, bounds = tuple(dict.fromkeys(keep)), dict(limits or {})
    steps = _steps(regret, bounds)
    least = _least(regret, kept, bounds, steps, most)
    while least is None:
        most += 1
        if most > len(regret):
            raise ValueError("no launch serves every cell within its limit")
        least = _least(regret, kept, bounds, steps, most)
    goal = max(enough, least * (1 + GAIN))
    thresholds = ((size, _least(regret, kept, bounds, steps, size)) for size in range(max(1, len(kept)), most + 1))
    size, threshold = next((size, worst) for size, worst in thresholds if worst is not None and worst <= goal)
    masks = _masks(regret, bounds, threshold)
    chosen = _improved(regret, next(_covers(masks, kept, size)), kept, masks, size if threshold <= enough else most)
    return _served(regret, chosen, kept)


def worst_by_size(
    regret: Matrix, keep: Collection[int] = (), limits: Mapping[int, float] | None = None, sizes: Iterable[int] = SIZES
) -> dict[int, float]:
    """The least worst regret of sets of so many launches, under the conditions of `choose`. It tells what more launches would gain.

    A size for which no set meets the limits is left out. Cells with a limit do not count.
    """
    kept, bounds = tuple(dict.fromkeys(keep)), dict(limits or {})
    steps = _steps(regret, bounds)
    found = {size: _least(regret, kept, bounds, steps, size) for size in sizes}
    return {size: worst for size, worst in found.items() if worst is not None}


def _steps(regret: Matrix, limits: Mapping[int, float]) -> list[float]:
    """The regrets that the worst one can be: those at cells without a limit."""
    return sorted({value for row in regret for cell, value in enumerate(row) if cell not in limits and math.isfinite(value)}) or [1.0]


def _least(regret: Matrix, keep: Sequence[int], limits: Mapping[int, float], steps: Sequence[float], size: int) -> float | None:
    """The least worst regret of `size` launches, where limits do not say otherwise; None if the limits need more launches."""
    low, high = 0, len(steps)
    while low < high:
        middle = (low + high) // 2
        if next(_covers(_masks(regret, limits, steps[middle]), keep, size), None) is None:
            low = middle + 1
        else:
            high = middle
    return steps[low] if low < len(steps) else None


def _masks(regret: Matrix, limits: Mapping[int, float], threshold: float) -> list[int]:
    """By launch, the cells that it serves well enough, as bits."""
    return [sum(1 << cell for cell, value in enumerate(row) if value <= limits.get(cell, threshold)) for row in regret] + [
        (1 << len(regret[0])) - 1
    ]


def _covers(masks: Sequence[int], keep: Sequence[int], size: int) -> Iterator[list[int]]:
    """Sets of at most `size` launches that serve every cell and contain `keep`: branches over the launches of the rarest open cell.

    The last of `masks` has the bits of all cells.
    """
    *rows, every = masks

    def extend(chosen: list[int], open_cells: int) -> Iterator[list[int]]:
        if not open_cells:
            yield chosen
            return
        if len(chosen) >= size or (size - len(chosen)) * max((row & open_cells).bit_count() for row in rows) < open_cells.bit_count():
            return
        candidates = min(_by_cell(rows, open_cells), key=len)
        for launch in candidates:
            yield from extend([*chosen, launch], open_cells & ~rows[launch])

    if len(keep) <= size:
        served = 0
        for launch in keep:
            served |= rows[launch]
        yield from extend(list(keep), every & ~served)


def _by_cell(rows: Sequence[int], open_cells: int) -> Iterator[list[int]]:
    """For each open cell, the launches that serve it, those that serve most open cells first."""
    order = sorted(range(len(rows)), key=lambda launch: -(rows[launch] & open_cells).bit_count())
    while open_cells:
        cell = open_cells & -open_cells
        yield [launch for launch in order if rows[launch] & cell]
        open_cells ^= cell


def _improved(regret: Matrix, chosen: list[int], keep: Sequence[int], masks: Sequence[int], most: int) -> list[int]:
    """Of a set that serves every cell well enough, one of less mean regret that does so, too: in every step the best exchange of a launch,
    or further launch up to `most`.
    """
    *rows, every = masks
    while True:
        others = [launch for launch in range(len(rows)) if launch not in chosen]
        parts = [[member for member in chosen if member != out] for out in chosen if out not in keep]
        parts += [chosen] if len(chosen) < most else []
        sets = [[*members, launch] for members in parts for launch in others]
        covers = [one for one in sets if every == reduce(or_, (rows[launch] for launch in one))]
        better = min(covers, key=lambda one: _mean(regret, one), default=chosen)
        if _mean(regret, better) > _mean(regret, chosen) - WORTH:
            return chosen
        chosen = better


def _mean(regret: Matrix, chosen: Iterable[int]) -> float:
    """Mean of the logarithms of the regrets of a set."""
    rows = [regret[launch] for launch in chosen]
    return fmean(math.log(min(column)) for column in zip(*rows, strict=True))


def _served(regret: Matrix, chosen: Sequence[int], keep: Sequence[int]) -> Portfolio:
    """Who serves which cell; launches that serve none are left out, except those that are kept."""
    serves, worst = [], 1.0
    for cell in range(len(regret[0])):
        fastest = min(chosen, key=lambda launch: (regret[launch][cell], launch))
        default = keep[0] if keep else fastest
        serves.append(default if regret[default][cell] <= TIED * regret[fastest][cell] else fastest)
        worst = max(worst, regret[serves[-1]][cell])
    used = dict.fromkeys((*keep, *serves))
    return Portfolio(tuple(sorted(used)), tuple(serves), worst)
