"""Writes the tables of the pages from the results in benchmarks/results. The pictures: picture.py.

    python -m benchmarks.tables

A table stands between `<!-- figures: NAME -->` and `<!-- /figures -->`; tests/unit/test_docs.py checks that it agrees with the results.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import geometric_mean

import pandas as pd

from kvgen.results import fraction

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("performance.md", "linear.md", "cpu.md", "formats.md", "accuracy.md", "matrix.md", "integrations.md", "numerics.md", "tuning.md")
DOCUMENTS = (ROOT / "README.md", *(ROOT / "docs" / name for name in PAGES))
MARKED = re.compile(r"(<!-- figures: ([a-z0-9-]+) -->\n).*?(<!-- /figures -->)", re.DOTALL)
WIDTH = 130
"""Characters of a line of prose."""
LLAMA_LAYERS = 32
"""Of Llama-3.1-8B, whose heads the presets have."""
CACHES = {
    "graph16": "16 bits, captured", "int8": "int8", "int4": "int4",
    "kitty": "Kitty", "int2": "int2", "dynamic": "`DynamicCache`", "static": "`StaticCache`", "quantized": "`QuantizedCache`, 4 bits",
}  # fmt: skip
"""Caches of a decoding model, as a table names and orders them."""
ENGINES = {
    "auto": "16 bits", "fp8": "fp8", "16": "16 bits, kvgen", "int8": "`turbomind-int8`", "e4m3": "`fp8-e4m3`", "saw-int4": "`saw-int4`",
    "int4": "`turbomind-int4`", "int2": "`bitdecoding-int2`",
}  # fmt: skip
"""Caches inside vLLM (vllm_steps.py), as a table names and orders them."""
STORED = {"": "", "+w4": ", weights of 4 bits"}
"""What may follow the name of one of them."""
DRAFTS = {
    "one by one": "none, prompts one by one", "drafts, ngram": "n-grams", "drafts, draft_model": "the model itself",
    "drafts, eagle": "an EAGLE head of random weights",
}  # fmt: skip
"""Cases of vllm_steps.py --speculate."""
TRACES = {"trace": "42 GiB", "trace, less memory": "36 GiB"}
"""Traces of vllm_steps.py by the memory that vLLM may take: `--memory` of 140 GiB."""
VARIANTS = ("naive", "tiled", "coarsened", "vectorized", "kvgen")
"""Kernels of operations on a matrix: the INT8 paper's, and ours."""
SHAPES = {
    "plain": "int4",
    "8 bits": "int8",
    "2 bits": "int2",
    "K 8 bits, V 4 bits": "K 8 bits, V 4 bits",
    "K 4 bits, V 2 bits": "K 4 bits, V 2 bits",
    "page 256": "pages of 256 tokens",
    "page 128": "pages of 128 tokens",
    "page 64": "pages of 64 tokens, K in groups of 64",
    "token": "K per token",
    "token, page 16": "K per token, pages of 16 tokens",
    "V per channel, 8 bits": "int8, symmetric, K and V per channel",
    "V per channel, 4 bits": "K and V per channel",
    "groups of 32": "groups of 32",
    "groups of 32, 2 bits": "int2 in groups of 32 (KIVI)",
    "kitty": "Kitty: int2, 16 channels of K in 4 bits, sink 32, local 128, pages of 128",
    "kitty, 32x8192": "the same, 32 × 8192",
    "kitty pro": "Kitty Pro: 32 channels of K in 4 bits",
    "kitty pro, 32x8192": "the same, 32 × 8192",
    "sink 32, local 128": "sink 32, local 128",
    "learned sinks": "learned sinks",
    "softcap 50": "soft cap 50",
    "window 4096": "sliding window of 4096 tokens",
    "bfloat16": "bfloat16",
    "q_len 4": "4 query tokens",
    "q_len 8": "8 query tokens",
    "group 5": "5 query heads per KV head",
    "group 16": "16 query heads per KV head",
    "group 32": "32 query heads per KV head",
    "group 64": "64 query heads per KV head",
    "group 8, 2 bits": "int2, 8 query heads per KV head",
    "head_dim 64, 64 heads, 1x16384": "head_dim 64, 64 query heads over 8, 1 × 16384",
    "head_dim 64, 64 heads, 16x16384": "the same, 16 × 16384",
    "head_dim 64, 64 heads, 64x4096": "the same, 64 × 4096",
    "head_dim 80": "head_dim 80",
    "head_dim 80, 2 bits": "int2, head_dim 80",
    "head_dim 112": "head_dim 112",
    "16 bits": "16 bits, 8 × 8192",
    "16 bits, 32x8192": "16 bits, 32 × 8192",
    "int8, per token": "int8, K per token",
    "int8, per token, 32x8192": "the same, 32 × 8192",
    "int4, per token": "int4, K per token",
    "int4, per token, 32x8192": "the same, 32 × 8192",
    "e4m3, per token": "e4m3, per token",
    "e4m3, per token, 32x8192": "the same, 32 × 8192",
    "e5m2, per token": "e5m2, per token",
    "e5m2, per token, 32x8192": "the same, 32 × 8192",
    "K e4m3, V int4": "K e4m3, V int4",
    "K e4m3, V int4, 32x8192": "the same, 32 × 8192",
    "saw-int4": "saw-int4",
    "saw-int4, 32x8192": "the same, 32 × 8192",
    "int4, rotated": "int4, per token, K and V rotated",
    "int4, rotated, 32x8192": "the same, 32 × 8192",
    "nvfp4": "nvfp4",
    "nvfp4, 32x8192": "the same, 32 × 8192",
    "nvfp4, static per tensor": "nvfp4 with a scale per tensor",
    "nvfp4, static per tensor, 32x8192": "the same, 32 × 8192",
    "mxfp4": "mxfp4",
    "mxfp4, 32x8192": "the same, 32 × 8192",
    "int4, on arrival": "int4, per token, in pages of 16, quantized on arrival",
    "int4, on arrival, 32x8192": "the same, 32 × 8192",
    "e4m3, static per tensor": "e4m3, static scale per tensor",
    "ragged, moderate": "8 sequences of 11K to 57K tokens",
    "ragged, moderate, 8 bits": "the same, int8",
    "ragged, moderate, 2 bits": "the same, int2",
    "ragged, 2K to 16K": "32 sequences of 2K to 16K tokens",
    "ragged, one long": "one sequence of 128K tokens and 63 of 1K",
}
"""Cases of gpu_shapes.py, as a table names and orders them."""


def frame(name: str) -> pd.DataFrame:
    """The rows of a file of results."""
    return pd.read_csv(RESULTS / name, keep_default_na=False, na_values={column: [""] for column in ("us", "ms")})


def table(header: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def figure(value: float) -> str:
    """Three significant digits, as many as a time is good for."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def size(batch: int, tokens: int) -> str:
    """A workload, as a table names it."""
    return f"{batch} × {tokens}"


def attend(name: str) -> pd.DataFrame:
    """Rested rows of `kvgen bench` with equal lengths and one query token, by workload."""
    found = frame(name)
    return found[(found.q_len == 1) & found.load.isin(["burst", ""])].set_index(["batch", "kv_len"]).sort_index(kind="stable")


def fastest(found: pd.DataFrame, **wanted: str) -> pd.Series:
    """The fastest row that has these values."""
    for column, value in wanted.items():
        found = found[found[column] == value]
    return found.sort_values("us").iloc[0]


def timed(row: pd.Series) -> str:
    """µs and read fraction."""
    return f"{figure(row.us)} ({fraction(row.read_fraction)})"


def serving() -> str:
    """The entries that ship, by width of the codes, beside torch and FlashInfer."""
    found, body = attend("h200_attend.csv"), []
    for batch, tokens in ((1, 4096), (1, 32768), (1, 131072), (8, 32768), (32, 8192), (128, 8192)):
        here = found.loc[[(batch, tokens)]]
        ours = [timed(fastest(here, provider="kvgen", spec=f"serving-kv{bits}")) for bits in (8, 4, 2)]
        flash = [fastest(here, provider="flashinfer", spec="serving-kv4", backend=name) for name in ("batch-decode", "batch-decode-fp8")]
        others = [fastest(here, provider="torch", spec="serving-kv4"), *flash]
        body.append([size(batch, tokens), *ours, *(figure(row.us) for row in others)])
    return table(["batch × kv_len", "int8", "int4", "int2", "fastest torch SDPA, fp16", "FlashInfer, fp16", "FlashInfer, fp8"], body)


def summary() -> str:
    """int4 of the entries that ship, for the README."""
    found, body = attend("h200_attend.csv"), []
    for batch, tokens in ((1, 32768), (8, 32768), (32, 8192), (128, 8192)):
        here = found.loc[[(batch, tokens)]]
        ours, torch = (fastest(here, provider=name, spec="serving-kv4") for name in ("kvgen", "torch"))
        times = [f"{value:.0f}" for value in (ours.us, ours.read_us, torch.us)]
        body.append([size(batch, tokens), f"**{times[0]}**", times[1], times[2], f"{torch.us / ours.us:.1f}"])
    return table(["sequences × tokens", "kvgen, 4 bits, µs", "reading those bytes, µs", "torch, 16 bits, µs", "times as fast"], body)


def shapes() -> str:
    """Formats and shapes by GPU and back end, and how much slower CUDA's default is than its fastest schedule."""
    found = {(gpu, row.backend, row.case): row for gpu in ("h200", "h100") for row in frame(f"{gpu}_shapes.csv").itertuples()}
    body = []
    for case, title in SHAPES.items():
        rows = [found.get((gpu, backend, case)) for gpu in ("h200", "h100") for backend in ("cuda", "tilelang")]
        slower = f"{float(rows[0].default_us) / rows[0].us:.2f}"
        body.append([title, *("–" if row is None else timed(row) for row in rows), slower])
    return table(["cache", "H200, CUDA", "H200, TileLang", "H100, CUDA", "H100, TileLang", "CUDA's default over it"], body)


def extend() -> str:
    """Many query tokens over int4: the two routes of `PagedCalls.attend`, and torch's fastest kernel over 16 bits."""
    found = frame("h200_extend.csv").set_index(["case", "spec"])
    body = []
    for case in dict.fromkeys(found.index.get_level_values("case")):
        rows = [row for _, row in found.loc[case].iterrows()]
        routes = [row.kvgen_us if column == "passes_us" and row[column] == "" else row[column] for row in rows for column in ROUTES]
        body.append([case.replace("x", " × "), *("–" if us == "" else figure(float(us)) for us in (*routes, rows[0].torch_us))])
    arrival, residual = ("quantized on arrival", "with a residual")
    columns = [f"{name}, {route}" for name in (arrival, residual) for route in ("passes", "dequantized")]
    return table(["sequences × queries × tokens", *columns, "torch, 16 bits"], body)


def plans() -> str:
    """The cost of a plan."""
    found = frame("h200_plan.csv").set_index(["kernel", "batch"]).us
    titles = {"plan": "computing the plan, once for all layers", "advance": "advancing the lengths, once for all layers"}
    batches = (8, 128, 1024)
    body = [[title, *(f"{found[kernel, batch]:.1f}" for batch in batches)] for kernel, title in titles.items()]
    return table(["µs", *(f"{batch} sequences" for batch in batches)], body)


def cpu() -> str:
    """The CPU's kernels beside torch: ms, and for ours the read fraction."""
    found, body = attend("cpu_attend.csv"), []
    for batch, tokens in ((1, 4096), (1, 32768)):
        here = found.loc[[(batch, tokens)]]
        ours = [fastest(here, provider="kvgen", spec=f"llama31-8b-kv{bits}") for bits in (8, 4, 2)]
        told = [f"**{row.us / 1000:.2f}** ({row.read_fraction:.2f})" for row in ours]
        body.append([size(batch, tokens), *told, f"{fastest(here, provider='torch').us / 1000:.2f}"])
    return table(["batch × kv_len", "int8", "int4", "int2", "fastest torch SDPA"], body)


def overhead() -> str:
    """What the host takes around a kernel."""
    found = frame("overhead.csv")
    times = [f"{us / 1e3:.0f} ms" if us >= 1e3 else f"{us:.1f} µs" for us in found.us]
    return table(["step", "time"], zip(found.what, times, strict=True))


def steps() -> list[pd.DataFrame]:
    """Decode steps of a model with a time, by case: the loop over 16 bits begins one, which counts if that loop has a time."""
    found = frame("h200_generate.csv")
    cases = [case for _, case in found.groupby((found.loop == "graph16").cumsum()) if pd.notna(case.ms.iloc[0])]
    return [case[case.ms.notna()] for case in cases]


def generate() -> str:
    """Steps of a decoding model, and where their time goes."""
    body = []
    for case in steps():
        baseline = case.tokens_per_second.iloc[0]
        for row in case.sort_values("loop", key=lambda loops: loops.map(list(CACHES).index), kind="stable").itertuples():
            spent = [f"{float(ms):.2f}" if ms != "" else "–" for ms in (row.attention_ms, row.weights_ms, row.rest_ms, row.bytes_ms)]
            rate = row.tokens_per_second
            told = [f"{row.ms:.2f}", f"{float(rate):.0f}", f"{float(rate) / float(baseline):.2f}"]
            body.append([size(row.batch, row.tokens), CACHES[row.loop], *told, *spent])
    return table(
        ["batch × tokens", "cache", "step", "tokens per second", "times 16 bits", "attention", "weights", "rest", "read once"], body
    )


def generate_summary() -> str:
    """What int4 gains over 16 bits, in a sentence: each case, the last one with the largest batches."""
    told = []
    for case in steps():
        baseline, best = case.iloc[0], case[case.loop == "int4"].sort_values("batch").iloc[-1]
        gain = f"{float(best.tokens_per_second) / float(baseline.tokens_per_second):.2f} times"
        told.append(gain + (f" ({size(baseline.batch, baseline.tokens)})" if best.batch == baseline.batch else ""))
    text = (
        f"In a whole model of Llama-3.1-8B's shape ({baseline.device}, {baseline.date}, `benchmarks/gpu_generate.py`), with every"
        " decode step in one CUDA graph, a cache of 4 bits generates"
        f" {' and '.join(told[:-1])} as many tokens per second as one of 16 bits with torch's fastest attention kernel. With as many"
        f" sequences of {baseline.tokens} tokens as fit into memory ({best.batch} in place of {baseline.batch}), it is {told[-1]}"
        " ([docs/integrations.md](docs/integrations.md#speed))."
    )
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False) + "\n"


def inside_vllm(case: str) -> pd.DataFrame:
    """Rows of a case, and `times`: their tokens per second over those of vLLM's own cache of 16 bits."""
    found = frame("h200_vllm.csv")
    found = found[(found["case"] == case) & (found.tokens_per_s != "")].set_index("engine")
    names = {cache + stored: name + words for stored, words in STORED.items() for cache, name in ENGINES.items()}
    here = found.loc[[name for name in names if name in found.index]]
    rate = here.tokens_per_s.astype(float)
    times = [f"{x:.2f}" for x in rate / rate["auto"]] if "auto" in rate else ["–"] * len(rate)
    return here.assign(name=[names[name] for name in here.index], times=times)


def vllm() -> str:
    """Decode steps inside vLLM, and traces."""
    body = []
    for case in ("8x32600", "32x8100", "fitx32600", "8x32600, another run", "8x32600, a run before", "fitx32600, two GPUs"):
        for row in inside_vllm(case).itertuples():
            held = f"{float(row.tokens) / 1e6:.2f} million"
            most = " (most)" if case.startswith("fit") else ""
            workload = size(int(row.batch), int(row.kv_len)) + most + "".join(case.partition(",")[1:])
            rate = f"{float(row.tokens_per_s):.0f}"
            body.append([workload, row.name, f"{row.ms:.2f}", rate, row.times, f"{float(row.prefill_s):.1f}", held])
    steps = table(["batch × tokens", "cache", "step, ms", "tokens per second", "times 16 bits", "prefill, s", "tokens that fit"], body)
    trace = [
        [held, row.name, f"{float(row.tokens_per_s):.0f}", row.times, f"{float(row.tpot_p99_ms):.0f}", f"{float(row.first_p50_s):.1f}",
         f"{float(row.cached):.0%}"]
        for case, held in TRACES.items()
        for row in inside_vllm(case).itertuples()
    ]  # fmt: skip
    header = [
        "memory", "requests that arrive, cache", "tokens per second", "times 16 bits", "P99 of ms per token", "first token, median, s",
        "prompt tokens cached",
    ]  # fmt: skip
    return steps + "\n" + table(header, trace)


def drafts() -> str:
    """How far answers with drafts inside vLLM, and answers one by one, are from those of the same engine without drafts."""
    found = frame("h200_vllm.csv")
    found = found[found["case"].str.startswith("drafts, ") | (found["case"] == "one by one")]
    body = [
        [ENGINES[row.engine], DRAFTS[row.case], f"{row.accepted} of {row.drafted}" if row.drafted else "–", row.equal,
         f"{float(row.mean):.4f}", f"{float(row.most):.2f}", f"{float(row.worst):.4f}" if float(row.worst) else "–"]
        for row in found.itertuples()
    ]  # fmt: skip
    header = ["cache", "drafts of", "accepted", "equal tokens of 360", "log-probabilities apart, mean", "at most", "attention from fp64"]
    return table(header, body)


def sizes() -> str:
    """What the presets take of memory, from their packed layouts."""
    from kvgen.format.sizes import bits_at, bits_per_element, token_bytes
    from kvgen.spec import presets

    body = []
    for name, spec in presets().items():
        taken, kept = token_bytes(spec, LLAMA_LAYERS), spec.cache.unpacked
        bits = [f"{bits_per_element(spec):.3f}", f"{bits_at(spec, 32768):.3f}"]
        body.append([f"`{name}`", *bits, f"{taken / 1024:g}", f"{LLAMA_LAYERS * 8 * 128 * 4 / taken:.2f}", str(kept)])
    header = ["preset", "bits per element", "at 32768 tokens", "KiB per token", "times smaller than 16 bits", "tokens kept in 16 bits"]
    return table(header, body)


def blocks() -> str:
    """Bytes, quality and, where a GPU has measured it, time over the tokens of a block, and on what the quality was measured."""
    found, body = frame("cpu_blocks.csv"), []
    timed = (RESULTS / "h200_blocks.csv").exists()
    times = frame("h200_blocks.csv").set_index(["format", "block", "workload"]).us if timed else {}
    for row in found.itertuples():
        read = [f"{row.bytes_316 / 316:.0f}", f"{row.bytes_32768 / 32768:.0f}"]
        keys = [(row.format, row.block, work) for work in ("200x316", "8x32768")] if timed else []
        us = [figure(times[key]) if key in times else "–" for key in keys]
        body.append([row.format, str(row.block), f"{row.residual_tokens:.0f}", *read, f"{row.kl_316:.2g}", f"{row.kl_2048:.2g}", *us])
    header = ["format", "tokens of a block", "tokens in 16 bits", "bytes per token at 316", "at 32768", "KL at 316, nats", "at 2048"]
    one = found.iloc[0]
    about = f"{one.device}, torch {one.torch}, {one.date}; {one.model} in {one['dtype']}, passages of each text: {one.passages}"
    return table([*header, *(["H200 at 200 × 316, µs", "at 8 × 32768"] if timed else [])], body) + f"\n{about}.\n"


def figures(weights: bool = False) -> pd.DataFrame:
    """The records of `kvgen accuracy`: of formats of the cache, which ship, or of weights."""
    from kvgen.accuracy import SHIPPED

    return frame("accuracy_weights.csv") if weights else pd.read_csv(SHIPPED, keep_default_na=False)


def spread(row: pd.Series, form: str) -> str:
    """A value with its interval."""
    return f"{row.value:{form}} ({row.low:{form}} to {row.high:{form}})"


def accuracy() -> str:
    """What every named format costs at the longest context, over all texts; the least KL divergence first."""
    found = figures()
    found = found[(found.text == "all") & (found.context == found.context.max())].set_index(["format", "measure"]).sort_index()
    names = found.xs("kl", level="measure").value.sort_values(kind="stable").index
    body = []
    for name in names:
        mine = found.loc[name]
        shares = [spread(mine.loc[measure], ".1%") for measure in ("passkey", "pairs")]
        body.append([f"`{name}`", f"{mine.bits.iloc[0]:.3f}", *costs(mine), *shares])
    return table(["format", "bits", *COSTS, "pass keys", "pairs"], body)


COSTS = ("perplexity", "increase", "KL, nats", "greedy tokens")


def costs(mine: pd.DataFrame) -> list[str]:
    """What a format costs, of its rows by measure."""
    told = [spread(mine.loc[measure], form) for measure, form in (("increase", "+.2%"), ("kl", ".2g"), ("agreement", ".1%"))]
    return [f"{mine.value['perplexity']:.3f}", *told]


def accuracy_weights() -> str:
    """What formats of weights cost at the longest context, over all texts, with each format of the cache."""
    found = figures(weights=True)
    found = found[(found.text == "all") & (found.context == found.context.max())]
    body = []
    for (kind, name), mine in found.groupby(["weights", "format"], sort=False):
        sizes = [f"`{kind}`", f"{mine.weight_bits.iloc[0]:.3f}", f"`{name}`", f"{mine.bits.iloc[0]:.3f}"]
        body.append([*sizes, *costs(mine.set_index("measure"))])
    return table(["weights", "bits", "cache", "bits", *COSTS], body)


def accuracy_about(weights: bool = False) -> str:
    """What the figures were measured on, and how much of it."""
    found = figures(weights)
    one, longest = found.iloc[0], found.context.max()
    asked = "" if weights else f" {one.questions} questions of each kind, length and depth,"
    amount = f"{one.passages} passages of each text,{asked} contexts up to {longest} tokens"
    options = f"--context {longest} --passages {one.passages} --questions {one.questions}"
    file = "benchmarks/results/accuracy_weights.csv" if weights else "kvgen/accuracy/formats.csv"
    rows = [
        ["machine", f"{one.device}, torch {one.torch}, {one.date}"],
        ["model", f"{one.model} in {one['dtype']}, kvgen {one.kvgen}"],
        ["measured", f"{amount}, seed {one.seed}"],
        ["texts", one.texts],
        ["command", f"`kvgen accuracy {'--weights all ' if weights else ''}{options} --csv {file}`"],
    ]
    return table(rows[0], rows[1:])


def accuracy_contexts() -> str:
    """KL divergence and retrieval by length, and KL divergence by text."""
    found = figures()
    lengths, asked_lengths = (sorted(here.context.unique()) for here in (found, found[found.measure == "passkey"]))
    kinds = [kind for kind in found.text.unique() if kind != "all"]
    value = found.set_index(["format", "measure", "text", "context"]).value
    order = value.xs(("kl", "all", lengths[-1]), level=("measure", "text", "context")).sort_values(kind="stable").index
    body = []
    for name in order:
        kl = [
            f"{value[name, 'kl', text, length]:.2g}"
            for text, length in [*(("all", one) for one in lengths), *((k, lengths[-1]) for k in kinds)]
        ]
        asked = [f"{value[name, kind, 'all', length]:.0%}" for kind in ("passkey", "pairs") for length in asked_lengths]
        body.append([f"`{name}`", *kl, *asked])
    names = [f"{title} {length}" for title in ("pass keys,", "pairs,") for length in asked_lengths]
    return table(["format", *(f"KL, {length} tokens" for length in lengths), *(f"KL, {kind}" for kind in kinds), *names], body)


ORDERS = (
    ("4 bits for K rather than for V (Kitty, table 2)", "k4v2", "k2v4"),
    ("16-bit sinks and newest tokens (Kitty, tables 3 and 4)", "kitty", "kitty-no-window"),
    ("12.5 % of K's channels in 4 bits (Kitty, table 3)", "kitty", "kitty-no-boost"),
    ("25 % instead (Kitty, table 3)", "kitty-pro", "kitty"),
    ("25 % rather than none", "kitty-pro", "kitty-no-boost"),
    ("channels chosen by mean magnitude rather than fixed (Kitty, section 5.4)", "kitty", "kitty-static"),
    ("K per channel rather than per token (KIVI)", "bitdecoding-int4", "turbomind-int4"),
    ("a rotated K per token rather than a plain one (SAW-INT4)", "saw-int4", "turbomind-int4"),
    ("a rotated K per token rather than K per channel", "saw-int4", "bitdecoding-int4"),
    ("K per channel, rotated first", "int4-rotated-keys", "bitdecoding-int4"),
    ("groups of 32 rather than of 128, 2 bits (KIVI)", "kivi-int2", "bitdecoding-int2"),
    ("groups of 32 rather than of 128, 4 bits", "int4-groups-of-32", "bitdecoding-int4"),
    ("per token, groups of 32 rather than of a head", "int4-gqa-groupwise", "turbomind-int4"),
    ("fp8 (e4m3) rather than int8, both per token", "fp8-e4m3", "turbomind-int8"),
    ("three bits of mantissa rather than two (fp8)", "fp8-e4m3", "fp8-e5m2"),
    ("4-bit floats in groups of 16 rather than integers in groups of 32", "nvfp4", "int4-gqa-groupwise"),
    ("scales of one byte in e4m3 for 16 channels rather than powers of two for 32", "nvfp4", "mxfp4"),
    ("fp8 with a scale for each token rather than one for all", "fp8-e4m3", "fp8-e4m3-static"),
    ("int8 per channel with a scale for 128 tokens rather than one for all", "int8-per-channel", "int8-static-channels"),
    ("8 bits in the two first and two last layers", "int4-ends-8", "bitdecoding-int4"),
)
"""What papers and users take for better: of two formats the first."""


def accuracy_orders() -> str:
    """Whether what is taken for better has the smaller KL divergence here; open where the intervals overlap. Of formats that a GPU cannot
    have with this model's heads, the figures of a CPU.
    """
    body = []
    for where, every in (("", figures()), (", on a CPU over {} tokens", frame("cpu_accuracy.csv"))):
        longest = every.context.max()
        found = every[(every.text == "all") & (every.context == longest) & (every.measure == "kl")].set_index("format")
        for title, better, worse in ORDERS:
            if {better, worse} <= set(found.index) and title not in (row[0] for row in body):
                one, other = found.loc[better], found.loc[worse]
                order = "yes" if one.high < other.low else "no" if other.high < one.low else "open"
                told = f"{order}{where.format(longest)}"
                body.append([title, f"`{better}` {spread(one, '.2g')}", f"`{worse}` {spread(other, '.2g')}", told])
    return table(["better, it is said", "KL of the first", "KL of the second", "here"], body)


TIMED = {
    "bitdecoding-int4": "plain", "k8v8": "8 bits", "bitdecoding-int2": "2 bits", "k8v4": "K 8 bits, V 4 bits", "k4v2": "K 4 bits, V 2 bits",
    "turbomind-int4": "int4, per token", "int8-per-channel": "V per channel, 8 bits", "int4-groups-of-32": "groups of 32",
    "kivi-int2": "groups of 32, 2 bits", "kitty": "kitty", "kitty-pro": "kitty pro", "saw-int4": "saw-int4",
    "turbomind-int4-rotated": "int4, rotated", "turbomind-int8": "int8, per token", "fp8-e4m3": "e4m3, per token",
    "fp8-e5m2": "e5m2, per token", "nvfp4": "nvfp4", "mxfp4": "mxfp4", "e4m3-keys-int4-values": "K e4m3, V int4",
    "fp8-e4m3-static": "e4m3, static per tensor",
}  # fmt: skip
"""Formats by the case of gpu_shapes.py that times them at 8 x 32768."""


def pareto() -> pd.DataFrame:
    """By format: KiB of a token of Llama-3.1-8B, KL divergence, and µs of an attention call at 8 x 32768 on an H200 where it is timed."""
    from kvgen.accuracy import Model, formats, read_table
    from kvgen.format.sizes import token_bytes

    llama, kl = Model.named("llama-3.1-8b"), read_table().kl
    names = [name for name in kl.index if name in formats()]
    size = {name: sum(token_bytes(part.spec, part.layers) for part in llama.parts(name, "float16")) / 1024 for name in names}
    times = frame("h200_shapes.csv").query("backend == 'cuda'").set_index("case").us
    us = {name: times[TIMED[name]] for name in names if name in TIMED}
    us["16-bit"] = fastest(attend("h200_attend.csv").loc[[(8, 32768)]], provider="torch", spec="serving-kv4").us
    found = pd.DataFrame({"size": size, "kl": kl[names], "us": us}).sort_values(["size", "kl"])
    return found.assign(best=[not ((found["size"] <= row["size"]) & (found.kl < row.kl)).any() for _, row in found.iterrows()])


def accuracy_pareto() -> str:
    """Size, quality and time of every format."""
    body = [
        [f"**`{name}`**" if row.best else f"`{name}`", f"{row['size']:g}", f"{row.kl:.2g}", "–" if pd.isna(row.us) else figure(row.us)]
        for name, row in pareto().iterrows()
    ]
    return table(["format", "KiB per token", "KL, nats", "attention at 8 × 32768, µs"], body)


def rounding() -> str:
    """Errors beyond those of the format beside torch's over a 16-bit cache, on every machine that has been measured."""
    body = []
    for file in sorted(RESULTS.glob("*_rounding.csv"), reverse=True):
        found = frame(file.name)
        for (form, dtype), here in found.groupby(["format", "dtype"], sort=False):
            rows = here.set_index(["queries", "outlier"])
            cells = [f"{rows.loc[at, mine]:.1e} / {rows.loc[at, other]:.1e}" for at in ((1, 12), (16, 12)) for mine, other in ERRORS]
            body.append([str(here.device.iloc[0]), form, dtype, *cells])
    queries = ("1 query", "16 queries")
    return table(["machine", "cache", "type", *(f"{q}, {kind}" for q in queries for kind in ("all rows", "worst row"))], body)


def linear_speed() -> str:
    """Products with packed weights: µs of kvgen's fastest launch and of its default, fractions of the read, and µs of others."""
    found = frame("h200_linear.csv")
    body = []
    for (shape, rows), here in found.groupby(["shape", "rows"], sort=False):
        times, mine = here.set_index("provider").us, here[here.provider == "kvgen"].iloc[0]
        told = [f"{mine.us:.1f}", f"{mine.read_us / mine.us:.2f}", f"{float(mine.default_us):.1f}"]
        body.append([shape.replace("x", " × "), str(rows), *told, *(f"{times[name]:.1f}" for name in ("humming", "cublas", "torch int4"))])
    return table(["n × k", "rows", "kvgen, µs", "of the read", "default", "Humming", "cuBLAS, 16 bits", "torch int4"], body)


def entries() -> str:
    """What tuning gained where an entry ships: the default's time over the winner's, in the final of the build that made it."""
    from kvgen.registry import packaged_store

    body, every = [], list[float]()
    for entry in (found.entry for found in packaged_store().all() if found.entry is not None):
        gains = [timing.default_us / timing.us for timing in entry.timings if timing.default_us]
        every += gains
        spread = f"{min(gains):.2f} to {max(gains):.2f}" if len(gains) > 1 else "–"
        how = [str(entry.provenance["points"]), str(entry.provenance["date"])[:10]]
        body.append([f"`{entry.spec.name}`", str(len(gains)), f"{geometric_mean(gains):.3f}", spread, *how])
    last = ["all", str(len(every)), f"{geometric_mean(every):.3f}", f"{min(every):.2f} to {max(every):.2f}", "", ""]
    header = ["spec", "workloads", "default over winner, geometric mean", "least to most", "measurements", "built"]
    return table(header, [*sorted(body), last])


def cpu_linear() -> str:
    """Products with packed weights on CPUs: µs and the fraction of the read of each processor, and µs of others on the last one."""
    found = frame("cpu_linear.csv")
    found = found[found.rows != 8]
    kinds = {"Intel(R) Xeon(R) Processor": "AMX", "AMD EPYC": "VNNI"}
    body = []
    for (n, k, bits, rows), here in found.groupby(["n", "k", "bits", "rows"], sort=False):
        mine = here.set_index("device")
        last = mine.loc["AMD EPYC"]
        others = pd.to_numeric(last[[f"torch_int{bits}_us", "torch_bf16_us", "onnx_fp32_us", "onnx_fast_us"]], errors="coerce")
        told = [f"{mine.kvgen_us[name]:.0f} ({mine.of_read[name]:.2f})" if name in mine.index else "–" for name in kinds]
        body.append([f"{n} × {k} int{bits}", str(rows), *told, *("–" if pd.isna(us) else f"{us:.0f}" for us in others)])
    names = [f"kvgen, {kind}: µs (of the read)" for kind in kinds.values()]
    return table(["n × k", "rows", *names, "torch int4 / int8", "torch bf16", "MatMulNBits", "level 4"], body)


def matrix_speed(operation: str) -> str:
    """An operation on a matrix: the paper's kernels and kvgen's as fractions of a copy's speed."""
    found = frame("h200_int8.csv")
    body = []
    for shape, here in found[found.spec == f"int8-{operation}"].groupby("workload", sort=False):
        rows = here.set_index("provider")
        parts = [fraction(rows.read_us[name] / rows.us[name]) for name in VARIANTS]
        body.append([str(shape).replace("x", " × "), *parts, figure(rows.us["kvgen"]), figure(rows.us["copy"])])
    return table([f"{operation}, tokens × channels", *VARIANTS, "kvgen, µs", "copy, µs"], body)


ROUTES = ("passes_us", "dequantized_us")
"""Columns of gpu_extend.py."""
ERRORS = (("error", "error16"), ("row", "row16"))
"""Columns of rounding.py: kvgen's error, and that of attention over 16 bits."""
TABLES: dict[str, Callable[[], str]] = {
    "serving": serving, "summary": summary, "shapes": shapes, "extend": extend, "plans": plans, "cpu": cpu, "overhead": overhead,
    "generate": generate, "generate-summary": generate_summary, "vllm": vllm, "vllm-drafts": drafts,
    "preset-sizes": sizes, "blocks": blocks, "accuracy": accuracy, "accuracy-about": accuracy_about, "accuracy-contexts": accuracy_contexts,
    "accuracy-weights": accuracy_weights, "accuracy-weights-about": lambda: accuracy_about(weights=True),
    "accuracy-orders": accuracy_orders, "accuracy-pareto": accuracy_pareto, "rounding": rounding, "linear-speed": linear_speed,
    "cpu-linear": cpu_linear, "entries": entries,
    "matrix-quantize": lambda: matrix_speed("quantize"), "matrix-dequantize": lambda: matrix_speed("dequantize"),
}  # fmt: skip


def filled(text: str) -> str:
    """A document's text with its tables as the results have them."""
    return MARKED.sub(lambda mark: f"{mark[1]}\n{TABLES[mark[2]]()}\n{mark[3]}", text)


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(filled(document.read_text()))
