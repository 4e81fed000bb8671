"""What Hugging Face `kernels` reads of a build variant: its folder's name, `metadata.json`, and the digests of its files."""

from __future__ import annotations

import base64
import hashlib
import json
import platform
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvgen.arch import GPUS, Target, device_type
from kvgen.errors import KvgenError
from kvgen.integrations.hf_kernels.libraries import Build
from kvgen.toolchain.compilers import tvm_ffi_version

NAME = re.compile(r"[a-z][-a-z0-9]*[a-z0-9]")
"""Names that `kernels` accepts."""
NVCC = re.compile(r"nvcc (\d+)\.(\d+)")


def variant_folder(builds: Sequence[Build]) -> str:
    """`tvm-ffi01-cu130-x86_64-linux`: versions of TVM-FFI and, for GPUs, of the newest CUDA compiler of the libraries.

    Raises KvgenError where libraries were compiled by different major versions.
    """
    major, minor = tvm_ffi_version().split(".")[:2]
    return f"tvm-ffi{major}{minor}-{_backend(builds)}-{platform.machine()}-linux"


def _backend(builds: Sequence[Build]) -> str:
    compilers = {artifact.resources.compiler for build in builds for artifact in build.libraries.values()}
    versions = sorted({(int(found[1]), int(found[2])) for compiler in compilers if (found := NVCC.match(compiler))})
    if not versions:
        return "cpu"
    if versions[0][0] != versions[-1][0]:
        raise KvgenError(f"the libraries were compiled by different versions of CUDA ({', '.join(sorted(compilers))}): `kernels` needs one")
    return f"cu{versions[-1][0]}{versions[-1][1]}"


def cuda_arch(target: Target) -> str:
    """An architecture as `kernels` names it: `9.0a` runs on that capability alone, `8.0+PTX` on any later one."""
    gpu = GPUS[target]
    number = ".".join(map(str, gpu.capability))
    return f"{number}a" if gpu.specific else f"{number}+PTX"


def metadata(name: str, version: int, builds: Sequence[Build], files: Mapping[str, bytes]) -> bytes:
    """Contents of `metadata.json` for the other files of a variant. `id` is the name under which Python imports the module."""
    digests = {path: hashlib.sha256(content).digest() for path, content in sorted(files.items())}
    kind = device_type(builds[0].target)
    backend: dict[str, Any] = {"type": kind}
    if kind == "cuda":
        backend["archs"] = [cuda_arch(build.target) for build in builds]
    contents = hashlib.sha256(b"".join(digests.values())).hexdigest()[:8]
    data = {
        "name": name,
        "id": f"_{name.replace('-', '_')}_{kind}_{contents}",
        "version": version,
        "license": "Apache-2.0",
        "python-depends": ["tvm-ffi"],
        "backend": backend,
        "digest": {"algorithm": "sha256", "files": {path: base64.b64encode(digest).decode() for path, digest in digests.items()}},
    }
    return json.dumps(data, indent=2).encode() + b"\n"
