"""What the tokens of a block (N_r) cost and give: bytes that attention reads, and KL divergence of SmolLM2-135M, of four formats.

    python benchmarks/cpu_blocks.py [FORMAT…] [--passages 1]

Bytes are of a decode step's attention with Llama-3.1-8B's heads. The divergence is that of `kvgen accuracy` (docs/accuracy.md), in nats.
Both are means over all fill levels of the residual, at a short and at a long context. Rows go to $OUT (or benchmarks/results) as
cpu_blocks.csv. The time of a step: gpu_blocks.py.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.common import parser, write_rows
from benchmarks.gpu_blocks import FORMATS, TARGET, mean_bytes, schedules
from benchmarks.gpu_words import spec_of, workload_of
from kvgen.accuracy import evaluate, formats
from kvgen.accuracy.texts import packaged_texts, passages
from kvgen.api import get_kernel
from kvgen.bench.run import facts
from kvgen.format.residual import residual_rows
from kvgen.integrations.transformers import layer_specs
from kvgen.lower.backend import get_backend
from kvgen.lower.schedule import Params, layout_of
from kvgen.measure.measurement import TimingPolicy
from kvgen.registry import user_store
from kvgen.registry.entry import Entry, here
from kvgen.spec import KernelSpec

MODELLED = dict(zip(FORMATS, ("bitdecoding-int4", "kivi-int2", "saw-int4", "fp8-e4m3"), strict=True))
"""The formats as `kvgen accuracy` names them."""
BLOCKS = (32, 64, 128, 256)
CONTEXT, CYCLE = 2048, 256
"""Tokens of a passage; of a stretch that whole blocks fill."""
SHORT = slice(316 - CYCLE // 2, 316 + CYCLE // 2)
LONG = slice(CONTEXT - 1 - CYCLE, CONTEXT - 1)


def main() -> None:
    """Measure, write."""
    command = parser(__doc__)
    command.add_argument("formats", nargs="*", metavar="FORMAT", help=", ".join(FORMATS))
    command.add_argument("--passages", type=int, default=1)
    options = command.parse_args()
    works = [workload_of("200x316"), workload_of("8x32768")]
    rows: list[dict[str, Any]] = []
    points: dict[str, Sequence[KernelSpec]] = {}
    subject = evaluate.load(None)
    warnings.simplefilter("ignore")  # groups that are made to fit the model's heads
    with tempfile.TemporaryDirectory() as folder:
        os.environ["KVGEN_REGISTRY_DIR"] = folder
        for name in options.formats or FORMATS:
            spec = spec_of(FORMATS[name], TARGET, works)
            layouts = {one.layout.integer("block"): layout_of(spec, one.layout) for one in schedules(spec, list(BLOCKS))}
            for block, layout in layouts.items():
                waiting = mean(n - block * residual_rows(spec, block).packed_blocks(n) for n in range(block, 2 * block))
                read = {f"bytes_{work.kv_len}": mean_bytes(spec, layout, work) // work.batch for work in works}
                rows.append({"format": name, "block": block, "residual_tokens": waiting, **read})
                points[f"{name} {block}"] = specs_of(subject, name, block)
    kl = divergence(subject, points, options.passages)
    for row, found in zip(rows, kl.values(), strict=True):
        row |= {"kl_316": f"{found[:, SHORT].mean():.4g}", f"kl_{CONTEXT}": f"{found[:, LONG].mean():.4g}"}
    about = facts("cpu", TimingPolicy())
    kept = {name: about[name] for name in ("device", "torch", "kvgen", "date")}
    write_rows("cpu_blocks", rows, {"model": subject.name, "dtype": subject.dtype, "passages": options.passages, **kept})


def specs_of(subject: evaluate.Subject, name: str, block: int) -> list[KernelSpec]:
    """The specs of the model's layers, whose kernel, from now on, has blocks of so many tokens: an entry says so."""
    form = {**formats()[MODELLED[name]], "arch": "cpu", "name": f"{name}-{block}", "attention": {"dtype": subject.dtype}}
    specs = layer_specs(subject.model.config, form, max_len=CONTEXT)
    backend = get_backend("cpu")
    for spec in set(specs):
        default = backend.default(spec, "cpu", spec.workloads[0])
        schedule = replace(default, layout=Params(default.layout, block=block))
        launches = [(work, schedule, backend.lower(spec, schedule, "cpu"), None) for work in spec.workloads]
        user_store().put(Entry.of(spec, "cpu", launches, device=here("cpu")))
        assert get_kernel(spec).layout.tokens == block
    return specs


def divergence(subject: evaluate.Subject, points: dict[str, Sequence[KernelSpec]], count: int) -> dict[str, torch.Tensor]:
    """KL divergence at every token of so many passages of each text: [passages, tokens]."""
    variants = {name: evaluate.Variant(name, evaluate.WHOLE, 16.0, subject.model, specs) for name, specs in points.items()}
    ids = torch.cat([passages(subject.tokenizer, text, count, CONTEXT, 0) for text in packaged_texts()])
    together = evaluate.fitting(subject, CONTEXT, subject.model.config.vocab_size)
    found: dict[str, list[torch.Tensor]] = {name: [] for name in variants}
    with torch.inference_mode():
        for number, part in enumerate(torch.split(ids, together)):
            figures = evaluate.language(subject.model, variants, part)
            for name, parts in found.items():
                parts.append(figures[name][:, 1])
            print(f"{min(len(ids), (number + 1) * together)} of {len(ids)} passages", flush=True)
    return {name: torch.cat(parts) for name, parts in found.items()}


if __name__ == "__main__":
    main()
