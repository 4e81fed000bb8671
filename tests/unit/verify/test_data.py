"""Inputs are seeded, and the structured ones have the structure that they promise."""

from __future__ import annotations

import pytest
import torch

from kvgen.spec import load_spec
from kvgen.verify.data import structured
from tests.support.specs import base

SPEC = load_spec(base())


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
