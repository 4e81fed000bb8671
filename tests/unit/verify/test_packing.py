"""Bytes of blocks: what goes in comes out, at the places that the layout declares."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen.format.layout import PackedLayout, packed_layout
from kvgen.format.places import code_bits, param_offsets
from kvgen.spec import KernelSpec, load_spec
from kvgen.verify.packing import OPERANDS, from_blocks, pack_blocks, read_codes, to_blocks, unpack_blocks
from kvgen.verify.quantize import dequantize, quantize, torch_dtype
from tests.support.specs import base, layouts


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
                assert number >> place & ((1 << 8 * layout.param_bytes) - 1) == int.from_bytes(bytes(stored), "little")
        else:
            assert field == int.from_bytes(bytes(x[token, channel].reshape(1).view(torch.uint8).tolist()), "little")


@settings(max_examples=40)
@given(layouts(), st.integers(0, 2**31))
def test_padding_is_zero_and_packing_repeats(case: tuple[KernelSpec, PackedLayout], seed: int) -> None:
    spec, layout = case
    given_ = blocks(spec, layout, seed, lead=(1,))
    packed = pack_blocks(layout, *given_)
    assert not packed[..., layout.end :].any()
    assert torch.equal(packed, pack_blocks(layout, *given_))


def test_blocks_of_a_sequence_and_back() -> None:
    x = torch.arange(2 * 70 * 3 * 4).reshape(2, 70, 3, 4)
    cut = to_blocks(x, 32)
    assert cut.shape == (2, 3, 2, 32, 4)
    assert torch.equal(cut[1, 2, 1, 5], x[1, 37, 2])
    assert torch.equal(from_blocks(cut), x[:, :64])


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
