"""Calls from several threads over one cache, and processes that fork."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest
import torch

from kvgen.runtime.calls import Variant
from tests.attacks.threads import Attack
from tests.support.naive import naive_layout, naive_spec


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
    cache = attack.cache(8)
    expected = attack.kernel.attend(attack.q, cache)
    torch.randn(1 << 20).exp().sum()

    def work() -> bool:
        torch.randn(1 << 20).exp().sum()
        return torch.equal(attack.kernel.attend(attack.q, cache), expected)

    assert in_child(work) is True
    assert torch.equal(attack.kernel.attend(attack.q, cache), expected)
