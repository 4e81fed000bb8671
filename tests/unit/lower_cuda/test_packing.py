"""What the CUDA packer and unpacker do, by emulation on the CPU: places, codes, params, residuals, lengths."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_words import spec_of as spec_of_words
from benchmarks.gpu_words import workload_of
from kvgen.format.dtypes import torch_dtype
from kvgen.format.layout import PackedLayout, packed_layout
from kvgen.format.residual import ResidualRows, residual_rows
from kvgen.format.rotation import rotate
from kvgen.format.scales import trial_scales
from kvgen.spec import KernelSpec
from kvgen.verify.data import normal
from kvgen.verify.packing import pack_blocks, to_blocks, token_bits, unpack_blocks
from tests.support.packed import hard_values, meaningful_bytes, sequence_blocks
from tests.support.reference import ReferenceCache
from tests.unit.lower_cuda.emulate import Cache, Emulated

HEADS = 2
FORMATS = {
    "k4v4": 128,
    "k2v2:kg64": 128,
    "k2v4:token:bf16:sym:d256:vg64": 32,
    "k16v2:bf16": 32,
    "k2v2:boost1/8": 128,
    "k2v4:d96:kg32:vg32:boost1/2range": 64,
    "k2v2:bf16:d64:kg64:boost1/2static": 64,
    "k8v8:vchannel:sym": 128,
    "k4v2:token:vchannel:d32:vg512": 512,
    "k2v8:vchannel:d112:kg16:vg32": 32,
    "k8v4:token:bf16:d80:kg16:vg16": 16,
    "k2v2:vchannel:bf16:d32:kg80:vg48": 480,
    "k4v2:token:d16": 16,
    "k2v2:d80:kg32:boost1/5": 64,
    "k2v2:vchannel:bf16:d112:kg64:vg64:boost6/7range": 64,
    "k2v16:d48:kg32:boost2/3static": 32,
    "ke4m3vnvfp4:token": 32,
    "kmxfp4ve5m2:vchannel:bf16:d96:vg48": 96,
    "k4v8:kscale-channel:vscale-head": 64,
    "k8ve4m3:kscale-head:vscale-channel:bf16:d80": 32,
    "knvfp4vnvfp4:kscale-head:vscale-tensor:bf16:d48": 16,
    "k4v4:token:bf16:krot128:vrot16u": 32,
    "k2v2:d80:kg32:boost1/5:vchannel:vg32:krot16u:vrot16": 64,
}
"""Formats, and the tokens of their blocks."""


def spec_of(words: str) -> KernelSpec:
    return spec_of_words(f"{words}:h{HEADS}/{HEADS}", "sm90", [workload_of("2x256")])


def dtype_of(name: str) -> torch.dtype:
    return torch_dtype(spec_of(name).attention.dtype)


def layout_of(name: str) -> PackedLayout:
    return packed_layout(spec_of(name), FORMATS[name], "mma")


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> object:
    folder: Path = tmp_path_factory.mktemp("emulated")
    return cache(lambda name: Emulated(layout_of(name), dtype_of(name), folder / str(list(FORMATS).index(name))))


def inputs(name: str, batch: int, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hard K and V [batch, tokens, HEADS, head_dim]."""
    shape = (batch, tokens, HEADS, layout_of(name).head_dim)
    return hard_values(shape, dtype_of(name), seed), hard_values(shape, dtype_of(name), seed + 1)


def empty_cache(name: str, batch: int, max_len: int, page: int | None = None) -> Cache:
    layout, dtype = layout_of(name), dtype_of(name)
    blocks, table = -(-max_len // layout.tokens), None
    packed = torch.full((batch, HEADS, blocks, layout.block_bytes), 0xA5, dtype=torch.uint8)
    if page is not None:
        pages = -(-max_len // page)
        table = torch.randperm(batch * pages + 2, generator=torch.Generator().manual_seed(1))[: batch * pages].int().reshape(batch, pages)
        packed = torch.full((batch * pages + 2, HEADS, page // layout.tokens, layout.block_bytes), 0xA5, dtype=torch.uint8)
    residual = torch.full((batch, HEADS, layout.tokens, layout.head_dim), torch.nan, dtype=dtype)
    return Cache(packed, residual, residual.clone(), torch.zeros(batch, dtype=torch.int32), table, scales=trial_scales(spec_of(name)))


def of_heads(held: Cache) -> torch.Tensor | None:
    """Static scales for blocks [HEADS, blocks, tokens, head_dim]."""
    return None if held.scales is None else held.scales[:, :, None, None]


def append(
    module: Emulated, held: Cache, inputs: tuple[torch.Tensor, torch.Tensor], done: list[int], piece: list[int], backwards: bool
) -> None:
    """The next `piece[b]` tokens of each sequence, as strided views with NaN behind, or (`backwards`) in one run; counts them in `done`."""
    shape, fresh = (len(piece), HEADS, max(piece) + 1, inputs[0].shape[-1]), []
    for x in inputs:
        new = torch.full(shape, torch.nan, dtype=x.dtype).transpose(1, 2)
        for b, count in enumerate(piece):
            new[b, :count] = x[b, done[b] : done[b] + count]
        fresh.append(new)
    pack(module, held, fresh, piece, backwards)
    done[:] = map(sum, zip(done, piece, strict=True))


def pack(module: Emulated, held: Cache, new: list[torch.Tensor], piece: list[int], backwards: bool) -> None:
    """Append the first `piece[b]` tokens of each sequence; where `backwards`, from a run of all sequences' tokens, some more of each."""
    counts = torch.tensor(piece, dtype=torch.int32)
    if not backwards:
        assert not module.pack(held, *new, counts)
        return
    given = [count + b % 2 for b, count in enumerate(piece)]
    starts = torch.tensor([3, *given]).cumsum(0).int()
    pad = torch.full((3, *new[0].shape[2:]), torch.nan, dtype=new[0].dtype)
    k, v = (torch.cat([pad, *(x[b, :count] for b, count in enumerate(given)), pad]) for x in new)
    assert not module.pack(held, k, v, counts, backwards=True, starts=starts)


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
        append(module, held, (k, v), done, piece, backwards=at % 2 == 0)
        assert held.lengths.tolist() == done
    kept = meaningful_bytes(layout)
    rotated = [rotate(x, op.rotation) for x, op in zip((k, v), layout.operands, strict=True)]
    for b, length in enumerate(done):
        full = length // n
        expected = pack_blocks(layout, *(to_blocks(x[b : b + 1, : full * n], n)[0] for x in rotated), of_heads(held))
        found = sequence_blocks(held.packed, held.block_table, b)
        assert torch.equal(found[:, :full, kept], expected[..., kept])
        assert (found[:, full:] == 0xA5).all(), "blocks that are not full stay as they were"
        for residual, x in ((held.k_residual, rotated[0]), (held.v_residual, rotated[1])):
            assert torch.equal(residual[b, :, : length % n], x[b, full * n : length].transpose(0, 1))


@pytest.mark.parametrize("words", ["k2v2:token:d112:kg16:vg16", "k8v16:token:bf16:d64", "k4ve4m3:kscale-channel:vscale-head:d80"])
def test_tokens_are_written_as_they_arrive(words: str, tmp_path: Path) -> None:
    """In pieces, and to slots in any order: the reference's numbers in the bits of the tokens, and nothing in others."""
    spec = spec_of(f"{words}:arrival")
    n, batch = (32 if "k2" in words else 16), 3
    layout, dtype = packed_layout(spec, n, "mma"), torch_dtype(spec.attention.dtype)
    module = Emulated(layout, dtype, tmp_path, residual_rows(spec, n))
    k, v = (hard_values((batch, 4 * n, HEADS, layout.head_dim), dtype, seed) for seed in (0, 1))
    table = torch.randperm(2 * batch, generator=torch.Generator().manual_seed(1)).int().reshape(batch, 2)
    memory = torch.full((2 * batch, HEADS, 2, layout.block_bytes), 0xA5, dtype=torch.uint8)
    nothing = torch.zeros(batch, HEADS, 0, layout.head_dim, dtype=dtype)
    held = Cache(memory.clone(), nothing, nothing, torch.zeros(batch, dtype=torch.int32), table, scales=trial_scales(spec))
    done = [0] * batch
    for at, piece in enumerate([[n // 2, 0, 2 * n], [n // 2 - 1, 3, 5], [0, 0, 0], [n + 2, n - 2, n - 5], [2, 1, 0], [1, 1, 1]]):
        append(module, held, (k, v), done, piece, backwards=at % 2 == 0)
        assert held.lengths.tolist() == done
    right = pack_blocks(layout, *(to_blocks(x, n) for x in (k, v)), of_heads(held))
    mine = token_bits(layout, torch.arange(4 * n).view(4, n) < torch.tensor(done).view(batch, 1, 1)).unsqueeze(1)
    every = token_bits(layout, torch.ones(n, dtype=torch.bool))  # words may have room for more channels
    for b in range(batch):
        want = (right[b] & mine[b]) | (0xA5 & ~mine[b])
        assert torch.equal(sequence_blocks(held.packed, table, b) & every, want & every)
    order = [(b, first + i) for first in (n - 3, 0) for b in range(batch) for i in range(n - 3 if first == 0 else done[b] - first)]
    slots = [int(table[b, at // (2 * n)]) * 2 * n + at % (2 * n) for b, at in order]
    where = torch.tensor(order).T
    rows = [torch.cat([x[where[0], where[1]], torch.full_like(x[0, :1], torch.nan)]) for x in (k, v)]
    other = Cache(memory.clone(), nothing, nothing, held.lengths, table, scales=held.scales)
    module.write(other, rows[0], rows[1], torch.tensor([*slots, -1]), backwards=True)
    assert torch.equal(other.packed & every, held.packed & every)


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
        append(module, held, (k, v), done, piece, backwards=at % 2 == 0)
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
    [(-3.0, 3.0), (-65504.0, 65504.0), (2.0**-24, 10.0), (0.0, 2.0**-24), (100.0, 100.0625)],
)
def test_two_bit_codes_beside_thresholds_are_those_of_the_division(low: float, high: float, emulated) -> None:  # type: ignore[no-untyped-def]
    layout, module = layout_of("k2v2:kg64"), emulated("k2v2:kg64")
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
    held = empty_cache("k2v2:kg64", 1, 128)
    module.pack(held, *x, torch.tensor([128], dtype=torch.int32))
    expected = pack_blocks(layout, *(to_blocks(t, 128)[0] for t in x))
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
    k, v = (rotate(x, op.rotation) for x, op in zip((k, v), layout.operands, strict=True))
    out = [torch.full((3, 2 * n + 2, HEADS, layout.head_dim), 7.0, dtype=k.dtype) for _ in range(2)]
    module.unpack(held, *out)
    for b, length in enumerate(lengths.tolist()):
        full = length // n
        blocks = sequence_blocks(held.packed, held.block_table, b)[:, :full]
        for x, y, exact in zip((k, v), out, unpack_blocks(layout, blocks, k.dtype, of_heads(held)), strict=True):
            assert torch.equal(y[b, : full * n], exact.flatten(1, 2).transpose(0, 1).float().to(k.dtype))
            assert torch.equal(y[b, full * n : length], x[b, full * n : length])
            assert (y[b, length:] == 7.0).all()


@pytest.mark.parametrize(
    ("words", "block"),
    [("k2v2:h2/2:d64:kg32:vg32:sink21:local40:rollback30:q4", 64), ("k4v4:token:bf16:h2/2:d64:page64:sink32:local7:krot64", 16)],
)
def test_prefill_in_pieces_packs_and_keeps_what_the_reference_does(words: str, block: int, tmp_path: Path) -> None:
    """Blocks that come wholly or partly from rows that the call overwrites, tokens taken back in between; then all is unpacked.

    Residuals are found by their slots.
    """
    spec = spec_of_words(words, "sm90", [workload_of("2x256")])
    layout, dtype, batch = packed_layout(spec, block, "mma"), torch_dtype(spec.attention.dtype), 3
    pieces = [[19, 0, 5 * block], [1, 21, 3], [block, 2 * block + 40, 0], [7, 30, 6 * block], [2 * block, 3 * block, 41]]
    held = ReferenceCache(spec, batch, block)
    module = Emulated(layout, dtype, tmp_path, held.rows)
    longest, heads, dim = 16 * block, spec.attention.kv_heads, spec.attention.head_dim
    packed, table = torch.full((batch, heads, 16, layout.block_bytes), 255, dtype=torch.uint8), None
    if page := spec.cache.page:
        table = torch.randperm(batch * longest // page, generator=torch.Generator().manual_seed(1)).int().reshape(batch, -1)
        packed = packed.reshape(table.numel(), heads, page // block, layout.block_bytes)
    rows = [torch.full((batch + 2, heads, held.rows.rows, dim), torch.nan, dtype=dtype) for _ in range(2)]
    mine = Cache(
        packed, *(x.clone() for x in rows), torch.zeros(batch, dtype=torch.int32), table, torch.tensor([2, 4, 1], dtype=torch.int32)
    )
    kept = meaningful_bytes(layout)
    for number, piece in enumerate(pieces):
        inputs = normal(spec, batch, max(piece) + 1, seed=number)
        pack(module, mine, [inputs.k, inputs.v], piece, number % 2 == 0)
        held.prefill(inputs.k, inputs.v, torch.tensor(piece, dtype=torch.int32))
        assert torch.equal(mine.lengths, held.lengths)
        for pool, expected in zip((mine.k_residual, mine.v_residual), held.residual(), strict=True):
            found = pool[mine.residual_slots]
            used = expected.ne(0).any(-1)
            assert torch.equal(found[used], expected[used])
            assert pool[[0, 3]].isnan().all(), "residuals of other sequences stay as they were"
        for b, full in enumerate(held.blocks.tolist()):
            found = sequence_blocks(packed, table, b)
            assert torch.equal(found[:, :full, kept], held.packed(layout)[b, :, :full][..., kept])
        if spec.cache.rollback and number in (0, 2):
            held.crop(torch.minimum(held.lengths, torch.tensor([30, 2, 29] if number == 0 else [30, 5, 2])))
            mine.lengths.copy_(held.lengths)
    out = [torch.full((batch, int(held.lengths.max()) + 2, heads, dim), 7.0, dtype=dtype) for _ in range(2)]
    module.unpack(mine, *out)
    starts = torch.tensor([2, *held.lengths.tolist()]).cumsum(0).int()
    run = [torch.full((int(starts[-1]) + 1, heads, dim), 7.0, dtype=dtype) for _ in range(2)]
    module.unpack(mine, *run, starts)
    for whole, found in zip(out, run, strict=True):
        assert torch.equal(found[2:-1], torch.cat([x[:length] for x, length in zip(whole, held.lengths.tolist(), strict=True)]))
        assert (found[[0, 1, -1]] == 7.0).all()
    kept_values = (rotate(x, op.rotation) for x, op in zip(held.keys_values(), layout.operands, strict=True))
    for found, exact in zip(out, kept_values, strict=True):
        for b, length in enumerate(held.lengths.tolist()):
            assert torch.equal(found[b, :length], exact[b, :length].float().to(dtype))
            assert (found[b, length:] == 7.0).all()
