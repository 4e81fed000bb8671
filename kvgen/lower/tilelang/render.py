"""Source text of a variant: TileLang's kernels with kvgen's own host side and headers."""

from __future__ import annotations

import textwrap
from pathlib import Path

from kvgen._resources import templates
from kvgen.arch import Target
from kvgen.format.constants import constants
from kvgen.lower import flags
from kvgen.lower.backend import FUNCTIONS, Source
from kvgen.lower.gpu import pack_memory
from kvgen.lower.schedule import Params
from kvgen.lower.template import reached_headers, render
from kvgen.lower.tilelang.isolate import Lowered, Program
from kvgen.lower.tilelang.support import tilelang_version
from kvgen.lower.tilelang.traits import Traits


def arguments(program: Program) -> str:
    """What the host hands to a program, by the names of its parameters. Learned sinks are the caller's own."""
    values = ("args.sinks" if name == "sinks" else f"t.{name}" for name in program.parameters)
    return textwrap.fill(", ".join(values), 120, break_long_words=False, break_on_hyphens=False)


def source(traits: Traits, programs: Lowered, launch: Params, target: Target) -> Source:
    """The module of one variant. The spec's name, arch and workloads leave no trace, so that equal variants are one."""
    text = render(
        "tilelang/module.cu.jinja",
        version=tilelang_version(),
        traits=traits,
        pack_memory=pack_memory(traits.layout),
        static=programs.static,
        planned=programs.planned,
        arguments=arguments,
        splits=launch.text("splits"),
        constants=constants(traits.layout, traits.rows, traits.dtype, page_blocks=traits.page_blocks, window_places=traits.window_places),
    )
    return Source(text, "cuda", target, include_folders(), flags.TILELANG, reached_headers(text, include_folders()), FUNCTIONS)


def include_folders() -> tuple[Path, ...]:
    """Where kvgen's headers lie."""
    return tuple(templates() / part / "include" for part in ("tilelang", "cuda", "common"))
