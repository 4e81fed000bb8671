"""The table of what each format costs, with the times of the committed measurements, and its pictures in the documents.

    python -m benchmarks.accuracy             # every format through kernels of this machine's GPU, or of its CPU
    python -m benchmarks.accuracy --draw      # only draw the pictures again, from the table that is committed

Writes cpu.csv or that of the GPU (h200.csv) and the loss curve of its model to $OUT/accuracy, by default to benchmarks/results/accuracy.
Without $OUT, the pictures of the documents follow the table that ships (that of the H200, if there is one).
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from benchmarks.gpu_words import spec_of
from benchmarks.output import gpu_word
from benchmarks.tables import RESULTS, ROOT, attend, frame
from kvgen.accuracy.picture import write_pngs
from kvgen.accuracy.recommend import read_csv, results
from kvgen.accuracy.suite import suite
from kvgen.accuracy.times import STEP
from kvgen.spec import KernelSpec, load_spec

PICTURE = ROOT / "docs" / "images" / "accuracy.png"


def committed_times() -> dict[str, float]:
    """µs of a step at 8 x 32768 by format of the suite, from h200_attend.csv (the entries that ship), else from h200_shapes.csv."""
    examples = {spec.name: spec for spec in map(load_spec, sorted((ROOT / "examples").glob("*.yaml")))}
    bench, shapes = attend("h200_attend.csv").loc[[(STEP.batch, STEP.kv_len)]], frame("h200_shapes.csv")
    found = [(examples[row.spec], row.us) for row in bench[bench.provider == "kvgen"].itertuples()]
    shapes = shapes[(shapes.backend == "cuda") & (shapes.workload == STEP.key)]
    found += [(spec_of(row.spec, "sm90", [STEP]), row.us) for row in shapes.itertuples()]
    times: dict[str, float] = {}
    for spec, us in found:
        times.setdefault(spec.format_id, float(us))
    return {name: times[spec.format_id] for name, spec in suite().items() if spec.format_id in times}


def measure(folder: Path) -> int:
    """Write the table and the loss curve of this machine, after every format. 1 where a kernel is wrong."""
    from kvgen.accuracy.recipe import LARGE, SMALL
    from kvgen.accuracy.row import write_csv
    from kvgen.accuracy.run import Table, table
    from kvgen.accuracy.train import write_curve
    from kvgen.spec.target import resolve

    began, target = time.monotonic(), resolve("native")
    name, recipe = ("cpu", SMALL) if target == "cpu" else (gpu_word(), LARGE)
    specs: dict[str, KernelSpec] = dict(suite())

    def keep(found: Table) -> None:
        write_csv(folder / f"{name}.csv", found.rows, found.facts)
        facts = {fact: found.facts[fact] for fact in ("model", "text", "device", "torch", "date")}
        write_curve(folder / f"{name}_loss.csv", found.curve, facts)

    folder.mkdir(parents=True, exist_ok=True)
    found = table(specs, target, recipe, times=committed_times(), told=lambda message: print(message, flush=True), kept=keep)
    print(f"{len(specs)} formats in {time.monotonic() - began:.0f} s, {sum(os.times()[:4]):.0f} s of processors")
    wrong = found.wrong(specs)
    for one, error in wrong.items():
        print(f"{one}: its kernel is {error:.1e} from the reference over the same cache, in one head or more")
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--draw"]):
        sys.exit(__doc__)
    status = 0
    if not sys.argv[1:]:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        status = measure(Path(os.environ.get("OUT") or RESULTS) / "accuracy")
    if "OUT" not in os.environ:
        PICTURE.parent.mkdir(parents=True, exist_ok=True)
        write_pngs(PICTURE, read_csv(results())[0])
    sys.exit(status)
