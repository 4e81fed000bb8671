from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from kvgen.measure.compare import Comparison
from kvgen.measure.scenario import extend_tokens, query_lengths, scenarios

from kvgen.errors import CheckError
from kvgen.format.layout import packed_layout
from kvgen.lower.base import FUNCTIONS
from kvgen.runtime.module import load
from kvgen.runtime.variant import Variant
from kvgen.spec import KernelSpec, load_spec
from kvgen.verify import CheckPolicy
from kvgen.verify.check import Checker, check
from kvgen.verify.packing import pack_blocks, read_codes
from tests.support.cpu import spec_of
from tests.support.naive import BLOCK, naive_artifact, naive_layout, naive_spec

POLICY = CheckPolicy(long_tokens=200, most_tokens=2048)


def variant(paged: bool = False, **wrapped: Callable[..., object]) -> Variant:
    """The naive module, with some of its functions wrapped: wrapper(function, *args)."""
    module = load(naive_artifact().path)
    functions = {name: getattr(module, name) for name in FUNCTIONS}
    for name, wrapper in wrapped.items():
        functions[name] = lambda *args, f=functions[name], w=wrapper: w(f, *args)
    spec = naive_spec(paged)
    return Variant(spec, naive_layout(spec), SimpleNamespace(**functions, set_threads=None))  # type: ignore[arg-type]


@pytest.mark.parametrize("paged", [False, True])
def test_a_right_module_passes_and_its_errors_are_reported(paged: bool) -> None:
    accuracy = check(variant(paged), "cpu", POLICY)
    assert {"relative_l2", "worst_row", "lse_error", "unpack"} <= set(accuracy)
    assert 0 < accuracy["relative_l2"] < 1e-6
    assert accuracy["unpack"] == 0


def scaled_output(f, *args) -> None:
    f(*args)
    args[7].mul_(1.001)


def skip_last_head(f, *args) -> None:
    kept = args[7][-1, :, -1].clone()
    f(*args)
    args[7][-1, :, -1] = kept


def forgets_length(f, *args) -> None:
    before = args[6].clone()
    f(*args)
    args[6].copy_(before)


def noisy_output(f, *args) -> None:
    f(*args)
    noisy_output.calls += 1
    args[7].add_(1e-7 * noisy_output.calls)


noisy_output.calls = 0


def wrong_lse(f, *args) -> None:
    f(*args)
    if args[8] is not None:
        args[8].mul_(1.01)


def finite_lse_of_nothing(f, *args) -> None:
    f(*args)
    if args[8] is not None:
        args[8].clamp_(min=-1e30)


def nan_from_unused_slots(f, *args) -> None:
    f(*args)
    args[7].add_(args[2].sum() * 0)  # reads all of the residual, its unwritten part too


def writes_past_length(f, *args) -> None:
    f(*args)
    args[6][0, -1] = 1.0


def wrong_steps(f, *args) -> None:
    f(*args)
    args[9].add_(0.01)


@pytest.mark.parametrize(
    ("function", "fault", "message"),
    [
        ("attend", scaled_output, "attend of ragged: relative l2 is"),
        ("attend", skip_last_head, "attend of ragged: relative l2 is inf"),
        ("attend", noisy_output, "the same inputs gave other bits"),
        ("attend", wrong_lse, "attend of ragged: lse error is"),
        ("attend", finite_lse_of_nothing, "LSE of a query that sees nothing is not -inf"),
        ("attend", nan_from_unused_slots, "relative l2 is inf"),
        ("pack", forgets_length, "relative l2 is"),
        ("decode", wrong_steps, "decode 1 of ragged, turn 2: relative l2 is"),
        ("unpack", writes_past_length, "positions that the cache does not hold were written"),
    ],
)
def test_every_kind_of_wrong_number_is_found(function: str, fault: Callable[..., object], message: str) -> None:
    with pytest.raises(CheckError, match=message):
        check(variant(**{function: fault}), "cpu", POLICY)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["codes", "scale", "zero"])
def test_every_part_of_a_packed_block_is_compared(name: str, device: str) -> None:
    """On a GPU a few numbers may be off by one step, and none by more."""
    layout = packed_layout(spec_of(), 32, "simd")
    blocks = pack_blocks(layout, *torch.randn(2, 1, 2, 40, 32, layout.head_dim, generator=torch.Generator().manual_seed(0)).half())
    right = read_codes(layout, "key", blocks)
    comparison = Comparison(spec_of(), torch.device(device))
    comparison.codes("here", layout, "key", blocks, right)
    changed = getattr(right, name).clone()
    changed.view(-1)[5] = 15 - changed.view(-1)[5] if name == "codes" else changed.view(-1)[5] * 1.5
    with pytest.raises(CheckError, match="codes of key here: "):
        comparison.codes("here", layout, "key", blocks, replace(right, **{name: changed}))
    if name != "codes" and device == "cuda":
        near = getattr(right, name).clone()
        near.view(torch.int16).view(-1)[5] += 1
        comparison.codes("here", layout, "key", blocks, replace(right, **{name: near}))


def test_memory_overwritten_meanwhile_is_found() -> None:
    checker = Checker(variant(), "cpu", POLICY)
    checker.run()
    checker.again()
    cache = checker._last[0]  # type: ignore[index]
    cache.packed[0, 0, 0].view(torch.float32).mul_(1.5)
    with pytest.raises(CheckError, match="after timing: the same inputs gave other bits"):
        checker.again()


def test_scenarios_hold_the_awkward_lengths_and_flush() -> None:
    spec = naive_spec()
    ragged, long = scenarios(spec, naive_layout(spec), POLICY)
    first, second = ragged.chunks
    start = [a + b for a, b in zip(first[2], second[2], strict=True)]
    assert {0, 1, BLOCK - 1, BLOCK, BLOCK + 1} <= set(start)
    assert any(a // BLOCK < b // BLOCK for a, b in zip(start, ragged.lengths, strict=True))
    assert long.attend.q.shape[1] == 2
    assert max(long.lengths) > POLICY.long_tokens


def test_a_spec_of_long_prompts_is_verified_with_few_query_lengths() -> None:
    spec = naive_spec(q_len=4096)
    assert list(query_lengths(spec)) == list(range(1, 9))
    _, long = scenarios(spec, naive_layout(spec), POLICY)
    assert [step.q.shape[1] for step in long.steps] == [*range(1, 9), extend_tokens(spec)]
    assert extend_tokens(spec) < 100


def test_scenarios_are_computed_once_per_format() -> None:
    spec = naive_spec()
    assert scenarios(spec, naive_layout(spec), POLICY) is scenarios(naive_spec(), naive_layout(spec), POLICY)


def int4_spec() -> KernelSpec:
    return load_spec(
        {
            "attention": {"q_heads": 2, "kv_heads": 1, "head_dim": 32},
            "key": {"bits": 4, "axis": "channel", "group": 32},
            "value": {"bits": 2, "axis": "token", "group": 32},
        }
    )


def test_quantized_reference_is_what_the_layout_packs() -> None:
    spec = int4_spec()
    for scenario in scenarios(spec, naive_layout(spec), POLICY):
        end = max(scenario.lengths)
        sequence = scenario.lengths.index(end)
        full = end // BLOCK * BLOCK
        values = scenario.v[sequence, :full, 0]
        assert max(len(row.unique()) for row in values) <= 4
        assert len(scenario.v[sequence, full:end, 0].unique()) > 4 or full == end
