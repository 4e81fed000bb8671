"""Writes the tables of the documents from the results in benchmarks/results (the README's picture: picture.py).

    python -m benchmarks.tables

A table stands between `<!-- figures: NAME -->` and `<!-- /figures -->`; tests/unit/test_docs.py checks that it agrees with the results.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from benchmarks import generate_table, matrix_tables, plane_tables
from benchmarks.figures import ROOT, WIDTH, Row, figure, rows, table
from kvgen.pages.numbers import fraction

if TYPE_CHECKING:
    from kvgen.accuracy.row import Row as AccuracyRow

PAGES = ("performance.md", "formats.md", "accuracy.md", "matrix.md", "integrations.md")
DOCUMENTS = (ROOT / "README.md", *(ROOT / "docs" / name for name in PAGES))
MARKED = re.compile(r"(<!-- figures: ([a-z0-9-]+) -->\n).*?(<!-- /figures -->)", re.DOTALL)
SERVING = [(1, 4096), (1, 32768), (1, 131072), (8, 32768), (32, 8192), (128, 8192)]
SHAPES = {
    "plain": "plain, 8 × 32768",
    "page 256": "pages of 256 tokens",
    "page 128": "pages of 128 tokens",
    "page 64": "pages of 64 tokens, K groups of 64 (to K groups of 64)",
    "token, page 32": "K per token, pages of 32 tokens (to K per token)",
    "token, page 16": "K per token, pages of 16 tokens (to K per token)",
    "ragged, moderate": "8 sequences of 11K to 57K tokens",
    "ragged, moderate, page 128": "the same, pages of 128 tokens (to pages of 128)",
    "ragged, 2K to 16K": "32 sequences of 2K to 16K tokens (to 32 × 9216)",
    "ragged, one long": "one sequence of 128K and 63 of 1K tokens (to 8 × 24448)",
    "softcap 50": "softcap 50",
    "window 4096": "sliding window of 4096 tokens (to 8 × 4096)",
    "bfloat16": "bfloat16",
    "q_len 4": "4 query tokens",
    "group 16": "16 query heads per KV head (128/8)",
    "group 5": "5 query heads per KV head (40/8)",
}
FORMATS = {
    "kitty": "Kitty: 2 bits, 16 channels of K in 4 bits, sink 32, local 128, pages of 128; 8 × 32768",
    "kitty, 32x8192": "the same, 32 × 8192",
    "kitty pro": "Kitty Pro: 32 channels of K in 4 bits; 8 × 32768",
    "kitty pro, 32x8192": "the same, 32 × 8192",
    "V per channel, 8 bits": "8 bits, symmetric, K and V per channel; 8 × 32768",
    "V per channel, 4 bits": "4 bits, K and V per channel; 8 × 32768",
    "sink 32, local 128": "4 bits, sink 32, local 128; 8 × 32768",
    "learned sinks": "4 bits, learned sinks; 8 × 32768",
    "groups of 32": "4 bits in groups of 32; 8 × 32768",
    "groups of 32, 2 bits": "2 bits in groups of 32 (KIVI); 8 × 32768",
    "head_dim 64, 64 heads, 1x16384": "4 bits, head_dim 64, 64 query heads over 8; 1 × 16384",
    "head_dim 64, 64 heads, 16x16384": "the same, 16 × 16384",
    "head_dim 64, 64 heads, 64x4096": "the same, 64 × 4096",
    "head_dim 80": "4 bits, head_dim 80; 8 × 32768",
    "head_dim 112": "4 bits, head_dim 112; 8 × 32768",
    "K groups of 48": "4 bits, K in groups of 48 tokens; 8 × 32768",
    "K groups of 96": "4 bits, K in groups of 96 tokens; 8 × 32768",
    "head_dim 80, 2 bits": "2 bits, head_dim 80; 8 × 32768",
    "boost at head_dim 80": "2 bits, 16 channels of K in 4 bits, head_dim 80; 8 × 32768",
    "group 8, 2 bits": "2 bits, 8 query heads per KV head; 8 × 32768",
    "group 32": "4 bits, 32 query heads per KV head; 8 × 32768",
    "group 64": "4 bits, 64 query heads per KV head; 8 × 32768",
    "q_len 8": "4 bits, 8 query tokens; 8 × 32768",
    "16 bits": "16 bits; 8 × 8192",
    "16 bits, 8x32768": "the same, 8 × 32768",
    "16 bits, 32x8192": "the same, 32 × 8192",
}

LLAMA_LAYERS = 32
"""Of Llama-3.1-8B, whose heads the presets have."""


def at(found: Iterable[Row], workload: tuple[int, int]) -> list[Row]:
    """The idle-rested rows of a workload of one query token."""
    batch, kv_len = map(str, workload)
    return [r for r in found if (r["batch"], r["kv_len"], r["q_len"]) == (batch, kv_len, "1") and r["load"] in ("burst", "")]


def serving() -> str:
    """The entries that ship, by width of the codes, beside torch."""
    found = rows("h200_attend.csv")
    body = []
    for workload in SERVING:
        here = at(found, workload)
        ours = {r["spec"]: r for r in here if r["provider"] == "kvgen"}
        torch = min(float(r["us"]) for r in here if r["provider"] == "torch" and r["spec"] == "serving-kv4")
        cells = [
            f"{figure(float(ours[s]['us']))} ({fraction(float(ours[s]['read_fraction']))})"
            for s in ("serving-kv8", "serving-kv4", "serving-kv2")
        ]
        body.append([f"{workload[0]} × {workload[1]}", *cells, figure(torch)])
    return table(["batch × kv_len", "int8", "int4", "int2", "fastest torch SDPA, fp16"], body)


def summary() -> str:
    """int4 of the entries that ship, for the README."""
    found = [r for r in rows("h200_attend.csv") if r["spec"] == "serving-kv4"]
    body = []
    for workload in ((1, 32768), (8, 32768), (32, 8192), (128, 8192)):
        here = at(found, workload)
        (ours,) = (r for r in here if r["provider"] == "kvgen")
        torch = min(float(r["us"]) for r in here if r["provider"] == "torch")
        times = [f"{float(value):.0f}" for value in (ours["us"], ours["read_us"], torch)]
        body.append([f"{workload[0]} × {workload[1]}", f"**{times[0]}**", times[1], times[2], f"{torch / float(ours['us']):.1f}"])
    return table(["sequences × tokens", "kvgen, 4 bits, µs", "reading those bytes, µs", "torch, 16 bits, µs", "times as fast"], body)


def flashinfer() -> str:
    """FlashInfer over its unquantized and its fp8 cache."""
    found = [r for r in rows("h200_flashinfer.csv") if r["spec"] == "serving-kv4"]
    body = []
    for workload in SERVING:
        us = {r["backend"]: float(r["us"]) for r in at(found, workload)}
        body.append([f"{workload[0]} × {workload[1]}", *(figure(us[backend]) for backend in ("batch-decode", "batch-decode-fp8"))])
    return table(["batch × kv_len", "FlashInfer, fp16", "FlashInfer, fp8"], body)


def shapes() -> str:
    """Other caches of 4 bits, the fastest of both back ends."""
    best = {r["case"]: r for r in rows("h200_shapes.csv") if r["backend"] == "best"}
    body = []
    for case, title in SHAPES.items():
        row = best[case]
        relative = f"{float(row['relative']):.3f}".removeprefix("0") if row["relative"] else "1"
        body.append([title, figure(float(row["us"])), f"{float(row['read_fraction']):.3f}".removeprefix("0"), relative])
    return table(["case", "time, µs", "read fraction", "relative speed"], body)


def formats(gpu: str = "h200") -> str:
    """Formats beside the plain one, on CUDA: those that were measured on the GPU."""
    found = {r["case"]: r for r in rows(f"{gpu}_shapes.csv") if r["backend"] == "cuda"}
    cells = ((title, found[case]) for case, title in FORMATS.items() if case in found)
    body = [
        [
            title,
            *(figure(float(row[name])) for name in ("us", "read_us")),
            f"{float(row['read_fraction']):.3f}".removeprefix("0"),
            f"{float(row['default_ratio']):.2f}",
        ]
        for title, row in cells
    ]
    return table(["format", "time, µs", "read, µs", "read fraction", "default over it"], body)


def builds(gpu: str = "h200") -> str:
    """Winners of builds, short ones where no budget is named: read fraction by batch, and how much slower the default is."""
    found: dict[str, list[Row]] = {}
    for row in rows(f"{gpu}_builds.csv"):
        found.setdefault(row["case"] + ("" if row["budget"] == "60s" else f", {row['budget']}"), []).append(row)
    body = []
    for case, mine in found.items():
        times = ", ".join(
            f"{row['workload'].partition('q')[0].replace('x', ' × ')}: {figure(float(row['us']))} ({fraction(float(row['read_fraction']))})"
            for row in mine
        )
        body.append([case, times, f"{max(float(row['default_ratio']) for row in mine):.2f}"])
    return table(["case", "time, µs (read fraction)", "default over it, at most"], body)


def ragged(gpu: str = "h200") -> str:
    """Both back ends at unequal lengths."""
    cases = ("ragged, one long", "ragged, moderate", "ragged, 2K to 16K")
    found = {
        (row["case"], row["backend"]): [fraction(float(row[name])) for name in ("read_fraction", "relative")]
        for row in rows(f"{gpu}_shapes.csv")
        if row["case"] in cases
    }
    body = [[SHAPES[case].partition(" (")[0], *found[case, "cuda"], *found[case, "tilelang"]] for case in cases]
    return table(["int4", "CUDA", "to equal lengths", "TileLang", "to equal lengths"], body)


def plans() -> str:
    """The cost of a plan."""
    found = {(r["kernel"], r["workload"]): r["us"] for r in rows("h200_plan.csv")}
    titles = {"plan": "computing the plan, once for all layers", "advance": "advancing the lengths, once for all layers"}
    batches = ("batch 8", "batch 128", "batch 1024")
    body = [[title, *(f"{float(found[kernel, batch]):.1f}" for batch in batches)] for kernel, title in titles.items()]
    return table(["µs", *(batch.replace("batch ", "") + " sequences" for batch in batches)], body)


def cpu() -> str:
    """The CPU's kernels beside torch and ONNX Runtime: ms, and for ours the read fraction."""
    found, onnx = rows("cpu_llama31.csv"), rows("cpu_onnxruntime.csv")
    body = []
    for workload in ((1, 4096), (1, 32768)):
        here = at(found, workload)
        ours = {r["spec"]: f"**{float(r['us']) / 1000:.2f}** ({float(r['read_fraction']):.2f})" for r in here if r["provider"] == "kvgen"}
        torch = min(float(r["us"]) for r in here if r["provider"] == "torch")
        theirs = {r["backend"]: float(r["us"]) for r in at(onnx, workload)}
        others = (torch, theirs["gqa-int8"], theirs["gqa-int4"])
        formats = (ours[f"llama31-8b-kv{bits}"] for bits in (8, 4, 2))
        body.append([f"{workload[0]} × {workload[1]}", *formats, *(f"{time / 1000:.2f}" for time in others)])
    return table(["batch × kv_len", "int8", "int4", "int2", "fastest torch SDPA", "ONNX Runtime, int8", "ONNX Runtime, int4"], body)


def dots() -> str:
    """The CPUs' products in floating point and in integers, in ms of one thread's processor time, by the size of the cache's pages."""
    times = {(r["device"], r["pages"], r["spec"], r["kv_len"], r["dot"]): float(r["cpu_us"]) / 1000 for r in rows("cpu_dot.csv")}
    columns = sorted({(device, size) for device, size, *_ in times}, key=lambda column: (column[0], column[1] == "2 MB"))

    def cell(column: tuple[str, str], spec: str, length: str) -> str:
        floating, integers = (times.get((*column, spec, length, dot)) for dot in ("fp32", "int16"))
        return f"{floating:.2f} → {integers:.2f} ({floating / integers:.2f})" if floating and integers else "–"

    body = [
        [f"int{bits}, 1 × {length}", *(cell(column, f"llama31-8b-kv{bits}", length) for column in columns)]
        for bits in (8, 4, 2)
        for length in ("4096", "32768")
    ]
    return table(["cache", *(f"{device}, pages of {size}" if size else device for device, size in columns)], body)


def sizes() -> str:
    """What the presets take of memory, from their packed layouts."""
    from kvgen.reference.sizes import bits_at, bits_per_element, token_bytes
    from kvgen.spec import presets

    body = []
    for name, spec in presets().items():
        size, kept = token_bytes(spec, LLAMA_LAYERS), spec.cache.unpacked
        bits = [f"{bits_per_element(spec):.3f}", f"{bits_at(spec, 32768):.3f}"]
        body.append([f"`{name}`", *bits, f"{size / 1024:g}", f"{LLAMA_LAYERS * 8 * 128 * 4 / size:.2f}", str(kept)])
    header = ["preset", "bits per element", "at 32768 tokens", "KiB per token", "times smaller than 16 bits", "tokens kept in 16 bits"]
    return table(header, body)


def accuracy_rows() -> tuple[list[AccuracyRow], dict[str, str]]:
    """The table of accuracy that ships, and its facts."""
    from kvgen.accuracy.recommend import read_csv, results

    return read_csv(results())


def accuracy() -> str:
    """Every format at the largest length, the nearest to an unquantized cache first."""
    from kvgen.accuracy.row import longest

    body = [
        [
            f"`{row.name}`",
            f"{row.bits:.3f}",
            f"{1000 * row.divergence:.3g} ± {1000 * row.divergence_error:.2g}",
            f"{100 * row.increase:+.3f} ± {100 * row.increase_error:.3f}",
            f"{100 * row.agreement:.2f}",
            f"{row.normal_l2:.4f}",
            f"{row.structured_l2:.4f}",
            f"{row.structured_weights_l1:.4f}",
            "–" if row.step_us is None else figure(row.step_us),
        ]
        for row in sorted(longest(accuracy_rows()[0]), key=lambda row: row.divergence)
    ]
    header = [
        "format",
        "bits",
        "divergence, 10⁻³ nats",
        "perplexity, %",
        "same top token, %",
        "normal: L2",
        "structured: L2",
        "weights L1",
    ]
    return table([*header, "attention at 8 × 32768, µs"], body)


def orders() -> str:
    """The papers' orders."""
    from kvgen.accuracy.orders import orders as judged

    return table(
        ["claim", "measured (divergence in 10⁻³ nats)", "result"],
        [[one.claim, one.measured, one.result] for one in judged(accuracy_rows()[0])],
    )


def accuracy_source() -> str:
    """Machine, model and date of the table of accuracy."""
    from kvgen.accuracy.row import longest

    rows, facts = accuracy_rows()
    row = longest(rows)[0]
    text = (
        f"{facts['device']}, {facts['date']}, torch {facts['torch']}: the {facts['model']} model at {row.length} tokens, where its"
        f" perplexity with a cache of 16 bits is {row.unquantized_perplexity:.2f}. The widest channel of a head of K has"
        f" {facts['outliers_trained']} times the range of the median one as trained, and {facts['outliers']} times as evaluated"
        f" ([multiplied by {facts['outlier_factor']}](#outlier-channels))."
    )
    return textwrap.fill(text, WIDTH) + "\n"


TABLES: dict[str, Callable[[], str]] = {
    "serving": serving, "summary": summary, "flashinfer": flashinfer, "shapes": shapes, "formats": formats, "builds": builds,
    "ragged": ragged, "formats-h100": lambda: formats("h100"), "builds-h100": lambda: builds("h100"), "ragged-h100": lambda: ragged("h100"),
    "plans": plans, "generate": generate_table.generate, "generate-summary": generate_table.summary, "cpu": cpu, "dots": dots,
    "preset-sizes": sizes, "accuracy": accuracy, "orders": orders, "accuracy-source": accuracy_source,
    "matrix-quantize": lambda: matrix_tables.speed("quantize"), "matrix-dequantize": lambda: matrix_tables.speed("dequantize"),
    "matrix-bandwidth": matrix_tables.bandwidth, "matrix-paper": matrix_tables.paper,
    "regrets": plane_tables.regrets, "traffic": plane_tables.traffic, "regrets-h100": plane_tables.transferred,
    "traffic-h100": plane_tables.traffic_of_transferred, "regrets-builds": plane_tables.regrets_of_builds,
    "untuned": plane_tables.untuned, "of-defaults": plane_tables.of_defaults,
}  # fmt: skip


def filled(text: str) -> str:
    """A document's text with its tables as the results have them."""
    return MARKED.sub(lambda mark: f"{mark[1]}\n{TABLES[mark[2]]()}\n{mark[3]}", text)


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(filled(document.read_text()))
