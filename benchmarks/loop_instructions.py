"""How many instructions the loop over packed KV tiles has, by kind: shapes whose speed depends on them, compiled and disassembled.

    python -m benchmarks.loop_instructions                      # all cases, to benchmarks/results/loop_instructions.csv
    python -m benchmarks.loop_instructions "head_dim 64" int2   # some; $OUT is another folder for the table

It needs nvcc, cuobjdump and nvdisasm, and no GPU. Every `attend` kernel of a case is a row: with the static scheduler and with a plan,
without and with new tokens to append. Counts are those of a sub-tile (32 tokens of a KV head). What an iteration of the loop runs
once is divided by its sub-tiles; the rare code that raises the running maximum is left out. `half_rate` counts instructions of the
ALU pipe, which takes one every second cycle, and conversions of that rate. `code_instructions` is the whole kernel's size.

The last columns divide the time that the loop needs by the time in which an H200 reads the bytes (132 SMs of 4 schedulers at 1.755 GHz,
4.4 TB/s): `issue_share`, if every scheduler issues an instruction per cycle, and `half_rate_share`, if its ALU pipe never idles. Loops
were measured to reach about half of it (docs/decisions/0018), so that a share of .5 is already too much.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.attend_code import SUBTILE, AttendKernel, attend_kernels
from benchmarks.command import parser, processors
from benchmarks.compiling import build_sources, lower_all
from benchmarks.gpu_words import schedules_of, spec_of, workload_of
from benchmarks.output import folder, write_csv
from benchmarks.shape_cases import TARGET
from kvgen.errors import KvgenError
from kvgen.lower.backends import get_backend
from kvgen.lower.schedule import Schedule, layout_of
from kvgen.spec import KernelSpec
from kvgen.toolchain import Artifact

READ_BYTES_S, SCHEDULER_CYCLES_S = 4.4e12, 132 * 4 * 1.755e9
NAME = "loop_instructions"


@dataclass(frozen=True)
class Case:
    """Words of gpu_words.py: a spec, a schedule, and the workload whose fastest launch it is."""

    name: str
    words: str
    schedule_words: str
    work: str
    backend: str = "cuda"

    @property
    def spec(self) -> KernelSpec:
        """The spec, for its workload."""
        return spec_of(self.words, TARGET, [workload_of(self.work)])

    @property
    def schedule(self) -> Schedule:
        """The schedule."""
        return schedules_of(self.schedule_words, get_backend(self.backend), self.spec, TARGET)[0]


KITTY = "k2v2:boost1/8:sink32:local128:page128"
CASES = (
    Case("int4", "k4v4", "w8u1d2.cl2", "8x32768"),
    Case("int4, long tiles", "k4v4", "w4u4d1c2", "32x8192"),
    Case("int8", "k8v8", "w8u1d2", "128x8192"),
    Case("int2", "k2v2", "w12u4d1.cl2", "8x32768"),
    Case("head_dim 64, group 8", "k4v4:d64:h64/8", "w6u4d1c2", "64x4096"),
    Case("head_dim 80", "k4v4:d80", "w12u4d1.cl2", "8x32768"),
    Case("head_dim 112", "k4v4:d112", "w8u4d1", "8x32768"),
    Case("kitty", KITTY, "w6u4d1c2", "32x8192"),
    Case("TileLang, int4", "k4v4", "w8u2s2.cl", "8x32768", "tilelang"),
    Case("TileLang, int8", "k8v8", "w8u2s2.cl", "8x32768", "tilelang"),
    Case("TileLang, int2", "k2v2", "w16u4s4.cl", "8x32768", "tilelang"),
)
"""The fastest launches of generated/ and of benchmarks/results/h200_shapes.csv."""


def main() -> int:
    """Print the static kernels without new tokens, and write all rows."""
    command = parser(__doc__)
    command.add_argument("cases", nargs="*", help="words in the names of cases; all without any")
    command.add_argument("--workers", type=int, default=processors())
    options = command.parse_args()
    cases = [case for case in CASES if not options.cases or any(word in case.name for word in options.cases)]
    rows: list[dict[str, Any]] = []
    for case, artifact in zip(cases, compiled(cases, options.workers), strict=True):
        found = [row(case, kernel) for kernel in attend_kernels(artifact, case.schedule.launch.integer("kv_tile"))]
        rows += found
        plain = next(row for row in found if row["kernel"].startswith("attend_static") and not row["append"])
        print("  ".join(f"{name}={value}" for name, value in plain.items() if value), flush=True)
    write_csv(folder() / f"{NAME}.csv", rows)
    return 0 if rows else 1


def compiled(cases: list[Case], workers: int) -> list[Artifact]:
    """The modules of cases. Raises the error of the first one that has none."""
    artifacts = []
    sources = lower_all([(case.spec, case.schedule) for case in cases], TARGET, workers)
    for source in sources:
        if isinstance(source, KvgenError):
            raise source
    for built in build_sources([source for source in sources if not isinstance(source, KvgenError)], workers):
        if not isinstance(built, Artifact):
            raise built
        artifacts.append(built)
    return artifacts


def row(case: Case, kernel: AttendKernel) -> dict[str, Any]:
    """Counts and resources of a kernel."""
    layout = layout_of(case.spec, case.schedule.layout)
    read_s = layout.block_bytes / (layout.tokens / SUBTILE) / READ_BYTES_S
    return {
        "case": case.name, "spec": case.words, "schedule": case.schedule_words, "workload": case.work,
        "kernel": kernel.name, "append": kernel.append,
        "registers": kernel.registers, "spill_bytes": kernel.spill_bytes, "code_instructions": kernel.code,
        **_rounded(kernel.loop, 2),
        **_rounded({
            "issue_share": kernel.loop["all"] / SCHEDULER_CYCLES_S / read_s,
            "half_rate_share": 2 * kernel.loop["half_rate"] / SCHEDULER_CYCLES_S / read_s,
        }, 3),
    }  # fmt: skip


def _rounded(numbers: Mapping[str, float], digits: int) -> dict[str, float]:
    return {name: round(number, digits) for name, number in numbers.items()}


if __name__ == "__main__":
    sys.exit(main())
