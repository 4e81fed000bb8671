"""Plans, lengths and absent pages of CPU modules, by direct calls of the module's functions."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen.lower.cpu.lowering import WORKERS
from kvgen.runtime.calls import Variant
from kvgen.spec import KernelSpec
from tests.support.cpu import spec_of, variant
from tests.support.plan import PlanShape, make_plan, read_plan, written_plan
from tests.support.specs import lengths_up_to

BLOCK, CHUNK, SPLIT, BIG = 32, 128, 1024, 1 << 20
SPEC, WINDOWED = spec_of(q_len=4), spec_of(window=300, page=64, q_len=4, k="4t32")


def built(spec: KernelSpec = SPEC) -> Variant:
    return variant(spec, (("block", BLOCK), ("split_tokens", SPLIT), ("chunk", CHUNK)))


def shape_of(spec: KernelSpec, batch: int, q_len: int, append: bool) -> PlanShape:
    """The plan's shape for the CPU; blocks of query rows are heads of their own."""
    a = spec.attention
    row_blocks = -(-q_len * a.q_heads // a.kv_heads // 64)
    fresh = q_len if append else 0
    return PlanShape(batch, a.kv_heads * row_blocks, WORKERS, CHUNK, BLOCK, 0, SPLIT // CHUNK, a.window or 0, q_len, fresh)


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@dataclass
class Raw:
    """A module's tensors and functions, for `lengths` tokens of random K and V."""

    lengths: tuple[int, ...]
    spec: KernelSpec = SPEC
    room: int = 4096
    table: torch.Tensor | None = None
    tensors: tuple[torch.Tensor, ...] = field(init=False)
    k: torch.Tensor = field(init=False)
    v: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.variant = built(self.spec)
        self.module, layout, page = self.variant.module, self.variant.layout, self.spec.cache.page or 0
        batch, heads, dim = len(self.lengths), self.spec.attention.kv_heads, self.spec.attention.head_dim
        outer, blocks = (batch * self.room // page, page // BLOCK) if page else (batch, self.room // BLOCK)
        packed = torch.full((outer, heads, blocks, layout.block_bytes), 255, dtype=torch.uint8)
        residual = [torch.full((batch, heads, BLOCK, dim), torch.nan, dtype=self.variant.dtype) for _ in range(2)]
        if page:
            self.table = torch.arange(outer, dtype=torch.int32).reshape(batch, -1)
        self.tensors = (packed, *residual, torch.zeros(batch, dtype=torch.int32))
        self.k, self.v = (self.draw(max(1, *self.lengths), heads, seed) for seed in (1, 2))
        self.pack(self.lengths)

    def draw(self, tokens: int, heads: int, seed: int) -> torch.Tensor:
        shape = (len(self.lengths), tokens, heads, self.spec.attention.head_dim)
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.variant.dtype)

    @property
    def cache(self) -> tuple[torch.Tensor | None, ...]:
        return *self.tensors, self.table, None, None

    @property
    def now(self) -> torch.Tensor:
        return self.tensors[3]

    def pack(self, counts: tuple[int, ...]) -> None:
        self.module.pack(self.k, self.v, int32(*counts), None, *self.cache, BIG, 0, 1)

    def plan(self, q_len: int = 1, *, append: bool, skip_empty: bool = False, limit: int = BIG) -> torch.Tensor:
        plan = torch.zeros(self.module.plan_size(len(self.lengths), self.room, q_len), dtype=torch.int32)
        self.module.plan(self.now, plan, q_len, int(append), int(skip_empty), limit, 0)
        return plan

    def outputs(self, q_len: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, out, lse, workspace."""
        q = self.draw(q_len, self.spec.attention.q_heads, 3)
        lse = torch.full((len(self.lengths), q.shape[2], q_len), torch.nan)
        workspace = torch.full((max(16, self.module.workspace_bytes(len(self.lengths), self.room, q_len)),), 255, dtype=torch.uint8)
        return q, torch.full_like(q, torch.nan), lse, workspace

    def attend(self, q_len: int = 1, plan: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        q, out, lse, workspace = self.outputs(q_len)
        self.module.attend(q, *self.cache, out, lse, None, workspace, plan, 0.125, self.room)
        return out, lse

    def decode(self, q_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        q, out, lse, workspace = self.outputs(q_len)
        k, v = (self.draw(q_len, self.spec.attention.kv_heads, seed) for seed in (4, 5))
        self.module.decode(q, k, v, *self.cache, out, lse, None, workspace, None, 0.125, self.room, BIG, 0, 1)
        return out, lse


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Whether tensors agree bit for bit."""
    return all(torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) for a, b in zip(some, others, strict=True))


@settings(max_examples=40)
@given(
    st.sampled_from((SPEC, WINDOWED)),
    st.lists(lengths_up_to(60_000), min_size=1, max_size=6),
    st.integers(1, 70),
    st.booleans(),
    st.booleans(),
)
def test_the_plan_is_the_oracles(spec: KernelSpec, lengths: list[int], q_len: int, append: bool, skip_empty: bool) -> None:
    module, shape = built(spec).module, shape_of(spec, len(lengths), q_len, append)
    assert module.plan_size(len(lengths), max(lengths), q_len) == shape.size
    plan = torch.full((shape.size,), -1, dtype=torch.int32)
    module.plan(int32(*lengths), plan, q_len, int(append), int(skip_empty), BIG, 0)
    want = make_plan(shape, lengths, BIG, skip_empty)
    assert read_plan(shape, plan.tolist()) == want
    assert plan.tolist() == written_plan(shape, want)


def test_a_plan_beyond_the_limit_or_of_a_negative_length_writes_nothing() -> None:
    raw = Raw((40, 0, 7))
    plan = torch.full((raw.module.plan_size(3, 40, 2),), -7, dtype=torch.int32)
    with pytest.raises(ValueError, match="plan: sequence 0 would have 42 tokens, more than the limit of 41"):
        raw.module.plan(raw.now, plan, 2, 1, 0, 41, 0)
    with pytest.raises(ValueError, match=f"plan: plan has {plan.numel() - 1} numbers, this call needs {plan.numel()}"):
        raw.module.plan(raw.now, plan[1:], 2, 1, 0, 42, 0)
    raw.now[2] = -1
    with pytest.raises(ValueError, match="sequence 2 has a negative length"):
        raw.module.plan(raw.now, plan, 2, 1, 1, 42, 0)
    assert (plan == -7).all()
    assert raw.now.tolist() == [40, 0, -1]


def test_plans_of_other_calls_are_refused() -> None:
    raw = Raw((2600, 0, 130, 2900, 31))
    plan, other = raw.plan(1, append=False), raw.plan(70, append=False)
    with pytest.raises(ValueError, match=f"attend: plan has {plan.numel()} numbers, this call needs {other.numel()}"):
        raw.attend(70, plan)
    shorter = Raw((2600, 0, 130, 2900))
    with pytest.raises(ValueError, match="attend: the plan is not one of this call"):
        shorter.attend(1, plan)
    shape = shape_of(SPEC, 5, 1, False)
    tile = shape.tiles_at
    for place, value in ((0, 9), (9, 1 << 30), (shape.empty_at, 7), (tile, 9), (tile + 7, 1 << 30)):
        wrong = plan.clone()
        wrong[place] = value
        with pytest.raises(ValueError, match="attend: the plan is not one of this call"):
            raw.attend(1, wrong)


def test_pages_before_the_window_may_be_absent() -> None:
    """The first query of a step sees `window` tokens, itself among them; the page that holds the first of these must be there."""
    q_len, raw, bare = 4, Raw((1000, 320, 2000), WINDOWED), Raw((1000, 320, 2000), WINDOWED)
    assert bare.table is not None
    passed = [max(0, n - 300 + 1) // 64 for n in bare.lengths]
    for b, pages in enumerate(passed):
        bare.tensors[0][bare.table[b, :pages].long()] = 255
        bare.table[b, :pages] = -1
    k, v = (torch.full((3, 2000, 2, 64), 7.0, dtype=torch.float16) for _ in range(2))
    bare.module.unpack(*bare.cache, None, k, v)
    for b, pages in enumerate(passed):
        assert (k[b, : 64 * pages] == 7).all()
        assert (v[b, : 64 * pages] == 7).all()
        assert not (k[b, 64 * pages : bare.lengths[b]] == 7).all(-1).any()
    for _ in range(8):
        want = raw.decode(q_len)
        assert same(list(bare.decode(q_len)), list(want))
    bare.k, bare.v = raw.k, raw.v
    for each in (raw, bare):
        each.pack((70, 70, 70))
    assert same(list(bare.attend(q_len)), list(raw.attend(q_len)))
