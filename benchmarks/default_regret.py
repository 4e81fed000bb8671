"""Time of the default of a workload over that of the fastest schedule, from what gpu_decode.py measured: no GPU takes part.

    python -m benchmarks.default_regret [h100_short_heads.csv]

A point is a spec and a workload of one run. Points at which the present default was not timed are counted and left out. The points are
printed from the worst, down to 1.05, and below them how many there are, their geometric mean and the worst.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.command import parser
from benchmarks.figures import rows
from benchmarks.gpu_words import schedule_word, spec_of, workload_of
from kvgen.lower.backends import get_backend

Point = tuple[str, str, str]
"""Run, spec and workload."""
NEAR = 1.05
"""Ratio of times from which a point is printed."""


def times(name: str) -> dict[Point, dict[str, float]]:
    """µs per call by point and schedule."""
    found: dict[Point, dict[str, float]] = defaultdict(dict)
    for row in rows(name):
        found[row["run"], row["spec"], row["workload"]][row["schedule"]] = float(row["us"])
    return found


def default(spec: str, workload: str) -> str:
    """The word of the present default."""
    return schedule_word(get_backend("cuda").default(spec_of(spec, "sm90", [workload_of(workload)]), "sm90"))


def main() -> int:
    """Compare and print."""
    command = parser(__doc__)
    command.add_argument("file", nargs="?", default="h100_short_heads.csv")
    measured = times(command.parse_args().file)
    chosen = {point: default(*point[1:]) for point in measured}
    regrets = {point: us[chosen[point]] / min(us.values()) for point, us in measured.items() if chosen[point] in us}
    for point, regret in sorted(regrets.items(), key=lambda item: -item[1]):
        if regret > NEAR:
            print(f"{regret:.3f}  {' '.join(point)}  {chosen[point]}")
    mean = math.exp(math.fsum(map(math.log, regrets.values())) / len(regrets))
    print(
        f"{len(regrets)} of {len(measured)} points: geometric mean {mean:.3f}, worst {max(regrets.values()):.3f}, "
        f"{sum(regret > NEAR for regret in regrets.values())} above {NEAR}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
