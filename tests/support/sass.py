"""Registers and loops of compiled `attend` kernels, from their machine code (SASS) as cuobjdump lists it."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from kvgen.errors import ToolchainMissing
from kvgen.toolchain import Artifact
from kvgen.toolchain.compile import short_names

MMA = re.compile(r"\b(HMMA|IMMA|QMMA)\b")
LISTED = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(\S[^;]*?)\s*;")
BRANCH = re.compile(r"\b(?:BRA|JMP)\b.*0x([0-9a-f]+)\s*$")


def attend_kernels(artifact: Artifact) -> dict[str, dict[str, Any]]:
    """Registers, spilled bytes and instructions of the loop over KV tiles of `attend_static` and `attend_planned`; `_append` where a kernel
    appends new tokens. Raises ToolchainMissing without cuobjdump and nvdisasm.
    """
    listing = subprocess.run([find_cuobjdump(), "-sass", str(artifact.path)], capture_output=True, text=True, check=True).stdout
    mangled = dict(part.split("\n", 1) for part in re.split(r"\n\s*Function : ", listing)[1:])
    found = {}
    for name, body in zip(short_names([name.strip() for name in mangled]), mangled.values(), strict=True):
        if name.startswith("attend"):
            used = artifact.resources.kernels[name]
            short = name.partition("<")[0] + ("_append" if name.endswith("true>") else "")
            found[short] = {"registers": used.registers, "spill_bytes": used.spill_bytes, "loop": loop(body)}
    return dict(sorted(found.items()))


def loop(listing: str) -> int:
    """Instructions of the innermost loop with the most MMAs."""
    code = [(int(address, 16), text) for address, text in LISTED.findall(listing)]
    mmas = [address for address, text in code if MMA.search(text)]
    back = [(int(to[1], 16), address) for address, text in code if (to := BRANCH.search(text)) and int(to[1], 16) <= address]
    loops = [(first, last, sum(first <= at <= last for at in mmas)) for first, last in back]
    loops = [one for one in loops if one[2]]
    inner = [a for a in loops if not any(a[0] <= b[0] and b[1] <= a[1] and a[:2] != b[:2] for b in loops)]
    first, last, _ = max(inner, key=lambda one: one[2])
    return sum(first <= address <= last for address, _ in code)


def find_cuobjdump() -> str:
    """cuobjdump from PATH, then from the NVIDIA wheels of this Python. Raises ToolchainMissing."""
    spec = importlib.util.find_spec("nvidia")
    packages = (spec.submodule_search_locations or ()) if spec is not None else ()
    wheels = os.pathsep.join(str(tool.parent) for package in packages for tool in Path(package).glob("*/bin/cuobjdump"))
    tool = shutil.which("cuobjdump") or shutil.which("cuobjdump", path=wheels)
    if tool is None or (shutil.which("nvdisasm") is None and not Path(tool).with_name("nvdisasm").exists()):
        raise ToolchainMissing("cuobjdump and nvdisasm were not found: install the CUDA toolkit, or nvidia-cuda-cuobjdump, -nvdisasm")
    return tool
