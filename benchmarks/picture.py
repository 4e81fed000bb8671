"""Draws the pictures of the pages from benchmarks/results: time per call, and per token of a model, beside 16 bits and others.

python -m benchmarks.picture
"""

from __future__ import annotations

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.tables import ROOT, attend, fastest, frame, pareto, steps
from kvgen.results import fraction

PICTURES = ROOT / "docs" / "pictures"
OURS, OTHERS = "#1f5fc4", "#6b7280"
PALE = 0.35
"""Opacity of what a bar takes beyond the read."""


def count(value: int) -> str:
    """A number of tokens in units of 1024 or 1024², where it is a multiple: 32K."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if value and value % size == 0:
            return f"{value // size}{unit}"
    return f"{value}"


def bars(axes: Axes, rows: pd.DataFrame, title: str, unit: str) -> None:
    """Horizontal bars, the slowest first: `time` pale, `read` of it solid, by `name`; `ours` in color."""
    rows = rows.sort_values("time")
    color = [OURS if ours else OTHERS for ours in rows.ours]
    axes.barh(rows.name, rows.time, color=color, alpha=PALE)
    axes.barh(rows.name, rows.read, color=color)
    for place, row in enumerate(rows.itertuples()):
        part = f" ({fraction(row.read / row.time)})" if row.read else ""
        axes.text(row.time, place, f" {row.time:.3g} {unit}{part}", va="center")
    axes.set_title(title, loc="left", fontweight="bold", fontsize=11)
    axes.set_xlim(0, 1.3 * rows.time.max())
    axes.xaxis.set_visible(False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def save(figure: Figure, name: str, title: str, note: str) -> None:
    """Write the picture as an SVG file that depends on the figures alone."""
    figure.suptitle(f"{title}\n{note}", x=0.01, ha="left", fontsize=10)
    figure.savefig(PICTURES / f"{name}.svg", metadata={"Date": None})


def decode(name: str, columns: int) -> None:
    """One attention call beside torch and FlashInfer."""
    found, shown = attend("h200_attend.csv"), ((1, 32768), (8, 32768))
    figure = Figure(figsize=(5.4 * columns, 5.8 / columns + 0.6), layout="constrained")
    for axes, (batch, tokens) in zip(figure.subplots(len(shown) // columns, columns, squeeze=False).flat, shown, strict=True):
        here = found.loc[[(batch, tokens)]]
        ours = {f"kvgen int{bits}": fastest(here, provider="kvgen", spec=f"serving-kv{bits}") for bits in (8, 4, 2)}
        backends = {"FlashInfer fp16": "batch-decode", "FlashInfer fp8": "batch-decode-fp8"}
        others = {one: fastest(here, provider="flashinfer", backend=backend) for one, backend in backends.items()}
        others["torch fp16"] = fastest(here, provider="torch", spec="serving-kv4")
        rows = [(one, row.us, row.read_us, one in ours) for one, row in (ours | others).items()]
        gain = others["torch fp16"].us / ours["kvgen int4"].us
        title = f"{batch} × {count(tokens)} tokens: int4 {gain:.1f} times as fast as torch"
        bars(axes, pd.DataFrame(rows, columns=["name", "time", "read", "ours"]), title, "µs")
    note = "Solid: reading the cache alone, and its share.\nNVIDIA H200, the heads of Llama-3.1-8B."
    save(figure, name, "Time of one attention call while decoding", note)


def generate() -> None:
    """Decode steps of a model, per token: each format at the batch of 16 bits, and in the last panel at its own largest batch."""
    every, panels = frame("h200_generate.csv").dropna(subset="ms"), steps()
    figure = Figure(figsize=(6.4, 2.2 * len(panels) + 0.6), layout="constrained")
    for axes, case in zip(figure.subplots(len(panels), 1), panels, strict=True):
        baseline = case.iloc[0]
        shown = case[~case.loop.isin(["dynamic", "static", "quantized", "int4:equal"])]
        largest = shown.sort_values("batch").drop_duplicates("loop", keep="last")
        names = ["16 bits" if loop == "graph16" else f"kvgen {loop}" for loop in largest.loop]
        rows = pd.DataFrame({
            "name": [f"{name}, batch {batch}" for name, batch in zip(names, largest.batch, strict=True)],
            "time": largest.ms / largest.batch, "read": largest.bytes_ms.astype(float) / largest.batch, "ours": largest.loop != "graph16",
        })  # fmt: skip
        gain = baseline.ms / baseline.batch / rows[rows.name.str.startswith("kvgen int4")].time.iloc[0]
        own = largest.batch.nunique() > 1
        where = f"Largest batches of {count(baseline.tokens)}" if own else f"{baseline.batch} × {count(baseline.tokens)} tokens"
        bars(axes, rows, f"{where}: int4 {gain:.2f} times as fast as 16 bits", "ms")
    note = f"Step over batch. Solid: reading weights and cache once.\n{every.device.iloc[0]}, Llama-3.1-8B's shape, {every.dtype.iloc[0]}."
    save(figure, "generate", "Time per token of a decoding model", note)


def quality() -> None:
    """KL divergence of every format over its size, those that no other beats joined by a line."""
    found = pareto()
    found = found[found["size"] < found["size"].max()]  # 16 bits cost nothing, which has no logarithm
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    best = found[found.best]
    axes.plot(best["size"], best.kl, color=OURS, alpha=PALE)
    axes.scatter(found["size"], found.kl, color=[OURS if good else OTHERS for good in found.best], s=24)
    for name, row in found.iterrows():
        time = "" if pd.isna(row.us) else f", {row.us:.0f} µs"
        axes.annotate(f"{name}{time}", (row["size"], row.kl), xytext=(5, 3), textcoords="offset points", fontsize=8)
    axes.set_yscale("log")
    axes.set_xlim(right=1.25 * found["size"].max())
    axes.set_xlabel("KiB per token of Llama-3.1-8B (16 bits: 128)")
    axes.set_ylabel("KL divergence, nats (SmolLM2-135M)")
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, "quality", "What a format costs in quality, and what it takes", "µs: an attention call at 8 × 32K on an NVIDIA H200.")


if __name__ == "__main__":
    mpl.rcParams.update({"svg.hashsalt": "kvgen", "svg.fonttype": "none", "font.size": 10})
    PICTURES.mkdir(exist_ok=True)
    decode("decode", 2)
    decode("decode-narrow", 1)
    generate()
    quality()
