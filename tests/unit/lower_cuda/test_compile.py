"""Compiled where there is an nvcc: a covering set for the three architectures builds, and nothing spills; a loop does not grow unseen."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvgen.errors import ToolchainMissing
from kvgen.toolchain import Artifact
from kvgen.toolchain.cache import ArtifactCache
from kvgen.toolchain.compile import build_many
from kvgen.toolchain.compilers import find_nvcc
from tests.support.kernel_cases import KernelCase
from tests.support.sass import attend_kernels, find_cuobjdump

pytestmark = pytest.mark.nvcc

SMALL = (
    KernelCase("k8v8:vchannel:sym", "w8u1d2.bulk"), KernelCase("k2v2:sink32:local128:rollback4:page128:sinks"),
    KernelCase("k4v8:token:page16:window1000:cap30:q3", target="sm80"), KernelCase("k4v4:d80:h24/1", target="sm89"),
)  # fmt: skip
GOLDEN = Path(__file__).parent / "golden" / "attend_code.json"
WINNERS = {"k4v4": "w8u4d1", "k2v2": "w8u4d1.noexact"}
"""Formats, and a launch of the entry that ships."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> ArtifactCache:
    """What the tests of this file compile, each once."""
    return ArtifactCache(tmp_path_factory.mktemp("modules"))


def compiled(case: KernelCase, cache: ArtifactCache) -> Artifact:
    [(_, artifact)] = build_many([case.source()], cache=cache)
    assert isinstance(artifact, Artifact)
    return artifact


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_covering_set_compiles_without_spills(cache: ArtifactCache) -> None:
    for index, result in build_many([case.source() for case in SMALL], cache=cache):
        assert isinstance(result, Artifact), result
        assert {name: one.spill_bytes for name, one in result.resources.kernels.items() if one.spill_bytes} == {}, SMALL[index]


def test_resources_name_the_kernels(cache: ArtifactCache) -> None:
    names = list(compiled(KernelCase("k4v4", WINNERS["k4v4"]), cache).resources.kernels)
    for kernel, count in (("attend_static", 2), ("attend_planned", 2), ("plan_kernel", 1), ("advance_kernel", 1), ("unpack_kernel", 1)):
        assert sum(kernel in name for name in names) == count, (kernel, names)
    assert all("tmp" not in name for name in names), "names do not depend on where the source lay"


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    """What the kernels used when it was last accepted, with one release of nvcc."""
    try:
        find_cuobjdump()
    except ToolchainMissing as missing:
        pytest.skip(str(missing))
    known: dict[str, Any] = json.loads(GOLDEN.read_text())
    release = ".".join(find_nvcc().version.split(".")[:2])
    if os.environ.get("KVGEN_ACCEPT"):
        return {**known, "nvcc": release}
    if release != known["nvcc"]:
        pytest.skip(f"the numbers are of nvcc {known['nvcc']}, this is {release}")
    return known


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("words", WINNERS)
def test_no_more_registers_and_no_longer_loop(words: str, cache: ArtifactCache, golden: dict[str, Any]) -> None:
    """A feature that is off costs no instruction. KVGEN_ACCEPT=1 rewrites the numbers."""
    case = KernelCase(words, WINNERS[words])
    found = attend_kernels(compiled(case, cache))
    if os.environ.get("KVGEN_ACCEPT"):
        golden[words] = found
        GOLDEN.write_text("{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in golden.items()) + "\n}\n")
    known = golden[words]
    assert found.keys() == known.keys()
    assert not any(kernel["spill_bytes"] for kernel in found.values())
    more = [(name, what, n, known[name][what]) for name in found for what, n in found[name].items() if n > known[name][what]]
    assert more == [], "kernel, what, now, and when it was last accepted"
