"""The packed weight of the CPU back end: codes in the order of its vectors, scales and zeros in the stream of their codes.

A tile has 16 rows, a block 4 tiles, the last one maybe fewer. Codes of a tile are words of 32 bits, those of its 16 rows side by side; a
word has 32 / bits neighbours along k, the first in the lowest bits. A run is the codes of 64 channels of a tile. A block is a stream of
units of `group` channels (64 where a whole row has one scale): run by run the codes of its tiles, then their scales, then their zeros.
Scales and zeros of whole rows lie behind all blocks. docs/cpu.md has a picture.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

TILE, BLOCK_TILES, RUN = 16, 4, 64


def pack(codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, group: int | None, paired: bool) -> Tensor:
    """The packed weight, uint8 [bytes], from codes uint8 [n, k], scales [n, k / group] and zeros uint8 [n, k / group] or None.

    `group` is None where a whole row has one scale; `paired` alternates tiles of the first and of the second half of the rows.
    """
    n, k = codes.shape
    order, runs = _order(n, paired, codes.device), (group or RUN) // RUN
    stored = codes[order]
    if bits == 4:
        stored = stored[:, 0::2] | stored[:, 1::2] << 4
    stored = stored.view(n // TILE, TILE, k // RUN // runs, runs, -1, 4).permute(0, 2, 3, 4, 1, 5).flatten(3)  # [tile, unit, run, bytes]
    params = [p[order].contiguous().view(torch.uint8).view(n // TILE, TILE, p.shape[1], -1) for p in (scales, zeros) if p is not None]
    params = [p.transpose(1, 2).flatten(2) for p in params]  # [tile, group, bytes]
    pieces = []
    for tiles, wide in _blocks(n // TILE):
        parts = [stored[tiles].unflatten(0, (-1, wide)).permute(0, 2, 3, 1, 4).flatten(2)]  # type: ignore[no-untyped-call]
        if group is not None:
            parts += [p[tiles].unflatten(0, (-1, wide)).transpose(1, 2).flatten(2) for p in params]  # type: ignore[no-untyped-call]
        pieces.append(torch.cat(parts, 2).flatten())
    if group is None:
        pieces += [p.flatten() for p in params]
    return torch.cat(pieces)


def unpack(
    packed: Tensor, n: int, k: int, bits: int, group: int | None, zero: bool, dtype: torch.dtype, paired: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What `pack` was given, bit for bit: codes, scales in `dtype`, zeros."""
    tiles, unit = n // TILE, group or RUN
    sizes = [TILE * dtype.itemsize] + [TILE] * zero  # bytes of a tile's scales and zeros
    run_bytes = RUN * TILE * bits // 8
    codes_bytes = unit // RUN * run_bytes
    tile_bytes = k // unit * (codes_bytes + (sum(sizes) if group is not None else 0))
    streams, behind = packed[: tiles * tile_bytes], packed[tiles * tile_bytes :]
    stored: list[Tensor] = []
    params: list[list[Tensor]] = [[] for _ in sizes]
    for part, wide in _blocks(tiles):
        units = streams[part.start * tile_bytes : part.stop * tile_bytes].view(-1, k // unit, wide * tile_bytes // (k // unit))
        cuts = [wide * codes_bytes] + ([wide * size for size in sizes] if group is not None else [])
        codes_of, *params_of = units.split(cuts, 2)  # type: ignore[no-untyped-call]
        stored.append(codes_of.unflatten(2, (-1, wide, run_bytes)).permute(0, 3, 1, 2, 4).flatten(0, 1))
        for kept, p in zip(params, params_of, strict=False):
            kept.append(p.unflatten(2, (wide, -1)).transpose(1, 2).flatten(0, 1))
    if group is None:
        params = [[p.view(tiles, 1, -1)] for p in behind.split([tiles * size for size in sizes])]  # type: ignore[no-untyped-call]
    order = torch.argsort(_order(n, paired, packed.device))
    codes = torch.cat(stored).unflatten(3, (-1, TILE, 4)).permute(0, 4, 1, 2, 3, 5).reshape(n, -1)  # type: ignore[no-untyped-call]
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), 2).flatten(1)
    scales, *zeros = (torch.cat(p).unflatten(2, (TILE, -1)).transpose(1, 2).flatten(0, 1).contiguous() for p in params)  # type: ignore[no-untyped-call]
    return codes[order], scales.view(dtype).flatten(1)[order], zeros[0].flatten(1)[order] if zero else None


def packed_bytes(n: int, k: int, bits: int, group: int | None, zero: bool, item: int) -> int:
    """Bytes of a packed weight whose scales have `item` bytes."""
    return n * (k * bits // 8 + (1 if group is None else k // group) * (item + zero))


def _order(n: int, paired: bool, device: torch.device) -> Tensor:
    """The weight's row at each place."""
    rows = torch.arange(n, device=device)
    return rows.view(2, -1, TILE).transpose(0, 1).flatten() if paired else rows


def _blocks(tiles: int) -> Iterator[tuple[slice, int]]:
    """Ranges of tiles whose blocks are alike, and the tiles of such a block."""
    full = tiles // BLOCK_TILES * BLOCK_TILES
    if full:
        yield slice(0, full), BLOCK_TILES
    if full < tiles:
        yield slice(full, tiles), tiles - full
