"""What a change of the kernels did to launches that gpu_plane.py measured before and after it: no GPU takes part.

    python -m benchmarks.plane_change h100_transfer_shared_ranges.csv h100_transfer.csv

Both files lie in benchmarks/results. Rows of the same spec and point are compared, if the sequences of the point have unequal lengths; with
`--equal`, those of equal lengths. Times are divided by that of the read of the same bytes in the same row, since GPUs differ. For each spec
it prints how many points there are, the geometric mean, the least and the largest ratio (after over before) of the launch that calls take,
of the fastest launch of the entry, and of all its launches, and the points at which the launch that calls take changed most.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.command import parser
from benchmarks.figures import Row, rows

MOST = 4
"""Points that are named, at either end."""


def pairs(before: Sequence[Row], after: Sequence[Row], equal: bool) -> Iterator[tuple[Row, Row]]:
    """Rows of the same spec, point and load, of equal or of unequal lengths."""
    known = {(row["spec"], row["point"], row["traffic"]): row for row in before}
    for row in after:
        other = known.get((row["spec"], row["point"], row["traffic"]))
        if other is not None and ("x" in row["point"]) == equal:
            yield other, row


def ratios(before: Row, after: Row) -> dict[str, list[float]]:
    """After over before, of the launch that calls take, of the fastest one, and of all that were timed in both rows."""
    faster_read = float(before["read_us"]) / float(after["read_us"])
    own = zip(json.loads(before["own_us"]), json.loads(after["own_us"]), strict=True)  # of the same entry
    return {
        "taken": [float(after["us"]) / float(before["us"]) * faster_read],
        "fastest": [float(after["best_own_us"]) / float(before["best_own_us"]) * faster_read],
        "all": [b / a * faster_read for a, b in own if a and b],
    }


def summary(found: Sequence[tuple[Row, Row]]) -> list[str]:
    """Lines about one spec."""
    compared = {f"{after['point']}, {after['traffic']}": ratios(before, after) for before, after in found}
    lines = [f"{found[0][0]['spec']}: {len(compared)} points"]
    for name in ("taken", "fastest", "all"):
        values = [value for ratio in compared.values() for value in ratio[name]]
        lines.append(f"  {name:8} mean {geometric_mean(values):.4f}, {min(values):.3f} to {max(values):.3f}")
    order = sorted(compared, key=lambda point: compared[point]["taken"][0])
    lines += [f"  {point:38}{compared[point]['taken'][0]:.3f}" for point in dict.fromkeys([*order[:MOST], *order[-MOST:]])]
    return lines


def main() -> int:
    """Compare, print. 1 where the files have no point in common."""
    command = parser(__doc__)
    command.add_argument("before")
    command.add_argument("after")
    command.add_argument("--equal", action="store_true", help="sequences of equal lengths")
    options = command.parse_args()
    found = list(pairs(rows(options.before), rows(options.after), options.equal))
    for spec in dict.fromkeys(before["spec"] for before, _ in found):
        print("\n".join(summary([pair for pair in found if pair[0]["spec"] == spec])))
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
