"""All hashing of the project: identities of specs, schedules, sources and layouts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DIGEST_CHARS = 16


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no white space, so that equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest(value: Any) -> str:
    """Hex digest (16 characters, 64 bits) of a JSON-able value."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:DIGEST_CHARS]


def files_digest(files: Iterable[Path]) -> str:
    """Digest over names and contents; length-prefixed, so that moving a byte between files changes it."""
    sha = hashlib.sha256()
    for file in sorted(files, key=lambda f: f.name):
        content = file.read_bytes()
        sha.update(f"{len(file.name)}:{file.name}:{len(content)}:".encode())
        sha.update(content)
    return sha.hexdigest()[:DIGEST_CHARS]
