"""Decoding inside vLLM: milliseconds per step, prefill and the largest batch, of its own FlashAttention and of kvgen's formats.

    python benchmarks/vllm_steps.py                                   # Llama-3.1-8B's shape, random weights in bf16, on one GPU
    python benchmarks/vllm_steps.py --engines auto,fp8,saw-int4 --cases 8x32600 --compile
    python benchmarks/vllm_steps.py --engines auto,auto+w4,saw-int4,saw-int4+w4 --cases 8x32600,32x8100
    python benchmarks/vllm_steps.py --trace 200 --cases none          # requests that arrive, instead of batches
    python benchmarks/vllm_steps.py --tiny                            # two layers and few tokens, in float32 on a CPU too

Engines are `auto` and `fp8` (FLASH_ATTN with a cache of 16 bits and of 8), and names of FORMATS, each also with kvgen's products over
weights of WEIGHTS (`saw-int4+w4`): one after the other, each in a process of its own, while kernels that are not compiled yet are compiled
beside the first. Cases are BATCHxTOKENS; `fitxTOKENS` is the largest
batch that the engine's cache holds. A step's time is a difference: of answers of 130 and of 2 tokens to the same prompts, which are in the
prefix cache by then; the smaller of two. `prefill_s` is the first answer of one token. Nothing is compiled by torch, unless `--compile`
says so; decode steps are full CUDA graphs.

A trace is of requests that arrive at random (`--arrivals` per second, Poisson), with prompts of 1K to 32K tokens, and answers of 100 to
500; `--shared` of them begin with nine tenths of their length of one of four documents. Pages have 128 tokens in all engines. It ends after
`--trace-seconds`, whatever is left then. `tokens_per_s` are those of answers; `tpot_p99_ms` is the 99th percentile over requests of the
mean time between tokens, `gap_p99_ms` that of all times between tokens; `cached` is the share of prompt tokens that hit the prefix cache.

First every format is checked in eager mode and in CUDA graphs, over a small Llama of random weights, whose logits depend on attention:
attention of each layer against fp64 over what the cache holds (`worst`, relative), and log-probabilities beside those of FLASH_ATTN, up to
the first token that differs; with several `--ranks` the latter alone. Where weights have 4 or 8 bits, FLASH_ATTN is given them dequantized.
With `--speculate` formats are checked, and nothing is timed, by drafts of n-grams, of the model itself, and of an EAGLE head, beside the
same engine without drafts. How far its answers to the same prompts one by one are from those (`one by one`) bounds what drafts may change.
With `--profile` kernels of a step are listed in GPU_vllm_kernels.txt. Rows go to $OUT (or benchmarks/results) as GPU_vllm.csv, after every
engine. Exits with 1 where a check or an engine failed.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.update(
    HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_FLASHINFER_SAMPLER="0",
    VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"), TOKENIZERS_PARALLELISM="false",
    VLLM_PLUGINS=os.environ.get("VLLM_PLUGINS", ""),
)  # fmt: skip

from benchmarks.common import RESULTS, gpu_word, parser, write_rows
from kvgen._machine import gpu_identity

FORMATS: dict[str, dict[str, Any]] = {
    "saw-int4": {"preset": "saw-int4"},
    "int4": {"preset": "turbomind-int4"},
    "int8": {"preset": "turbomind-int8"},
    "int2": {"preset": "bitdecoding-int2"},
    "e4m3": {"preset": "fp8-e4m3"},
    "16": {"key": {"bits": 16}, "value": {"bits": 16}},
}
FLASH = {"auto": "auto", "fp8": "fp8"}
"""vLLM's own engines, by the dtype of their cache."""
WEIGHTS: dict[str, dict[str, Any]] = {"w4": {"bits": 4, "group": 128}, "w8": {"bits": 8, "group": 128}}
"""What follows + in an engine's name: how the weights of all layers but the head are stored."""
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
BIG = {**HEADS, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
CUT = {**BIG, "num_attention_heads": 64, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 16}
SHAPES = {"8b": BIG, "70b": CUT}
"""Llama-3.1-8B's, and 16 layers of Llama-3.1-70B's."""
SMALL = {**HEADS, "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 1024}
TINY = {**SMALL, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 2}
CHECKED = (5, 127, 128, 300, 1027, 700)
"""Tokens of the prompts of a check."""
NEW = 24
LIMITS = {"auto": 0.25, "16": 0.25, "int8": 0.35, "e4m3": 1.5}
"""Of |log-probability - FLASH_ATTN's|, for formats of which something can be said: both round to 16 bits."""
WORST = 3 * 2**-8
"""Of the relative error of a row's attention in bfloat16: the roundings of a rotated query, of the weights and of the output."""
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
"""Batches that are captured."""
CASES = "8x32600", "32x8100", "fitx32600"
ARRIVAL = FORMATS.keys() - {"int2"}
"""Formats whose pages hold all of a request."""
DRAFTED = 2.0
"""Of the most that drafts change, times what serving the prompts one by one changes: products of another number of rows round differently,
and where a rounded key is near the border of two codes, it gets the other.
"""
COUNTED = {"drafted": "draft", "accepted": "accepted"}
"""Columns, by what vLLM's metrics call these tokens."""
LATE, WRONG, FAILED = "no time left", "wrong", "failed"
Row = dict[str, Any]


def config_of(shape: dict[str, Any], folder: Path, dtype: str, *, weights: bool) -> Path:
    """A folder with a Llama's configuration, and random weights whose logits depend on attention."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": dtype, "bos_token_id": 1,
        "eos_token_id": 2, **shape,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    if weights and not (folder / "model.safetensors").exists():
        save_weights(config, folder / "model.safetensors", dtype)
    return folder


def save_weights(config: dict[str, Any], path: Path, dtype: str) -> None:
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(0)

    def weight(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=random) * scale / columns**0.5).to(getattr(torch, dtype))

    hidden, inner, dim, words = (config[name] for name in ("hidden_size", "intermediate_size", "head_dim", "vocab_size"))
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    ones = torch.ones(hidden, dtype=getattr(torch, dtype))
    tensors = {"model.embed_tokens.weight": weight(words, hidden, hidden**0.5), "model.norm.weight": ones}
    tensors["lm_head.weight"] = weight(words, hidden, 1.5)
    for number in range(config["num_hidden_layers"]):
        made = {
            "self_attn.q_proj": weight(q, hidden, 1.6), "self_attn.k_proj": weight(kv, hidden, 1.6), "self_attn.v_proj": weight(kv, hidden),
            "self_attn.o_proj": weight(hidden, q, 2.0), "mlp.gate_proj": weight(inner, hidden), "mlp.up_proj": weight(inner, hidden),
            "mlp.down_proj": weight(hidden, inner), "input_layernorm": ones.clone(), "post_attention_layernorm": ones.clone(),
        }  # fmt: skip
        tensors |= {f"model.layers.{number}.{name}.weight": x for name, x in made.items()}
    save_file(tensors, path, metadata={"format": "pt"})


def dequantized(model: Path, form: dict[str, Any], folder: Path) -> Path:
    """A model with the weights that their codes mean."""
    from safetensors.torch import load_file, save_file

    from kvgen.format.weights import dequantize, quantize
    from kvgen.spec.model import LinearFormat

    tensors = load_file(model / "model.safetensors")
    for name, x in tensors.items():
        if name.endswith("_proj.weight"):
            linear = LinearFormat(n=x.shape[0], k=x.shape[1], dtype=str(x.dtype).removeprefix("torch."), **form)
            tensors[name] = dequantize(linear, quantize(linear, x))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text((model / "config.json").read_text())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def engine(name: str, model: Path, options: Namespace, **changes: Any) -> Any:
    """vLLM over one of the caches."""
    from vllm import LLM

    given: dict[str, Any] = {
        "model": str(model), "skip_tokenizer_init": True, "seed": 0, "dtype": "float32" if options.tiny else "bfloat16",
        "enable_prefix_caching": True, "tensor_parallel_size": options.ranks, **changes,
    }  # fmt: skip
    if not given.get("enforce_eager"):
        given["compilation_config"] = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": list(SIZES)}
        given["compilation_config"] |= {"mode": 3 if options.compile else 0}
    cache, _, stored = name.partition("+")
    if name not in FLASH:
        from kvgen.integrations.vllm import register

        register()  # a checkout has no entry points
        given["additional_config"] = {}
    if cache in FORMATS:
        given |= {"attention_backend": "CUSTOM", "additional_config": {"kvgen": FORMATS[cache]}}
    elif not options.tiny:
        given |= {"attention_backend": "FLASH_ATTN", "kv_cache_dtype": FLASH[cache]}
    if stored:
        given["quantization"] = "kvgen"
        given["additional_config"]["kvgen_weights"] = WEIGHTS[stored]
    return LLM(**given)


def prompts_of(batch: int, tokens: int, words: int = 1000) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": [(i * 7919 + j * 104729 + j * j) % words + 3 for j in range(tokens)]} for i in range(batch)]


# --- checks ------------------------------------------------------------------------------------------------------------------


class Watched:
    """The largest relative error of a row's attention against fp64 over the cache, of what runs in eager mode."""

    def __init__(self) -> None:
        self.worst, self.rows = 0.0, 0

    def install(self) -> None:
        import torch

        from kvgen.format.rotation import rotate_back
        from kvgen.integrations.vllm.backend import KvgenImpl

        stock = KvgenImpl.forward

        def forward(layer: Any, module: Any, query: Any, key: Any, value: Any, cache: Any, m: Any, output: Any, **more: Any) -> Any:
            found = stock(layer, module, query, key, value, cache, m, output, **more)
            if m is None or (query.is_cuda and torch.cuda.is_current_stream_capturing()):
                return found
            for b, length in enumerate(m.after.lengths.tolist()):
                mine = slice(m.starts[b], m.starts[b + 1])
                count = mine.stop - mine.start
                if not 0 < count <= length:
                    continue
                k, v = key[mine], value[mine]
                if m.packed is None or count < length or count <= m.calls.most_q:  # else the row reads its own tokens
                    both = torch.zeros(2, 1, length, *key.shape[1:], dtype=key.dtype, device=key.device)
                    kernel = m.calls.kernel
                    kernel._distinct[0].module.unpack(*m.after[b : b + 1].over(layer._store), None, both[0], both[1])
                    k, v = (rotate_back(x[0].double(), turn) for x, turn in zip(both, kernel.layout.rotations, strict=True))
                q, group = query[mine].double(), query.shape[1] // key.shape[1]
                scores = torch.einsum("qhd,khd->hqk", q, k.double().repeat_interleave(group, 1)) * layer.scale
                here = torch.arange(length, device=key.device)
                scores.masked_fill_(here > here[length - count :, None], -torch.inf)
                want = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.double().repeat_interleave(group, 1))
                error = output.view(query.shape)[mine].double() - want
                errors = error.flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)
                self.worst = max(self.worst, errors.nan_to_num(nan=torch.inf).max().item())
                self.rows += count
            return found

        KvgenImpl.forward = forward


def answers(llm: Any, words: int, prompts: Sequence[list[int]] | None = None, new: int = NEW) -> dict[str, Any]:
    """Greedy tokens, and log-probabilities of every token."""
    from vllm import SamplingParams

    how = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=words)
    prompts = prompts or [[(7919 * i + 104729 * j + j * j) % (words - 3) + 3 for j in range(n)] for i, n in enumerate(CHECKED)]
    results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], how, use_tqdm=False)
    tokens = [list(result.outputs[0].token_ids) for result in results]
    scores = [[[step[token].logprob for token in range(words)] for step in result.outputs[0].logprobs] for result in results]
    return {"tokens": tokens, "scores": scores}


def beside(found: dict[str, Any], other: dict[str, Any]) -> tuple[int, float, float]:
    """Equal first tokens of all prompts, and the largest and the mean difference of log-probabilities until the first that differs."""
    import torch

    equal, most, total, count = 0, 0.0, 0.0, 0
    for mine, theirs, a, b in zip(found["tokens"], other["tokens"], found["scores"], other["scores"], strict=True):
        same = next((i for i, (x, y) in enumerate(zip(mine, theirs, strict=True)) if x != y), len(mine))
        seen = min(same + 1, len(mine))
        apart = (torch.tensor(a[:seen]) - torch.tensor(b[:seen])).abs().nan_to_num_(nan=torch.inf)
        equal, most, total, count = equal + same, max(most, apart.max().item()), total + apart.sum().item(), count + apart.numel()
    return equal, most, total / count


def check(name: str, options: Namespace, wrote: Callable[[list[Row]], Any]) -> list[Row]:
    """The rows of an engine's check, which `wrote` gets as they come; answers of `auto` are kept for the others."""
    import gc

    shape = TINY if options.tiny else SMALL
    model = config_of(shape, options.scratch / "checked", "float32" if options.tiny else "bfloat16", weights=True)
    small = {"max_model_len": 2048, "max_num_seqs": 16, "max_logprobs": shape["vocab_size"], "max_num_batched_tokens": 640}
    if not options.tiny:
        small["gpu_memory_utilization"] = 0.3
    kept = options.scratch / "auto.json"
    if name == "auto":
        kept.write_text(json.dumps(answers(engine(name, model, options, enforce_eager=True, **small), shape["vocab_size"])))
        return []
    cache, _, stored = name.partition("+")
    if stored:
        kept, right = kept.with_suffix(f".{stored}"), dequantized(model, WEIGHTS[stored], options.scratch / f"dequantized-{stored}")
        if not kept.exists():
            kept.write_text(json.dumps(answers(engine("auto", right, options, enforce_eager=True, **small), shape["vocab_size"])))
            gc.collect()
    reference, rows, watched = json.loads(kept.read_text()), [], Watched()
    watched.install()
    for mode in ("eager",) if options.tiny else ("eager", "captured") if options.ranks == 1 else ("captured",):
        llm = engine(name, model, options, enforce_eager=mode == "eager", **small)
        watched.worst, watched.rows = 0.0, 0
        equal, most, mean = beside(answers(llm, shape["vocab_size"]), reference)
        row = {"engine": name, "case": f"check, {mode}", "equal": equal, "most": round(most, 4), "mean": round(mean, 5)}
        row |= {"worst": round(watched.worst, 6), "rows": watched.rows}
        bad = most > LIMITS.get(cache, 20.0) or watched.worst > WORST
        rows.append(row | {"note": WRONG if bad else ""})
        wrote(rows)
        del llm
        gc.collect()
    return rows


def speculate(name: str, options: Namespace, wrote: Callable[[list[Row]], Any]) -> list[Row]:
    """The rows of an engine that verifies drafts: what it answers beside the same engine without. Drafts are of n-grams, and where all of a
    request is in pages of the model itself, and of an EAGLE head of random weights, whose drafts are wrong. First is a control without.
    """
    import gc

    shape = TINY if options.tiny else SMALL
    dtype, words = "float32" if options.tiny else "bfloat16", shape["vocab_size"]
    model = config_of(shape, options.scratch / "checked", dtype, weights=True)
    head = eagle_of(shape, options.scratch / "eagle", dtype)
    ways: dict[str, Row] = {
        "ngram": {"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 1},
        "draft_model": {"method": "draft_model", "model": str(model)}, "eagle": {"method": "eagle", "model": str(head)},
    }  # fmt: skip
    small = {"max_model_len": 2048, "max_num_seqs": 16, "max_logprobs": words, "max_num_batched_tokens": 640, "disable_log_stats": False}
    if not options.tiny:  # little: a process keeps the memory of all its engines
        small |= {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2**30}
    prompts = [[7919 * i % (words - 3) + 3 + j % (5 + 2 * i) for j in range(n)] for i, n in enumerate(CHECKED)]
    watched, rows, reference, apart = Watched(), list[Row](), dict[str, Any](), 0.0
    if name.split("+")[0] in FORMATS:
        watched.install()
    for way in ["none", *(ways if name in {*ARRIVAL, "auto"} else ("ngram",))]:
        drafts = {} if way == "none" else {"speculative_config": {"num_speculative_tokens": 3, **ways[way]}}
        if way in ("draft_model", "eagle") and name in FORMATS:
            drafts["speculative_config"]["attention_backend"] = "CUSTOM"  # else a draft's layers have a backend of vLLM's own
        llm = engine(name, model, options, enforce_eager=options.tiny, **small, **drafts)
        watched.worst, watched.rows = 0.0, 0
        found = answers(llm, words, prompts, 60)
        if way == "none":
            reference, drafted = found, {}
            llm.reset_prefix_cache()
            alone = [answers(llm, words, [prompt], 60) for prompt in prompts]
            found = {key: [one[key][0] for one in alone] for key in reference}
        else:
            told = {x.name: getattr(x, "value", None) for x in llm.get_metrics()}
            drafted = {key: int(told.get(f"vllm:spec_decode_num_{x}_tokens") or 0) for key, x in COUNTED.items()}
        equal, most, mean = beside(found, reference)
        mode = llm.llm_engine.vllm_config.compilation_config.cudagraph_mode
        row = {"engine": name, "case": f"drafts, {way}" if drafted else "one by one", "equal": equal, "most": round(most, 4)}
        row |= {"mean": round(mean, 5), "worst": round(watched.worst, 6), "rows": watched.rows, **drafted, "graphs": str(mode)}
        bad = watched.worst > WORST
        if drafted:
            bad = bad or not drafted["drafted"] or (name in {*ARRIVAL, "auto"} and most > DRAFTED * apart)
        else:
            apart = max(most, 1e-3)
        rows.append(row | {"note": WRONG if bad else ""})
        wrote(rows)
        del llm
        gc.collect()
    return rows


def eagle_of(shape: dict[str, Any], folder: Path, dtype: str) -> Path:
    """An EAGLE head of a layer, of random weights."""
    import torch
    from safetensors.torch import load_file, save_file

    whole = config_of({**shape, "num_hidden_layers": 1}, folder / "whole", dtype, weights=True)
    config_of({**shape, "num_hidden_layers": 1}, folder, dtype, weights=False)
    tensors = {name.removeprefix("model."): x for name, x in load_file(whole / "model.safetensors").items() if ".layers." in name}
    tensors = {name: x for name, x in tensors.items() if "input_layernorm" not in name}
    hidden = shape["hidden_size"]
    tensors["fc.weight"] = (torch.randn(hidden, 2 * hidden, generator=torch.Generator().manual_seed(1)) / (2 * hidden) ** 0.5).to(
        getattr(torch, dtype)
    )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# --- times -------------------------------------------------------------------------------------------------------------------


def measure(name: str, options: Namespace, wrote: Callable[[list[Row]], Any]) -> list[Row]:
    """The rows of an engine's cases."""
    import torch
    from vllm import SamplingParams

    started = time.monotonic()
    model = config_of(
        TINY if options.tiny else SHAPES[options.shape],
        options.scratch / f"measured-{options.shape}",
        "float32" if options.tiny else "bfloat16",
        weights=False,
    )
    trace = trace_of(options)
    longest = max([int(case.split("x")[1]) + 400 for case in options.cases] + [len(one.prompt) + one.new for one in trace])
    how: Row = {"max_model_len": longest, "max_num_seqs": SIZES[-1], "max_num_batched_tokens": 16384, "load_format": "dummy"}
    if trace:
        how |= {"max_num_seqs": min(SIZES[-1], len(trace)), "max_num_batched_tokens": 8192, "block_size": 128}
    if not options.tiny:
        how["gpu_memory_utilization"] = options.memory
    llm = engine(name, model, options, **how)
    loaded = time.monotonic() - started
    cache = llm.llm_engine.vllm_config.cache_config
    held = {"blocks": cache.num_gpu_blocks, "block_tokens": cache.block_size, "tokens": cache.num_gpu_blocks * cache.block_size}
    print(name, "loaded", round(loaded), "s", held, flush=True)
    rows = []

    def took(prompts: list[Any], new: int) -> float:
        start = time.perf_counter()
        params = SamplingParams(max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False, temperature=0)
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    for case in options.cases:
        batch, tokens = case.split("x")
        new = options.steps + 2
        fits = held["tokens"] // (-(-(int(tokens) + new) // cache.block_size) * cache.block_size)
        count = min(fits, SIZES[-1]) if batch == "fit" else int(batch)
        row: Row = {"engine": name, "case": case, "batch": count, "kv_len": int(tokens), **held, "load_s": round(loaded, 1)}
        rows.append(row)
        if count > fits:
            row["note"] = f"{fits} fit"
        elif options.seconds - (time.monotonic() - started) < count * int(tokens) / options.rate:
            row["note"] = LATE
        else:
            prompts = prompts_of(count, int(tokens))
            row["prefill_s"] = round(took(prompts, 1), 3)
            turns = [(took(prompts, new) - took(prompts, 2)) / options.steps * 1e3 for _ in range(1 if batch == "fit" else 2)]
            row["ms"], row["slower_ms"] = round(min(turns), 3), round(max(turns), 3)
            row["tokens_per_s"] = round(count / min(turns) * 1e3, 1)
            if options.profile and torch.cuda.is_available() and case == options.cases[0]:
                list_kernels(name, lambda prompts=prompts: took(prompts, 12), options)
        here = torch.cuda.is_available() and options.ranks == 1
        row["peak_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 2) if here else None
        wrote(rows)
    if trace:
        took(prompts_of(1, min(2000, longest - 20)), 8)
        rows.append({"engine": name, "case": "trace", **held, "load_s": round(loaded, 1), **follow(llm, trace, options.trace_seconds)})
    return rows


@dataclass(frozen=True)
class Arrival:
    """A request of a trace, `at` seconds after its beginning."""

    at: float
    prompt: list[int]
    new: int


def trace_of(options: Namespace) -> list[Arrival]:
    """The same requests for every engine."""
    draw, words = random.Random(0), 1000
    (least, most), new = ((150, 700), (4, 12)) if options.tiny else ((1000, 32000), (100, 500))
    documents = [[draw.randrange(3, words) for _ in range(most)] for _ in range(4)]
    made, at = list[Arrival](), 0.0
    for _ in range(options.trace):
        at += draw.expovariate(options.arrivals)
        tokens = round(least * (most / least) ** draw.random())
        common = tokens * 9 // 10 if draw.random() < options.shared else 0
        prompt = draw.choice(documents)[:common] + [draw.randrange(3, words) for _ in range(tokens - common)]
        made.append(Arrival(at, prompt, draw.randint(*new)))
    return made


def follow(llm: Any, trace: Sequence[Arrival], seconds: float) -> Row:
    """What a trace took, for so many seconds."""
    import numpy as np
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine, waiting = llm.llm_engine, list(trace)[::-1]
    times: dict[str, list[float]] = {str(number): [] for number in range(len(trace))}
    hits = asked = finished = 0
    start = time.perf_counter()
    while (waiting or engine.has_unfinished_requests()) and (now := time.perf_counter() - start) < seconds:
        while waiting and waiting[-1].at <= now:
            number, one = len(trace) - len(waiting), waiting.pop()
            how = SamplingParams(
                max_tokens=one.new, ignore_eos=True, detokenize=False, temperature=0, output_kind=RequestOutputKind.DELTA
            )  # fmt: skip
            engine.add_request(str(number), {"prompt_token_ids": one.prompt}, how)
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, waiting[-1].at - now))
            continue
        for result in engine.step():
            times[result.request_id] += [time.perf_counter() - start] * len(result.outputs[0].token_ids)
            if result.finished:
                finished, hits = finished + 1, hits + (result.num_cached_tokens or 0)
                asked += len(trace[int(result.request_id)].prompt)
    took = time.perf_counter() - start
    left = [name for name, one in zip(times, trace, strict=True) if len(times[name]) < one.new]
    engine.abort_request(left)
    told = {name: at for name, at in times.items() if len(at) > 1}
    gaps = np.concatenate([np.diff(at) for at in told.values()]) if told else np.zeros(1)
    means = [(at[-1] - at[0]) / (len(at) - 1) for at in told.values()] or [0.0]
    firsts = [at[0] - trace[int(name)].at for name, at in times.items() if at] or [0.0]
    tokens = sum(map(len, times.values()))
    return {
        "batch": finished, "trace_s": round(took, 2), "tokens_per_s": round(tokens / took, 1), "cached": round(hits / max(1, asked), 4),
        "tpot_p99_ms": round(float(np.percentile(means, 99)) * 1e3, 2), "gap_p99_ms": round(float(np.percentile(gaps, 99)) * 1e3, 2),
        "first_p50_s": round(float(np.median(firsts)), 3), "note": f"{len(left)} not finished" if left else "",
    }  # fmt: skip


def list_kernels(name: str, run: Any, options: Namespace) -> None:
    """Kernels by their time, with how often they ran."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in profile.events():
        found = sums[event.name[:150]]
        found[0], found[1] = found[0] + event.device_time_total, found[1] + 1
    with (Path(os.environ.get("OUT") or RESULTS) / f"{gpu_word()}_vllm_kernels.txt").open("a") as opened:
        print(f"== {name}, {options.cases[0]}, 12 tokens: us, count, us each", file=opened)
        for kernel, (us, count) in sorted(sums.items(), key=lambda item: -item[1][0])[:24]:
            print(f"{us:10.0f} {count:6d} {us / count:9.2f}  {kernel}", file=opened)


# --- processes ---------------------------------------------------------------------------------------------------------------


def build(options: Namespace) -> None:
    """Compile what the engines will ask for, several at a time."""
    from concurrent.futures import ThreadPoolExecutor

    import torch

    from kvgen.api import get_linear_kernel
    from kvgen.integrations.vllm.formats import PAGE, Format, Layer

    shape, ranks = TINY if options.tiny else SHAPES[options.shape], options.ranks
    heads = shape["num_attention_heads"] // ranks, shape["num_key_value_heads"] // ranks, shape["head_dim"]
    layer = Layer(*heads, "float32" if options.tiny else "bfloat16", None, 0.0, sinks=False, q_len=1)
    forms = [Format(FORMATS[cache], layer) for cache in dict.fromkeys(name.split("+")[0] for name in options.engines) if cache in FORMATS]
    gpu = torch.device("cpu" if options.tiny else "cuda")
    with ThreadPoolExecutor(8) as pool:
        makers = [*(partial(form.kernel, PAGE) for form in forms), *(partial(form.chunks, PAGE, gpu) for form in forms)]
        for one in (shape, TINY if options.tiny else SMALL):
            for form in (WEIGHTS[name.partition("+")[2]] for name in options.engines if "+" in name):
                makers += [partial(get_linear_kernel, spec) for spec in products(one, form, layer.dtype, gpu, ranks)]
        list(pool.map(lambda make: make(), makers))


def products(shape: dict[str, Any], form: dict[str, Any], dtype: str, device: Any, ranks: int) -> list[Any]:
    """The specs of a rank's linear layers, as vLLM merges them."""
    from kvgen.integrations.linears import linear_spec

    hidden, inner, dim = shape["hidden_size"], shape["intermediate_size"] // ranks, shape["head_dim"]
    q, kv = (shape[name] // ranks * dim for name in ("num_attention_heads", "num_key_value_heads"))
    sizes = (q + 2 * kv, hidden), (hidden, q), (2 * inner, hidden), (hidden, inner)
    return [linear_spec("layer", device, {**form, "n": n, "k": k, "dtype": dtype}) for n, k in sizes]


def child(what: str, name: str, options: Namespace, limit: float) -> list[Row]:
    """What a process of its own found, and a row that says why it found no more."""
    out = options.scratch / f"{what}-{name}.json"
    out.unlink(missing_ok=True)
    command = [sys.executable, __file__, *sys.argv[1:], "--child", what, name]
    note = ""
    try:
        subprocess.run(command, timeout=max(1.0, limit), check=True)
    except subprocess.TimeoutExpired:
        note = LATE
    except subprocess.CalledProcessError as error:
        note = f"{FAILED}: exit {error.returncode}"
    rows = json.loads(out.read_text()) if out.exists() else []
    return [*rows, {"engine": name, "case": what, "note": note}] if note else rows


def main() -> int:
    command = parser(__doc__)
    command.add_argument("--engines", type=lambda text: text.split(","), default=[*FLASH, *FORMATS])
    command.add_argument(
        "--cases", type=lambda text: [] if text == "none" else text.split(","), default=["8x32600", "32x8100", "fitx32600"]
    )
    command.add_argument("--trace", type=int, default=0, help="requests of a trace, after the cases")
    command.add_argument("--arrivals", type=float, default=10, help="of requests, per second")
    command.add_argument("--shared", type=float, default=0.75, help="of requests, those that begin like others")
    command.add_argument("--trace-seconds", type=float, default=60)
    command.add_argument("--steps", type=int, default=128)
    command.add_argument("--memory", type=float, default=0.9, help="of the GPU's memory, what vLLM may take")
    command.add_argument("--budget", type=float, default=3600, help="seconds for all")
    command.add_argument("--seconds", type=float, default=300, help="for one engine; a case that would take longer is left out")
    command.add_argument("--rate", type=float, default=20000, help="tokens of a prompt per second, for that")
    command.add_argument("--scratch", type=Path, default=Path("/tmp/kvgen-vllm-steps"))
    command.add_argument("--shape", choices=SHAPES, default="8b", help="of the model: Llama-3.1-8B, or 16 layers of Llama-3.1-70B")
    command.add_argument("--ranks", type=int, default=1, help="GPUs of one engine, by tensor parallelism")
    for flag in ("compile", "tiny", "profile", "no-check", "check-only", "speculate"):
        command.add_argument(f"--{flag}", action="store_true")
    command.add_argument("--child", nargs=2, help="used by the benchmark itself")
    options = command.parse_args()
    if options.child:
        what, name = options.child

        def found(rows: list[Row]) -> None:
            import vllm

            (options.scratch / f"{what}-{name}.json").write_text(json.dumps([row | {"vllm": vllm.__version__} for row in rows]))

        if what == "build":
            build(options)
            return 0
        found({"check": check, "measure": measure, "speculate": speculate}[what](name, options, found))
        return 0

    options.scratch.mkdir(parents=True, exist_ok=True)
    for stale in options.scratch.glob("auto.w*"):  # of another run, maybe of another shape or quantization
        stale.unlink()
    if options.ranks > 1:  # a process for each, which finds the backend by itself
        be_found(options.scratch / "plugin")
    compiling = subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--child", "build", "all"])
    rows = Turns(options).take(compiling.wait)
    bad = any(row.get("note") == WRONG or str(row.get("note", "")).startswith(FAILED) for row in rows)
    return int(compiling.wait() != 0 or bad)


def be_found(folder: Path) -> None:
    """Let processes of vLLM find the backend of this checkout, which no installed package names."""
    info = folder / "kvgen_checkout-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvgen-checkout\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nkvgen-checkout = kvgen.integrations.vllm:register\n")
    paths = [str(Path(__file__).resolve().parent.parent), str(folder), os.environ.get("PYTHONPATH", "")]
    os.environ.update(
        PYTHONPATH=os.pathsep.join(filter(None, paths)), VLLM_PLUGINS="kvgen-checkout", VLLM_ALLREDUCE_USE_SYMM_MEM="0",
        VLLM_WORKER_MULTIPROC_METHOD="spawn",
    )  # fmt: skip


class Turns:
    """The engines, one after the other; the others' checks need that of `auto`."""

    def __init__(self, options: Namespace) -> None:
        self.options, self.rows, self.started = options, list[Row](), time.monotonic()

    def take(self, compiled: Callable[[], Any]) -> list[Row]:
        """The rows of all. The first format waits until kernels are compiled."""
        options = self.options
        waiting = True
        for name in options.engines:
            if name not in FLASH and waiting:
                waiting = bool(compiled())
            if options.speculate:
                self._child("speculate", name)
                continue
            runs = True
            if not options.no_check and name not in FLASH.keys() - {"auto"}:
                runs = not any(str(row.get("note", "")).startswith(FAILED) for row in self._child("check", name))
            if runs and not options.check_only:
                self._child("measure", name)
        return self.rows

    def _child(self, what: str, name: str) -> list[Row]:
        """The rows of a process of its own, printed and written."""
        found = child(what, name, self.options, self.options.budget - (time.monotonic() - self.started))
        self.rows += found
        for row in found:
            print(json.dumps(row), flush=True)
        if self.rows:
            write_rows(f"{gpu_word()}_vllm", self.rows, about())
        return found


def about() -> Row:
    """On which GPU, with which versions, and when."""
    gpu = gpu_identity()
    day = datetime.now(timezone.utc).date().isoformat()
    return {"gpu": gpu.get("name", ""), "driver": gpu.get("driver", ""), "torch": version("torch"), "date": day}


if __name__ == "__main__":
    sys.exit(main())
