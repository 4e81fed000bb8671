"""The table of `gpu_generate`'s results in docs/integrations.md."""

from __future__ import annotations

from benchmarks.figures import Row, rows, table

CACHES = {
    "graph16": "16 bits, the same loop", "int8": "int8", "int4": "int4", "int4:equal": "int4, equal lengths promised",
    "kitty": "Kitty", "int2": "int2", "dynamic": "`DynamicCache`", "static": "`StaticCache`", "quantized": "`QuantizedCache`, 4 bits",
}  # fmt: skip
"""Caches of a decoding model, as a table names and orders them."""


def generate() -> str:
    """Steps of a decoding model, and where their time goes: the rows of each case, which the loop over 16 bits begins."""
    cases: list[list[Row]] = []
    for row in rows("h200_generate.csv"):
        if row["loop"] == "graph16":
            cases.append([])
        if row["ms"]:
            cases[-1].append(row)
    body = []
    for case in cases:
        rival = float(case[0]["tokens_per_second"])
        for row in sorted(case, key=lambda row: list(CACHES).index(row["loop"])):
            rate = float(row["tokens_per_second"])
            parts = [f"{float(row[part]):.2f}" if row[part] else "–" for part in ("attention_ms", "weights_ms", "rest_ms", "bytes_ms")]
            size = f"{row['batch']} × {row['tokens']}"
            body.append([size, CACHES[row["loop"]], f"{float(row['ms']):.2f}", f"{rate:.0f}", f"{rate / rival:.2f}", *parts])
    return table(["batch × tokens", "cache", "step", "tokens per second", "× 16 bits", "attention", "weights", "rest", "bytes"], body)
