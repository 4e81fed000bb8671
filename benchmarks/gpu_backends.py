"""Both GPU back ends over the same caches in one run, TileLang's also by way of the PTX for SM80; one CSV.

    python benchmarks/gpu_backends.py [--specs k4v4,k4v4:page128] [--workloads 8x32768] [--cuda w8u4d1] [--tilelang w8u2s2,w8u4s4]

Words are those of gpu_words.py; a schedule that a spec has no room for is left out. Prints the fastest of each back end
and what was wrong; exits with 1 where anything was.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import kvgen
from benchmarks.command import add_sweep, parser
from benchmarks.gpu_decode import child, compile_all
from benchmarks.gpu_words import schedules_of, spec_of, workload_of
from benchmarks.output import folder, of_gpu
from kvgen.arch import Target
from kvgen.csvfile import CsvFile
from kvgen.lower.backends import get_backend
from kvgen.measure.device import fingerprint

Row = dict[str, Any]
MOST_ERROR = 1e-2
"""Relative L2 beyond which a kernel is wrong, and its time says nothing."""
SPECS = "k8v8,k4v4,k2v2,k4v4:page128,k4v4:kg64,k4v4:page64:kg64"


@dataclass(frozen=True)
class Contender:
    """A back end and the target that it lowers for; `ptx` where that is not this GPU's."""

    backend: str
    schedules: str
    ptx: Target | None = None

    @property
    def target(self) -> Target:
        """What it lowers for."""
        return self.ptx or "sm90"

    @property
    def label(self) -> str:
        """The same, for people."""
        return f"{self.ptx} PTX" if self.ptx else self.target


def arguments() -> argparse.Namespace:
    """The command line, with what `compile_all` also wants."""
    command = parser(__doc__)
    command.add_argument("--specs", default=SPECS)
    command.add_argument("--workloads", default="8x32768,32x8192,1x32768")
    command.add_argument("--cuda", default="w8u4d1,w8u4d1.cl2,w4u4d1c2,w12u4d1.cl2,w8u2d1,w8u2d1.cl2,w4u2d1c2,w8u2d2.cl2,w4u2d2c2,w8u1d2")
    command.add_argument("--tilelang", default="default,w8u4s4,w8u2s2.cl,w4u4s4c2.cl,w12u4s4.cl,w16u4s4.cl,w8u4s4c2")
    add_sweep(command)
    command.add_argument("--out", type=Path, default=folder() / f"{of_gpu('backends')}.csv")
    return command.parse_args()


def compiled(contender: Contender, options: argparse.Namespace) -> list[Row]:
    """Tasks of a contender, its modules named after it."""
    backend = get_backend(contender.backend)
    workloads = [workload_of(word) for word in options.workloads.split(",")]
    points = []
    for words in options.specs.split(","):
        spec = spec_of(words, contender.target, workloads)
        for word in contender.schedules.split(","):
            points += [(spec, schedule) for schedule in schedules_of(word, backend, spec, contender.target)]
    settings = argparse.Namespace(**{**vars(options), "ptx": contender.ptx, "decode": True})
    tasks: list[Row] = compile_all(backend, points, contender.target, settings)
    for task in tasks:
        for module in task["modules"]:
            module |= {"backend": contender.backend, "target": contender.label, "word": module["schedule"]}
            module["schedule"] = f"{contender.backend} {contender.label} {module['word']}"
    return tasks


def joined(tasks: list[Row]) -> list[Row]:
    """One task per spec and layout: what runs in one process, in turns."""
    found: dict[tuple[str, str], Row] = {}
    for task in tasks:
        key = (task["spec"]["name"], str(task["modules"][0]["json"]["layout"]))
        if key in found:
            found[key]["modules"] += task["modules"]
        else:
            found[key] = task
    return list(found.values())


def measured(task: Row, facts: Row, file: CsvFile) -> list[Row]:
    """Rows of a task, which go to the file one by one. Raises RuntimeError where a module dies."""
    modules, rows = {module["schedule"]: module for module in task["modules"]}, []

    def take(line: Row) -> None:
        module, work = modules[line["schedule"]], task["spec"]["workloads"][line["workload"]]
        rows.append(
            {"spec": task["spec"]["name"], "batch": work["batch"], "kv_len": work["kv_len"], "backend": module["backend"],
             "target": module["target"], "schedule": module["word"], "us": round(line["us"], 2), "read_us": round(line["read_us"], 2),
             "read_fraction": round(line["read_us"] / line["us"], 4), "decode_us": round(line["decode_us"], 2),
             "relative_l2": f"{line['relative_l2']:.2e}", "registers": module["registers"], "spill_bytes": module["spill"], **facts}
        )  # fmt: skip
        file.add(rows[-1:])

    at, fault = child(task, take)
    if fault is not None:
        raise RuntimeError(f"{task['spec']['name']} {at}: {fault}")
    return rows


def right(row: Row) -> bool:
    """Whether the row's kernel agreed with the reference."""
    return float(row["relative_l2"]) <= MOST_ERROR


def show(rows: list[Row]) -> None:
    """The fastest right schedule of each back end, and its PTX for the older target; then all that were wrong."""
    for key in dict.fromkeys((row["spec"], row["batch"], row["kv_len"]) for row in rows):
        mine = [row for row in rows if right(row) and (row["spec"], row["batch"], row["kv_len"]) == key]
        print(f"{key[0]} {key[1]}x{key[2]}: read {mine[0]['read_us']} µs" if mine else f"{key[0]} {key[1]}x{key[2]}: nothing right")
        for backend in dict.fromkeys(row["backend"] for row in mine if "PTX" not in row["target"]):
            best = min((row for row in mine if row["backend"] == backend and "PTX" not in row["target"]), key=lambda row: row["us"])
            older = [row for row in mine if row["backend"] == backend and "PTX" in row["target"] and row["schedule"] == best["schedule"]]
            ptx = "".join(f"  {row['target']} {row['us']:.2f} ({row['us'] / best['us'] - 1:+.1%})" for row in older)
            more = best["decode_us"] - best["us"]
            print(f"  {backend:9}{best['schedule']:24}{best['us']:8.2f}  {best['read_fraction']:.3f}  decode {more:+.2f}{ptx}", flush=True)
    for row in rows:
        if not right(row):
            print("WRONG", *(row[name] for name in ("spec", "batch", "kv_len", "backend", "target", "schedule", "relative_l2")), flush=True)


def main() -> int:
    """Compile, measure, write."""
    options = arguments()
    contenders = (Contender("cuda", options.cuda), Contender("tilelang", options.tilelang), Contender("tilelang", options.tilelang, "sm80"))
    tasks = joined([task for contender in contenders for task in compiled(contender, options)])
    about = fingerprint("sm90")
    facts = {
        "device": about.get("name"),
        "driver": about.get("driver"),
        "kvgen": kvgen.__version__,
        "date": datetime.now(timezone.utc).date().isoformat(),
    }
    rows: list[Row] = []
    file = CsvFile(options.out)
    for task in tasks:
        new = measured(task, facts, file)
        show(new)
        rows += new
    return 0 if all(map(right, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
