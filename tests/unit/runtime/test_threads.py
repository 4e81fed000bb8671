"""Calls from several threads over one cache, and processes that fork."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest
import torch

from kvgen.runtime.calls import Variant
from kvgen.runtime.kvcache import KVCache
from tests.support.cpu import spec_of, variant
from tests.support.naive import naive_layout, naive_spec

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
    together = threading.Barrier(threads)

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


@pytest.fixture(scope="module")
def attack() -> Attack:
    return Attack()


def test_mixed_calls_from_several_threads_are_those_of_one(attack: Attack) -> None:
    assert attack.mixed(4, 12) == [True] * 49


def test_calls_over_one_cache_never_run_at_once() -> None:
    """Whatever a module does: here each call leaves the GIL to others while it is in the module."""
    inside = []
    most = []

    def call(*_: object) -> None:
        inside.append(1)
        threading.Event().wait(0.001)
        most.append(len(inside))
        inside.pop()

    functions = dict.fromkeys(("attend", "decode", "pack", "unpack"), call)
    module = SimpleNamespace(**functions, workspace_bytes=lambda *_: 64, set_threads=None)
    spec = naive_spec()
    variant = Variant(spec, naive_layout(spec), module)  # type: ignore[arg-type]
    cache = variant.new_cache(1, 4096)
    q, new = torch.zeros(1, 1, 4, 32), torch.zeros(1, 1, 2, 32)
    calls: tuple[Callable[[], object], ...] = (
        lambda: variant.attend(q, cache),
        lambda: variant.decode(q, new, new, cache),
        lambda: variant.prefill(cache, new, new),
        lambda: variant.unpack(cache),
    )
    threads = [threading.Thread(target=lambda call=call: [call() for _ in range(5)]) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 20
    assert cache.bound == 10


# --- forks -----------------------------------------------------------------------------------------------------------


def in_child(work: Callable[[], object]) -> object:
    """What `work` gives in a forked child, or the error it raises. Fails where the child does not answer."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()

    def child(to: Connection) -> None:
        try:
            to.send(work())
        except Exception as error:
            to.send(error)

    process = context.Process(target=child, args=(theirs,))
    process.start()
    try:
        assert mine.poll(60), "the child hangs"
        return mine.recv()
    finally:
        process.kill()
        process.join()


def test_a_forked_child_computes_what_its_parent_does(attack: Attack) -> None:
    """The parent used OpenMP's threads, in kvgen and in torch; the child would wait for them forever."""
    cache, before, set_threads = attack.cache(8), torch.get_num_threads(), attack.kernel.module.set_threads
    assert set_threads is not None

    def work() -> bool:
        torch.randn(1 << 20).exp().sum()
        return torch.equal(attack.kernel.attend(attack.q, cache), expected)

    try:
        torch.set_num_threads(2)
        set_threads(2)
        expected = attack.kernel.attend(attack.q, cache)
        torch.randn(1 << 20).exp().sum()
        assert in_child(work) is True
        assert work()
    finally:
        torch.set_num_threads(before)
        set_threads(0)
