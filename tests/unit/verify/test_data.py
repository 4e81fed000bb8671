"""Inputs are seeded, and the structured ones have the structure that they promise."""

from __future__ import annotations

import pytest
import torch

from kvgen.spec import load_spec
from kvgen.verify.attention import attend
from kvgen.verify.data import normal, structured
from tests.support.specs import base

SPEC = load_spec(base())


@pytest.mark.parametrize("make", [normal, structured])
def test_shapes_types_and_seeds(make: object) -> None:
    assert callable(make)
    one, same, other = make(SPEC, 2, 300, q_len=3, seed=1), make(SPEC, 2, 300, q_len=3, seed=1), make(SPEC, 2, 300, q_len=3, seed=2)
    assert one.q.shape == (2, 3, 4, 64)
    assert one.k.shape == one.v.shape == (2, 300, 2, 64)
    assert {one.q.dtype, one.k.dtype, one.v.dtype} == {torch.float16}
    assert torch.equal(one.k, same.k)
    assert not torch.equal(one.k, other.k)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("kv_len", [1, 5, 1000])
def test_structured_data_is_finite_and_reaches_the_logit_asked_for(dtype: str, kv_len: int) -> None:
    spec = load_spec(base(attention={"q_heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": dtype}))
    data = structured(spec, 1, kv_len, logit=60.0)
    assert all(bool(torch.isfinite(x).all()) for x in (data.q, data.k, data.v))
    keys = data.k.float().repeat_interleave(2, dim=2)
    scores = torch.einsum("bqhd,bthd->bhqt", data.q.float(), keys) / 8
    assert float(scores.abs().max()) == pytest.approx(60.0, rel=0.02)


def test_structured_data_has_outliers_a_huge_value_and_constant_groups() -> None:
    data = structured(SPEC, 1, 1000)
    magnitude = data.k.float().abs().mean((0, 1, 2))
    assert int((magnitude > 4 * magnitude.median()).sum()) >= 1
    assert float(data.k.max()) >= 60.0
    assert bool((data.k.float().std((0, 1)) < 1e-3).any())
    assert bool((data.v[:, 500] == -0.75).all())


def test_structured_attention_is_peaked_where_normal_attention_is_flat() -> None:
    def heaviest(make: object) -> float:
        assert callable(make)
        data = make(SPEC, 1, 1000)
        weights = [attend(data.q, data.k, torch.eye(1000)[:, i * 64 : i * 64 + 64].reshape(1, 1000, 1, 64).expand(1, 1000, 2, 64))[0]
                   for i in range(15)]  # fmt: skip
        return float(torch.cat(weights, -1).max())

    assert heaviest(structured) > 0.5 > heaviest(normal)
