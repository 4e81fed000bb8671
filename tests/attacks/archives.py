"""`python -m tests.attacks.archives --count 500 --seed 0`: damaged and hostile archives, none of which may be taken.

An archive with modules is exported, damaged in `--count` ways and imported. Each must be refused with a KvgenError that gives a
reason; store, cache and a tree of canary files around them must be what they were. Exit code 1 where one is taken or does harm.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import resource
import sys
import tempfile
from collections import Counter
from itertools import cycle, islice
from pathlib import Path

from kvgen.errors import HostError, KvgenError
from kvgen.lower import backend as backends
from kvgen.registry import Store, archive
from kvgen.toolchain import ArtifactCache
from kvgen.tune.compile_only import compile_space
from tests.attacks.damages import DAMAGES
from tests.support.tuning import FakeBackend, tiny_spec

MOST_MEMORY = 1 << 30
"""Bytes of address space that imports may use beyond what is mapped: a bomb that is not refused shows here."""


def tree(root: Path) -> dict[str, str]:
    """Everything below a folder, by path: digests of files; the cache's scratch folder and empty locks apart."""
    found = {}
    for path in sorted(root.rglob("*")):
        place = path.relative_to(root).as_posix()
        if place.startswith(("victim/cache/tmp", "archive.tar.gz")) or path.name == ".lock":
            continue
        found[place] = "link" if path.is_symlink() else hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
    return found


def exported(root: Path) -> bytes:
    """An archive of one entry and its modules."""
    store, cache = Store(root / "registry"), ArtifactCache(root / "cache")
    backends.get_backend = FakeBackend  # type: ignore[assignment]
    backends.backends_for = lambda _: [FakeBackend()]  # type: ignore[assignment, list-item]
    compile_space(tiny_spec(), "cpu", backends=[FakeBackend()], store=store, cache=cache, limit=3)
    sent = archive.export_archive(store.all(), root / "good.tar.gz", cache)
    assert sent.modules
    return (root / "good.tar.gz").read_bytes()


def canaries(root: Path) -> None:
    """Files that hostile names aim at, above and beside the store and the cache."""
    for place in ("evil", "victim/evil", "victim/cache/evil", "victim/cache/modules/evil/x", "victim/registry/evil/x", "etc/evil"):
        file = root / place
        file.parent.mkdir(parents=True, exist_ok=True)
        (file / "canary" if place.endswith("/x") else file).parent.mkdir(parents=True, exist_ok=True)
        (file / "canary" if place.endswith("/x") else file).write_text("canary")


def attack(root: Path, count: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Damage an archive in `count` ways and try to import each below `root`: what was refused, by the damage, and what went wrong."""
    good, rng = exported(root / "sender"), random.Random(seed)
    canaries(root)
    file, refused, failures = root / "archive.tar.gz", Counter[str](), list[str]()
    store, cache = Store(root / "victim" / "registry"), ArtifactCache(root / "victim" / "cache")
    before = tree(root)
    for name in islice(cycle(DAMAGES), count):
        file.write_bytes(DAMAGES[name](good, rng))
        try:
            archive.import_archive(file, store, cache)
            failures.append(f"{name}: it was taken")
        except HostError as error:
            failures.append(f"{name}: called a failure of this machine: {error}")
        except KvgenError as error:
            refused[name] += 1
            if not str(error).rpartition("was taken: ")[2]:
                failures.append(f"{name}: refused without a reason")
        except BaseException as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")
        after = tree(root)
        if after != before:
            failures.append(f"{name}: it touched {sorted({path for path, _ in before.items() ^ after.items()})[:5]}")
            before = after
    if list((cache.root / "tmp").glob("*")):
        failures.append("something is left in the cache's scratch folder")
    file.write_bytes(good)
    archive.import_archive(file, store, cache)  # and the good one is taken
    return refused, failures


def main() -> None:
    """Run the attacks and print what became of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MOST_MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    with tempfile.TemporaryDirectory() as folder:
        refused, failures = attack(Path(folder), arguments.count, arguments.seed)
    print(*(f"{number:5} {name} refused" for name, number in refused.items()), *(f"FAILED {failure}" for failure in failures), sep="\n")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
