"""Problems of a registry's files: entries that are damaged, missing or in the wrong folder, and differences from the manifest."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import PurePosixPath

from kvgen.registry import Found, Store, packaged_store
from kvgen.registry.manifest import MANIFEST, differences, relist
from kvgen.registry.paths import format_folder, key_of
from kvgen.tune.regression.finding import Checked, Finding, Status

Chooser = Callable[[str], bool]
"""Whether an entry's key is selected; a file that belongs to no entry has the key ""."""


class RegistryFiles:
    """A store as it is read now. Raises OSError or HostError if it cannot be read."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.found: list[Found] = store.all()
        listed = (store.root / MANIFEST).exists() or (store.root == packaged_store().root and self.found)
        self._differences = differences(store.root) if listed else {}

    @property
    def keys(self) -> list[str]:
        """Keys of all entries that the store holds or its manifest lists."""
        return [*(one.key for one in self.found), *self._missing]

    def entry_problems(self, wanted: Chooser = lambda _: True) -> list[Checked]:
        """A finding for every entry that `get_kernel` does not find: damaged, in the wrong folder, or missing."""
        damaged = [_problem(one.key, str(one.problem), "damaged") for one in self._damaged]
        astray = [_problem(one.key, problem) for one in self.found if (problem := _astray(one)) is not None]
        gone = [_problem(key, f"it is missing, and {MANIFEST} lists it in {folder}") for key, folder in self._missing.items()]
        return [one for one in (*damaged, *astray, *gone) if wanted(one.key)]

    def manifest_problems(self, wanted: Chooser = lambda _: True) -> dict[str, Checked]:
        """A finding, by file, for every other difference from the manifest; their key is the manifest's name."""
        damaged = {one.key for one in self._damaged}
        differing = {file: problem for file, problem in self._differences.items() if _key(file) not in self._missing and wanted(_key(file))}
        return {
            file: _problem(MANIFEST, f"{file} {problem}", "damaged" if _key(file) in damaged else "regressed")
            for file, problem in differing.items()
        }

    def accept(self, chosen: Chooser) -> set[str]:
        """Update the manifest to the present files that are chosen, except those of damaged and missing entries. Returns the accepted
        files. Raises OSError if it cannot be written.
        """
        good = {key for key in ("", *(one.key for one in self.found if one.entry is not None)) if chosen(key)}
        accepted = {file for file in self._differences if _key(file) in good}
        if accepted:
            relist(self.store.root, lambda file: _key(file) in good)
        return accepted

    @property
    def _damaged(self) -> list[Found]:
        """Entries that cannot be read."""
        return [one for one in self.found if one.entry is None]

    @cached_property
    def _missing(self) -> dict[str, str]:
        """Folders, by key, of entries that the manifest lists and the store does not hold."""
        present = {one.key for one in self.found} | {""}
        folders = {_key(file): PurePosixPath(*PurePosixPath(file).parts[:3]) for file in self._differences}
        return {key: str(folder) for key, folder in folders.items() if key not in present}


def _key(file: str) -> str:
    """Key of the entry that a file belongs to; empty for a file of none."""
    parts = PurePosixPath(file).parts
    return key_of(parts[2]) if len(parts) > 3 else ""


def _astray(one: Found) -> str | None:
    """The reason why looking up the entry's own spec does not find its folder, or None."""
    if one.entry is None or one.path.parent.name == (folder := format_folder(one.entry.spec)):
        return None
    return f"get_kernel looks for it in a folder {folder}, and it is in {one.path.parent.name}"


def _problem(key: str, detail: str, status: Status = "regressed") -> Checked:
    return Checked(key, (Finding("registry", status, detail),))
