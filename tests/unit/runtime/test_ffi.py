"""What modules check of their arguments, with a module on the CPU that asks for the alignment of CUDA's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvgen import _resources
from kvgen.lower.backend import Source
from kvgen.runtime.module import load_library
from kvgen.toolchain import ArtifactCache, build
from tests.support.naive import naive_artifact

PROBE = """
#include "kvgen/calls.hpp"
using namespace kvgen::ffi;
// 4 query heads on 2 of head_dim 8, blocks of 32 tokens in 64 bytes, residuals of 48 rows, pages of 2 blocks, learned sinks
KVGEN_EXPORT(probe) {
  return guard(result, [&](TVMFFIAny& answer) {
    answer.v_int64 = Attend({4, 2, 8, 32, 48, 64, 2, kFloat16, kDLCPU, 16, true}, args, count).cache.blocks;
    return true;
  });
}
"""
HALF = torch.float16


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("probe")
    return load_library(build(Source(PROBE, "c++", "cpu", (_resources.templates() / "common" / "include",)), ArtifactCache(folder)).path)


def behind(shape: tuple[int, ...], dtype: torch.dtype, elements: int) -> torch.Tensor:
    """Zeros that start `elements` after an aligned address."""
    return torch.zeros(torch.Size(shape).numel() + elements, dtype=dtype)[elements:].view(shape)


def probe(library: Any, **changes: torch.Tensor | None) -> int:
    given = {
        "q": torch.zeros(3, 1, 4, 8, dtype=HALF),
        "packed": torch.zeros(9, 2, 2, 64, dtype=torch.uint8),
        "k_residual": torch.zeros(3, 2, 48, 8, dtype=HALF),
        "v_residual": torch.zeros(3, 2, 48, 8, dtype=HALF),
        "lengths": torch.zeros(3, dtype=torch.int32),
        "block_table": torch.zeros(3, 3, dtype=torch.int32),
        "residual_slots": None,
        "scales": None,
        "out": torch.zeros(3, 1, 4, 8, dtype=HALF),
        "lse": torch.zeros(3, 4, 1),
        "sinks": torch.zeros(4),
        "workspace": torch.zeros(16, dtype=torch.uint8),
        "plan": None,
    }
    assert changes.keys() <= given.keys()
    return int(library.get_function("probe")(*(given | changes).values(), 0.5, 100))


def test_a_residual_has_the_variants_rows_and_sinks_are_given_where_it_has_them(library: Any) -> None:
    with pytest.raises(ValueError, match="attend: k_residual has size 32 in dimension 2, must be 48"):
        probe(library, k_residual=torch.zeros(3, 2, 32, 8, dtype=HALF))
    with pytest.raises(ValueError, match="attend: this kernel needs sinks, a logit per query head"):
        probe(library, sinks=None)
    with pytest.raises(ValueError, match="attend: sinks has size 3 in dimension 0, must be 4"):
        probe(library, sinks=torch.zeros(3))
    lse = torch.zeros(3, 4, 1)
    with pytest.raises(ValueError, match="attend: lse overlaps with sinks"):
        probe(library, lse=lse, sinks=lse.view(-1)[4:8])


@pytest.mark.parametrize("name", ["q", "out"])
def test_rows_are_aligned_wherever_they_start(library: Any, name: str) -> None:
    assert probe(library, **{name: torch.zeros(3, 2, 8, 8, dtype=HALF)[:, 1:, ::2]}) == 6
    for odd in (behind((3, 1, 4, 8), HALF, 1), torch.zeros(3, 1, 4, 12, dtype=HALF)[..., :8], torch.zeros(3, 1, 33, dtype=HALF)[..., :32]):
        with pytest.raises(ValueError, match=f"attend: rows of {name} must start at multiples of 16 bytes"):
            probe(library, **{name: odd.view(3, 1, 4, 8) if odd.dim() == 3 else odd})


def test_a_module_is_loaded_from_a_folder_with_other_letters_in_any_locale(tmp_path: Path) -> None:
    folder = tmp_path / "f\u00fcr Kerne"
    folder.mkdir()
    shutil.copy(naive_artifact().path, folder)
    code = "import sys; from pathlib import Path; from kvgen.runtime.module import load; load(next(Path(sys.argv[1]).iterdir()))"
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code, os.fsencode(folder)], env={**os.environ, **locale}, check=True)
