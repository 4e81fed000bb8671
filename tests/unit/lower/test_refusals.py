"""What both GPU back ends refuse, and how they say so: in the same words."""

from __future__ import annotations

import pytest

from kvgen.errors import UnsupportedError
from kvgen.lower.backend import get_backend
from kvgen.lower.gpu import GPU_REFUSALS, first_refusal
from kvgen.spec import KernelSpec
from tests.support.specs import kv4_spec as spec

REFUSED: dict[str, tuple[KernelSpec, str]] = {
    "float32": (spec(attention={"dtype": "float32"}), "float32"),
    "head_dim above 256": (spec(attention={"head_dim": 512}, value={"group": 512}), "512"),
    "attention.q_len above 8 (longer calls need none: extend attention)": (spec(attention={"q_len": 64}), "64"),
    "K per token in groups that are no multiple of 16 channels": (spec(key={"axis": "token", "group": 8}), "8 channels"),
    "V per token in groups that are no multiple of 16 channels": (spec(value={"group": 8}), "8 channels"),
    "more than 128 query heads times query tokens per KV head": (
        spec(attention={"q_heads": 64, "kv_heads": 2, "q_len": 5}),
        "32 query heads times 5 query tokens",
    ),
}


def test_every_refusal_has_an_example() -> None:
    assert [entry.feature for entry in GPU_REFUSALS] == list(REFUSED)


@pytest.mark.parametrize("feature", REFUSED)
@pytest.mark.parametrize("name", ["cuda", "tilelang"])
def test_a_refused_feature_is_named_and_nothing_else_is_built(name: str, feature: str) -> None:
    example, words = REFUSED[feature]
    backend = get_backend(name)
    assert next(entry for entry in GPU_REFUSALS if entry.applies(example)).feature == feature
    for target in backend.targets:
        with pytest.raises(UnsupportedError, match=words) as raised:
            backend.default(example, target)
        assert raised.value.reason == first_refusal(GPU_REFUSALS, example)
        assert "{" not in raised.value.reason


@pytest.mark.parametrize("name", ["cuda", "tilelang"])
def test_other_targets_are_refused(name: str) -> None:
    assert get_backend(name).unsupported(spec(), "cpu") == "it lowers for sm80, sm89, sm90, not for cpu"
