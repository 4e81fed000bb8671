"""`manifest.json`: a sha256 for every file of a store that ships, so that manual changes are detected in review and in CI."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

MANIFEST = "manifest.json"


def digests(root: Path) -> dict[str, str]:
    """sha256 by path relative to `root`; without hidden files and the manifest itself."""
    found = {}
    for file in sorted(root.rglob("*")):
        place = file.relative_to(root)
        if file.is_file() and place.as_posix() != MANIFEST and not any(part.startswith(".") for part in place.parts):
            found[place.as_posix()] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def write_manifest(root: Path) -> Path:
    """Write the manifest of a store, all at once."""
    return _write(root, digests(root))


def relist(root: Path, chosen: Callable[[str], bool]) -> Path:
    """Update the manifest for the chosen files; other differences remain."""
    try:
        listed = _listed(root)
    except (FileNotFoundError, ValueError):
        listed = {}
    kept = {file: found for file, found in listed.items() if not chosen(file)}
    return _write(root, kept | {file: found for file, found in digests(root).items() if chosen(file)})


def differences(root: Path) -> dict[str, str]:
    """Differences of a store's files from its manifest, by path. Raises OSError if it cannot be read."""
    try:
        listed = _listed(root)
    except (FileNotFoundError, ValueError):
        return {MANIFEST: "is missing or is not JSON"}
    present = digests(root)
    found = dict.fromkeys(sorted(listed.keys() - present.keys()), "is listed and missing")
    found |= dict.fromkeys(sorted(present.keys() - listed.keys()), "is not listed")
    return found | {name: "was changed" for name in sorted(listed.keys() & present.keys()) if listed[name] != present[name]}


def manifest_problems(root: Path) -> list[str]:
    """`differences` as one line per file."""
    return [f"{name} {problem}" for name, problem in differences(root).items()]


def _listed(root: Path) -> dict[str, str]:
    """sha256 by path, as the manifest has them. Raises OSError, and ValueError where it is not such a list."""
    listed = json.loads((root / MANIFEST).read_text())
    if not isinstance(listed, dict):
        raise ValueError(f"{MANIFEST} is not a list of files")
    return listed


def _write(root: Path, files: dict[str, str]) -> Path:
    path = root / MANIFEST
    staged = path.with_name(f".{MANIFEST}")
    staged.write_text(json.dumps(files, indent=1, sort_keys=True) + "\n")
    return staged.replace(path)
