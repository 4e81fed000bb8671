"""The manifest of a store that ships, and where an entry says it comes from."""

from __future__ import annotations

import subprocess

from kvgen import __version__
from kvgen.registry.device import here
from kvgen.registry.manifest import manifest_problems, write_manifest
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
    assert manifest_problems(store.root) == ["manifest.json is missing or is not JSON"]
    write_manifest(store.root)
    store.put(make_entry(us=3.0, date="2026-02-02"))
    store.put(make_entry(device="Other"))
    assert manifest_problems(store.root) == []
    store.remove(store.find(spec)[0])
    assert manifest_problems(store.root) == []


def test_no_manifest_is_a_problem(tmp_path):
    assert manifest_problems(tmp_path) == ["manifest.json is missing or is not JSON"]


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
