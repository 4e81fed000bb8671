"""A pytest plugin: `pytest --kvgen-registry FOLDER` checks every entry of a registry, one test per entry.

A regression or a damaged entry is a failure, what this machine lacks the device for is a skip with the reason, and a failure of the
machine itself (disk, compiler, worker) is an error. Where no tests are named, only the registry is checked. Without the option
nothing is imported but this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kvgen.tune.regression import Checked

_WORKER = pytest.StashKey[Any]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--kvgen-registry` and `--kvgen-speed`."""
    group = parser.getgroup("kvgen")
    group.addoption("--kvgen-registry", metavar="FOLDER", action="append", help="Check every entry of a kvgen registry; may be repeated.")
    group.addoption("--kvgen-speed", action="store_true", help="Also time modules that are not the registered ones, on their own device.")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse options that mean nothing; collect registries alone where no tests are named."""
    folders = config.getoption("--kvgen-registry") or []
    if config.getoption("--kvgen-speed") and not folders:
        raise pytest.UsageError("--kvgen-speed needs --kvgen-registry")
    for folder in folders:
        if not Path(folder).is_dir():
            raise pytest.UsageError(f"--kvgen-registry: there is no folder {folder}")
    if folders and config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = []


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the registries' tests to those that were collected."""
    for folder in config.getoption("--kvgen-registry") or []:
        registry = Registry.from_parent(session, name=str(folder).rstrip("/"), path=Path(folder).resolve())
        items += session.genitems(registry)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the process that ran the modules."""
    if _WORKER in config.stash:
        config.stash[_WORKER].close()


class Registry(pytest.Collector):
    """A folder of entries."""

    def __init__(self, name: str, parent: pytest.Collector, path: Path, **kwargs: Any) -> None:
        super().__init__(name, parent, path=path, nodeid=name, **kwargs)

    def collect(self) -> Iterator[pytest.Item]:
        """Collects a test for each entry, and one for each file with a problem."""
        from kvgen.errors import HostError, printable
        from kvgen.measure.worker import Worker
        from kvgen.registry import Store
        from kvgen.tune.regression import check_entry, file_problem

        store = Store(self.path, self.name)
        try:
            every = store.all()
        except HostError as error:
            raise self.CollectError(str(error)) from error
        if not every:
            raise self.CollectError(store.without_entries())
        worker = self.config.stash.setdefault(_WORKER, Worker())  # one for the whole run; it starts when it is first needed
        speed = self.config.getoption("--kvgen-speed")
        for one in every:
            if (entry := one.entry) is not None:
                check = partial(check_entry, entry, speed=speed, worker=worker)
                yield Check.from_parent(self, name=printable(f"{entry.spec.name}-{entry.key}"), check=check)
            if (problem := file_problem(one)) is not None:
                yield Check.from_parent(self, name=printable(f"{problem.key}-registry"), check=lambda problem=problem: problem)


class Check(pytest.Item):
    """The test of one entry, or of a file; `check` checks it."""

    def __init__(self, name: str, parent: pytest.Collector, check: Callable[[], Checked], **kwargs: Any) -> None:
        super().__init__(name, parent, **kwargs)
        self._check, self._failure = check, ""

    def setup(self) -> None:
        """Run the check. An exception here is an error of the test, not a failure."""
        from kvgen.errors import printable
        from kvgen.tune.regression import FAILING

        checked, told = self._check(), {}
        for found in checked.findings:  # control characters are escapes
            told[found] = "\n".join(printable(line) for line in f"{found.aspect}: {found.detail}".expandtabs().splitlines())
            self.user_properties.append((found.status, told[found]))
        if checked.verdict in FAILING:
            bad = next(found for found in told if found.status == checked.verdict)
            self._failure = f"{checked.verdict}: {told[bad]}"
        elif checked.environment:
            pytest.fail(f"not checked: {next(text for found, text in told.items() if found.environment)}", pytrace=False)
        elif checked.verdict == "unable":
            pytest.skip(next(text for found, text in told.items() if found.status == "unable"))

    def runtest(self) -> None:
        """Fail by the findings."""
        if self._failure:
            pytest.fail(self._failure, pytrace=False)

    def reportinfo(self) -> tuple[Path, None, str]:
        """Location for reports."""
        return self.path, None, self.nodeid
