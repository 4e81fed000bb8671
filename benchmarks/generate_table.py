"""The table of `gpu_generate`'s results in docs/integrations.md."""

from __future__ import annotations

import textwrap

from benchmarks.figures import WIDTH, Row, rows, table
from benchmarks.generate_parts import PARTS, parts

CACHES = {
    "graph16": "16 bits, captured", "int8": "int8", "int4": "int4", "int4:equal": "int4, equal lengths promised",
    "kitty": "Kitty", "int2": "int2", "dynamic": "`DynamicCache`", "static": "`StaticCache`", "quantized": "`QuantizedCache`, 4 bits",
}  # fmt: skip
"""Caches of a decoding model, as a table names and orders them."""


def cases() -> list[list[Row]]:
    """The rows with a time of each case; the loop over 16 bits begins a case, which counts if that loop has a time."""
    found: list[list[Row]] = []
    for row in rows("h200_generate.csv"):
        if row["loop"] == "graph16":
            found.append([])
        found[-1].append(row)
    return [[row for row in case if row["ms"]] for case in found if case[0]["ms"]]


def generate() -> str:
    """Steps of a decoding model, and where their time goes."""
    kernels, body = rows("h200_generate_kernels.csv"), []
    for case in cases():
        baseline = float(case[0]["tokens_per_second"])
        for row in sorted(case, key=lambda row: list(CACHES).index(row["loop"])):
            rate = float(row["tokens_per_second"])
            mine = parts(kernel for kernel in kernels if all(kernel[name] == row[name] for name in ("loop", "batch", "tokens")))
            spent = [*(mine.get(part, "") for part in PARTS), row["bytes_ms"]]
            size = f"{row['batch']} × {row['tokens']}"
            body.append(
                [
                    size,
                    CACHES[row["loop"]],
                    f"{float(row['ms']):.2f}",
                    f"{rate:.0f}",
                    f"{rate / baseline:.2f}",
                    *(f"{float(ms):.2f}" if ms else "–" for ms in spent),
                ]
            )
    return table(
        ["batch × tokens", "cache", "step", "tokens per second", "times 16 bits", "attention", "weights", "rest", "read once"], body
    )


def summary() -> str:
    """What int4 gains over 16 bits, in a sentence: each case, the last one with the largest batches."""
    told = []
    for case in cases():
        baseline, best = case[0], max((row for row in case if row["loop"] == "int4"), key=lambda row: int(row["batch"]))
        gain = f"{float(best['tokens_per_second']) / float(baseline['tokens_per_second']):.2f} times"
        size = f"{baseline['batch']} × {baseline['tokens']}"
        told.append(gain + (f" ({size})" if best["batch"] == baseline["batch"] else ""))
        facts = f"{baseline['device']}, {baseline['date']}"
    text = (
        f"In a whole model of Llama-3.1-8B's shape ({facts}, `benchmarks/gpu_generate.py`), with every decode step in one CUDA graph,"
        " a cache of 4 bits generates"
        f" {' and '.join(told[:-1])} as many tokens per second as one of 16 bits with torch's fastest attention kernel. With as many"
        f" sequences of {baseline['tokens']} tokens as fit into memory ({best['batch']} in place of {baseline['batch']}), it is {told[-1]}"
        " ([docs/integrations.md](docs/integrations.md#speed))."
    )
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False) + "\n"
