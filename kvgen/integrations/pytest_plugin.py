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
    from kvgen.measure.worker import Worker
    from kvgen.registry.entry import Entry
    from kvgen.tune.regression.entry import Checked, Finding

_WORKER = pytest.StashKey["Worker"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--kvgen-registry` and `--kvgen-speed`."""
    group = parser.getgroup("kvgen")
    group.addoption("--kvgen-registry", metavar="FOLDER", action="append", help="Check every entry of a kvgen registry; may be repeated.")
    group.addoption("--kvgen-speed", action="store_true", help="Time entries whose machine code differs, too, on their own device.")


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
        from kvgen.tune.regression.registry import file_problem, unreachable

        store = Store(self.path, self.name)
        try:
            every = store.all()
        except HostError as error:
            yield self._found("registry", unreachable(self.name, error).checked)
            return
        if not every:
            yield self._found("registry", unreachable(self.name, HostError(store.without_entries())).checked)
        for entry in (found.entry for found in every if found.entry is not None):
            yield EntryTests.from_parent(self, name=printable(f"{entry.spec.name}-{entry.key}"), entry=entry)
        for problem in map(file_problem, every):
            if problem is not None:
                yield self._found(printable(f"{problem.key}-registry"), problem)

    def _found(self, name: str, checked: Checked) -> Level:
        """A test whose finding is already known."""
        return Level.from_parent(self, name=name, find=lambda: checked.findings[0])


class EntryTests(pytest.Collector):
    """The tests of an entry; its levels share rendered sources, modules and findings."""

    def __init__(self, name: str, parent: Registry, entry: Entry, **kwargs: Any) -> None:
        from kvgen.toolchain import ArtifactCache
        from kvgen.tune.regression.entry import EntryCheck

        super().__init__(name, parent, **kwargs)
        self._check = EntryCheck(entry, ArtifactCache(), _worker(self.config))

    def collect(self) -> Iterator[pytest.Item]:
        """A test per level."""
        from kvgen.tune.regression.entry import LEVELS

        for level in LEVELS:
            if level != "speed" or self.config.getoption("--kvgen-speed"):
                yield Level.from_parent(self, name=level, find=partial(self._check.find, level))


class Level(pytest.Item):
    """The test of one aspect of an entry, or of a registry's files; `find` checks it."""

    def __init__(self, name: str, parent: pytest.Collector, find: Callable[[], Finding], **kwargs: Any) -> None:
        super().__init__(name, parent, **kwargs)
        self._find = find
        self._finding: Finding | None = None
        self._told = ""
        """The finding's detail for a terminal: control characters are escapes."""

    def setup(self) -> None:
        """Run the check. An exception here is an error of the test, not a failure."""
        from kvgen.errors import printable

        self._finding = finding = self._find()
        self._told = "\n".join(printable(line) for line in finding.detail.expandtabs().splitlines())
        if finding.detail:
            self.user_properties.append((finding.status, self._told))
        if finding.environment:
            pytest.fail(f"not checked: {self._told}", pytrace=False)
        if finding.status == "unable":
            pytest.skip(self._told)

    def runtest(self) -> None:
        """Fail or skip by the finding."""
        from kvgen.tune.regression.entry import FAILING

        if self._finding is not None and self._finding.status in FAILING:
            pytest.fail(f"{self._finding.status}: {self._told}", pytrace=False)

    def reportinfo(self) -> tuple[Path, None, str]:
        """Location for reports."""
        return self.path, None, self.nodeid


def _worker(config: pytest.Config) -> Worker:
    """The process that runs modules, one for the whole run; it starts when it is first needed."""
    from kvgen.measure.worker import Worker

    return config.stash.setdefault(_WORKER, Worker())
