"""A build of one host over a shared storage: `python -m tests.support.sharing URL FOLDER STALE_SECONDS`. It says `ready` and waits for a
line, so that several begin together. Measurements are made up and take 0.2 s; it prints a line for each, and last how many it made.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from time import sleep

import pytest

from kvgen.errors import KvgenError
from kvgen.measure.measurement import Candidate, Measurement
from kvgen.registry import Store
from kvgen.toolchain import Artifact, ArtifactCache
from kvgen.tune import storage
from kvgen.tune.tuner import tune
from tests.support.tuning import FakeBackend, FakeRunner, compile_nothing, tiny_spec


class Slow(FakeRunner):
    def measure(self, candidate: Candidate, artifact: Artifact, device: int, seconds: float = math.inf) -> Measurement | None:
        sleep(0.2)
        print("measured", flush=True)
        return super().measure(candidate, artifact, device)


def main(url: str, folder: Path, stale: float) -> None:
    compile_nothing(pytest.MonkeyPatch())
    storage.STALE_S = stale
    cache, store = ArtifactCache(folder / "cache"), Store(folder / "registry")
    print("ready", flush=True)
    sys.stdin.readline()
    result = tune(tiny_spec(), "cpu", backends=[FakeBackend()], runner=Slow(), storage=url, cache=cache, store=store)
    print(result.measured, result.entry.layout["block"])


if __name__ == "__main__":
    try:
        main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
    except KvgenError as error:
        sys.exit(str(error))
