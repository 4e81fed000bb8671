"""Copies modules of kvgen into a folder where kvgen is not installed: those that a module imports, with relative imports.

The copies are the same code that kvgen runs itself. What may be copied needs nothing but the standard library, torch and tvm_ffi.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from kvgen import __version__
from kvgen.errors import KvgenError

HOME = "kvgen.integrations.hf_kernels.exported"
"""The modules that users see; their package becomes the folder itself."""
COPIES = "_kvgen"
"""The subfolder of all other modules."""
ALLOWED = frozenset({"torch", "tvm_ffi"})
"""Packages that an exported kernel may import besides the standard library."""
HEADER = f"""# Part of kvgen {__version__}, copied by `kvgen export`; the imports are relative, the rest is unchanged.
# SPDX-License-Identifier: Apache-2.0
"""
PACKAGE = f'{HEADER}"""Modules of kvgen that the kernel needs at run time."""\n'
OWN_IMPORT = re.compile(r"^(?P<indent>\s*)from kvgen(?P<module>[\w.]*) import ", re.MULTILINE)


def standalone() -> dict[str, str]:
    """Text by path: the user's modules, every module of kvgen that they import, and empty packages around these.

    Raises KvgenError where one of them imports a package that a user of the kernel might not have.
    """
    files: dict[str, str] = {}
    found, waiting = set(), [HOME, f"{HOME}._ops"]
    while waiting:
        module = waiting.pop()
        if module in found:
            continue
        found.add(module)
        text = _file(module).read_text(encoding="utf-8")
        imported = list(_imported(text))
        if foreign := sorted({name for name in imported if not name.startswith("kvgen") and not _allowed(name)}):
            raise KvgenError(f"{module} imports {', '.join(foreign)}, which an exported kernel cannot rely on")
        waiting += [name for name in imported if name.startswith("kvgen")]
        files[_place(module)] = HEADER + _relative(module, text)
    for place in list(files):
        for folder in Path(place).parents[:-1]:
            files.setdefault(f"{folder}/__init__.py", PACKAGE)
    return files


def _imported(text: str) -> Iterator[str]:
    """Names of the modules that a module imports anywhere, except for type checkers; relative imports, which stay, are left out."""
    waiting: list[ast.AST] = [ast.parse(text)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                yield inner if _find(inner) else node.module
        waiting.extend(ast.iter_child_nodes(node))


def _allowed(name: str) -> bool:
    top = name.partition(".")[0]
    return top in ALLOWED or top in sys.stdlib_module_names


def _find(name: str) -> Path | None:
    """The file of a module of kvgen; None for any other name."""
    package, *rest = name.split(".")
    if package != "kvgen" or not rest:
        return None
    place = Path(__file__).resolve().parents[2].joinpath(*rest)
    return next((file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()), None)


def _file(name: str) -> Path:
    file = _find(name)
    if file is None:
        raise KvgenError(f"the installation of kvgen is incomplete: it has no module {name}")
    return file


def _place(module: str) -> str:
    """Path of a module in the exported folder."""
    if module == HOME:
        return "__init__.py"
    if module.startswith(HOME):
        return f"{module.rpartition('.')[2]}.py"
    return "/".join([COPIES, *module.split(".")[1:]]) + ".py"


def _relative(module: str, text: str) -> str:
    """The text with relative imports of kvgen's modules."""
    up = "." + COPIES if module.startswith(HOME) else "." * (module.count("."))

    def rewritten(match: re.Match[str]) -> str:
        name = match["module"].lstrip(".")
        start = f"{up}.{name}" if up == "." + COPIES and name else up + name
        return f"{match['indent']}from {start} import "

    return OWN_IMPORT.sub(rewritten, text)
