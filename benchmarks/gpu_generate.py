"""End-to-end decoding of a language model: time per step and tokens per second over stock caches, 16 bits in a CUDA graph, and kvgen's.

    python benchmarks/gpu_generate.py                                   # Llama-3.1-8B's shape, random weights in bf16
    python benchmarks/gpu_generate.py --cases 8x32768 --loops graph16,int4 --budget 200
    python benchmarks/gpu_generate.py --weights int4                    # kvgen's with weights of 4 bits, and a head of 8
    python benchmarks/gpu_generate.py --tiny                            # a few layers and tokens, on the CPU too

Cases are BATCHxTOKENS; `fitxTOKENS` is the largest batch of 16 bits that fits, and of each format in addition its own. A loop of kvgen's
computes a plan in every step; the loop over 16 bits takes all lengths as equal. On a GPU the loop
over 16 bits and kvgen's have the model compiled, with q, k and v as one product and gate and up as another, and are timed as replays of one
CUDA graph; for a batch of one, torch generates its own kernels for the products. `bytes_ms` is what reading the weights and the cache once
takes at the rate of the read roofline. Rows go to $OUT (or benchmarks/results) as GPU_generate.csv, after every loop, with the parts of a
step by the profiler: attention, products with weights, and the rest; a kernel counts from the end of those before it. What does not fit
into `--budget` seconds, or into memory, gets a row that says so. Exits with 1 where a loop of kvgen's, or that over 16 bits, failed.

With `--weights`, the model's weights are quantized in place after the loops over caches of 16 bits, and kvgen's loops follow in the same
process; the file is GPU_generate_weights.csv. Before they do, logits of 1 and of 128 tokens are compared with those over the same weights
dequantized, which torch multiplies: their relative distance is the row `check`, and one beyond .05 fails.
"""

from __future__ import annotations

import gc
import re
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import inf
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks import generate_loops as loops
from benchmarks.common import gpu_word, parser, write_rows
from benchmarks.fused_llama import fuse, unfuse
from kvgen.api import get_kernel
from kvgen.bench.run import facts
from kvgen.integrations.transformers import KvgenCache, layer_specs, quantize_weights, quantized_linears
from kvgen.measure.measurement import TimingPolicy
from kvgen.measure.read_roofline import read_roofline, read_us

BIG = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
TINY = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2}
FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"key": {"bits": 8, "axis": "channel", "group": 128}, "value": {"bits": 8, "axis": "token", "group": 128}},
    "int4": {"key": {"bits": 4, "axis": "channel", "group": 128}, "value": {"bits": 4, "axis": "token", "group": 128}},
    "int2": {"key": {"bits": 2, "axis": "channel", "group": 128}, "value": {"bits": 2, "axis": "token", "group": 128}},
    "kitty": {"preset": "kitty"},
}
WEIGHTS: dict[str, dict[str, Any]] = {
    "int4": {"spec": {"bits": 4, "group": 128}, "head": {"bits": 8, "group": 128}},
    "int4-zeros": {"spec": {"bits": 4, "group": 128, "zero": True}, "head": {"bits": 8, "group": 128}},
    "int8": {"spec": {"bits": 8, "group": 128}, "head": {"bits": 8, "group": 128}},
}
FAR = 0.05
"""Relative distance of logits in 16 bits that are computed in another order, over 32 layers."""
STOCK = {"dynamic": loops.dynamic, "static": loops.static, "quantized": loops.quantized}
READ_BYTES = 2 << 30
MOST_STEPS = 80
PROFILED = 5
"""Steps of which the profiler takes the mean."""
FAILED = "not measured: "
LATE = "no time left"
"""Notes of loops without a time."""
GEMM = re.compile(r"^(?!triton_poi).*(gemm|gemv|nvjet|cutlass|split_?k|triton_tem|_mm_|linear)", re.IGNORECASE)
"""Names of kernels that multiply by weights: kvgen's, cuBLAS's, and those that torch generates. It names pointwise kernels (triton_poi)
after products, too, whose results they read."""
ATTENTION = re.compile(r"attend|plan_kernel|sdpa|fmha|flash|lean_reduction", re.IGNORECASE)
"""In the names of kernels of attention: kvgen's, cuDNN's with the sum of its splits, and flash attention's."""
WAITING = "advance_kernel"
"""In the name of the kernel that advances the lengths: it waits beside the attention before it, and its own work is a microsecond."""
PARTS = ("attention", "weights", "rest")
Row = dict[str, Any]


class Bench:
    """A model, and the rows of the loops over it."""

    def __init__(self, options: Namespace) -> None:
        self.options, self.started = options, time.monotonic()
        self.cuda = torch.cuda.is_available()
        self.device = "cuda" if self.cuda else "cpu"
        self.target: Any = "sm90" if self.cuda else "cpu"
        dtype = getattr(torch, options.dtype)
        sizes = TINY if options.tiny else BIG
        config = LlamaConfig(
            **sizes, head_dim=128, vocab_size=1008 if options.tiny else 128256, max_position_embeddings=1 << 18, dtype=dtype
        )
        with torch.device(self.device):
            self.model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        self.packed = ""
        """The format of the weights; empty for 16 bits."""
        few = READ_BYTES if self.cuda else 64 << 20
        self.bytes_per_ms = few / read_us(self.target, few) * 1e3
        read_roofline.cache_clear()  # its buffer, where sequences have room
        self.facts = facts(self.target, TimingPolicy())
        self.rows: list[Row] = []
        names = set(options.loops.split(",")) & set(FORMATS)
        with ThreadPoolExecutor() as pool:  # compiles kernels beside each other, and no longer when a graph is captured
            for name in names:
                pool.submit(lambda name=name: get_kernel(layer_specs(config, self.spec(name))[0]))

    @property
    def weights(self) -> int:
        """Bytes of weights that a step reads."""
        every = [*self.model.parameters(), *(layer.packed for layer in quantized_linears(self.model).values())]
        return sum(x.nbytes for x in every) - int(self.model.model.embed_tokens.weight.nbytes)

    def run(self) -> None:
        """All loops of all cases; where weights are quantized, kvgen's over those."""
        names = self.options.loops.split(",")
        if not self.options.weights:
            self.cases(names)
            return
        self.cases([name for name in names if name not in FORMATS])
        self.pack(self.options.weights)
        self.cases([name for name in names if name in FORMATS])

    def cases(self, names: list[str]) -> None:
        """These loops of all cases."""
        for case in self.options.cases.split(","):
            word, _, tokens = case.partition("x")
            length = int(tokens)
            batch = self.fit(None, length) if word == "fit" else int(word)
            for name in names:
                if word != "fit" or not self.packed:  # the batch of 16 bits is that beside weights of 16 bits
                    self.one(name, batch, length)
                if word == "fit" and name in FORMATS and ((own := self.fit(name, length)) > batch or self.packed):
                    self.one(name, own, length)

    def pack(self, name: str) -> None:
        """Quantize the weights in place, and a row of how far logits are from those over the weights that are meant."""
        unfuse(self.model)
        torch._dynamo.reset()  # graphs of the 16-bit weights
        self.release()
        row = self.row("check", 1, 128)
        try:
            quantize_weights(self.model, **WEIGHTS[name])
            self.packed = row["weights"] = name
            far = self.distance()
            row["note"] = f"{FAILED if max(far) > FAR else ''}relative distance of logits {', '.join(f'{x:.2g}' for x in far)}"
        except Exception as error:  # the rows so far are written
            row["note"] = f"{FAILED}{(str(error).strip() or type(error).__name__).splitlines()[0][:160]}"
        print(row, f"{time.monotonic() - self.started:.0f} s", flush=True)
        self.write()
        if not self.packed:
            sys.exit(1)

    @torch.no_grad()
    def distance(self) -> list[float]:
        """Between logits of the kernels and of torch over dequantized weights, of one token and of 128."""
        self.model.set_attn_implementation("sdpa")
        ids = torch.randint(self.model.config.vocab_size, (1, 128), device=self.device)
        found = []
        for tokens in (1, 128):
            mine = self.model(ids[:, :tokens]).logits.float()
            for layer in quantized_linears(self.model).values():
                layer.product.rows = 0
            wanted = self.model(ids[:, :tokens]).logits.float()
            for layer in quantized_linears(self.model).values():
                layer.product.rows = layer.kernel.rows
            found.append(float((mine - wanted).norm() / wanted.norm()))
        return found

    def fit(self, name: str | None, length: int) -> int:
        """The largest batch of a format, or of 16 bits, beside the model."""
        c = self.model.config
        if self.options.fit:
            return int(self.options.fit)
        if name is None:
            each = 4 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * length
        else:
            each = KvgenCache(c, self.spec(name), 1, length + loops.MARGIN, device=self.device).nbytes
        self.release()
        free = torch.cuda.mem_get_info()[0] if self.cuda else 64 << 20
        return max(1, int((free - self.options.reserve * (1 << 30 if self.cuda else 1)) // each))

    def spec(self, name: str) -> dict[str, Any]:
        """The format of a loop, in the model's dtype."""
        return {"arch": self.target, "attention": {"dtype": self.options.dtype}, **FORMATS[name]}

    def one(self, name: str, batch: int, length: int) -> None:
        """Time one loop; its row, or why there is none."""
        row = self.row(name, batch, length)
        if time.monotonic() - self.started > self.options.budget:
            row["note"] = LATE
        else:
            try:
                self.measure(name, batch, length, row)
            except Exception as error:  # the others go on
                told = str(error).strip() or type(error).__name__
                row["note"] = f"{FAILED}{told.splitlines()[0][:160]}"
        self.release()
        print({key: value for key, value in row.items() if value != ""}, f"{time.monotonic() - self.started:.0f} s", flush=True)
        self.write()

    def row(self, name: str, batch: int, length: int) -> Row:
        """A new row, without figures."""
        row: Row = {"loop": name, "batch": batch, "tokens": length, "dtype": self.options.dtype}
        if self.options.weights:
            row["weights"] = self.packed or "16-bit"
        row |= {"ms": "", "tokens_per_second": "", "bytes_ms": "", **dict.fromkeys((f"{part}_ms" for part in PARTS), "")}
        row |= {"cache_gib": "", "note": ""}
        self.rows.append(row)
        return row

    def write(self) -> None:
        """All rows so far."""
        name = "generate_tiny" if self.options.tiny or not self.cuda else f"{gpu_word()}_generate"
        write_rows(f"{name}_weights" if self.options.weights else name, self.rows, self.facts)

    def release(self) -> None:
        """Give the memory of the last loop back."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    @property
    def good(self) -> bool:
        """Whether something was measured, and no loop that this project answers for failed."""
        ours = [str(row["note"]) for row in self.rows if row["loop"] not in STOCK]
        return any(row["ms"] != "" for row in self.rows) and not any(note.startswith(FAILED) for note in ours)

    @torch.no_grad()
    def measure(self, name: str, batch: int, length: int, row: Row) -> None:
        """Fill a row."""
        loop = self.loop(name, batch, length)
        steps = self.options.steps
        ms = loops.milliseconds(loop.step, steps, self.cuda)
        row |= {"ms": round(ms, 3), "tokens_per_second": round(batch / ms * 1e3, 1), "note": loop.note}
        if loop.cache_bytes is not None:
            row["cache_gib"] = round(loop.cache_bytes / 2**30, 3)
            row["bytes_ms"] = round((self.weights + loop.cache_bytes) / self.bytes_per_ms, 3)
        if isinstance(loop, loops.Stock) or not self.cuda:
            return
        self.write()  # a profiler that crashes takes nothing with it
        try:
            found = profiled(loop.step)
        except RuntimeError as error:
            row["note"] += f"; not profiled: {str(error).splitlines()[0][:80]}"
            return
        row |= {f"{part}_ms": round(spent, 4) for part, spent in found.items()}

    def loop(self, name: str, batch: int, length: int) -> Any:
        """The loop of that name, its cache filled."""
        if not self.packed:  # quantized weights are joint already
            fuse(self.model, on=self.cuda and name not in STOCK)
        if name in STOCK:
            return STOCK[name](self.model, batch, length)
        compiled = self.compiling(batch)
        if name == "graph16":
            forward = self.model.forward if compiled is False else torch.compile(self.model.forward, fullgraph=True, **compiled)
            return loops.Plain(self.model, forward, batch, length)
        return loops.Packed(self.model, self.spec(name), batch, length, compiled=compiled)

    def compiling(self, batch: int) -> Any:
        """Options of torch.compile for a batch; False on the CPU, where the model runs as it is."""
        if not self.cuda:
            return False
        if batch > 1 and not self.options.weights:
            return {"dynamic": True}  # one compilation for all batches, which takes as long as two or three for one; cuBLAS multiplies
        if batch > 1 or self.packed:
            return {"dynamic": False}
        # With coordinate descent, torch makes a product with one row a reduction, which reads weights faster than a matrix product does.
        options = {"max_autotune_gemm": True, "benchmark_epilogue_fusion": False, "coordinate_descent_tuning": True}
        return {"dynamic": False, "options": options}


def profiled(step: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of each part of a step."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    events = [(e.time_range.start, e.time_range.end, e.name) for e in found.events() if e.device_type == DeviceType.CUDA]
    spent = dict.fromkeys(PARTS, 0.0)
    over = -inf
    for start, end, name in sorted(events):
        if WAITING not in name:
            spent["attention" if ATTENTION.search(name) else "weights" if GEMM.search(name) else "rest"] += max(0.0, end - max(start, over))
        over = max(over, end)
    return {part: us / 1e3 / PROFILED for part, us in spent.items()}


def main() -> int:
    """Measure, print, write."""
    command = parser(__doc__)
    command.add_argument("--cases", help="BATCHxTOKENS, or fitxTOKENS; by default 1x131072,8x32768,fitx32768, and 1x4096 with --weights")
    command.add_argument("--loops", help="by default all, with --weights graph16,int4")
    command.add_argument("--weights", choices=WEIGHTS, help="also with weights in this format")
    command.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    command.add_argument("--steps", type=int, default=30)
    command.add_argument("--budget", type=float, default=440.0, help="seconds, after which no loop is begun")
    command.add_argument("--reserve", type=float, default=6.0, help="GiB that caches of the largest batch leave free")
    command.add_argument("--fit", type=int, default=0, help="the largest batch, instead of what memory says")
    command.add_argument("--tiny", action="store_true")
    options = command.parse_args()
    usual = "1x512,2x256,fitx256" if options.tiny else f"{'1x4096,' if options.weights else ''}1x131072,8x32768,fitx32768"
    options.cases = options.cases or usual
    options.loops = options.loops or ("graph16,int4" if options.weights else "graph16,int4,int8,int2,kitty,dynamic,static,quantized")
    if options.tiny:
        options.fit = options.fit or 3
    if not 0 < options.steps <= MOST_STEPS:
        command.error(f"--steps must be in 1..{MOST_STEPS}: caches have room for {loops.MARGIN} tokens more")
    known = [*STOCK, "graph16", *FORMATS]
    if unknown := [name for name in options.loops.split(",") if name not in known]:
        command.error(f"there is no loop {unknown[0]!r}; there are {', '.join(known)}")
    torch._dynamo.config.recompile_limit = 32
    bench = Bench(options)
    bench.run()
    return 0 if bench.good else 1


if __name__ == "__main__":
    sys.exit(main())
