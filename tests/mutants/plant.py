"""Sources with a fault: a header beside the real ones that is found first, or a TileLang program in a copy of the package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from kvgen.errors import CompileError
from kvgen.lower.backend import Source
from kvgen.lower.template import reached_headers
from kvgen.lower.tilelang.isolate import Lowered, request_of
from kvgen.lower.tilelang.render import source as tilelang_source
from kvgen.lower.tilelang.traits import make_traits
from tests.mutants.fault import Case, Fault, MisplacedFault, planted

ROOT = Path(__file__).resolve().parents[2]
LOWER_S = 180.0


def faulty_source(fault: Fault, case: Case, folder: Path) -> Source:
    """The case's source with the fault, whose files lie in `folder`.

    Raises MisplacedFault where the fault is not in what the source reaches, CompileError where TileLang does not take it.
    """
    text = planted(fault, (ROOT / fault.file).read_text())
    if fault.file.endswith(".py"):
        return _lowered_with(fault, text, case, folder)
    source = case.source()
    overlay = folder / "include"
    placed = overlay / fault.file.partition("/include/")[2]
    placed.parent.mkdir(parents=True, exist_ok=True)
    placed.write_text(text)
    include = (overlay, *source.include)
    headers = reached_headers(source.text, include)
    if placed not in headers:
        raise MisplacedFault(f"{fault.name}: {case.name} does not include {fault.file}")
    return replace(source, include=include, headers=headers)


def _lowered_with(fault: Fault, text: str, case: Case, folder: Path) -> Source:
    """Lower with a copy of the package that has the faulty program."""
    package = folder / "package"
    shutil.copytree(ROOT / "kvgen", package / "kvgen", ignore=shutil.ignore_patterns("__pycache__"))
    (package / fault.file).write_text(text)
    schedule = case.schedule
    path = os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "KVGEN_DATA_DIR": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "kvgen.lower.tilelang.worker"], input=request_of(case.spec, schedule, case.target), capture_output=True,
        text=True, timeout=LOWER_S, env=environment, check=False, cwd=package,
    )  # fmt: skip
    if done.returncode:
        raise CompileError(f"TileLang refuses the faulty program of {fault.name}", done.stderr[-4000:])
    kernels = Lowered.from_json(json.loads(done.stdout))
    source = tilelang_source(make_traits(case.spec, schedule), kernels, schedule.launch, case.target)
    if source.text == case.source().text:
        raise MisplacedFault(f"{fault.name}: the program of {case.name} is the same with it")
    return source
