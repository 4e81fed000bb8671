"""A virtual environment with the packages that one wheel names, taken from this environment by links: nothing is downloaded."""

from __future__ import annotations

import re
import subprocess
import sys
import venv
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement


def fresh_environment(folder: Path, wheel: Path) -> Path:
    """The Python of a new environment with a wheel and, as they are installed here, the packages that it needs without extras."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (information,) = site.glob("kvgen-*.dist-info")
    for found in needed(Distribution.at(information)):
        expose(found, site)
    return python


def needed(root: Distribution) -> list[Distribution]:
    """What a distribution needs, directly or not; extras apart."""
    found: dict[str, Distribution] = {}
    pending = [root]
    while pending:
        for name in required(pending.pop()):
            if name not in found:
                try:
                    found[name] = distribution(name)
                except PackageNotFoundError:
                    continue  # pip was told to leave it out here; what imports it will say so
                pending.append(found[name])
    return list(found.values())


def required(root: Distribution, extra: str = "") -> Iterator[str]:
    """Names of what a distribution requires: with an extra, what that adds."""
    for requirement in map(Requirement, root.requires or ()):
        plain = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if plain if not extra else not plain and requirement.marker is not None and requirement.marker.evaluate({"extra": extra}):
            yield re.sub(r"[-_.]+", "-", requirement.name).lower()


def expose(found: Distribution, site: Path) -> None:
    """Link a distribution's packages, modules and metadata into `site`."""
    home = Path(str(found.locate_file("")))
    for file in found.files or ():
        if ".." in file.parts or file.is_absolute():
            continue  # scripts, manual pages
        own = Path(*file.parts[: _depth(home, file.parts)])
        (site / own).parent.mkdir(parents=True, exist_ok=True)
        if not (site / own).exists() and (home / own).exists():
            (site / own).symlink_to(home / own)


def _depth(home: Path, parts: tuple[str, ...]) -> int:
    """How many parts of a file's path name what belongs to its distribution alone: namespace packages are shared."""
    for depth in range(1, len(parts)):
        folder = home.joinpath(*parts[:depth])
        if (folder / "__init__.py").exists() or folder.suffix in (".dist-info", ".libs"):
            return depth
    return len(parts)
