"""Source text of a variant: constants and instantiations over the headers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from kvgen._resources import templates
from kvgen.lower.base import Source, Target
from kvgen.lower.cuda.shared import Shared
from kvgen.lower.schedule import Params
from kvgen.reference.layout import Operand, PackedLayout
from kvgen.spec import KernelSpec

_INCLUDE = re.compile(r'^\s*#include "(kvgen/[^"]+)"', re.MULTILINE)
_ELEMENTS = {"float16": "__half", "bfloat16": "__nv_bfloat16"}


def render(spec: KernelSpec, layout: PackedLayout, launch: Params, shared: Shared, target: Target) -> Source:
    """The module of one variant. The spec's name, arch and workloads leave no trace, so that equal variants are one."""
    text = _render("module.cu.jinja", spec=spec, layout=layout, launch=launch, shared=shared, element=_ELEMENTS[spec.attention.dtype])
    return source(text, target)


def source(text: str, target: Target) -> Source:
    """A CUDA source with the headers that it reaches."""
    include = tuple(templates() / part / "include" for part in ("cuda", "common"))
    return Source(text, "cuda", target, include, headers=tuple(reached_headers(text, include)))


def reached_headers(text: str, include: tuple[Path, ...]) -> list[Path]:
    """kvgen's headers that a source includes, directly or not, sorted by name."""
    found: dict[str, Path] = {}
    pending = _INCLUDE.findall(text)
    while pending:
        name = pending.pop()
        path = next((folder / name for folder in include if (folder / name).is_file()), None)
        if name not in found and path is not None:
            found[name] = path
            pending += _INCLUDE.findall(path.read_text())
    return [found[name] for name in sorted(found)]


def _render(template: str, **values: Any) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(templates() / "cuda"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters |= {"cxx": _constant, "quant": _quant, "combine": _combine, "cluster": _cluster}
    return environment.get_template(template).render(**values)


def _constant(value: bool | int) -> str:
    return str(value).lower()


def _combine(name: str) -> str:
    """`cluster8` to `cluster`."""
    return name.rstrip("0123456789")


def _cluster(name: str) -> str:
    """`cluster8` to `8`; 1 where there are no clusters."""
    return name.removeprefix("cluster") if name.startswith("cluster") else "1"


def _quant(op: Operand) -> str:
    """The C++ type of K's or V's format."""
    return f"kvgen::Quant<{op.bits}, kvgen::Axis::{op.axis}, {op.group}, {_constant(op.zero)}>"
