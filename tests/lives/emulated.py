"""Random steps of emulated CUDA kernels and of their packer beside a reference: outputs, the LSE, lengths, what is appended, same bits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import torch

from kvgen.format.dtypes import torch_dtype
from kvgen.format.layout import PackedLayout
from kvgen.format.residual import first_held, window_places
from kvgen.format.rotation import rotate
from kvgen.format.scales import trial_scales
from kvgen.spec import KernelSpec
from kvgen.verify.tolerance import Comparison
from tests.lives.draw import (
    CUDA,
    KINDS,
    TILELANG,
    dense,
    drawn_gpu_spec,
    drawn_query,
    drawn_schedule,
    drawn_sinks,
    drawn_tensor,
    drawn_tilelang_spec,
)
from tests.lives.life import require
from tests.support.packed import meaningful_bytes, sequence_blocks
from tests.support.reference import ReferenceCache
from tests.unit.lower_cuda import emulate
from tests.unit.lower_cuda.attend_checks import cached, cleared
from tests.unit.lower_cuda.emulate_attend import Emulated, Step
from tests.unit.lower_tilelang.emulate import Emulated as EmulatedTileLang

STEPS, PIECES = 4, 4
UNTOUCHED = 7.0


def emulated(number: int, folder: Path) -> tuple[str, Callable[[Random], StepLife]]:
    """The attention and the packing kernels of a number, in schedules whose copies the emulator checks for races, mostly of few warps."""
    draw = Random(number)
    spec = drawn_gpu_spec(draw)
    schedule = drawn_schedule(draw, CUDA, spec, "sm90", copy=["cp_async"], warps=[2, 2, 2, 4, 6, 8])
    built = Emulated(spec, schedule.layout.integer("block"), schedule.launch, folder / "attend")
    rows, places = ReferenceCache(spec, 1, built.layout.tokens).rows, window_places(spec, built.layout.tokens)
    packer = emulate.Emulated(built.layout, torch_dtype(spec.attention.dtype), folder / "pack", rows, places)
    return f"{spec.format()}\n{schedule}", lambda draw: StepLife(built, draw, packer)


def tilelang(number: int, folder: Path) -> tuple[str, Callable[[Random], StepLife]]:
    """Both programs of a number's variant; packing is the CUDA headers'."""
    if reason := TILELANG.missing():
        sys.exit(reason)
    draw = Random(number)
    spec = drawn_tilelang_spec(draw)
    schedule = drawn_schedule(draw, TILELANG, spec, "sm90")
    built = EmulatedTileLang(spec, schedule, folder)
    return f"{spec.format()}\n{schedule}", lambda draw: StepLife(built, draw)


class StepLife:
    """Steps over a cache that starts with drawn lengths, then prefills by the packer, if there is one. Raises at the first difference."""

    def __init__(self, built: Emulated, draw: Random, packer: emulate.Emulated | None = None) -> None:
        self.built, self.draw, self.packer, self.spec, block = built, draw, packer, built.spec, built.layout.tokens
        cache = self.spec.cache
        edge = cache.unpacked + block
        edges = (0, 1, cache.sink, edge - 1, edge, edge + block - 1)
        sizes = (*edges, draw.randint(0, 400), draw.randint(0, 1200), draw.randint(0, 3 * block))
        self.batch = draw.randint(1, 4)
        self.held = ReferenceCache(self.spec, self.batch, block)
        lengths = [draw.choice(sizes) for _ in range(self.batch)]
        self.kinds = [draw.choice(KINDS) for _ in range(2)]
        self.held.prefill(*self.new(max(1, *lengths)), torch.tensor(lengths, dtype=torch.int32))
        self.calls = [f"lengths {lengths}, {self.kinds}"]

    def live(self) -> None:
        """Some steps, with crops between them; then prefills in pieces."""
        for _ in range(STEPS):
            self.step()
            if self.spec.cache.rollback and self.draw.random() < 0.6:
                taken = drawn_crop(self.draw, self.held)
                self.calls.append(f"crop {taken.tolist()}")
                self.held.crop(taken)
        if self.packer is not None:
            PackLife(self.packer, self.spec, self.built.layout, self.draw).live()

    def step(self) -> None:
        """`attend` or `decode` by either scheduler, on any number of multiprocessors, CTAs in either order."""
        draw, held = self.draw, self.held
        lengths: list[int] = held.lengths.tolist()
        tokens, planned, append = draw.randint(1, self.spec.attention.q_len), draw.random() < 0.5, draw.random() < 0.6
        skip = planned and draw.random() < 0.3
        limit = max(lengths) + tokens - 1 if append and draw.random() < 0.15 else 1 << 30
        q, sinks = dense(drawn_query(draw, self.spec, self.batch, tokens, held.keys_values()[0])), drawn_sinks(draw, self.spec)
        new = tuple(map(dense, self.new(tokens))) if append else None
        step = Step(
            self.built, held, q, new, draw.random() < 0.5, draw.choice([1, 4, 7, 30]), planned, skip, limit, draw.random() < 0.5, sinks
        )  # fmt: skip
        self.calls.append(
            f"{'decode' if append else 'attend'} {tokens}{' planned' if planned else ''}{' skip' if skip else ''} at {lengths}"
        )
        step.run()
        again = replace(step, backwards=not step.backwards, first_load_is_current=not step.first_load_is_current)
        again.run()
        comparison = Comparison(self.spec, torch.device("cpu"), exact=self.built.exact)
        for one, other in ((step.out, again.out), (step.lse, again.lse)):
            comparison.same_bits("a call with CTAs in the other order", one, other)
        works = [length + tokens <= limit or (skip and not length) for length in lengths]
        if new:
            counts = torch.tensor([tokens * (there and not (skip and not n)) for there, n in zip(works, lengths, strict=True)])
            held.append(*new, counts)
        want, want_lse = held.attend(q, sinks=sinks)
        held.flush()
        for b, there in enumerate(works):
            if not there:
                require(bool(step.out[b].isnan().all() & step.lse[b].isnan().all()), f"sequence {b} without room is written")
                step.out[b], step.lse[b] = want[b].to(q.dtype), want_lse[b].float()
        comparison.output("output", step.out, step.lse, want, want_lse)
        require(step.lengths.tolist() == (lengths if planned or not new else held.lengths.tolist()), "lengths")
        cleared(step)
        if new:
            cached(step, held, tuple(lengths), held.lengths.tolist())

    def new(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V."""
        k, v = (drawn_tensor(self.draw, kind, self.batch, tokens, self.spec.attention.kv_heads, self.spec) for kind in self.kinds)
        return k, v


class PackLife:
    """A cache that is filled in pieces; tokens are taken back in between. Raises Wrong at the first difference."""

    def __init__(self, module: emulate.Emulated, spec: KernelSpec, layout: PackedLayout, draw: Random) -> None:
        self.module, self.spec, self.layout, self.draw = module, spec, layout, draw
        block, self.batch = layout.tokens, draw.randint(1, 4)
        self.held, self.places = ReferenceCache(spec, self.batch, block), window_places(spec, block)
        sizes = [
            [draw.choice([0, 1, draw.randint(0, block), draw.randint(0, 3 * block)]) for _ in range(self.batch)] for _ in range(PIECES)
        ]
        self.pieces, self.kinds = sizes, [draw.choice(KINDS) for _ in range(2)]
        self.longest = [0] * self.batch
        self.mine = self._empty(sum(map(max, sizes)) + block)

    def live(self) -> None:
        """All pieces, then `unpack`."""
        for piece in self.pieces:
            counts = torch.tensor(piece, dtype=torch.int32)
            new = (drawn_tensor(self.draw, kind, self.batch, max(piece) + 1, self.heads, self.spec) for kind in self.kinds)
            k, v = map(dense, new)
            self.module.pack(self.mine, k, v, counts, backwards=self.draw.random() < 0.5)
            self.held.prefill(k, v, counts)
            self.longest = [max(pair) for pair in zip(self.longest, self.held.lengths.tolist(), strict=True)]
            self._agree(f"after {piece} of {self.pieces}, {self.kinds}")
            if self.spec.cache.rollback and self.draw.random() < 0.5:
                self.held.crop(drawn_crop(self.draw, self.held))
                self.mine.lengths.copy_(self.held.lengths)
        self._unpack()

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.spec.attention.kv_heads

    def _empty(self, room: int) -> emulate.Cache:
        block, page, table = self.layout.tokens, self.spec.cache.page, None
        blocks = -(-room // block)
        shape = (self.batch, self.heads, min(blocks, self.places or blocks), self.layout.block_bytes)
        if page:
            need = -(-room // page)
            order = torch.randperm(self.batch * need, generator=torch.Generator().manual_seed(self.draw.getrandbits(30)))
            table, shape = order.int().reshape(self.batch, need), (self.batch * need, self.heads, page // block, self.layout.block_bytes)
        rows = (self.batch, self.heads, self.held.rows.rows, self.layout.head_dim)
        k, v = (torch.full(rows, torch.nan, dtype=torch_dtype(self.spec.attention.dtype)) for _ in range(2))
        packed, lengths = torch.full(shape, 255, dtype=torch.uint8), torch.zeros(self.batch, dtype=torch.int32)
        return emulate.Cache(packed, k, v, lengths, table, scales=trial_scales(self.spec))

    def _agree(self, where: str) -> None:
        held, kept, want = self.held, meaningful_bytes(self.layout), self.held.packed(self.layout)
        require(torch.equal(self.mine.lengths, held.lengths), f"lengths {where}")
        for found, expected in zip((self.mine.k_residual, self.mine.v_residual), held.residual(), strict=True):
            used = expected.ne(0).any(-1)
            require(torch.equal(found[used], expected[used]), f"residual {where}")
        for b, full in enumerate(held.blocks.tolist()):
            found = sequence_blocks(self.mine.packed, self.mine.block_table, b)
            first = max(0, held.rows.packed_blocks(self.longest[b]) - self.places) if self.places else 0
            for index in range(first, full):
                mine = found[:, index % self.places if self.places else index]
                require(torch.equal(mine[..., kept], want[b, :, index][..., kept]), f"packed block {index} of sequence {b} {where}")

    def _unpack(self) -> None:
        shape = (self.batch, int(self.held.lengths.max()) + 2, self.heads, self.layout.head_dim)
        out = [torch.full(shape, UNTOUCHED, dtype=self.mine.k_residual.dtype) for _ in range(2)]
        self.module.unpack(self.mine, *out)
        kept = (rotate(x, op.rotation) for x, op in zip(self.held.keys_values(), self.layout.operands, strict=True))
        for found, exact in zip(out, kept, strict=True):
            for b, length in enumerate(self.held.lengths.tolist()):
                gone = first_held(self.spec, self.layout.tokens, length) * self.layout.tokens
                want = exact[b, gone:length].float().to(found.dtype)
                require(torch.equal(found[b, gone:length], want), f"unpacked sequence {b} of {length} tokens")
                require(bool((found[b, length:] == UNTOUCHED).all()), f"unpacked beyond sequence {b}")


def drawn_crop(draw: Random, held: ReferenceCache) -> torch.Tensor:
    """As many tokens as may be taken back of each sequence, or fewer: int32 [batch]."""
    least = torch.maximum(held.least, held.lengths - held.rows.rollback).clamp(min=0)
    return torch.tensor([draw.randint(0, n) for n in (held.lengths - least).tolist()], dtype=torch.int32)
