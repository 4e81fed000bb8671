"""Quantization beside a plain loop in numpy's float32, and bytes of blocks: what goes in comes out, where the layout says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kvgen.format.dtypes import torch_dtype
from kvgen.format.layout import PackedLayout, packed_layout
from kvgen.format.places import code_bits, param_offsets
from kvgen.spec import BoostSpec, KernelSpec, KeySpec, QuantSpec, load_spec
from kvgen.verify import matrix
from kvgen.verify.packing import (
    FLOATS,
    OPERANDS,
    Quantized,
    dequantize,
    float_codes,
    float_values,
    pack_blocks,
    quantize,
    read_codes,
    spread,
    unpack_blocks,
)
from tests.support.specs import base, layouts

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def one_group(values: np.ndarray[Any, Any], bits: int, zero: bool, kept: type[np.floating[Any]]) -> tuple[list[int], float, float]:
    """Codes (unsigned fields), scale and zero of one group: the numerics section, one operation at a time."""
    limit = np.float32(np.finfo(kept).max)

    def stored(value: np.float32) -> np.float32:
        return np.float32(kept(min(max(value, -limit), limit)))

    if zero:
        levels = 2**bits - 1
        low, high = values.min(), values.max()
        base, scale, least, offset = stored(low), stored(np.float32(high - low) / np.float32(levels)), 0, 0
    else:
        levels = 2 ** (bits - 1) - 1
        base, scale, least, offset = np.float32(0), stored(np.abs(values).max() / np.float32(levels)), -levels, 2 ** (bits - 1)
    codes = []
    for x in values:
        q = 0.0 if scale == 0 else float(np.rint(np.float32(x - base) / scale))
        codes.append(int(min(max(q, least), levels)) + offset)
    return codes, float(scale), float(base)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(
    bits=st.sampled_from([2, 4, 8]),
    axis=st.sampled_from(["channel", "token"]),
    zero=st.booleans(),
    spreading=st.sampled_from([1e-7, 1e-3, 1.0, 300.0, 7e4]),
    offset=st.sampled_from([0.0, 1.0, -900.0]),
    seed=st.integers(0, 2**31),
)
def test_equals_a_plain_loop(dtype: torch.dtype, bits: Any, axis: Any, zero: bool, spreading: float, offset: float, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    x = (torch.randn(32, 16, generator=random) * spreading + offset).clamp(-6e4, 6e4).to(dtype)
    x[3] = x[3, 0]  # a constant group for axis token
    quant = QuantSpec(bits=bits, axis=axis, group=8, zero=zero)
    q = quantize(x, quant)
    kept = np.float32 if dtype == torch.float32 else np.float16
    groups, codes = (x.T if axis == "channel" else x).float(), q.codes.T if axis == "channel" else q.codes
    scales = q.scale.T if axis == "channel" else q.scale
    zeros = None if q.zero is None else q.zero.T if axis == "channel" else q.zero
    for row in range(groups.shape[0]):
        for group in range(groups.shape[1] // 8):
            part = slice(group * 8, group * 8 + 8)
            want, scale, base = one_group(groups[row, part].numpy(), bits, zero, kept)
            assert codes[row, part].tolist() == want
            assert float(scales[row, group]) == scale
            assert zeros is None or float(zeros[row, group]) == base


def test_ties_go_to_the_even_code() -> None:
    x = torch.tensor([[0.0, 15.0, 0.5, 1.5, 2.5, 3.5, 13.5, 14.5]])
    assert quantize(x, QuantSpec(bits=4, axis="token", group=8)).codes.tolist() == [[0, 15, 0, 2, 2, 4, 14, 14]]


def test_params_saturate_at_the_largest_half() -> None:
    quant = QuantSpec(bits=4, axis="token", group=8)
    q = quantize(torch.tensor([[-1e30, 1e30] * 4]).bfloat16(), quant)
    assert q.zero is not None
    assert q.zero.item() == -65504
    assert q.scale.item() == 65504
    assert q.codes.tolist() == [[0, 15] * 4]
    assert bool(torch.isfinite(dequantize(q, quant)).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused(bad: float) -> None:
    x = torch.zeros(16, 16)
    x[5, 5] = bad
    with pytest.raises(ValueError, match="not finite"):
        quantize(x, QuantSpec(bits=4, axis="token", group=16))


def test_groups_that_do_not_fit_and_unquantized_formats_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the group \(32\) does not divide 48 tokens"):
        quantize(torch.zeros(48, 64), QuantSpec(bits=4, axis="channel", group=32))
    with pytest.raises(ValueError, match="16 bits are not quantized"):
        quantize(torch.zeros(48, 64), QuantSpec(bits=16, axis="token"))


# --- floats ----------------------------------------------------------------------------------------------------------

EIGHT_BITS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@pytest.mark.parametrize("kind", EIGHT_BITS)
def test_codes_of_floats_are_those_of_torch(kind: Any) -> None:
    """All codes, all ties between two of them, the numbers beside ties, and what is beyond the largest; by a scale of 1."""
    of_torch, most = EIGHT_BITS[kind], FLOATS[kind][2]
    values = float_values(kind)
    assert torch.equal(values.nan_to_num(-1), torch.arange(128, dtype=torch.uint8).view(of_torch).double().nan_to_num(-1, -1))
    ties = ((values[1:] + values[:-1]) / 2)[values[1:].isfinite()].float()
    x = torch.cat([values[values.isfinite()].float(), ties, ties.nextafter(torch.tensor(0.0)), ties.nextafter(torch.tensor(1e9))])
    x = torch.cat([x, -x])
    codes = float_codes(x, torch.ones(1), kind)
    assert torch.equal(codes, x.to(of_torch).view(torch.uint8))
    assert float_codes(torch.tensor([1e30, -1e30]), torch.ones(1), kind).view(of_torch).tolist() == [most, -most]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", EIGHT_BITS)
def test_floats_take_the_largest_of_a_group_to_the_largest_code(dtype: torch.dtype, kind: Any) -> None:
    quant = QuantSpec(type=kind, axis="token", group=8)
    x = torch.tensor([[0.0, -0.0, 1.0, -3.5, 7.0, 1e-3, -1e-5, 0.1] * 2, [0.0] * 8 + [-1e-9] * 8]).to(dtype)
    q = quantize(x, quant)
    kept = torch.float32 if dtype == torch.float32 else torch.float16
    assert q.scale.tolist() == (x.float().reshape(2, 2, 8).abs().amax(-1) / FLOATS[kind][2]).to(kept).tolist()
    assert q.zero is None
    scale = q.scale[0, :1].float()
    assert torch.equal(q.codes[0], (x[0].float() / scale).clamp(-FLOATS[kind][2], FLOATS[kind][2]).to(EIGHT_BITS[kind]).view(torch.uint8))
    assert q.codes[1, :8].tolist() == [0] * 8, "where the scale is 0, codes are"
    error = (dequantize(q, quant)[0] - x[0].double()).abs()
    assert bool((error <= x[0].double().abs() / (16 if kind == "e4m3" else 8) * 1.01 + 2.0**-10 * scale.double()).all())


def test_codes_of_floats_of_4_bits_are_those_of_the_standard() -> None:
    """All codes and ties, with scales of one byte: those of torch's e4m3 for nvfp4, powers of two for mxfp4."""
    x = torch.tensor([0, 0.25, 0.26, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6])
    codes = [0, 0, 1, 1, 2, 2, 2, 3, 4, 4, 4, 5, 6, 6, 6, 7]
    q = quantize(torch.stack([2 * x, -2 * x, x * 0]), QuantSpec(type="nvfp4"))
    assert q.codes.tolist() == [codes, [code + 8 for code in codes], [0] * 16]
    assert q.scale.flatten().tolist() == [0x40, 0x40, 0], "2 is 8 * 2^-2 in e4m3"
    tops = torch.randn(500, 1, generator=torch.Generator().manual_seed(1)) * 10
    q = quantize(tops.repeat(1, 16), QuantSpec(type="nvfp4"))
    assert torch.equal(q.scale, (tops.abs() / 6).to(torch.float8_e4m3fn).view(torch.uint8))
    small, quant, second = tops[::8].repeat(1, 16) / 7000, QuantSpec(type="nvfp4", scale="head"), torch.full((1, 16), 0.003)
    q = quantize(small, quant, scale=second)
    assert torch.equal(q.scale, (small[:, :1].abs() / 0.003 / 6).to(torch.float8_e4m3fn).view(torch.uint8)), "in units of the second scale"
    seen = q.scale[:, 0] >= 8  # scales of four bits
    assert bool((dequantize(q, quant)[seen] / small[seen] - 1).abs().max() <= 1 / 16 + 1e-3), "what the second scale makes large enough"
    assert quantize(small, QuantSpec(type="nvfp4")).scale[seen].max() < 8, "would be lost without it"
    tops = torch.tensor([7.9, 8.0, 4.0, 0.51, 1e-30, 0.0, 65504.0])
    q = quantize(tops[:, None].repeat(1, 32), QuantSpec(type="mxfp4"))
    assert q.scale.flatten().tolist() == [127, 128, 127, 124, 103, 103, 140], "2^(floor(log2 top) - 2), at least 2^-24"
    assert dequantize(q, QuantSpec(type="mxfp4"))[:, 0].tolist() == [6.0, 8.0, 4.0, 0.5, 0.0, 0.0, 49152.0]


# --- boosted channels ------------------------------------------------------------------------------------------------


def boosted(x: torch.Tensor, fraction: float, select: Any) -> tuple[Quantized, KeySpec]:
    key = KeySpec(bits=2, axis="channel", group=16, boost=BoostSpec(fraction=fraction, select=select))
    return quantize(x, key, key.boost), key


def test_boost_picks_channels_by_mean_magnitude_per_group() -> None:
    x = torch.randn(32, 16) * 0.1
    x[:16, 3] += 5.0
    x[:16, 9] -= 4.0
    x[16:, 0] += 5.0
    x[16:, 1] += 4.0
    q, _ = boosted(x, 0.125, "mean_abs")
    assert q.boosted is not None
    assert [row.nonzero().flatten().tolist() for row in q.boosted] == [[3, 9], [0, 1]]


def test_boost_by_range_ignores_offsets() -> None:
    x = torch.randn(16, 16) * 0.1
    x[:, 3] += 50.0
    x[0, 7], x[1, 7] = -3.0, 3.0
    q, _ = boosted(x, 0.0625, "range")
    assert q.boosted is not None
    assert q.boosted.nonzero().tolist() == [[0, 7]]


def test_boosted_channels_are_what_four_bits_give_and_the_others_what_two_give() -> None:
    x = torch.randn(3, 64, 32)
    q, key = boosted(x, 0.25, "mean_abs")
    assert q.boosted is not None
    mask = spread(q.boosted, key)
    for bits, chosen in ((4, mask), (2, ~mask)):
        plain = KeySpec(bits=bits, axis="channel", group=16)
        assert torch.equal(dequantize(q, key)[chosen], dequantize(quantize(x, plain), plain)[chosen])
    assert int(q.codes[mask].max()) > 3
    assert int(q.codes[~mask].max()) <= 3


# --- divisors ----------------------------------------------------------------------------------------------------------


class Divisors(TorchDispatchMode):
    """Records what tensors are divided by."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.div, torch.ops.aten.div_, torch.ops.aten.true_divide):
            self.found.append(args[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("zero", [True, False])
def test_the_reference_divides_by_tensors(zero: bool) -> None:
    """On a GPU, torch multiplies by the rounded reciprocal of a number, which gives other bits than a division."""
    x = matrix.uniform(128, 16, torch.float32, "cpu")
    with Divisors() as divisors:
        matrix.codes(x, matrix.scales(x))
        quantize(x, QuantSpec(bits=4, axis="channel", group=32, zero=zero))
        boosted(x, 0.25, "mean_abs")
    assert len(divisors.found) >= 6
    assert all(isinstance(one, torch.Tensor) for one in divisors.found)


def blocks(spec: KernelSpec, layout: PackedLayout, seed: int, lead: tuple[int, ...] = (2, 3)) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    shape = (*lead, layout.tokens, layout.head_dim)
    return [torch.randn(shape, generator=random).to(torch_dtype(spec.attention.dtype)) for _ in OPERANDS]


@given(layouts(), st.integers(0, 2**31))
def test_unpacking_gives_what_quantizing_gives(case: tuple[KernelSpec, PackedLayout], seed: int) -> None:
    spec, layout = case
    given_ = blocks(spec, layout, seed)
    packed = pack_blocks(layout, *given_)
    assert packed.shape == (2, 3, layout.block_bytes)
    read = unpack_blocks(layout, packed, torch_dtype(spec.attention.dtype))
    for which, x, got in zip(OPERANDS, given_, read, strict=True):
        op = layout.operand(which)
        if not op.quantized:
            assert torch.equal(got, x.double())
            continue
        held, want = read_codes(layout, which, packed), quantize(x, op, spec.key.boost if which == "key" else None)
        assert torch.equal(got, dequantize(want, op))
        assert torch.equal(held.codes, want.codes)
        assert torch.equal(held.scale, want.scale)
        assert (held.boosted is None) == (want.boosted is None)
        assert held.boosted is None or torch.equal(held.boosted, want.boosted)


@given(layouts(), st.integers(0, 2**31), st.data())
def test_codes_lie_where_the_layout_says(case: tuple[KernelSpec, PackedLayout], seed: int, data: st.DataObject) -> None:
    """The block as one big little-endian number, read bit by bit."""
    spec, layout = case
    given_ = blocks(spec, layout, seed, lead=())
    number = int.from_bytes(bytes(pack_blocks(layout, *given_).tolist()), "little")
    for which, x in zip(OPERANDS, given_, strict=True):
        op = layout.operand(which)
        token, channel = data.draw(st.integers(0, layout.tokens - 1)), data.draw(st.integers(0, layout.head_dim - 1))
        field = number >> int(code_bits(layout, which)[token, channel]) & ((1 << op.width) - 1)
        if op.quantized:
            q = quantize(x, op, spec.key.boost if which == "key" else None)
            assert field == int(q.codes[token, channel]) & ((1 << op.width) - 1)
            at = (token // op.group, channel) if op.axis == "channel" else (token, channel // op.group)
            for kind, param in enumerate([q.scale, q.zero][: op.params]):
                assert param is not None
                place = int(param_offsets(layout, which)[(kind, *at)]) * 8
                stored = param[at].reshape(1).view(torch.uint8).tolist()
                assert number >> place & ((1 << 8 * layout.bytes_of_param(op)) - 1) == int.from_bytes(bytes(stored), "little")
        else:
            assert field == int.from_bytes(bytes(x[token, channel].reshape(1).view(torch.uint8).tolist()), "little")


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (torch.zeros(16, 64, dtype=torch.float16), r"expected blocks of \[32, 64\], got \(16, 64\)"),
        (torch.zeros(32, 64), "16-bit numbers, got torch.float32"),
        (torch.full((32, 64), torch.inf, dtype=torch.float16), "not finite"),
    ],
)
def test_other_blocks_are_refused(x: torch.Tensor, reason: str) -> None:
    layout = packed_layout(load_spec(base()), 32, "simd")
    with pytest.raises(ValueError, match=reason):
        pack_blocks(layout, x, x)
