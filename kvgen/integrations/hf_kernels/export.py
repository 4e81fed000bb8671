"""Writes the folder: one build variant for the CPU, one for all GPU architectures, the README and the license."""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from kvgen import __version__
from kvgen._resources import root
from kvgen.api.verify import Verification
from kvgen.arch import GPUS, Target, device_type
from kvgen.errors import KvgenError, UnsupportedError, host_errors, markdown
from kvgen.files import read_json
from kvgen.integrations.hf_kernels.readme import MARK, README
from kvgen.lower.backend import Source
from kvgen.plaindata import Json
from kvgen.registry.entry import Entry
from kvgen.registry.select import select, serving_entry
from kvgen.registry.store import slug
from kvgen.runtime.device import cannot_run_here
from kvgen.spec import KernelSpec, dump_spec
from kvgen.toolchain import Artifact, ArtifactCache
from kvgen.toolchain.compile import build_all, ptx_only_default
from kvgen.toolchain.compilers import cpu_features, tvm_ffi_version

NAME = re.compile(r"[a-z][-a-z0-9]*[a-z0-9]")
"""Names that `kernels` accepts."""
FILE = "_kernel.json"
MOST_FACTS = 1 << 24
"""Largest size of a `_kernel.json`, in bytes."""
HOME = "kvgen.integrations.hf_kernels.exported"
"""The module that users see; it becomes the package, and the modules that it imports `_kvgen` in it."""
AVX2 = ("avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe")
AVX512 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
LEVELS: dict[str, dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "x86_64": {
        "x86-64-v4-vnni": (("-march=x86-64-v4", "-mavx512vnni"), (*AVX2, *AVX512, "avx512_vnni")),
        "x86-64-v4": (("-march=x86-64-v4",), (*AVX2, *AVX512)),
        "x86-64-v3": (("-march=x86-64-v3",), AVX2),
    },
    "aarch64": {"armv8-a": (("-march=armv8-a",), ())},
}
"""Levels of processors, by `platform.machine()`, the newest first: what the compiler is told after `-march=native`, and the instructions
as /proc/cpuinfo names them.
"""


@dataclass(frozen=True)
class Exported(Json):
    """The folder of an exported kernel: its build variants, and of each set of libraries how it was tuned and verified."""

    folder: Path
    name: str
    variants: tuple[str, ...]
    builds: tuple[dict[str, Any], ...]


def export_kernel(
    spec: KernelSpec,
    targets: Iterable[Target],
    folder: Path,
    *,
    name: str | None = None,
    version: int = 1,
    tell: Callable[[str], object] = lambda _: None,
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
    builds = _compiled(spec, targets, tell)
    with host_errors("write", folder):
        (folder / "build").mkdir(parents=True, exist_ok=True)
        if not (folder / "README.md").exists():
            (folder / "README.md").write_text(f"{MARK}\nThis export was not finished.\n", encoding="utf-8")
        for _, group in groupby(builds, key=lambda build: device_type(build.entry.arch)):
            _write_variant(spec, list(group), folder / "build", name, version)
        shutil.copyfile(root() / "LICENSE", folder / "LICENSE")
        variants = _earlier(folder, spec, name)
        (folder / "README.md").write_text(_readme(name, version, folder.name, spec, variants), encoding="utf-8")
    return Exported(folder, name, tuple(variants), tuple(build.facts() for build in builds))


@dataclass(frozen=True)
class _Build:
    """The compiled launches of an entry for one kind of device."""

    entry: Entry
    cautions: tuple[str, ...]
    """Why the entry is perhaps not the fastest."""
    name: str
    """Target, or level of the processor; names the libraries."""
    instructions: tuple[str, ...]
    libraries: Sequence[Artifact]
    """Of the launches, in their order."""
    verified: str
    """What verification found on this machine, or why it was not run."""

    def library(self, index: int) -> str:
        """File name of a launch's library in the exported folder."""
        return f"{self.entry.launches[index].backend}-{index}-{self.name}.so"

    def facts(self) -> dict[str, Any]:
        """What the exported module and the README know of these libraries."""
        entry, layout, table = self.entry, self.entry.packed, self.entry.look_up()
        times = {work.key: timing.us for work, _ in entry.tuned if (timing := entry.timing(work))}
        tuned = {"device": entry.device.get("name"), "date": str(entry.provenance.get("date", ""))[:10], "us": times}
        return {
            "name": self.name,
            "target": entry.arch,
            "instructions": list(self.instructions),
            "compilers": sorted({artifact.resources.compiler for artifact in self.libraries}),
            "verified": self.verified,
            "cautions": list(self.cautions),
            "tuned": tuned if times else None,
            "layout": {"id": layout.id, "tokens": layout.tokens, "head_dim": layout.head_dim, "block_bytes": layout.block_bytes},
            "libraries": [self.library(index) for index in range(len(entry.launches))],
            "dispatch": {"launches": [asdict(one) for one in table.launches], "tuned": [[*call, i] for call, i in table.tuned.items()]},
        }


def _compiled(spec: KernelSpec, targets: Iterable[Target], tell: Callable[[str], object]) -> list[_Build]:
    """Choose, compile and, where this machine can run them, verify the libraries of all targets, the newest machines first."""
    if ptx_only_default():
        raise KvgenError("KVGEN_PTX_ONLY is set, and exported libraries hold machine code: unset it")
    order = [*reversed(GPUS), "cpu"]
    wanted: list[tuple[Entry, tuple[str, ...], str, tuple[str, ...], list[Source]]] = []
    for target in sorted(set(targets), key=order.index):
        entry, selection = serving_entry(spec, target, select(spec, target))
        # where and how it was tuned compared with this machine says nothing of the machines that will load the export
        cautions = tuple(caution for caution in selection.cautions if not caution.startswith("tuned "))
        for level, (flags, instructions) in _levels(target).items():
            own = [replace(source, flags=(*source.flags, *flags)) for source in entry.sources]
            wanted.append((entry, cautions, level, instructions, own))
    artifacts = build_all(
        [source for *_, own in wanted for source in own], ArtifactCache(), lambda count: tell(f"compiling {count} libraries")
    )
    builds = []
    for entry, cautions, level, instructions, own in wanted:
        libraries = [artifacts[source.id] for source in own]
        absent = [one for one in instructions if one not in cpu_features().split()]
        reason = f"this processor has no {', '.join(absent)}" if absent else cannot_run_here(entry.arch)
        if reason is None:
            with Verification(entry) as verification:
                for index, artifact in enumerate(libraries):
                    verification.add(index, artifact)
                verification.finish()
        told = f"verified on this {device_type(entry.arch)}" if reason is None else f"not run here: {reason}"
        builds.append(_Build(entry, cautions, level, instructions, libraries, told))
    return builds


def _levels(target: Target) -> Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Flags and instructions of each library of a target, by name. Raises UnsupportedError for a kind of processor without levels."""
    if target != "cpu":
        return {target: ((), ())}
    if (kind := platform.machine()) not in LEVELS:
        reason = f"this processor is {kind}, and libraries are exported for {' and '.join(LEVELS)}"
        raise UnsupportedError("export for the CPU", reason, is_backend=False)
    return LEVELS[kind]


def _earlier(folder: Path, spec: KernelSpec, name: str) -> dict[str, dict[str, Any]]:
    """Facts of the variants that the folder has. Raises KvgenError unless it is new, empty or an export of this kernel."""
    with host_errors("read", folder):
        if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
            return {}
        readme = folder / "README.md"
        if not readme.is_file() or MARK not in readme.read_text(encoding="utf-8", errors="replace"):
            raise KvgenError(f"{folder} has other contents: name a new or empty folder, or an earlier export")
        variants = {}
        for file in sorted(folder.glob(f"build/tvm-ffi*/{FILE}")):
            try:
                known = read_json(file, MOST_FACTS)
                held = known["name"], known["format_id"]
            except (ValueError, KeyError, TypeError) as error:
                raise KvgenError(f"{file.parent} is damaged ({error}): remove it and export it again") from error
            if held != (name, spec.format_id):
                raise KvgenError(f"{folder} holds the kernel {held[0]} of format {held[1]}, not {name} of {spec.format_id}")
            variants[file.parent.name] = known
        return variants


def _write_variant(spec: KernelSpec, builds: Sequence[_Build], place: Path, name: str, version: int) -> None:
    """Write a variant beside its place, then swap it in."""
    kind = device_type(builds[0].entry.arch)
    described = {field: value for field, value in spec.to_json().items() if field != "workloads"}
    facts: dict[str, Any] = {
        "kvgen": __version__,
        "name": name,
        "format_id": spec.format_id,
        "device_type": kind,
        "spec": {**described, "arch": builds[0].entry.arch},
        "builds": [build.facts() for build in builds],
    }
    files = {path: text.encode() for path, text in standalone().items()}
    files[FILE] = json.dumps(facts, indent=1).encode() + b"\n"
    for build in builds:
        files |= {build.library(index): artifact.path.read_bytes() for index, artifact in enumerate(build.libraries)}
    digests = {path: hashlib.sha256(content).digest() for path, content in sorted(files.items())}
    backend: dict[str, Any] = {"type": kind}
    cuda = [re.match(r"nvcc (\d+)\.(\d+)", compiler) for build in facts["builds"] for compiler in build["compilers"]]
    releases = sorted({(int(found[1]), int(found[2])) for found in cuda if found})
    if releases:
        if releases[0][0] != releases[-1][0]:
            raise KvgenError("the libraries were compiled by different major versions of CUDA: `kernels` needs one")
        gpus = [GPUS[build.entry.arch] for build in builds]
        backend["archs"] = [f"{'.'.join(map(str, gpu.capability))}{'a' if gpu.specific else '+PTX'}" for gpu in gpus]
    metadata = {
        "name": name,
        "id": f"_{name.replace('-', '_')}_{kind}_{hashlib.sha256(b''.join(digests.values())).hexdigest()[:8]}",
        "version": version,
        "license": "Apache-2.0",
        "python-depends": ["tvm-ffi"],
        "backend": backend,
        "digest": {"algorithm": "sha256", "files": {path: base64.b64encode(digest).decode() for path, digest in digests.items()}},
    }
    files["metadata.json"] = json.dumps(metadata, indent=2).encode() + b"\n"
    ffi = "".join(tvm_ffi_version().split(".")[:2])
    target = place / f"tvm-ffi{ffi}-{f'cu{releases[-1][0]}{releases[-1][1]}' if releases else 'cpu'}-{platform.machine()}-linux"
    staged = place / f".{target.name}.new"
    shutil.rmtree(staged, ignore_errors=True)
    for path, content in files.items():
        (staged / path).parent.mkdir(parents=True, exist_ok=True)
        (staged / path).write_bytes(content)
    shutil.rmtree(target, ignore_errors=True)
    staged.rename(target)


def standalone() -> dict[str, str]:
    """Text by path: the user's module, every module of kvgen that it imports, with relative imports, and empty packages around these.

    Raises KvgenError where one of them imports a package that a user of the kernel might not have.
    """
    package = Path(__file__).resolve().parents[2]
    header = f"# Part of kvgen {__version__}, copied by `kvgen export` with relative imports.\n# SPDX-License-Identifier: Apache-2.0\n"
    files: dict[str, str] = {}
    waiting = [HOME]
    while waiting:
        module = waiting.pop()
        path = package.joinpath(*module.split(".")[1:])
        home = module == HOME
        place = "__init__.py" if home else "_kvgen/" + "/".join(module.split(".")[1:]) + ".py"
        if place in files:
            continue
        text = (path / "__init__.py" if home else path.with_suffix(".py")).read_text(encoding="utf-8")
        tree = ast.parse(text)
        typing = {id(node) for branch in tree.body if isinstance(branch, ast.If) for node in ast.walk(branch)}  # TYPE_CHECKING
        for node in ast.walk(tree):
            if id(node) in typing or not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]
            if names[0].startswith("kvgen"):
                inner = [f"{names[0]}.{one.name}" for one in node.names]
                modules = [one for one in inner if package.joinpath(*one.split(".")[1:]).with_suffix(".py").is_file()]
                waiting += modules or names
            elif foreign := [one for one in names if one.split(".")[0] not in {"torch", "tvm_ffi", *sys.stdlib_module_names}]:
                raise KvgenError(f"{module} imports {foreign[0]}, which an exported kernel cannot rely on")
        up = "._kvgen" if home else "." * module.count(".")
        relative = re.sub(r"^(\s*)from kvgen\.?([\w.]*) import ", rf"\1from {up}{'.' if home else ''}\2 import ", text, flags=re.MULTILINE)
        files[place] = header + relative
    for place in list(files):
        for folder in Path(place).parents[:-1]:
            files.setdefault(f"{folder}/__init__.py", header)
    return files


def _readme(name: str, version: int, folder: str, spec: KernelSpec, variants: Mapping[str, Mapping[str, Any]]) -> str:
    """How to call the kernel, what it computes, how each library was tuned and checked."""
    a = spec.attention
    lines = []
    for variant, facts in sorted(variants.items()):
        lines += [f"## `{variant}`", ""]
        for build in facts["builds"]:
            how = "not tuned: default schedules"
            if tuned := build["tuned"]:
                times = ", ".join(f"{work} {us:.1f} µs" for work, us in tuned["us"].items())
                how = f"tuned on {tuned['device']}, {tuned['date']}, by kvgen {facts['kvgen']} ({times})"
            needs = f"; needs a processor with {', '.join(build['instructions'])}" if build["instructions"] else ""
            told = [how, build["verified"], f"compiled by {', '.join(build['compilers'])}{needs}", *build["cautions"]]
            lines += [f"- {markdown(build['name'])}: {'; '.join(map(markdown, told))}"]
        lines += [""]
    sinks = (f"sinks = torch.zeros({a.q_heads}, device=cache.device)\n", ", sinks=sinks") if a.sinks else ("", "")
    return README.format(
        mark=MARK, name=name, version=version, folder=folder, kvgen=__version__, dtype=a.dtype, kv_heads=a.kv_heads, q_heads=a.q_heads,
        head_dim=a.head_dim, q_len=a.q_len, sinks_line=sinks[0], sinks=sinks[1], spec=dump_spec(spec), builds="\n".join(lines),
    )  # fmt: skip
