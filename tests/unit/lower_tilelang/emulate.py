"""A lowered variant on the CPU: the text of its two kernels compiled by g++ over emulator.hpp, called with torch tensors."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kvgen.format.residual import ResidualRows
from kvgen.lower.schedule import Params, Schedule, Value
from kvgen.lower.tilelang.isolate import Program, lower_apart
from kvgen.lower.tilelang.traits import Traits, make_traits
from kvgen.spec import KernelSpec
from kvgen.toolchain.compilers import find_gxx
from kvgen.verify.cache import ReferenceCache
from kvgen.verify.plan import PlanShape, written_plan
from kvgen.verify.plan import make_plan as plan_step

HERE = Path(__file__).parent
LOG2E = 1.4426950408889634
CTYPES = {"int": ctypes.c_int, "int64_t": ctypes.c_int64, "float": ctypes.c_float}


def schedule(block: int = 128, **launch: Value) -> Schedule:
    """A small schedule: two warps, so that few threads are emulated."""
    plain: dict[str, Value] = {
        "form": "mma",
        "warps": 2,
        "stages": 4,
        "kv_tile": 128,
        "q_tiles": 1,
        "ctas_per_sm": 1,
        "exact_q": True,
        "splits": "automatic",
        "reduction": "last_cta",
    }
    assert launch.keys() <= plain.keys(), launch
    return Schedule("tilelang", Params(block=block, order="mma"), Params({**plain, **launch}))


@dataclass(frozen=True)
class Emulated:
    """A compiled variant: its kernels by the names of their entries in the library."""

    spec: KernelSpec
    traits: Traits
    programs: dict[str, Program]
    library: ctypes.CDLL

    def __post_init__(self) -> None:
        self.library.flushed.restype = ctypes.c_long

    @contextmanager
    def accumulators(self, bits: int) -> Iterator[None]:
        """Matrix instructions that truncate their sums to so many bits."""
        held = ctypes.c_int.in_dll(self.library, "accumulator_bits")
        usual, held.value = held.value, bits
        try:
            yield
        finally:
            held.value = usual

    def __call__(self, entry: str, values: dict[str, torch.Tensor | int | float]) -> None:
        """Run the whole grid of a kernel."""
        held: list[ctypes.c_void_p | ctypes.c_int | ctypes.c_int64 | ctypes.c_float] = []
        program = self.programs[entry]
        for name, kind in zip(program.parameters, kinds(program), strict=True):
            value = values[name]
            held.append(ctypes.c_void_p(value.data_ptr()) if isinstance(value, torch.Tensor) else CTYPES[kind](value))  # type: ignore[arg-type]
        getattr(self.library, entry)((ctypes.c_void_p * len(held))(*map(ctypes.addressof, held)), values["ctas"], values["splits"])

    def plan_shape(self, batch: int, q_len: int, fresh: int, workers: int) -> PlanShape:
        """What the plan of a step depends on besides the lengths, as the host's side has it but for the costs."""
        p = self.traits
        window = {"window": p.window or 0, "q_len": q_len, "fresh": fresh, "unpacked": p.unpacked}
        return PlanShape(batch, p.kv_heads * self.runs(q_len), workers, p.tile_tokens, p.tokens, head_cost=1, least_tiles=1, **window)

    def runs(self, q_len: int) -> int:
        """CTAs that share the q rows of a KV head."""
        return -(-self.traits.group * q_len // (8 * self.traits.q_tiles))


def kinds(program: Program) -> tuple[str, ...]:
    """C++ types of a kernel's parameters."""
    signature = re.search(rf"{program.name}\((.*?)\);", program.text)
    assert signature is not None
    return tuple(part.rsplit(" ", 1)[0].replace("__restrict__", "").strip() for part in signature[1].split(", "))


def entry(name: str, program: Program, traits: Traits, cluster: bool) -> str:
    """A kernel's text, and a function that runs its grid."""
    arguments = ", ".join(f"*static_cast<{kind}*>(a[{i}])" for i, kind in enumerate(kinds(program)))
    return (
        f'{program.text}\nextern "C" void {name}(void** a, int x, int y) '
        f"{{ flushes.clear(); emulator::launch(x, y, {traits.threads}, {int(cluster)}, [=] {{ {program.name}({arguments}); }}); }}\n"
    )


def emulated(spec: KernelSpec, chosen: Schedule, folder: Path) -> Emulated:
    """Lower and compile. Raises what the back end and the compiler raise."""
    traits, lowered = make_traits(spec, chosen), lower_apart(spec, chosen, "sm90" if chosen.launch["reduction"] == "cluster" else "sm80")
    text = (
        f'#include "emulator.hpp"\nusing uint = unsigned;\n{entry("static_", lowered.static, traits, traits.cluster)}'
        f"{entry('planned', lowered.planned, traits, False)}"
        'extern "C" long flushed(int i, const char* from) '
        "{ return i < int(flushes.size()) ? reinterpret_cast<const char*>(flushes[i].block) - from : -1; }\n"
    )
    source, output = folder / "kernel.cpp", folder / "kernel.so"
    source.write_text(text)
    flags = ["-O1", "-std=c++17", "-fno-strict-aliasing", "-mf16c", "-w", "-shared", "-fPIC", f"-I{HERE}"]
    subprocess.run([str(find_gxx().path), *flags, str(source), "-o", str(output)], check=True)
    return Emulated(spec, traits, {"static_": lowered.static, "planned": lowered.planned}, ctypes.CDLL(str(output)))


@dataclass
class Step:
    """One call over a cache that a reference holds too; memory that no call may read is NaN.

    With `workers` it takes a plan for them. Lengths advance in the static program alone, so those of a planned call are anything.
    With `previous` it runs over that call's workspace, and finds the counters and the partial results that are left there.
    """

    kernel: Emulated
    reference: ReferenceCache
    q: torch.Tensor
    splits: int = 1
    fresh: tuple[torch.Tensor, torch.Tensor] | None = None
    workers: int = 0
    skip_empty: bool = False
    limit: int = 2**30
    advance: bool = True
    sinks: torch.Tensor | None = None
    previous: Step | None = None
    overflow: torch.Tensor = field(init=False)
    out: torch.Tensor = field(init=False)
    lse: torch.Tensor = field(init=False)
    lengths: torch.Tensor = field(init=False)
    counters: torch.Tensor = field(init=False)
    partial: torch.Tensor = field(init=False)
    stats: torch.Tensor = field(init=False)
    residual: tuple[torch.Tensor, torch.Tensor] = field(init=False)
    table: torch.Tensor = field(init=False)
    flushed: list[tuple[int, int, int]] = field(init=False)
    """(sequence, head, block) of what the call packed."""

    def run(self) -> None:
        """Call the kernel."""
        traits, spec = self.kernel.traits, self.kernel.spec
        batch, q_len, q_heads, _ = self.q.shape
        self.lengths = self.reference.lengths.clone()
        packed, self.table = self._packed()
        self.residual = residual_with_poison(self.reference)
        self.out = torch.full_like(self.q, torch.nan)
        self.lse = torch.full((batch, q_heads, q_len), torch.nan)
        fresh = 0 if self.fresh is None else q_len
        cells = batch * traits.kv_heads * self.kernel.runs(q_len)
        shape = self.kernel.plan_shape(batch, q_len, fresh, self.workers)
        numbers = written_plan(shape, plan_step(shape, self.lengths.tolist(), self.limit, self.skip_empty)) if self.workers else [0]
        self._take_workspace(cells)
        self.overflow = torch.zeros(1, dtype=torch.int32)
        values: dict[str, torch.Tensor | int | float] = {
            "q": self.q, "packed": packed, "k_residual": self.residual[0], "v_residual": self.residual[1], "lengths": self.lengths,
            "table": self.table, "out": self.out, "lse": self.lse,
            "partial": self.partial, "stats": self.stats,
            "arrivals": self.counters[0], "flushed": self.counters[1], "readers": self.counters[2],
            "plan": torch.tensor(numbers, dtype=torch.int32), "overflow": self.overflow, "limit": self.limit,
            "sinks": torch.full((q_heads,), torch.nan) if self.sinks is None else self.sinks,
            "advance": int(self.advance and fresh > 0), "tiles_at": shape.tiles_at // 8, "empty_at": shape.empty_at,
            "packed_outer": packed.stride(0) // 16, "packed_head": packed.stride(1) // 16, "table_stride": self.table.stride(0),
            "q_len": q_len, "with_lse": 1, "scale": spec.attention.head_dim**-0.5 * LOG2E, "fresh": fresh,
            "ctas": self.workers or cells, "runs": self.kernel.runs(q_len), "splits": 1 if self.workers else self.splits,
            **_strides("q", self.q), **_strides("out", self.out),
        }  # fmt: skip
        for name, new, held in zip(("fresh_k", "fresh_v"), self.fresh or self.residual, self.residual, strict=True):
            values |= {name: (new.data_ptr() - held.data_ptr()) // 16, **_strides(name, new)}
        self.kernel("planned" if self.workers else "static_", values)
        self.flushed = self._flushed(packed)

    def block_at(self, sequence: int, head: int, block: int) -> tuple[int, int, int]:
        """Where a block of a head lies, as in `flushed`: (sequence or page, head, block of either)."""
        traits = self.kernel.traits
        if pages := traits.page_blocks:
            return int(self.table[sequence, block // pages]), head, block % pages
        return sequence, head, block % traits.window_places if traits.window_places else block

    def _take_workspace(self, cells: int) -> None:
        """Counters that are zero and partial results that are NaN, or those that the previous call left."""
        rows = (cells + self.workers if self.workers else cells * self.splits) * self.kernel.traits.q_rows
        if self.previous is None:
            self.counters = torch.zeros(3, cells, dtype=torch.int32)
            self.partial, self.stats = torch.full((rows, self.kernel.traits.dim), torch.nan), torch.full((rows, 2), torch.nan)
            return
        self.counters, self.partial, self.stats = self.previous.counters, self.previous.partial, self.previous.stats
        assert (self.counters.shape[1], self.stats.shape[0]) == (cells, rows), "the calls have workspaces of one size"

    def _flushed(self, packed: torch.Tensor) -> list[tuple[int, int, int]]:
        heads, blocks, size = packed.shape[1:]
        found = []
        while (offset := self.kernel.library.flushed(len(found), ctypes.c_void_p(packed.data_ptr()))) >= 0:
            at = offset // size
            found.append((at // (heads * blocks), at // blocks % heads, at % blocks))
        return sorted(found)

    def _packed(self) -> tuple[torch.Tensor, torch.Tensor]:
        layout, page = self.kernel.traits.layout, self.kernel.spec.cache.page
        new = 0 if self.fresh is None else self.q.shape[1]
        packed_blocks = self.kernel.traits.rows.packed_blocks
        batch, blocks = len(self.lengths), max(1, packed_blocks(int(self.lengths.max()) + new))
        if page is not None:
            return self._paged(page, batch, -(-blocks * layout.tokens // page), new)
        packed = self.reference.packed(layout, blocks)
        for b, length in enumerate(self.lengths.tolist()):
            packed[b, :, packed_blocks(length) :] = 255
            packed[b, :, : self._unseen(length + new) // layout.tokens] = 255
        if places := self.kernel.traits.window_places:
            return self._in_places(packed, places, new), torch.zeros(1, 1, dtype=torch.int32)
        return packed, torch.zeros(1, 1, dtype=torch.int32)

    def _in_places(self, packed: torch.Tensor, places: int, new: int) -> torch.Tensor:
        """The blocks that queries see in the places that they take in turn; the others are poisoned."""
        tokens = self.kernel.traits.layout.tokens
        found = torch.full((*packed.shape[:2], min(places, packed.shape[2]), packed.shape[3]), 255, dtype=packed.dtype)
        for b, length in enumerate(self.lengths.tolist()):
            for block in range(self._unseen(length + new) // tokens, self.kernel.traits.rows.packed_blocks(length)):
                found[b, :, block % places] = packed[b, :, block]
        return found

    def _paged(self, page: int, batch: int, per_sequence: int, new: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages and block table. Pages before a sliding window are gone; page -1 is memory, so that a read of it is found out."""
        table = torch.arange(batch * per_sequence, dtype=torch.int32).flip(0).reshape(batch, per_sequence)
        pages = self.reference.paged(self.kernel.traits.layout, table + 1, batch * per_sequence + 1, fill=255)[1:]
        for b, length in enumerate(self.lengths.tolist()):
            gone = table[b, : self._unseen(length + new) // page]
            pages[gone.long()] = 255
            gone.fill_(-1)
        return pages, table

    def _unseen(self, length: int) -> int:
        """First tokens of a sequence that its queries do not see."""
        window = self.kernel.spec.attention.window
        return 0 if window is None else max(0, length - self.q.shape[1] + 1 - window)


def residual_with_poison(reference: ReferenceCache) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the unquantized tokens in their rows, and NaN in the others."""
    k, v = reference.residual()
    for b, length in enumerate(reference.lengths.tolist()):
        held = unquantized_rows(reference.rows, length)
        for rows in (k, v):
            rows[b][:, [row for row in range(rows.shape[2]) if row not in held]] = torch.nan
    return k, v


def unquantized_rows(rows: ResidualRows, length: int) -> list[int]:
    """The rows of the residual that hold the unquantized tokens of a sequence."""
    return [rows.row(position) for position in (*range(min(length, rows.sink)), *range(rows.first(length), length))]


def _strides(name: str, x: torch.Tensor) -> dict[str, int]:
    return {f"{name}_{axis}": x.stride(i) // 8 for i, axis in enumerate(("batch", "token", "head"))}
