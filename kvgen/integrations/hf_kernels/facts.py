"""`_kernel.json`: what an exported kernel knows of itself, to choose a library and for the README."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvgen import __version__
from kvgen.arch import device_type
from kvgen.integrations.hf_kernels.libraries import Build
from kvgen.spec import KernelSpec

FILE = "_kernel.json"
SYMBOL_VERSION = re.compile(rb"GLIBC(XX)?_(\d+(?:\.\d+)+)")


def facts(spec: KernelSpec, builds: Sequence[Build]) -> dict[str, Any]:
    """Spec, libraries and their origin, as plain data."""
    described = {name: value for name, value in spec.to_json().items() if name != "workloads"}
    return {
        "kvgen": __version__,
        "device_type": device_type(builds[0].target),
        "format_id": spec.format_id,
        "spec": {**described, "arch": builds[0].target},
        "builds": [_build(build) for build in builds],
    }


def _build(build: Build) -> dict[str, Any]:
    entry, layout = build.entry, build.entry.packed
    launches = []
    for launch in entry.every_launch:
        timing = entry.timing(launch.workload)
        measured = {"us": timing.us, "default_us": timing.default_us, "read_fraction": timing.read_fraction} if timing else None
        launches.append(
            {
                "workload": launch.workload.to_json(),
                "backend": launch.backend,
                "schedule": str(entry.schedule(launch)),
                "library": build.library(launch.file),
                "measured": measured,
            }
        )
    return {
        "name": build.name,
        "target": build.target,
        "instructions": list(build.level.instructions) if build.level else [],
        "compilers": sorted({artifact.resources.compiler for artifact in build.libraries.values()}),
        "symbols": symbol_versions(build),
        "verified": build.verified,
        "cautions": list(build.cautions),
        "tuned": _tuned(build) if entry.timings else None,
        "layout": {"id": layout.id, "tokens": layout.tokens, "head_dim": layout.head_dim, "block_bytes": layout.block_bytes},
        "launches": launches,
        "dispatch": _dispatch(build),
    }


def _dispatch(build: Build) -> dict[str, Any]:
    """What `kvgen.spec.dispatch` takes."""
    look_up = build.entry.look_up()
    return {"launches": [asdict(tiling) for tiling in look_up.launches], "tuned": [[*call, index] for call, index in look_up.tuned.items()]}


def _tuned(build: Build) -> dict[str, Any]:
    entry = build.entry
    return {"device": dict(entry.device), "provenance": dict(entry.provenance), "accuracy": dict(entry.accuracy)}


def symbol_versions(build: Build) -> dict[str, str]:
    """The newest versions of glibc's and libstdc++'s symbols that the libraries refer to: older systems cannot load them."""
    newest: dict[str, tuple[int, ...]] = {}
    for artifact in build.libraries.values():
        for plus, version in SYMBOL_VERSION.findall(artifact.path.read_bytes()):
            name = "GLIBCXX" if plus else "GLIBC"
            newest[name] = max(newest.get(name, ()), tuple(map(int, version.split(b"."))))
    return {name: ".".join(map(str, version)) for name, version in sorted(newest.items())}
