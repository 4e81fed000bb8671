"""The worst rows of emulated outputs: how far rounding inside the CUDA kernels moves them.

    python -m tests.unit.lower_cuda.row_errors

Prints the largest relative L2 error of a row (one query head) against the fp64 reference, and that of all rows together.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.command import parser
from benchmarks.gpu_words import spec_of, workload_of
from kvgen.reference.cache import ReferenceCache
from kvgen.reference.data import normal, structured
from kvgen.reference.tolerance import relative_l2, worst_relative_l2
from tests.unit.lower_cuda.emulate_attend import Emulated, Step, launch

BATCH, TOKENS = 4, 2048
FORMATS = (("k8v8:h8/2", 128), ("k8v8:h16/2:d64", 128), ("k4v4:h8/2", 128), ("k4v4:h8/2:sym", 128), ("k2v2:h8/2:kg64:vg64", 64))
DATA = {"normal": normal, "structured, scores up to 60": structured, "structured, scores up to 4": partial(structured, logit=4.0)}


def main() -> None:
    """Print the table."""
    parser(__doc__).parse_args()
    print("| format | data | worst row | all rows |\n|---|---|---|---|")
    for words, block in FORMATS:
        with TemporaryDirectory() as folder:
            kernel = Emulated(spec_of(words, "sm90", [workload_of("2x256")]), block, launch(), Path(folder))
            for name, make in DATA.items():
                inputs = make(kernel.spec, BATCH, TOKENS, seed=3)
                held = ReferenceCache(kernel.spec, BATCH, block)
                held.prefill(inputs.k, inputs.v, torch.full((BATCH,), TOKENS, dtype=torch.int32))
                step = Step(kernel, held, inputs.q, planned=True)
                step.run()
                want = held.attend(inputs.q)[0]
                print(f"| {words} | {name} | {worst_relative_l2(step.out, want):.1e} | {relative_l2(step.out, want):.1e} |", flush=True)


if __name__ == "__main__":
    main()
