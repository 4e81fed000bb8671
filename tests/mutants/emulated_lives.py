"""What an emulated CUDA variant is put through: attention, decode and packing against the fp64 reference, in few and short calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.gpu_words import spec_of, workload_of
from kvgen.lower.schedule import Value
from kvgen.reference.cache import ReferenceCache
from kvgen.reference.data import normal, structured
from kvgen.reference.packing import pack_blocks, to_blocks, unpack_blocks
from kvgen.reference.tolerance import relative_l2, tolerance, worst_relative_l2
from kvgen.spec import KernelSpec
from tests.support.packed import hard_values, meaningful_bytes, sequence_blocks
from tests.unit.lower_cuda import emulate
from tests.unit.lower_cuda.emulate_attend import Emulated, Step, launch, packed_cache

Lengths = tuple[int, ...]
ALIKE: Lengths = (300, 290, 310)
UNLIKE: Lengths = (2100, 0, 1, 128, 700)
FULL: Lengths = (127, 128, 255, 254)
MANY: Lengths = (*(i % 5 for i in range(127)), 0, 3000, 129, 1)
LONG: Lengths = (5000,)
MIXED: Lengths = (1535, 0, 127, 126)
EMPTIES: Lengths = (5, 0, 2500, 0, 2600)
LONGER: Lengths = (20000,)
"""Long enough for more than 16 splits of a head, on 48 multiprocessors."""
ROW_FACTOR = 10


class Wrong(Exception):
    """What differs from the reference."""


@dataclass(frozen=True)
class EmulatedCase:
    """A variant of two warps unless `launch` says otherwise, and its lives: (lengths, multiprocessors) of `attend` and `decode`."""

    words: str
    block: int
    launch: dict[str, Value]
    attends: tuple[tuple[Lengths, int], ...] = ((ALIKE, 4), (UNLIKE, 7))
    decodes: tuple[tuple[Lengths, int], ...] = ((FULL, 4),)
    packs: bool = False
    """Prefill and unpack instead."""
    batch: int = 3
    spec: KernelSpec = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "spec", spec_of(self.words, "sm90", [workload_of("2x256")]))


SMALL: dict[str, Value] = {"kv_tile": 32, "tiles_in_flight": 2}
CASES: dict[str, EmulatedCase] = {
    "last": EmulatedCase("k4v4:h4/2:d64", 128, SMALL, ((ALIKE, 4), (UNLIKE, 7), (LONGER, 48)), ((FULL, 4),)),
    "batch": EmulatedCase("k4v4:h2/1:d64", 128, SMALL, ((MANY, 4),), ((MANY, 4),)),
    "parts": EmulatedCase("k4v4:h4/2:d64:kg64", 64, {**SMALL, "ctas_per_sm": 2}, ((UNLIKE, 7), (ALIKE, 4)), ((MIXED, 4), (FULL, 4))),
    "parts-batch": EmulatedCase("k4v4:h2/1:d64:kg64", 64, {**SMALL, "ctas_per_sm": 2}, ((MANY, 90),), ()),
    "tail": EmulatedCase("k4v4:h4/2:d64", 128, {**SMALL, "ctas_per_sm": 2}, ((ALIKE, 1), ((127, 90), 1)), ((FULL, 1),)),
    "cluster": EmulatedCase("k4v4:h4/2:d64", 128, {**SMALL, "reduction": "cluster4"}, ((ALIKE, 8), (LONG, 8)), ((FULL, 8),)),
    "two-level": EmulatedCase("k4v4:h2/1:d64", 128, {**SMALL, "reduction": "two_level"}, (((12000,), 60),), (((12000,), 60),)),
    "shares": EmulatedCase(
        "k4v4:h4/2:d64",
        128,
        {"kv_tile": 64, "tiles_in_flight": 1, "reduction": "shares"},
        ((UNLIKE, 7), (ALIKE, 4), ((1300, 1290, 1310), 7), (EMPTIES, 9)),
        ((FULL, 7), (MIXED, 7)),
    ),
    "shares-batch": EmulatedCase("k4v4:h4/2:d64", 128, {"kv_tile": 64, "tiles_in_flight": 1, "reduction": "shares"}, ((MANY, 7),), ()),
    "paged": EmulatedCase(
        "k4v4:h4/2:d64:kg64:page128", 64, SMALL, ((ALIKE, 4), (UNLIKE, 7), (tuple(range(200, 300, 10)), 4)), ((FULL, 4),)
    ),
    "key-groups": EmulatedCase("k4v4:h4/2:d64:kg64", 128, SMALL),
    "gathered": EmulatedCase("k4v4:token:page16:h4/2:d64", 16, {"kv_tile": 32, "tiles_in_flight": 4}),
    "token": EmulatedCase("k4v4:token:kg32:vg32:h4/2:d64", 128, SMALL),
    "symmetric": EmulatedCase("k8v8:token:sym:h4/2:d64", 128, SMALL),
    "queries": EmulatedCase("k4v4:q4:h8/2:d64", 128, SMALL, (((258, 130, 385), 4), ((1500,), 30)), (((126, 129, 257), 4),)),
    "int2": EmulatedCase("k2v2:h4/2:d64", 128, {"kv_tile": 64, "tiles_in_flight": 2}),
    "value-groups": EmulatedCase("k4v4:vg32:h4/2:d64", 128, SMALL),
}
PACKED: dict[str, EmulatedCase] = {
    "last": EmulatedCase("k4v4:h2/2:d64", 128, {}, packs=True),
    "batch": EmulatedCase("k4v4:h1/1:d64", 128, {}, packs=True, batch=136),
    "int2": EmulatedCase("k2v2:h2/2:d64", 128, {}, packs=True),
    "symmetric": EmulatedCase("k8v8:token:sym:h2/2:d64", 128, {}, packs=True),
    "token": EmulatedCase("k4v4:token:kg32:vg32:h2/2:d64", 128, {}, packs=True),
    "paged": EmulatedCase("k4v4:h2/2:d64:kg64:page128", 64, {}, packs=True, batch=12),
}


@contextmanager
def headers_of(templates: Path) -> Iterator[None]:
    """Emulators are built over the headers of another folder of templates."""
    kept = emulate.templates
    emulate.templates = lambda: templates
    try:
        yield
    finally:
        emulate.templates = kept


def live(case: EmulatedCase, templates: Path, folder: Path) -> None:
    """All lives of a case over these templates. Raises Wrong at the first difference."""
    with headers_of(templates):
        if case.packs:
            return pack(case, folder)
        built = Emulated(case.spec, case.block, launch(**case.launch), folder)
        shares = case.launch.get("reduction") == "shares"
    for number, (lengths, processors) in enumerate(case.attends):
        attend(built, lengths, processors, hard=number == 0, looks=2 if shares else 1)
    for lengths, processors in case.decodes:
        for backwards in (False, True):
            decode(built, lengths, processors, backwards)
    return None


def held_by(built: Emulated, lengths: Lengths, hard: bool) -> tuple[ReferenceCache, torch.Tensor]:
    """A reference cache of these lengths, and queries."""
    make = structured if hard else normal
    inputs = make(built.spec, len(lengths), max(1, *lengths), q_len=built.spec.attention.q_len, seed=1)
    held = ReferenceCache(built.spec, len(lengths), built.layout.tokens)
    held.prefill(inputs.k, inputs.v, torch.tensor(lengths, dtype=torch.int32))
    return held, inputs.q


def attend(built: Emulated, lengths: Lengths, processors: int, hard: bool, looks: int) -> None:
    """Calls with as many query tokens as the kernel holds, and with fewer. Of two looks at lengths before the turn, the second is right."""
    held, q = held_by(built, lengths, hard)
    where = f"attend at {named(lengths)}{', structured' if hard else ''}"
    for queries in sorted({q.shape[1], max(1, q.shape[1] - 2)}):
        few = q[:, :queries].contiguous()
        want = held.attend(few)
        for shown in (False, True)[:looks]:
            built.library.show(shown)
            step = Step(built, held, few, processors=processors)
            step.run()
            built.library.show(False)
            agree(where, step, want)


def decode(built: Emulated, lengths: Lengths, processors: int, backwards: bool) -> None:
    """One step: output, LSE, lengths, residuals, and the blocks that became full."""
    held, q = held_by(built, lengths, False)
    q_len, tokens = q.shape[1], built.layout.tokens
    new = normal(built.spec, len(lengths), q_len, q_len=q_len, seed=2)
    step = Step(built, held, q, (new.k, new.v), backwards, processors)
    step.run()
    where = f"decode at {named(lengths)}"
    agree(where, step, held.decode(q, new.k, new.v))
    after = [length + q_len for length in lengths]
    require(step.lengths.tolist() == after, f"{where}: lengths")
    expected, _ = packed_cache(built, held, max(after))
    kept = meaningful_bytes(built.layout)
    for b, (old, length) in enumerate(zip(lengths, after, strict=True)):
        for mine, want in zip(step.residual, held.residual(), strict=True):
            require(torch.equal(mine[b, :, : length % tokens], want[b, :, : length % tokens]), f"{where}: residual of sequence {b}")
        if length // tokens > old // tokens:
            one, other = (sequence_blocks(packed, step.table, b)[:, old // tokens] for packed in (step.packed, expected))
            require(torch.equal(one[:, kept], other[:, kept]), f"{where}: packed block of sequence {b}")


def pack(case: EmulatedCase, folder: Path) -> None:
    """Prefill in pieces, one of them beyond 3,000 tokens, then unpack."""
    from kvgen.reference.layout import packed_layout
    from kvgen.reference.quantize import torch_dtype

    layout, dtype = packed_layout(case.spec, case.block, "mma"), torch_dtype(case.spec.attention.dtype)
    module = emulate.Emulated(layout, dtype, folder)
    n, heads, page = layout.tokens, case.spec.attention.kv_heads, case.spec.cache.page
    far = 25 * n + 3 if case.batch <= 4 else n + 3
    pieces = [[n // 2, 0, far], [n // 2, 3, 5], [n + 1, n - 2, n - 5], [2, 1, 0], [2 * n - 2, n - 1, n - 1]]
    pieces = [[piece[b % 3] if b < 3 else piece[1] + b % 7 for b in range(case.batch)] for piece in pieces]
    total = [sum(piece[b] for piece in pieces) for b in range(case.batch)]
    k, v = (hard_values((case.batch, max(total) + n, heads, layout.head_dim), dtype, seed) for seed in (0, 1))
    held = empty(layout, case.batch, heads, max(total) + n, page, dtype)
    done = [0] * case.batch
    for number, piece in enumerate(pieces):
        fresh = [torch.full((case.batch, max(piece), heads, layout.head_dim), torch.nan, dtype=dtype) for _ in range(2)]
        for b, count in enumerate(piece):
            for x, new in zip((k, v), fresh, strict=True):
                new[b, :count] = x[b, done[b] : done[b] + count]
            done[b] += count
        module.pack(held, *fresh, torch.tensor(piece, dtype=torch.int32), backwards=number % 2 == 0)
        require(held.lengths.tolist() == done, f"piece {number + 1} of a prefill: lengths")
    out = [torch.full((case.batch, max(total) + 2, heads, layout.head_dim), 7.0, dtype=dtype) for _ in range(2)]
    for b, length in enumerate(done):
        blocks, full = sequence_blocks(held.packed, held.block_table, b)[:, : length // n], length // n * n
        want = pack_blocks(layout, *(to_blocks(x[b : b + 1, :full], n)[0] for x in (k, v)))
        kept = meaningful_bytes(layout)
        require(torch.equal(blocks[..., kept], want[..., kept]), f"prefill: packed blocks of sequence {b}")
        for residual, x in ((held.k_residual, k), (held.v_residual, v)):
            require(torch.equal(residual[b, :, : length % n], x[b, full:length].transpose(0, 1)), f"prefill: residual of sequence {b}")
    module.unpack(held, *out)
    for b, length in enumerate(done):
        blocks, full = sequence_blocks(held.packed, held.block_table, b)[:, : length // n], length // n * n
        for x, y, exact in zip((k, v), out, unpack_blocks(layout, blocks, dtype), strict=True):
            require(torch.equal(y[b, :full], exact.flatten(1, 2).transpose(0, 1).float().to(dtype)), f"unpack: sequence {b}")
            require(torch.equal(y[b, full:length], x[b, full:length]), f"unpack: residual of sequence {b}")


def empty(layout, batch: int, heads: int, room: int, page: int | None, dtype: torch.dtype) -> emulate.Cache:  # type: ignore[no-untyped-def]
    """A poisoned cache; pages lie backwards."""
    blocks, table = -(-room // layout.tokens), None
    packed = torch.full((batch, heads, blocks, layout.block_bytes), 0xA5, dtype=torch.uint8)
    if page is not None:
        pages = -(-room // page)
        table = torch.arange(batch * pages, dtype=torch.int32).flip(0).reshape(batch, pages)
        packed = torch.full((batch * pages, heads, page // layout.tokens, layout.block_bytes), 0xA5, dtype=torch.uint8)
    residual = torch.full((batch, heads, layout.tokens, layout.head_dim), torch.nan, dtype=dtype)
    return emulate.Cache(packed, residual, residual.clone(), torch.zeros(batch, dtype=torch.int32), table)


def agree(where: str, step: Step, want: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Output and LSE are the reference's, and counters are back at zero."""
    limit = tolerance(step.q.dtype)
    require(relative_l2(step.out, want[0]) <= limit, f"{where}: output")
    require(worst_relative_l2(step.out, want[0]) <= ROW_FACTOR * limit, f"{where}: a row of the output")
    seen = torch.isfinite(want[1])
    require(torch.equal(torch.isfinite(step.lse), seen), f"{where}: LSE of a query that sees nothing")
    require(relative_l2(step.lse[seen], want[1][seen]) <= limit, f"{where}: LSE")
    cells = len(step.lengths) * step.kernel.spec.attention.kv_heads
    require(not step.workspace.view(torch.int32)[: 4 + 33 * cells].any(), f"{where}: counters that the next call finds")


def named(lengths: Lengths) -> str:
    """Lengths in short."""
    return f"{len(lengths)} sequences of up to {max(lengths)} tokens"


def require(holds: bool, what: str) -> None:
    """Raises Wrong unless it holds."""
    if not holds:
        raise Wrong(what)
