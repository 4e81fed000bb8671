"""Faults in the calls that engines make: no LSE, a scale, a plan, strides, a block table within a wider one, many query tokens."""

from __future__ import annotations

from tests.mutants.fault import Fault

CPU = "templates/cpu/include/kvgen"
CUDA = "templates/cuda/include/kvgen"


def _in(file: str, *faults: tuple[str, ...]) -> tuple[Fault, ...]:
    """(name, case, what it breaks, find, replace[, nth]) of one header; the names begin with `call-`."""
    return tuple(
        Fault(f"call-{name}", file, case, breaks, find, replace, int(rest[0]) if rest else 0)
        for name, case, breaks, find, replace, *rest in faults
    )


def _rows(view: str, strides: str) -> str:
    """The address of a row of the CPU's tensor `view`, by an expression for each of its three strides."""
    batch, token, head = strides.split()
    return f"{view}.template as<Element>() + {batch} + {token} + {head}"


V_NEW = "row_of<Element>(call_.v_new, b, at - length, head.kv_head)"
OUT = "row_of<Element>(call_.out, head.b, token, q_head)"
FRESH_V = "fresh(v_, position)"
KEPT_V = "std::memcpy(cache_.v_row(batch_, head_, position), fresh(v_, position)"
PACKED_V = "cache_.v_row(batch_, head_, first + t) : fresh(v_, first + t);"
DEFAULT_SCALE = "static_cast<float>(1 / std::sqrt(static_cast<double>(C::kHeadDim)))"
FACTOR = "const float factor = call_.scale * kLog2e;"


def _scaled(scale: str) -> str:
    """What multiplies a query on the CPU, with another scale."""
    return f"const float factor = ({scale}) * kLog2e;"


CPU_FAULTS: tuple[Fault, ...] = (
    *_in(
        f"{CPU}/attend.hpp",
        (
            "lse-output", "splits", "the output is 12 % too large where no LSE is asked for",
            "load<F32>(acc + c) * inverse);", "load<F32>(acc + c) * (call_.lse ? inverse : inverse * 1.12f));",
        ),
        (
            "lse-decode", "splits", "the output of a decode step is 12 % too large where no LSE is asked for",
            "load<F32>(acc + c) * inverse);", "load<F32>(acc + c) * (call_.lse || !decoding() ? inverse : inverse * 1.12f));",
        ),
        (
            "lse-merge", "splits", "splits are merged by weights that only a call with an LSE makes right",
            "split[C::kHeadDim], split[C::kHeadDim + 1]);", "split[C::kHeadDim], split[C::kHeadDim + 1] * (call_.lse ? 1 : 1.5f));",
        ),
        (
            "lse-queries", "splits-q4", "the output of the second query token on is not written where no LSE is asked for",
            f"Element* out = {OUT};", f"if (!call_.lse && token > 0) return;\n    Element* out = {OUT};",
        ),
        (
            "lse-plan", "splits", "the LSE is not written where there is a plan",
            "if (call_.lse)\n", "if (call_.lse && !call_.plan)\n",
        ),
        (
            "lse-empty", "splits", "the output of an empty sequence of a plan is not written where no LSE is asked for",
            "void zero(int64_t b) const {", "void zero(int64_t b) const {\n    if (!call_.lse) return;",
        ),
        ("scale-ignored", "splits", "the scale is always 1 / sqrt(head_dim)", FACTOR, _scaled(DEFAULT_SCALE)),
        (
            "scale-plan", "splits", "the scale is used with a plan alone",
            FACTOR, _scaled(f"call_.plan ? call_.scale : {DEFAULT_SCALE}"),
        ),
        (
            "scale-no-plan", "splits", "the scale is not used with a plan",
            FACTOR, _scaled(f"call_.plan ? {DEFAULT_SCALE} : call_.scale"),
        ),
        (
            "scale-decode", "splits", "the scale is used by attend and not by decode",
            FACTOR, _scaled(f"decoding() ? {DEFAULT_SCALE} : call_.scale"),
        ),
        ("scale-sign", "splits", "the sign of the scale is lost", FACTOR, _scaled("std::fabs(call_.scale)")),
        (
            "scale-softcap", "window", "with a soft cap the scale is always 1 / sqrt(head_dim)",
            FACTOR, _scaled(f"C::Modifier::active ? {DEFAULT_SCALE} : call_.scale"),
        ),
        (
            "sinks-lse", "unquantized", "learned sinks do not join the denominator where no LSE is asked for",
            "if (peak != -kInfinity) {", "if (peak != -kInfinity && call_.lse) {",
        ),
        (
            "sinks-plan", "unquantized", "learned sinks do not join the denominator where there is a plan",
            "if (peak != -kInfinity) {", "if (peak != -kInfinity && !call_.plan) {",
        ),
        (
            "value-batch", "batch", "new V is attended with the strides of new K between sequences",
            V_NEW, _rows("call_.v_new", "b*call_.k_new.stride[0] (at-length)*call_.v_new.stride[1] head.kv_head*call_.v_new.stride[2]"),
        ),
        (
            "value-token", "splits-q4", "new V is attended with the strides of new K between tokens",
            V_NEW, _rows("call_.v_new", "b*call_.v_new.stride[0] (at-length)*call_.k_new.stride[1] head.kv_head*call_.v_new.stride[2]"),
        ),
        (
            "value-head", "paged", "new V is attended with the strides of new K between heads",
            V_NEW, _rows("call_.v_new", "b*call_.v_new.stride[0] (at-length)*call_.v_new.stride[1] head.kv_head*call_.k_new.stride[2]"),
        ),
        (
            "out-batch", "batch", "the output is written with the query's strides between sequences",
            OUT, _rows("call_.out", "head.b*call_.q.stride[0] token*call_.out.stride[1] q_head*call_.out.stride[2]"),
        ),
        (
            "out-token", "splits-q4", "the output is written with the query's strides between tokens",
            OUT, _rows("call_.out", "head.b*call_.out.stride[0] token*call_.q.stride[1] q_head*call_.out.stride[2]"),
        ),
        (
            "out-head", "splits", "the output is written with the query's strides between heads",
            OUT, _rows("call_.out", "head.b*call_.out.stride[0] token*call_.out.stride[1] q_head*call_.q.stride[2]"),
        ),
        (
            "query-heads", "splits", "the heads of a query are taken to lie side by side",
            "const Element* q = row_of<Element>(call_.q, head.b, token, q_head);",
            "const Element* q = row_of<Element>(call_.q, head.b, token, 0) + q_head * C::kHeadDim;",
        ),
        (
            "mask-second", "splits-q4", "the second query token is masked as the first",
            "state.to[r] = before + token + 1;", "state.to[r] = before + (token == 1 ? 0 : token) + 1;",
        ),
        (
            "mask-third", "splits-q4", "of three query tokens, the last sees one token too few",
            "state.to[r] = before + token + 1;", "state.to[r] = before + token + 1 - (call_.q_len == 3 && token == 2);",
        ),
        (
            "mask-planned", "window", "with a plan, every query token sees all new tokens",
            "state.to[r] = before + token + 1;", "state.to[r] = before + (call_.plan ? call_.q_len - 1 : token) + 1;",
        ),
        (
            "extend-token", "splits", "the 65th query token of a call is not attended",
            f"Element* out = {OUT};", f"if (token == 64) return;\n    Element* out = {OUT};",
        ),
        (
            "extend-mask", "splits", "a block of query rows beyond the fourth is masked as the first",
            "state.to[r] = before + token + 1;", "state.to[r] = before + (head.first_row < 4 * Rows<C>::most ? token : r / group) + 1;",
        ),
        (
            "extend-value", "splits", "new tokens from the 65th on have the V of the 64th",
            V_NEW, "row_of<Element>(call_.v_new, b, at - length < 64 ? at - length : 63, head.kv_head)",
        ),
    ),
    *_in(
        f"{CPU}/append.hpp",
        (
            "kept-token", "splits-q4", "the residual takes V with the strides of K between tokens",
            KEPT_V, KEPT_V.replace(FRESH_V, _rows("v_", "batch_*v_.stride[0] (position-length_)*k_.stride[1] head_*v_.stride[2]")),
        ),
        (
            "kept-batch", "batch", "the residual takes V with the strides of K between sequences",
            KEPT_V, KEPT_V.replace(FRESH_V, _rows("v_", "batch_*k_.stride[0] (position-length_)*v_.stride[1] head_*v_.stride[2]")),
        ),
        (
            "packed-head", "paged", "blocks are packed of V with the strides of K between heads",
            PACKED_V,
            f"{PACKED_V.partition('fresh')[0]}{_rows('v_', 'batch_*v_.stride[0] (first+t-length_)*v_.stride[1] head_*k_.stride[2]')};",
        ),
        (
            "extend-kept", "splits", "of more than 64 new tokens those from the 65th on do not reach the residual",
            "void keep(int64_t position) const {", "void keep(int64_t position) const {\n    if (position - length_ >= 64) return;",
        ),
    ),
    *_in(
        f"{CPU}/cache.hpp",
        (
            "table-columns", "paged", "rows of the block table are taken to lie side by side",
            "[batch * cache.block_table.stride[0] + index]", "[batch * cache.block_table.size[1] + index]",
        ),
    ),
    *_in(
        f"{CPU}/module.hpp",
        (
            "advance-ignored", "splits", "a decode step advances the lengths whether it is to or not",
            "if (decode && call.advance)", "if (decode)",
        ),
        (
            "advance-without-plan", "splits", "a decode step without a plan advances the lengths whether it is to or not",
            "if (decode && call.advance)", "if (decode && (call.advance || !call.plan))",
        ),
        (
            "stay-appends-nothing", "splits", "a decode step that neither advances the lengths nor has a plan appends nothing",
            "if (decode) append(", "if (decode && (call.advance || call.plan)) append(",
        ),
        (
            "plan-q-len", "prompt", "a plan is made for one query token, however many there are",
            'const StepShape<C> shape("plan", batch, call.q_len,', 'const StepShape<C> shape("plan", batch, 1,',
        ),
        (
            "plan-lengths", "splits", "a step over a plan appends behind what the cache's first sequence holds",
            "b, head, step.lengths[b], step.appended[b]);", "b, head, step.lengths[call.plan ? 0 : b], step.appended[b]);",
        ),
        (
            "unpack-strides", "batch", "the unquantized tokens of V are unpacked with the strides of K between tokens",
            "std::memcpy(row_of<Element>(call.v, b, position, head),",
            "std::memcpy(call.v.template as<Element>() + b * call.v.stride[0] + position * call.k.stride[1] + head * call.v.stride[2],",
        ),
    ),
)  # fmt: skip


CUDA_V = "return row(v_residual, args.v_new, token);"
LIKE_K = "{args.v.data, args.k.batch_stride, args.k.token_stride, args.k.head_stride}"
CUDA_OUT = "Element* to = args.out.row<Element>(head.sequence, query, q_head) + channel;"
CUDA_SCALE = "args.scale * 1.4426950408889634f"
CUDA_DEFAULT = "(1.f / sqrtf(static_cast<float>(Traits::kHeadDim)))"
CUDA_JOIN = "if constexpr (Traits::Sinks::kActive) factor ="


def _cuda_v(of: str) -> str:
    """New V with strides of its own or of new K: `kvv` has K's between sequences, `vvk` between heads."""
    strides = ", ".join(f"args.{x}_new.{which}_stride" for x, which in zip(of, ("batch", "token", "head"), strict=True))
    return CUDA_V.replace("args.v_new", f"Rows{{args.v_new.data, {strides}}}")


def _cuda_out(*of: str) -> str:
    """Where a row of the output goes, with strides of `out` or of `q`."""
    at = zip(("head.sequence", "query", "q_head"), of, ("batch", "token", "head"), strict=True)
    return f"Element* to = static_cast<Element*>(args.out.data) + {' + '.join(f'{x} * args.{y}.{z}_stride' for x, y, z in at)} + channel;"


CUDA_FAULTS: tuple[Fault, ...] = (
    *_in(
        f"{CUDA}/epilogue/output.cuh",
        (
            "lse-output", "last", "the output is 12 % too large where no LSE is asked for",
            "__fdividef(factor, total.row_sum)", "__fdividef(args.lse ? factor : 1.12f * factor, total.row_sum)",
        ),
        (
            "lse-decode", "last", "the output of a decode step is 12 % too large where no LSE is asked for",
            "__fdividef(factor, total.row_sum)", "__fdividef(args.lse || !args.k_new.data ? factor : 1.12f * factor, total.row_sum)",
        ),
        (
            "lse-queries", "queries", "the output of the second query token on is not written where no LSE is asked for",
            "if (query >= args.q_len) return;", "if (query >= args.q_len || (query > 0 && !args.lse)) return;",
        ),
        (
            "lse-empty", "planned", "the output of an empty sequence is not written where no LSE is asked for",
            "for (int query = 0; query < args.q_len; ++query)", "for (int query = 0; query < (args.lse ? args.q_len : 0); ++query)",
        ),
        (
            "lse-plan", "last", "the LSE is not written where there is a plan",
            "if (!args.lse) return;", "if (!args.lse || args.plan) return;",
        ),
        (
            "sinks-lse", "unquantized", "learned sinks do not join the denominator where no LSE is asked for",
            CUDA_JOIN, "if (Traits::Sinks::kActive && args.lse)\n    if constexpr (Traits::Sinks::kActive) factor =",
        ),
        (
            "sinks-plan", "unquantized", "learned sinks do not join the denominator where there is a plan",
            CUDA_JOIN, "if (Traits::Sinks::kActive && !args.plan)\n    if constexpr (Traits::Sinks::kActive) factor =",
        ),
        ("out-batch", "last", "the output is written with the query's strides between sequences", CUDA_OUT, _cuda_out("q", "out", "out")),
        ("out-token", "queries", "the output is written with the query's strides between tokens", CUDA_OUT, _cuda_out("out", "q", "out")),
        ("out-head", "last", "the output is written with the query's strides between heads", CUDA_OUT, _cuda_out("out", "out", "q")),
    ),
    *_in(
        f"{CUDA}/mainloop/query.cuh",
        ("scale-ignored", "last", "the scale is always 1 / sqrt(head_dim)", CUDA_SCALE, CUDA_SCALE.replace("args.scale", CUDA_DEFAULT)),
        (
            "scale-plan", "last", "the scale is used with a plan alone",
            CUDA_SCALE, CUDA_SCALE.replace("args.scale", f"(args.plan ? args.scale : {CUDA_DEFAULT})"),
        ),
        (
            "scale-no-plan", "last", "the scale is not used with a plan",
            CUDA_SCALE, CUDA_SCALE.replace("args.scale", f"(args.plan ? {CUDA_DEFAULT} : args.scale)"),
        ),
        (
            "scale-decode", "last", "the scale is used by attend and not by decode",
            CUDA_SCALE, CUDA_SCALE.replace("args.scale", f"(args.k_new.data ? {CUDA_DEFAULT} : args.scale)"),
        ),
        ("scale-sign", "last", "the sign of the scale is lost", CUDA_SCALE, CUDA_SCALE.replace("args.scale", "fabsf(args.scale)")),
        (
            "query-heads", "last", "the heads of a query are taken to lie side by side",
            "query, head.head * Traits::kGroup + head_row % Traits::kGroup);",
            "query, 0) + (head.head * Traits::kGroup + head_row % Traits::kGroup) * Traits::kHeadDim;",
        ),
    ),
    *_in(
        f"{CUDA}/mainloop/residual.cuh",
        ("value-batch", "last", "new V is read with the strides of new K between sequences", CUDA_V, _cuda_v("kvv")),
        ("value-token", "queries", "new V is read with the strides of new K between tokens", CUDA_V, _cuda_v("vkv")),
        ("value-head", "last", "new V is read with the strides of new K between heads", CUDA_V, _cuda_v("vvk")),
        (
            "stay-appends-nothing", "last", "a decode step that neither advances the lengths nor has a plan appends nothing",
            "if (row >= valid || token < residual.old) continue;",
            "if (row >= valid || token < residual.old || !(residual.args.advance || residual.args.plan)) continue;",
        ),
    ),
    *_in(
        f"{CUDA}/mainloop/mask.cuh",
        (
            "mask-second", "queries", "the second query token is masked as the first",
            "return length - q_len + Traits::head_row(run, row) / Traits::kGroup;",
            "const int query = Traits::head_row(run, row) / Traits::kGroup;\n    return length - q_len + (query == 1 ? 0 : query);",
        ),
        (
            "mask-few", "queries", "fewer query tokens than the kernel holds are masked as if there were as many",
            "return length - q_len + Traits", "return length - Traits::kMaxQLen + Traits",
        ),
    ),
    *_in(
        f"{CUDA}/mainloop/attend_static.cuh",
        (
            "advance-ignored", "last", "a decode step without a plan advances the lengths whether it is to or not",
            "const int readers = kAppend && args.advance ? count_reader(work) : 0;",
            "const_cast<bool&>(args.advance) = true;\n  const int readers = kAppend && args.advance ? count_reader(work) : 0;",
        ),
    ),
    *_in(
        f"{CUDA}/pipeline/pipeline.cuh",
        (
            "table-columns", "paged", "rows of the block table are taken to lie side by side",
            "static_cast<int64_t>(head.sequence) * args.cache.table_stride;",
            "static_cast<int64_t>(head.sequence) * (args.cache.blocks / args.cache.page_blocks);",
        ),
    ),
    *_in(
        f"{CUDA}/host/args.cuh",
        (
            "table-columns-packed", "paged", "packing takes the rows of the block table to lie side by side",
            "static_cast<int64_t>(batch) * table_stride + block", "static_cast<int64_t>(batch) * (blocks / page_blocks) + block",
        ),
    ),
    *_in(
        f"{CUDA}/pack/pack.cuh",
        (
            "kept-strides", "last", "the residual takes V of a prefill with the strides of K",
            "fresh(args.v, position), k_residual", f"fresh({LIKE_K}, position), k_residual",
        ),
        (
            "packed-strides", "last", "blocks of a prefill are packed of V with the strides of K",
            ": fresh(args.v, block * kTokens);",
            f": fresh({LIKE_K}, block * kTokens);",
        ),
    ),
    *_in(
        f"{CUDA}/pack/append_rows.cuh",
        (
            "appended-strides", "unquantized", "tokens behind a packed block take V with the strides of K between sequences",
            "load16(args.v.row<const Element>(sequence, token, head) + channel);",
            "load16(args.v.row<const Element>(0, token, head) + sequence * args.k.batch_stride + channel);",
        ),
    ),
    *_in(
        f"{CUDA}/pack/unpack.cuh",
        (
            "unpack-strides", "last", "V is unpacked with the strides of K between tokens",
            "return args.v.row<Element>(sequence, start + token, head); };",
            "return args.v.row<Element>(sequence, 0, head) + (start + token) * args.k.token_stride; };",
        ),
    ),
)  # fmt: skip
