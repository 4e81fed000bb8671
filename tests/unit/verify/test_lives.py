"""Sequences of calls over small caches have the lengths at which kernels go wrong."""

from __future__ import annotations

from kvgen.verify import CheckPolicy
from kvgen.verify.calls import query_lengths
from kvgen.verify.lives import extend_tokens, scenarios
from tests.support.naive import naive_layout, naive_spec

POLICY = CheckPolicy(long_tokens=200)


def test_a_spec_of_long_prompts_is_verified_with_few_query_lengths() -> None:
    spec = naive_spec(q_len=4096)
    assert list(query_lengths(spec)) == list(range(1, 9))
    _, long = scenarios(spec, naive_layout(spec), POLICY)
    assert [step.q.shape[1] for step in long.steps] == [*range(1, 9), extend_tokens(spec)]
    assert extend_tokens(spec) < 100
