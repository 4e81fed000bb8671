"""Compiled CPU variants, and specs of operations on a matrix, for tests."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from kvgen.lower.backend import get_backend
from kvgen.lower.matrix import NO_LAYOUT
from kvgen.lower.schedule import Params, Schedule, layout_of
from kvgen.runtime.calls import Variant
from kvgen.runtime.matrix import MatrixVariant, load_matrix
from kvgen.runtime.module import load
from kvgen.spec import KernelSpec, MatrixSpec, load_any_spec, load_spec
from kvgen.toolchain import build
from tests.support.specs import base


def spec_of(
    heads: str = "4/2",
    dim: int = 64,
    dtype: str = "float16",
    k: str = "4c32",
    v: str = "4t32",
    page: int = 0,
    cache: dict[str, Any] | None = None,
    **attention: Any,
) -> KernelSpec:
    """A spec in short words: `4c32` is 4 bits per channel in groups of 32, `8t16s` 8 bits per token, symmetric, `e4m3t64` floats, `nvfp4`;
    `16` is plain.

    `8@head` has a static scale per head.

    `2c64+8range` boosts an eighth of the channels, chosen by their range (`+8mean_abs`, `+8static`). `4t64~32` is rotated in blocks of 32
    after signs, `4t64~32u` without them.
    """
    q_heads, kv_heads = map(int, heads.split("/"))
    return load_spec(
        base(
            attention={"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": dim, "dtype": dtype, **attention},
            key=_quant(k),
            value=_quant(v),
            cache={**({"layout": "paged", "page": page} if page else {}), **(cache or {})},
        )
    )


def _quant(words: str) -> dict[str, Any]:
    if words == "16":
        return {"bits": 16}
    if words.endswith("fp4"):
        return {"type": words}
    words, _, block = words.partition("~")
    rotate = {"rotate": {"block": int(block.rstrip("u")), "signs": not block.endswith("u")}} if block else {}
    words, _, boosted = words.partition("+")
    if "@" in words:
        code, scale = words.split("@")
        return {**({"bits": int(code)} if code.isdigit() else {"type": code}), "scale": scale, **rotate}
    code, axis, group, symmetric = re.fullmatch(r"(\d|e\dm\d)([ct])(\d+)(s?)", words).groups()  # type: ignore[union-attr]
    quant = {"axis": "channel" if axis == "c" else "token", "group": int(group), **rotate}
    quant |= {"bits": int(code), "zero": not symmetric} if code.isdigit() else {"type": code}
    return {**quant, "boost": {"fraction": 1 / int(boosted[0]), "select": boosted[1:]}} if boosted else quant


@cache
def variant(spec: KernelSpec, parts: tuple[tuple[str, int | str], ...] = ()) -> Variant:
    """The default schedule of a spec with some parameters replaced, compiled and loaded."""
    backend = get_backend("cpu")
    default = backend.default(spec, "cpu")
    given = dict(parts)
    layout = Params({**default.layout, **{name: given.pop(name) for name in ("block",) if name in given}})
    schedule = Schedule("cpu", layout, Params({**default.launch, **given}))
    artifact = build(backend.lower(spec, schedule, "cpu"))
    return Variant(spec, layout_of(spec, layout), load(artifact.path))


def matrix_spec(operation: str = "quantize", dtype: str = "float32", arch: str = "cpu", shapes: tuple[str, ...] = ("64x32",)) -> MatrixSpec:
    """A spec of an operation; shapes as tokens x channels."""
    works: list[dict[str, Any]] = [dict(zip(("tokens", "channels"), map(int, shape.split("x")), strict=True)) for shape in shapes]
    spec = load_any_spec({"operation": operation, "arch": arch, "matrix": {"dtype": dtype}, "workloads": works})
    assert isinstance(spec, MatrixSpec)
    return spec


@cache
def cpu_matrix(dtype: str = "float32", rows: int = 16, channels: int = 128) -> MatrixVariant:
    """A compiled schedule of the CPU back end."""
    spec = matrix_spec(dtype=dtype)
    schedule = Schedule("cpu", NO_LAYOUT, Params(rows=rows, channels_per_tile=channels))
    return load_matrix(spec, build(get_backend("cpu").lower(spec, schedule, "cpu")).path)
