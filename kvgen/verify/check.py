"""Verifies a variant against the fp64 reference, on poisoned memory, with repeated calls, in the same way on every device.

The checks of `checks_of` do not depend on a workload; `WorkloadCheck` verifies a variant at one, on the very caches that are timed.
A worker runs all of them, and so does `check`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import torch

from kvgen.format.rotation import rotate
from kvgen.format.sizes import timed_lengths
from kvgen.runtime.calls import Variant
from kvgen.runtime.kvcache import KVCache
from kvgen.spec import Workload
from kvgen.verify import Check, CheckPolicy
from kvgen.verify.calls import NAN_BYTE, CallCheck, Form, Output, Pair
from kvgen.verify.data import learned_sinks, normal
from kvgen.verify.filled import FilledCache
from kvgen.verify.lives import Lives
from kvgen.verify.reads import Reads
from kvgen.verify.sizes import Crowd, Far, LongPrompt
from kvgen.verify.steps import Steps
from kvgen.verify.tolerance import Comparison

FORMS = (Form(None, None, None, "advance", 0), Form(None, "strided", -0.5, "plan", 1))
"""Of `decode` at a workload, beside the one that has an output and an LSE: as transformers calls it, and as a captured step does."""


def check(
    variant: Variant,
    device: torch.device | str,
    policy: CheckPolicy | None = None,
    workloads: Sequence[Workload] = (),
    *,
    exact: bool = True,
) -> dict[str, float]:
    """The largest errors of a variant, at its workloads too; `exact` as for `Comparison`. Raises CheckError at the first wrong number."""
    comparison = Comparison(variant.spec, torch.device(device), exact=exact)
    for one in checks_of(variant, device, policy, comparison):
        one.prepare()
        one.run()
    for workload in workloads:
        caches = WorkloadCaches(variant, workload, device, timed_lengths(variant.spec, variant.layout, workload))
        at_workload = WorkloadCheck(variant, caches, policy, comparison)
        at_workload.prepare()
        at_workload.run()
    return comparison.accuracy


def checks_of(
    variant: Variant, device: torch.device | str, policy: CheckPolicy | None = None, comparison: Comparison | None = None
) -> list[Check]:
    """The checks of a variant that do not depend on a workload."""
    kinds = (Lives, Steps, LongPrompt, Far, Crowd, Reads)
    return [kind(variant, device, policy, comparison) for kind in kinds]


class WorkloadCaches:
    """Copies of a filled cache of a workload, and `q`, `k`, `v` and `sinks`, the inputs of every call.

    `lengths` are the tokens of each sequence, `length` the longest; `wanted` keeps what `WorkloadCheck` expects of them.
    """

    def __init__(self, variant: Variant, workload: Workload, device: torch.device | str, lengths: Sequence[int], copies: int = 1) -> None:
        self.workload, self.lengths, self.device = workload, list(lengths), torch.device(device)
        self.length, self.uniform = max(lengths), len(set(lengths)) == 1
        self.filled = FilledCache(variant, workload.batch, self.room(variant, workload, lengths), self.device)
        self.filled.set(self.lengths)
        self.start = self.filled.cache.lengths.clone()
        self.caches: list[KVCache] = [self.filled.cache, *(self.filled.copy(variant) for _ in range(copies - 1))]
        inputs = normal(variant.spec, workload.batch, workload.q_len, q_len=workload.q_len, seed=1)
        self.q, self.k, self.v = (x.to(self.device) for x in (inputs.q, inputs.k, inputs.v))
        self.sinks = learned_sinks(variant.spec, self.device)
        for cache in self.caches:
            variant.release(cache)  # the workspace of the variant that filled it
        self.wanted: dict[str, Any] = {}

    @staticmethod
    def room(variant: Variant, workload: Workload, lengths: Sequence[int]) -> int:
        """Tokens that a cache has room for in every sequence."""
        return max(*lengths, variant.spec.cache.unpacked) + variant.layout.tokens + workload.q_len

    def rewind(self) -> None:
        """Restore every cache as it was filled: lengths, bounds, residuals."""
        for cache in self.caches:
            cache.lengths.copy_(self.start)
            cache.bound, cache.sequences.uniform = self.length, self.uniform
            self.filled.restore(cache)


class WorkloadCheck(CallCheck):
    """The caches of a workload and one variant. Every row of every output is compared with fp64: at the workload's lengths, which all
    splits of all sequences take part in; at unequal lengths within the same caches; and after a `decode` that fills a block, with the
    block it packs.
    """

    def __init__(
        self, variant: Variant, caches: WorkloadCaches, policy: CheckPolicy | None = None, comparison: Comparison | None = None
    ) -> None:
        super().__init__(variant, caches.device, policy, comparison)
        self.caches, self.filled = caches, caches.filled
        self._name = caches.workload.key
        self._almost_full = self.rows.almost_full(caches.length)
        """A length near the workload's, at which one token more packs a block."""
        self._first: Output | None = None

    def prepare(self) -> None:
        """References, kept with the caches."""
        caches, filled, batch = self.caches, self.filled, self.caches.workload.batch
        if caches.wanted:
            return
        ragged = {lengths: filled.attend(caches.q, lengths) for lengths in unequal(batch, caches.length)}
        decode = filled.attend(caches.q, [self._almost_full] * batch, (caches.k, caches.v))
        filled.restore()
        blocks = filled.next_block(slice(None), self._almost_full, caches.k, caches.v)
        equal = filled.attend(caches.q, caches.lengths)
        caches.wanted = {"equal": equal, "ragged": ragged, "decode": decode, "blocks": blocks}

    def run(self) -> None:
        """Raises CheckError at the first wrong number. Leaves the caches as they were."""
        caches, wanted, where = self.caches, self.caches.wanted, f"attend at {self._name}"
        outputs: list[Pair] = [self.call(cache, caches.q) for cache in caches.caches]
        self._first = outputs[0]
        self.comparison.output(where, *outputs[0], *wanted["equal"])
        for output in (*outputs[1:], self.call(caches.caches[0], caches.q)):
            self.same_output(f"{where} repeated", output, outputs[0])
        without = self.variant.attend(caches.q, caches.caches[0], sinks=self.sinks)
        self.comparison.same_bits(f"{where} without LSE", without, outputs[0][0])
        for lengths, want in wanted["ragged"].items():
            self.filled.set(lengths, caches.length)
            found: Pair = self.call(caches.caches[0], caches.q)
            self.comparison.output(f"{where} over unequal lengths", *found, *want)
        self._decode(wanted)
        caches.rewind()

    def again(self) -> None:
        """Raises CheckError where the first call of `run` now gives other bits."""
        if self._first is not None:
            self.same_output(f"attend at {self._name} after timing", self.call(self.caches.caches[0], self.caches.q), self._first)

    def close(self) -> None:
        """Give the variant's workspaces back."""
        for cache in self.caches.caches:
            self.variant.release(cache)

    def _decode(self, wanted: dict[str, Any]) -> None:
        """The first new token packs a block; all that are not in it wait in the residual."""
        caches, cache, where = self.caches, self.filled.cache, f"decode at {self._name}"
        q_len, new = caches.workload.q_len, (caches.k, caches.v)
        target = self.filled.place(self.rows.filling(self._almost_full))
        before = cache.packed[target].clone()
        almost_full = [self._almost_full] * cache.batch
        for how in FORMS:
            self.filled.set(almost_full)
            found = self.formed(how, caches.q, new)(cache)
            self.comparison.output(f"{where}, {how.end}, LSE {how.lse}", *found, *wanted["decode"])
            self.filled.restore(cache)
        if not self.rows.arrival:
            cache.packed[target] = NAN_BYTE  # else a variant that packs nothing would leave the block of the one before it
        self.filled.set(almost_full)
        last: Pair = self.call(cache, caches.q, new)
        self.comparison.output(where, *last, *wanted["decode"])
        self.same_lengths(where, cache, [length + q_len for length in almost_full])
        mine = cache.packed[target].clone()
        cache.packed[target] = before
        self.same_codes(f"after {where}", mine, wanted["blocks"])
        if self.rows.arrival:
            self.filled.restore(cache)
            return
        after = self._almost_full + q_len
        first = max(self._almost_full, self.rows.first(after - self.rows.rollback))
        rotated = (rotate(x, op.rotation) for x, op in zip(new, self.layout.operands, strict=True))
        for residual, given in zip((cache.k_residual, cache.v_residual), rotated, strict=True):
            kept = residual[:, :, [self.rows.row(position) for position in range(first, after)]].transpose(1, 2)
            self.comparison.same_bits(f"residual after {where}", kept.contiguous(), given[:, first - after + q_len :].contiguous())


def unequal(batch: int, longest: int) -> list[tuple[int, ...]]:
    """Lengths of the sequences of a batch: log-uniform ones, and one long sequence beside short ones. Of one sequence there are none."""
    if batch == 1:
        return []
    draw = random.Random(0)
    log = [max(1, int(math.exp(draw.uniform(0.0, math.log(longest))))) for _ in range(batch)]
    log[batch // 2] = longest
    short = [max(1, longest // 64 - number % 7) for number in range(batch)]
    short[-1] = longest
    return [tuple(log), tuple(short)]
