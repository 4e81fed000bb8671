"""Source text of a variant: constants and instantiations over the headers."""

from __future__ import annotations

from kvgen._resources import templates
from kvgen.arch import GPUS, Target
from kvgen.format.constants import constants_of
from kvgen.format.layout import PackedLayout
from kvgen.lower.backend import FUNCTIONS, Source
from kvgen.lower.cuda.shared import PLANNED, cluster_size, q_tiles, shared_memory
from kvgen.lower.gpu import pack_memory
from kvgen.lower.modifier import modifier_of
from kvgen.lower.schedule import Params
from kvgen.spec import KernelSpec


def source(spec: KernelSpec, layout: PackedLayout, launch: Params, target: Target) -> Source:
    """The module of one variant. The spec's name, arch and workloads leave no trace, so that equal variants are one."""
    from kvgen.lower.template import reached_headers, render

    text = render(
        "cuda/module.cu.jinja",
        constants=constants_of(spec, layout),
        attention=spec.attention,
        q_tiles=q_tiles(spec),
        launch=launch,
        pack_memory=pack_memory(layout),
        reduction=launch.text("reduction").rstrip("0123456789"),
        cluster=cluster_size(launch.text("reduction")),
        static_memory=shared_memory(spec, layout, launch),
        planned_memory=shared_memory(spec, layout, Params({**launch, **PLANNED})),
        overlap=GPUS[target].dependent_launch,
        mask=f"SlidingWindow<{spec.attention.window}>" if spec.attention.window else "CausalMask",
        modifier=modifier_of(spec.attention),
        sinks="LearnedSinks" if spec.attention.sinks else "NoSinks",
    )
    include = tuple(templates() / part / "include" for part in ("cuda", "common"))
    return Source(text, "cuda", target, include, headers=reached_headers(text, include), functions=FUNCTIONS)
