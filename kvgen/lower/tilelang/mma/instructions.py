# mypy: disable-error-code="untyped-decorator"
"""The matrix instruction, m16n8k16 with fp32 sums."""

from __future__ import annotations

from typing import Any

import tilelang.language as T


def packer(kind: str) -> str:
    """The function that rounds two floats to a word of `kind`."""
    return {"fp16": "kvgen::ptx::pack_half2", "bf16": "kvgen::pack_bf16"}[kind]


@T.macro
def multiply(a: Any, a_at: Any, b: Any, b_at: Any, c: Any, c_at: Any, kind: Any = "fp16") -> None:
    """c[c_at:+4] += a[a_at:+4] b[b_at:+2], fragments of a lane; `kind` is the type of a and b."""
    T.ptx_mma("float32", "m16n8k16", "row", "col", kind, kind, "fp32", a.data, a_at, b.data, b_at, c.data, c_at, T.bool(False))
