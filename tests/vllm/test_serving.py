"""kvgen's backend beside vLLM's own: tokens and log-probabilities, attention beside fp64, prefix caching, chunks, preemption."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm import LLM, SamplingParams

from kvgen.format.rotation import rotate_back
from kvgen.integrations.vllm import versions
from tests.vllm.conftest import VOCABULARY, write_model

PLAIN = {"key": {"bits": 16}, "value": {"bits": 16}, "cache": {"quantize": "block"}}
"""With a residual, which a format without scales of several tokens has only if it is asked for."""
SAW = {"key": {"bits": 4, "axis": "token", "group": 64, "rotate": "hadamard"}, "value": {"bits": 4, "axis": "token", "group": 64}}
"""Tokens are quantized as they arrive."""
INT8 = {"key": {"bits": 8, "axis": "channel", "group": 64}, "value": {"bits": 8, "axis": "token", "group": 64}}
INT4 = {"key": {"bits": 4, "axis": "channel", "group": 64}, "value": {"bits": 4, "axis": "token", "group": 64}}
UNQUANTIZED = INT4 | {"cache": {"sink": 4, "local": 32}}
"""Tokens outside of pages, so that requests share none."""
NEW = 24


def ids(seed: int, count: int) -> list[int]:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (count,), generator=random).tolist()


PROMPTS = [ids(n, n) for n in (5, 120, 257, 300)]


def engine(model: Path, form: Any, **changes: Any) -> LLM:
    """vLLM over a format; None: over its own backend. Engines of one process share its groups, so the one before has to be gone."""
    gc.collect()
    chosen = {"attention_backend": "CUSTOM", "additional_config": {"kvgen": form}} if form is not None else {}
    given = {
        "model": str(model), "skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True, "max_model_len": 512,
        "max_num_seqs": 6, "seed": 0, "max_logprobs": VOCABULARY, "disable_log_stats": False, "block_size": 128, **chosen,
    }  # fmt: skip
    return LLM(**(given | changes))


Found = tuple[list[list[int]], list[Tensor]]
"""The tokens of every prompt, and the log-probabilities of all tokens at each of them."""


def generate(llm: LLM, prompts: Sequence[list[int]], new: int = NEW) -> tuple[Found, list[int]]:
    """What follows the prompts, and how many tokens of each came from the prefix cache."""
    how = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=VOCABULARY)
    results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], how, use_tqdm=False)
    tokens = [list(result.outputs[0].token_ids) for result in results]
    scores = [
        torch.tensor([[step[token].logprob for token in range(VOCABULARY)] for step in result.outputs[0].logprobs]) for result in results
    ]
    return (tokens, scores), [result.num_cached_tokens for result in results]


def same(one: Found, other: Found, limit: float = 0.0) -> None:
    assert one[0] == other[0]
    for mine, theirs in zip(one[1], other[1], strict=True):
        assert (mine - theirs).abs().max() <= limit


@dataclass
class Watched:
    """The largest error of attention against fp64 over what it reads: raw K and V of a prompt without a past, else the cache."""

    worst: float = 0.0
    rows: dict[str, int] = field(default_factory=lambda: {"exact": 0, "cached": 0})


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    from kvgen.integrations.vllm.backend import KvgenImpl

    seen, stock = Watched(), KvgenImpl.forward

    def forward(
        self: Any, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, meta: Any, output: Tensor, **more: Any
    ) -> Any:
        found = stock(self, layer, query, key, value, kv_cache, meta, output, **more)
        if meta is not None:
            compare(self, query, key, value, meta, output.view(query.shape), seen)
        return found

    monkeypatch.setattr(KvgenImpl, "forward", forward)
    yield seen
    assert seen.worst < 1e-5


def compare(layer: Any, query: Tensor, key: Tensor, value: Tensor, m: Any, output: Tensor, seen: Watched) -> None:
    kernel, store, window = m.calls.kernel, layer._store, layer.format.layer.window
    for part, exact in m.parts:
        for b in range(part.start, part.stop):
            mine, length = slice(m.starts[b], m.starts[b + 1]), m.bounds[b]
            k, v = key[mine], value[mine]
            if not exact:
                k, v = (torch.zeros(1, length, *key.shape[1:], dtype=key.dtype) for _ in range(2))
                kernel._distinct[0].module.unpack(*m.after[b : b + 1].over(store), k, v)
                k, v = (x[0] if turn is None else rotate_back(x[0], turn) for x, turn in zip((k, v), kernel.layout.rotations, strict=True))
            past = length - (mine.stop - mine.start)
            scores = torch.einsum("qhd,khd->hqk", query[mine].double(), k.double().repeat_interleave(query.shape[1] // k.shape[1], 1))
            token, position = torch.arange(length), torch.arange(past, length)[:, None]
            hidden = (token > position) | (token <= position - window if window else False)
            weights = (scores * layer.scale).masked_fill(hidden, -torch.inf).softmax(-1)
            want = torch.einsum("hqk,khd->qhd", weights, v.double().repeat_interleave(query.shape[1] // v.shape[1], 1))
            error = (output[mine].double() - want).norm() / want.norm()
            seen.worst = max(seen.worst, error.item())
            seen.rows["exact" if exact else "cached"] += 1


@pytest.fixture(scope="module")
def stock(model: Path) -> Found:
    return generate(engine(model, None), PROMPTS)[0]


@pytest.mark.parametrize("form", [PLAIN, INT4, SAW], ids=["16", "int4", "saw"])
def test_prompts_of_one_batch_and_again_from_the_prefix_cache(model: Path, stock: Found, form: Any, watched: Watched) -> None:
    """With 16 bits tokens are those of vLLM's own backend. Prompts that hit pages, also those of the same step, give the same bits."""
    llm = engine(model, form)
    first, hits = generate(llm, PROMPTS)
    assert hits == [0, 0, 0, 0]
    if form is PLAIN:
        same(first, stock, limit=1e-4)
    if form is not SAW:
        assert first[0][0] == stock[0][0], "a prompt that is no longer than the residual is exact in any format"
    assert watched.rows["exact"] == (0 if form is SAW else 2 * len(PROMPTS))
    again, hits = generate(llm, PROMPTS)
    assert hits == [0, 0, 256, 256]
    if form is not INT4:
        same(again, first, limit=1e-4)
    shared = ids(7, 300)
    pair = [shared, shared[:270] + ids(8, 30)]
    both, hits = generate(llm, pair, 4)
    assert hits == [0, 256], "the second hits pages that the first fills in the same step"
    second, hits = generate(llm, pair[1:], 4)
    assert hits == [256]
    same(second, (both[0][1:], both[1][1:]), limit=1e-4)


@pytest.mark.parametrize("form", [PLAIN, INT8, UNQUANTIZED, SAW], ids=["16", "int8", "unquantized", "saw"])
def test_chunks_and_preemption(model: Path, form: Any, watched: Watched) -> None:
    """Chunks of 48 tokens beside decode steps, and pages for only some of the requests."""
    many = [ids(100 + n, n) for n in (250, 120, 110, 100, 125, 90)]
    few = {"max_num_batched_tokens": 48, "num_gpu_blocks_override": 9, "enable_prefix_caching": form is not UNQUANTIZED}
    llm = engine(model, form, **few)
    found, _ = generate(llm, many, 50)
    assert next(x.value for x in llm.get_metrics() if x.name == "vllm:num_preemptions") > 0
    assert watched.rows["cached"] > 500
    del llm
    if form is PLAIN:
        same(found, generate(engine(model, None), many, 50)[0], limit=1e-3)
    if form is SAW:  # as if there were room, and no chunks
        same(found, generate(engine(model, form, block_size=32), many, 50)[0], limit=1e-3)


def test_a_sliding_window(tmp_path_factory: pytest.TempPathFactory, watched: Watched) -> None:
    """A Mistral, whose pages before the window vLLM takes back."""
    mistral = write_model(
        tmp_path_factory.mktemp("mistral"), architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=100
    )
    how = {"max_num_batched_tokens": 64}
    found, _ = generate(engine(mistral, PLAIN, **how), PROMPTS)
    same(found, generate(engine(mistral, None, **how), PROMPTS)[0], limit=1e-3)
    assert watched.rows["cached"] > 0


@pytest.mark.parametrize("form", [INT4, SAW], ids=["int4", "saw"])
def test_prompts_by_another_attention_over_the_same_tokens(
    model: Path, form: Any, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM's FlashAttention computes them on a GPU: here by torch, of one row at a time."""
    rows: list[int] = []

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        _: int,
        starts: Tensor,
        bound: int,
        spans: Tensor,
        *,
        softmax_scale: float,
        out: Tensor,
        **mask: Any,
    ) -> None:
        assert mask == {"causal": True, "window_size": [-1, -1], "softcap": 0.0}
        assert bound >= (spans[1:] - spans[:-1]).max()
        for first, last, begin, end in zip(starts, starts[1:], spans, spans[1:], strict=False):
            hidden = torch.ones(last - first, end - begin, dtype=torch.bool).triu(end - begin - (last - first) + 1)
            heads = [x.transpose(0, 1) for x in (q[first:last], k[begin:end], v[begin:end])]
            found = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=~hidden, scale=softmax_scale, enable_gqa=True)
            out[first:last] = found.transpose(0, 1)
        rows.append(len(starts) - 1)

    monkeypatch.setattr(versions, "flash_attention", lambda *_: attend)
    llm = engine(model, form, max_num_batched_tokens=400)
    generate(llm, [*PROMPTS, PROMPTS[3][:270] + PROMPTS[2][:100]], 4)
    assert watched.rows["cached"] > 30
    assert rows, "prompts, and later chunks of one"
