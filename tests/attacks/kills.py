"""`python -m tests.attacks.kills --count 1000`: commands killed at random moments; what they leave must be whole.

Killed, with SIGKILL, is a process that runs `kvgen build` or `check` through the command line's
own `main`. It is forked from a parent that has imported kvgen, so that a kill costs no start of Python. Compilers, loading of
modules, studies, registries and caches are the real ones. What is made up is the back end (sources of one line, which
compile in a fraction of a second) and the measurements.

After each kill every entry that was there is there and readable, every module of the cache is whole; then the same
command runs to its end, and what was left behind is swept.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvgen.arch import Target
from kvgen.lower import cpu
from kvgen.lower.backend import Source
from kvgen.lower.schedule import Schedule
from kvgen.measure.measurement import Job, Measurement
from kvgen.measure.worker import Worker
from kvgen.registry import Store
from kvgen.registry.entry import here
from kvgen.spec import KernelSpec
from kvgen.toolchain import ArtifactCache
from kvgen.toolchain.compilers import machine
from tests.support.commands import TINY
from tests.support.tuning import FakeBackend, FakeRunner

SALT = "KVGEN_TEST_SALT"


class SaltedBackend(FakeBackend):
    """Sources that change with the environment, so that builds have something to compile again."""

    def lower(self, spec: KernelSpec, schedule: Schedule, target: Target) -> Source:
        source = super().lower(spec, schedule, target)
        return Source(f"{source.text}// {os.environ.get(SALT, '')}\n", source.language, source.target)


def prepare() -> None:
    """Put what is made up in place, and import what commands import."""
    import kvgen.cli
    import kvgen.tune.tuner
    from kvgen.toolchain.compilers import find_gxx, tvm_ffi_include

    kvgen.cli.commands()
    find_gxx(), tvm_ffi_include(), here("cpu"), machine("cpu")

    def right(self: Worker, job: Job, timeout_s: float = 0.0) -> Measurement:
        return Measurement("ok", accuracy={"relative_l2": 1e-6})

    cpu.backend = SaltedBackend
    kvgen.tune.tuner.Runner = lambda *_, **__: FakeRunner()  # type: ignore[assignment,misc]
    Worker.run = right  # type: ignore[method-assign]


@dataclass
class Place:
    """A registry and a cache, and the commands that work on them."""

    root: Path
    spec: Path
    store: Store = field(init=False)
    cache: Path = field(init=False)

    def __post_init__(self) -> None:
        self.store, self.cache = Store(self.root / "registry"), self.root / "cache"

    def commands(self) -> dict[str, list[str]]:
        spec = str(self.spec)
        return {
            "build": ["build", spec, "--trials", "3", "--json"],
            "check": ["check", str(self.store.root), "--accept", "--json"],
        }

    def problems(self, before: set[str]) -> list[str]:
        """What is not whole; `before` are keys of entries that must be there."""
        found = [f"entry {one.path.name}: {one.problem}" for one in self.store.all() if one.entry is None]
        found += [f"entry {key} is gone" for key in before - self.keys()]
        cache = ArtifactCache(self.cache)
        found += [f"module {path.name} is not whole" for path in self.cache.glob("modules/*/*") if cache.get(path.name) is None]
        found += [f"{path} names no module" for path in self.cache.glob("sources/*") if cache.named(*path.name.split(".")) is None]
        return found

    def keys(self) -> set[str]:
        """Of the entries."""
        return {one.key for one in self.store.all()}

    def left(self, name: str) -> list[str]:
        """What a command that ran to its end should have swept."""
        found: list[Path] = []
        if name == "build":
            found += self.store.root.glob(".staging-*")
        return [str(path) for path in found]


def start(words: Sequence[str], place: Place, salt: str) -> int:
    """A forked process that runs a command; its id."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.setsid()
        with open(place.root / "output.txt", "wb") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.environ |= {"KVGEN_REGISTRY_DIR": str(place.store.root), "KVGEN_CACHE_DIR": str(place.cache), SALT: salt}
        os.environ["KVGEN_SITE_DIR"] = str(place.root / "site")
        from kvgen.cli import main

        main(list(words))
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        sys.stdout.flush()
        os._exit(code)


def finish(words: Sequence[str], place: Place, salt: str) -> tuple[int, float]:
    """Run a command to its end: its exit code, and its seconds."""
    began = time.monotonic()
    status = os.waitpid(start(words, place, salt), 0)[1]
    return os.waitstatus_to_exitcode(status), time.monotonic() - began


def attack(root: Path, count: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Kill `count` commands below `root`: kills by command, and what was not whole."""
    prepare()
    rng = random.Random(seed)
    spec = root / "tiny.yaml"
    spec.write_text(TINY)
    place = Place(root / "here", spec)
    place.root.mkdir()
    usual: dict[str, float] = {}
    for name in place.commands():
        code, usual[name] = finish(place.commands()[name], place, "first")
        assert code in (0, 1), (name, (place.root / "output.txt").read_text())
    kills: Counter[str] = Counter()
    failures: list[str] = []
    turn = 0
    while sum(kills.values()) < count:
        turn += 1
        name = rng.choice(sorted(usual))
        salt = str(turn // 4)
        if rng.random() < 0.3:
            shutil.rmtree(place.cache / "modules", ignore_errors=True)
            shutil.rmtree(place.cache / "sources", ignore_errors=True)
        words, keys = place.commands()[name], place.keys()
        pid = start(words, place, salt)
        time.sleep(rng.uniform(0.0, 1.1 * usual[name]))
        os.kill(pid, signal.SIGKILL)
        kills[name] += os.WIFSIGNALED(os.waitpid(pid, 0)[1])  # or it ended before
        wrong = place.problems(keys)
        code, seconds = finish(words, place, salt)
        usual[name] = 0.9 * usual[name] + 0.1 * seconds
        if code not in ((0, 1) if name == "check" else (0,)):
            wrong.append(f"then exit {code}: {(place.root / 'output.txt').read_text()[-500:]}")
        wrong += place.problems(keys) + [f"{path} is left" for path in place.left(name)]
        failures += [f"kill {sum(kills.values())}, {name}: {problem}" for problem in wrong]
    return kills, failures


def main() -> None:
    """Kill commands and print what became of what they worked on."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        kills, failures = attack(Path(folder), arguments.count, arguments.seed)
    print(f"{sum(kills.values())} kills ({', '.join(f'{name} {number}' for name, number in sorted(kills.items()))}),", end=" ")
    print(f"{len(failures)} failures, {time.monotonic() - began:.0f} s")
    for failure in failures:
        print(f"FAILED {failure}")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
