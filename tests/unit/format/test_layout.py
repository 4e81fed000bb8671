"""The packed layout is a bijection: no two numbers share a bit, and a block has room for nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given

from kvgen.format.layout import BLOCK_ALIGN, PackedLayout, packed_layout, vector_words
from kvgen.format.places import boost_bits, boost_index_offsets, code_bits, param_offsets
from kvgen.spec import KernelSpec, load_spec
from kvgen.verify.packing import OPERANDS
from tests.support.specs import base, layouts


def occupied(layout: PackedLayout) -> torch.Tensor:
    """How many numbers claim each bit of a block."""
    claims = torch.zeros(layout.block_bytes * 8, dtype=torch.int32)
    for which in OPERANDS:
        width = layout.operand(which).width
        bits = code_bits(layout, which).flatten().unsqueeze(1) + torch.arange(width)
        claims.index_add_(0, bits.flatten(), torch.ones(bits.numel(), dtype=torch.int32))
        params = param_offsets(layout, which).flatten().unsqueeze(1) * 8 + torch.arange(layout.bytes_of_param(layout.operand(which)) * 8)
        claims.index_add_(0, params.flatten(), torch.ones(params.numel(), dtype=torch.int32))
    if layout.key.boost:
        upper = boost_bits(layout).unsqueeze(-1) + torch.arange(2)
        index = boost_index_offsets(layout).unsqueeze(-1) * 8 + torch.arange(8)
        for bits in (upper.flatten(), index.flatten()):
            claims.index_add_(0, bits, torch.ones(bits.numel(), dtype=torch.int32))
    return claims


@given(layouts())
def test_every_number_has_bits_of_its_own(case: tuple[KernelSpec, PackedLayout]) -> None:
    _, layout = case
    claims = occupied(layout)
    assert int(claims.max()) == 1
    assert not claims[layout.end * 8 :].any()
    used = sum(
        layout.tokens * layout.head_dim * layout.operand(w).width
        + param_offsets(layout, w).numel() * layout.bytes_of_param(layout.operand(w)) * 8
        for w in OPERANDS
    )
    if layout.key.boost:
        used += boost_bits(layout).numel() * 2 + boost_index_offsets(layout).numel() * 8
    assert int(claims.sum()) == used
    assert layout.block_bytes % BLOCK_ALIGN == 0
    for which in OPERANDS:  # numbers lie at multiples of their size
        assert not (code_bits(layout, which) % layout.operand(which).width).any()
        assert not (param_offsets(layout, which) % layout.bytes_of_param(layout.operand(which))).any()


@pytest.mark.parametrize(("dim", "group"), [(80, 80), (112, 16), (144, 48), (240, 80)])
@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_runs_of_sixteen_channels_leave_no_gap(dim: int, group: int, bits: int) -> None:
    """Head sizes that 32 does not divide, in fragment order: every bit of the codes has one owner, and a lane's channels are neighbours.

    The words of a 2-bit V hold 32 channels, and the last of them 16.
    """
    heads = {"q_heads": 1, "kv_heads": 1, "head_dim": dim}
    quant = {"bits": bits, "axis": "token", "group": group}
    layout = packed_layout(load_spec(base(attention=heads, key=quant, value=quant)), 32, "mma")
    claims = occupied(layout)
    for which in OPERANDS:
        codes = claims[layout.codes_offset(which) * 8 :][: layout.codes_bytes(which) * 8]
        empty = 16 * layout.subtile * bits if bits == 2 and which == "value" else 0
        assert (int(codes.max()), int((codes == 0).sum())) == (1, empty)
    lanes = code_bits(layout, "key")[0] // 32 // vector_words(layout.codes_bytes("key") // 128) % 32
    assert (lanes[-16:].reshape(4, 4) == torch.arange(4).unsqueeze(1)).all()


def test_the_id_tells_layouts_apart_and_nothing_else() -> None:
    spec = load_spec(base())
    ids = {packed_layout(spec, tokens, order).id for tokens in (32, 64, 128) for order in ("mma", "simd")}  # type: ignore[arg-type]
    assert len(ids) == 6
    other = load_spec(base(name="other", workloads=[{"batch": 3, "kv_len": 9}]))
    assert packed_layout(other, 64, "mma").id == packed_layout(spec, 64, "mma").id
    unquantized = [load_spec(base(key={"bits": 16, "axis": axis})) for axis in ("channel", "token")]
    assert len({packed_layout(s, 64, "mma").id for s in unquantized}) == 1


@pytest.mark.parametrize(
    ("sections", "tokens", "order", "reason"),
    [
        ({}, 48, "simd", "16 tokens or a multiple of 32"),
        ({}, 16, "simd", r"must be a multiple of key.group \(32\)"),
        ({"value": {"bits": 4, "axis": "channel", "group": 64}}, 32, "simd", r"must be a multiple of value.group \(64\)"),
        (
            {"attention": {"q_heads": 1, "kv_heads": 1, "head_dim": 64, "dtype": "float32"}, "key": {"bits": 16}},
            32,
            "mma",
            "16-bit and narrower",
        ),
        ({"key": {"bits": 2, "axis": "token", "group": 64}}, 16, "mma", "blocks of 32 tokens or more"),
        (
            {
                "attention": {"q_heads": 1, "kv_heads": 1, "head_dim": 512},
                "key": {"bits": 2, "axis": "channel", "group": 32, "boost": {"fraction": 0.25}},
            },
            32,
            "simd",
            "numbers 256 channels, head_dim is 512",
        ),
    ],
)
def test_what_cannot_be_laid_out_is_refused(sections: dict[str, Any], tokens: int, order: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        packed_layout(load_spec(base(**sections)), tokens, order)
