"""Linear layers over packed weights on the GPU: every kind of format and epilogue, launches of every kind, and the calls of a program."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvgen import get_linear_kernel
from kvgen.arch import GPUS, Target, target_of
from kvgen.lower.backend import get_backend
from kvgen.lower.linear import NO_LAYOUT, rows_of
from kvgen.lower.schedule import Params, Schedule
from kvgen.measure.inputs import LinearInputs
from kvgen.runtime.linear import LinearVariant, load_linear
from kvgen.spec import LinearFormat, LinearShape, LinearSpec
from kvgen.toolchain import build
from kvgen.verify import CheckPolicy
from kvgen.verify.linear import LinearCheck, LinearWorkloadCheck, seeded_weight

PLAIN = Params(product="mma", rows=16, tiles=2, warps_n=1, warps_k=4, stages=4, split=1, multicast=False, ctas=1)
LAUNCHES: dict[str, dict[str, Any]] = {
    "one warp": {"rows": 8, "tiles": 1, "warps_k": 1},
    "a cluster": {"split": 2, "warps_k": 2},
    "multicast": {"multicast": True, "warps_k": 2},
    "multicast to two CTAs along k": {"multicast": True, "split": 2, "warps_n": 2, "warps_k": 1},
    "many rows": {"rows": 128, "warps_n": 4, "warps_k": 1, "stages": 2},
    "a warp group": {"product": "wgmma", "rows": 64, "tiles": 1, "warps_n": 4, "warps_k": 2, "stages": 3},
    "a cluster of warp groups": {"product": "wgmma", "rows": 128, "tiles": 2, "warps_n": 4, "warps_k": 1, "stages": 3, "split": 2},
    "tiles that do not divide n": {"rows": 32, "tiles": 4, "warps_n": 4, "warps_k": 1, "stages": 2},
}
FORMATS: list[dict[str, Any]] = [
    {"bits": bits, "group": group, "zero": zero, "dtype": dtype}
    for bits, group, zero, dtype in (
        (4, 128, False, "float16"),
        (4, 64, True, "bfloat16"),
        (4, "row", True, "float16"),
        (4, "row", False, "bfloat16"),
        (8, 128, True, "bfloat16"),
        (8, 64, False, "float16"),
        (8, "row", False, "float16"),
        (8, "row", True, "bfloat16"),
    )
]
EPILOGUES: list[dict[str, Any]] = [{"bias": True}, {"epilogue": "silu_mul", "bias": True}, {"epilogue": "add"}]


def compiled(spec: LinearSpec, launch: Params, target: Target | None = None) -> LinearVariant:
    target = target or target_of(torch.cuda.get_device_capability())
    if (launch["split"] != 1 or launch["multicast"] or launch["product"] == "wgmma") and not GPUS[target].clusters:
        pytest.skip(f"{target} has neither clusters nor warp groups")
    source = get_backend("cuda").lower(spec, Schedule("cuda", NO_LAYOUT, launch), target)
    return load_linear(spec, build(source).path, target, rows_of(launch))


def check(linear: dict[str, Any], launch: dict[str, Any], target: Target | None = None) -> None:
    spec = LinearSpec(arch=target or "native", linear=LinearFormat(**{"n": 416, "k": 512, **linear}))
    variant = compiled(spec, Params({**PLAIN, **launch}), target)
    every = LinearCheck(variant, "cuda", CheckPolicy())
    every.prepare()
    every.run()


@pytest.mark.parametrize("linear", FORMATS, ids=lambda linear: "-".join(map(str, linear.values())))
@pytest.mark.parametrize("rows", [16, 128])
def test_every_format_is_right(linear: dict[str, Any], rows: int) -> None:
    check(linear, {"rows": rows, "stages": 2 if rows > 16 else 4, "warps_k": 1 if rows > 16 else 4})


@pytest.mark.parametrize("target", ["sm80", "sm89"])
@pytest.mark.parametrize(
    ("linear", "launch"),
    [
        ({"bits": 4, "bias": True}, {"rows": 8, "warps_k": 4}),
        (
            {"bits": 4, "group": 64, "zero": True, "dtype": "bfloat16", "epilogue": "add"},
            {"rows": 32, "warps_n": 2, "warps_k": 2, "stages": 2},
        ),
        ({"bits": 8, "group": "row", "zero": True, "dtype": "bfloat16", "epilogue": "silu_mul"}, {"rows": 16, "warps_k": 2}),
        ({"bits": 8, "group": 64}, {"rows": 64, "warps_n": 4, "warps_k": 1, "stages": 2}),
        ({"bits": 4, "group": "row", "epilogue": "silu_mul", "bias": True}, {"rows": 128, "warps_n": 2, "warps_k": 1, "stages": 2}),
    ],
    ids=["few rows", "bfloat16 and zeros", "row scales", "many rows", "most rows"],
)
def test_older_targets_through_their_ptx(linear: dict[str, Any], launch: dict[str, Any], target: Target) -> None:
    check(linear, launch, target)


@pytest.mark.parametrize("name", LAUNCHES)
@pytest.mark.parametrize("linear", EPILOGUES, ids=lambda linear: linear.get("epilogue", "none"))
def test_every_launch_and_epilogue_is_right(linear: dict[str, Any], name: str) -> None:
    if linear.get("epilogue") == "silu_mul" and name == "one warp":
        pytest.skip("a warp of one tile does not hold gate and up rows alike")
    check(linear, LAUNCHES[name])


def test_a_call_of_a_program() -> None:
    """With a workload's inputs, in a graph, and refused beyond the compiled rows."""
    spec = LinearSpec(linear=LinearFormat(n=256, k=1024), workloads=(LinearShape(rows=1), LinearShape(rows=12)))
    kernel = get_linear_kernel(spec)
    inputs = LinearInputs(kernel, LinearShape(rows=12), "cuda", cold=0)
    LinearWorkloadCheck(kernel, "rows12", inputs.case).run()
    packed = kernel.pack(*seeded_weight(spec.linear, "cpu"))
    assert torch.equal(packed.cuda(), kernel.pack(*(x if x is None else x.cuda() for x in seeded_weight(spec.linear, "cpu"))))
    with pytest.raises(ValueError, match="x has 17 rows, and this kernel is compiled for 16"):
        kernel(inputs.case.x[:1].expand(17, 1024), inputs.case.packed)
    with pytest.raises(ValueError, match="x is on cpu"):
        kernel(inputs.case.x.cpu(), inputs.case.packed)
