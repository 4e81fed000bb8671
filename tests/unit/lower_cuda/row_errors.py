"""The worst rows of emulated outputs: how far rounding inside the CUDA kernels moves them.

    python -m tests.unit.lower_cuda.row_errors [FORMAT…]

Prints the largest relative L2 error of a row (one query head of one query token) against the fp64 reference, and that of all rows
together, for the formats that are named, or for all. The last column is the error of that reference, of all rows, against attention
over K and V that are not quantized. The last three formats are also run with `exact_q: false`, where the search space allows it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.gpu_words import spec_of, workload_of
from kvgen.lower.backend import get_backend
from kvgen.lower.schedule import Params, Schedule
from kvgen.spec import KernelSpec
from kvgen.verify.cache import ReferenceCache
from kvgen.verify.data import normal, structured
from kvgen.verify.quality import attention
from kvgen.verify.tolerance import relative_l2, worst_relative_l2
from tests.unit.lower_cuda.emulate_attend import Emulated, Step, launch

TOKENS = 2048


@dataclass(frozen=True)
class Format:
    """A spec in the words of gpu_words.py, its block, and how many sequences are attended.

    `without_exact_q`: also run with `exact_q: false`, if the search space allows that.
    """

    words: str
    block: int = 128
    batch: int = 4
    without_exact_q: bool = False

    @property
    def spec(self) -> KernelSpec:
        """The spec, for one workload."""
        return spec_of(self.words, "sm90", [workload_of("2x256")])

    def launches(self) -> Iterator[Params]:
        """The launches to run: with `exact_q`, and without it where that is asked for and the search space allows it.

        KV tiles have 64 tokens, without `exact_q` 128: with few query rows the search tries `exact_q: false` with no shorter ones.
        """
        yield launch()
        if not self.without_exact_q:
            return
        backend, chosen = get_backend("cuda"), launch(exact_q=False, kv_tile=128)
        plain = backend.defaults(self.spec, "sm90")[0]
        schedule = Schedule("cuda", Params(plain.layout, block=self.block), Params(plain.launch, **chosen))
        if not backend.space(self.spec, "sm90").check(schedule):
            yield chosen


FORMATS = (
    Format("k8v8:h8/2"),
    Format("k8v8:h16/2:d64"),
    Format("k4v4:h8/2"),
    Format("k4v4:h8/2:sym"),
    Format("k2v2:h8/2:kg64:vg64", 64),
    Format("k8v4:h32/2", batch=2, without_exact_q=True),
    Format("k4v4:h8/2:q8", batch=2, without_exact_q=True),
    Format("k2v2:h8/2", without_exact_q=True),
)
DATA = {"normal": normal, "structured, scores up to 60": structured, "structured, scores up to 4": partial(structured, logit=4.0)}


def main() -> None:
    """Print the table."""
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [one.words for one in FORMATS]
    command.add_argument("formats", nargs="*", metavar="FORMAT", help=", ".join(names))
    asked = command.parse_args().formats
    if unknown := set(asked) - set(names):
        command.error(f"no such format: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    print("| format | exact_q | data | rows | worst row | all rows | the format itself |\n|---|---|---|---|---|---|---|")
    for one in FORMATS:
        if one.words in (asked or names):
            for chosen in one.launches():
                errors(one, chosen)


def errors(one: Format, chosen: Params) -> None:
    """Print the rows of the table for a format and a launch."""
    q_len, exact = one.spec.attention.q_len, str(chosen["exact_q"]).lower()
    with TemporaryDirectory() as folder:
        kernel = Emulated(one.spec, one.block, chosen, Path(folder))
        for name, make in DATA.items():
            inputs = make(kernel.spec, one.batch, TOKENS, q_len=q_len, seed=3)
            held = ReferenceCache(kernel.spec, one.batch, one.block)
            held.prefill(inputs.k, inputs.v, torch.full((one.batch,), TOKENS, dtype=torch.int32))
            step = Step(kernel, held, inputs.q, planned=True)
            step.run()
            want, original = held.attend(inputs.q)[0], attention(one.spec, inputs.q, inputs.k, inputs.v)
            found = worst_relative_l2(step.out, want), relative_l2(step.out, want), relative_l2(want, original)
            print(
                f"| {one.words} | {exact} | {name} | {want[..., 0].numel()} |", *(f" {error:.1e} |" for error in found), sep="", flush=True
            )


if __name__ == "__main__":
    main()
