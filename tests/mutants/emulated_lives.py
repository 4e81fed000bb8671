"""What an emulated CUDA variant is put through: attention, decode and packing against the fp64 reference, in few and short calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import torch

from benchmarks.gpu_words import spec_of, workload_of
from kvgen.format.residual import ResidualRows, residual_rows
from kvgen.format.window import window_places
from kvgen.lower.schedule import Value
from kvgen.spec import KernelSpec
from kvgen.verify.cache import ReferenceCache
from kvgen.verify.calls import form, laid_out
from kvgen.verify.data import learned_sinks, normal, structured
from kvgen.verify.packing import pack_blocks, to_blocks, unpack_blocks
from kvgen.verify.plan import PlanShape
from kvgen.verify.tolerance import relative_l2, row_tolerance, tolerance, worst_relative_l2
from tests.support.packed import hard_values, meaningful_bytes, sequence_blocks
from tests.unit.lower_cuda import emulate
from tests.unit.lower_cuda.emulate_attend import Emulated, Step, launch, packed_cache
from tests.unit.lower_cuda.emulate_plan import NO_LIMIT, Planner, advanced, differences, sparse, unlike

Lengths = tuple[int, ...]
EQUAL: Lengths = (300, 290, 310)
RAGGED: Lengths = (2100, 0, 1, 128, 700)
FULL: Lengths = (127, 128, 255, 254)
MANY: Lengths = (*(i % 5 for i in range(127)), 0, 3000, 129, 1)
WHOLE: Lengths = (256, 128, 384)
"""Whole blocks: no residual tells a warp how large scores are."""
LONG: Lengths = (5000,)
MIXED: Lengths = (1535, 0, 127, 126)
EMPTIES: Lengths = (5, 0, 2500, 0, 2600)
MOSTLY_EMPTY: Lengths = (0, 0, 300, 0, 0, 0)
"""With more empty sequences than CTAs of two multiprocessors."""
CROWD: Lengths = tuple(n % 7 for n in range(1203))
LONGER: Lengths = (20000,)
"""Long enough for more than 16 splits of a head, on 48 multiprocessors."""


class Wrong(Exception):
    """What differs from the reference."""


@dataclass(frozen=True)
class EmulatedCase:
    """A variant of two warps unless `launch` says otherwise, and its lives: (lengths, multiprocessors) of `attend` and `decode`."""

    words: str
    block: int
    launch: dict[str, Value]
    attends: tuple[tuple[Lengths, int], ...] = ((EQUAL, 4), (RAGGED, 7))
    decodes: tuple[tuple[Lengths, int], ...] = ((FULL, 4),)
    batch: int = 3
    """Of prefills."""
    blocks: int = 25
    """Of the longest prefill, of at most four sequences."""
    spec: KernelSpec = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "spec", spec_of(self.words, "sm90", [workload_of("2x256")]))


UNQUANTIZED = "k4v4:kg64:sink21:local5:rollback8:sinks"
EDGES: Lengths = (0, 20, 21, 22, 85, 89, 90, 153)
"""Next to the end of the sink of UNQUANTIZED, and to lengths at which one and two blocks of 64 are packed."""
SMALL: dict[str, Value] = {"kv_tile": 32, "tiles_in_flight": 2}
CASES: dict[str, EmulatedCase] = {
    "last": EmulatedCase("k4v4:h4/2:d64", 128, SMALL, ((EQUAL, 4), (RAGGED, 7), (LONGER, 48)), ((FULL, 4),)),
    "batch": EmulatedCase("k4v4:h2/1:d64", 128, SMALL, ((MANY, 4),), ((MANY, 4),)),
    "residual": EmulatedCase("k4v4:h4/2:d64", 128, {**SMALL, "ctas_per_sm": 2}, ((EQUAL, 1), ((127, 90), 1)), ((FULL, 1),)),
    "cluster": EmulatedCase("k4v4:h4/2:d64", 128, {**SMALL, "reduction": "cluster4"}, ((EQUAL, 8), (LONG, 8)), ((FULL, 8),)),
    "two-level": EmulatedCase("k4v4:h2/1:d64", 128, {**SMALL, "reduction": "two_level"}, (((12000,), 60),), (((12000,), 60),)),
    "planned": EmulatedCase(
        "k4v4:h4/2:d64",
        128,
        {"kv_tile": 64, "tiles_in_flight": 1},
        ((RAGGED, 7), (EQUAL, 4), ((1300, 1290, 1310), 7), (EMPTIES, 9), (MOSTLY_EMPTY, 2), ((40,), 30)),
        ((FULL, 7), (MIXED, 7), (FULL, 2)),
    ),
    "planned-batch": EmulatedCase("k4v4:h4/2:d64", 128, {"kv_tile": 64, "tiles_in_flight": 1}, ((MANY, 7),), ()),
    "planned-heads": EmulatedCase("k4v4:h6/3:d64", 128, {"kv_tile": 64, "tiles_in_flight": 1}, ((MANY, 7),), ()),
    "bulk": EmulatedCase("k4v4:h4/2:d64", 128, {**SMALL, "copy": "bulk_stage"}),
    "bulk-tile": EmulatedCase("k4v4:h4/2:d64", 128, {"kv_tile": 64, "tiles_in_flight": 2, "copy": "bulk_tile"}),
    "window": EmulatedCase("k4v4:h4/2:d64:kg64:window100", 128, SMALL, ((EQUAL, 4), (RAGGED, 7), ((227, 483), 4)), ((FULL, 4),)),
    "gathered-window": EmulatedCase(
        "k4v4:token:page16:h4/2:d64:q3:window100", 16, {"kv_tile": 32, "tiles_in_flight": 4}, ((EQUAL, 4), (RAGGED, 7), ((190, 500), 4))
    ),
    "narrow-window": EmulatedCase("k4v4:token:page16:h4/2:d64:window5", 16, {"kv_tile": 32, "tiles_in_flight": 4}),
    "cap": EmulatedCase("k4v4:h4/2:d64:cap5", 128, SMALL),
    "paged": EmulatedCase(
        "k4v4:h4/2:d64:kg64:page128", 64, SMALL, ((EQUAL, 4), (RAGGED, 7), (tuple(range(200, 300, 10)), 4)), ((FULL, 4),)
    ),
    "key-groups": EmulatedCase("k4v4:h4/2:d64:kg64", 128, SMALL),
    "gathered": EmulatedCase("k4v4:token:page16:h4/2:d64", 16, {"kv_tile": 32, "tiles_in_flight": 4}),
    "token": EmulatedCase("k4v4:token:kg32:vg32:h4/2:d64", 128, SMALL),
    "symmetric": EmulatedCase("k8v8:token:sym:h4/2:d64", 128, SMALL),
    "queries": EmulatedCase("k4v4:q4:h8/2:d64", 128, SMALL, (((258, 130, 385), 4), ((1500,), 30)), (((126, 129, 257), 4),)),
    "half-run": EmulatedCase("k4v4:h4/2:d80:kg32", 32, SMALL),
    "half-run-groups": EmulatedCase("k4v2:kg64:vg16:h4/2:d48", 64, SMALL),
    "half-run-boost": EmulatedCase("k2v2:kg64:vchannel:vg32:h4/2:d80:boost3/5", 64, SMALL),
    "runs": EmulatedCase(
        "k4v4:q8:h24/2:d64:kg64", 64, SMALL, (((258, 130, 385), 4), ((1500,), 30)), (((126, 129, 257, 60), 4), ((126, 129, 257, 60), 40))
    ),
    "int2": EmulatedCase("k2v2:h4/2:d64", 128, {"kv_tile": 64, "tiles_in_flight": 2}),
    "integers": EmulatedCase("k4v4:kg64:h4/2:d64", 128, {"kv_tile": 128, "tiles_in_flight": 2, "exact_q": False}),
    "boost": EmulatedCase("k2v2:h4/2:d96:kg64:boost1/2", 128, SMALL),
    "value-groups": EmulatedCase("k4v4:vg32:h4/2:d64", 128, SMALL),
    "value-channel": EmulatedCase("k8v8:vchannel:sym:h4/2:d64", 128, {"kv_tile": 64, "tiles_in_flight": 1}),
    "channel-groups": EmulatedCase("k2v4:kg16:vchannel:vg32:h4/2:d64", 128, {"kv_tile": 64, "tiles_in_flight": 1}),
    "split-groups": EmulatedCase("k2v4:kg48:vchannel:vg48:h4/2:d64", 96, SMALL, ((EQUAL, 4), (RAGGED, 7)), (((95, 96, 191, 190), 4),)),
    "sizes": EmulatedCase("k4v4:h1/1:d64", 128, SMALL, (((70000,), 12),), ()),
    "sizes-batch": EmulatedCase("k4v4:h1/1:d64", 128, SMALL, ((CROWD, 12),), ()),
    "sizes-window": EmulatedCase("k4v4:h1/1:d64:kg64:window40000", 128, SMALL, (((45000,), 12),), ()),
    "unquantized": EmulatedCase(f"{UNQUANTIZED}:h4/2:d64", 64, SMALL, ((EDGES, 4), ((0, 1300), 7)), ((EDGES, 4), ((20, 89, 217, 600), 7))),
}
PACKED: dict[str, EmulatedCase] = {
    "last": EmulatedCase("k4v4:h2/2:d64", 128, {}),
    "batch": EmulatedCase("k4v4:h1/1:d64", 128, {}, batch=136),
    "int2": EmulatedCase("k2v2:h2/2:d64", 128, {}),
    "boost": EmulatedCase("k2v2:h2/2:d96:kg64:boost1/2", 128, {}),
    "symmetric": EmulatedCase("k8v8:token:sym:h2/2:d64", 128, {}),
    "token": EmulatedCase("k4v4:token:kg32:vg32:h2/2:d64", 128, {}),
    "half-run": EmulatedCase("k4v4:h2/2:d80:kg32", 32, {}),
    "half-run-groups": EmulatedCase("k4v2:kg64:vg16:h2/2:d48", 64, {}),
    "half-run-token": EmulatedCase("k2v4:token:d48:kg48:vg48:h2/2", 32, {}),
    "paged": EmulatedCase("k4v4:h2/2:d64:kg64:page128", 64, {}, batch=12),
    "channel-groups": EmulatedCase("k2v4:kg16:vchannel:vg32:h2/2:d64", 128, {}),
    "split-groups": EmulatedCase("k2v4:kg48:vchannel:vg48:h2/2:d64", 96, {}),
    "sizes": EmulatedCase("k4v4:h1/1:d64", 128, {}, blocks=157),
    "sizes-batch": EmulatedCase("k4v4:h1/1:d64", 128, {}, batch=1203),
    "sizes-rollback": EmulatedCase("k4v4:kg64:rollback70:h2/2:d64", 64, {}),
    "unquantized": EmulatedCase(f"{UNQUANTIZED}:h2/2:d64", 64, {}),
}
Plan = tuple[PlanShape, Lengths, int, bool]
PLANS: tuple[Plan, ...] = (
    (PlanShape(3, 2, 8, 64, 128, 13, 8, fresh=1), (300, 0, 4000), 4000, True),
    (PlanShape(4, 2, 40, 64, 128, 13, 1, fresh=1), (0, 5, 0, 9000), NO_LIMIT, False),
    (PlanShape(1, 1, 400, 64, 128, 0, 1), (60000,), NO_LIMIT, False),
    (PlanShape(3, 2, 40, 64, 128, 13, 8, fresh=1), (90, 0, 140000), NO_LIMIT, False),
    (PlanShape(2, 2, 20, 64, 128, 0, 1), (0, 100), NO_LIMIT, False),
    (PlanShape(4, 2, 60, 128, 32, 3, 1, window=300, q_len=3, fresh=3), (20, 290, 303, 7000), NO_LIMIT, False),
    (PlanShape(200, 2, 132, 64, 128, 13, 8, q_len=2, fresh=2), tuple(unlike(200)), 29000, True),
    (PlanShape(1500, 1, 264, 64, 128, 13, 8, tile_residual=17), tuple(unlike(1500)), NO_LIMIT, False),
    (PlanShape(1500, 1, 264, 64, 128, 13, 4, tile_residual=17), tuple(sparse(1500)), NO_LIMIT, False),
)
"""Shape, lengths, limit, and whether empty sequences are skipped."""


@contextmanager
def headers_of(templates: Path) -> Iterator[None]:
    """Emulators are built over the headers of another folder of templates."""
    kept = emulate.templates
    emulate.templates = lambda: templates
    try:
        yield
    finally:
        emulate.templates = kept


def live(kind: str, name: str, templates: Path, folder: Path) -> None:
    """All lives of a case over these templates. Raises Wrong at the first difference."""
    with headers_of(templates):
        if kind == "plan":
            return plan(folder)
        if kind == "pack":
            return pack(PACKED[name], folder)
        case = CASES[name]
        built = Emulated(case.spec, case.block, launch(**case.launch), folder)
    for number, (lengths, processors) in enumerate(case.attends):
        attend(built, lengths, processors, hard=number == 0)
    attend(built, WHOLE, 4, constant=True)
    for lengths, processors in case.decodes:
        for planned, backwards in product((False, True), (False, True)):
            decode(built, lengths, processors, planned, backwards)
        overflow(built, lengths, processors)
    return None


def plan(folder: Path) -> None:
    """Plans of the device and of the host, and lengths that advance."""
    planner = Planner.emulated(folder)
    for shape, lengths, limit, skip_empty in PLANS:
        if found := differences(planner, shape, lengths, limit, skip_empty):
            raise Wrong(f"a plan of {named(lengths)}: {', '.join(found)}")
    lengths = tuple(unlike(200))
    for counts in (None, [b % 5 for b in range(200)]):
        require(advanced(planner, lengths, counts, 3, 2900), f"advance of {named(lengths)}")


def held_by(built: Emulated, lengths: Lengths, hard: bool = False, constant: bool = False) -> tuple[ReferenceCache, torch.Tensor]:
    """A reference cache of these lengths, and queries; with `constant`, all channels of a token of V are the same."""
    make = structured if hard else normal
    inputs = make(built.spec, len(lengths), max(1, *lengths), q_len=built.spec.attention.q_len, seed=1)
    held = ReferenceCache(built.spec, len(lengths), built.layout.tokens)
    held.prefill(inputs.k, inputs.v[..., :1].expand_as(inputs.v) if constant else inputs.v, torch.tensor(lengths, dtype=torch.int32))
    return held, inputs.q


def attend(built: Emulated, lengths: Lengths, processors: int, hard: bool = False, constant: bool = False) -> None:
    """Calls of both kernels with as many query tokens as they hold, and with fewer."""
    held, q = held_by(built, lengths, hard, constant)
    where = f"attend at {named(lengths)}{', structured' if hard else ''}{', constant V' if constant else ''}"
    for queries in sorted({q.shape[1], max(1, q.shape[1] - 2)}):
        few = q[:, :queries].contiguous()
        sinks = learned_sinks(built.spec)
        want = held.attend(few, sinks=sinks)
        for at, (planned, current) in enumerate(((False, False), (True, False), (True, True), (False, True))):
            how = {"processors": processors, "planned": planned, "first_load_is_current": current, "sinks": sinks, "skip_empty": planned}
            step = Step(built, held, few, how=form(at + 2 * (at == 3), queries), **how)
            step.run()
            agree(kernel_named(where, planned), step, want)


def decode(built: Emulated, lengths: Lengths, processors: int, planned: bool, backwards: bool) -> None:
    """One step: output, LSE, lengths, residuals, and the blocks that became full."""
    held, q = held_by(built, lengths)
    q_len = q.shape[1]
    new = normal(built.spec, len(lengths), q_len, q_len=q_len, seed=2)
    sinks = learned_sinks(built.spec)
    how = form(2 * planned + backwards, int(planned))
    step = Step(built, held, q, (new.k, new.v), backwards, processors, planned, sinks=sinks, how=how)
    step.run()
    where = kernel_named(f"decode at {named(lengths)}", planned)
    agree(where, step, held.decode(q, new.k, new.v, sinks=sinks))
    after = [length + q_len for length in lengths]
    require(step.lengths.tolist() == (list(lengths) if planned or step.stays else after), f"{where}: lengths")
    expected, table = packed_cache(built, held, max(after))
    kept, places = meaningful_bytes(built.layout), window_places(built.spec, built.layout.tokens)
    for b, (old, length) in enumerate(zip(lengths, after, strict=True)):
        at = rows_held(held.rows, length)
        for mine, want in zip(step.residual, held.residual(), strict=True):
            require(torch.equal(mine[b][:, at], want[b][:, at]), f"{where}: residual of sequence {b}")
        first = held.rows.packed_blocks(old)
        if held.rows.packed_blocks(length) > first:
            place = first % (places or first + 1)
            one, other = (sequence_blocks(packed, table, b)[:, place] for packed in (step.packed, expected))
            require(torch.equal(one[:, kept], other[:, kept]), f"{where}: packed block of sequence {b}")
        elif not places:
            following = sequence_blocks(step.packed, table, b)[:, first]
            require(bool((following == 255).all()), f"{where}: a block of sequence {b} is packed that is not due")


def rows_held(rows: ResidualRows, length: int) -> list[int]:
    """Rows of the residual that must hold a token of a sequence of this length, also after the largest crop."""
    first = rows.first(max(0, length - rows.rollback))
    return [rows.row(position) for position in (*range(min(length, rows.sink)), *range(first, length))]


def overflow(built: Emulated, lengths: Lengths, processors: int) -> None:
    """A step for which the longest sequence has no room: nothing of it is written, in its own memory, and the static kernel says so."""
    held, q = held_by(built, lengths)
    q_len = q.shape[1]
    new = normal(built.spec, len(lengths), q_len, q_len=q_len, seed=2)
    limit = max(lengths) + q_len - 1
    for planned in (False, True):
        where = kernel_named(f"decode without room at {named(lengths)}", planned)
        how = {"processors": processors, "planned": planned, "limit": limit, "sinks": learned_sinks(built.spec)}
        before, step = (Step(built, held, q, (new.k, new.v), **how) for _ in range(2))
        before.prepare()
        step.run()
        works = [length + q_len <= limit for length in lengths]
        want = held.lengths if planned else held.lengths + q_len * torch.tensor(works)
        require(torch.equal(step.lengths, want), f"{where}: lengths")
        require(step.overflow.item() == (not planned), f"{where}: overflow flag")
        for b in (b for b, there in enumerate(works) if not there):
            for now, then in zip((step.out, step.lse, *step.residual), (before.out, before.lse, *before.residual), strict=True):
                require(torch.equal(now[b].view(torch.uint8), then[b].view(torch.uint8)), f"{where}: sequence {b} is written")


def pack(case: EmulatedCase, folder: Path) -> None:
    """Prefill in pieces, one of them beyond 3,000 tokens, then unpack."""
    from kvgen.format.layout import packed_layout
    from kvgen.verify.quantize import torch_dtype

    layout, dtype = packed_layout(case.spec, case.block, "mma"), torch_dtype(case.spec.attention.dtype)
    rows = residual_rows(case.spec, case.block)
    module = emulate.Emulated(layout, dtype, folder, rows)
    n, heads, page = layout.tokens, case.spec.attention.kv_heads, case.spec.cache.page
    far = case.blocks * n + 3 if case.batch <= 4 else n + 3
    pieces = [[n // 2, 0, far], [n // 2, 3, 5], [n + 1, n - 2, n - 5], [2, 1, 0], [2 * n - 2, n - 1, n - 1]]
    pieces = [[piece[b % 3] if b < 3 else piece[1] + b % 7 for b in range(case.batch)] for piece in pieces]
    done = [sum(piece[b] for piece in pieces) for b in range(case.batch)]
    pieces.append([(rows.sink + rows.local - length) % n + 2 for length in done])  # two more than fill a block: a crop may unpack it
    total = [sum(piece[b] for piece in pieces) for b in range(case.batch)]
    k, v = (hard_values((case.batch, max(total) + n, heads, layout.head_dim), dtype, seed) for seed in (0, 1))
    held = empty(layout, case.batch, heads, max(total) + n, page, dtype, rows.rows)
    done = [0] * case.batch
    for number, piece in enumerate(pieces):
        fresh = [torch.full((case.batch, max(piece), heads, layout.head_dim), torch.nan, dtype=dtype) for _ in range(2)]
        for b, count in enumerate(piece):
            for x, new in zip((k, v), fresh, strict=True):
                new[b, :count] = x[b, done[b] : done[b] + count]
            done[b] += count
        fresh = [laid_out(x, at, x.device) for at, x in enumerate(fresh, number)]  # V has not K's strides
        module.pack(held, *fresh, torch.tensor(piece, dtype=torch.int32), backwards=number % 2 == 0)
        require(held.lengths.tolist() == done, f"piece {number + 1} of a prefill: lengths")
    shape = (case.batch, max(total) + 2, heads, layout.head_dim)
    out = [torch.full(shape, 7.0, dtype=dtype), torch.full((shape[0], heads, shape[1], shape[3]), 7.0, dtype=dtype).transpose(1, 2)]
    for b, length in enumerate(done):
        blocks, first = sequence_blocks(held.packed, held.block_table, b)[:, : rows.packed_blocks(length)], rows.first(length)
        want = pack_blocks(layout, *(to_blocks(x[b : b + 1, rows.sink : max(rows.sink, first)], n)[0] for x in (k, v)))
        kept = meaningful_bytes(layout)
        require(torch.equal(blocks[..., kept], want[..., kept]), f"prefill: packed blocks of sequence {b}")
        unquantized = [*range(min(length, rows.sink)), *range(rows.first(max(0, length - rows.rollback)), length)]
        for residual, x in ((held.k_residual, k), (held.v_residual, v)):
            there = residual[b][:, rows_held(rows, length)]
            require(torch.equal(there, x[b, unquantized].transpose(0, 1)), f"prefill: residual of sequence {b}")
    module.unpack(held, *out)
    for b, length in enumerate(done):
        blocks, first = sequence_blocks(held.packed, held.block_table, b)[:, : rows.packed_blocks(length)], rows.first(length)
        for x, y, exact in zip((k, v), out, unpack_blocks(layout, blocks, dtype), strict=True):
            require(torch.equal(y[b, rows.sink : first], exact.flatten(1, 2).transpose(0, 1).float().to(dtype)), f"unpack: sequence {b}")
            for part in (slice(0, min(length, rows.sink)), slice(first, length)):
                require(torch.equal(y[b, part], x[b, part]), f"unpack: residual of sequence {b}")


def empty(layout, batch: int, heads: int, room: int, page: int | None, dtype: torch.dtype, rows: int) -> emulate.Cache:  # type: ignore[no-untyped-def]
    """A poisoned cache; pages lie backwards."""
    blocks, table = -(-room // layout.tokens), None
    packed = torch.full((batch, heads, blocks, layout.block_bytes), 0xA5, dtype=torch.uint8)
    if page is not None:
        pages = -(-room // page)
        table = emulate.part_of_wider(torch.arange(batch * pages, dtype=torch.int32).flip(0).reshape(batch, pages))
        packed = torch.full((batch * pages, heads, page // layout.tokens, layout.block_bytes), 0xA5, dtype=torch.uint8)
    residual = torch.full((batch, heads, rows, layout.head_dim), torch.nan, dtype=dtype)
    return emulate.Cache(packed, residual, residual.clone(), torch.zeros(batch, dtype=torch.int32), table)


def agree(where: str, step: Step, want: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Output and LSE are the reference's, and counters are back at zero."""
    limit = tolerance(step.q.dtype)
    require(relative_l2(step.out, want[0]) <= limit, f"{where}: output")
    row_limit = row_tolerance(step.kernel.spec.attention.dtype, exact=step.kernel.exact)
    require(worst_relative_l2(step.out, want[0]) <= row_limit, f"{where}: a row of the output")
    seen = torch.isfinite(want[1])
    if step.asks_lse:
        require(torch.equal(torch.isfinite(step.lse), seen), f"{where}: LSE of a query that sees nothing")
        require(relative_l2(step.lse[seen], want[1][seen]) <= limit, f"{where}: LSE")
    counters = 4 + step.kernel.counters * len(step.lengths) * step.kernel.spec.attention.kv_heads
    require(not step.workspace.view(torch.int32)[:counters].any(), f"{where}: counters that the next call finds")


def kernel_named(where: str, planned: bool) -> str:
    """With the scheduler."""
    return f"{where}, {'planned' if planned else 'static'}"


def named(lengths: Lengths) -> str:
    """Lengths in short."""
    return f"{len(lengths)} sequences of up to {max(lengths)} tokens"


def require(holds: bool, what: str) -> None:
    """Raises Wrong unless it holds."""
    if not holds:
        raise Wrong(what)
