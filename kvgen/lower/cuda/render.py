"""Source text of a variant: constants and instantiations over the headers."""

from __future__ import annotations

from kvgen._resources import templates
from kvgen.arch import GPUS, Target
from kvgen.format.layout import Operand, PackedLayout
from kvgen.format.window import window_places
from kvgen.lower.backend import FUNCTIONS, Source
from kvgen.lower.cuda.shared import PLANNED, cluster_size, q_tiles, shared_memory
from kvgen.lower.gpu import pack_memory
from kvgen.lower.schedule import Params
from kvgen.spec import KernelSpec

_SELECTORS = {"mean_abs": "mean_abs", "range": "range", "static": "fixed"}
"""`static` is a word of C++."""
_ELEMENTS = {"float16": "__half", "bfloat16": "__nv_bfloat16"}


def source(spec: KernelSpec, layout: PackedLayout, launch: Params, target: Target) -> Source:
    """The module of one variant. The spec's name, arch and workloads leave no trace, so that equal variants are one."""
    from kvgen.lower.template import reached_headers, render

    modifier, modifier_header = ("Softcap<Cap>", "softcap") if spec.attention.softcap else ("NoModifier", None)
    text = render(
        "cuda/module.cu.jinja",
        layout=layout,
        key=_quant(layout.key),
        value=_quant(layout.value),
        element=_ELEMENTS[spec.attention.dtype],
        attention=spec.attention,
        cache=spec.cache,
        q_tiles=q_tiles(spec),
        page=spec.cache.page or 0,
        window_places=window_places(spec, layout.tokens),
        launch=launch,
        pack_memory=pack_memory(layout),
        reduction=launch.text("reduction").rstrip("0123456789"),
        cluster=cluster_size(launch.text("reduction")),
        static_memory=shared_memory(spec, layout, launch),
        planned_memory=shared_memory(spec, layout, Params({**launch, **PLANNED})),
        overlap=GPUS[target].dependent_launch,
        mask=f"SlidingWindow<{spec.attention.window}>" if spec.attention.window else "CausalMask",
        modifier=modifier,
        modifier_header=modifier_header,
        sinks="LearnedSinks" if spec.attention.sinks else "NoSinks",
    )
    include = tuple(templates() / part / "include" for part in ("cuda", "common"))
    return Source(text, "cuda", target, include, headers=reached_headers(text, include), functions=FUNCTIONS)


def _quant(op: Operand) -> str:
    """The C++ type of K's or V's format."""
    boost = f", {op.boost.channels}, kvgen::Select::{_SELECTORS[op.boost.select]}" if op.boost else ""
    return f"kvgen::Quant<{op.bits}, kvgen::Axis::{op.axis}, {op.group}, {str(op.zero).lower()}{boost}>"
