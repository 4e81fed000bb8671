"""Sequences of calls over small caches: prefill in chunks, attend, decode, on poisoned memory, with repeated calls.

Two scenarios: `ragged`, normal data at every length next to the end of the sink or of a block, filled in two chunks; and `long`,
structured data with scores up to 60 over several splits, and V with offsets and constant stretches. Both decode with every number of query
tokens that the spec allows, and on the CPU, which has no limit, with one larger number. Where the spec has a rollback, some tokens of every
step are taken back, in each sequence another number. The data are the same on every device; the reference is computed on the device,
because a GPU does that a hundred times as fast.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch

from kvgen.errors import CacheMismatch, CheckError
from kvgen.format.layout import PackedLayout
from kvgen.format.residual import first_held
from kvgen.runtime.kvcache import KVCache
from kvgen.spec import KernelSpec
from kvgen.verify import CheckPolicy
from kvgen.verify.calls import Call, CallCheck, Output, Pair, form, query_lengths
from kvgen.verify.data import Inputs, normal, structured
from kvgen.verify.packing import token_bits
from kvgen.verify.reference import WholeSequences

BATCH = 11
"""Least sequences of the ragged scenario."""
CONSTANT = 64
"""Tokens of a stretch with constant V: more than a kernel processes at once."""
EXTEND_ROWS = 130
"""Query rows of the larger call on the CPU, whose back end processes them in blocks of at most 64."""
SENTINEL = -77.0
ANY_CROP = 21
"""Tokens that are taken back where any number may be."""
TURNS = 2
"""How often the steps of a scenario run, in other forms each time."""
ATTENDS = 9
"""Forms of `attend`."""

Lengths = tuple[int, ...]


class Lives(CallCheck):
    """Both sequences."""

    def prepare(self) -> None:
        """See `scenarios`."""
        scenarios(self.spec, self.layout, self.policy, self.device.type)

    def run(self) -> None:
        """Raises CheckError at the first wrong number."""
        for number, scenario in enumerate(scenarios(self.spec, self.layout, self.policy, self.device.type)):
            self._live(scenario, number)

    def _live(self, scenario: Scenario, number: int) -> None:
        cache = self.poisoned_cache(len(scenario.lengths), scenario.max_len)
        for at, (new, counts) in enumerate(scenario.chunks):
            self.variant.prefill(cache, *self.laid_out(new, at), counts)
        if scenario.drafts is not None:
            self._append_again(scenario, cache)
            self.variant.prefill(cache, *self.laid_out(scenario.drafts, 2))
            cache.crop([scenario.drafts[0].shape[1]] * cache.batch)
            if self.spec.cache.rollback:
                self._cropped_no_further(cache)
        self._attend(scenario, cache)
        for turn in range(1, TURNS):
            with restored(cache):
                self._steps(scenario, cache, number, turn)
        if self.gpu:
            with restored(cache):
                self._replayed(scenario, cache, number)
        self._steps(scenario, cache, number, 0)
        self.same_lengths(scenario.name, cache, scenario.lengths)
        self._contents(scenario, cache)

    def _append_again(self, scenario: Scenario, cache: KVCache) -> None:
        """Take back the newest tokens of the last chunk, and append them again. The chunk may have packed blocks that the crop unpacks: the
        other tokens of these must have been kept.
        """
        counts = [min(count, crops(self.spec)) for count in scenario.chunks[-1][1]]
        starts = [length - again for length, again in zip(scenario.start, counts, strict=True)]
        with known(cache):
            cache.crop(counts)
            self.variant.prefill(cache, *self.laid_out(scenario.whole.new(starts, max(counts)), 3), counts)

    def _cropped_no_further(self, cache: KVCache) -> None:
        """Crops without new tokens between them count together: after one of all drafts, another is refused."""
        before, refused = cache.lengths.clone(), False
        with known(cache):
            try:
                cache.crop([1] * cache.batch)
                if self.gpu:
                    torch.cuda.synchronize(self.device)
                cache.sequences.check()
            except (ValueError, CacheMismatch):
                refused = True
        if not refused or not torch.equal(cache.lengths, before):
            raise CheckError("a crop that goes beyond cache.rollback, with the one before it, is not refused")

    def _attend(self, scenario: Scenario, cache: KVCache) -> None:
        step, where, first = scenario.attend, f"attend of {scenario.name}", None
        for number in (*[0] * self.policy.repeats, *range(1, ATTENDS)):
            got = self._call(step, number // 3 * 2, number % 3, 0)(cache)
            self.comparison.output(f"{where}, form {number + 1}", *got, step.out, step.lse)
            if first is None:
                first = got
            if number == 0:
                self.same_output(f"{where} repeated", got, first)

    def _call(self, step: Step, at: int, turn: int, scenario: int, *, captured: bool = False) -> Call:
        return self.formed(form(at, turn, scenario), step.q, step.new, empty=step.empty, captured=captured)

    def _steps(self, scenario: Scenario, cache: KVCache, number: int, turn: int) -> None:
        """Run the steps, each in a form of its own."""
        calls = (self._call(step, at, turn, number) for at, step in enumerate(scenario.steps))
        self._compare(
            f"{scenario.name}, turn {turn + 1}", scenario, [stepped(*both, cache) for both in zip(scenario.steps, calls, strict=True)]
        )

    def _replayed(self, scenario: Scenario, cache: KVCache, number: int) -> None:
        """Run the steps as one CUDA graph, in which launches overlap."""
        calls = [self._call(step, at, TURNS, number, captured=True) for at, step in enumerate(scenario.steps)]
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = [stepped(*both, cache) for both in zip(scenario.steps, calls, strict=True)]
        graph.replay()
        self._compare(f"{scenario.name} in a graph", scenario, outputs)
        cache.sequences.captured = False  # the graph is not replayed again

    def _compare(self, where: str, scenario: Scenario, outputs: Sequence[Output]) -> None:
        for number, (step, output) in enumerate(zip(scenario.steps, outputs, strict=True), 1):
            self.comparison.output(f"decode {number} of {where}", *output, step.out, step.lse)

    def _contents(self, scenario: Scenario, cache: KVCache) -> None:
        """What `unpack` gives up to each length, and the packed blocks, are the reference's; nothing is written beyond a length."""
        shape = (cache.batch, cache.bound, self.spec.attention.kv_heads, self.spec.attention.head_dim)
        memory = torch.full(shape, SENTINEL, dtype=self.variant.dtype, device=self.device)
        got = self.variant.unpack(cache, *self.laid_out((memory, memory), 0))
        past = self.same_contents(f"of {scenario.name}", got, scenario.whole.seen(scenario.lengths), scenario.lengths)
        if not all(bool((x[past] == SENTINEL).all()) for x in got):
            raise CheckError(f"unpack of {scenario.name}: positions that the cache does not hold were written")
        number = torch.arange(scenario.blocks.shape[2])
        full, gone = (
            torch.tensor([of(length) for length in scenario.lengths]).unsqueeze(1)
            for of in (self.rows.filling, lambda length: first_held(self.spec, self.block, length))
        )
        held = ((number < full) & (number >= gone)).to(self.device)  # [batch, blocks]
        blocks = packed_blocks(self, cache, len(number))[:, :, : len(number)]
        self.same_codes(f"of {scenario.name}", *(x.transpose(1, 2)[held] for x in (blocks, scenario.blocks)))
        if self.rows.arrival:
            self._last_blocks(scenario, blocks)

    def _last_blocks(self, scenario: Scenario, blocks: torch.Tensor) -> None:
        """The last block of a sequence holds the reference's numbers up to its length; padding, and places of no token, hold anything."""
        lengths = torch.tensor(scenario.lengths, device=self.device).unsqueeze(1)
        mine = token_bits(self.layout, torch.arange(self.block, device=self.device) < lengths % self.block).unsqueeze(1)
        last = [
            x[torch.arange(len(x)), :, (lengths[:, 0] // self.block).clamp(max=x.shape[2] - 1)] & mine for x in (blocks, scenario.blocks)
        ]
        self.same_codes(f"of the last tokens of {scenario.name}", *last)


def stepped(step: Step, call: Call, cache: KVCache) -> Output:
    """Run one step."""
    found = call(cache)
    if step.crop is not None:
        cache.crop(step.crop)
    return found


def packed_blocks(check: CallCheck, cache: KVCache, count: int) -> torch.Tensor:
    """Packed blocks by sequence, at least `count`: uint8 [batch, kv_heads, blocks, block_bytes]; of a contiguous cache without a sliding
    window the cache itself."""
    if cache.block_table is not None:
        return cache.packed[cache.block_table.long()].transpose(1, 2).flatten(2, 3)
    return cache.packed[:, :, torch.arange(count) % check.places] if check.places else cache.packed


@contextmanager
def known(cache: KVCache) -> Iterator[None]:
    """What the host knows of the lengths is the same afterwards, so that the same launches follow."""
    sequences = cache.sequences
    before = sequences.bound, sequences.uniform
    yield
    sequences.bound, sequences.uniform = before


@contextmanager
def restored(cache: KVCache) -> Iterator[None]:
    """What the cache holds is the same afterwards, too, so that the same steps can follow again."""
    changing = [x for x in (*cache.tensors[:4], cache.sequences.least) if x is not None]
    kept = [x.clone() for x in changing]
    with known(cache):
        yield
    for mine, old in zip(changing, kept, strict=True):
        mine.copy_(old)


@dataclass(frozen=True)
class Step:
    """One call: q [batch, q_len, q_heads, head_dim], the new K and V (None for `attend`), and fp64 results."""

    q: torch.Tensor
    new: Pair | None
    out: torch.Tensor
    lse: torch.Tensor
    crop: torch.Tensor | None = None
    """Tokens that are taken back after the step, int32 [batch]; None where the format has no rollback."""
    empty: bool = False
    """Whether some sequences have no tokens before it."""


@dataclass(frozen=True)
class Scenario:
    """The calls over a cache: prefill in chunks, one `attend`, then `decode` steps; all tensors on one device."""

    name: str
    whole: WholeSequences
    start: Lengths
    """Of each sequence, after the chunks."""
    chunks: tuple[tuple[Pair, Lengths], ...]
    """K and V [batch, tokens, kv_heads, head_dim], and how many of the tokens each sequence takes."""
    drafts: Pair | None
    """K and V of `cache.rollback` tokens that are appended after the chunks and taken back; None where the format has no rollback."""
    attend: Step
    """With the largest q_len of the steps, except extend attention."""
    steps: tuple[Step, ...]
    lengths: Lengths
    """Of each sequence, in the end."""
    blocks: torch.Tensor
    """The reference's packed blocks, uint8 [batch, kv_heads, blocks, block_bytes]; of each sequence the full ones count."""

    @property
    def max_len(self) -> int:
        """Room that the cache needs, in tokens: chunks count with their longest sequence, steps with their queries."""
        drafts = 0 if self.drafts is None else self.drafts[0].shape[1]
        return sum(max(new) for _, new in self.chunks) + drafts + sum(step.q.shape[1] for step in self.steps)


@lru_cache(maxsize=4)
def scenarios(spec: KernelSpec, layout: PackedLayout, policy: CheckPolicy, device: str = "cpu") -> tuple[Scenario, ...]:
    """The scenarios of a spec and a layout on a device. Reference attention makes this slow; it is kept for the process."""
    block, sink, unpacked = layout.tokens, spec.cache.sink, spec.cache.unpacked
    edges = (0, 1, *((unpacked + n) for n in (block - 1, block, block + 1, 2 * block + block // 2, 3 * block - 1)))
    if rollback := crops(spec):  # a crop of so many tokens unpacks a block from these lengths, or more than one
        edges = (*edges, *(unpacked + 2 * block + n for n in (min(2, rollback), max(1, rollback - 1))))
    edges = tuple(dict.fromkeys((*edges, *(n for n in (sink - 1, sink + 1, unpacked) if n > 0))))
    ragged = (*edges, *edges[1:])[: max(BATCH, len(edges))]
    longest = -(-max(policy.long_tokens, 5 * block) // block) * block + block - 2 + unpacked  # the second token or so fills a block
    served = query_lengths(spec)
    steps = (*served, *[1] * (policy.steps - len(served)))
    larger = (extend_tokens(spec),) if device == "cpu" else ()
    if spec.cache.arrival:
        ragged = tuple(dict.fromkeys((*ragged, *(n + by for n in (16, 32, 2 * block) for by in (-1, 0, 1)))))
    return (
        _scenario("ragged", spec, layout, device, ragged, steps),
        _scenario("long", spec, layout, device, (longest, longest * 5 // 8, longest * 3 // 4), (*steps, *larger)),
    )


def crops(spec: KernelSpec) -> int:
    """Tokens that are taken back: `cache.rollback`, or some of any number."""
    return ANY_CROP if spec.cache.arrival else spec.cache.rollback


def extend_tokens(spec: KernelSpec) -> int:
    """Query tokens of a call whose rows fill more than two blocks of rows, more than those of any other call."""
    return max(len(query_lengths(spec)), EXTEND_ROWS // spec.attention.group) + 1


def _scenario(name: str, spec: KernelSpec, layout: PackedLayout, device: str, lengths: Lengths, q_lengths: Lengths) -> Scenario:
    """`q_lengths` are the query tokens of each decode step."""
    ragged, rollback, first_q, block = name == "ragged", crops(spec), len(query_lengths(spec)), layout.tokens
    tokens = max(lengths) + rollback + sum(q_lengths)
    inputs = (normal if ragged else _hard)(spec, len(lengths), tokens, q_len=first_q + sum(q_lengths))
    all_q, k, v = (x.to(device) for x in (inputs.q, inputs.k, inputs.v))
    whole = WholeSequences(spec, block, k, v)
    chunks, past = [], (0,) * len(lengths)
    # Half of a sequence first; of 2½ blocks a third, so that the rest completes a block more than its own tokens would fill.
    halves = tuple(length // (3 if length == 2 * block + block // 2 else 2) for length in lengths)
    for upto in (halves, lengths) if ragged else (lengths,):
        counts = tuple(end - start for start, end in zip(past, upto, strict=True))
        chunks.append((whole.new(past, max(counts)), counts))
        past = upto
    drafts = whole.drafted(past).new(past, rollback) if rollback else None
    queries = torch.split(all_q, [first_q, *q_lengths], dim=1)
    first = Step(queries[0], None, *whole.attend(queries[0], past, past), empty=min(past) == 0)
    steps = []
    for number, (q, q_len) in enumerate(zip(queries[1:], q_lengths, strict=True)):
        after = tuple(length + q_len for length in past)
        rejected = [(b + number) % (min(rollback, q_len) + 1) for b in range(len(past))]
        kept = tuple(length - fewer for length, fewer in zip(after, rejected, strict=True))
        seen = whole.drafted(kept) if rollback else whole
        crop = torch.tensor(rejected, dtype=torch.int32, device=device) if rollback else None
        steps.append(Step(q, seen.new(past, q_len), *seen.attend(q, past, after), crop, min(past) == 0))
        past = kept
    return Scenario(name, whole, lengths, tuple(chunks), drafts, first, tuple(steps), past, whole.packed(layout))


def _hard(spec: KernelSpec, batch: int, kv_len: int, *, q_len: int) -> Inputs:
    """Structured data with an offset for every channel of V, so that zeros weigh as much as codes.

    In the second sequence scores grow from one end to the other, so that the running maximum moves and what was summed before matters.
    In the third V is constant where scores are highest: its scales are 0 there.
    """
    data, plain = structured(spec, batch, kv_len, q_len=q_len), normal(spec, batch, kv_len, q_len=q_len, seed=1)
    growth = torch.linspace(0.5, 8, kv_len).to(data.k.dtype)[:, None, None]
    data.q[1], data.k[1] = 2 * plain.q[1], plain.k[1] * growth
    data.v.add_(torch.linspace(-2, 2, data.v.shape[-1]).to(data.v.dtype))
    data.v[2, :CONSTANT] = 0.25
    return data
