"""The layers of a model that have one spec: their caches share lengths, and a step has one plan for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvgen.api.kernel import Kernel
from kvgen.errors import KvgenError
from kvgen.integrations.transformers.forwards import Chunk, Forward, Prompt, Ragged, States, Step
from kvgen.runtime.kvcache import KVCache
from kvgen.runtime.rows import row_of


class LayerGroup:
    """Caches of the layers of one spec, in the model's order, and how far the model has filled them.

    Caches hold real tokens alone. The model counts *positions*, padding included.
    """

    def __init__(self, kernel: Kernel, caches: Sequence[KVCache], positions: int | None = 0) -> None:
        self.kernel, self.caches = kernel, list(caches)
        self.positions: int | None = positions
        """Positions of every sequence that the model has seen; None once sequences were filled one by one (`row`)."""
        self.bound: int | None = None
        self.uniform: bool | None = None
        """What `Kernel.plan` is told of every step."""
        self._unpadded = positions or 0
        """The newest positions at which no sequence has padding."""
        self._forward: Forward | None = None
        self._next = 0
        attention = kernel.spec.attention
        self._plain = attention.window is None and not attention.softcap and not attention.sinks

    def run(self, layer: int, x: States, mask: torch.Tensor | None) -> torch.Tensor:
        """Attention of one layer, which appends. `mask`, bool [batch, positions + new ones], is 0 for padding.

        Raises KvgenError if the model leaves layers out, ValueError on masks that are no padding, CacheMismatch where there is no room.
        """
        if layer == 0:
            self._forward, self._next = self._begin(x.q.shape[1], mask), 0  # a forward that broke off has advanced nothing
        if self._forward is None or layer != self._next:
            raise KvgenError(f"layer {layer} of its kind ran where layer {self._next} was due: kvgen's cache needs every layer in order")
        out = self._forward.attend(layer, x)
        self._next += 1
        if self._next == len(self.caches):
            forward, self._forward = self._forward, None
            forward.advance()
            if self.positions is not None:
                self.positions += x.q.shape[1]
        return out

    def row(self, index: int) -> LayerGroup:
        """One sequence as a group of batch 1, over the same memory; waits for the device, which knows its length."""
        length = int(self.caches[0].lengths[index])
        self.positions = None
        return LayerGroup(self.kernel, row_of(self.caches, index, length), length)

    def crop(self, tokens: int) -> None:
        """Take back the newest positions of all sequences.

        Raises ValueError beyond `cache.rollback`, at padding, and where sequences were filled one by one.
        """
        if self.positions is None:
            raise ValueError("crop takes the same tokens from all sequences, and these were filled one by one: use KVCache.crop")
        if tokens > self._unpadded:
            raise ValueError(f"crop({tokens}): only the newest {self._unpadded} positions have no padding")
        self.caches[0].crop(tokens)
        self.positions -= tokens
        self._unpadded -= tokens

    def reset(self) -> None:
        """Forget every token."""
        self.caches[0].clear()
        self.positions = self._unpadded = 0

    def _begin(self, tokens: int, mask: torch.Tensor | None) -> Forward:
        """The forward of so many new positions."""
        if mask is not None:
            return self._masked(tokens, mask)
        self._unpadded += tokens
        return self._dense(tokens, filled=self.positions != 0)

    def _dense(self, tokens: int, *, filled: bool) -> Forward:
        """No padding among the new positions; `filled`: every sequence that takes part has tokens."""
        if filled and tokens <= self.kernel.spec.attention.q_len:
            return Step(self.kernel, self.caches, tokens, self.bound, self.uniform)
        if self._plain and self.positions == 0:
            return Prompt(self.kernel, self.caches, tokens)
        return Chunk(self.kernel, self.caches, tokens)

    def _masked(self, tokens: int, mask: torch.Tensor) -> Forward:
        if self.positions is None:
            raise ValueError("an attention_mask says which positions are padding, and these sequences were filled one by one: pass none")
        batch = self.caches[0].batch
        if tuple(mask.shape) != (batch, self.positions + tokens):
            wanted = [batch, self.positions + tokens]
            raise ValueError(f"attention_mask must have shape {wanted}, past and new positions, not {list(mask.shape)}")
        host = mask.cpu()
        lengths = self.caches[0].lengths.tolist()
        for row, (seen, held) in enumerate(zip(host[:, : self.positions].sum(1).tolist(), lengths, strict=True)):
            if seen != held:
                raise ValueError(
                    f"attention_mask shows {seen} of the {self.positions} past positions of sequence {row}, and the cache holds {held} "
                    "tokens: kvgen drops padding when it is appended, and cannot hide or show tokens later"
                )
        visible = host[:, self.positions :]
        if bool(visible.all()):
            self._unpadded += tokens
            return self._dense(tokens, filled=min(lengths) > 0)
        padded = (~visible.all(0)).nonzero().flatten()
        self._unpadded = tokens - 1 - int(padded[-1])
        return Ragged(self.kernel, self.caches, lengths, visible)
