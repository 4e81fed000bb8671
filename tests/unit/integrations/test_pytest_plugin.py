"""The pytest plugin, in processes of its own: what it collects, and how each verdict is reported."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from tests.support.checking import Place
from tests.support.commands import ROOT

pytest_plugins = ["pytester"]
PLUGIN = "kvgen.integrations.pytest_plugin"

CHANGED = """
from tests.support.checking import LaterBackend
from kvgen.measure.measurement import Measurement
from kvgen.measure.worker import Worker
from kvgen.tune import regression as entry

CHANGES, CANNOT, DISK_FULL = {changes!r}, {cannot!r}, {disk_full!r}


def full(source, cache):
    raise OSError(28, "No space left on device")


def pytest_configure(config):
    import kvgen.lower.backend
    kvgen.lower.backend.get_backend = lambda name: LaterBackend(name, **CHANGES)
    Worker.run = lambda worker, job: Measurement("ok", accuracy={{"relative_l2": 1e-6}})
    entry.cannot_run_here = lambda target: CANNOT
    if DISK_FULL:
        entry.build = full
"""


class Checkout:
    """A user's repository with a registry, and pytest run in it."""

    def __init__(self, pytester: pytest.Pytester, place: Place) -> None:
        self.pytester, self.place = pytester, place
        self.registry = pytester.path / "registry"
        shutil.copytree(place.store.root, self.registry)
        self.world()

    def world(self, cannot: str | None = None, disk_full: bool = False, **changes: object) -> None:
        """What back ends, devices and the disk are in the other process."""
        self.pytester.makeconftest(CHANGED.format(changes=changes, cannot=cannot, disk_full=disk_full))

    def run(self, *words: str) -> pytest.RunResult:
        return self.pytester.runpytest_subprocess("-p", PLUGIN, "-p", "no:cacheprovider", *words, timeout=200)


@pytest.fixture
def checkout(pytester: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(tmp_path / "cache"))
    with monkeypatch.context() as patch:
        return Checkout(pytester, Place(tmp_path / "place", patch))


@pytest.mark.parametrize(
    ("world", "outcome", "element", "said"),
    [
        ({}, "passed", "property", "numerics: relative L2 1.0e-06"),
        ({"reason": "it has no kernel for 4 bits any more"}, "failed", "failure", "regressed: source: get_kernel passes it over: "),
        ({"cannot": "no NVIDIA GPU is visible"}, "skipped", "skipped", "numerics: no NVIDIA GPU is visible"),
        ({"disk_full": True}, "errors", "error", "not checked: resources: "),
    ],
    ids=lambda given: given if given in ("passed", "failed", "skipped", "errors") else "",
)
def test_an_entry_is_a_test_whose_outcome_is_its_verdict(checkout: Checkout, world: dict[str, Any], outcome: str, element: str, said: str):
    checkout.world(**world)
    done = checkout.run("--kvgen-registry", "registry", "--junitxml", "report.xml")
    assert done.ret == (0 if outcome in ("passed", "skipped") else 1)
    assert done.parseoutcomes() == {outcome: 1}
    root = ET.parse(checkout.pytester.path / "report.xml").getroot()
    (case,) = root.iter("testcase")
    assert (case.get("classname"), case.get("name")) == ("registry", f"tiny-{checkout.place.entry.key}")
    assert any(said in f"{found.get('message')} {found.get('value')} {found.text}" for found in root.iter(element))


@pytest.mark.parametrize("words", [("--kvgen-speed",), ("--kvgen-registry", "no-such-folder")])
def test_options_that_mean_nothing_are_usage_errors(checkout: Checkout, words: tuple[str, ...]):
    assert checkout.run(*words).ret == pytest.ExitCode.USAGE_ERROR
