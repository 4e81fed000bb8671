"""A serving loop: one decode step of a model over a batch whose places are taken and freed, captured once in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from kvgen.errors import CacheMismatch
from kvgen.integrations.transformers.cache import KvgenCache
from kvgen.runtime import checks

Choose = Callable[[Tensor], Tensor]
"""Logits [batch, vocabulary] to tokens, int64 [batch]; on a GPU it is captured with the step."""


def greedy(logits: Tensor) -> Tensor:
    """The likeliest token of every sequence."""
    return logits.argmax(-1)


class DecodeLoop:
    """Decodes up to `cache.batch` sequences at a time. A step is one replay of a CUDA graph; on the CPU the same code runs without it.

    Each of the cache's sequences is a *place*. `add` prefills a prompt into a free place, `remove` frees it, and `cache.reset()` frees all
    of them; none of these needs another capture. Free places take no part in attention. Every step appends the newest token of each
    sequence and chooses the next one.
    """

    def __init__(
        self,
        model: Any,
        cache: KvgenCache,
        *,
        choose: Choose = greedy,
        compile: bool | Mapping[str, Any] = False,  # noqa: A002
        bound: int | None = None,
        chunk: int | None = None,
    ) -> None:
        """Capture a step of `model` over an empty cache of its configuration.

        `compile` runs the model through `torch.compile(fullgraph=True)`, with its options where it is a mapping; prompts run as they are.
        `bound` is what no length exceeds (see `Kernel.plan`). Prompts are prefilled `chunk` tokens at a time, all at once by default.

        Raises ValueError for a cache that is not empty or on another device than the model.
        """
        if bool(cache.lengths.any()):
            raise ValueError("the loop captures a step over an empty cache: call cache.reset() first")
        if model.device != cache.device:
            raise ValueError(f"the model is on {model.device}, and the cache on {cache.device}: give KvgenCache the model's device")
        self.cache = cache
        self.tokens = torch.full((cache.batch,), -1, dtype=torch.int64, device=cache.device)
        """The newest token of every place, int64 [batch] on the device; -1 for free ones."""
        self._model, self._choose = model, choose
        self._chunk = None if chunk is None else checks.whole("chunk", chunk, 1)
        options = compile if isinstance(compile, Mapping) else {}
        self._forward = model.forward if compile is False else torch.compile(model.forward, fullgraph=True, **options)
        self._free = list(range(cache.batch))[::-1]
        positioned = "cache_position" in signature(model.forward).parameters  # the first releases of transformers 5 make it of one length
        self._extra = {"cache_position": torch.zeros(1, dtype=torch.int64, device=cache.device)} if positioned else {}
        self._promise = {"uniform": True if cache.batch == 1 else None, "bound": bound}
        self._graph = self._captured()

    @property
    def free(self) -> int:
        """Free places."""
        self._follow_reset()
        return len(self._free)

    @torch.no_grad()
    def add(self, prompt: Tensor | Sequence[int]) -> int:
        """Prefill a prompt into a free place and choose its next token, `tokens[place]`; the place.

        Raises ValueError if none is free, or on a wrong prompt, CacheMismatch for a prompt that is longer than the cache.
        """
        ids = torch.as_tensor(prompt, device=self.cache.device)
        if not ids.numel() or ids.dtype not in (torch.int64, torch.int32) or ids.numel() != ids.shape[-1]:
            raise ValueError(f"a prompt is one sequence of one or more token ids, not {ids.dtype} {list(ids.shape)}")
        if not self.free:
            raise ValueError("no place is free: remove a sequence first")
        place = self._free[-1]
        row = self.cache.row(place)
        if row.get_seq_length():
            raise ValueError(f"place {place} holds {row.get_seq_length()} tokens that the loop did not add: take them, or reset the cache")
        logits = torch.empty(0)
        try:
            for part in torch.split(ids.reshape(1, -1).long(), self._chunk or ids.numel(), dim=1):
                logits = self._model(part, **row.argument, use_cache=True, logits_to_keep=1).logits[:, -1]
            self.tokens[place] = self._chosen(logits)[0]
        except BaseException:
            self.cache.reset_rows([place])
            raise
        self._free.pop()
        return place

    def take(self, newest: Tensor) -> None:
        """Take every place for sequences that the cache holds by now, with the newest token of each, int64 [batch], not yet in the cache.

        For sequences that were filled otherwise: prompts of one batch, or a copied cache. Waits for the device.

        Raises ValueError if a place is taken, a sequence is empty, or the tokens are not int64 [batch].
        """
        if self.free != self.cache.batch:
            raise ValueError("take fills every place, and some are taken already")
        checks.tensor("newest", newest, (self.cache.batch,), torch.int64, self.cache.device)
        if not bool(self.cache.lengths.all()):
            raise ValueError("take is for a cache whose sequences all hold tokens, and some are empty: prefill them first")
        self.tokens.copy_(newest)
        self._free.clear()
        self.cache.passes.one_by_one()

    def remove(self, place: int) -> None:
        """Free a place. Raises ValueError if it is free."""
        self._follow_reset()
        if place in self._free or not 0 <= place < self.cache.batch:
            raise ValueError(f"place {place} holds no sequence")
        self.cache.reset_rows([place])
        self.tokens[place] = -1
        self._free.append(place)

    def step(self) -> Tensor:
        """Decode one token of every sequence; `tokens`, which the next step overwrites. The host does not wait.

        Raises ValueError if all places are free, CacheMismatch, which names the place, if this step (on a GPU an earlier one) had no room
        for a sequence: it keeps its length until it is removed.
        """
        if self.free == self.cache.batch:
            raise ValueError("all places are free: add a prompt first")
        try:
            self.cache.check()
            if self._graph is None:
                self._step()
            else:
                self._graph.replay()
        except CacheMismatch as error:
            lengths, max_len = self.cache.lengths.tolist(), self.cache.max_len  # waits for the device, which knows the lengths
            full = [str(place) for place, length in enumerate(lengths) if length >= max_len and place not in self._free]
            if not full:
                raise
            places = f"place {full[0]} is" if len(full) == 1 else f"places {', '.join(full)} are"
            removed = ", ".join(f"remove({place})" for place in full)
            raise CacheMismatch(
                f"{places} full: {max_len} tokens, the cache's max_len, and a step found no room for another. A token that was chosen "
                f"there without room means nothing. Call {removed} to go on with the others, or make the cache with a larger max_len"
            ) from error
        return self.tokens

    def run(self, steps: int) -> Tensor:
        """The tokens of several steps, int64 [steps, batch]; -1 for free places. Raises as `step` does."""
        taken = self.tokens.new_empty(steps, len(self.tokens))
        for row in taken:
            row.copy_(self.step())
        return taken

    def _follow_reset(self) -> None:
        """Free every place once the cache was reset: no sequence is left."""
        if self.cache.passes.positions is not None and len(self._free) < self.cache.batch:
            self._free = list(range(self.cache.batch))[::-1]
            self.tokens.fill_(-1)

    def _chosen(self, logits: Tensor) -> Tensor:
        """The caller's choice. Raises ValueError unless it is one token for each row of the logits."""
        tokens = self._choose(logits)
        if tokens.shape != logits.shape[:1] or tokens.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"choose made {tokens.dtype} {list(tokens.shape)} of logits {list(logits.shape)}, and must make int64 {[len(logits)]}"
            )
        return tokens

    @torch.no_grad()
    def _step(self) -> None:
        """One decode step, all of it on the device: tokens and lengths are read and written in place."""
        taken = self.tokens >= 0
        positions = self.cache.lengths.long().unsqueeze(1)
        ids = self.tokens.clamp(min=0).unsqueeze(1)
        self.cache.passes.promised = self._promise
        try:
            out = self._forward(input_ids=ids, position_ids=positions, **self.cache.argument, use_cache=True, **self._extra)
        finally:
            self.cache.passes.promised = {}
        self.tokens.copy_(torch.where(taken, self._chosen(out.logits[:, -1]), -1))

    def _captured(self) -> torch.cuda.CUDAGraph | None:
        """The graph of a step, on a GPU. Steps over free places compile and allocate what a capture must not."""
        if self.cache.device.type != "cuda":
            return None
        self.cache.passes.one_by_one()
        side = torch.cuda.Stream(self.cache.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self.cache.device))
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step()
            self.cache.reset_rows(range(self.cache.batch))  # a static schedule appends to free places, too
        torch.cuda.current_stream(self.cache.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):  # torch's own stream may be of another GPU
            self._step()
        self.cache.reset()
        return graph
