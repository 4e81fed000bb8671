"""Verifies a variant against the fp64 reference, on poisoned memory, with repeated calls, in the same way on every device.

`Checker` runs the life cycles of small caches (`scenario`, `steps`) and calls every function of a module. `reads.Reads` verifies long
sequences and large batches, `timed.TimedCheck` the caches that are timed. A worker runs all three; so does `check`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from kvgen.errors import CacheMismatch, CheckError
from kvgen.format.residual import residual_rows
from kvgen.format.window import first_held, window_places
from kvgen.measure.call_forms import GAP, FormedCall, form, formed, laid_out
from kvgen.measure.compare import Comparison, changed, poison, poisoned
from kvgen.measure.filled import reserved
from kvgen.measure.inputs import WorkloadInputs
from kvgen.measure.job import CheckPolicy
from kvgen.measure.reads import Reads
from kvgen.measure.scenario import Scenario, Step, long_prompt, scenarios
from kvgen.measure.sizes import Crowd, Far
from kvgen.measure.steps import ExtendSteps, PlannedSteps, StaticSteps
from kvgen.measure.timed import TimedCheck
from kvgen.runtime.kvcache import KVCache
from kvgen.runtime.variant import Variant
from kvgen.spec import Workload
from kvgen.verify.data import learned_sinks
from kvgen.verify.packing import OPERANDS, read_codes

SENTINEL = -77.0
TURNS = 2
"""How often the steps of a scenario run, in other forms each time."""
ATTENDS = 9
"""Forms of `attend`."""


def check(
    variant: Variant,
    device: torch.device | str,
    policy: CheckPolicy | None = None,
    workloads: Sequence[Workload] = (),
    *,
    exact: bool = True,
) -> dict[str, float]:
    """The largest errors of a variant, at its workloads too; `exact` as for `Checker`. Raises CheckError at the first wrong number."""
    checker = Checker(variant, device, policy, exact=exact)
    checker.run()
    checker.reads.prepare()
    checker.reads.run()
    for workload in workloads:
        timed = TimedCheck(WorkloadInputs(variant, workload, device, cold=0), variant, checker.comparison)
        timed.prepare()
        timed.run()
    return checker.comparison.accuracy


class Checker:
    """Verification of one variant. `again` repeats its last call, to detect whether memory was overwritten meanwhile.

    `exact`: whether its schedule carries the rounding errors that `exact_q: false` leaves out.
    """

    def __init__(self, variant: Variant, device: torch.device | str, policy: CheckPolicy | None = None, *, exact: bool = True) -> None:
        self.variant = variant
        self.device = torch.device(device)
        self.policy = policy or CheckPolicy()
        self.comparison = Comparison(variant.spec, self.device, exact=exact)
        self.reads = Reads(variant, self.device, self.comparison, self.policy.most_tokens)
        self.rows = residual_rows(variant.spec, variant.layout.tokens)
        self._sinks = learned_sinks(variant.spec, self.device)
        self._last: tuple[KVCache, torch.Tensor, torch.Tensor] | None = None

    def run(self) -> None:
        """Run all life cycles. Raises CheckError."""
        for number, scenario in enumerate(scenarios(self.variant.spec, self.variant.layout, self.policy, self.device.type)):
            self._live(scenario, number)
        for steps in (PlannedSteps, StaticSteps, ExtendSteps):
            steps(self.variant, self.device, self.policy, self.comparison).run()
        self._long_prefill()
        for size in (Far, Crowd):
            size(self.variant, self.device, self.policy, self.comparison).run()

    def again(self) -> None:
        """Raises CheckError if the last call of `run` now gives other bits."""
        if self._last is not None:
            cache, q, out = self._last
            got = self.variant.attend(q, cache, out=poisoned(out.shape, out.dtype, self.device), sinks=self._sinks)
            self.comparison.same_bits("after timing", got, out)

    def _live(self, scenario: Scenario, number: int) -> None:
        cache = self._poisoned_cache(scenario)
        for at, (k, v, new) in enumerate(scenario.chunks):
            self._prefill(cache, k, v, new, at)
        if scenario.drafts is not None:
            self._append_again(scenario, cache)
            self._prefill(cache, *scenario.drafts, None, 2)
            cache.crop([scenario.drafts[0].shape[1]] * scenario.batch)
            self._cropped_no_further(cache)
        self._attend(scenario, cache)
        before = _Before(cache)
        for turn in range(1, TURNS):
            outputs = [self._call(step, cache, at, turn, number) for at, step in enumerate(scenario.steps)]
            self._steps(scenario, f", turn {turn + 1}", outputs)
            before.restore(cache)
        if self.device.type == "cuda":
            self._replayed(scenario, cache, number)
            before.restore(cache)
        outputs = [self._call(step, cache, at, 0, number) for at, step in enumerate(scenario.steps)]
        self._steps(scenario, "", outputs)
        if tuple(cache.lengths.tolist()) != scenario.lengths:
            raise CheckError(f"{scenario.name}: lengths are {cache.lengths.tolist()}, not {list(scenario.lengths)}")
        self._unpack(scenario, cache)
        self._codes(scenario, cache)
        q = scenario.attend.q.to(self.device)
        self._last = (cache, q, self.variant.attend(q, cache, sinks=self._sinks))

    def _append_again(self, scenario: Scenario, cache: KVCache) -> None:
        """Take back the newest tokens of the last chunk, and append them again. The chunk may have packed blocks that the crop unpacks: the
        other tokens of these must have been kept.
        """
        sequences, (k, v, new) = cache.sequences, scenario.chunks[-1]
        known = sequences.bound, sequences.uniform
        counts = [min(count, self.variant.spec.cache.rollback) for count in new]
        cache.crop(counts)
        first = torch.tensor([count - again for count, again in zip(new, counts, strict=True)], device=k.device)
        rows = (first[:, None] + torch.arange(max(counts), device=k.device)).clamp(max=k.shape[1] - 1)
        batch = torch.arange(len(new), device=k.device)[:, None]
        self._prefill(cache, k[batch, rows], v[batch, rows], counts, 3)
        sequences.bound, sequences.uniform = known  # lengths are what they were, so that the same launches follow

    def _cropped_no_further(self, cache: KVCache) -> None:
        """Crops without new tokens between them count together: after one of all drafts, another is refused."""
        sequences, before = cache.sequences, cache.lengths.clone()
        known = sequences.bound, sequences.uniform
        refused = False
        try:
            cache.crop([1] * cache.batch)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            sequences.check()
        except (ValueError, CacheMismatch):
            refused = True
        if not refused or not torch.equal(cache.lengths, before):
            raise CheckError("a crop that goes beyond cache.rollback, with the one before it, is not refused")
        sequences.bound, sequences.uniform = known  # so that the same launches follow

    def _long_prefill(self) -> None:
        """Compare every block of a long prompt with the reference's, packed and unpacked."""
        spec, layout = self.variant.spec, self.variant.layout
        prompt = long_prompt(spec, layout, self.device.type)
        tokens, full, block = prompt.k.shape[1], prompt.packed.shape[1], layout.tokens
        cache = self.variant.new_cache(1, tokens, self.device)
        cache.packed = reserved(cache.packed.shape, torch.uint8, self.device)  # zeros, so that equal blocks have equal padding
        self._prefill(cache, prompt.k, prompt.v, None, 1)
        first = first_held(spec, block, tokens)
        blocks, want = self._blocks(cache, full)[0, :, first:full], prompt.packed[:, first:]
        if not torch.equal(blocks, want):
            for which in OPERANDS:
                if layout.operand(which).quantized:
                    self.comparison.codes("of a long prompt", layout, which, blocks, read_codes(layout, which, want))
        for name, got, read in zip(("K", "V"), self.variant.unpack(cache), prompt.read, strict=True):
            mine, exact = got[:, self.rows.sink :][:, first * block : full * block], read[:, first * block :]
            if not torch.equal(mine, exact):
                self.comparison.sequences(
                    "unpack", f"unpacked {name} of a long prompt", mine[0].transpose(0, 1), exact[0].transpose(0, 1).double()
                )

    def _steps(self, scenario: Scenario, how: str, outputs: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        for number, (step, output) in enumerate(zip(scenario.steps, outputs, strict=True), 1):
            self.comparison.output(f"decode {number} of {scenario.name}{how}", *output, step.out, step.lse)

    def _replayed(self, scenario: Scenario, cache: KVCache, number: int) -> None:
        """Run the steps as one CUDA graph, in which launches overlap."""
        calls = [(step, self._formed(step, at, TURNS, number, captured=True)) for at, step in enumerate(scenario.steps)]
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        outputs = []
        with torch.cuda.graph(graph):
            for step, call in calls:
                outputs.append(call.run(self.variant, cache))
                if step.crop is not None:
                    cache.crop(step.crop)
        graph.replay()
        self._steps(scenario, " in a graph", outputs)
        cache.sequences.captured = False  # the graph is not replayed again

    def _poisoned_cache(self, scenario: Scenario) -> KVCache:
        """A cache whose memory is all NaN, with shuffled pages and gaps between them, whose block table is a part of a wider one."""
        page = self.variant.spec.cache.page
        table = pages = None
        if page is not None:
            need = -(-scenario.max_len // page)
            pages = 2 * scenario.batch * need
            order = torch.randperm(pages, generator=torch.Generator().manual_seed(self.policy.seed))
            spare = order[-1].to(torch.int32)
            wide = torch.full((scenario.batch, 2 * need + 1), int(spare), dtype=torch.int32, device=self.device)
            table = wide[:, :need]
            table.copy_(order[: scenario.batch * need].reshape(scenario.batch, need))
        cache = self.variant.new_cache(scenario.batch, scenario.max_len, self.device, table, pages)
        return poison(cache)

    def _attend(self, scenario: Scenario, cache: KVCache) -> None:
        step = scenario.attend
        out, lse = self._call(step, cache)
        self.comparison.output(f"attend of {scenario.name}", out, lse, step.out, step.lse)
        for _ in range(self.policy.repeats - 1):
            same, same_lse = self._call(step, cache)
            self.comparison.same_bits(f"attend of {scenario.name} repeated", same, out)
            if same_lse is not None and lse is not None:
                self.comparison.same_bits(f"LSE of {scenario.name} repeated", same_lse, lse)
        for number in range(1, ATTENDS):
            got, got_lse = self._call(step, cache, number // 3 * 2, number % 3)
            self.comparison.output(f"attend of {scenario.name}, form {number + 1}", got, got_lse, step.out, step.lse)

    def _prefill(self, cache: KVCache, k: torch.Tensor, v: torch.Tensor, new: Sequence[int] | None, number: int) -> None:
        """Append strided K and V; those of V are not K's strides."""
        self.variant.prefill(cache, laid_out(k, number, self.device), laid_out(v, number + 1, self.device), new)

    def _formed(self, step: Step, at: int, turn: int, scenario: int, *, captured: bool = False) -> FormedCall:
        new = None if step.k is None or step.v is None else (step.k, step.v)
        how = form(at, turn, scenario)
        return formed(how, self.variant, self.device, step.q, new, self._sinks, empty=step.empty, captured=captured)

    def _call(self, step: Step, cache: KVCache, at: int = 0, turn: int = 0, scenario: int = 0) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run one step in a form; the outputs that the caller gives are poisoned."""
        found = self._formed(step, at, turn, scenario).run(self.variant, cache)
        if step.crop is not None:
            cache.crop(step.crop)
        return found

    def _unpack(self, scenario: Scenario, cache: KVCache) -> None:
        shape = (scenario.batch, cache.bound, *scenario.k.shape[2:])
        wider = (shape[0], shape[2], shape[1], shape[3] + GAP)
        got = [
            torch.full(shape, SENTINEL, dtype=self.variant.dtype, device=self.device),
            torch.full(wider, SENTINEL, dtype=self.variant.dtype, device=self.device)[..., : shape[3]].transpose(1, 2),
        ]
        self.variant.unpack(cache, *got)
        token, block = torch.arange(cache.bound), self.variant.layout.tokens
        gone = [first_held(self.variant.spec, block, length) * block for length in scenario.lengths]  # passed by a sliding window
        past = (token >= torch.tensor(scenario.lengths).unsqueeze(1)) | (token < torch.tensor(gone).unsqueeze(1))
        past = past.to(self.device)  # [batch, tokens]
        for name, mine, want in zip(("K", "V"), got, (scenario.k, scenario.v), strict=True):
            where = f"unpacked {name} of {scenario.name}"
            if not bool((mine[past] == SENTINEL).all()):
                raise CheckError(f"{where}: positions that the cache does not hold were written")
            for start in range(0, scenario.batch, len(want)):  # the sequences repeat
                some, tokens = slice(start, start + len(want)), min(cache.bound, want.shape[1])  # the bound may be beyond all lengths
                empty = past[some, :tokens][..., None, None]
                truth = want[: len(empty), :tokens].masked_fill(empty, 0.0)
                self.comparison.sequences("unpack", where, mine[some, :tokens].masked_fill(empty, 0.0), truth)

    def _codes(self, scenario: Scenario, cache: KVCache) -> None:
        """Compare packed codes and their params with the reference's."""
        count = torch.tensor([self.rows.packed_blocks(length) for length in scenario.lengths])
        blocks = self._blocks(cache, max((want.codes.shape[2] for want in scenario.codes.values()), default=0))
        gone = torch.tensor([first_held(self.variant.spec, self.variant.layout.tokens, length) for length in scenario.lengths])
        number = torch.arange(blocks.shape[2])
        full = ((number < count.unsqueeze(1)) & (number >= gone.unsqueeze(1))).to(self.device)  # [batch, blocks]
        for which, want in scenario.codes.items():
            distinct, most = want.codes.shape[0], want.codes.shape[2]
            for start in range(0, scenario.batch, distinct):  # the sequences repeat
                held = full[start : start + distinct]
                truth = changed(want, partial(_held, held[:, :most]))
                mine = blocks[start : start + distinct].transpose(1, 2)[held]
                self.comparison.codes(f"of {scenario.name}", self.variant.layout, which, mine, truth)

    def _blocks(self, cache: KVCache, count: int) -> torch.Tensor:
        """Packed blocks by sequence, at least `count`: uint8 [batch, kv_heads, blocks, block_bytes]; of a contiguous cache without a
        sliding window the cache itself."""
        if cache.block_table is not None:
            return cache.packed[cache.block_table.long()].transpose(1, 2).flatten(2, 3)
        places = window_places(self.variant.spec, self.variant.layout.tokens)
        return cache.packed[:, :, torch.arange(count) % places] if places else cache.packed


class _Before:
    """What a cache holds, and what the host knows of it, so that the same steps can follow again."""

    def __init__(self, cache: KVCache) -> None:
        sequences = cache.sequences
        self._changing = [x for x in (*cache.tensors[:4], sequences.least) if x is not None]
        self._kept = [x.clone() for x in self._changing]
        self._known = sequences.bound, sequences.uniform

    def restore(self, cache: KVCache) -> None:
        for mine, old in zip(self._changing, self._kept, strict=True):
            mine.copy_(old)
        cache.sequences.bound, cache.sequences.uniform = self._known


def _held(which: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Of blocks [distinct, kv_heads, blocks, ...] those that `which`, bool [sequences, blocks], names: [named, kv_heads, ...]."""
    return x[: len(which)].transpose(1, 2)[which]
