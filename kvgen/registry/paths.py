"""File names that are valid on every machine: headers by package, entries by device and format."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvgen._resources import templates
from kvgen.files import is_name
from kvgen.spec import AnySpec, MatrixSpec, QuantSpec


def portable(path: Path) -> str:
    """The portable name of a path: relative to `templates/`, or `@package/path` in an installed package.

    Raises ValueError for any other path.
    """
    path = path.resolve()
    root = templates().resolve()
    if path.is_relative_to(root):
        return path.relative_to(root).as_posix()
    for parent in path.parents:
        if (parent / "__init__.py").exists() and not (parent.parent / "__init__.py").exists():
            return f"@{parent.name}/{path.relative_to(parent).as_posix()}"
    raise ValueError(f"{path} belongs neither to kvgen's templates nor to a Python package")


def locate(name: str) -> Path:
    """Inverse of `portable`. Raises FileNotFoundError if the package is not installed, ValueError for a name that leads out of
    the templates or the package.
    """
    check_portable(name)
    if not name.startswith("@"):
        return _inside(templates(), name)
    package, _, place = name[1:].partition("/")
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        return _inside(Path(folder), place)
    raise FileNotFoundError(f"the package {package} is not installed")


def check_portable(name: str) -> None:
    """Raise ValueError for a name that `portable` cannot return."""
    parts = name.removeprefix("@").split("/")
    importable = not name.startswith("@") or parts[0].isidentifier()  # a dotted name would import its parents
    if not importable or not all(map(is_name, parts)):
        raise ValueError(f"{name!r:.120} is no header or folder of kvgen's templates or of a package")


def _inside(root: Path, name: str) -> Path:
    place = root / name
    if not place.resolve().is_relative_to(root.resolve()):
        raise ValueError(f"{name!r:.120} leads out of {root}")
    return place


def slug(text: str) -> str:
    """Lower-case letters, digits and hyphens only."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "unknown"


def format_folder(spec: AnySpec) -> str:
    """Folder name of a format: a readable slug, then its id."""
    if isinstance(spec, MatrixSpec):
        matrix = spec.matrix
        return f"{spec.operation}-{matrix.dtype}-{matrix.bits}{matrix.axis[0]}.{spec.format_id}"
    attention = spec.attention
    heads = f"q{attention.q_heads}kv{attention.kv_heads}d{attention.head_dim}"
    layout = f"page{spec.cache.page}" if spec.cache.page else "contiguous"
    parts = (heads, attention.dtype, f"k{_operand(spec.key)}", f"v{_operand(spec.value)}", layout)
    return f"{'-'.join(parts)}.{spec.format_id}"


def device_folder(device: Mapping[str, Any]) -> str:
    """Folder name of a device."""
    return slug(str(device.get("name", "unknown")))


def entry_folder(key: str, revision: str) -> str:
    """Folder of an entry; `key_of` gives the key back."""
    return f"{key}.{revision}"


def key_of(folder: str) -> str:
    """Key of the entry that a folder of this name holds."""
    return folder.partition(".")[0]


def revision_of(folder: str) -> str:
    """Revision of the entry that a folder of this name holds."""
    return folder.rpartition(".")[2]


def _operand(quant: QuantSpec) -> str:
    return f"{quant.bits}{quant.axis[0]}{quant.group}{'' if quant.zero else 's'}" if quant.quantized else "16"
