"""The manifest of a store that ships, and where an entry says it comes from."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from kvgen import __version__
from kvgen.registry.device import here
from kvgen.registry.manifest import MANIFEST, differences, manifest_problems, relist, write_manifest
from kvgen.registry.provenance import provenance
from kvgen.toolchain.compilers import cpu_name, machine


def test_a_written_manifest_has_no_problems(store, make_entry):
    store.put(make_entry())
    write_manifest(store.root)
    assert manifest_problems(store.root) == []


def test_every_difference_is_named(store, make_entry):
    path = store.put(make_entry())
    write_manifest(store.root)
    (path / "resources.json").write_text("{ }")
    (path / "extra").write_text("")
    next(path.glob("kernel-*")).unlink()
    problems = manifest_problems(store.root)
    assert len(problems) == 3
    assert any(problem.endswith("resources.json was changed") for problem in problems)
    assert any(problem.endswith("extra is not listed") for problem in problems)
    assert any("kernel-" in problem and problem.endswith("is listed and missing") for problem in problems)


def test_a_store_that_has_a_manifest_keeps_it_current(store, make_entry, spec):
    store.put(make_entry())
    assert manifest_problems(store.root) == ["manifest.json is missing"]
    write_manifest(store.root)
    store.put(make_entry(us=3.0, date="2026-02-02"))
    store.put(make_entry(device="Other"))
    assert manifest_problems(store.root) == []
    store.remove(store.find(spec)[0])
    assert manifest_problems(store.root) == []


def test_no_manifest_is_a_problem(tmp_path):
    assert manifest_problems(tmp_path) == ["manifest.json is missing"]


def test_provenance_names_version_commit_and_date():
    facts = provenance(seed=3, trials=40)
    assert (facts["kvgen"], facts["seed"], facts["trials"]) == (__version__, 3, 40)
    assert facts["date"].endswith("+00:00")
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    assert facts["commit"] in (head, None)


def test_this_cpu_has_a_name_and_threads():
    assert here("cpu")["name"] == cpu_name() != ""
    assert here("cpu")["threads"] >= 1
    assert machine("cpu") != machine("sm90")


@pytest.mark.parametrize("kind", ["pipe", "zero", "deep", "list"])
def test_a_manifest_that_is_no_plain_list_is_named(tmp_path: Path, kind: str) -> None:
    manifest = tmp_path / MANIFEST
    if kind == "pipe":
        os.mkfifo(manifest)
    elif kind == "zero":
        manifest.symlink_to("/dev/zero")
    else:
        manifest.write_text("[" * 100_000 if kind == "deep" else "[]")
    reason = {"pipe": "no plain file", "zero": "is a link", "deep": "too deeply", "list": "not a list"}[kind]
    assert reason in differences(tmp_path)[MANIFEST]
    relist(tmp_path, lambda _: True)
    assert differences(tmp_path) == {}
    assert not manifest.is_symlink()


def test_other_files_that_are_no_plain_ones_are_differences_that_no_list_accepts(tmp_path: Path) -> None:
    (tmp_path / "good").write_text("good")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    write_manifest(tmp_path)
    found = differences(tmp_path)
    assert found.keys() == {"pipe", "zero"}
    assert "no plain file" in found["pipe"]
    assert "link" in found["zero"]
    (tmp_path / "good").write_text("evil")
    assert differences(tmp_path)["good"] == "was changed"
