"""Machine code of shipped launches, before and now: registers, spills and instructions of the loop over packed KV tiles.

    git worktree add ../before 01c2f58
    python -m benchmarks.shipped_code ../before           # to benchmarks/results/shipped_code.csv; $OUT is another folder

It needs nvcc, cuobjdump and nvdisasm, and no GPU. The argument is a checkout whose entries have schema 2. Of every entry, CUDA launches
that differ in warps, KV tile or CTAs per SM are compiled twice: the registered source with the headers of that checkout, and what the
same spec and schedule are lowered to now. Every `attend` kernel of today's module is a row; it stands beside the one kernel of that
day that appends new tokens, or does not, as it does. `loop` and `half_rate` are per sub-tile (benchmarks/loop_instructions.py says what
counts). `register_limit` is the most registers with which an SM holds the CTAs that the schedule asks for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvgen.registry.migrate import upgraded

from benchmarks.attend_code import AttendKernel, attend_kernels
from benchmarks.command import parser, processors
from benchmarks.compiling import build_sources
from benchmarks.gpu_words import schedule_word
from benchmarks.output import folder, write_csv
from kvgen.lower.backends import get_backend
from kvgen.lower.base import Source
from kvgen.lower.schedule import Schedule
from kvgen.registry.entry import Code, Entry
from kvgen.registry.store import read_parts
from kvgen.toolchain import Artifact

REGISTERS_PER_SM, MOST_REGISTERS = 65536, 255
NAME = "shipped_code"
COMPARED = ("warps", "kv_tile", "ctas_per_sm")
"""Parameters that decide the code of the loop. The reduction of a launch follows it."""


@dataclass(frozen=True)
class Compared:
    """A launch, its source of that day and today's."""

    spec: str
    workload: str
    schedule: Schedule
    before: Source
    now: Source


def main() -> int:
    """Compile, compare, and print where a kernel needs more than before."""
    command = parser(__doc__)
    command.add_argument("before", type=Path, help="a checkout of the revision to compare with")
    command.add_argument("specs", nargs="*", help="words in the names of specs; all without any")
    command.add_argument("--workers", type=int, default=processors())
    options = command.parse_args()
    launches = [one for one in shipped(options.before) if not options.specs or any(word in one.spec for word in options.specs)]
    artifacts = build_sources([source for one in launches for source in (one.before, one.now)], options.workers)
    rows: list[dict[str, Any]] = []
    for one, before, now in zip(launches, artifacts[::2], artifacts[1::2], strict=True):
        rows += rows_of(one, built(before), built(now))
    write_csv(folder() / f"{NAME}.csv", rows)
    for row in rows:
        if any(row[name] > row[f"{name}_before"] for name in ("registers", "spill_bytes", "loop")):
            print("  ".join(f"{name}={value}" for name, value in row.items()))
    return 0 if rows else 1


def shipped(checkout: Path) -> Iterator[Compared]:
    """CUDA launches of a checkout's entries, one for each value of `COMPARED`."""
    for path in sorted(checkout.glob("generated/*/*/*/entry.json")):
        data, texts, resources = read_parts(path.parent)
        entry = Entry.from_parts(upgraded(data)[0], texts, resources)
        seen = set()
        for launch in entry.launches:
            schedule = entry.schedule(launch)
            compared = tuple(schedule.launch.get(name) for name in COMPARED)
            if launch.backend == "cuda" and compared not in seen:
                seen.add(compared)
                now = get_backend("cuda").lower(entry.spec, schedule, entry.arch)
                before = source_of(entry.codes[launch.file], entry, checkout / "templates")
                yield Compared(entry.spec.name, launch.workload.key, schedule, before, now)


def source_of(code: Code, entry: Entry, templates: Path) -> Source:
    """A registered source over the headers of its checkout."""
    include, headers = (tuple(templates / name for name in names) for names in (code.include, code.headers))
    return Source(code.text, code.language, entry.arch, include, code.flags, headers)


def built(result: object) -> Artifact:
    """The artifact. Raises the compiler's error."""
    if isinstance(result, Exception):
        raise result
    assert isinstance(result, Artifact)
    return result


def rows_of(one: Compared, before: Artifact, now: Artifact) -> list[dict[str, Any]]:
    """A row for each of today's kernels."""
    launch = one.schedule.launch
    old = {kernel.append: kernel for kernel in attend_kernels(before, launch.integer("kv_tile"))}
    threads = 32 * launch.integer("warps") * launch.integer("ctas_per_sm")
    limit = min(MOST_REGISTERS, REGISTERS_PER_SM // threads // 8 * 8)
    rows = []
    for kernel in attend_kernels(now, launch.integer("kv_tile")):
        row: dict[str, Any] = {
            "spec": one.spec, "schedule": schedule_word(one.schedule), "workload": one.workload,
            "kernel": kernel.name, "append": kernel.append, "register_limit": limit,
        }  # fmt: skip
        then, today = figures(old[kernel.append]), figures(kernel)
        for name, value in today.items():
            row |= {f"{name}_before": then[name], name: value}
        rows.append(row)
    return rows


def figures(kernel: AttendKernel) -> dict[str, float]:
    """What is compared of a kernel."""
    return {
        "registers": kernel.registers, "spill_bytes": kernel.spill_bytes, "loop": round(kernel.loop["all"], 2),
        "half_rate": round(kernel.loop["half_rate"], 2), "mma": round(kernel.loop["mma"], 2), "code_instructions": kernel.code,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
