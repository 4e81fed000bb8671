"""How many cycles a scheduler of an SM spends on an MMA, if other instructions run beside it (mma_rate.cu, an H100 or H200).

    python benchmarks/gpu_mma_rate.py

A row has `sums` accumulators, the instructions beside each MMA, and the warps of a scheduler. Rows also go to $OUT (or
benchmarks/results) as GPU_mma_rate.csv.
"""

from __future__ import annotations

import csv
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.output import gpu_today, of_gpu, write_rows
from kvgen.toolchain.compilers import find_nvcc

SOURCE = Path(__file__).with_name("mma_rate.cu")


def main() -> int:
    """Compile, run, print, write."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "mma_rate")
        subprocess.run([find_nvcc().path, "-arch=sm_90a", "-O3", SOURCE, "-o", program], check=True)
        text = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    print(text, end="")
    write_rows(of_gpu("mma_rate"), list(csv.DictReader(text.splitlines())), gpu_today())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
