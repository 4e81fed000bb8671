"""What the CUDA packer and unpacker do, by emulation on the CPU: places, codes, params, residuals, lengths."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import get_args

import pytest
import torch

from kvgen.format.layout import PackedLayout, Which, packed_layout
from kvgen.format.places import boost_index_offsets, code_bits, param_offsets
from kvgen.format.residual import ResidualRows
from kvgen.spec import KernelSpec, load_spec
from kvgen.verify.packing import pack_blocks, to_blocks, unpack_blocks
from kvgen.verify.quantize import torch_dtype
from tests.support.packed import hard_values, meaningful_bytes, sequence_blocks
from tests.unit.lower_cuda.emulate import Cache, Emulated

HEADS = 2
FORMATS: dict[str, tuple[str, int, int, dict[str, object], dict[str, object]]] = {
    "k4v4": ("float16", 128, 128, {"bits": 4, "group": 128}, {"bits": 4, "group": 128}),
    "k2v2-g32-bf16": ("bfloat16", 64, 64, {"bits": 2, "group": 32}, {"bits": 2, "group": 32}),
    "k2v2": ("float16", 128, 128, {"bits": 2, "group": 64}, {"bits": 2, "group": 128}),
    "k2t-v2-g32": ("float16", 64, 32, {"bits": 2, "axis": "token", "group": 64}, {"bits": 2, "group": 32}),
    "k8v2-sym-d96": ("float16", 96, 32, {"bits": 8, "group": 32, "zero": False}, {"bits": 2, "group": 96}),
    "k4t-v8": ("float16", 64, 16, {"bits": 4, "axis": "token", "group": 32}, {"bits": 8, "group": 64, "zero": False}),
    "k2t-v4-bf16": ("bfloat16", 256, 32, {"bits": 2, "axis": "token", "group": 256, "zero": False}, {"bits": 4, "group": 64}),
    "k16-v2": ("bfloat16", 128, 32, {"bits": 16}, {"bits": 2, "group": 128}),
    "k2-boost-mean": ("float16", 128, 128, {"bits": 2, "group": 128, "boost": {"fraction": 0.125}}, {"bits": 2, "group": 128}),
    "k2-boost-range-d96": (
        "float16", 96, 64, {"bits": 2, "group": 32, "boost": {"fraction": 0.5, "select": "range"}}, {"bits": 4, "group": 32},
    ),
    "k2-boost-static-bf16": (
        "bfloat16", 64, 64, {"bits": 2, "group": 64, "boost": {"fraction": 0.5, "select": "static"}}, {"bits": 2, "group": 64},
    ),
    "k2-boost-mean-bf16": ("bfloat16", 64, 128, {"bits": 2, "group": 32, "boost": {"fraction": 0.25}}, {"bits": 8, "group": 64}),
    "k8v8-channel-sym": ("float16", 128, 128, {"bits": 8, "zero": False}, {"bits": 8, "axis": "channel", "zero": False}),
    "k2v2-channel-g16": ("float16", 64, 64, {"bits": 2, "group": 16}, {"bits": 2, "axis": "channel", "group": 16}),
    "k2-g16-v4-channel-d96-bf16": (
        "bfloat16",
        96,
        64,
        {"bits": 2, "group": 16, "zero": False},
        {"bits": 4, "axis": "channel", "group": 64},
    ),
    "k4t-v2-channel-g512": ("float16", 32, 512, {"bits": 4, "axis": "token", "group": 32}, {"bits": 2, "axis": "channel", "group": 512}),
    "k8-v16": ("float16", 32, 64, {"bits": 8, "group": 64}, {"bits": 16}),
    "k4v4-d80": ("float16", 80, 64, {"bits": 4, "group": 32}, {"bits": 4, "group": 80}),
    "k2-g16-v8-channel-d112": ("float16", 112, 32, {"bits": 2, "group": 16}, {"bits": 8, "axis": "channel", "group": 32, "zero": False}),
    "k8t-v4-g16-d80-bf16": ("bfloat16", 80, 16, {"bits": 8, "axis": "token", "group": 16}, {"bits": 4, "group": 16}),
    "k2t-v16-d48": ("float16", 48, 32, {"bits": 2, "axis": "token", "group": 48}, {"bits": 16}),
    "k16-v4-g48-d144": ("float16", 144, 32, {"bits": 16}, {"bits": 4, "group": 48, "zero": False}),
    "k4t-g16-v8-g48-d96": ("float16", 96, 32, {"bits": 4, "axis": "token", "group": 16}, {"bits": 8, "group": 48}),
    "k2-g48-v4-channel-g96": ("float16", 64, 96, {"bits": 2, "group": 48}, {"bits": 4, "axis": "channel", "group": 96, "zero": False}),
    "k2-g80-v2-channel-g48-d32-bf16": ("bfloat16", 32, 480, {"bits": 2, "group": 80}, {"bits": 2, "axis": "channel", "group": 48}),
    "k8-g112-v8-channel-g16-d48": (
        "float16", 48, 224, {"bits": 8, "group": 112, "zero": False}, {"bits": 8, "axis": "channel", "group": 16},
    ),
    "k4-g496-d32": ("float16", 32, 992, {"bits": 4, "group": 496}, {"bits": 4, "group": 16}),
    "k2-boost-mean-g96": ("float16", 64, 192, {"bits": 2, "group": 96, "boost": {"fraction": 0.25}}, {"bits": 2, "group": 64}),
    "k2v2-d80": ("float16", 80, 64, {"bits": 2, "group": 32}, {"bits": 2, "group": 80}),
    "k2t-v2-d112-sym-bf16": ("bfloat16", 112, 32, {"bits": 2, "axis": "token", "group": 112}, {"bits": 2, "group": 112, "zero": False}),
    "k4t-v2-d16": ("float16", 16, 16, {"bits": 4, "axis": "token", "group": 16}, {"bits": 2, "group": 16}),
    "k4-v2-g16-d64": ("float16", 64, 64, {"bits": 4, "group": 64}, {"bits": 2, "group": 16}),
    "k8t-v2-g16-d48-sym": ("float16", 48, 16, {"bits": 8, "axis": "token", "group": 16}, {"bits": 2, "group": 16, "zero": False}),
    "k16-v2-g48-d144-bf16": ("bfloat16", 144, 32, {"bits": 16}, {"bits": 2, "group": 48}),
    "k2-v2-channel-d80": ("float16", 80, 64, {"bits": 2, "group": 64}, {"bits": 2, "axis": "channel", "group": 32}),
    "k2-boost-mean-v2-d80": ("float16", 80, 64, {"bits": 2, "group": 32, "boost": {"fraction": 0.2}}, {"bits": 2, "group": 80}),
    "k2-boost-range-v2-channel-d112-bf16": (
        "bfloat16", 112, 64, {"bits": 2, "group": 64, "boost": {"fraction": 6 / 7, "select": "range"}},
        {"bits": 2, "axis": "channel", "group": 64, "zero": False},
    ),
    "k2-boost-static-d48": ("float16", 48, 32, {"bits": 2, "group": 32, "boost": {"fraction": 2 / 3, "select": "static"}}, {"bits": 16}),
}  # fmt: skip


def spec_of(name: str) -> KernelSpec:
    dtype, dim, _, key, value = FORMATS[name]
    return load_spec(
        {
            "name": "t",
            "attention": {"q_heads": HEADS, "kv_heads": HEADS, "head_dim": dim, "dtype": dtype},
            "key": {"axis": "channel", **key} if key["bits"] != 16 else key,
            "value": {"axis": "token", **value} if value["bits"] != 16 else value,
        }
    )


def layout_of(name: str) -> PackedLayout:
    return packed_layout(spec_of(name), FORMATS[name][2], "mma")


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> object:
    folder: Path = tmp_path_factory.mktemp("emulated")
    return cache(lambda name: Emulated(layout_of(name), torch_dtype(FORMATS[name][0]), folder / name))


def inputs(name: str, batch: int, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hard K and V [batch, tokens, HEADS, head_dim]."""
    dtype, dim, *_ = FORMATS[name]
    shape = (batch, tokens, HEADS, dim)
    return hard_values(shape, torch_dtype(dtype), seed), hard_values(shape, torch_dtype(dtype), seed + 1)


def empty_cache(name: str, batch: int, max_len: int, page: int | None = None) -> Cache:
    layout, dtype = layout_of(name), torch_dtype(FORMATS[name][0])
    blocks, table = -(-max_len // layout.tokens), None
    packed = torch.full((batch, HEADS, blocks, layout.block_bytes), 0xA5, dtype=torch.uint8)
    if page is not None:
        pages = -(-max_len // page)
        table = torch.randperm(batch * pages + 2, generator=torch.Generator().manual_seed(1))[: batch * pages].int().reshape(batch, pages)
        packed = torch.full((batch * pages + 2, HEADS, page // layout.tokens, layout.block_bytes), 0xA5, dtype=torch.uint8)
    residual = torch.full((batch, HEADS, layout.tokens, layout.head_dim), torch.nan, dtype=dtype)
    return Cache(packed, residual, residual.clone(), torch.zeros(batch, dtype=torch.int32), table)


@pytest.mark.parametrize("name", FORMATS)
def test_places_are_those_of_the_layout(name: str, emulated) -> None:  # type: ignore[no-untyped-def]
    layout = layout_of(name)
    bits, params = emulated(name).places(layout)
    for index, which in enumerate(get_args(Which)):
        assert torch.equal(bits[..., index], code_bits(layout, which))
        op = layout.operand(which)
        if op.quantized:
            spread = param_offsets(layout, which).repeat_interleave(op.group, dim=-2 if op.axis == "channel" else -1)
            for kind in range(op.params):
                assert torch.equal(params[..., kind, index], spread[kind])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_packing_in_pieces_gives_the_bytes_of_the_reference(name: str, paged: bool, emulated) -> None:  # type: ignore[no-untyped-def]
    layout, module = layout_of(name), emulated(name)
    n, batch = layout.tokens, 3
    pieces = [[n // 2, 0, 2 * n], [n // 2, 3, 5], [0, 0, 0], [n + 1, n - 2, n - 5], [2, 1, 0]]
    held = empty_cache(name, batch, 4 * n, page=2 * n if paged else None)
    k, v = inputs(name, batch, 4 * n, seed=0)
    done = [0] * batch
    for at, piece in enumerate(pieces):
        extent = max(piece) + 1
        fresh = [torch.full((batch, HEADS, extent, layout.head_dim), torch.nan, dtype=k.dtype).transpose(1, 2) for _ in range(2)]
        for b, count in enumerate(piece):
            for x, new in zip((k, v), fresh, strict=True):
                new[b, :count] = x[b, done[b] : done[b] + count]
            done[b] += count
        module.pack(held, *fresh, torch.tensor(piece, dtype=torch.int32), backwards=at % 2 == 0)
        assert held.lengths.tolist() == done
    kept = meaningful_bytes(layout)
    for b, length in enumerate(done):
        full = length // n
        expected = pack_blocks(layout, *(to_blocks(x[b : b + 1, : full * n], n)[0] for x in (k, v)))
        found = sequence_blocks(held.packed, held.block_table, b)
        assert torch.equal(found[:, :full, kept], expected[..., kept])
        assert (found[:, full:] == 0xA5).all(), "blocks that are not full stay as they were"
        for residual, x in ((held.k_residual, k), (held.v_residual, v)):
            assert torch.equal(residual[b, :, : length % n], x[b, full * n : length].transpose(0, 1))


@pytest.mark.parametrize("rows", [None, ResidualRows(128, 4, 8, 0, 1)], ids=["plain", "unquantized"])
def test_a_count_on_the_device_that_is_none_writes_nothing(rows: ResidualRows | None, tmp_path: Path) -> None:
    """A negative one, and one beyond the tokens of k."""
    layout = layout_of("k4v4")
    assert layout.tokens == 128
    module, held = Emulated(layout, torch.float16, tmp_path, rows), empty_cache("k4v4", 1, 512)
    shape = 1, HEADS, layout.tokens if rows is None else rows.rows, layout.head_dim
    held.k_residual, held.v_residual = torch.zeros(shape).half(), torch.zeros(shape).half()
    k, v = inputs("k4v4", 1, 200, seed=0)
    assert not module.pack(held, k[:, :100].contiguous(), v[:, :100].contiguous(), torch.tensor([100], dtype=torch.int32))
    before = [held.packed.clone(), held.k_residual.clone(), held.v_residual.clone()]
    for count in (-60, 20):
        assert module.pack(held, k[:, :8].contiguous(), v[:, :8].contiguous(), torch.tensor([count], dtype=torch.int32))
        assert all(map(torch.equal, before, [held.packed, held.k_residual, held.v_residual]))


def test_blocks_of_a_sliding_window_take_their_places_in_turn(tmp_path: Path) -> None:
    """Calls of more blocks than there are places, and of fewer; `unpack` gives the blocks that are there and the residual, nothing else."""
    layout, places, batch = layout_of("k4v4"), 3, 3
    n = layout.tokens
    module = Emulated(layout, torch.float16, tmp_path, places=places)
    held = empty_cache("k4v4", batch, places * n)
    pieces = [[5 * n + 3, n, 0], [n - 3, 2 * n + 1, 2], [n // 2, 4 * n, 1]]
    k, v = inputs("k4v4", batch, 8 * n, seed=0)
    done = [0] * batch
    for at, piece in enumerate(pieces):
        fresh = [torch.zeros(batch, max(piece), HEADS, layout.head_dim, dtype=k.dtype) for _ in range(2)]
        for b, count in enumerate(piece):
            for x, new in zip((k, v), fresh, strict=True):
                new[b, :count] = x[b, done[b] : done[b] + count]
            done[b] += count
        module.pack(held, *fresh, torch.tensor(piece, dtype=torch.int32), backwards=at % 2 == 0)
    kept, out = meaningful_bytes(layout), [torch.full((batch, 8 * n, HEADS, layout.head_dim), 7.0, dtype=k.dtype) for _ in range(2)]
    module.unpack(held, *out)
    for b, length in enumerate(done):
        full = length // n
        first = max(0, full - places)
        expected = pack_blocks(layout, *(to_blocks(x[b : b + 1, : full * n], n)[0] for x in (k, v)))
        for block in range(first, full):
            assert torch.equal(held.packed[b, :, block % places][..., kept], expected[:, block][..., kept])
        assert all((x[b, : first * n] == 7.0).all() and (x[b, length:] == 7.0).all() for x in out)
        assert not any((x[b, first * n : length] == 7.0).all() for x in out if length > first * n)
        for x, y in zip((k, v), out, strict=True):
            assert torch.equal(y[b, full * n : length], x[b, full * n : length])


@pytest.mark.parametrize(
    ("low", "high"),
    [(-3.0, 3.0), (-1000.0, 5000.0), (-65504.0, 65504.0), (2.0**-24, 10.0), (0.0, 2.0**-24), (-1.0, 2.0), (100.0, 100.0625)],
)
def test_two_bit_codes_beside_thresholds_are_those_of_the_division(low: float, high: float, emulated) -> None:  # type: ignore[no-untyped-def]
    layout, module = layout_of("k2v2"), emulated("k2v2")
    random = torch.Generator().manual_seed(0)
    scale = torch.tensor((high - low) / 3).half().double()
    x = []
    for _ in range(2):
        near = low + scale * (torch.randint(0, 3, (1, 128, HEADS, 128), generator=random) + 0.5)
        tiny = torch.randint(-40, 40, near.shape, generator=random) * 2.0**-24
        steps = torch.randint(-2, 3, near.shape, generator=random).to(torch.int16)
        near = torch.where(near.abs() < 1e-3, near + tiny, near).half()
        near = torch.where(near.abs() > 1e-3, (near.view(torch.int16) + steps).view(torch.float16), near).clamp(low, high)
        near[:, ::64], near[..., 0], near[:, 1::64], near[..., 1] = low, low, high, high
        near[near == 0] = 0.0
        x.append(near)
    held = empty_cache("k2v2", 1, 128)
    module.pack(held, *x, torch.tensor([128], dtype=torch.int32))
    expected = pack_blocks(layout, *(to_blocks(t, 128)[0] for t in x))
    kept = meaningful_bytes(layout)
    assert torch.equal(held.packed[0][..., kept], expected[..., kept])


@pytest.mark.parametrize("name", ["k2-boost-mean", "k2-boost-range-d96", "k2-boost-mean-v2-d80"])
def test_of_equal_channels_the_lower_ones_are_boosted(name: str, emulated) -> None:  # type: ignore[no-untyped-def]
    """Channels differ in sign and order of tokens only, but for a few that are larger or smaller."""
    layout, module = layout_of(name), emulated(name)
    n, dim = layout.tokens, layout.head_dim
    random = torch.Generator().manual_seed(0)
    group = torch.randn(layout.key.group, generator=random).half()
    k = torch.empty(1, n, HEADS, dim, dtype=torch.float16)
    for channel in range(dim):
        order = torch.randperm(len(group), generator=random)
        k[0, :, :, channel] = (group[order] * (-1) ** channel).repeat(n // len(group)).unsqueeze(-1)
    k[..., 7] *= 0.5
    k[..., dim - 1] *= 2
    held = empty_cache(name, 1, n)
    module.pack(held, k, k, torch.tensor([n], dtype=torch.int32))
    expected = pack_blocks(layout, to_blocks(k, n)[0], to_blocks(k, n)[0])
    index = boost_index_offsets(layout)
    count = layout.key.boosted
    assert expected[0, 0, index[0]].tolist() == [*(c for c in range(count) if c != 7), dim - 1]
    kept = meaningful_bytes(layout)
    assert torch.equal(held.packed[0][..., kept], expected[..., kept])


@pytest.mark.parametrize("name", FORMATS)
def test_unpacking_rounds_the_reference_once(name: str, emulated) -> None:  # type: ignore[no-untyped-def]
    layout, module = layout_of(name), emulated(name)
    n = layout.tokens
    lengths = torch.tensor([n + 3, 0, 2 * n], dtype=torch.int32)
    held = empty_cache(name, 3, 2 * n, page=n)
    k, v = inputs(name, 3, 2 * n, seed=2)
    module.pack(held, k, v, lengths)
    out = [torch.full((3, 2 * n + 2, HEADS, layout.head_dim), 7.0, dtype=k.dtype) for _ in range(2)]
    module.unpack(held, *out)
    for b, length in enumerate(lengths.tolist()):
        full = length // n
        blocks = sequence_blocks(held.packed, held.block_table, b)[:, :full]
        for x, y, exact in zip((k, v), out, unpack_blocks(layout, blocks, k.dtype), strict=True):
            assert torch.equal(y[b, : full * n], exact.flatten(1, 2).transpose(0, 1).float().to(k.dtype))
            assert torch.equal(y[b, full * n : length], x[b, full * n : length])
            assert (y[b, length:] == 7.0).all()
