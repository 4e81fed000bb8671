"""Linear layers on a CPU: every kind of product against fp64, and the packed bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvgen.format import weights
from kvgen.lower.backend import get_backend
from kvgen.lower.schedule import Params, Schedule
from kvgen.runtime.linear import LinearVariant
from kvgen.runtime.module import LinearModule, load_as
from kvgen.spec import LinearSpec
from kvgen.spec.load import load_as as load_spec_as
from kvgen.toolchain import build
from kvgen.toolchain.compilers import cpu_features
from kvgen.verify import CheckPolicy
from kvgen.verify.linear import LinearCheck, seeded_inputs, seeded_weight

CPU = get_backend("cpu")
X86 = pytest.mark.skipif("avx2" not in cpu_features(), reason="these instructions are those of x86-64")
VNNI, AMX = {"dot": "int16", "amx_rows": 129}, {"dot": "int16", "amx_rows": 4}


def spec_of(**linear: Any) -> LinearSpec:
    return load_spec_as(LinearSpec, {"operation": "linear", "arch": "cpu", "linear": {"n": 224, "k": 384, **linear}})


def variant(spec: LinearSpec, launch: dict[str, Any], level: str | None = None) -> LinearVariant:
    default = CPU.default(spec, "cpu")
    source = CPU.lower(spec, Schedule("cpu", default.layout, Params({**default.launch, **launch})), "cpu")
    more = ("-O1",) if level is None else ("-O1", f"-march={level}")
    module = load_as(build(replace(source, flags=(*source.flags, *more))).path, LinearModule)
    return LinearVariant(spec, module, "cpu", 128)


@pytest.mark.parametrize(
    ("linear", "launch", "level"),
    [
        ({"bits": 4, "group": 64, "dtype": "bfloat16", "bias": True}, AMX, None),
        ({"bits": 8, "group": 128, "zero": True, "dtype": "float16", "epilogue": "silu_mul", "n": 224 + 64}, AMX, None),
        ({"bits": 4, "group": 128, "zero": True, "dtype": "float16", "epilogue": "add"}, VNNI, None),
        ({"bits": 8, "group": "row", "dtype": "bfloat16"}, {**VNNI, "tiles": 2}, None),
        ({"bits": 4, "group": 64, "zero": True, "dtype": "float32", "epilogue": "silu_mul"}, {}, None),
        pytest.param({"bits": 4, "group": "row", "zero": True, "dtype": "bfloat16"}, VNNI, "x86-64-v3", marks=X86),
        pytest.param({"bits": 8, "group": 64, "dtype": "bfloat16", "epilogue": "add"}, VNNI, "x86-64", marks=X86),
    ],
    ids=["amx-bias", "amx-parts-silu", "vnni-add", "vnni-row", "floats-silu", "avx2-row", "sse2-add"],
)
def test_products_are_right(linear: dict[str, Any], launch: dict[str, Any], level: str | None) -> None:
    test = LinearCheck(variant(spec_of(**linear), launch, level), "cpu", CheckPolicy(repeats=2))
    test.prepare()
    test.run()
    most = {"float32": 1e-6, "float16": 5e-4, "bfloat16": 3e-3}[linear["dtype"]]
    assert 0 < test.accuracy["relative_l2"] < most


def test_a_thread_more_changes_no_bit_and_overlaps_are_refused() -> None:
    spec = spec_of(bits=4, group=64, dtype="bfloat16", bias=True)
    kernel = variant(spec, AMX)
    packed = kernel.pack(*seeded_weight(spec.linear, "cpu"))
    x, bias = seeded_inputs(spec.linear, 16, "cpu"), torch.zeros(224, dtype=torch.bfloat16)
    outputs = []
    for threads in (1, 2):
        kernel.module.set_threads(threads)
        outputs.append(kernel(x, packed, bias))
    assert torch.equal(*outputs)
    with pytest.raises(ValueError, match="out overlaps with x"):
        kernel(x, packed, bias, out=x[:, :224])
    with pytest.raises(ValueError, match="bias must be given"):
        kernel(x, packed)


@pytest.mark.parametrize(
    "linear",
    [
        {"bits": 4, "group": 64, "zero": True, "dtype": "float16", "epilogue": "silu_mul"},
        {"bits": 8, "group": 128, "dtype": "float32"},
        {"bits": 4, "group": "row", "zero": True, "dtype": "bfloat16"},
    ],
)
def test_packed_bytes_are_those_of_the_page(linear: dict[str, Any]) -> None:
    """docs/cpu.md; 224 rows are three blocks and half of one."""
    spec = spec_of(**linear)
    weight = seeded_weight(spec.linear, "cpu")
    packed = weights.pack(spec, weight)
    for given, back in zip(weight, weights.unpack(spec, packed), strict=True):
        assert (given is None and back is None) or torch.equal(given, back)

    n, k, bits, paired = 224, 384, spec.linear.bits, spec.linear.epilogue == "silu_mul"
    item, zero, grouped = weight.scales.itemsize, int(spec.linear.zero), spec.linear.group != "row"
    unit = int(spec.linear.group) if grouped else 64
    run_bytes = 64 * 16 * bits // 8
    tile_bytes = k // unit * (unit // 64 * run_bytes + 16 * (item + zero) * grouped)
    for row, channel in ((0, 0), (17, 5), (130, 77), (223, 383), (201, 300)):
        place = row if not paired else (row % 112 // 16 * 2 + row // 112) * 16 + row % 16
        tile, lane = divmod(place, 16)
        first = tile // 4 * 4
        tiles = min(4, n // 16 - first)
        stream = first * tile_bytes + channel // unit * (tiles * tile_bytes // (k // unit))
        at = stream + (channel % unit // 64 * tiles + tile - first) * run_bytes + channel % 64 * bits // 32 * 64 + lane * 4
        word = int.from_bytes(bytes(packed[at : at + 4].tolist()), "little")
        assert word >> channel % (32 // bits) * bits & ((1 << bits) - 1) == weight.codes[row, channel]
        params = stream + unit // 64 * tiles * run_bytes
        scale_at = params + ((tile - first) * 16 + lane) * item if grouped else n // 16 * tile_bytes + place * item
        group = channel // unit if grouped else 0
        assert packed[scale_at : scale_at + item].clone().view(weight.scales.dtype)[0] == weight.scales[row, group]
        if weight.zeros is not None:
            zero_at = params + tiles * 16 * item + (tile - first) * 16 + lane if grouped else n // 16 * tile_bytes + n * item + place
            assert packed[zero_at] == weight.zeros[row, group]


def test_float32_is_not_rounded_to_16_bits() -> None:
    spec = spec_of(bits=4, group=64, dtype="float32")
    default = CPU.default(spec, "cpu")
    (reason,) = CPU.space(spec, "cpu").check(Schedule("cpu", default.layout, Params({**default.launch, "dot": "int16"})))
    assert "int16 would round float32" in reason
