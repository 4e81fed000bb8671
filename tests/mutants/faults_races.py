"""Faults that leave two accesses without an order, or one misaligned: most outputs stay right in the emulator, whose checks report them."""

from __future__ import annotations

from tests.mutants.fault import Fault
from tests.mutants.faults_cuda import _in

CTA, WARP = "__syncthreads()", "__syncwarp()"


def _without(what: str, header: str, *faults: tuple[str, ...]) -> tuple[Fault, ...]:
    """(name, case, what it breaks, text) of one header: the text loses `what`, which stands in it as `~`."""
    return _in(header, *((name, case, breaks, text.replace("~", what), text.replace("~", "")) for name, case, breaks, text in faults))


FAULTS: tuple[Fault, ...] = (
    *_without(
        CTA,
        "epilogue/store",
        ("merge-published", "last", "warps merge states that others still publish", "~;\n    store_result"),
        (
            "merge-again", "queries", "the states of a tile of query rows are published over those that others still merge",
            "if (tile + 1 < Traits::kQTiles) ~;",
        ),
    ),
    *_without(
        CTA,
        "epilogue/split_reduction",
        (
            "splits-stored", "last", "a CTA arrives before all its threads have stored their partial result",
            "~;\n    if (threadIdx.x == 0) flags[0] = last",
        ),
        ("splits-told", "last", "threads read whether their CTA is the last one before it is known", "last(head, slots);\n    ~;"),
        (
            "groups-stored", "two-level", "a CTA arrives at its group before all its threads have stored their partial result",
            "~;\n    if (threadIdx.x == 0) flags[0] = arrive_last",
        ),
    ),
    *_in(
        "epilogue/split_reduction",
        (
            "splits-relaxed", "last", "CTAs arrive with an atomic that releases nothing",
            "ptx::arrive(counter) == expected - 1", "atomicAdd(counter, 1) == expected - 1",
        ),
    ),
    *_in(
        "epilogue/cluster_reduction",
        ("cluster-initialized", "cluster", "mbarriers are not fenced before other CTAs use them", "ptx::barrier_init_fence();", ""),
    ),
    *_without(
        WARP,
        "pipeline/ring",
        ("ring-stage", "last", "a lane reads what others copied, when its own copies have arrived", "kOthers - 3 : 0)>();\n    }\n    ~;"),
        ("ring-release", "last", "a stage is refilled while other lanes read it", "void release(int) { ~; }"),
    ),
    *_without(
        "ptx::copy_commit()",
        "pipeline/ring",
        ("ring-commit", "last", "copies are not committed before they are waited for", "~;\n  }\n  // Waits"),
    ),
    *_without(
        CTA,
        "mainloop/attend_static",
        (
            "query-published", "last", "queries are read while other warps publish them",
            "loader.publish(args, shared, warp, lane);\n  ~;\n#if KVGEN_SM90",
        ),
    ),
    *_in(
        "mainloop/attend_static",
        (
            "early-copies", "last", "copies of a tile beyond the sequence may still arrive where warps publish their states",
            "if constexpr (kFillEarly) ptx::copy_wait_all();", "",
        ),
    ),
    *_without(
        CTA,
        "mainloop/attend_planned",
        (
            "work-stored", "planned", "the queries of a work tile are published while the last one's result is stored",
            "flushes |= kAppend && residual.fills_block();\n    ~;",
        ),
        ("work-published", "planned", "a work tile's result is stored while warps publish their states", "if (index > 0) {\n      ~;"),
        ("ends-stored", "planned", "a CTA arrives before all its threads have stored its last result", "Traits::kQTiles - 1);\n  ~;"),
    ),
    *_without(
        WARP,
        "mainloop/attend_planned",
        ("work-arrived", "planned", "lanes read the next work tile before others' copies have arrived", "ptx::copy_wait_all();\n    ~;"),
    ),
    *_without(
        WARP,
        "schedule/work_queue",
        (
            "work-confirmed", "planned", "the first work tile is loaded again while other lanes read the speculative one",
            "const int guess = range_.begin;\n    ~;",
        ),
        ("work-first", "planned", "lanes read the first work tile before others have stored its fields", "= field;\n    ~;"),
    ),
    *_without(
        WARP,
        "mainloop/keys",
        (
            "products-stored", "last", "lanes take each other's products before they are stored",
            "~;\n#pragma unroll\n    for (int s = 0; s < kStepSubtiles; ++s) {\n      // The second",
        ),
    ),
    *_without(
        CTA,
        "schedule/plan_kernel",
        ("sums-warps", "all", "sums over warps are made before all warps have stored theirs", "~;\n    // Every warp adds"),
        ("plan-read", "planned", "ranges are counted of sequences that other threads have not read yet", "sums.total[1] >> 16;\n    ~;"),
        ("plan-counted", "planned", "the ranges that warps count are added before all have counted", "[lane] = ranges;\n  ~;"),
        ("plan-laid-out", "all", "work tiles are written before all positions are known", "positions += sums.total[0];\n    ~;"),
    ),
    *_without(
        CTA,
        "pack/pack",
        ("block-completed", "last", "a begun block is packed while other threads complete it", "if (block >= full) return;\n    ~;"),
    ),
    *_without(
        CTA,
        "pack/quantize",
        ("scalers-made", "last", "codes are made before all threads have made their scalers", "(smem, i); });\n    ~;"),
        ("ranges-found", "last", "scalers are made before all warps have found the extremes", "(row, smem);\n    ~;"),
        ("boosted-over", "boost", "boosted channels are packed while their codes of two bits are", "if constexpr (kBoosted) {\n      ~;"),
    ),
    *_in(
        "pack/quantize",
        (
            "words-wide", "boost", "a word is stored through a pointer to two",
            "*reinterpret_cast<uint32_t*>(address) = words[0];", "reinterpret_cast<uint2*>(address)->x = words[0];",
        ),
    ),
    *_without(
        CTA,
        "pack/boost",
        ("boost-summed", "boost", "channels are ranked before all have summed", "(k_row, group, smem);\n    ~;\n  }\n  const double"),
        ("boost-chosen", "boost", "the boost index counts channels before all are chosen", "< Format::kBoosted;\n    ~;"),
    ),
    *_in(
        "mainloop/query",
        (
            "half-run-wide", "half-run", "a lane loads 16 bytes of a half run, of which it uses eight",
            "const uint2 v = ptx::load_shared8(at);", "const uint4 v = ptx::load_shared16(at);",
        ),
    ),
)  # fmt: skip
