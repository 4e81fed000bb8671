"""Life cycles of small caches on which a variant is verified, with the results of the reference.

Two scenarios: `ragged`, normal data at every length next to the end of the sink or of a block, with more sequences than any table of a
kernel holds, filled in two chunks; and `long`, structured data with scores up to 60 over several splits, and V with offsets and constant
stretches. Both decode with every number of query tokens that the spec allows, and on the CPU, which has no limit, with one larger number.
Where the spec has a rollback, some tokens of every step are taken back, in each sequence another number. The data are the same on every
device; the reference is computed on the device, because a GPU does that a hundred times as fast.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from kvgen.format.layout import PackedLayout, Which
from kvgen.lower.refusals import MAX_QUERIES
from kvgen.measure.job import CheckPolicy
from kvgen.measure.life import Life, whole_tokens
from kvgen.spec import KernelSpec
from kvgen.verify.data import Inputs, normal, structured
from kvgen.verify.packing import OPERANDS, pack_blocks, read_codes, unpack_blocks
from kvgen.verify.quantize import Quantized

BATCH = {"cpu": 11, "cuda": 133}
"""Least sequences of the ragged scenario; on a GPU more than a CTA of 128 threads takes in one round."""
DISTINCT = 49
"""Number of them with data of their own; the others repeat these."""
PREFILL_BLOCKS, PREFILL_TOKENS = 136, 20480
"""Least size of a prefill in one call: more blocks than 128, and a long prompt."""
DIFFERENT_BLOCKS = 12
"""Blocks of which such a prompt is made, in another order for every head; the reference packs these alone."""
CONSTANT = 64
"""Tokens of a stretch with constant V: more than a kernel processes at once."""
EXTEND_ROWS = 130
"""Query rows of the larger call on the CPU, whose back end processes them in blocks of at most 64."""


@dataclass(frozen=True)
class Step:
    """One call: q [batch, q_len, q_heads, head_dim], the new K and V (None for `attend`), and fp64 results."""

    q: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor
    crop: torch.Tensor | None = None
    """Tokens that are taken back after the step, int32 [batch]; None where the format has no rollback."""
    empty: bool = False
    """Whether some sequences have no tokens before it."""


@dataclass(frozen=True)
class Scenario:
    """The life cycle of a cache: prefill in chunks, one `attend`, then `decode` steps; all tensors on one device."""

    name: str
    chunks: tuple[tuple[torch.Tensor, torch.Tensor, tuple[int, ...]], ...]
    """(k, v [batch, tokens, kv_heads, head_dim], new lengths)."""
    drafts: tuple[torch.Tensor, torch.Tensor] | None
    """K and V of `cache.rollback` tokens that are appended after the chunks and taken back; None where the format has no rollback."""
    attend: Step
    """With the largest q_len of the steps, except extend attention."""
    steps: tuple[Step, ...]
    lengths: tuple[int, ...]
    """Of each sequence, in the end."""
    codes: dict[Which, Quantized]
    """The reference's packed blocks of the quantized operands, [distinct, kv_heads, blocks, …]; of each sequence the full ones count."""
    k: torch.Tensor
    """The expected result of `unpack` at the end, fp64 [distinct, tokens, kv_heads, head_dim], up to each length."""
    v: torch.Tensor

    @property
    def batch(self) -> int:
        """Sequences."""
        return len(self.lengths)

    @property
    def max_len(self) -> int:
        """Room that the cache needs, in tokens: chunks count with their longest sequence, steps with their queries."""
        drafts = 0 if self.drafts is None else self.drafts[0].shape[1]
        return sum(max(new) for _, _, new in self.chunks) + drafts + sum(step.q.shape[1] for step in self.steps)


@lru_cache(maxsize=4)
def scenarios(spec: KernelSpec, layout: PackedLayout, policy: CheckPolicy, device: str = "cpu") -> tuple[Scenario, ...]:
    """The scenarios of a spec and a layout on a device. Reference attention makes this slow; it is kept for the process."""
    block, sink, unpacked = layout.tokens, spec.cache.sink, spec.cache.unpacked
    edges = (0, 1, *((unpacked + n) for n in (block - 1, block, block + 1, 2 * block + block // 2, 3 * block - 1)))
    if rollback := spec.cache.rollback:  # a crop of so many tokens unpacks a block from these lengths, or more than one
        edges = (*edges, *(unpacked + 2 * block + n for n in (min(2, rollback), max(1, rollback - 1))))
    edges = tuple(dict.fromkeys((*edges, *(n for n in (sink - 1, sink + 1, unpacked) if n > 0))))
    batch = max(BATCH[device], len(edges))
    ragged = tuple(edges[(number + number // len(edges)) % len(edges)] for number in range(min(batch, DISTINCT)))
    longest = -(-max(policy.long_tokens, 5 * block) // block) * block + block - 2 + unpacked  # the second token or so fills a block
    served = query_lengths(spec)
    steps = (*served, *[1] * (policy.steps - len(served)))
    larger = (extend_tokens(spec),) if device == "cpu" else ()
    return (
        _repeated(_scenario(spec, layout, policy, device, ragged, steps, ragged=True), batch),
        _scenario(spec, layout, policy, device, (longest, longest * 5 // 8, longest * 3 // 4), (*steps, *larger), ragged=False),
    )


@dataclass(frozen=True)
class Prompt:
    """One sequence of many packed blocks, in little memory: head h has the tokens of the head before it from its second block on.

    All of its tensors are views in which the heads overlap.
    """

    k: torch.Tensor
    """[1, tokens, kv_heads, head_dim]."""
    v: torch.Tensor
    packed: torch.Tensor
    """By the reference: uint8 [kv_heads, blocks, block_bytes]."""
    read: tuple[torch.Tensor, torch.Tensor]
    """K and V as they read back, in their dtype: [1, tokens in blocks, kv_heads, head_dim]."""


@lru_cache(maxsize=2)
def long_prompt(spec: KernelSpec, layout: PackedLayout, device: str) -> Prompt:
    """The prompt of a layout; its tokens beyond the sink and the local ones are whole blocks."""
    block, heads, dim, sink = layout.tokens, spec.attention.kv_heads, spec.attention.head_dim, spec.cache.sink
    count = max(PREFILL_BLOCKS, -(-PREFILL_TOKENS // block))
    turns = torch.rand(-(-(count + heads) // DIFFERENT_BLOCKS), DIFFERENT_BLOCKS, generator=torch.Generator().manual_seed(7))
    order = turns.argsort(-1).flatten().to(device)
    data = normal(spec, 1, DIFFERENT_BLOCKS * block + spec.cache.unpacked, seed=6)

    def shifted(x: torch.Tensor, tokens: int) -> torch.Tensor:
        return x.as_strided((1, tokens, heads, dim), (x.numel(), dim, block * dim, 1))

    given, pieces = [], []
    for x in (data.k, data.v):
        tokens = x[0, :, 0].to(device)
        rest = tokens[DIFFERENT_BLOCKS * block :]
        pieces.append(tokens[: DIFFERENT_BLOCKS * block].reshape(DIFFERENT_BLOCKS, block, dim))
        whole = torch.cat([rest[:sink], pieces[-1][order].flatten(0, 1), rest[sink:]])
        given.append(shifted(whole, count * block + spec.cache.unpacked))
    packed = pack_blocks(layout, *pieces)
    read_k, read_v = (x.to(data.k.dtype)[order].flatten(0, 1) for x in unpack_blocks(layout, packed, data.k.dtype))
    nbytes = layout.block_bytes
    lying = packed[order].as_strided((heads, count, nbytes), (nbytes, nbytes, 1))
    return Prompt(given[0], given[1], lying, (shifted(read_k, count * block), shifted(read_v, count * block)))


def query_lengths(spec: KernelSpec) -> range:
    """Numbers of query tokens of a call: all that a GPU module may take. A CPU module processes more in the same blocks of rows."""
    return range(1, min(spec.attention.q_len, MAX_QUERIES) + 1)


def extend_tokens(spec: KernelSpec) -> int:
    """Query tokens of a call whose rows fill more than two blocks of rows, more than those of any other call."""
    return max(len(query_lengths(spec)), EXTEND_ROWS // spec.attention.group) + 1


def _scenario(
    spec: KernelSpec,
    layout: PackedLayout,
    policy: CheckPolicy,
    device: str,
    lengths: tuple[int, ...],
    q_lengths: tuple[int, ...],
    *,
    ragged: bool,
) -> Scenario:
    """`q_lengths` are the query tokens of each decode step."""
    rollback = spec.cache.rollback
    whole = whole_tokens(spec, layout, max(lengths) + rollback + sum(q_lengths))
    first_q = len(query_lengths(spec))
    inputs = (normal if ragged else _hard)(spec, len(lengths), whole, q_len=first_q + sum(q_lengths), seed=policy.seed)
    all_q, k, v = (x.to(device) for x in (inputs.q, inputs.k, inputs.v))
    life = Life.of(spec, layout, k, v)
    splits = [tuple(_first_chunk(length, layout.tokens) for length in lengths), lengths] if ragged else [lengths]
    chunks, past = [], (0,) * len(lengths)
    for upto in splits:
        new = tuple(end - start for start, end in zip(past, upto, strict=True))
        chunks.append((life.slice(0, past, max(new)), life.slice(1, past, max(new)), new))
        past = upto
    drafts = life.drafted(past).both(past, rollback) if rollback else None
    queries = torch.split(all_q, [first_q, *q_lengths], dim=1)
    first = Step(queries[0], None, None, *life.attend(queries[0], past, past), empty=min(past) == 0)
    steps = []
    for number, (q, q_len) in enumerate(zip(queries[1:], q_lengths, strict=True)):
        after = tuple(length + q_len for length in past)
        rejected = [(b + number) % (min(rollback, q_len) + 1) for b in range(len(past))]
        kept = tuple(length - fewer for length, fewer in zip(after, rejected, strict=True))
        seen = life.drafted(kept) if rollback else life
        crop = torch.tensor(rejected, dtype=torch.int32, device=device) if rollback else None
        steps.append(Step(q, *seen.both(past, q_len), *seen.attend(q, past, after), crop, min(past) == 0))
        past = kept
    codes = {which: read_codes(layout, which, life.blocks) for which in OPERANDS if layout.operand(which).quantized}
    return Scenario("ragged" if ragged else "long", tuple(chunks), drafts, first, tuple(steps), past, codes, *life.seen(past))


def _first_chunk(length: int, block: int) -> int:
    """Half of a sequence; of 2½ blocks a third, so that the rest completes a block more than its own tokens would fill."""
    return length // 3 if length == 2 * block + block // 2 else length // 2


def _hard(spec: KernelSpec, batch: int, kv_len: int, *, q_len: int, seed: int) -> Inputs:
    """Structured data with an offset for every channel of V, so that zeros weigh as much as codes.

    In the second sequence scores grow from one end to the other, so that the running maximum moves and what was summed before matters.
    In the third V is constant where scores are highest: its scales are 0 there.
    """
    data, plain = structured(spec, batch, kv_len, q_len=q_len, seed=seed), normal(spec, batch, kv_len, q_len=q_len, seed=seed + 1)
    growth = torch.linspace(0.5, 8, kv_len).to(data.k.dtype)[:, None, None]
    data.q[1], data.k[1] = 2 * plain.q[1], plain.k[1] * growth
    data.v.add_(torch.linspace(-2, 2, data.v.shape[-1]).to(data.v.dtype))
    data.v[2, :CONSTANT] = 0.25
    return data


def _repeated(scenario: Scenario, batch: int) -> Scenario:
    """The scenario with as many sequences, its own over and over."""
    index = torch.arange(batch) % scenario.batch
    at = index.tolist()

    def tensors(x: torch.Tensor) -> torch.Tensor:
        return x[index.to(x.device)]

    def step(one: Step) -> Step:
        k, v, crop = (None if x is None else tensors(x) for x in (one.k, one.v, one.crop))
        return Step(tensors(one.q), k, v, tensors(one.out), tensors(one.lse), crop, one.empty)

    return replace(
        scenario,
        chunks=tuple((tensors(k), tensors(v), tuple(new[b] for b in at)) for k, v, new in scenario.chunks),
        drafts=None if scenario.drafts is None else (tensors(scenario.drafts[0]), tensors(scenario.drafts[1])),
        attend=step(scenario.attend),
        steps=tuple(step(one) for one in scenario.steps),
        lengths=tuple(scenario.lengths[b] for b in at),
    )
