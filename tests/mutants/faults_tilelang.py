"""Faults of the TileLang back end: its programs, and the headers of its host's side."""

from __future__ import annotations

from tests.mutants.fault import Fault

PROGRAMS = "kvgen/lower/tilelang/mma"
HEADERS = "templates/tilelang/include/kvgen"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "tilelang-splits-last", f"{PROGRAMS}/reduction.py", "tilelang", "of more than 16 splits, those from the 17th on are not combined",
        "for index in T.serial(T.ceildiv(at.splits, BATCH)):", "for index in T.serial(1):",
    ),
    Fault(
        "tilelang-counter", f"{PROGRAMS}/reduction.py", "tilelang", "the counter of arrived splits is left at one: the second call differs",
        "            k.arrivals[at.cell] = 0\n", "            k.arrivals[at.cell] = 1\n",
    ),
    Fault(
        "tilelang-rescale", f"{PROGRAMS}/softmax.py", "tilelang", "the sum of weights is not rescaled when the maximum moves",
        "r.row_sum[i] = r.row_sum[i] * r.factor[i]", "r.row_sum[i] = r.row_sum[i] * T.max(r.factor[i], 1.0)",
    ),
    Fault(
        "tilelang-limit", f"{PROGRAMS}/mask.py", "tilelang-queries", "every query token sees all new tokens",
        "T.max(0, k.q_len - 1 - token)", "T.max(0, 0 - token)",
    ),
    Fault(
        "tilelang-residual", f"{PROGRAMS}/residual.py", "tilelang-queries", "new tokens but the first are not put into the residual",
        "if T.And(token >= work.old_residual, has_free_row(p, work, r, token)):",
        "if T.And(token >= work.old_residual, token < T.min(work.old_residual + 1, p.tokens)):",
    ),
    Fault(
        "tilelang-flush", f"{PROGRAMS}/rows.py", "tilelang", "a residual that is exactly full is not packed",
        "return work.residual >= p.tokens + p.rows.local", "return work.residual > p.tokens + p.rows.local",
    ),
    Fault(
        "tilelang-page", f"{PROGRAMS}/ring.py", "tilelang-queries", "pages are looked up as if splits began at the sequence's first tile",
        "(work.first + at.warp + index * p.warps) // p.block_tiles // p.page_blocks",
        "(at.warp + index * p.warps) // p.block_tiles // p.page_blocks",
    ),
    Fault(
        "tilelang-split-end", f"{PROGRAMS}/scheduler.py", "tilelang", "the last split leaves out its last KV tile",
        "work[4] = T.max(0, T.min(work[4], work[0] * p.block_tiles - work[3]))",
        "work[4] = T.max(0, T.min(work[4], work[0] * p.block_tiles - work[3] - T.min(at.split, 1)))",
    ),
    Fault(
        "tilelang-flush-rest", f"{HEADERS}/tilelang_step.cuh", "tilelang-queries",
        "of the new tokens behind a packed block only the first is kept",
        "i < (count - first) * kVectors;", "i < (count > first ? kVectors : 0);",
    ),
    Fault(
        "tilelang-strides", f"{HEADERS}/tilelang_host.cuh", "tilelang-queries",
        "new V is read with the strides of new K's heads between tokens",
        "t.fresh_v_token = a.v_new.token_stride / kElements", "t.fresh_v_token = a.k_new.head_stride / kElements",
    ),
    Fault(
        "tilelang-workspace", f"{HEADERS}/tilelang_host.cuh", "tilelang", "sums of splits lie over their totals",
        "partial = (stats + slots * Schedule::kQRows * 8 + 127) / 128 * 128;", "partial = stats;",
    ),
    Fault(
        "tilelang-slot", f"{PROGRAMS}/scheduler.py", "tilelang",
        "each split of a planned head looks for the first one's result in its own slot",
        "place[3] = tile[6] - tile[4]", "place[3] = tile[6]",
    ),
    Fault(
        "tilelang-num-splits", f"{PROGRAMS}/scheduler.py", "tilelang", "every work tile writes the output as if its head had no other",
        "tile[4], tile[5], place[3]", "tile[4], 1, place[3]",
    ),
    Fault(
        "tilelang-next-tile", f"{PROGRAMS}/scheduler.py", "tilelang", "a worker does its first work tile only",
        "T.serial(bounds[0], bounds[1])", "T.serial(bounds[0], T.min(bounds[1], bounds[0] + 1))",
    ),
    Fault(
        "tilelang-empty", f"{PROGRAMS}/scheduler.py", "tilelang", "the output of the last empty sequence of a plan is not written",
        "k.plan[0] + k.ctas - 1 - worker", "k.plan[0] + k.ctas - 2 - worker",
    ),
)  # fmt: skip
