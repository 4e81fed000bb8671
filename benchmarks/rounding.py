"""What outputs are off beyond their format, where one channel of K is 12 times as large as the others.

    python -m benchmarks.rounding [CASE…] [--device cpu]

For every format and type: a decode step and extend attention (16 query tokens) against fp64 attention over the dequantized cache, beside
torch's attention over a 16-bit cache that holds the same K and V after rounding, against fp64 over that. Relative L2 errors, and those of
the worst row, the largest of three seeds. Writes $OUT (or benchmarks/results)/DEVICE_rounding.csv, after every case, a format and a type;
rows of cases that are not named stay as benchmarks/results has them.
"""

from __future__ import annotations

import warnings
from datetime import datetime, timezone
from typing import Any

import pandas as pd
import torch

from benchmarks.common import RESULTS, gpu_word, parser, write_rows
from kvgen import KernelSpec, get_kernel
from kvgen.registry.entry import here
from kvgen.spec import load_spec
from kvgen.verify.data import normal
from kvgen.verify.reference import WholeSequences, attend

FORMATS: dict[str, dict[str, Any]] = {
    "K 8 bits, V 4 bits": {"preset": "bitdecoding-int4", "key": {"bits": 8}},
    "int8": {"preset": "turbomind-int8"},
    "int4": {"preset": "bitdecoding-int4"},
}
BATCH, TOKENS, SEEDS, OUTLIER, QUERIES = 4, 2048, 3, 12.0, (1, 16)
Errors = tuple[float, float]


def errors(out: torch.Tensor, want: torch.Tensor) -> Errors:
    """Relative L2 of all rows, and of the worst."""
    off, size = (out.double() - want).norm(dim=-1), want.norm(dim=-1)
    return float(off.norm() / size.norm()), float((off / size).max())


def measured(spec: KernelSpec, device: str, q_len: int, factor: float) -> tuple[Errors, Errors]:
    """Of kvgen, and of torch over 16 bits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing is tuned
        kernel = get_kernel(spec)
    found: list[tuple[Errors, Errors]] = []
    for seed in range(SEEDS):
        inputs = normal(spec, BATCH, TOKENS, q_len=q_len, seed=seed)
        inputs.k[..., 5] *= factor
        q, k, v = (x.to(device) for x in (inputs.q, inputs.k, inputs.v))
        cache = kernel.new_cache(BATCH, TOKENS, device=device)
        kernel.prefill(cache, k, v)
        lengths = [TOKENS] * BATCH
        held = WholeSequences(spec, cache.block_tokens, k, v).seen(lengths)
        want, rounded = attend(q, *held)[0], tuple(x.to(q.dtype) for x in held)
        visible = torch.ones(q_len, TOKENS, dtype=torch.bool, device=device).tril(TOKENS - q_len)
        q_, k_, v_ = (x.transpose(1, 2) for x in (q, *rounded))
        plain = torch.nn.functional.scaled_dot_product_attention(q_, k_, v_, visible, enable_gqa=True).transpose(1, 2)
        found.append((errors(kernel.attend(q, cache), want), errors(plain, attend(q, *rounded)[0])))
    mine, plain16 = ((max(error for error, _ in one), max(row for _, row in one)) for one in zip(*found, strict=True))
    return mine, plain16


def main() -> None:
    """Measure, print and write."""
    cases = {f"{name}, {dtype}": (name, dtype) for name in FORMATS for dtype in ("float16", "bfloat16")}
    command = parser(__doc__)
    command.add_argument("cases", nargs="*", metavar="CASE", help="; ".join(cases))
    command.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    options = command.parse_args()
    if unknown := set(options.cases) - set(cases):
        command.error(f"there is no {min(unknown)!r}")
    device, chosen = options.device, options.cases or list(cases)
    file = f"{'cpu' if device == 'cpu' else gpu_word()}_rounding"
    present = RESULTS / f"{file}.csv"
    kept = pd.read_csv(present, keep_default_na=False).to_dict("records") if present.exists() else []
    rows = {name: [row for row in kept if (row["format"], row["dtype"]) == case] for name, case in cases.items() if name not in chosen}
    machine = here("cpu" if device == "cpu" else "sm90")
    about = {"device": machine["name"], "driver": machine.get("driver", ""), "date": datetime.now(timezone.utc).date().isoformat()}
    attention = {"q_heads": 32, "kv_heads": 8, "head_dim": 128}
    for name in chosen:
        label, dtype = cases[name]
        arch, rows[name] = "cpu" if device == "cpu" else "native", []
        spec = load_spec({**FORMATS[label], "name": "rounding", "arch": arch, "attention": {**attention, "dtype": dtype}})
        for q_len in QUERIES:
            for factor in (1.0, OUTLIER):
                (mine, worst), (plain, plain_worst) = measured(spec, device, q_len, factor)
                row = {"format": label, "dtype": dtype, "queries": q_len, "outlier": factor, "error": mine, "row": worst}
                rows[name].append({**row, "error16": plain, "row16": plain_worst, **about})
                print(*(f"{x:.1e}" if isinstance(x, float) else x for x in row.values()), f"{plain:.1e} {plain_worst:.1e}", flush=True)
        write_rows(file, [row for case in cases for row in rows.get(case, [])], {})


if __name__ == "__main__":
    main()
