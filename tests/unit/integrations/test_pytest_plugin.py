"""The pytest plugin, in processes of its own: what it collects, and how each verdict is reported."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
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

    def run(self, *words: str, plugin: bool = True) -> pytest.RunResult:
        named = ("-p", PLUGIN) if plugin else ()
        return self.pytester.runpytest_subprocess(*named, "-p", "no:cacheprovider", *words, timeout=200)

    def check(self, *words: str) -> dict[str, int]:
        return self.run("--kvgen-registry", "registry", *words).parseoutcomes()


@pytest.fixture
def checkout(pytester: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(tmp_path / "cache"))
    with monkeypatch.context() as patch:
        return Checkout(pytester, Place(tmp_path / "place", patch))


def test_one_test_per_entry_and_level_and_all_pass(checkout: Checkout):
    done = checkout.run("--kvgen-registry", "registry", "-v", "--junitxml", "report.xml")
    assert done.ret == 0
    assert done.parseoutcomes() == {"passed": 3}
    key = checkout.place.entry.key
    done.stdout.fnmatch_lines([f"*registry::tiny-{key}::{level} PASSED*" for level in ("source", "resources", "numerics")])
    cases = ET.parse(checkout.pytester.path / "report.xml").getroot().iter("testcase")
    assert {(case.get("classname"), case.get("name")) for case in cases} == {
        (f"registry.tiny-{key}", level) for level in ("source", "resources", "numerics")
    }


def test_a_regression_is_a_failure_with_the_reason(checkout: Checkout):
    checkout.world(reason="it has no kernel for 4 bits any more")
    done = checkout.run("--kvgen-registry", "registry", "--junitxml", "report.xml")
    assert done.ret == 1
    assert done.parseoutcomes()["failed"] == 1
    done.stdout.fnmatch_lines(["*regressed: get_kernel passes it over:*no kernel for 4 bits any more*"])
    (failure,) = ET.parse(checkout.pytester.path / "report.xml").getroot().iter("failure")
    assert "no kernel for 4 bits" in str(failure.get("message"))


def test_a_missing_device_is_a_skip_with_the_reason(checkout: Checkout):
    checkout.world(cannot="no NVIDIA GPU is visible")
    done = checkout.run("--kvgen-registry", "registry", "-rs")
    assert done.ret == 0
    assert done.parseoutcomes() == {"passed": 2, "skipped": 1}
    done.stdout.fnmatch_lines(["*no NVIDIA GPU is visible*"])


def test_a_full_disk_is_an_error_and_no_failure(checkout: Checkout):
    checkout.world(disk_full=True)
    done = checkout.run("--kvgen-registry", "registry", "--junitxml", "report.xml")
    assert done.ret == 1
    assert done.parseoutcomes() == {"passed": 1, "errors": 1, "skipped": 1}
    suite = next(ET.parse(checkout.pytester.path / "report.xml").getroot().iter("testsuite"))
    assert (suite.get("errors"), suite.get("failures")) == ("1", "0")
    assert "No space left on device" in done.stdout.str()
    assert "regressed" not in done.stdout.str()


@pytest.mark.parametrize("words", [("--kvgen-speed",), ("--kvgen-registry", "no-such-folder")])
def test_options_that_mean_nothing_are_usage_errors(checkout: Checkout, words: tuple[str, ...]):
    assert checkout.run(*words).ret == pytest.ExitCode.USAGE_ERROR
