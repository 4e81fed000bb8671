"""The CUDA attention kernel, run on the CPU: its headers' own text, for a rendered variant, over the emulation of CUDA."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch

from kvgen.format.layout import PackedLayout, packed_layout
from kvgen.format.residual import window_places
from kvgen.format.scales import trial_scales
from kvgen.lower.cuda.backend import source
from kvgen.lower.schedule import Params, Value
from kvgen.spec import KernelSpec
from kvgen.verify.calls import Form, laid_out
from kvgen.verify.packing import token_bits
from tests.support.plan import WORK_TILE, PlanShape, WorkTile, make_plan, written_plan
from tests.support.reference import ReferenceCache
from tests.unit.lower_cuda.emulate import library, part_of_wider

CALLS = """
#ifndef COUNTERS
#define COUNTERS kvgen::Workspace<Attend_::StaticTraits>::counter_bytes(heads)
#endif
using Attend_ = kvgen::Attend<Constants, Schedule>;
template <class Format>
cudaError_t write_new(const kvgen::AttendArgs& a) {
  if constexpr (Format::ResidualRows::kArrival) return kvgen::launch_append<Format>(a, nullptr, true);
  return cudaSuccess;
}
extern "C" int64_t workspace_bytes(int processors, int batch, int heads, int max_len) {
  emulator::processors = processors;
  return Attend_::workspace_bytes(batch, heads, max_len, 1);
}
extern "C" int64_t counter_bytes(int heads) { return COUNTERS; }
extern "C" void shape(int batch, int heads, int q_len, bool append, int* to) {
  const kvgen::PlanShape s = Attend_::plan_shape(batch, heads, q_len, append);
  const int numbers[] = {s.workers, s.tile_tokens, s.block_tokens, s.head_cost, s.least_tiles, s.window, s.unpacked, s.tile_residual};
  std::copy(numbers, numbers + 8, to);
}
extern "C" int64_t prefetched() { return emulator::prefetched; }
extern "C" void limit_memory(int per_sm) { emulator::shared_per_sm = per_sm; }
extern "C" int64_t launched_bytes() { return emulator::dynamic_bytes; }
extern "C" void show(bool current) { emulator::first_load_is_current = current; }
extern "C" int call(bool append, bool backwards, float scale, void* const* tensors, const int64_t* n) {
  emulator::backwards = backwards, emulator::prefetched = 0;
  kvgen::AttendArgs a;
  a.cache.packed = static_cast<uint8_t*>(tensors[0]), a.cache.k_residual = tensors[1], a.cache.v_residual = tensors[2];
  a.cache.lengths = static_cast<int*>(tensors[3]), a.cache.block_table = static_cast<const int*>(tensors[4]);
  a.cache.outer_stride_bytes = n[0], a.cache.head_stride_bytes = n[1], a.cache.table_stride = n[2], a.cache.page_blocks = n[3];
  a.cache.blocks = n[14], a.cache.pages = n[15];
  for (int i = 0; i < 3; ++i) emulator::readable[i] = {static_cast<const unsigned char*>(tensors[i]), n[16 + (i > 0)]};
  a.cache.batch = n[4], a.cache.kv_heads = n[5], a.q_len = n[6], a.max_len = n[7];
  a.q = {tensors[5], n[8], n[9], n[10]}, a.out = {tensors[6], n[19], n[20], n[21]}, a.lse = static_cast<float*>(tensors[7]);
  a.workspace = tensors[8], a.scale = scale;
  a.plan = static_cast<const int*>(tensors[9]), a.overflow = static_cast<int*>(tensors[10]), a.limit = n[18], a.advance = n[25];
  a.sinks = static_cast<const float*>(tensors[11]);
  a.cache.residual_slots = static_cast<const int*>(tensors[12]), a.cache.slots = n[26];
  a.scales = static_cast<const float*>(tensors[13]);
  if (append) a.k_new = {tensors[14], n[11], n[12], n[13]}, a.v_new = {tensors[15], n[22], n[23], n[24]};
  if (append && write_new<Constants>(a)) return 1;
  return Attend_::launch(a, append, nullptr);
}
"""


def launch(**changes: Value) -> Params:
    """A small launch: two warps, so that few threads are emulated."""
    plain: dict[str, Value] = {
        "warps": 2, "kv_tile": 64, "tiles_in_flight": 1, "ctas_per_sm": 1, "copy": "cp_async", "reduction": "last_cta", "exact_q": True,
    }  # fmt: skip
    return Params({**plain, **changes})


class Emulated:
    """`attend` and `decode` of one variant."""

    def __init__(self, spec: KernelSpec, block: int, chosen: Params, folder: Path) -> None:
        self.spec, self.layout, self.exact = spec, packed_layout(spec, block, "mma"), bool(chosen["exact_q"])
        self.library = compile_variant(spec, self.layout, chosen, folder)
        for called in (self.library.workspace_bytes, self.library.counter_bytes, self.library.prefetched, self.library.launched_bytes):
            called.restype = ctypes.c_int64
        self.library.show.argtypes = [ctypes.c_bool]

    def plan_shape(self, batch: int, q_len: int, append: bool) -> PlanShape:
        """What the plan of a step depends on, beside the lengths."""
        heads = self.spec.attention.kv_heads
        numbers = (ctypes.c_int * 8)()
        self.library.shape(batch, heads, q_len, ctypes.c_bool(append), numbers)
        return PlanShape(
            batch, heads, *numbers[:6], q_len=q_len, fresh=q_len if append else 0, unpacked=numbers[6], tile_residual=numbers[7]
        )


NO_NUMBER = -1_000_000_007
"""What a plan holds where it has no meaning: memory that is indexed by it is in no process."""


@dataclass
class Step:
    """A call over a cache that a reference holds too, with the static scheduler or with a plan. Memory that no call may read is NaN.

    `backwards`: CTAs run in that order. `limit`: most tokens of a sequence. `first_load_is_current`: before griddepcontrol.wait a
    warp's first load of an address gives what is there afterwards too, and later ones give anything; else each may give anything.
    """

    kernel: Emulated
    reference: ReferenceCache
    q: torch.Tensor
    new: tuple[torch.Tensor, torch.Tensor] | None = None
    backwards: bool = False
    processors: int = 4
    planned: bool = False
    skip_empty: bool = False
    limit: int = 2**30
    first_load_is_current: bool = False
    sinks: torch.Tensor | None = None
    in_slots: bool = False
    """Residuals lie in a pool, in another order than the sequences."""
    how: Form | None = None
    """The form of the call, whose tensors then lie apart. By default it asks for the LSE and advances lengths, and tensors are dense."""
    overflow: torch.Tensor = field(init=False)
    out: torch.Tensor = field(init=False)
    lse: torch.Tensor = field(init=False)
    packed: torch.Tensor = field(init=False)
    table: torch.Tensor | None = field(init=False)
    residual: tuple[torch.Tensor, torch.Tensor] = field(init=False)
    lengths: torch.Tensor = field(init=False)
    slots: torch.Tensor | None = field(init=False)
    longest: int = field(init=False)
    workspace: torch.Tensor = field(init=False)

    def prepare(self) -> None:
        """Make what the call reads and writes."""
        batch, q_len, q_heads, _ = self.q.shape
        heads = self.kernel.spec.attention.kv_heads
        self.lengths = self.reference.lengths.clone()
        self.longest = int(self.lengths.max()) + q_len
        self.packed, self.table = packed_cache(self.kernel, self.reference, self.longest, self.first_seen())
        self.residual = self.reference.residual()
        for residual in self.residual:
            residual[residual.eq(0).all(-1)] = torch.nan  # rows that no token has
        self.slots = torch.arange(batch, 0, -1, dtype=torch.int32) if self.in_slots else None
        self.out, self.lse = torch.full_like(self.q, torch.nan), torch.full((batch, q_heads, q_len), torch.nan)
        if self.how is not None:
            number = self.how.number
            self.out = laid_out(self.out, number + 1, self.out.device)
            self.q = laid_out(self.q / (self.how.scale or 1.0), number, self.q.device)
            if self.new is not None:
                self.new = laid_out(self.new[0], number + 1, self.q.device), laid_out(self.new[1], number + 2, self.q.device)
            if self.table is not None:
                self.table = part_of_wider(self.table)
        size = self.kernel.library.workspace_bytes(self.processors, batch, heads, self.longest)
        self.workspace = torch.full((size // 4 + 1,), torch.nan)
        self.workspace[: self.kernel.library.counter_bytes(heads) // 4] = 0
        self.overflow = torch.zeros(1, dtype=torch.int32)

    def run(self) -> None:
        """Call the kernel."""
        self.prepare()
        batch, q_len, _, dim = self.q.shape
        numbers = [
            *self.packed.stride()[:2], 0 if self.table is None else self.table.stride(0), 0 if self.table is None else self.packed.shape[2],
            batch, self.kernel.spec.attention.kv_heads, q_len, self.longest, *self.q.stride()[:3],
            *((self.new or (self.q,))[0].stride()[:3]),
            self.packed.shape[2] if self.table is None else self.table.shape[1] * self.packed.shape[2],
            self.packed.shape[0], self.packed.nbytes, self.residual[0].nbytes, self.limit, *self.out.stride()[:3],
            *((self.new or (self.q, self.q))[1].stride()[:3]), int(not self.planned and not self.stays),
        ]  # fmt: skip
        plan = self._plan() if self.planned else None
        lse = self.lse if self.asks_lse else None
        scale = dim**-0.5 * (1.0 if self.how is None else self.how.scale or 1.0)
        pools = self.residual
        if self.slots is not None:
            pools = tuple(
                torch.full((batch + 2, *x.shape[1:]), torch.nan, dtype=x.dtype).index_copy(0, self.slots.long(), x) for x in self.residual
            )
        numbers += [len(pools[0])]
        numbers[17] = pools[0].nbytes
        tensors = [
            self.packed, *pools, self.lengths, self.table, self.q, self.out, lse, self.workspace, plan, self.overflow,
            self.sinks, self.slots, trial_scales(self.kernel.spec), *(self.new or ()),
        ]  # fmt: skip
        pointers = [None if t is None else t.data_ptr() for t in tensors]
        self.kernel.library.show(self.first_load_is_current)
        failed = self.kernel.library.call(
            ctypes.c_bool(self.new is not None), ctypes.c_bool(self.backwards), ctypes.c_float(scale),
            (ctypes.c_void_p * len(pointers))(*pointers), (ctypes.c_int64 * len(numbers))(*numbers),
        )  # fmt: skip
        assert not failed
        if self.slots is not None:
            self.residual = pools[0][self.slots.long()], pools[1][self.slots.long()]
            assert all(x[[0, -1]].isnan().all() for x in pools), "residuals of other sequences stay as they were"

    @property
    def asks_lse(self) -> bool:
        """Whether the call asks for the LSE."""
        return self.how is None or self.how.lse is not None

    @property
    def stays(self) -> bool:
        """Whether lengths stay as they are although there is no plan."""
        return self.how is not None and self.how.end == "stay"

    def first_seen(self) -> list[int]:
        """The first token of each sequence that the step's first query sees."""
        window = self.kernel.spec.attention.window
        cached = 0 if self.new is not None else self.q.shape[1]  # of the queries' tokens
        return [max(length - cached - window + 1, 0) if window else 0 for length in self.lengths.tolist()]

    def _plan(self) -> torch.Tensor:
        """The reference's plan as int32 numbers."""
        batch, q_len = self.q.shape[:2]
        shape = self.kernel.plan_shape(batch, q_len, self.new is not None)
        plan = make_plan(shape, self.lengths.tolist(), self.limit, self.skip_empty)
        numbers = torch.tensor(written_plan(shape, plan), dtype=torch.int32)
        tiles = numbers[shape.tiles_at : shape.empty_at].view(-1, WORK_TILE)
        tiles[tiles[:, NUM_SPLITS] == 0] = NO_NUMBER
        numbers[shape.empty_at + len(plan.empty) :] = NO_NUMBER
        return numbers


NUM_SPLITS = [field.name for field in fields(WorkTile)].index("num_splits")


def packed_cache(
    kernel: Emulated, held: ReferenceCache, longest: int, first_seen: Sequence[int] | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What a reference holds, packed, with room for `longest` tokens of each sequence and a block more; and the block table of pages.

    Blocks wholly before the `first_seen` token of a sequence are poisoned, and pages wholly before it are missing.
    """
    layout, page = kernel.layout, kernel.spec.cache.page
    batch, blocks = len(held.lengths), longest // layout.tokens + 1
    seen = first_seen or [0] * batch
    if page is not None:
        pages = -(-blocks * layout.tokens // page)
        table = torch.arange(batch * pages, dtype=torch.int32).flip(0).reshape(batch, pages)
        packed = held.paged(layout, table, batch * pages, fill=255)
        for b, token in enumerate(seen):
            for block in range(token // layout.tokens):
                index = block * layout.tokens
                packed[table[b, index // page], :, index % page // layout.tokens] = 255
            table[b, : token // page] = -1
            _poison_last(kernel, held, packed, table)
        return packed, table
    packed = held.packed(layout, blocks)
    if places := window_places(kernel.spec, layout.tokens):
        return _in_places(packed, held, seen, places), None
    for b, full in enumerate(held.blocks.tolist()):
        packed[b, :, full:] = 255
        packed[b, :, : seen[b] // layout.tokens] = 255
    _poison_last(kernel, held, packed, None)
    return packed, None


def _poison_last(kernel: Emulated, held: ReferenceCache, packed: torch.Tensor, table: torch.Tensor | None) -> None:
    """Fill what lies behind the last token of a block that is partly filled."""
    tokens = kernel.layout.tokens
    for b, length in enumerate(held.lengths.tolist()):
        if held.rows.arrival and length % tokens:
            mine = token_bits(kernel.layout, torch.arange(tokens) < length % tokens)
            whose, inner = block_place(packed, table, b, length // tokens)
            packed[whose, :, inner] |= ~mine


def block_place(packed: torch.Tensor, table: torch.Tensor | None, b: int, block: int) -> tuple[int, int]:
    """Where a block of a sequence lies in `packed`: outer and inner index."""
    if table is None:
        return b, block
    per_page = packed.shape[2]
    return int(table[b, block // per_page]), block % per_page


def _in_places(packed: torch.Tensor, held: ReferenceCache, seen: Sequence[int], places: int) -> torch.Tensor:
    """The blocks of a sliding window in the places that they take in turn; what is in no block that a query sees is poisoned."""
    found = torch.full((*packed.shape[:2], min(places, packed.shape[2]), packed.shape[3]), 255, dtype=packed.dtype)
    for b, length in enumerate(held.lengths.tolist()):
        for block in range(seen[b] // held.block, length // held.block):
            found[b, :, block % places] = packed[b, :, block]
    return found


def compile_variant(spec: KernelSpec, layout: PackedLayout, chosen: Params, folder: Path, calls: str = CALLS) -> ctypes.CDLL:
    """The headers of a variant, with `Format` and `Schedule` as it has them, and functions that call them."""
    rendered = source(spec, layout, chosen, "sm90").text
    variant = rendered[rendered.index("struct Constants {") : rendered.index("struct Shape")]
    headers = f'{seams(rendered)}#include "kvgen/host/attend.cuh"\n#include "kvgen/pack/write.cuh"'
    return ctypes.CDLL(str(library(f"{headers}\n{variant}\n{calls}", folder)))


def seams(rendered: str) -> str:
    """The headers that a rendered source includes besides the module's own."""
    parts = ("codec", "mainloop", "epilogue")
    return "".join(line + "\n" for line in rendered.splitlines() if line.startswith(tuple(f'#include "kvgen/{part}/' for part in parts)))
