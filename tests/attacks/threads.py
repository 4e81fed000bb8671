"""Many threads over one cache: every result is, bit for bit, that of the same calls one after the other.

    python -m tests.attacks.threads --threads 8 --calls 600

First all threads call `attend`, each with its own query. Then they mix `attend`, `decode` and `prefill`. All tokens are alike, so that the
contents of the cache depend on their number alone: a result must be that of some length between the first and the last. Exits with 1
where a result is another.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kvgen.runtime.kvcache import KVCache
from kvgen.runtime.variant import Variant
from kvgen.spec import KernelSpec
from tests.support.cpu import spec_of, variant

START = 2500


@dataclass
class Tally:
    """Results that were right, wrong, and calls that raised."""

    right: int = 0
    wrong: int = 0
    refused: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.right} right, {self.wrong} wrong, {len(self.refused)} refused" + "".join(
            f"\n  {reason}" for reason in self.refused[:3]
        )


class Attack:
    """A kernel whose calls are cut into shares, so that they use their workspace, and the tensors of its calls."""

    def __init__(self, spec: KernelSpec | None = None) -> None:
        self.kernel: Variant = variant(spec or spec_of(k="4c32", v="4t32"), (("split_tokens", 1024), ("block", 32)))
        a = self.kernel.spec.attention
        generator = torch.Generator().manual_seed(5)
        self.q = torch.randn(1, 1, a.q_heads, a.head_dim, generator=generator).to(self.kernel.dtype)
        self.k, self.v = torch.randn(2, 1, 1, a.kv_heads, a.head_dim, generator=generator).to(self.kernel.dtype)

    def cache(self, room: int) -> KVCache:
        """A cache of START random tokens with room for more."""
        cache = self.kernel.new_cache(1, START + room)
        a = self.kernel.spec.attention
        k, v = torch.randn(2, 1, START, a.kv_heads, a.head_dim, generator=torch.Generator().manual_seed(6)).to(self.kernel.dtype)
        self.kernel.prefill(cache, k, v)
        return cache

    def attends(self, threads: int, calls: int) -> Tally:
        """Each thread attends `calls` times with a query of its own, whose partial results would not do for another's."""
        cache = self.cache(1)
        queries = [self.q * (1 + thread) / threads for thread in range(threads)]
        truths = [self.kernel.attend(q, cache) for q in queries]
        tally = Tally()

        def one(turn: int) -> bool:
            return torch.equal(self.kernel.attend(queries[turn // calls], cache), truths[turn // calls])

        run(threads, calls, one, tally)
        return tally

    def mixed(self, threads: int, calls: int) -> Tally:
        """Of every four calls two attend, one decodes, one prefills a token. Afterwards the cache is that of as many serial calls."""
        cache, serial = self.cache(threads * calls), self.cache(threads * calls)
        attended, decoded = [self.kernel.attend(self.q, serial)], []
        for _ in range(threads * (calls // 4 * 2 + 2)):
            decoded.append(self.kernel.decode(self.q, self.k, self.v, serial))
            attended.append(self.kernel.attend(self.q, serial))
        tally = Tally()
        appended = [0] * threads
        places = {name: {out.numpy().tobytes() for out in outs} for name, outs in (("attend", attended), ("decode", decoded))}

        def one(turn: int) -> bool:
            thread, call = divmod(turn, calls)
            if call % 4 == 1:
                out = self.kernel.decode(self.q, self.k, self.v, cache)
                appended[thread] += 1
                return out.numpy().tobytes() in places["decode"]
            if call % 4 == 3:
                self.kernel.prefill(cache, self.k, self.v)
                appended[thread] += 1
                return True
            return self.kernel.attend(self.q, cache).numpy().tobytes() in places["attend"]

        run(threads, calls, one, tally)
        after = START + sum(appended)
        fits = cache.bound == after and cache.lengths.tolist() == [after]
        same = fits and torch.equal(self.kernel.attend(self.q, cache), attended[after - START])
        tally.right, tally.wrong = tally.right + same, tally.wrong + (not same)
        return tally


def run(threads: int, calls: int, one: Callable[[int], bool], tally: Tally) -> None:
    """Call one(turn) `calls` times in each of `threads` threads that begin together, turn counting over all of them."""
    together, lock = threading.Barrier(threads), threading.Lock()

    def work(thread: int) -> None:
        together.wait()
        answers = [attempt(one, thread * calls + call) for call in range(calls)]
        with lock:
            tally.right += answers.count(True)
            tally.wrong += answers.count(False)
            tally.refused += [answer for answer in answers if isinstance(answer, str)]

    workers = [threading.Thread(target=work, args=(thread,)) for thread in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def attempt(one: Callable[[int], bool], turn: int) -> bool | str:
    """Whether the call's result was right, or the error it raised."""
    try:
        return one(turn)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main() -> int:
    """Attack and print; 1 where a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--calls", type=int, default=600, help="calls of all threads together")
    given = parser.parse_args()
    each = max(4, given.calls // given.threads)
    attack = Attack()
    tallies = {"attend": attack.attends(given.threads, each), "attend, decode, prefill": attack.mixed(given.threads, each)}
    for name, tally in tallies.items():
        print(f"{given.threads} threads, {name}: {tally}")
    return int(any(tally.wrong for tally in tallies.values()))


if __name__ == "__main__":
    sys.exit(main())
