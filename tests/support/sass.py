"""Registers and loops of compiled `attend` kernels: machine code (SASS) as cuobjdump lists it, and what a loop over KV tiles executes."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvgen.errors import ToolchainMissing
from kvgen.toolchain import Artifact
from kvgen.toolchain.compile import short_names

MMA = ("HMMA", "IMMA", "QMMA")
RARE = ("MUFU", "SHFL", "MOVM", "ENDCOLLECTIVE")
"""Opcodes of code that an iteration may skip and runs rarely: exponentials, exchanges between lanes, lanes that diverged."""
SUBTILE = 32
"""Tokens of a sub-tile, which loops are counted for."""
INSTALL = "install the CUDA toolkit, or nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm"
_LISTED = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(\S[^;]*?)\s*;")


@dataclass(frozen=True)
class AttendKernel:
    """One kernel: registers, spilled bytes, and instructions of its loop per sub-tile."""

    name: str
    """`attend_static`, with `_append` where it appends new tokens."""
    registers: int
    spill_bytes: int
    loop: float


def attend_kernels(artifact: Artifact, kv_tile: int) -> list[AttendKernel]:
    """The `attend` kernels of a module, ordered by name. Raises ToolchainMissing without cuobjdump and nvdisasm."""
    functions = disassemble(artifact.path)
    named = dict(zip(short_names(list(functions)), functions.values(), strict=True))
    kernels = []
    for name in sorted(named):
        if name.startswith("attend"):
            used = artifact.resources.kernels[name]
            short = name.partition("<")[0] + ("_append" if name.endswith("true>") else "")
            kernels.append(AttendKernel(short, used.registers, used.spill_bytes, len(hot_loop(named[name])) * SUBTILE / kv_tile))
    return kernels


@dataclass(frozen=True)
class Instruction:
    """One line of a listing: `@!P0 BRA 0x4be0` at its address."""

    address: int
    text: str

    @property
    def guarded(self) -> bool:
        """Whether it may not run, or jump, for every warp."""
        return (self.text.startswith("@") and not self.text.startswith("@!PT")) or "BRA.DIV" in self.text or "BRA.CONV" in self.text

    @property
    def opcode(self) -> str:
        """Without modifiers: `LDS` of `@P0 LDS.128 R4, [R2]`."""
        return self.text.split()[1 if self.text.startswith("@") else 0].partition(".")[0]

    @property
    def target(self) -> int | None:
        """Where a branch goes."""
        if self.opcode not in ("BRA", "JMP"):
            return None
        found = re.search(r"0x([0-9a-f]+)\s*$", self.text)
        return int(found[1], 16) if found else None

    @property
    def rare(self) -> bool:
        """Whether code that has it, and that an iteration may skip, runs rarely."""
        return self.opcode in RARE


def disassemble(module: Path) -> dict[str, list[Instruction]]:
    """Instructions of every kernel of a module, by mangled name. Raises ToolchainMissing without cuobjdump."""
    return parse(subprocess.run([find_cuobjdump(), "-sass", str(module)], capture_output=True, text=True, check=True).stdout)


def find_cuobjdump() -> str:
    """cuobjdump from PATH, then from the NVIDIA wheels of this Python. Raises ToolchainMissing."""
    spec = importlib.util.find_spec("nvidia")
    packages = (spec.submodule_search_locations or ()) if spec is not None else ()
    wheels = os.pathsep.join(str(tool.parent) for package in packages for tool in Path(package).glob("*/bin/cuobjdump"))
    tool = shutil.which("cuobjdump") or shutil.which("cuobjdump", path=wheels)
    if tool is None:
        raise ToolchainMissing(f"cuobjdump was not found on PATH: {INSTALL}")
    if shutil.which("nvdisasm") is None and not Path(tool).with_name("nvdisasm").exists():
        raise ToolchainMissing(f"cuobjdump needs nvdisasm, which was not found on PATH: {INSTALL}")
    return tool


def parse(listing: str) -> dict[str, list[Instruction]]:
    """Instructions by the mangled names of functions, from the output of `cuobjdump -sass`."""
    functions = {}
    for part in re.split(r"\n\s*Function : ", listing)[1:]:
        name, _, body = part.partition("\n")
        functions[name.strip()] = [Instruction(int(address, 16), text) for address, text in _LISTED.findall(body)]
    return functions


def hot_loop(code: Sequence[Instruction]) -> list[Instruction]:
    """The instructions that an iteration of the innermost loop with the most MMAs executes.

    Code that an iteration may skip counts too (it copies the next tile), unless it has exponentials or exchanges lanes: then it raises
    the running maximum of the softmax, or serves diverged lanes, and both are rare.
    """
    graph = _Blocks(code)
    loops = [(head, graph.loop(head, latch), latch) for latch, heads in graph.next.items() for head in heads if head <= latch]
    mma = {id(body): sum(i.opcode in MMA for block in body for i in graph.code[block]) for _, body, _ in loops}
    inner = [
        (head, body, latch) for head, body, latch in loops
        if mma[id(body)] and not any(other < body and mma[id(other)] for _, other, _ in loops)
    ]  # fmt: skip
    if not inner:
        raise ValueError("no loop has MMAs")
    head, body, latch = max(inner, key=lambda loop: mma[id(loop[1])])
    skipped = {block for block in body if block not in (head, latch) and graph.reaches(head, latch, body - {block})}
    rare = {block for part in graph.parts(skipped) if any(i.rare for b in part for i in graph.code[b]) for block in part}
    hot = sorted(body - rare)
    return [instruction for block in hot for instruction in graph.code[block]]


class _Blocks:
    """Basic blocks of a function, named by their first address, and the edges between them."""

    def __init__(self, code: Sequence[Instruction]) -> None:
        ends = [i for i in code if i.opcode in ("BRA", "JMP", "EXIT", "RET", "BRX")]
        after = {i.address + 16 for i in ends}
        starts = sorted({code[0].address, *after, *(i.target for i in ends if i.target is not None)} & {i.address for i in code})
        self.code: dict[int, list[Instruction]] = {start: [] for start in starts}
        for instruction in code:
            self.code[starts[bisect_right(starts, instruction.address) - 1]].append(instruction)
        self.next: dict[int, list[int]] = {}
        for start, block in self.code.items():
            last = block[-1]
            targets = [last.target] if last.target is not None else []
            if last.guarded or last.opcode not in ("BRA", "JMP", "EXIT", "RET", "BRX"):
                targets.append(last.address + 16)
            self.next[start] = [target for target in targets if target in self.code]
        self.before: dict[int, list[int]] = {start: [] for start in self.code}
        for start, targets in self.next.items():
            for target in targets:
                self.before[target].append(start)

    def loop(self, head: int, latch: int) -> frozenset[int]:
        """The blocks of the loop that the edge from `latch` back to `head` closes."""
        found, todo = {head, latch}, [latch]
        while todo:
            block = todo.pop()
            if block != head:
                new = [before for before in self.before[block] if before not in found]
                found.update(new)
                todo += new
        return frozenset(found)

    def reaches(self, head: int, latch: int, within: frozenset[int]) -> bool:
        """Whether a path of blocks in `within` leads from `head` to `latch`."""
        found, todo = {head}, [head]
        while todo:
            for block in self.next[todo.pop()]:
                if block in within and block not in found:
                    found.add(block)
                    todo.append(block)
        return latch in found

    def parts(self, blocks: Iterable[int]) -> list[set[int]]:
        """Blocks by connected part."""
        left, found = set(blocks), []
        while left:
            part, todo = set(), [min(left)]
            while todo:
                block = todo.pop()
                if block in left:
                    left.remove(block)
                    part.add(block)
                    todo += self.next[block] + self.before[block]
            found.append(part)
        return found
