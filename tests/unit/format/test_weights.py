"""Codes of weights, and their places in the packed bytes of GPUs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from kvgen.format import weights
from kvgen.format.weights import Canonical
from kvgen.spec import LinearFormat, LinearSpec

N, K = 96, 256
NIBBLES = {(0, 0): 0, (0, 1): 4, (1, 0): 1, (1, 1): 5, (0, 2): 2, (0, 3): 6, (1, 2): 3, (1, 3): 7}
"""In a word of 4-bit codes, of (row g + 8 h, channel) -> nibble."""


def spec_of(**linear: Any) -> LinearSpec:
    return LinearSpec(arch="sm90", linear=LinearFormat(**{"n": N, "k": K, "dtype": "bfloat16", **linear}))


def random_weight(linear: LinearFormat) -> Canonical:
    generator, params = torch.Generator().manual_seed(0), (linear.n, linear.groups)
    codes = torch.randint(0, 1 << linear.bits, (linear.n, linear.k), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(0, 1 << linear.bits, params, generator=generator, dtype=torch.uint8) if linear.zero else None
    return Canonical(codes, torch.randn(params, generator=generator).to(torch.bfloat16), zeros)


@pytest.mark.parametrize(
    ("bits", "group", "zero", "epilogue"), [*itertools.product((4, 8), (64, 128, "row"), (False, True), ("none", "silu_mul"))]
)
def test_every_code_scale_and_zero_lies_in_its_place(bits: int, group: int | str, zero: bool, epilogue: str) -> None:
    """The places are those of docs/linear.md, found here element by element."""
    spec = spec_of(bits=bits, group=group, zero=zero, epilogue=epilogue)
    weight = random_weight(spec.linear)
    packed = weights.pack(spec, weight)
    back = weights.unpack(spec, packed)
    assert all(torch.equal(one, other) for one, other in zip(weight, back, strict=True) if one is not None)
    assert (back.zeros is None) == (not zero)
    unit = 64 if group == "row" else int(group)
    code_bytes = 16 * unit * bits // 8
    unit_bytes = code_bytes + (0 if group == "row" else 32 + 16 * zero)
    raw, scales = packed.tolist(), weight.scales.view(torch.uint8).view(N, -1, 2)
    for n, k in itertools.product((0, 5, 13, 47, 50, 95), (0, 3, 77, 130, 255)):
        tile, row = divmod(n, 16)
        if epilogue == "silu_mul":
            tile, row = n % (N // 2) // 16 * 2 + n // (N // 2), n % (N // 2) % 16
        start = (tile * K // unit + k // unit) * unit_bytes
        lane = 4 * (row % 8) + k % 8 // 2
        fragment, within = k % 64 // 16, k % 16 // 8 * 2 + k % 2
        if bits == 4:
            nibble = NIBBLES[row // 8, within]
            found = raw[start + k % unit // 64 * 512 + lane * 16 + fragment * 4 + nibble // 2] >> 4 * (nibble % 2) & 15
        else:
            at = start + k % unit // 64 * 1024 + fragment // 2 * 512 + lane * 16 + fragment % 2 * 8
            found = raw[at + within // 2 * 4 + within % 2 * 2 + row // 8]
        assert found == int(weight.codes[n, k])
        at, zeros_at = start + code_bytes + 2 * row, start + code_bytes + 32 + row
        if group == "row":
            at, zeros_at = N * K * bits // 8 + 2 * (16 * tile + row), N * K * bits // 8 + 2 * N + 16 * tile + row
        place = 0 if group == "row" else k // unit
        assert raw[at : at + 2] == scales[n, place].tolist()
        if weight.zeros is not None:
            assert raw[zeros_at] == int(weight.zeros[n, place])


@pytest.mark.parametrize("zero", [False, True])
def test_codes_are_the_nearest_and_clipping_lowers_the_error(zero: bool) -> None:
    linear = spec_of(zero=zero, group=64).linear
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(0)) + zero
    weight[7, 64:128] = 0.0
    errors = {}
    for clip in ("none", "mse"):
        found = weights.quantize(linear, weight, clip)
        assert found.scales.dtype == torch.bfloat16
        zeros = found.zeros.float() if found.zeros is not None else torch.full(found.scales.shape, 8.0)
        scales, codes = found.scales.float().unsqueeze(2), found.codes.view(N, 4, 64)
        means = (codes - zeros.unsqueeze(2)) * scales
        assert torch.equal(weights.dequantize(linear, found), means.view(N, K).to(torch.bfloat16))
        assert not bool(means[7, 1].any())
        errors[clip] = (means - weight.view(N, 4, 64)).square().sum(2)
        if clip == "none":
            exact = weight.view(N, 4, 64) / scales.clamp(min=1e-30) + zeros.unsqueeze(2)
            assert bool(((exact.clamp(0, 15) - codes).abs() <= 0.5 + 1e-5).all())
    assert bool((errors["mse"] <= errors["none"] * (1 + 1e-3) + 1e-9).all())
    assert float(errors["mse"].sum()) < 0.97 * float(errors["none"].sum())


def test_what_is_no_weight_of_the_format_is_refused() -> None:
    spec = spec_of()
    good = random_weight(spec.linear)
    for bad, told in (
        (good._replace(codes=good.codes + 1), "codes must be below 16, and one is 16"),
        (good._replace(scales=good.scales.float()), r"scales must be \[96, 2\] of torch.bfloat16"),
        (good._replace(zeros=good.codes[:, :2]), "zeros are given, and linear.zero is false"),
    ):
        with pytest.raises(ValueError, match=told):
            weights.pack(spec, bad)
    with pytest.raises(ValueError, match=r"the packed weight is uint8 \[12672\], contiguous, and not \[12671\]"):
        weights.unpack(spec, weights.pack(spec, good)[:-1])
    with pytest.raises(ValueError, match="not finite, or too large for scales"):
        weights.quantize(spec.linear, torch.full((N, K), torch.inf))
