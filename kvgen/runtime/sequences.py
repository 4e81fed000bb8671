"""The sequences that caches hold: lengths and block table on the device, the host's knowledge of them, and the order of calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_int32
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor

from kvgen.errors import CacheMismatch
from kvgen.runtime import checks
from kvgen.runtime.module import Module

if TYPE_CHECKING:
    from kvgen.runtime.kvcache import KVCache

NO_ROOM = (
    "a step before this call had no room: sequences that would have grown beyond the cache's max_len kept their length, and nothing was "
    "written for them"
)
TOO_SHORT = (
    "a crop before this call took back more tokens than cache.rollback allows, or than a sequence had: such sequences kept their length"
)


class CallOrder:
    """Orders the calls over caches that share sequences: threads by `lock`, streams of a GPU by `follow`, called under the lock.

    A call writes to a workspace that all calls of its module share, and `decode` and `prefill` write to the cache. TVM-FFI releases the
    GIL for the time of a call, so without the lock threads would run at once.
    """

    def __init__(self) -> None:
        self.lock = Lock()
        self._raw = -1
        self._stream: torch.cuda.Stream | None = None

    def follow(self, index: int) -> None:
        """Let the current stream of GPU `index` wait for the stream of the call before, if that was another one.

        The host does not wait. A stream that is being captured cannot wait for work outside of the capture: the graph's replays have to be
        ordered by the caller.
        """
        raw = torch._C._cuda_getCurrentRawStream(index)
        if raw == self._raw or torch.cuda.is_current_stream_capturing():
            return
        current = torch.cuda.current_stream(index)
        if self._stream is not None:
            current.wait_stream(self._stream)
        self._raw, self._stream = raw, current


class OverflowFlag:
    """An int32 that a kernel sets to 1 where a sequence has no room for a step's tokens, and that the host reads without waiting.

    On a GPU it lies in pinned host memory, which the device reaches by the same address. `message` is of the error that `check` raises.
    """

    def __init__(self, gpu: bool, message: str = NO_ROOM) -> None:
        self._message = message
        self._tensor = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=gpu)  # whatever torch's default device is
        self.address = self._tensor.data_ptr()
        self._number = c_int32.from_address(self.address)

    def check(self) -> None:
        """Raises CacheMismatch once where a step overflowed since the last check."""
        if self._number.value:
            self._number.value = 0
            raise CacheMismatch(self._message)

    def clear(self, gpu: int | None) -> None:
        """Forget the steps before this call, for which the host waits: a GPU may still run some of them."""
        if gpu is not None:
            torch.cuda.current_stream(gpu).synchronize()
        self._number.value = 0


@dataclass(eq=False, repr=False)
class Sequences:
    """Lengths and block table of a batch, what the host knows of them, and the workspaces and the order of calls over them."""

    lengths: Tensor
    """int32 [batch]."""
    block_table: Tensor | None
    """int32 [batch, max_pages] of paged caches."""
    batch: int
    max_len: int
    module: Module
    """The module whose `advance` and `crop` write the lengths."""
    rollback: int = 0
    """Most tokens that `crop` may take back."""
    bound: int = 0
    """No sequence is longer, as far as the host has counted; see `longest`."""
    uniform: bool = True
    """Whether the host knows that all lengths are equal. As long as nothing was captured, all of them are `bound` then."""
    version: int = 0
    """Changes with every change of lengths that the host enqueues: a plan is of one version."""
    captured: bool = False
    """Whether a change of lengths was captured in a CUDA graph: then the host, which sees no replay, knows only `max_len`."""
    layers: WeakSet[KVCache] = field(default_factory=WeakSet)
    """The caches that have these sequences, as long as they live."""
    workspaces: dict[str, Tensor] = field(default_factory=dict)
    """By the key of an executable."""
    row_workspaces: dict[str, Tensor] = field(default_factory=dict)
    """Workspaces of all single sequences of these, whose calls run one after the other."""
    call_order: CallOrder = field(default_factory=CallOrder)
    whole: Sequences | None = None
    """The sequences of which this is one (`kvgen.runtime.kvcache.row_of`)."""
    least: Tensor | None = field(init=False)
    """int32 [batch]: the shortest lengths that `crop` may leave, as of the last crop; None without a rollback."""
    overflow: OverflowFlag = field(init=False)
    cropped: OverflowFlag = field(init=False)
    """Set where a crop went below `least`."""
    gpu: int | None = field(init=False)
    """Index of the GPU that holds the lengths; None on the CPU."""

    def __post_init__(self) -> None:
        self.gpu = self.lengths.device.index if self.lengths.is_cuda else None
        self.overflow = OverflowFlag(self.gpu is not None)
        self.cropped = OverflowFlag(self.gpu is not None, TOO_SHORT)
        self.least = torch.zeros_like(self.lengths) if self.rollback else None

    def __getstate__(self) -> dict[str, Any]:
        """Of a deep copy, which is of other memory: its caches, calls and flags are its own. Copied caches enter `layers` by themselves."""
        return {name: x for name, x in self.__dict__.items() if name not in ("layers", "call_order", "overflow", "cropped")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.layers, self.call_order = WeakSet(), CallOrder()
        self.overflow, self.cropped = OverflowFlag(self.gpu is not None), OverflowFlag(self.gpu is not None, TOO_SHORT)

    # --- what the host knows ---------------------------------------------------------------------------------------------

    @property
    def capturing(self) -> bool:
        """Whether calls are being captured in a CUDA graph."""
        return self.gpu is not None and torch.cuda.is_current_stream_capturing()

    @property
    def counted(self) -> list[Tensor]:
        """The tensors that change with the lengths."""
        return [self.lengths] if self.least is None else [self.lengths, self.least]

    @property
    def shared(self) -> bool:
        """Whether several layers have these sequences."""
        return len(self.layers) > 1 and len(self.distinct_layers()) > 1

    @property
    def longest(self) -> int:
        """An upper bound of all lengths, without asking the device."""
        return self.max_len if self.captured else self.bound

    def after(self, tokens: int, counts: Tensor | None = None) -> int:
        """An upper bound of all lengths after every sequence grew by `tokens`; with `counts`, sequence b by `counts[b]`, which is at most
        `tokens`. Raises CacheMismatch if it exceeds `max_len`.

        The longest sequence may be shorter than the host's bound: before it refuses, it asks the device, which waits. If it cannot know,
        because a change of lengths was or is being captured, the device refuses such a step.
        """
        if self.captured or self.capturing:
            return self.max_len
        bound = self.bound + tokens
        if bound > self.max_len:
            self.bound = int(self.lengths.max())
            bound = int((self.lengths + (tokens if counts is None else counts)).max())
        if bound > self.max_len:
            raise CacheMismatch(
                f"the cache holds max_len={self.max_len} tokens per sequence, and {bound} could be needed after {tokens} more: a cache is "
                "made with a larger max_len, or emptied by clear() or reset()"
            )
        return bound

    def appended(self, bound: int, *, uniform: bool = True) -> None:
        """Record a change of lengths that was enqueued. `bound`: the result of `after`; `uniform`: whether all grew by the same number."""
        self.uniform = self.uniform and uniform
        capturing = self.capturing
        if not capturing:
            self.bound = bound
        self.changed(capturing)

    def check(self) -> None:
        """Raises CacheMismatch where the device refused an earlier change of lengths."""
        self.overflow.check()
        if not self.rollback:
            return
        try:
            self.cropped.check()
        except CacheMismatch:
            counted: Sequences | None = self
            while counted is not None:  # the host has counted tokens as taken back that were not; the flag is of all sequences
                counted.bound, counted.uniform = counted.max_len, False
                counted = counted.whole
            raise

    def distinct_layers(self) -> list[KVCache]:
        """One cache of every layer: shallow copies of a cache are one layer."""
        return list({id(cache.packed): cache for cache in self.layers}.values())

    def changed(self, capturing: bool) -> None:
        """Record a change of lengths; if these are one sequence of others, for those too."""
        self.version += 1
        self.captured = self.captured or capturing
        if self.whole is not None:
            self.whole.bound = max(self.whole.bound, self.bound)
            self.whole.uniform = False
            self.whole.captured = self.whole.captured or self.captured
            self.whole.changed(capturing)

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Serialize what is enqueued within with all other calls over these sequences."""
        checks.eager()
        with self.call_order.lock:
            if self.gpu is not None:
                self.call_order.follow(self.gpu)
            yield

    def length_of(self, index: int) -> int:
        """The length of a sequence; waits for the device, behind the calls so far."""
        with self.in_order():
            return int(self.lengths[index])
