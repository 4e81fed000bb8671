"""Shapes of the CUDA kernels, emulated against the fp64 reference: half runs of channels, and more packed-GQA rows than a CTA holds."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_words import spec_of, workload_of
from kvgen.lower.cuda.shared import q_tiles
from kvgen.lower.schedule import Value
from tests.unit.lower_cuda.attend_checks import agree, cached, fresh, reference
from tests.unit.lower_cuda.emulate_attend import Emulated, Step, launch

Case = tuple[str, int, dict[str, Value]]
Make = Callable[[Case], Emulated]
HALF_RUNS: tuple[Case, ...] = (
    ("k4v4:d80:h8/2:kg32:vg16", 32, {"kv_tile": 32, "tiles_in_flight": 2}),
    ("k8v8:token:d112:h5/1:sym:page32", 32, {"kv_tile": 64}),
    ("k16v16:d80:bf16:h12/2", 64, {"kv_tile": 32, "tiles_in_flight": 2}),
    ("k2v4:token:d144:kg16:vg48:h2/2", 64, {"kv_tile": 64, "reduction": "cluster2"}),
    ("k2v2:d80:h8/2:kg64", 64, {"kv_tile": 64}),
    ("k2v2:token:d112:sym:bf16:h8/1", 32, {"kv_tile": 32, "tiles_in_flight": 2}),
    ("k4v2:token:d16:page16:h4/2", 16, {"kv_tile": 64}),
    ("k4v2:d48:vg16:kg32:h16/1", 32, {"kv_tile": 32, "tiles_in_flight": 2}),
    ("k8v2:token:d64:vg16:sym:page16:h4/2", 16, {"kv_tile": 64}),
    ("k16v2:d144:vg48:h2/2", 32, {"kv_tile": 32, "tiles_in_flight": 2}),
    ("k2v2:vchannel:d80:h8/2:kg64:vg32", 64, {"kv_tile": 64}),
    ("k2v2:vchannel:d112:h8/1:kg64:vg64:sym", 64, {"kv_tile": 64}),
    ("k4v2:d80:q3:h12/2", 128, {"kv_tile": 128}),
    ("k2v2:d80:h8/2:kg64:boost1/5", 64, {"kv_tile": 64}),
    ("k2v2:d80:h4/2:kg64:bf16:boost4/5static", 64, {"kv_tile": 64}),
    ("k2v4:d112:h16/1:kg32:boost3/7range", 64, {"kv_tile": 32, "tiles_in_flight": 2, "exact_q": False}),
    ("k2v2:d112:h8/1:kg64:boost6/7", 64, {"kv_tile": 32, "tiles_in_flight": 2}),
    ("k2v4:vchannel:d48:h8/2:kg64:vg32:boost1/3", 64, {"kv_tile": 64}),
)
RUNS: tuple[Case, ...] = (
    ("k4v4:vchannel:d112:h64/2:kg64:vg32", 64, {"kv_tile": 32, "tiles_in_flight": 2, "reduction": "two_level"}),
    ("k8v4:d80:q8:h32/2:kg32:sink5:local20:rollback8:sinks", 32, {"kv_tile": 32, "tiles_in_flight": 2}),
    ("k4v8:token:q5:h20/1:d144:page16:window100:cap20", 16, {"kv_tile": 32, "reduction": "cluster2"}),
)
CASES = (*HALF_RUNS, *RUNS)
by_scheduler = pytest.mark.parametrize("planned", [False, True], ids=["static", "planned"])
by_words = pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Make:
    folder: Path = tmp_path_factory.mktemp("shapes")

    @cache
    def compiled(index: int) -> Emulated:
        words, block, changes = CASES[index]
        return Emulated(spec_of(words, "sm90", [workload_of("2x256")]), block, launch(**changes), folder / str(index))

    return lambda case: compiled(CASES.index(case))


def sinks_of(built: Emulated) -> torch.Tensor | None:
    """Learned sinks, if the spec has them."""
    return torch.linspace(-3.0, 3.0, built.spec.attention.q_heads) if built.spec.attention.sinks else None


@by_scheduler
@by_words
@pytest.mark.parametrize(("lengths", "hard"), [((300, 290), True), ((400, 0, 33), False)], ids=["equal", "ragged"])
def test_attend_agrees_with_the_reference(kernel: Make, case: Case, lengths: tuple[int, ...], hard: bool, planned: bool) -> None:
    built = kernel(case)
    held, q = reference(built, lengths, hard=hard)
    step = Step(built, held, q, processors=16, planned=planned, sinks=sinks_of(built))
    step.run()
    agree(step, held.attend(q, sinks=sinks_of(built)))


@by_scheduler
@pytest.mark.parametrize(("case", "backwards"), [*((case, False) for case in CASES), *((case, True) for case in RUNS)])
def test_decode_appends_once_and_packs_after_all_runs_have_read(kernel: Make, case: Case, backwards: bool, planned: bool) -> None:
    """CTAs in either order: the last run of a head to complete packs, and moves the tokens beyond the block, which the others read."""
    built = kernel(case)
    n = built.layout.tokens
    lengths = (2 * n - 1, n - built.spec.attention.q_len, 0, 250)
    held, q = reference(built, lengths)
    new = fresh(built, len(lengths))
    step = Step(built, held, q, new, backwards=backwards, planned=planned, processors=16, sinks=sinks_of(built))
    step.run()
    agree(step, held.decode(q, *new, sinks=sinks_of(built)))
    cached(step, held, lengths, held.lengths.tolist())


@by_scheduler
@pytest.mark.parametrize("case", RUNS[1:], ids=lambda case: case[0])
def test_a_step_of_fewer_queries_takes_fewer_runs(kernel: Make, case: Case, planned: bool) -> None:
    built = kernel(case)
    held, q = reference(built, (300, 95))
    q, new = q[:, :2].contiguous(), tuple(x[:, :2].contiguous() for x in fresh(built, 2))
    assert -(-2 * built.spec.attention.group // 8) < -(-built.spec.attention.q_len * built.spec.attention.group // 8)
    step = Step(built, held, q, (new[0], new[1]), processors=16, planned=planned, sinks=sinks_of(built))
    step.run()
    agree(step, held.decode(q, *new, sinks=sinks_of(built)))
    cached(step, held, (300, 95), held.lengths.tolist())


def test_calls_agree_bit_for_bit_in_either_order_of_ctas(kernel: Make) -> None:
    built = kernel(RUNS[0])
    held, q = reference(built, (400, 290, 0))
    steps = [Step(built, held, q, processors=32, backwards=backwards, planned=True) for backwards in (False, True)]
    for step in steps:
        step.run()
    assert torch.equal(steps[0].out, steps[1].out)
    assert torch.equal(steps[0].lse, steps[1].lse)


@pytest.mark.parametrize(
    ("words", "tiles"),
    [("k4v4", 1), ("k4v4:h32/2", 2), ("k4v4:q8", 2), ("k4v4:h24/1", 2), ("k4v4:d256:h16/1", 1), ("k4v4:d80:h128/1", 3)],
)
def test_runs_of_rows_are_balanced(words: str, tiles: int) -> None:
    assert q_tiles(spec_of(words, "sm90", [workload_of("2x256")])) == tiles
