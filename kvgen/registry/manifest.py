"""`manifest.json`: a sha256 for every file of a store that ships, so that a change by hand is seen in review and in CI."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

MANIFEST = "manifest.json"


def digests(root: Path) -> dict[str, str]:
    """sha256 by path relative to `root`; hidden files and the manifest itself apart."""
    found = {}
    for file in sorted(root.rglob("*")):
        place = file.relative_to(root)
        if file.is_file() and place.as_posix() != MANIFEST and not any(part.startswith(".") for part in place.parts):
            found[place.as_posix()] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def write_manifest(root: Path) -> Path:
    """Write the manifest of a store, all at once."""
    path = root / MANIFEST
    staged = path.with_name(f".{MANIFEST}")
    staged.write_text(json.dumps(digests(root), indent=1, sort_keys=True) + "\n")
    return staged.replace(path)


def manifest_problems(root: Path) -> list[str]:
    """What differs between a store and its manifest, one line per file; empty where they agree."""
    try:
        listed: dict[str, str] = json.loads((root / MANIFEST).read_text())
    except (OSError, ValueError):
        return [f"{MANIFEST} is missing or is not JSON"]
    present = digests(root)
    problems = [f"{name} is listed and missing" for name in sorted(listed.keys() - present.keys())]
    problems += [f"{name} is not listed" for name in sorted(present.keys() - listed.keys())]
    problems += [f"{name} was changed" for name in sorted(listed.keys() & present.keys()) if listed[name] != present[name]]
    return problems
