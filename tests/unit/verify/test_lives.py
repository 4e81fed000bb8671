"""Life cycles of small caches have the lengths at which kernels go wrong."""

from __future__ import annotations

from kvgen.verify import CheckPolicy
from kvgen.verify.calls import query_lengths
from kvgen.verify.lives import extend_tokens, scenarios
from tests.support.naive import BLOCK, naive_layout, naive_spec

POLICY = CheckPolicy(long_tokens=200)


def test_scenarios_hold_the_awkward_lengths_and_flush() -> None:
    spec = naive_spec()
    ragged, long = scenarios(spec, naive_layout(spec), POLICY)
    assert {0, 1, BLOCK - 1, BLOCK, BLOCK + 1} <= set(ragged.start)
    assert any(a // BLOCK < b // BLOCK for a, b in zip(ragged.start, ragged.lengths, strict=True))
    assert long.attend.q.shape[1] == 2
    assert max(long.lengths) > POLICY.long_tokens
    assert scenarios(naive_spec(), naive_layout(spec), POLICY)[0] is ragged, "references are computed once per format"


def test_a_spec_of_long_prompts_is_verified_with_few_query_lengths() -> None:
    spec = naive_spec(q_len=4096)
    assert list(query_lengths(spec)) == list(range(1, 9))
    _, long = scenarios(spec, naive_layout(spec), POLICY)
    assert [step.q.shape[1] for step in long.steps] == [*range(1, 9), extend_tokens(spec)]
    assert extend_tokens(spec) < 100
