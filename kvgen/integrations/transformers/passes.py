"""The forward passes of a model over the layers of a cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy

import torch

from kvgen.errors import CacheMismatch, KvgenError
from kvgen.integrations.transformers.forwards import Chunk, Forward, Prompt, Ragged, States, Step
from kvgen.integrations.transformers.group import LayerGroup
from kvgen.integrations.transformers.padding import Padding


class Passes:
    """How far a model has filled its layers, and the forward pass that runs.

    A pass is begun by the model's first layer and ended by its last, which counts the new tokens of all layers at once.
    """

    def __init__(self, layers: Sequence[LayerGroup], positions: int | None = 0) -> None:
        """`layers`: the group of each layer of the model."""
        self.groups = list(dict.fromkeys(layers))
        self.layers = [(group, layers[:layer].count(group)) for layer, group in enumerate(layers)]
        """Group of each layer, and its number there."""
        self.positions: int | None = positions
        """Positions of every sequence that the model has seen; None once sequences were filled one by one."""
        self._most = positions or 0
        """The most positions that there were since the last reset, from which `cache.rollback` counts."""
        self._padding = Padding(self.groups[0].first.batch)
        self._due = 0
        self._broke = False
        """Whether an exception ended the attention of a layer, which may have written a part of its tokens."""
        self._forwards: dict[LayerGroup, Forward] = {}
        self._new: torch.Tensor | None = None
        self._uniform: bool | None = None
        self._bound: int | None = None

    @contextmanager
    def promised(self, *, uniform: bool | None, bound: int | None) -> Iterator[None]:
        """What `Kernel.plan` is told of the steps within."""
        self._uniform, self._bound = uniform, bound
        try:
            yield
        finally:
            self._uniform = self._bound = None

    def run(self, layer: int, x: States, mask: torch.Tensor | None) -> torch.Tensor:
        """Attention of one layer, which appends. `mask`, [batch, positions + new ones], is 0 for padding.

        Raises KvgenError if the model leaves layers out, ValueError on masks that are no padding, CacheMismatch where there is no room.
        """
        tokens = x.q.shape[1]
        if layer == 0:
            self._begin(tokens, mask)
        if layer != self._due:
            raise KvgenError(f"layer {layer} ran where layer {self._due} was due: kvgen's cache needs every layer of the model, in order")
        group, number = self.layers[layer]
        self._broke = True
        out = self._forwards[group].attend(number, x)
        self._due += 1
        if self._due == len(self.layers):
            self._end(tokens)
        self._broke = False
        return out

    def check(self) -> None:
        """Raises CacheMismatch once where the device refused an earlier change of lengths.

        It refuses a change in every group of layers: all of them are asked, so that it is told once and no group is ahead of another.
        """
        refused: CacheMismatch | None = None
        for group in self.groups:
            try:
                group.first.sequences.check()
            except CacheMismatch as error:  # noqa: PERF203
                refused = error
        if refused is not None:
            raise refused

    def one_by_one(self) -> None:
        """From now on sequences have lengths of their own, which the device alone knows."""
        self.positions = None

    def reset(self) -> None:
        """Forget every token, and a pass that broke off."""
        for group in self.groups:
            group.first.clear()
        self.positions, self._most, self._due, self._broke = 0, 0, 0, False
        self._padding = Padding(self.groups[0].first.batch)

    def crop(self, tokens: int) -> None:
        """Take back the newest positions of all sequences.

        Raises ValueError beyond `cache.rollback`, at padding, and where sequences were filled one by one, CacheMismatch where the device
        refused an earlier change of lengths. Nothing is changed then.
        """
        if self.positions is None:
            raise ValueError("crop takes the same tokens from all sequences, and these were filled one by one: use KVCache.crop")
        if tokens > self.positions - self._padding.end:
            raise ValueError(f"crop({tokens}): only the newest {self.positions - self._padding.end} positions have no padding")
        self._check_rollback(self.positions, tokens)
        self.check()
        for group in self.groups:
            group.first.crop(tokens)
        self.positions -= tokens

    def reorder(self, index: torch.Tensor) -> None:
        """Sequence b continues what sequence `index[b]` was. Raises ValueError for paged formats."""
        for group in self.groups:
            group.first.reorder(index)
        self._padding.reorder(index)

    def row(self, index: int) -> Passes:
        """The passes of one sequence over the same memory; waits for the device, which knows its length."""
        sequences = self.groups[0].first.sequences
        length = sequences.length_of(index)
        least = 0 if sequences.least is None else int(sequences.least[index])  # where crops of the past end
        self.one_by_one()
        groups = {group: group.row(index, length) for group in self.groups}
        row = Passes([groups[group] for group, _ in self.layers], length)
        row._most = max(length, least + sequences.rollback)
        return row

    def copy(self) -> Passes:
        """The same tokens in other memory, for the same kernels."""
        groups = {group: group.copy() for group in self.groups}
        other = Passes([groups[group] for group, _ in self.layers], self.positions)
        other._padding, other._most = deepcopy(self._padding), self._most
        other._due, other._broke = self._due, self._broke
        return other

    def _check_rollback(self, positions: int, tokens: int) -> None:
        """Raises ValueError for a crop that the device would refuse: a GPU does so later, when the host has counted it."""
        rollback = self.groups[0].first.sequences.rollback
        left = positions - self._most + rollback
        if rollback and tokens > left:
            raise ValueError(
                f"crop({tokens}): at most {left} positions can be taken back now; cache.rollback of the spec is {rollback}, which counts "
                f"from the {self._most} positions that there were"
            )

    def _begin(self, tokens: int, mask: torch.Tensor | None) -> None:
        """Make the forwards of all groups. What raises here leaves the cache as it was."""
        if self._due or self._broke:
            raise KvgenError(
                f"the forward pass before this one ended after {self._due} of {len(self.layers)} layers: call cache.reset() if it broke "
                "off; a model with fewer layers needs a cache of its own configuration"
            )
        if self.positions is not None:
            self._new = self._padding.of_new(self.positions, tokens, mask)
        elif mask is not None:
            raise ValueError("an attention_mask says which positions are padding, and these sequences were filled one by one: pass none")
        self.check()
        self._forwards = {group: self._forward(group, tokens) for group in self.groups}

    def _forward(self, group: LayerGroup, tokens: int) -> Forward:
        """How so many new positions run over the layers of a group."""
        kernel, caches = group.kernel, group.caches
        few = tokens <= kernel.spec.attention.q_len
        if self.positions is None:
            return self._step(group, tokens) if few else _chunk_of_some(group, tokens)
        lengths = self._padding.lengths(self.positions)
        if self._new is not None:
            return Ragged(kernel, caches, lengths, self._new)
        if few and min(lengths):
            return self._step(group, tokens)
        return (Prompt if group.plain and not self.positions else Chunk)(kernel, caches, tokens)

    def _step(self, group: LayerGroup, tokens: int) -> Step:
        return Step(group.kernel, group.caches, tokens, self._bound, self._uniform)

    def _end(self, tokens: int) -> None:
        """Count the new tokens, once for all layers."""
        for forward in self._forwards.values():
            forward.advance()
        self._forwards, self._due = {}, 0
        if self.positions is not None:
            self._padding.append(self.positions, self._new)
            self.positions += tokens
            self._most = max(self._most, self.positions)


def _chunk_of_some(group: LayerGroup, tokens: int) -> Forward:
    """A chunk of which sequences without tokens take no part, as in a step; waits for the device, which knows the lengths."""
    lengths = group.first.lengths.tolist()
    if not any(lengths):
        raise ValueError("no sequence has tokens: call cache.reset() to prefill all of them at once, or prefill one by cache.row(index)")
    if all(lengths):
        return Chunk(group.kernel, group.caches, tokens)
    taken = torch.tensor(lengths, device="cpu").gt(0).unsqueeze(1).expand(-1, tokens)
    return Ragged(group.kernel, group.caches, lengths, taken)
