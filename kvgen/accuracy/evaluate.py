"""Teacher-forced perplexity of the small transformer over a kernel's cache, beside the same over an unquantized one.

A prompt is computed with exact attention, and its K and V are given to the kernel, which quantizes them (`prefill`). The following
tokens are then decoded one at a time from the text, through `plan` and `decode` in every layer, as a server does. Each step's prediction
of the next token counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from kvgen.accuracy.model import Transformer, causal
from kvgen.errors import KvgenError
from kvgen.runtime.kvcache import KVCache
from kvgen.runtime.plan import Plan

SCORED = 256
"""Tokens of every sequence that are predicted over the cache."""
BATCH = 8


class Decoder(Protocol):
    """What is needed of a kernel (`kvgen.api.Kernel`)."""

    @property
    def dtype(self) -> torch.dtype: ...
    def new_cache(self, batch: int | None = None, max_len: int | None = None, *, like: KVCache | None = None) -> KVCache: ...
    def prefill(self, cache: KVCache, k: torch.Tensor, v: torch.Tensor, *, advance: bool) -> None: ...
    def plan(self, cache: KVCache, q_len: int = 1) -> Plan: ...
    def decode(self, q: torch.Tensor, k_new: torch.Tensor, v_new: torch.Tensor, cache: KVCache, *, plan: Plan) -> torch.Tensor: ...


@dataclass(frozen=True)
class Prompt:
    """Sequences of text, and the K and V of their first tokens."""

    tokens: torch.Tensor
    """int64 [batch, length + 1]: the last one is only predicted."""
    kept: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """K and V of each layer, float32 [batch, length - scored, kv_heads, head_dim]."""

    @property
    def length(self) -> int:
        """Tokens in the cache after the last step."""
        return self.tokens.shape[1] - 1


@dataclass(frozen=True)
class Predictions:
    """Of every token that was predicted, [batch, scored] each."""

    loss: torch.Tensor
    """-log of the probability of the text's token, in nats, float64."""
    log_probabilities: torch.Tensor
    """Of all tokens, float64 [batch, scored, vocabulary]."""


@dataclass(frozen=True)
class Score:
    """A format against an unquantized cache, over the same text."""

    length: int
    perplexity: float
    unquantized: float
    """Perplexity over an unquantized cache."""
    increase: float
    """Perplexity over that of the unquantized cache, less 1."""
    increase_error: float
    """Standard error of `increase`, over tokens."""
    agreement: float
    """Fraction of tokens for which both predict the same first."""
    divergence: float
    """Mean Kullback-Leibler divergence of the predictions from those of the unquantized cache, in nats."""
    divergence_error: float
    """Its standard error."""


def require_text(text: torch.Tensor, length: int, *, batch: int = BATCH, scored: int = SCORED) -> None:
    """Raise KvgenError where a length leaves no prompt, or the text is too short for it."""
    if length <= scored:
        raise KvgenError(f"accuracy is taken over the last {scored} tokens of a sequence, so a length of {length} is too short")
    if len(text) < batch + length:
        raise KvgenError(f"{batch} sequences of {length} tokens need more text than the {len(text)} tokens that there are")


@torch.no_grad()
def prompt(model: Transformer, text: torch.Tensor, length: int, *, batch: int = BATCH, scored: int = SCORED) -> Prompt:
    """Sequences of `length` tokens from places at equal distances in the text. Raises as `require_text` does."""
    require_text(text, length, batch=batch, scored=scored)
    device = model.embedding.weight.device
    starts = range(0, len(text) - length, (len(text) - length) // batch)[:batch]
    tokens = torch.stack([text[start : start + length + 1] for start in starts]).to(device)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        kept.append((k, v))
        return causal(layer, q, k, v)

    model.hidden(tokens[:, : length - scored], attend)
    return Prompt(tokens, tuple(kept))


@torch.no_grad()
def predictions(model: Transformer, kernel: Decoder, given: Prompt) -> Predictions:
    """Decode the rest of a prompt's text over caches of a kernel. Raises as the kernel's calls do."""
    batch, kept = len(given.tokens), given.kept[0][0].shape[1]
    first = kernel.new_cache(batch, given.length)
    caches = [first, *(kernel.new_cache(like=first) for _ in given.kept[1:])]
    for cache, (k, v) in zip(caches, given.kept, strict=True):
        kernel.prefill(cache, k.to(kernel.dtype), v.to(kernel.dtype), advance=False)
    first.advance([kept] * batch)
    found = []
    for position in range(kept, given.length):
        plan = kernel.plan(first, 1)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan = plan) -> torch.Tensor:
            q, k, v = (x.to(kernel.dtype).contiguous() for x in (q, k, v))
            return kernel.decode(q, k, v, caches[layer], plan=plan).float()

        found.append(model(given.tokens[:, position : position + 1], attend, start=position))
        first.advance(1)
    likely = torch.cat(found, dim=1).double().log_softmax(-1)
    loss = -likely.gather(-1, given.tokens[:, kept + 1 :].unsqueeze(-1)).squeeze(-1)
    return Predictions(loss, likely)


def score(length: int, found: Predictions, unquantized: Predictions) -> Score:
    """One format's predictions against those over an unquantized cache."""
    more = found.loss - unquantized.loss
    ratio = math.exp(float(more.mean()))
    right = unquantized.log_probabilities
    divergence = (right.exp() * (right - found.log_probabilities)).sum(-1)
    return Score(
        length,
        perplexity=math.exp(float(found.loss.mean())),
        unquantized=math.exp(float(unquantized.loss.mean())),
        increase=ratio - 1,
        increase_error=ratio * float(more.std()) / math.sqrt(more.numel()),
        agreement=float((found.log_probabilities.argmax(-1) == right.argmax(-1)).double().mean()),
        divergence=float(divergence.mean()),
        divergence_error=float(divergence.std()) / math.sqrt(divergence.numel()),
    )
