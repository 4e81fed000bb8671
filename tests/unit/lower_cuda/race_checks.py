"""Builds of the emulator that look for data races and misaligned accesses, and what they found.

    with race_checks.enabled():
        built = Emulated(spec, block, launch, folder)
        ...                                    # calls
    race_checks.reports(folder)

`emulator/checker.cpp` says what counts as a race.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from pathlib import Path

from kvgen.toolchain.compilers import find_gxx

HERE = Path(__file__).parent / "emulator"
LIBRARY = "emulated.so"
CHECKED = ContextVar("CHECKED", default=False)
PLACE = re.compile(r"@(\w+)")
DEFINED = ("-DKVGEN_EMULATOR_CHECKS", "-std=c++20", "-fPIC")
SANITIZED = (
    "-O1", "-g", "-fno-var-tracking", "-fsanitize=thread,alignment", "--param=tsan-instrument-func-entry-exit=0",
    "-Wa,-muse-unaligned-vector-move",  # a misaligned access is reported, and the kernel goes on
)  # fmt: skip


@dataclass(frozen=True)
class Harmless:
    """A race that stays: the code of both of its lines, and why it does no harm."""

    lines: tuple[str, str]
    reason: str


HARMLESS = (
    Harmless(("*args.overflow = 1", "*args.overflow = 1"), "Every writer of the flag writes 1; the host reads it after the launch."),
    Harmless(
        ("ptx::load_relaxed(args.cache.lengths", "args.cache.lengths[i] = length + args.q_len"),
        "The last CTA to count itself as a reader writes the lengths. The count is relaxed, which orders no writes; but here loads come"
        " first, all of them have given their values before the CTA's barrier in front of the count, and no later store can change those.",
    ),
)


@contextmanager
def enabled(on: bool = True) -> Iterator[None]:
    """Emulators that are compiled within it look for races."""
    token = CHECKED.set(on)
    try:
        yield
    finally:
        CHECKED.reset(token)


@cache
def unsupported() -> str | None:
    """Why this machine's compiler cannot look for races, or None."""
    with tempfile.TemporaryDirectory(prefix="sanitizers-") as folder:
        source = Path(folder) / "empty.cpp"
        source.write_text("int one(int* x) { return *x; }\n")
        done = _gxx([*DEFINED, *SANITIZED, "-c", str(source), "-o", str(source.with_suffix(".o"))], check=False)
    return None if done.returncode == 0 else f"{find_gxx().path} does not take {' '.join(SANITIZED)}"


def build(flags: Sequence[str], output: Path) -> None:
    """Compile an emulator with the checker: the emulator with calls of the sanitizers, the checker that answers them without."""
    emulated, checker = output.with_suffix(".o"), output.with_name("checker.o")
    _gxx([*flags, *DEFINED, *SANITIZED, "-c", "-o", str(emulated)])
    checker.write_bytes(_checker())
    _gxx(["-shared", str(emulated), str(checker), "-o", str(output)])  # without -fsanitize, which would link their libraries


def reports(folder: Path) -> list[str]:
    """What the emulators below `folder` have found since the last call: instructions, and their lines. What is harmless is left out."""
    return [report for path in sorted(folder.rglob(LIBRARY)) for report in _reports(path)]


def _reports(path: Path) -> list[str]:
    library = ctypes.CDLL(str(path))
    if not hasattr(library, "reports"):
        return []
    library.reports.restype = ctypes.c_char_p
    found = library.reports().decode().splitlines()
    lines = _lines(path, sorted({place for report in found for place in PLACE.findall(report)}))
    told = {report: [lines[place] for place in PLACE.findall(report)] for report in found}
    grave = [report for report, at in told.items() if not _harmless([line.code for line in at])]
    return sorted({PLACE.sub(lambda match: lines[match[1]].text, report).replace(f"{path.parent}/", "") for report in grave})


def _harmless(codes: Sequence[str]) -> bool:
    return any(
        len(codes) == 2 and any(all(part in code for part, code in zip(known.lines, order, strict=True)) for order in permutations(codes))
        for known in HARMLESS
    )


@dataclass(frozen=True)
class Line:
    """A place in the kernel: its line, and the lines that called it as long as they were inlined; and its code."""

    text: str
    code: str


def _lines(path: Path, places: Sequence[str]) -> dict[str, Line]:
    command = ["addr2line", "-a", "-i", "-e", str(path), *places]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout if places else ""
    found = {}
    for place, frames in zip(places, re.split(r"^0x\w+\n", text, flags=re.MULTILINE)[1:], strict=True):
        kernel = [frame.split(" ")[0] for frame in frames.splitlines() if str(HERE) not in frame and str(path.parent) in frame]
        header, _, number = kernel[0].partition(":") if kernel else ("", "", "0")
        code = Path(header).read_text().splitlines()[int(number) - 1].strip() if header else "?"
        found[place] = Line(f"at {' < '.join(frame.removeprefix(f'{path.parent}/kvgen/') for frame in kernel)} `{code}`", code)
    return found


@cache
def _checker() -> bytes:
    with tempfile.TemporaryDirectory(prefix="checker-") as folder:
        output = Path(folder) / "checker.o"
        _gxx(["-O2", *DEFINED, "-c", str(HERE / "checker.cpp"), "-o", str(output)])
        return output.read_bytes()


def _gxx(flags: Sequence[str], check: bool = True) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([str(find_gxx().path), *flags], check=check, capture_output=not check)
