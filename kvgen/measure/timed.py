"""Verification of a variant at a workload that is timed, on the very caches that are timed.

Every row of every output is compared with fp64: at the workload's lengths, which all splits of all sequences take part in; at unequal
lengths within the same caches; and after a `decode` that fills a block, with the block it packs.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import torch

from kvgen.errors import CheckError
from kvgen.format.residual import ResidualRows, residual_rows
from kvgen.format.window import window_places
from kvgen.measure.call_forms import Form, formed
from kvgen.measure.compare import NAN_BYTE, Comparison, poisoned
from kvgen.measure.filled import Output
from kvgen.measure.inputs import WorkloadInputs
from kvgen.runtime.kvcache import KVCache
from kvgen.runtime.variant import Variant
from kvgen.verify.packing import OPERANDS, pack_blocks, read_codes

SAMPLED = 16
"""Sequences whose packed block is compared: the first, the last, and others in between."""
FORMS = (Form(None, None, None, "advance", 0), Form(None, "strided", -0.5, "plan", 1))
"""Of `decode` at a workload, beside the one that has an output and an LSE: as transformers calls it, and as a captured step does."""


@dataclass(frozen=True)
class _Wanted:
    """The expected results over the inputs of a workload; the same for every variant of its layout."""

    equal: Output
    ragged: dict[tuple[int, ...], Output]
    decode: Output
    blocks: torch.Tensor
    """The expected full block of the sampled sequences: uint8 [sampled, kv_heads, block_bytes]."""


class TimedCheck:
    """The inputs of a workload and one variant. `prepare` computes references unless the inputs hold them, `run` calls the variant."""

    def __init__(self, inputs: WorkloadInputs, variant: Variant, comparison: Comparison) -> None:
        self._inputs, self._variant, self._comparison = inputs, variant, comparison
        self._name = inputs.workload.key
        self._first: Output | None = None

    def prepare(self) -> None:
        """References, kept with the inputs."""
        if self._inputs.wanted is None:
            self._inputs.wanted = self._references()

    def run(self) -> None:
        """Raises CheckError at the first wrong number. Leaves the caches as they were."""
        wanted = self._wanted
        self._equal(wanted)
        for lengths, want in wanted.ragged.items():
            self._inputs.filled.set(lengths, self._inputs.length)
            self._comparison.output(f"attend at {self._name} over unequal lengths", *self._attend(self._caches[0]), *want)
        self._decode(wanted)
        self._inputs.rewind()

    def again(self) -> None:
        """Raises CheckError where the first call of `run` now gives other bits."""
        if self._first is not None:
            self._same(f"attend at {self._name} after timing", self._attend(self._caches[0]), self._first)

    def close(self) -> None:
        """Give the variant's workspaces back."""
        for cache in self._caches:
            self._variant.release(cache)

    def _equal(self, wanted: _Wanted) -> None:
        outputs = [self._attend(cache) for cache in self._caches]
        self._first = outputs[0]
        self._comparison.output(f"attend at {self._name}", *outputs[0], *wanted.equal)
        for output in (*outputs[1:], self._attend(self._caches[0])):
            self._same(f"attend at {self._name} repeated", output, outputs[0])
        without = self._variant.attend(self._inputs.q, self._caches[0], sinks=self._inputs.sinks)
        self._comparison.same_bits(f"attend at {self._name} without LSE", without, outputs[0][0])

    def _decode(self, wanted: _Wanted) -> None:
        """The first new token packs a block; all that are not in it wait in the residual."""
        inputs, cache, where = self._inputs, self._caches[0], f"decode at {self._name}"
        q_len, target = inputs.workload.q_len, self._target(cache)
        before = cache.packed[target].clone()
        for how in FORMS:
            inputs.filled.set([self._almost_full] * cache.batch)
            call = formed(how, self._variant, inputs.device, inputs.q, (inputs.k, inputs.v), inputs.sinks)
            self._comparison.output(f"{where}, {how.end}, LSE {how.lse}", *call.run(self._variant, cache), *wanted.decode)
            inputs.filled.restore(cache)
        cache.packed[target] = NAN_BYTE  # else a variant that packs nothing would leave the block of the one before it
        inputs.filled.set([self._almost_full] * cache.batch)
        out, lse = self._poisoned()
        self._variant.decode(inputs.q, inputs.k, inputs.v, cache, out=out, lse=lse, sinks=inputs.sinks)
        self._comparison.output(where, out, lse, *wanted.decode)
        if not bool((cache.lengths == self._almost_full + q_len).all()):
            raise CheckError(f"{where}: lengths are not {q_len} more than before")
        mine = cache.packed[target][self._sampled]
        cache.packed[target] = before
        for which in OPERANDS:
            if self._variant.layout.operand(which).quantized:
                want = read_codes(self._variant.layout, which, wanted.blocks)
                self._comparison.codes(f"after {where}", self._variant.layout, which, mine, want)
        after = self._almost_full + q_len
        first = max(self._almost_full, self._rows.first(after - self._rows.rollback))
        for residual, new in ((cache.k_residual, inputs.k), (cache.v_residual, inputs.v)):
            kept = residual[:, :, [self._rows.row(position) for position in range(first, after)]].transpose(1, 2)
            self._comparison.same_bits(f"residual after {where}", kept.contiguous(), new[:, first - after + q_len :].contiguous())

    def _references(self) -> _Wanted:
        inputs, filled = self._inputs, self._inputs.filled
        batch, tokens = inputs.workload.batch, self._variant.layout.tokens
        ragged = {lengths: filled.attend(inputs.q, lengths) for lengths in unequal(batch, inputs.length)}
        decode = filled.attend(inputs.q, [self._almost_full] * batch, (inputs.k, inputs.v))
        filled.restore()
        first, old, sampled = self._rows.first(self._almost_full), self._almost_full, self._sampled
        held = [self._rows.row(position) for position in range(first, min(first + tokens, old))]
        k, v = (
            torch.cat([residual[sampled][:, :, held], new[sampled, : tokens - len(held)].transpose(1, 2)], 2)
            for residual, new in ((filled.cache.k_residual, inputs.k), (filled.cache.v_residual, inputs.v))
        )
        return _Wanted(filled.attend(inputs.q, inputs.lengths), ragged, decode, pack_blocks(self._variant.layout, k, v))

    def _attend(self, cache: KVCache) -> Output:
        out, lse = self._poisoned()
        self._variant.attend(self._inputs.q, cache, out=out, lse=lse, sinks=self._inputs.sinks)
        return out, lse

    def _poisoned(self) -> Output:
        q, device = self._inputs.q, self._inputs.device
        return poisoned(q.shape, q.dtype, device), poisoned((q.shape[0], q.shape[2], q.shape[1]), torch.float32, device)

    def _same(self, where: str, got: Output, want: Output) -> None:
        self._comparison.same_bits(where, got[0], want[0])
        self._comparison.same_bits(f"LSE of {where}", got[1], want[1])

    def _target(self, cache: KVCache) -> tuple[Any, ...]:
        """The index of `cache.packed` under which the block of every sequence lies that `decode` packs."""
        block = self._rows.packed_blocks(self._almost_full)
        if cache.block_table is not None:
            page, place = divmod(block, cache.packed.shape[2])
            return cache.block_table[:, page].long(), slice(None), place
        places = window_places(self._variant.spec, self._variant.layout.tokens)
        return slice(None), slice(None), block % places if places else block

    @property
    def _almost_full(self) -> int:
        """A length near the workload's, at which one token more packs a block."""
        rows = self._rows
        return rows.first(self._inputs.length) + rows.local + rows.block - 1

    @property
    def _rows(self) -> ResidualRows:
        return residual_rows(self._variant.spec, self._variant.layout.tokens)

    @property
    def _sampled(self) -> torch.Tensor:
        batch = self._inputs.workload.batch
        return torch.linspace(0, batch - 1, min(batch, SAMPLED)).long().to(self._inputs.device)

    @property
    def _caches(self) -> list[KVCache]:
        return self._inputs.caches

    @property
    def _wanted(self) -> _Wanted:
        wanted = self._inputs.wanted
        assert isinstance(wanted, _Wanted)
        return wanted


def unequal(batch: int, longest: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Lengths of the sequences of a batch: log-uniform ones, and one long sequence beside short ones. Of one sequence there are none."""
    if batch == 1:
        return []
    draw = random.Random(seed)
    log = [max(1, int(math.exp(draw.uniform(0.0, math.log(longest))))) for _ in range(batch)]
    log[batch // 2] = longest
    short = [max(1, longest // 64 - number % 7) for number in range(batch)]
    short[-1] = longest
    return [tuple(log), tuple(short)]
