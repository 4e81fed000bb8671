"""Random calls: specs of the whole language, schedules of the whole search space, hard data, calls in any order, against the reference.

    python -m tests.lives cpu --count 1500        # the CPU back end
    python -m tests.lives emulated --count 200    # CUDA's headers on the CPU; with --races also their data races
    python -m tests.lives tilelang --count 200    # TileLang's programs on the CPU
    python -m tests.lives gpu --count 2000        # compiled CUDA and TileLang variants, on a GPU

A number is a variant with some lives. On a GPU the lives are divided among `--variants`, the same of a seed on every machine; each lives in
a process of its own, so that one that crashes or hangs loses no other.
`--compile` puts them into the cache of compiled modules (`KVGEN_CACHE_DIR`), which needs nvcc and no GPU. A failure is printed with the
command that repeats it. Exit code 1 where one failed, or none was lived.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from kvgen.errors import KvgenError
from tests.lives.emulated import emulated, tilelang
from tests.lives.run import Built, LifeCase, apart, cpu, drawn_cases, lives, on_gpu
from tests.unit.lower_cuda import race_checks

KINDS: dict[str, tuple[Built | None, int, int]] = {
    "cpu": (cpu, 8, 1500), "emulated": (emulated, 5, 200), "tilelang": (tilelang, 8, 200),
    "gpu": (None, 0, 2000),
}  # fmt: skip
"""What builds a number's variant, lives of a number, and lives by default."""


def main(argv: Sequence[str] | None = None) -> int:
    """Live; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.lives", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--count", type=int, help="lives in all")
    parser.add_argument("--seed", type=int, default=0, help="the first number; of a GPU's variants")
    parser.add_argument("--only", type=int, help="this number alone")
    parser.add_argument("--life", type=int, help="this life of each number alone")
    parser.add_argument("--races", action="store_true", help="emulated: look for data races and misaligned accesses")
    parser.add_argument("--variants", type=int, default=100, help="gpu: variants that the lives are divided among")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="gpu: processes side by side")
    parser.add_argument("--compile", action="store_true", help="gpu: compile the variants, and live no life")
    args = parser.parse_args(argv)
    if args.races and (why := race_checks.unsupported()):
        parser.error(f"--races needs another compiler: {why}")
    built, each, usual = KINDS[args.kind]
    count, start = args.count or usual, time.monotonic()
    if built is None:
        cases = drawn_cases(args.seed, args.variants)
        chosen = range(args.variants) if args.only is None else [args.only]
        if args.compile:
            return compile_all(cases, chosen, args.jobs)
        each = -(-count // len(chosen))
        tasks = [partial(apart, partial(on_gpu, cases[n]), n) for n in sorted(chosen, key=lambda n: not cases[n].foreign)]
        again = f"gpu --seed {args.seed} --variants {args.variants} --only"  # PTX, which takes longest to load, comes first
    else:
        tasks = [
            partial(lives, built, n, races=args.races)
            for n in (range(args.seed, args.seed + -(-count // each)) if args.only is None else [args.only])
        ]
        again = f"{args.kind}{' --races' if args.races else ''} --only"
    numbers = range(each) if args.life is None else [args.life]
    lived = failed = 0
    with ThreadPoolExecutor(args.jobs if built is None else 1) as threads:
        for one in threads.map(lambda task: task(numbers), tasks):
            lived, failed = lived + one.lives, failed + len(one.failures)
            for failure in one.failures:
                print(f"{failure}\n  python -m tests.lives {again} {one.number}\n", flush=True)
    print(f"{lived} lives of {len(tasks)} variants, {failed} failed, {time.monotonic() - start:.0f} s")
    return int(failed > 0 or lived == 0)


def compile_all(cases: Sequence[LifeCase], chosen: Sequence[int], jobs: int) -> int:
    """Compile what is not compiled yet; the exit code."""

    def compiled(number: int) -> bool:
        try:
            size = cases[number].artifact().path.stat().st_size
        except KvgenError as error:
            first, *log = str(error).splitlines()
            errors = "\n".join([f"{type(error).__name__}: {first}", *(line[:200] for line in log if "error" in line)])
            print(f"variant {number}: {errors}\n{cases[number]}\n", flush=True)
            return False
        print(f"variant {number}: {size >> 10} KiB", flush=True)
        return True

    with ThreadPoolExecutor(jobs) as threads:
        done = list(threads.map(compiled, chosen))
    print(f"{len(done)} variants, {done.count(False)} failed")
    return int(not all(done))


if __name__ == "__main__":
    sys.exit(main())
