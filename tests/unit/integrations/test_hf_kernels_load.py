"""An exported CPU kernel is loaded by Hugging Face `kernels`, offline, in an environment without kvgen and its tools."""

from __future__ import annotations

import json
import os
import subprocess
import venv
from importlib.metadata import distribution
from pathlib import Path

import pytest

from kvgen.integrations import hf_kernels as export
from kvgen.integrations.hf_kernels import export_kernel
from kvgen.spec import load_spec
from kvgen.toolchain.compilers import cpu_features
from tests.packaging.fresh import expose, needed
from tests.support.commands import TINY

pytest.importorskip("kernels")
pytestmark = pytest.mark.slow

USE = """
import importlib.util, json, sys
from pathlib import Path
import torch
import kernels
from kernels._rust import Digest, DigestAlgorithm, Metadata

assert importlib.util.find_spec("kvgen") is None and importlib.util.find_spec("pydantic") is None
(variant,) = Path(sys.argv[1]).glob("build/*")
Metadata.read_from_file(variant / "metadata.json").digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))

kernel = kernels.get_local_kernel(Path(sys.argv[1]), backend="cpu")
torch.manual_seed(0)
cache = kernel.new_cache(2, 256)
k, v = torch.randn(2, 2, 150, 1, 32)
kernel.prefill(cache, k, v, [150, 70])
plan = kernel.plan(cache)
q, (k_new, v_new) = torch.randn(2, 1, 2, 32), torch.randn(2, 2, 1, 1, 32)
out = kernel.decode(q, k_new, v_new, cache, plan=plan)
cache.advance(1)
again, lse = kernel.attend(q, cache, lse=True)
mine, other = kernel.unpack(cache)
worst = 0.0
for b, length in enumerate([151, 71]):
    x = [t[b : b + 1].double().transpose(1, 2) for t in (q, mine[:, :length], other[:, :length])]
    exact = torch.nn.functional.scaled_dot_product_attention(*x, enable_gqa=True).transpose(1, 2)
    worst = max(worst, float((again[b] - exact).norm() / exact.norm()))
refused = ""
try:
    kernel.new_cache(like=kernel.new_cache(2, 256)).advance(351)
except kernel.CacheMismatch as error:
    refused = str(error)
try:
    kernel.attend(torch._neg_view(-q), cache)
    raise SystemExit("a negated view was taken")
except ValueError as error:
    assert "resolve_neg" in str(error)
near = float((out - again).abs().max())
print(json.dumps([cache.lengths.tolist(), worst, near, list(lse.shape), refused, kernel.spec.key.bits, Path(kernel.__file__).parent.name]))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with `kernels`, torch and TVM-FFI alone."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    roots = [distribution(name) for name in ("kernels", "torch", "apache-tvm-ffi")]
    for found in {one.name: one for root in roots for one in [root, *needed(root)]}.values():
        if found.name not in ("pydantic", "pydantic_core"):  # of signatures on the Hub, which a local kernel has none of
            expose(found, site)
    return folder / "bin" / "python"


def test_kernels_loads_an_export_without_kvgen(python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    has = set(cpu_features().split())
    runs_here = {name: level for name, level in export._levels("cpu").items() if set(level[1]) <= has}
    if not runs_here:
        pytest.skip("this processor is below the levels that are exported")
    monkeypatch.setattr(export, "_levels", lambda target: dict([*runs_here.items()][:1]))
    told = export_kernel(load_spec(TINY), ["cpu"], tmp_path / "k")
    assert told.name == "tiny"
    assert [build["verified"] for build in told.builds] == ["verified on this cpu"]

    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVGEN_", "PYTHON"))}
    own = {"HF_HUB_OFFLINE": "1", "HOME": str(tmp_path), "PATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run([python, "-c", USE, tmp_path / "k"], cwd="/", env={**kept, **own}, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    lengths, worst, near, lse, refused, bits, variant = json.loads(run.stdout)
    assert lengths == [151, 71]
    assert lse == [2, 2, 1]
    assert bits == 4
    assert worst < 1e-5
    assert near < 0.05
    assert "could be needed" in refused
    assert variant in told.variants
