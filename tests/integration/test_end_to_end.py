"""From a spec file to a kernel in another process, and everything that can be asked about it on the way."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Machine

FETCH = """
import json, sys, warnings
warnings.simplefilter("error")
import torch, kvgen
from kvgen.verify.reference import attend
kernel = kvgen.get_kernel({spec!r})
cache = kernel.new_cache(batch=2, max_len=300)
torch.manual_seed(0)
k, v = torch.randn(2, 200, 1, 32), torch.randn(2, 200, 1, 32)
kernel.prefill(cache, k, v)
q, k1, v1 = torch.randn(2, 1, 2, 32), torch.randn(2, 1, 1, 32), torch.randn(2, 1, 1, 32)
out = kernel.decode(q, k1, v1, cache)
want = attend(q, *kernel.unpack(cache), cache.lengths)[0]
error = float((out - want).norm() / want.norm())
heavy = [m for m in ("optuna", "typer", "rich", "tilelang", "pandas", "matplotlib") if m in sys.modules]
print(json.dumps([kernel.selection.how, error, cache.lengths.tolist(), heavy]))
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(tmp_path_factory.mktemp("machine"))


@pytest.fixture(scope="module")
def built(machine: Machine) -> dict[str, Any]:
    (result,) = machine.json("build", machine.spec, "--backend", "cpu", "--trials", "2", "--seed", "1")
    return result


def test_build_measures_what_it_may_and_registers(built: dict[str, Any]):
    assert built["measured"] == 2
    assert built["failures"] == []
    (timing,) = built["entry"]["timings"]
    assert timing["us"] > 0
    assert timing["default_us"] > 0
    assert timing["read_us"] > 0
    assert timing["read_fraction"] == timing["read_us"] / timing["us"]
    assert len(timing["samples"]) >= 7
    assert built["entry"]["accuracy"]["1x256"]["relative_l2"] <= 1e-5
    assert Path(built["path"]).is_file()


def test_another_process_fetches_a_right_kernel_without_the_tuner(machine: Machine, built: dict[str, Any]):
    how, error, lengths, heavy = machine.python(FETCH.format(spec=str(machine.spec)))
    assert (how, lengths, heavy) == ("exact", [201, 201], [])
    assert error <= 1e-5


def test_the_registry_tells_what_it_holds_and_why(machine: Machine, built: dict[str, Any]):
    listed = machine.json("list")
    assert [one["key"] for one in listed if one["registry"] == "user"] == [built["key"]]
    shown = machine.json("show", built["key"][:6], "--source")
    assert shown["launches"] == built["entry"]["launches"]
    assert len(shown["sources"]) == len(shown["launches"])
    (answer,) = machine.json("why", machine.spec)
    assert (answer["how"], answer["key"]) == ("exact", built["key"])
    (answer,) = machine.json("why", machine.spec, "--workload", "4x512")
    assert answer["how"] == "nearest"
    machine.run("show", "ffff", code=3)


def test_bench_gives_rows_beside_torch(machine: Machine, built: dict[str, Any]):
    file = machine.root / "rows.csv"
    rows = machine.json("bench", machine.spec, "--against", "fp32-folded", "--rounds", "2", "--csv", file)
    assert [row["provider"] for row in rows] == ["kvgen", "torch"]
    assert rows[0]["workload"] == {"batch": 1, "kv_len": 256, "q_len": 1}
    assert rows[0]["bytes"] < rows[1]["bytes"]
    assert all(row["relative_l2"] <= 1e-5 for row in rows)
    assert file.read_text().splitlines()[0].startswith("provider,backend,spec,batch,kv_len,q_len,lengths,us,bytes")
    assert len(file.read_text().splitlines()) == 3


def test_a_machine_without_a_compiler_runs_what_was_copied(machine: Machine, built: dict[str, Any], tmp_path: Path):
    bare = Machine(tmp_path / "bare")
    bare.environment |= {"PATH": "/nonexistent", "CXX": ""}
    bare.run("build", bare.spec, "--backend", "cpu", code=3)
    for folder in ("registry", "cache"):
        shutil.copytree(machine.root / folder, bare.root / folder, dirs_exist_ok=True)
    how, error, _, _ = bare.python(FETCH.format(spec=str(bare.spec)))
    assert how == "exact"
    assert error <= 1e-5
