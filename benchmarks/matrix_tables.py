"""The tables of the INT8 matrix kernels in docs/matrix.md."""

from __future__ import annotations

from benchmarks.figures import figure, rows, table
from kvgen.pages.numbers import fraction

VARIANTS = ("naive", "tiled", "coarsened", "vectorized", "kvgen")


def speed(call: str) -> str:
    """A call of the operations on a matrix: the paper's kernels and kvgen's as fractions of a copy's speed."""
    found = {(r["tokens"], r["channels"], r["variant"]): r for r in rows("h200_int8.csv") if r["call"] == call}
    body = []
    for tokens, channels in dict.fromkeys(key[:2] for key in found):
        here = {name: found[tokens, channels, name] for name in VARIANTS}
        times = [figure(float(here["kvgen"][column])) for column in ("us", "roofline_us")]
        body.append([f"{tokens} × {channels}", *(fraction(float(row["fraction"])) for row in here.values()), *times])
    return table([f"{call}, tokens × channels", *VARIANTS, "kvgen, µs", "copy, µs"], body)


def bandwidth() -> str:
    """Bandwidths at the largest shape, by what is read and written."""
    found = {(r["call"], r["variant"]): r for r in rows("h200_int8.csv") if r["shape"] == "realistic very large"}
    read, codes, back = (found[call, "kvgen"] for call in ("scales", "quantize", "dequantize"))
    kinds = [
        ("pure read (the roofline of `scales`)", "nothing is written", read, "roofline_us"),
        ("`quantize`", "4", codes, "us"),
        ("`dequantize`", "1/4", back, "us"),
        ("copy", "1", codes, "roofline_us"),
    ]
    body = [[title, ratio, f"{float(row['nbytes']) / float(row[column]) / 1e6:.2f}"] for title, ratio, row, column in kinds]
    return table(["131072 × 8192", "bytes read for each byte written", "TB/s"], body)


def paper() -> str:
    """What the text of the INT8 paper gives, beside the same on an H200."""
    from kvgen.bench import int8_paper

    found = {(r["shape"], r["call"], r["variant"]): float(r["us"]) for r in rows("h200_int8.csv")}
    calls, realistic = ("quantize", "dequantize"), [name for name, *_ in int8_paper.SHAPES if name.startswith("realistic")]
    largest, shape = realistic[-1], "131072x8192"
    vectorized = int8_paper.vectorized_ms(shape)
    assert vectorized is not None
    single = next(name for name in reversed(realistic) if (name, "quantize", "kvgen, 1 thread") in found)
    at = {name: f"{tokens} × {channels}" for name, tokens, channels in int8_paper.SHAPES}
    ours, spans, factors = [], [], []
    for call in calls:
        times = [found[name, call, variant] / 1e3 for name in realistic for variant in VARIANTS[:4]]
        ours.append(f"{call} {found[largest, call, 'vectorized'] / 1e3:.2f} ms")
        spans.append(f"{call} {min(times):.2f} to {max(times):.2f} ms")
        factors.append(f"{call} {found[single, call, 'kvgen, 1 thread'] / found[single, call, 'vectorized']:.0f}")
    low, high = int8_paper.REALISTIC_MS
    body = [
        [f"the vectorized kernel at {at[largest]}", f"{vectorized:.1f} ms", ", ".join(ours)],
        ["the paper's four kernels over its realistic shapes (from 131072 × 1024 up)", f"{low:g} to {high:g} ms", ", ".join(spans)],
        [
            "time of one CPU thread over that of the vectorized kernel (the larger shape was cut off here)",
            f"{int8_paper.SPEEDUP[shape]:.0f} at {at[largest]}",
            f"at {at[single]}: {', '.join(factors)}",
        ],
    ]
    return table(["", "the paper: Tesla T4, Xeon Gold 6148", "NVIDIA H200, its host's Xeon"], body)
