"""Many threads over one cache: every result is, bit for bit, that of the same calls one after the other.

    python -m tests.attacks.threads --threads 8 --calls 600

First all threads call `attend`, each with its own query. Then they mix `attend`, `decode` and `prefill`. All tokens are alike, so that the
contents of the cache depend on their number alone: a result must be that of some length between the first and the last. Exits with 1
where a result is another.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch

from kvgen.runtime.kvcache import KVCache
from tests.support.cpu import spec_of, variant

START = 2500


class Attack:
    """A kernel whose calls are cut into shares, so that they use their workspace, and the tensors of its calls."""

    def __init__(self) -> None:
        self.kernel = variant(spec_of(k="4c32", v="4t32"), (("split_tokens", 1024), ("block", 32)))
        a = self.kernel.spec.attention
        generator = torch.Generator().manual_seed(5)
        self.q = torch.randn(1, 1, a.q_heads, a.head_dim, generator=generator).to(self.kernel.dtype)
        self.k, self.v = torch.randn(2, 1, 1, a.kv_heads, a.head_dim, generator=generator).to(self.kernel.dtype)
        self.filling = torch.randn(2, 1, START, a.kv_heads, a.head_dim, generator=generator).to(self.kernel.dtype)

    def cache(self, room: int) -> KVCache:
        """A cache of START random tokens with room for more."""
        cache = self.kernel.new_cache(1, START + room)
        self.kernel.prefill(cache, *self.filling)
        return cache

    def attends(self, threads: int, calls: int) -> list[object]:
        """Each thread attends `calls` times with a query of its own, whose partial results would not do for another's."""
        cache = self.cache(1)
        queries = [self.q * (1 + thread) / threads for thread in range(threads)]
        truths = [self.kernel.attend(q, cache) for q in queries]
        return run(threads, calls, lambda thread, _: torch.equal(self.kernel.attend(queries[thread], cache), truths[thread]))

    def mixed(self, threads: int, calls: int) -> list[object]:
        """Of every four calls two attend, one decodes, one prefills a token. Afterwards the cache is that of as many serial calls."""
        cache, serial = self.cache(threads * calls), self.cache(threads * calls)
        attended, decoded = [self.kernel.attend(self.q, serial)], []
        for _ in range(threads * (calls // 4 * 2 + 2)):
            decoded.append(self.kernel.decode(self.q, self.k, self.v, serial))
            attended.append(self.kernel.attend(self.q, serial))
        right_attends, right_decodes = ({out.numpy().tobytes() for out in outs} for outs in (attended, decoded))
        appended = [0] * threads

        def one(thread: int, call: int) -> bool:
            if call % 4 == 1:
                out = self.kernel.decode(self.q, self.k, self.v, cache)
                appended[thread] += 1
                return out.numpy().tobytes() in right_decodes
            if call % 4 == 3:
                self.kernel.prefill(cache, self.k, self.v)
                appended[thread] += 1
                return True
            return self.kernel.attend(self.q, cache).numpy().tobytes() in right_attends

        answers = run(threads, calls, one)
        after = START + sum(appended)
        fits = cache.bound == after and cache.lengths.tolist() == [after]
        return [*answers, fits and torch.equal(self.kernel.attend(self.q, cache), attended[after - START])]


def run(threads: int, calls: int, one: Callable[[int, int], bool]) -> list[object]:
    """one(thread, call) of `calls` calls in each of `threads` threads that begin together: whether each was right, or what it raised."""
    together = Barrier(threads)

    def attempt(thread: int, call: int) -> object:
        try:
            return one(thread, call)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def work(thread: int) -> list[object]:
        together.wait()
        return [attempt(thread, call) for call in range(calls)]

    with ThreadPoolExecutor(threads) as pool:
        return [answer for answers in pool.map(work, range(threads)) for answer in answers]


def main() -> int:
    """Attack and print; 1 where a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--calls", type=int, default=600, help="calls of all threads together")
    given = parser.parse_args()
    each, wrong, attack = max(4, given.calls // given.threads), False, Attack()
    for name, attempts in (("attend", attack.attends), ("attend, decode, prefill", attack.mixed)):
        answers = attempts(given.threads, each)
        refused = [answer for answer in answers if isinstance(answer, str)]
        print(f"{given.threads} threads, {name}: {answers.count(True)} right, {answers.count(False)} wrong, {len(refused)} refused")
        print(*(f"  {reason}" for reason in refused[:3]), sep="\n", end="\n" * bool(refused))
        wrong |= False in answers
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
