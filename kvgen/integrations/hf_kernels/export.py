"""Writes the folder: one build variant for the CPU, one for all GPU architectures, the README and the license."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from kvgen._resources import root
from kvgen.arch import Target, device_type
from kvgen.errors import KvgenError, host_errors
from kvgen.files import read_json, read_plain
from kvgen.integrations.hf_kernels.facts import FILE, facts
from kvgen.integrations.hf_kernels.libraries import Build, Tell, compiled
from kvgen.integrations.hf_kernels.metadata import NAME, metadata, variant_folder
from kvgen.integrations.hf_kernels.readme import MARK, readme
from kvgen.integrations.hf_kernels.standalone import standalone
from kvgen.plaindata import Json
from kvgen.registry.paths import slug
from kvgen.spec import KernelSpec

MOST_FACTS = 1 << 24
"""Largest size of a `_kernel.json`, in bytes."""


@dataclass(frozen=True)
class Exported(Json):
    """The folder of an exported kernel: its build variants, and of each library how it was tuned and verified."""

    folder: Path
    name: str
    variants: tuple[str, ...]
    builds: tuple[dict[str, Any], ...]


def export_kernel(
    spec: KernelSpec, targets: Iterable[Target], folder: Path, *, name: str | None = None, version: int = 1, tell: Tell = lambda _: None
) -> Exported:
    """Write the kernels that `get_kernel` would take for a spec on these targets as a folder for Hugging Face `kernels`.

    `folder` is new or empty, or an export of the same name and format: its variants of the same names are replaced, the others stay.
    `name` defaults to the spec's. `tell` is called with lines of progress.
    Raises KvgenError for a folder with something else in it or an unusable name, and as `get_kernel` does; CheckError for a library
    with wrong results.
    """
    name = slug(spec.name) if name is None else name
    if not NAME.fullmatch(name):
        raise KvgenError(
            f"{name!r} cannot be the name of a kernel, which has two or more lower-case letters, digits and hyphens, a letter first"
        )
    folder = Path(folder).absolute()
    _earlier(folder, spec, name)
    builds = compiled(spec, targets, tell)
    made: list[dict[str, Any]] = []
    with host_errors("write", folder):
        (folder / "build").mkdir(parents=True, exist_ok=True)
        if not (folder / "README.md").exists():
            (folder / "README.md").write_text(f"{MARK}\nThis export was not finished.\n", encoding="utf-8")
        for _, group in groupby(builds, key=lambda build: device_type(build.target)):
            made.append(_write_variant(spec, list(group), folder / "build", name, version))
        shutil.copyfile(root() / "LICENSE", folder / "LICENSE")
        variants = _earlier(folder, spec, name)
        (folder / "README.md").write_text(readme(name, version, folder.name, spec, variants), encoding="utf-8")
    return Exported(folder, name, tuple(variants), tuple(build for one in made for build in one["builds"]))


def _earlier(folder: Path, spec: KernelSpec, name: str) -> dict[str, dict[str, Any]]:
    """Facts of the variants that the folder has. Raises KvgenError unless it is new, empty or an export of this kernel."""
    with host_errors("read", folder):
        if folder.exists() and not folder.is_dir():
            raise KvgenError(f"{folder} is a file, and the kernel becomes a folder")
        held = {entry.name for entry in folder.iterdir()} if folder.exists() else set()
        try:
            marked = "README.md" in held and MARK.encode() in read_plain(folder / "README.md", MOST_FACTS)
        except ValueError:  # no export's: it is no plain file, or too large
            marked = False
        if held and not marked:
            raise KvgenError(f"{folder} has other contents: name a new or empty folder, or an earlier export")
        variants = {}
        for file in sorted(folder.glob(f"build/tvm-ffi*/{FILE}")):
            try:
                known = read_json(file, MOST_FACTS)
                other = read_json(file.with_name("metadata.json"), MOST_FACTS)["name"]
                format_id = known["format_id"]
            except (ValueError, KeyError, TypeError) as error:
                raise KvgenError(f"{file.parent} is damaged ({error}): remove it and export it again") from error
            if format_id != spec.format_id or other != name:
                raise KvgenError(f"{folder} holds the kernel {other} of format {format_id}, not {name} of {spec.format_id}")
            variants[file.parent.name] = known
        return variants


def _write_variant(spec: KernelSpec, builds: Sequence[Build], place: Path, name: str, version: int) -> dict[str, Any]:
    """Write a variant beside its place, then swap it in; returns its facts."""
    known = facts(spec, builds)
    files: dict[str, bytes] = {path: text.encode() for path, text in standalone().items()}
    files[FILE] = json.dumps(known, indent=1).encode() + b"\n"
    for build in builds:
        files |= {build.library(file): artifact.path.read_bytes() for file, artifact in build.libraries.items()}
    files["metadata.json"] = metadata(name, version, builds, files)
    target = place / variant_folder(builds)
    staged = place / f".{target.name}.new"
    shutil.rmtree(staged, ignore_errors=True)
    for path, content in files.items():
        (staged / path).parent.mkdir(parents=True, exist_ok=True)
        (staged / path).write_bytes(content)
    shutil.rmtree(target, ignore_errors=True)
    staged.rename(target)
    return known
