"""The forward passes of a model over the layers of a cache: prompts, chunks, decode steps, and padding.

Caches hold real tokens alone; the model counts *positions*, padding included. Tensors are [batch, tokens, heads, head_dim].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from kvgen.api.kernel import Kernel
from kvgen.errors import CacheMismatch, KvgenError
from kvgen.runtime.executable import Plan
from kvgen.runtime.kvcache import KVCache, row_of


class States(NamedTuple):
    """Queries, new K and V of one layer, with what its attention has besides."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    sinks: Tensor | None


@dataclass(eq=False)
class LayerGroup:
    """The layers of a model that have one spec, in the model's order: their caches share lengths, and a step has one plan for them."""

    kernel: Kernel
    caches: list[KVCache]

    @property
    def first(self) -> KVCache:
        """The cache by which the lengths of all change."""
        return self.caches[0]


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
        self._new: Tensor | None = None
        self.promised: Mapping[str, int | bool | None] = {}
        """What `Kernel.plan` is told of the steps that run now."""

    def run(self, layer: int, x: States, mask: Tensor | None) -> Tensor:
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

    def append(self, states: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Append K and V of every layer, [batch, kv_heads, tokens, head_dim], the same number of tokens for all sequences.

        Raises ValueError where layers or tokens are not those of the model's caches, CacheMismatch where there is no room.
        """
        if len(states) != len(self.layers):
            raise ValueError(f"the cache has {len(self.layers)} layers, and K and V of {len(states)} were given")
        tokens = states[0][0].shape[2]
        self._begin(tokens, None)
        for (group, number), (k, v) in zip(self.layers, states, strict=True):
            if k.shape[2] != tokens:
                raise ValueError(f"all layers have the same tokens, and K was given with {tokens} and {k.shape[2]}")
            self._broke = True
            group.kernel.prefill(group.caches[number], k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous(), advance=False)
        self._end(tokens)
        self._broke = False

    def check(self) -> None:
        """Raises CacheMismatch once where the device refused an earlier change of lengths.

        It refuses a change in every group of layers: all of them are asked, so that it is told once and no group is ahead of another.
        """
        with ExitStack() as every:
            for group in self.groups:
                every.callback(group.first.sequences.check)

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
        rollback = self.groups[0].first.sequences.rollback
        left = self.positions - self._most + rollback
        if rollback and tokens > left:  # a GPU would refuse it later, when the host has counted it
            raise ValueError(
                f"crop({tokens}): at most {left} positions can be taken back now; cache.rollback of the spec is {rollback}, which counts "
                f"from the {self._most} positions that there were"
            )
        self.check()
        for group in self.groups:
            group.first.crop(tokens)
        self.positions -= tokens

    def reorder(self, index: Tensor) -> None:
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
        groups = {group: LayerGroup(group.kernel, row_of(group.caches, index, length)) for group in self.groups}
        row = Passes([groups[group] for group, _ in self.layers], length)
        row._most = max(length, least + sequences.rollback)
        return row

    def copy(self) -> Passes:
        """The same tokens in other memory, for the same kernels."""
        groups = {group: LayerGroup(group.kernel, deepcopy(group.caches)) for group in self.groups}
        other = Passes([groups[group] for group, _ in self.layers], self.positions)
        other._padding, other._most = deepcopy(self._padding), self._most
        other._due, other._broke = self._due, self._broke
        return other

    def _begin(self, tokens: int, mask: Tensor | None) -> None:
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
        attention = group.kernel.spec.attention
        few = tokens <= attention.q_len

        def step() -> Chunk:
            return Chunk(group, tokens, group.kernel.plan(group.first, tokens, **self.promised))  # type: ignore[arg-type]

        if self.positions is None:
            if few:
                return step()
            lengths = group.first.lengths.tolist()  # waits for the device
            if not any(lengths):
                raise ValueError(
                    "no sequence has tokens: call cache.reset() to prefill all of them at once, or prefill one by cache.row(index)"
                )
            taken = torch.tensor(lengths, device="cpu").gt(0).unsqueeze(1).expand(-1, tokens)
            return Chunk(group, tokens) if all(lengths) else Ragged(group, lengths, taken)  # as in a step, empty ones take no part
        lengths = self._padding.lengths(self.positions)
        if self._new is not None:
            return Ragged(group, lengths, self._new)
        if few and min(lengths):
            return step()
        masked = attention.window is not None or attention.softcap or attention.sinks
        return Chunk(group, tokens) if self.positions or masked else Prompt(group, tokens)

    def _end(self, tokens: int) -> None:
        """Count the new tokens, once for all layers."""
        for forward in self._forwards.values():
            forward.advance()
        self._forwards, self._due = {}, 0
        if self.positions is not None:
            self._padding.append(self.positions, self._new)
            self.positions += tokens
            self._most = max(self._most, self.positions)


# --- how one pass runs over a group of layers ------------------------------------------------------------------------------


class Chunk:
    """As many new tokens for every sequence: a decode step, with one plan for all layers, in which sequences without tokens take no part;
    without a plan extend attention, also for those.
    """

    def __init__(self, group: LayerGroup, tokens: int, plan: Plan | None = None) -> None:
        if plan is None:
            group.first.sequences.after(tokens)  # raises where there is no room
        self._group, self._tokens, self._plan = group, tokens, plan

    def attend(self, layer: int, x: States) -> Tensor:
        """Append x.k and x.v to the cache of a layer; the output, like x.q."""
        cache = self._group.caches[layer]
        out: Tensor = self._group.kernel.decode(x.q, x.k, x.v, cache, scale=x.scale, sinks=x.sinks, plan=self._plan, advance=False)
        return out

    def advance(self) -> None:
        """Count the new tokens, once for all layers."""
        self._group.first.advance([self._tokens] * self._group.first.batch if self._plan is None else self._tokens)


class Prompt(Chunk):
    """The first tokens of all sequences, where nothing but causality masks them: torch's attention over the tokens themselves."""

    def attend(self, layer: int, x: States) -> Tensor:
        """As `Chunk.attend`."""
        q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=x.scale, enable_gqa=True).transpose(1, 2)
        self._group.kernel.prefill(self._group.caches[layer], x.k, x.v, advance=False)
        return out


class Ragged:
    """Other numbers of new tokens for each sequence: padding is dropped, and each sequence runs by itself; its output is 0 at padding."""

    def __init__(self, group: LayerGroup, lengths: Sequence[int], visible: Tensor) -> None:
        """`visible`, bool [batch, tokens] on the host: the tokens that are no padding.

        Raises CacheMismatch where a sequence has no room: found only when it runs, the rows before it would have written.
        """
        self._group, max_len = group, group.first.max_len
        self._counts: list[int] = visible.sum(1).tolist()
        self._rows: dict[int, list[KVCache]] = {}
        self._places: dict[int, slice | Tensor] = {}
        for b, (length, count) in enumerate(zip(lengths, self._counts, strict=True)):
            if length + count > max_len:
                raise CacheMismatch(
                    f"the cache holds max_len={max_len} tokens per sequence, and sequence {b} would have {length + count}: a cache is made "
                    "with a larger max_len, or emptied by reset()"
                )
        for b in (b for b, count in enumerate(self._counts) if count):
            self._rows[b] = row_of(group.caches, b, lengths[b])
            found = visible[b].nonzero().flatten()
            first, last = int(found[0]), int(found[-1])
            together = last + 1 - first == len(found)  # a slice copies nothing
            self._places[b] = slice(first, last + 1) if together else found.to(group.first.device)

    def attend(self, layer: int, x: States) -> Tensor:
        """As `Chunk.attend`."""
        out = torch.zeros_like(x.q)
        for b, caches in self._rows.items():
            places = self._places[b]
            q, k, v = (t[b : b + 1, places] for t in (x.q, x.k, x.v))
            out[b : b + 1, places] = self._group.kernel.decode(q, k, v, caches[layer], scale=x.scale, sinks=x.sinks, advance=False)
        return out

    def advance(self) -> None:
        """As `Chunk.advance`."""
        self._group.first.advance(self._counts)


Forward = Chunk | Ragged


class Padding:
    """Which positions of a batch are padding, as the attention_mask said when they came."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._shown = torch.ones(batch, 0, dtype=torch.bool, device="cpu")
        """Which positions are real tokens, on the host, up to the last one at which any sequence has padding."""

    @property
    def end(self) -> int:
        """From this position on no sequence has padding."""
        return self._shown.shape[1]

    def lengths(self, positions: int) -> list[int]:
        """Real tokens of each sequence."""
        return [int(real) + positions - self.end for real in self._shown.sum(1).tolist()]

    def of_new(self, positions: int, tokens: int, mask: Tensor | None) -> Tensor | None:
        """Which new tokens are real, bool [batch, tokens] on the host; None where all of them are.

        A mask is compared with the known padding on its own device, and the host waits for one flag: on it depends which kernels run.
        Raises ValueError for a mask of the wrong shape, and where it, or its absence, disagrees with the padding that has come.
        """
        wanted = [self._batch, positions + tokens]
        anew = "another prompt needs cache.reset() first"
        if mask is None:
            if self.end:
                shape = f"give an attention_mask of shape {wanted} that hides it, as when it came"
                raise ValueError(f"past positions hold padding: {shape}; {anew}")
            return None
        if list(mask.shape) != wanted:
            raise ValueError(f"attention_mask must have shape {wanted}, past and new positions, not {list(mask.shape)}; {anew}")
        if bool((mask[:, : self.end].bool() == self._shown.to(mask.device)).all() & mask[:, self.end :].all()):
            return None
        host = mask.bool().cpu()
        wrong = host[:, :positions] ^ pad(self._shown, (0, positions - self.end), value=True)
        if bool(wrong.any()):
            row, position = wrong.nonzero()[0].tolist()
            verb, was = ("shows", "padding") if host[row, position] else ("hides", "a token")
            raise ValueError(
                f"attention_mask {verb} position {position} of sequence {row}, which came as {was}: kvgen drops padding when it is "
                "appended, and cannot hide or show tokens later"
            )
        return host[:, positions:]

    def append(self, positions: int, new: Tensor | None) -> None:
        """Count tokens that `of_new` described, after so many positions."""
        if new is not None:
            self._know(torch.cat([pad(self._shown, (0, positions - self.end), value=True), new], 1))

    def reorder(self, index: Tensor) -> None:
        """Sequence b becomes a copy of sequence `index[b]`."""
        self._know(self._shown[index.cpu()])

    def _know(self, shown: Tensor) -> None:
        padded = (~shown).any(0).nonzero().flatten()
        self._shown = shown[:, : int(padded[-1]) + 1 if len(padded) else 0]
