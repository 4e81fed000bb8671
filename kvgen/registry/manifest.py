"""`manifest.json`: a sha256 for every file of a store that ships, so that manual changes are detected in review and in CI."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from kvgen.files import read_json, read_plain

MANIFEST = "manifest.json"
MOST_BYTES = 1 << 24
"""Largest size of a file of a registry, in bytes."""


def digests(root: Path) -> dict[str, str]:
    """sha256 by path relative to `root`; without hidden files, the manifest itself and what is no plain file of bounded size."""
    return _read(root)[0]


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
    except FileNotFoundError:
        return {MANIFEST: "is missing"}
    except ValueError as error:
        return {MANIFEST: f"cannot be read: {error}"}
    present, unread = _read(root)
    found = dict.fromkeys(sorted(listed.keys() - present.keys()), "is listed and missing")
    found |= dict.fromkeys(sorted(present.keys() - listed.keys()), "is not listed")
    found |= {name: "was changed" for name in sorted(listed.keys() & present.keys()) if listed[name] != present[name]}
    return found | unread


def manifest_problems(root: Path) -> list[str]:
    """`differences` as one line per file."""
    return [f"{name} {problem}" for name, problem in differences(root).items()]


def _listed(root: Path) -> dict[str, str]:
    """sha256 by path, as the manifest has them. Raises OSError, and ValueError where it is not such a list."""
    listed = read_json(root / MANIFEST, MOST_BYTES)
    if not isinstance(listed, dict):
        raise ValueError("it is not a list of files")
    return listed


def _read(root: Path) -> tuple[dict[str, str], dict[str, str]]:
    """sha256 of the plain files, and why others cannot be read, by path relative to `root`."""
    found, unread = {}, {}
    for file in sorted(root.rglob("*")):
        place = file.relative_to(root)
        name = place.as_posix()
        if name == MANIFEST or any(part.startswith(".") for part in place.parts) or (file.is_dir() and not file.is_symlink()):
            continue
        try:
            found[name] = hashlib.sha256(read_plain(file, MOST_BYTES)).hexdigest()
        except FileNotFoundError:  # removed by another writer
            continue
        except ValueError as error:
            unread[name] = f"cannot be read: {error}"
    return found, unread


def _write(root: Path, files: dict[str, str]) -> Path:
    path = root / MANIFEST
    staged = path.with_name(f".{MANIFEST}")
    staged.unlink(missing_ok=True)  # a killed writer's, or a pipe that would wait for a reader
    with open(staged, "x", encoding="utf-8") as file:
        file.write(json.dumps(files, indent=1, sort_keys=True) + "\n")
    return staged.replace(path)
