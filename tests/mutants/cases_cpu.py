"""The CPU variants that faults are planted in: small, each with what some lines need."""

from __future__ import annotations

from typing import Any

from kvgen.spec import AnySpec, KernelSpec, load_any_spec, load_spec
from tests.mutants.fault import Case


def _quant(words: str) -> dict[str, Any]:
    """`4c32` is 4 bits per channel in groups of 32, `8t16s` 8 bits per token and symmetric, `16` not quantized.

    `2c32+4` has a quarter of its channels boosted, `2c32+4range` those of the largest range.
    """
    if words == "16":
        return {"bits": 16}
    words, _, boosted = words.partition("+")
    quant = {
        "bits": int(words[0]),
        "axis": "channel" if words[1] == "c" else "token",
        "group": int(words[2:].rstrip("s")),
        "zero": not words.endswith("s"),
    }
    return {**quant, "boost": {"fraction": 1 / int(boosted[0]), "select": boosted[1:] or "mean_abs"}} if boosted else quant


def _spec(
    heads: str,
    dim: int,
    k: str,
    v: str,
    workloads: str,
    dtype: str = "float16",
    page: int = 0,
    cache: dict[str, int] | None = None,
    **attention: Any,
) -> KernelSpec:
    q_heads, kv_heads = map(int, heads.split("/"))
    works = [dict(zip(("batch", "kv_len", "q_len"), map(int, word.split("x")), strict=False)) for word in workloads.split()]
    return load_spec(
        {
            "name": "mutant",
            "arch": "cpu",
            "attention": {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": dim, "dtype": dtype, **attention},
            "key": _quant(k),
            "value": _quant(v),
            "cache": {**({"layout": "paged", "page": page} if page else {}), **(cache or {})},
            "workloads": works,
        }
    )


def _matrix(operation: str, dtype: str, tokens: int, channels: int) -> AnySpec:
    shape = {"tokens": tokens, "channels": channels}
    return load_any_spec({"operation": operation, "arch": "cpu", "matrix": {"dtype": dtype}, "workloads": [shape]})


def _case(name: str, spec: AnySpec, **changes: int | str) -> Case:
    return Case(name, "cpu", spec, changes=tuple(changes.items()))


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        _case("splits", _spec("4/1", 64, "4c32", "4t64", "1x32768 2x4096")),
        _case("splits-q4", _spec("4/1", 32, "4c32", "4t32", "1x16384x4 2x300", q_len=4)),
        _case("batch", _spec("2/1", 32, "4c32", "4t32", "136x320")),
        _case("paged", _spec("4/2", 64, "4c64", "4t64", "12x700 1x5000", page=128), block=64),
        _case("window", _spec("4/2", 64, "4c64", "4t64", "2x1500 3x700x3", window=200, softcap=30.0, q_len=3)),
        _case("token", _spec("4/2", 64, "4t32", "8t16", "3x900")),
        _case("symmetric", _spec("4/1", 64, "8c32s", "4t32s", "3x900")),
        _case("value-channel", _spec("4/1", 64, "4c32", "4c32", "3x900"), block=128),
        _case("group5", _spec("10/2", 64, "4t32", "4t32", "3x900 2x700")),
        _case("heads", _spec("8/4", 32, "4c32", "4t32", "2x900x3", q_len=3)),
        _case("int2", _spec("4/1", 64, "2c32", "2t32", "2x900")),
        _case("boost", _spec("4/1", 80, "2c32+4", "2t80", "2x900")),
        _case("boost-range", _spec("4/1", 80, "2c32+4range", "2t80", "2x900"), block=128),
        _case("int8", _spec("4/1", 64, "8c64", "8t64", "2x900")),
        _case("narrow", _spec("4/1", 32, "4c16", "4t16", "2x700", dtype="bfloat16"), block=64),
        _case("expanded", _spec("4/1", 32, "4t4", "4t8", "2x700")),
        _case("wide-block", _spec("4/1", 64, "4c64", "4t64", "2x2000"), block=512),
        _case("float32", _spec("2/1", 32, "4c32", "4t32", "2x900", dtype="float32")),
        _case("plain", _spec("4/1", 32, "16", "16", "2x900", dtype="bfloat16")),
        _case(
            "unquantized", _spec("4/2", 64, "4c32", "4t32", "2x900", sinks=True, cache={"sink": 5, "local": 40, "rollback": 9}), block=64
        ),
        _case("integers", _spec("4/1", 64, "8c32", "4t64", "1x5000 2x900"), dot="int16"),
        _case("integers-token", _spec("4/2", 64, "4t32", "2t32", "3x900"), dot="int16"),
        _case("window-rollback", _spec("4/1", 64, "4c32", "4t32", "2x900", window=70, cache={"local": 10, "rollback": 40}), block=32),
        _case("rollback-far", _spec("4/1", 64, "4c32", "4t32", "2x900", cache={"rollback": 70}), block=32),
        _case("window-far", _spec("16/16", 64, "8c64", "8t64", "2x900", window=40000)),
        _case("matrix", _matrix("quantize", "float32", 700, 300), rows=16),
        _case("matrix-half", _matrix("dequantize", "bfloat16", 700, 300), rows=16),
        _case("prompt", _spec("16/1", 64, "4c64", "4t64", "1x8192x8 2x300x8", q_len=8)),
    )
}
