"""The verification of steps refuses modules that step wrongly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kvgen.measure.compare import Comparison

from kvgen.errors import CheckError
from kvgen.verify import CheckPolicy
from kvgen.verify.steps import PlannedSteps, StaticSteps, StepCheck
from tests.unit.measure.test_check import variant

NO_LIMIT = 1 << 30


def verify(check: type[StepCheck], **wrapped: Callable[..., object]) -> None:
    device = torch.device("cpu")
    checked = variant(**wrapped)
    check(checked, device, CheckPolicy(), Comparison(checked.spec, device)).run()  # type: ignore[attr-defined]


def without_limit(place: int) -> Callable[..., object]:
    """The call, with a limit of lengths that nothing exceeds."""
    return lambda f, *args: f(*args[:place], NO_LIMIT, *args[place + 1 :])


def advances_empty(f, lengths, counts, tokens, *rest) -> None:
    f(lengths, torch.full_like(lengths, tokens) if counts is None else counts, tokens, *rest)


def plans_empty(f, lengths, plan, q_len, append, skip_empty, *rest) -> None:
    f(lengths, plan, q_len, append, 0, *rest)


def keeps_lengths(f, *args) -> None:
    f(*args[:-1], 0)


def advances_in_every_layer(f, *args) -> None:
    f(*args[:-1], 1)


def touches_the_full(f, lengths, plan, q_len, append, skip_empty, limit, overflow) -> None:
    f(lengths.clamp(max=limit - q_len), plan, q_len, append, skip_empty, limit, overflow)


@pytest.mark.parametrize("check", [PlannedSteps, StaticSteps])
def test_a_right_module_passes(check: type[StepCheck]) -> None:
    verify(check)


@pytest.mark.parametrize(
    ("function", "fault", "told"),
    [
        ("plan", without_limit(5), "is not refused"),
        ("plan", plans_empty, "step 1 over a plan"),
        ("plan", touches_the_full, "is not refused"),
        ("advance", without_limit(3), "is not refused"),
        ("advance", advances_empty, "lengths are"),
        ("decode", advances_in_every_layer, "lengths are"),
    ],
)
def test_a_faulty_step_over_a_plan_is_refused(function: str, fault: Callable[..., object], told: str) -> None:
    with pytest.raises(CheckError, match=told):
        verify(PlannedSteps, **{function: fault})


@pytest.mark.parametrize(("fault", "told"), [(without_limit(16), "is not refused"), (keeps_lengths, "lengths are")])
def test_a_faulty_step_of_equal_lengths_is_refused(fault: Callable[..., object], told: str) -> None:
    with pytest.raises(CheckError, match=told):
        verify(StaticSteps, decode=fault)
