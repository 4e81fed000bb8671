"""Source text of a variant: TileLang's kernels with kvgen's own host side and headers."""

from __future__ import annotations

import textwrap
from pathlib import Path

from kvgen._resources import templates
from kvgen.arch import Target
from kvgen.format.layout import Operand
from kvgen.lower import flags
from kvgen.lower.backend import FUNCTIONS, Source
from kvgen.lower.gpu import pack_memory
from kvgen.lower.schedule import Params
from kvgen.lower.template import reached_headers, render
from kvgen.lower.tilelang.isolate import Lowered, Program
from kvgen.lower.tilelang.support import tilelang_version
from kvgen.lower.tilelang.traits import Traits

ELEMENTS = {"float16": "__half", "bfloat16": "__nv_bfloat16"}


def quant(operand: Operand) -> str:
    """The C++ type of K's or V's format."""
    return f"kvgen::Quant<{operand.bits}, kvgen::Axis::{operand.axis}, {operand.group}, {'true' if operand.zero else 'false'}>"


def arguments(program: Program) -> str:
    """What the host hands to a program, by the names of its parameters. Learned sinks are the caller's own."""
    values = ("args.sinks" if name == "sinks" else f"t.{name}" for name in program.parameters)
    return textwrap.fill(", ".join(values), 120, break_long_words=False, break_on_hyphens=False)


def source(traits: Traits, programs: Lowered, launch: Params, target: Target) -> Source:
    """The module of one variant. The spec's name, arch and workloads leave no trace, so that equal variants are one."""
    rows = traits.rows
    text = render(
        "tilelang/module.cu.jinja",
        version=tilelang_version(),
        layout=traits.layout,
        traits=traits,
        pack_memory=pack_memory(traits.layout),
        static=programs.static,
        planned=programs.planned,
        arguments=arguments,
        splits=launch.text("splits"),
        element=ELEMENTS[traits.dtype],
        key=quant(traits.key),
        value=quant(traits.value),
        rows=f"kvgen::ResidualRows<{rows.block}, {rows.sink}, {rows.local}, {rows.rollback}, {rows.q_len}>",
    )
    return Source(text, "cuda", target, include_folders(), flags.TILELANG, reached_headers(text, include_folders()), FUNCTIONS)


def include_folders() -> tuple[Path, ...]:
    """Where kvgen's headers lie."""
    return tuple(templates() / part / "include" for part in ("tilelang", "cuda", "common"))
