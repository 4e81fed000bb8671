"""The wheel, installed elsewhere and used from `/`: everything that a checkout has must be in it."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow

USE = """
import pathlib, sys, warnings
import torch, kvgen
assert pathlib.Path(kvgen.__file__).is_relative_to(sys.argv[1]), kvgen.__file__
spec = kvgen.load_spec({
    "name": "wheel", "arch": "cpu",
    "attention": {"q_heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": "float32"},
    "key": {"bits": 8, "axis": "channel", "group": 32}, "value": {"bits": 8, "axis": "token", "group": 64},
})
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    kernel = kvgen.get_kernel(spec)
assert any(issubclass(w.category, kvgen.FallbackWarning) for w in caught)
cache = kernel.new_cache(1, 128)
torch.manual_seed(0)
k, v, q = torch.randn(1, 100, 2, 64), torch.randn(1, 100, 2, 64), torch.randn(1, 1, 4, 64)
kernel.prefill(cache, k, v)
out = kernel.attend(q, cache).double()
exact = torch.nn.functional.scaled_dot_product_attention(*(x.double().transpose(1, 2) for x in (q, k, v)), enable_gqa=True).transpose(1, 2)
print(float((out - exact).norm() / exact.norm()))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-build-isolation",
        "--no-deps",
        "--no-index",
        "-w",
        str(out),
        str(ROOT),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (made,) = out.glob("kvgen-*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return target


@pytest.fixture
def outside(installed: Path, tmp_path: Path) -> dict[str, str]:
    """An environment in which only the installed wheel is kvgen, with registry and cache of its own."""
    own = {f"KVGEN_{name}_DIR": str(tmp_path / name) for name in ("CACHE", "REGISTRY", "SITE")}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVGEN_")}
    return {**kept, **own, "PYTHONPATH": str(installed)}


def _tracked(folder: str) -> set[str]:
    """Files of a folder, as a checkout or an unpacked source distribution has them."""
    if not (ROOT / ".git").exists():
        files = (file for file in (ROOT / folder).rglob("*") if file.is_file() and file.suffix != ".pyc")
        return {str(file.relative_to(ROOT)) for file in files}
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", folder], capture_output=True, text=True, check=True).stdout
    return set(listed.splitlines())


def test_the_wheel_holds_code_templates_spaces_and_winners(wheel: Path):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("templates", "search_spaces", "generated"):
        missing = {f"kvgen/_data/{name}" for name in _tracked(folder)} - names
        assert not missing
    assert not {name for name in _tracked("kvgen") if name.endswith(".py")} - names
    assert "kvgen/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "examples/")) or name.endswith((".so", ".pyc"))]


def test_the_command_runs(installed: Path, outside: dict[str, str]):
    command = [sys.executable, str(installed / "bin" / "kvgen"), "--help"]
    run = subprocess.run(command, cwd="/", env=outside, capture_output=True, text=True, check=True)
    for verb in ("build", "list", "why", "bench", "space", "doctor", "check"):
        assert verb in run.stdout


def test_a_kernel_is_rendered_compiled_and_right(installed: Path, outside: dict[str, str]):
    run = subprocess.run([sys.executable, "-c", USE, str(installed)], cwd="/", env=outside, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 0.02
