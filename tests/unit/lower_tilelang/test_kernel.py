"""Lowered kernels emulated on the CPU, against the fp64 reference: formats, ragged lengths, splits, decode, both schedulers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_words import spec_of, workload_of
from kvgen.lower.schedule import Value
from kvgen.verify.data import normal
from kvgen.verify.tolerance import relative_l2, tolerance
from tests.support.kernel_cases import needs_tilelang
from tests.support.reference import ReferenceCache
from tests.unit.lower_cuda.attend_checks import agree, cached, cleared, fresh, reference
from tests.unit.lower_cuda.emulate_attend import Step
from tests.unit.lower_tilelang.emulate import Emulated, schedule

needs_tilelang()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

Case = tuple[str, int, dict[str, Value]]
Make = Callable[[Case], Emulated]
CASES: tuple[Case, ...] = (
    ("k4v4:h8/2", 128, {"kv_tile": 128}),
    ("k8v2:bf16:q4:h8/1:page256:d64:sym", 128, {}),
    ("k2v8:token:q3:h10/2:d96", 32, {"kv_tile": 32, "stages": 3, "ctas_per_sm": 4}),
    ("k4v2:token:sym:page64:h4/4:d32", 64, {}),
)
"""Few programs, since TileLang takes seconds for each: every branch of `program.py`, every width of K and V."""
PLAIN = CASES[0]
by_words = pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
by_scheduler = pytest.mark.parametrize("planned", [False, True], ids=["static", "planned"])


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Make:
    folder: Path = tmp_path_factory.mktemp("attend")

    @cache
    def compiled(index: int) -> Emulated:
        words, block, changes = CASES[index]
        return Emulated(spec_of(words, "sm80", [workload_of("2x512")]), schedule(block, **changes), folder / str(index))

    return lambda case: compiled(CASES.index(case))


@by_scheduler
@by_words
def test_attend_agrees_with_the_reference(kernel: Make, case: Case, planned: bool) -> None:
    built = kernel(case)
    held, q = reference(built, (1300, 0, 1, 128, 127), hard=True)
    step = Step(built, held, q, planned=planned)
    step.run()
    agree(step, held.attend(q))


@by_scheduler
@by_words
def test_decode_appends_and_packs_full_blocks(kernel: Make, case: Case, planned: bool) -> None:
    built = kernel(case)
    lengths = (255, 0, 130, 2 * built.layout.tokens)
    held, q = reference(built, lengths)
    new = fresh(built, len(lengths))
    step = Step(built, held, q, new, planned=planned)
    step.run()
    agree(step, held.decode(q, *new))
    cached(step, held, lengths, held.lengths.tolist())
    assert step.lengths.tolist() == (list(lengths) if planned else held.lengths.tolist())


def test_scales_of_v_of_any_size_are_exact(kernel: Make) -> None:
    """Huge, and so small that weights times scales would be denormals, beside unquantized tokens."""
    built = kernel(PLAIN)
    for factor in (15000.0, 1e-4):
        inputs = normal(built.spec, 1, 300, seed=5)
        inputs.v[:, 100] *= max(1, factor)
        inputs.v[:] = (inputs.v * min(factor, 1)).clamp(-60000, 60000)
        held = ReferenceCache(built.spec, 1, built.layout.tokens)
        held.prefill(inputs.k, inputs.v)
        step = Step(built, held, inputs.q)
        step.run()
        assert relative_l2(step.out, held.attend(inputs.q)[0]) <= tolerance(step.q.dtype)


def test_weights_are_finite_where_scores_grow_and_where_v_is_constant(kernel: Make) -> None:
    """The largest weights: of unquantized tokens whose scores grow slowly, and of a block whose scales are 0, without such tokens."""
    built = kernel(PLAIN)
    inputs = normal(built.spec, 2, 256, seed=5)
    inputs.k.mul_(torch.linspace(0.1, 6, 256)[:, None, None])
    inputs.v[0] = 0.25
    held = ReferenceCache(built.spec, 2, built.layout.tokens)
    held.prefill(inputs.k, inputs.v, torch.tensor([256, 255], dtype=torch.int32))
    step = Step(built, held, inputs.q)
    step.run()
    agree(step, held.attend(inputs.q))


@by_scheduler
def test_a_sequence_without_room_is_left_as_it_is(kernel: Make, planned: bool) -> None:
    built = kernel(PLAIN)
    held, q = reference(built, (300, 100, 299))
    new = fresh(built, 3)
    step = Step(built, held, q, new, planned=planned, limit=300)
    step.run()
    assert step.overflow.tolist() == [0 if planned else 1], "with a plan, the plan's kernel reports it"
    assert step.lengths.tolist() == ([300, 100, 299] if planned else [300, 101, 300])
    want, _ = held.decode(q, *new)
    assert step.out[0].isnan().all()
    assert relative_l2(step.out[1:], want[1:]) <= tolerance(q.dtype)
    assert step.residual[0][0, :, 300 % built.layout.tokens :].isnan().all()
    cleared(step)


def test_a_planned_decode_skips_empty_sequences(kernel: Make) -> None:
    built = kernel(PLAIN)
    held, q = reference(built, (300, 0, 0))
    new = fresh(built, 3)
    step = Step(built, held, q, new, planned=True, skip_empty=True)
    step.run()
    assert not step.out[1:].any()
    assert torch.equal(step.lse[1:], torch.full_like(step.lse[1:], -torch.inf))
    assert relative_l2(step.out[:1], held.decode(q, *new)[0][:1]) <= tolerance(q.dtype)
    assert step.residual[0][1:].isnan().all()
