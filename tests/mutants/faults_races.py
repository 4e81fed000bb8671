"""Faults that leave two accesses without an order, or one misaligned: the emulator computes the right output, its checks report them."""

from __future__ import annotations

from tests.mutants.fault import Fault
from tests.mutants.faults_cuda import _in

CTA, WARP = "__syncthreads();", "__syncwarp();"

FAULTS: tuple[Fault, ...] = (
    *_in(
        "epilogue/store",
        ("merge-published", "last", "warps merge states that others still publish", f"{CTA}\n    store_result", "store_result"),
        (
            "merge-again", "queries", "the states of a tile of query rows are published over those that others still merge",
            f"if (tile + 1 < Traits::kQTiles) {CTA}", "",
        ),
    ),
    *_in(
        "epilogue/split_reduction",
        (
            "splits-stored", "last", "a CTA arrives before all its threads have stored their partial result",
            f"{CTA}\n    if (threadIdx.x == 0) flags[0] = last", "if (threadIdx.x == 0) flags[0] = last",
        ),
        (
            "splits-told", "last", "threads read whether their CTA is the last one before it is known",
            f"last(head, slots);\n    {CTA}", "last(head, slots);",
        ),
        (
            "splits-relaxed", "last", "CTAs arrive with an atomic that releases nothing",
            "ptx::arrive(counter) == expected - 1", "atomicAdd(counter, 1) == expected - 1",
        ),
        (
            "groups-stored", "two-level", "a CTA arrives at its group before all its threads have stored their partial result",
            f"{CTA}\n    if (threadIdx.x == 0) flags[0] = arrive_last", "if (threadIdx.x == 0) flags[0] = arrive_last",
        ),
    ),
    *_in(
        "epilogue/append",
        ("flush-scratch", "last", "packing begins while other warps use the shared memory that it takes", f"{CTA}\n  pack_block", "pack_block"),
    ),
    *_in(
        "epilogue/cluster_reduction",
        ("cluster-initialized", "cluster", "mbarriers are not fenced before other CTAs use them", "ptx::barrier_init_fence();", ""),
        ("cluster-began", "cluster", "CTAs send to others that may not have begun", "if (q_tile == 0) ptx::cluster_wait();", ""),
    ),
    *_in(
        "pipeline/ring",
        (
            "ring-stage", "last", "a lane reads what other lanes copied, when its own copies have arrived",
            f"kOthers - 3 : 0)>();\n    }}\n    {WARP}", "kOthers - 3 : 0)>();\n    }",
        ),
        ("ring-release", "last", "a stage is refilled while other lanes read it", f"void release(int) {{ {WARP} }}", "void release(int) {}"),
        (
            "ring-commit", "last", "copies are not committed before they are waited for",
            "ptx::copy_commit();\n  }\n  // Waits", "}\n  // Waits",
        ),
    ),
    *_in(
        "mainloop/attend_static",
        ("query-published", "last", "queries are read while other warps publish them", f"loader.publish(args, shared, warp, lane);\n  {CTA}", "loader.publish(args, shared, warp, lane);"),
        (
            "early-copies", "last", "copies of a tile beyond the sequence may still arrive where warps publish their states",
            "if constexpr (kFillEarly) ptx::copy_wait_all();", "",
        ),
        ("launch-before", "last", "a launch does not wait for the one before it", "ptx::griddepcontrol_wait();", ""),
    ),
    *_in(
        "mainloop/attend_planned",
        ("work-stored", "planned", "the queries of a work tile are published while the last one's result is stored",
         "flushes |= kAppend && residual.fills_block();\n    __syncthreads();", "flushes |= kAppend && residual.fills_block();"),
        ("work-published", "planned", "a work tile's result is stored while warps publish their states",
         f"if (index > 0) {{\n      {CTA}", "if (index > 0) {"),
        ("work-arrived", "planned", "lanes read the next work tile before the copies of others have arrived",
         f"ptx::copy_wait_all();\n    {WARP}", "ptx::copy_wait_all();"),
        ("work-copies", "planned", "the next work tile is read before its copy has arrived",
         f"ptx::copy_wait_all();\n    {WARP}", WARP),
        ("ends-stored", "planned", "a CTA arrives before all its threads have stored its last result",
         f"Traits::kQTiles - 1);\n  {CTA}", "Traits::kQTiles - 1);"),
    ),
    *_in(
        "schedule/work_queue",
        ("work-confirmed", "planned", "the first work tile is loaded again while other lanes read the speculative one",
         f"const int guess = range_.begin;\n    {WARP}", "const int guess = range_.begin;"),
        ("work-first", "planned", "lanes read the first work tile before others have stored its fields", f"= field;\n    {WARP}", "= field;"),
    ),
    *_in(
        "mainloop/subtile",
        ("products-stored", "last", "lanes take each other's products before they are stored", f"{WARP}\n#pragma unroll\n    for (int s = 0; s < kStepSubtiles; ++s) {{\n      const uint4 a", "#pragma unroll\n    for (int s = 0; s < kStepSubtiles; ++s) {\n      const uint4 a"),
        ("products-over-codes", "last", "products are stored over codes that other lanes read",
         f"{WARP}\n#pragma unroll\n    for (int s = 0; s < kStepSubtiles; ++s)\n      ptx::store_shared16", "#pragma unroll\n    for (int s = 0; s < kStepSubtiles; ++s)\n      ptx::store_shared16"),
    ),
    *_in(
        "schedule/plan_kernel",
        ("sums-warps", "all", "sums over warps are made before all warps have stored theirs", f"{CTA}\n    if (warp < 2)", "if (warp < 2)"),
        ("sums-again", "all", "the next sums are stored while other warps read these", f"total[i] = warps[i][31];\n    {CTA}", "total[i] = warps[i][31];"),
        ("plan-laid-out", "all", "work tiles are written before all positions are known", f"lay_out_sequences(args, shared);\n  {CTA}", "lay_out_sequences(args, shared);"),
    ),
    *_in(
        "pack/pack",
        ("block-completed", "last", "a begun block is packed while other threads complete it", f"if (block >= full) return;\n    {CTA}", "if (block >= full) return;"),
    ),
    *_in(
        "pack/quantize",
        ("scalers-made", "last", "codes are made before all threads have made their scalers", f"levels_of<Format, kWhich>(smem, i); }});\n    {CTA}", "levels_of<Format, kWhich>(smem, i); });"),
        ("ranges-found", "last", "scalers are made before all warps have found the extremes", f"(row, smem);\n    {CTA}", "(row, smem);"),
        ("boosted-over", "boost", "boosted channels are packed while their codes of two bits are", f"if constexpr (kBoosted) {{\n      {CTA}", "if constexpr (kBoosted) {"),
        ("operands", "channel-groups", "V's extremes are stored while other warps read K's scalers", f"if constexpr (Format::Key::kPerChannel && Format::Value::kPerChannel) {CTA}", ""),
        ("words-wide", "last", "single words are stored as two", "*reinterpret_cast<uint32_t*>(address) = words[0];", "reinterpret_cast<uint2*>(address)->x = words[0];"),
    ),
    *_in(
        "pack/boost",
        ("boost-summed", "boost", "channels are ranked before all threads have summed their magnitudes", f"(k_row, group, smem);\n    {CTA}\n  }}\n  const double", "(k_row, group, smem);\n  }\n  const double"),
        ("boost-chosen", "boost", "the boost index counts channels before all are chosen", f"< Format::kBoosted;\n    {CTA}", "< Format::kBoosted;"),
    ),
    *_in(
        "mainloop/query",
        ("half-run-wide", "half-run", "a lane loads 16 bytes of a half run, of which it uses eight",
         "const uint2 v = ptx::load_shared8(at);", "const uint4 v = ptx::load_shared16(at);"),
    ),
)
