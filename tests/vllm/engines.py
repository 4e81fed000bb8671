"""vLLM over kvgen on the CPU: engines, what they generate, and what every row's attention is beside the reference in fp64."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform

from kvgen.verify.reference import WholeSequences
from tests.vllm.conftest import VOCABULARY

NEW = 24

PLAIN = {"key": {"bits": 16}, "value": {"bits": 16}, "cache": {"quantize": "block"}}
"""With a residual, which a format without scales of several tokens has only if it is asked for."""
INT8 = {"key": {"bits": 8, "axis": "channel", "group": 64}, "value": {"bits": 8, "axis": "token", "group": 64}}
INT4 = {"key": {"bits": 4, "axis": "channel", "group": 64}, "value": {"bits": 4, "axis": "token", "group": 64}}
UNQUANTIZED = INT4 | {"cache": {"sink": 4, "local": 32}}
"""Tokens outside of pages, so that requests share none."""


def per_token(**quant: Any) -> dict[str, Any]:
    """K and V, whose tokens are quantized as they arrive."""
    return {name: {"axis": "token", "group": 64, **quant} for name in ("key", "value")}


SAW = per_token(bits=4) | {"key": {"bits": 4, "axis": "token", "group": 64, "rotate": "hadamard"}}
ARRIVAL = {"int8": per_token(bits=8), "int4": per_token(bits=4), "saw": SAW, "e4m3": per_token(type="e4m3")}


def ids(seed: int, count: int) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (count,), generator=draw).tolist()


class Engines:
    """vLLM over a format; None: over its own backend. The last engine is kept: those of one process share what their layers registered."""

    def __init__(self) -> None:
        self.key: Any = None
        self.llm: LLM | None = None

    def __call__(self, model: Path, form: Any, **changes: Any) -> LLM:
        key = str((model, form, changes))
        if self.key != key or self.llm is None:
            self.close()
            chosen = {"attention_backend": "CUSTOM", "additional_config": {"kvgen": form}} if form is not None else {}
            given = {
                "model": str(model), "skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True, "max_model_len": 512,
                "max_num_seqs": 6, "seed": 0, "max_logprobs": VOCABULARY, "disable_log_stats": False, "block_size": 128,
                "num_gpu_blocks_override": 64, **chosen,
            }  # fmt: skip
            self.llm, self.key = LLM(**(given | changes)), key
            # once is enough, and a later time fails where numba, which drafts n-grams, has been imported
            type(current_platform).register_triton_kernel_overrides = lambda *_: None
        elif self.llm.llm_engine.vllm_config.cache_config.enable_prefix_caching:
            assert self.llm.reset_prefix_cache()
        return self.llm

    def close(self) -> None:
        self.llm = self.key = None
        gc.collect()


def counted(llm: LLM, name: str) -> int:
    """One of vLLM's metrics."""
    return int(next(x.value for x in llm.get_metrics() if x.name == f"vllm:{name}"))


Found = tuple[list[list[int]], list[Tensor]]
"""The tokens of every prompt, and the log-probabilities of all tokens at each of them."""


def generate(llm: LLM, prompts: Sequence[list[int]], new: int = NEW, **changes: Any) -> tuple[Found, list[int]]:
    """What follows the prompts, and how many tokens of each came from the prefix cache."""
    how = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=VOCABULARY)
    results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], how, use_tqdm=False, **changes)
    tokens = [list(result.outputs[0].token_ids) for result in results]
    scores = [
        torch.tensor([[step[token].logprob for token in range(VOCABULARY)] for step in result.outputs[0].logprobs]) for result in results
    ]
    return (tokens, scores), [result.num_cached_tokens for result in results]


def same(one: Found, other: Found, limit: float = 0.0) -> None:
    assert one[0] == other[0]
    for mine, theirs in zip(one[1], other[1], strict=True):
        assert (mine - theirs).abs().max() <= limit


# --- requests that come and go ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """A request: `given_up`: aborted once it has so many tokens; `n` continuations."""

    prompt: list[int]
    new: int
    given_up: int | None
    n: int

    @property
    def how(self) -> SamplingParams:
        draws: dict[str, Any] = {"temperature": 1.0, "top_k": 1, "n": self.n} if self.n > 1 else {"temperature": 0}
        return SamplingParams(max_tokens=self.new, ignore_eos=True, detokenize=False, logprobs=3, **draws)


def requests(count: int, seed: int = 0) -> list[Asked]:
    """Prompts of 1 to 300 tokens, many with the first tokens of others."""
    draw = random.Random(seed)
    shared = [ids(1000 + i, 300) for i in range(4)]
    made = []
    for number in range(count):
        length = 1 + (number * 37 + draw.choice((0, 128))) % 300
        common = draw.choice((0, 0, 128, 140, 256, 299))
        prompt = draw.choice(shared)[: min(common, length - 1)]
        prompt += ids(number, length - len(prompt))
        new = draw.randint(1, 30)
        made.append(Asked(prompt, new, draw.randint(1, new) if draw.random() < 0.15 else None, draw.choice((1, 1, 1, 1, 2))))
    return made


Answer = list[tuple[list[int], list[dict[int, float]]]]
"""Tokens and the best log-probabilities of each continuation."""


def answer(result: Any) -> Answer:
    return [
        (list(x.token_ids), [{token: one.logprob for token, one in step.items()} for step in x.logprobs])
        for x in sorted(result.outputs, key=lambda x: x.index)
    ]


def one_by_one(llm: LLM, asked: Sequence[Asked]) -> list[Answer]:
    return [answer(llm.generate({"prompt_token_ids": one.prompt}, one.how, use_tqdm=False)[0]) for one in asked]


def together(llm: LLM, asked: Sequence[Asked], seed: int = 0) -> list[Answer]:
    """The same requests, which arrive while others run, some of which are aborted."""
    draw, engine = random.Random(seed), llm.llm_engine
    waiting, found = list(range(len(asked)))[::-1], dict[int, Answer]()
    while waiting or engine.has_unfinished_requests():
        if waiting and (draw.random() < 0.4 or not engine.has_unfinished_requests()):
            for _ in range(min(len(waiting), draw.randint(1, 6))):
                number = waiting.pop()
                engine.add_request(str(number), {"prompt_token_ids": asked[number].prompt}, asked[number].how)
        for result in engine.step():
            number = int(result.request_id)
            known = found.setdefault(number, [([], []) for _ in range(asked[number].n)])
            for x, one in zip(sorted(result.outputs, key=lambda x: x.index), answer(result), strict=True):
                known[x.index] = one
            given_up = asked[number].given_up
            if given_up is not None and not result.finished and len(known[0][0]) >= given_up:
                engine.abort_request([result.request_id])
    return [found[number] for number in range(len(asked))]


def alike(found: Sequence[Answer], want: Sequence[Answer], asked: Sequence[Asked]) -> None:
    """The same tokens and bits, of requests that were aborted as far as they came."""
    for number, (mine, right, one) in enumerate(zip(found, want, asked, strict=True)):
        for (tokens, scores), (all_tokens, all_scores) in zip(mine, right, strict=True):
            count = len(tokens)
            assert count == one.new or one.given_up is not None, number
            assert tokens == all_tokens[:count], number
            assert scores == all_scores[:count], number


# --- every row beside the reference -----------------------------------------------------------------------------------------


@dataclass
class Watched:
    """The errors of attention against the reference in fp64, which knows K and V of every slot that vLLM gave, and vLLM's lengths; it
    reads neither kvgen's pages nor its residuals.
    """

    limit: float = 1e-5
    every: int = 1
    """Of so many steps one is compared."""
    worst: float = 0.0
    rows: dict[str, int] = field(default_factory=lambda: {"exact": 0, "cached": 0})
    steps: int = 0
    raw: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)
    """K and V of each layer, [pages * page, kv_heads, head_dim], as the model made them."""

    def compare(self, layer: Any, query: Tensor, key: Tensor, value: Tensor, meta: Any, output: Tensor, pages: int) -> None:
        given, page = meta.said, meta.calls.page
        tokens = len(given.slots)
        if id(layer) not in self.raw:
            shape = pages * page, *key.shape[1:]
            self.raw[id(layer)] = torch.zeros(shape, dtype=key.dtype), torch.zeros(shape, dtype=key.dtype)
        raw = self.raw[id(layer)]
        real = given.slots >= 0
        for held, new in zip(raw, (key, value), strict=True):
            held[given.slots[real]] = new[:tokens][real]
        self.steps += 1
        if self.steps % self.every:
            return
        kernel = meta.calls.kernel
        spec, arrival = kernel.spec, kernel.spec.cache.arrival
        plain = spec.attention.window is None and not spec.attention.softcap and not spec.attention.sinks
        sinks = layer._given_sinks.detach().double() if layer._given_sinks is not None else None
        for b, length in enumerate(given.lengths):
            mine = slice(given.starts[b], given.starts[b + 1])
            count = mine.stop - mine.start
            if not count:
                continue
            exact = count == length and count > meta.calls.most_q and plain and not arrival
            places = (given.table[b, : -(-length // page), None] * page + torch.arange(page)).flatten()[:length].long()
            k, v = (x[places][None] for x in raw)
            sequence = WholeSequences(spec, kernel.layout.tokens, k, v, layer.scales)
            want, _ = sequence.attend(query[None, mine], [0 if exact else length], [length], scale=layer.scale, sinks=sinks)
            error = (output[mine].double() - want[0]).flatten(1).norm(dim=1) / want[0].flatten(1).norm(dim=1)
            worst = error.nan_to_num(torch.inf).max().item()
            self.worst = max(self.worst, worst)
            assert worst <= self.limit, f"row {b} of {len(given.lengths)}, {count} tokens, length {length}: {worst:.2g}"
            self.rows["exact" if exact else "cached"] += 1


@dataclass(frozen=True)
class Given:
    """What vLLM said of a step."""

    lengths: list[int]
    starts: list[int]
    slots: Tensor
    table: Tensor


@contextmanager
def watching() -> Iterator[Watched]:
    from kvgen.integrations.vllm.backend import KvgenBuilder, KvgenImpl

    seen, forward_of, build_of = Watched(), KvgenImpl.forward, KvgenBuilder.build

    def build(self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        common, rows = common_attn_metadata, common_attn_metadata.num_reqs
        said = Given(
            common.seq_lens[:rows].tolist(), common.query_start_loc[: rows + 1].tolist(),
            common.slot_mapping[: common.num_actual_tokens].clone(), common.block_table_tensor[:rows].clone(),
        )  # fmt: skip
        meta = build_of(self, common_prefix_len, common_attn_metadata, fast_build)
        meta.said = said
        return meta

    def forward(
        self: Any, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, meta: Any, output: Tensor, **more: Any
    ) -> Any:
        found = forward_of(self, layer, query, key, value, kv_cache, meta, output, **more)
        if meta is not None:
            seen.compare(self, query, key, value, meta, output.view(query.shape), kv_cache.shape[0])
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KvgenBuilder, "build", build)
        patch.setattr(KvgenImpl, "forward", forward)
        yield seen


@contextmanager
def row_by_row() -> Iterator[None]:
    """Linear layers compute each token by itself: else a matrix product's bits depend on how many tokens are in a step."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    def processed(self: Any, layer: Any) -> None:
        pass

    def apply(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        out = torch.stack([torch.mv(layer.weight, row) for row in x.flatten(0, -2)]).view(*x.shape[:-1], -1)
        return out if bias is None else out + bias

    with pytest.MonkeyPatch.context() as patch:
        for method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
            patch.setattr(method, "apply", apply)
            patch.setattr(method, "process_weights_after_loading", processed)
        yield
