"""What both GPU back ends refuse, and how they say so: in the same words."""

from __future__ import annotations

import pytest

from kvgen.errors import UnsupportedError
from kvgen.lower.backend import get_backend
from kvgen.spec import KernelSpec
from tests.support.specs import kv4_spec as spec

REFUSED: dict[str, KernelSpec] = {
    "attention.dtype is float32": spec(attention={"dtype": "float32"}),
    r"attention.head_dim \(512\) is more than 256": spec(attention={"head_dim": 512}, value={"group": 512}),
    r"attention.q_len \(64\) is more than 8": spec(attention={"q_len": 64}),
    r"key.group \(8 channels\)": spec(key={"axis": "token", "group": 8}),
    r"value.group \(8 channels\)": spec(value={"group": 8}),
    "32 query heads times 5 query tokens": spec(attention={"q_heads": 64, "kv_heads": 2, "q_len": 5}),
}


@pytest.mark.parametrize("name", ["cuda", "tilelang"])
def test_what_gpus_cannot_do_is_named_and_nothing_else_is_built(name: str) -> None:
    backend = get_backend(name)
    for words, example in REFUSED.items():
        for target in backend.targets:
            with pytest.raises(UnsupportedError, match=words):
                backend.default(example, target)
    assert backend.unsupported(spec(), "cpu") == "it lowers for sm80, sm89, sm90, not for cpu"
