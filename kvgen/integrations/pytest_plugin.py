"""A pytest plugin: `pytest --kvgen-registry FOLDER` checks every entry of a registry, one test per entry and level.

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
    from kvgen.registry.entry import Entry
    from kvgen.tune.regression import Checked, Finding

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

    def collect(self) -> Iterator[pytest.Item | pytest.Collector]:
        """Collects every entry, then a test for each file with a problem."""
        from kvgen.errors import HostError, printable
        from kvgen.registry import Store
        from kvgen.tune.regression import file_problem, unreachable

        store = Store(self.path, self.name)
        try:
            every = store.all()
            if not every:
                raise HostError(store.without_entries())
        except HostError as error:
            yield Level.from_parent(self, name="registry", find=partial(_known, unreachable(self.name, error)))
            return
        for entry in (found.entry for found in every if found.entry is not None):
            yield EntryTests.from_parent(self, name=printable(f"{entry.spec.name}-{entry.key}"), entry=entry)
        for problem in filter(None, map(file_problem, every)):
            yield Level.from_parent(self, name=printable(f"{problem.key}-registry"), find=partial(_known, problem))


class EntryTests(pytest.Collector):
    """The tests of an entry; its levels share rendered sources, modules and findings."""

    def __init__(self, name: str, parent: Registry, entry: Entry, **kwargs: Any) -> None:
        super().__init__(name, parent, **kwargs)
        self._entry = entry

    def collect(self) -> Iterator[pytest.Item]:
        """A test per level."""
        from kvgen.measure.worker import Worker
        from kvgen.toolchain import ArtifactCache
        from kvgen.tune.regression import LEVELS, EntryCheck

        worker = self.config.stash.setdefault(_WORKER, Worker())  # one for the whole run; it starts when it is first needed
        check = EntryCheck(self._entry, ArtifactCache(), worker)
        for level in LEVELS:
            if level != "speed" or self.config.getoption("--kvgen-speed"):
                yield Level.from_parent(self, name=level, find=partial(check.find, level))


class Level(pytest.Item):
    """The test of one aspect of an entry, or of a registry's files; `find` checks it."""

    def __init__(self, name: str, parent: pytest.Collector, find: Callable[[], Finding], **kwargs: Any) -> None:
        super().__init__(name, parent, **kwargs)
        self._find, self._failure = find, ""

    def setup(self) -> None:
        """Run the check. An exception here is an error of the test, not a failure."""
        from kvgen.errors import printable
        from kvgen.tune.regression import FAILING

        finding = self._find()
        told = "\n".join(printable(line) for line in finding.detail.expandtabs().splitlines())  # control characters are escapes
        if told:
            self.user_properties.append((finding.status, told))
        if finding.environment:
            pytest.fail(f"not checked: {told}", pytrace=False)
        if finding.status == "unable":
            pytest.skip(told)
        self._failure = f"{finding.status}: {told}" if finding.status in FAILING else ""

    def runtest(self) -> None:
        """Fail by the finding."""
        if self._failure:
            pytest.fail(self._failure, pytrace=False)

    def reportinfo(self) -> tuple[Path, None, str]:
        """Location for reports."""
        return self.path, None, self.nodeid


def _known(checked: Checked) -> Finding:
    return checked.findings[0]
