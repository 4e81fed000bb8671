"""Checks whether `get_kernel` would still use an entry, and whether its source renders to the same tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvgen.errors import KvgenError, ToolchainMissing
from kvgen.lower.backend import Source, Sources, get_backend
from kvgen.lower.tokens import tokens_digest
from kvgen.registry.entry import Code, Entry
from kvgen.registry.select import misfits, stale
from kvgen.tune.regression.finding import Finding

_TILELANG = re.compile(r"lowered by TileLang ([\d.]+[\d])")


def passed_over(entry: Entry) -> str | None:
    """The reason why `get_kernel` no longer uses the entry, or only where it was tuned; None if it uses it.

    Raises ToolchainMissing where a back end's library is missing.
    """
    reason = stale(entry, entry.spec, entry.arch)
    return reason or next(iter(misfits(entry)), None)


def render(entry: Entry) -> dict[str, Source]:
    """Sources as they render now, by the file name of the entry's own.

    Raises KvgenError, and ToolchainMissing where another TileLang is installed than the one that printed an entry's source: it may print
    other text, which says nothing about the entry.
    """
    rendered: dict[str, Source] = {}
    sources = Sources(entry.spec, entry.arch, {name: get_backend(name) for name in {launch.backend for launch in entry.every_launch}})
    for launch in entry.every_launch:
        source = sources.of(entry.schedule(launch))
        then, now = _lowered_by(entry.codes[launch.file].text), _lowered_by(source.text)
        if then != now:
            raise ToolchainMissing(f"{launch.file} was lowered by TileLang {then}, and the one here is {now}: pip install tilelang=={then}")
        other = rendered.setdefault(launch.file, source)
        if other != source:
            raise KvgenError(f"launches that shared {launch.file} render differently now")
    return rendered


def compare_sources(entry: Entry, rendered: Mapping[str, Source]) -> Finding:
    """Tokens and flags of every source; headers whose tokens differ are a change."""
    changed: list[str] = []
    for file, source in rendered.items():
        old, new = entry.codes[file], Code.of(source)
        if tokens_digest(old.text) != tokens_digest(new.text):
            return Finding("source", "regressed", f"{file} renders differently now (line {_first_difference(old.text, new.text)})")
        if old.flags != new.flags:
            return Finding("source", "regressed", f"{file} is compiled with other flags now")
        if old.headers_digest != new.headers_digest:
            changed.append(file)
    return Finding("source", "changed" if changed else "good", f"headers of {', '.join(changed)} changed since" if changed else "")


def _lowered_by(text: str) -> str | None:
    """The version of TileLang that a source names; None for the text of another back end."""
    found = _TILELANG.search(text)
    return found[1] if found else None


def _first_difference(old: str, new: str) -> int:
    pairs = zip(old.splitlines(), new.splitlines(), strict=False)
    shorter = min(len(old.splitlines()), len(new.splitlines()))
    return next((number for number, (a, b) in enumerate(pairs, 1) if a != b), shorter + 1)
