"""The wheel in an environment with its run-time packages alone, used from `/`: everything that a checkout has must be in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from kvgen.extras import EXTRAS
from tests.packaging.fresh import fresh_environment, required

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow

RUN_TIME = "torch apache-tvm-ffi filelock jinja2 numpy nvidia-ml-py optuna pandas platformdirs pydantic pyyaml rich typer"

SPEC = {
    "name": "wheel",
    "arch": "cpu",
    "attention": {"q_heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": "float32"},
    "key": {"bits": 8, "axis": "channel", "group": 32},
    "value": {"bits": 8, "axis": "token", "group": 64},
}

USE = """
import json, pathlib, sys, warnings
import torch, kvgen
assert pathlib.Path(kvgen.__file__).is_relative_to(sys.prefix), kvgen.__file__
spec = kvgen.load_spec(json.loads(sys.argv[1]))
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

COMMANDS = """
import contextlib, io, json, sys
from kvgen.cli import main

told = {}
for words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main(words)
    except SystemExit as ended:
        told[words[0]] = [int(ended.code or 0), out.getvalue(), err.getvalue()]
print(json.dumps(told))
"""

BUILD = """
import sys
from pathlib import Path
from kvgen.cli import main

folder = Path(sys.argv[1])
for words in (["spec", "Llama-3.1-8B", "-o", sys.argv[1]], ["build", str(folder / "small.yaml"), "--trials", "1"]):
    try:
        main(words)
    except SystemExit as ended:
        assert not ended.code, words
    (made,) = folder.glob("*.yaml")
    text = made.read_text().replace("q_heads: 32", "q_heads: 2").replace("kv_heads: 8", "kv_heads: 1")
    made.rename(folder / "small.yaml").write_text(text.replace("kv_len: 4096", "kv_len: 256").replace("arch: native", "arch: cpu"))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    offline = ["--quiet", "--no-build-isolation", "--no-deps", "--no-index"]
    command = [sys.executable, "-m", "pip", "wheel", *offline, "-w", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (made,) = out.glob("kvgen-*.whl")
    return made


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fresh_environment(tmp_path_factory.mktemp("fresh"), wheel)


@pytest.fixture
def run(python: Path, tmp_path: Path):
    """Run a script in the fresh environment, with registry and cache of its own; what it prints."""
    own = {f"KVGEN_{name}_DIR": str(tmp_path / name) for name in ("CACHE", "REGISTRY", "SITE")}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVGEN_", "PYTHONPATH"))}

    def answer(script: str, *arguments: str) -> str:
        command = [str(python), "-c", script, *arguments]
        done = subprocess.run(command, cwd="/", env={**kept, **own}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "NumPy" not in done.stderr  # torch without numpy warns
        return done.stdout

    return answer


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
    assert not set(_tracked("kvgen")) - names
    assert {"kvgen/py.typed", "kvgen/_data/LICENSE"} <= names
    assert not [name for name in names if name.startswith(("tests/", "examples/")) or name.endswith((".so", ".pyc"))]


def test_the_wheel_needs_what_run_time_needs_and_extras_the_rest(wheel: Path, tmp_path: Path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    (information,) = tmp_path.glob("kvgen-*.dist-info")
    made = Distribution.at(information)
    assert set(required(made)) == set(RUN_TIME.split())
    for extra, packages in EXTRAS.items():
        assert {name.replace("-", "_") for name in required(made, extra)} == set(packages), extra


def test_a_kernel_is_rendered_compiled_and_right(run):
    assert float(run(USE, json.dumps(SPEC))) < 0.02


def test_commands_inspect_and_those_that_lack_a_package_name_the_line(run, tmp_path: Path):
    spec = tmp_path / "spec.yaml"
    spec.write_text(json.dumps(SPEC))
    words = [["doctor", "--json"], ["list"], ["space", str(spec)], ["presets"], ["schema"], ["why", str(spec)]]
    told = json.loads(run(COMMANDS, json.dumps([*words, ["report"]])))
    assert {name: code for name, (code, _, _) in told.items()} == {
        "doctor": 0, "list": 0, "space": 0, "presets": 0, "schema": 0, "why": 3, "report": 3,
    }  # fmt: skip
    parts = {check["name"]: check["detail"] for check in json.loads(told["doctor"][1])["checks"]}
    assert parts["kvgen[tilelang]"] == "kvgen[tilelang] needs tilelang: pip install 'kvgen[tilelang]'"
    assert parts["back end tilelang"] == "tilelang is not installed: pip install 'kvgen[tilelang]'"
    assert told["report"][2] == "kvgen: kvgen report needs matplotlib: pip install 'kvgen[report]'\n"


def test_two_commands_make_a_tuned_kernel(run, tmp_path: Path):
    folder = tmp_path / "specs"
    folder.mkdir()
    assert "\nregistered " in run(BUILD, str(folder))
