"""Every way to read on this GPU, by size, with launches one after the other and overlapping: what the read roofline is, and what it is not.

    python benchmarks/gpu_reads.py [MB,MB,...]

Results also go to $OUT (or benchmarks/results) as gpu_reads.json: µs by size in bytes and way.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.output import write_json
from kvgen.measure.read_roofline import OVERLAPPING, READS, ReadRoofline, artifact

SIZES = "9,34,68,137,275,550"


def main() -> int:
    """Time, print, write."""
    path, rows = artifact("sm90").path, {}
    print("MB".ljust(8), *[name.rjust(22) for name in READS + OVERLAPPING])
    for megabytes in map(float, (sys.argv[1] if len(sys.argv) > 1 else SIZES).split(",")):
        nbytes = int(megabytes * 1e6)
        took = {name: median(ReadRoofline(path, "cuda", (name,)).samples(nbytes)) for name in READS + OVERLAPPING}
        rows[nbytes] = took
        print(f"{megabytes:<8g}", *[f"{us:.2f} us {nbytes / us / 1e6:.3f} TB/s".rjust(22) for us in took.values()], flush=True)
    write_json("gpu_reads", rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
