"""What each kernel of a CUDA module uses, from what nvcc prints."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from functools import cache

from kvgen.toolchain.artifact import KernelResources

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


def parse_ptxas(log: str) -> dict[str, KernelResources]:
    """Resources by short kernel name, from the output of `nvcc -Xptxas -v`."""
    raw: dict[str, dict[str, int]] = {}
    current: dict[str, int] | None = None
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            current = raw.setdefault(entry.group(1), {})
        elif current is not None:
            if stack := _STACK.search(line):
                current.update(stack_bytes=int(stack.group(1)), spill_bytes=int(stack.group(2)) + int(stack.group(3)))
            if registers := _REGISTERS.search(line):
                shared = _SHARED.search(line)
                current.update(registers=int(registers.group(1)), shared_bytes=int(shared.group(1)) if shared else 0)
                current = None
    return {name: KernelResources(**values) for name, values in zip(short_names(list(raw)), raw.values(), strict=True)}


def short_names(mangled: list[str]) -> list[str]:
    """Readable unique names: demangled, without return type, namespaces and arguments."""
    demangle = _demangler()
    if demangle is None:
        return mangled
    full = [demangle(name) for name in mangled]
    short = [_shorten(name) for name in full]
    return short if len(set(short)) == len(short) else full


@cache
def _demangler() -> Callable[[str], str] | None:
    """`__cxa_demangle` of the C++ runtime, which every module needs, so that names do not depend on the tools of a machine."""
    try:
        runtime, libc = ctypes.CDLL("libstdc++.so.6"), ctypes.CDLL(None)
        function = runtime["__cxa_demangle"]
    except (OSError, AttributeError):
        return None
    function.restype, function.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    libc.free.restype, libc.free.argtypes = None, (ctypes.c_void_p,)

    def demangle(name: str) -> str:
        text = function(name.encode(), None, None, None) if name.startswith("_Z") else None
        if not text:
            return name
        try:
            return ctypes.string_at(text).decode()
        finally:
            libc.free(text)

    return demangle


def _shorten(name: str) -> str:
    """`void kvgen::decode<4, kvgen::Half>(int*)` to `decode<4, Half>`: argument list off, then qualifiers."""
    depth, end = 0, len(name)
    for index in range(len(name) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(name[index], 0)
        if name[index] == "(" and depth == 0 and index:
            end = index
            break
    name = re.sub(r"\(\w+\)(?=[\w-])", "", name[:end].replace("(anonymous namespace)::", ""))
    name = re.sub(r"\b\w+::", "", name)
    head, bracket, rest = name.partition("<")
    return head.split()[-1] + bracket + rest if head.split() else name
