"""Products of 16-bit integers on the CPU (`dot: int16`): as right as floats, on every instruction set, refused where they would not be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvgen.lower.backend import get_backend
from kvgen.lower.schedule import Params, Schedule, layout_of
from kvgen.runtime.module import load
from kvgen.runtime.variant import Variant
from kvgen.spec import KernelSpec
from kvgen.toolchain import build
from kvgen.toolchain.compilers import cpu_features
from kvgen.verify import CheckPolicy
from kvgen.verify.attention import attend
from kvgen.verify.check import check
from kvgen.verify.tolerance import relative_l2, tolerance
from tests.support.cpu import spec_of, variant

CPU = get_backend("cpu")
POLICY = CheckPolicy(long_tokens=300, steps=1, repeats=2, most_tokens=1 << 12)
INTEGERS = (("dot", "int16"), ("block", 96))

FORMATS = {
    "int8-paged": spec_of(heads="6/2", k="8c48", v="8t64", page=96, q_len=3),
    "int2-symmetric": spec_of(dim=32, k="2c32s", v="2t32s", window=100, softcap=30.0),
    "per-token-bfloat16": spec_of(dtype="bfloat16", k="8t16s", v="4t16", cache={"sink": 5, "local": 40}),
    "boosted": spec_of(dim=80, heads="5/1", k="2c32+4range", v="2t80"),
    "longest-sums": spec_of(heads="1/1", dim=512, k="8t512", v="8t128"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_right_and_pack_the_codes_of_the_reference(name: str) -> None:
    assert check(variant(FORMATS[name], INTEGERS), "cpu", POLICY).get("code_mismatches", 0) == 0


def integer_schedule(spec: KernelSpec) -> Schedule:
    default = CPU.default(spec, "cpu")
    return Schedule("cpu", default.layout, Params({**default.launch, "dot": "int16"}))


@pytest.mark.skipif("avx2" not in cpu_features(), reason="these instruction sets are those of x86-64")
@pytest.mark.parametrize("bits", [4, 2])
def test_every_instruction_set_gives_the_same_scores(bits: int) -> None:
    """VNNI, vpmaddwd, plain arithmetic: sums of integers are exact, so only the floats around them may round differently."""
    spec = spec_of(heads="4/1", dim=32, k=f"{bits}c32", v=f"{8 if bits == 4 else 2}t32")
    schedule = integer_schedule(spec)
    source, layout = CPU.lower(spec, schedule, "cpu"), layout_of(spec, schedule.layout)
    generator = torch.Generator().manual_seed(1)
    k, val = (torch.randn(2, 700, 1, 32, generator=generator).half() for _ in range(2))
    q = torch.randn(2, 1, 4, 32, generator=generator).half() * 3
    results = []
    sets = ((), ("-mno-avx512vnni",), ("-mno-avx512vnni", "-mno-avx512f"), ("-mno-avx512f", "-mno-avx512vnni", "-mno-avxvnni"))
    for flags in (*sets, ("-march=x86-64",)):
        v = Variant(spec, layout, load(build(replace(source, flags=(*source.flags, *flags))).path))
        cache = v.new_cache(2, 800)
        v.prefill(cache, k, val, [700, 333])
        results.append(v.attend(q, cache, lse=True))
    for out, lse in results[1:]:
        assert relative_l2(out, results[0][0]) < 2e-4  # roundings to float16 at a tie
        assert relative_l2(lse, results[0][1]) < 1e-6


def test_a_token_of_large_weight_and_small_values_leaves_the_others_their_precision() -> None:
    """As the first token of a model often is: nearly all of the weight, nearly nothing of the values."""
    v = variant(spec_of(heads="2/1", k="8c128", v="8t64"), (("dot", "int16"), ("block", 128)))
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(1, 1, 2, 64, generator=generator).half()
    k, val = (torch.randn(1, 128, 1, 64, generator=generator).half() for _ in range(2))
    k[:, 0], val[:, 0] = q.mean(2) * 1.5, val[:, 0] * 1e-3
    cache = v.new_cache(1, 256)
    v.prefill(cache, k, val)
    want, _ = attend(q, *v.unpack(cache), cache.lengths)
    assert float(want.norm()) < 0.5 * float(val[:, 1:].float().norm() / 127**0.5)
    assert relative_l2(v.attend(q, cache), want) <= tolerance(v.dtype)


def test_an_infinity_in_the_query_gives_nan() -> None:
    """Also where the middle of a channel's range is negative, so that the zeros alone make every score minus infinity."""
    v = variant(spec_of(heads="1/1", k="8c32", v="8t64"), INTEGERS)
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(1, 1, 1, 64, generator=generator).half()
    k, val = (torch.randn(1, 96, 1, 64, generator=generator).half() for _ in range(2))
    k[..., 5] -= 1
    q[..., 5] = torch.inf
    cache = v.new_cache(1, 200)
    v.prefill(cache, k, val)
    out, lse = v.attend(q, cache, lse=True)
    assert out.isnan().all()
    assert lse.isnan().all()


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"dtype": "float32"}, "too coarse for the error bound of float32"),
        ({"k": "16"}, "they have 16 and 4 bits"),
        ({"v": "16"}, "they have 4 and 16 bits"),
        ({"v": "4c32"}, "with V per channel"),
        ({"k": "4t8"}, "K in groups of 8 channels"),
        ({"v": "4t8"}, "V in groups of 8 channels"),
        ({"heads": "1/1", "dim": 1024, "k": "8c32"}, "sums over 1024 channels of 8 bits exceed"),
    ],
)
def test_what_integers_cannot_do_is_refused_by_name(parts: dict[str, Any], reason: str) -> None:
    spec = spec_of(**parts)
    space, schedule = CPU.space(spec, "cpu"), integer_schedule(spec)
    (found,) = space.check(schedule)
    assert reason in found
    assert {launch["dot"] for launch in space.launches(schedule.layout, spec.workloads[0])} == {"fp32"}
