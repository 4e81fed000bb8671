"""How one forward pass of a model runs over the caches of a group of layers.

A forward is made by the group's first layer and ended by its last: `attend` runs a layer, `advance` counts the new tokens. Making one
raises CacheMismatch where the cache has no room, before any layer has written. Tensors are [batch, tokens, heads, head_dim].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvgen.api.kernel import Kernel
from kvgen.errors import CacheMismatch
from kvgen.runtime.kvcache import KVCache, row_of


@dataclass(frozen=True)
class States:
    """Queries, new K and V of one layer, with what its attention has besides."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    sinks: torch.Tensor | None


class Forward(Protocol):
    """One pass over the layers of a group."""

    def attend(self, layer: int, x: States) -> torch.Tensor:
        """Append x.k and x.v to the cache of a layer; the output, like x.q."""

    def advance(self) -> None:
        """Count the new tokens, once for all layers."""


class Step:
    """A decode step: one plan for all layers; sequences without tokens take no part."""

    def __init__(self, kernel: Kernel, caches: Sequence[KVCache], tokens: int, bound: int | None, uniform: bool | None) -> None:
        self._kernel, self._caches, self._tokens = kernel, caches, tokens
        self._plan = kernel.plan(caches[0], tokens, bound=bound, uniform=uniform)

    def attend(self, layer: int, x: States) -> torch.Tensor:
        out: torch.Tensor = self._kernel.decode(x.q, x.k, x.v, self._caches[layer], scale=x.scale, sinks=x.sinks, plan=self._plan)
        return out

    def advance(self) -> None:
        self._caches[0].advance(self._tokens)


class Chunk:
    """As many new tokens for every sequence, also for those without any: extend attention."""

    def __init__(self, kernel: Kernel, caches: Sequence[KVCache], tokens: int) -> None:
        caches[0].sequences.after(tokens)  # raises where there is no room
        self._kernel, self._caches, self._tokens = kernel, caches, tokens

    def attend(self, layer: int, x: States) -> torch.Tensor:
        out: torch.Tensor = self._kernel.decode(x.q, x.k, x.v, self._caches[layer], scale=x.scale, sinks=x.sinks, advance=False)
        return out

    def advance(self) -> None:
        self._caches[0].advance([self._tokens] * self._caches[0].batch)


class Prompt(Chunk):
    """The first tokens of all sequences, where nothing but causality masks them: torch's attention over the tokens themselves."""

    def attend(self, layer: int, x: States) -> torch.Tensor:
        q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=x.scale, enable_gqa=True).transpose(1, 2)
        self._kernel.prefill(self._caches[layer], x.k, x.v, advance=False)
        return out


class Ragged:
    """Other numbers of new tokens for each sequence: padding is dropped, and each sequence runs by itself.

    The output is 0 where there is padding.
    """

    def __init__(self, kernel: Kernel, caches: Sequence[KVCache], lengths: Sequence[int], visible: torch.Tensor) -> None:
        """`visible`, bool [batch, tokens] on the host: the tokens that are no padding.

        Raises CacheMismatch where a sequence has no room for its tokens: found only when it runs, the rows before it would have written.
        """
        self._kernel, self._caches = kernel, caches
        self._counts: list[int] = visible.sum(1).tolist()
        _check_room(lengths, self._counts, caches[0].max_len)
        self._rows = {b: row_of(caches, b, lengths[b]) for b, count in enumerate(self._counts) if count}
        self._places = {b: _places(visible[b], caches[0].device) for b in self._rows}

    def attend(self, layer: int, x: States) -> torch.Tensor:
        out = torch.zeros_like(x.q)
        for b, caches in self._rows.items():
            places = self._places[b]
            q, k, v = (t[b : b + 1, places] for t in (x.q, x.k, x.v))
            out[b : b + 1, places] = self._kernel.decode(q, k, v, caches[layer], scale=x.scale, sinks=x.sinks, advance=False)
        return out

    def advance(self) -> None:
        self._caches[0].advance(self._counts)


def _check_room(lengths: Sequence[int], counts: Sequence[int], max_len: int) -> None:
    """Raises CacheMismatch where a sequence of so many tokens would have more than `max_len` with the new ones."""
    for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        if length + count > max_len:
            raise CacheMismatch(
                f"the cache holds max_len={max_len} tokens per sequence, and sequence {b} would have {length + count}: a cache is made "
                "with a larger max_len, or emptied by reset()"
            )


def _places(visible: torch.Tensor, device: torch.device) -> slice | torch.Tensor:
    """The visible tokens of a sequence: a slice where they lie together, which copies nothing."""
    found = visible.nonzero().flatten()
    first, last = int(found[0]), int(found[-1])
    return slice(first, last + 1) if last + 1 - first == len(found) else found.to(device)
