"""A quantized KV cache: its tensors, what the host knows of its lengths, and the order of the calls over it."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import torch

from kvgen.errors import CacheMismatch
from kvgen.toolchain import checks, forks

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]
"""packed, k_residual, v_residual, lengths, block_table of a cache."""


class Turns:
    """Orders the calls over one cache: threads by `lock`, streams of a GPU by `follow`, which a call makes while it holds the lock.

    A call writes to a workspace that all calls of its module over the cache share, and `decode` and `prefill` write to the cache. TVM-FFI
    releases the GIL for the time of a call, so without the lock threads would run at once.
    """

    __slots__ = ("__weakref__", "_raw", "_stream", "lock")

    def __init__(self) -> None:
        self.lock: Any = Lock()
        self._raw = -1
        self._stream: torch.cuda.Stream | None = None
        forks.watch(self)

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

    def after_fork(self) -> None:
        """In a forked child: a call that another thread of the parent was in never ends here."""
        self.lock = forks.Torn() if self.lock.locked() else Lock()

    def __reduce__(self) -> tuple[type[Turns], tuple[()]]:
        return Turns, ()  # a deep copy of a cache is another cache


@dataclass(slots=True, eq=False)
class KVCache:
    """Quantized keys and values of `batch` sequences; shapes are those of `docs/abi.md`.

    `bound` is what the host knows of the lengths: no sequence is longer. It grows by the tokens of every call that succeeded; lengths
    themselves stay on the device. Calls over one cache take turns, from whichever thread or stream they come.
    """

    packed: torch.Tensor
    k_residual: torch.Tensor
    v_residual: torch.Tensor
    lengths: torch.Tensor
    block_table: torch.Tensor | None
    layout_id: str
    batch: int
    max_len: int
    bound: int = 0
    workspaces: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)
    turns: Turns = field(default_factory=Turns, repr=False)
    device: torch.device = field(init=False)
    gpu: int | None = field(init=False, repr=False)
    """Index of the GPU that holds the tensors; None on the CPU."""

    def __post_init__(self) -> None:
        self.device = self.packed.device
        self.gpu = self.device.index if self.device.type == "cuda" else None

    @property
    def tensors(self) -> Tensors:
        """What modules take of a cache, in the order of their arguments."""
        return self.packed, self.k_residual, self.v_residual, self.lengths, self.block_table

    @property
    def nbytes(self) -> int:
        """Bytes of packed blocks and residuals."""
        return sum(t.numel() * t.element_size() for t in (self.packed, self.k_residual, self.v_residual))

    def after(self, tokens: int) -> int:
        """The bound after `tokens` more tokens per sequence. Raises CacheMismatch beyond `max_len`."""
        bound = self.bound + tokens
        if bound > self.max_len:
            raise CacheMismatch(f"the cache holds {self.max_len} tokens per sequence, and {bound} could be needed after {tokens} more")
        return bound

    def grow(self, tokens: int) -> int:
        """Count `tokens` more tokens per sequence; the new bound. Raises CacheMismatch beyond `max_len`, which counts nothing.

        Replays of a captured graph do not come by here: the caller that replays it calls `grow`, once per replayed decode.
        """
        tokens = checks.whole("tokens", tokens, 0)
        with self.turns.lock:
            self.bound = self.after(tokens)
            return self.bound

    def clear(self) -> None:
        """Forget every token; memory is kept."""
        with self.turns.lock:
            if self.gpu is not None:
                self.turns.follow(self.gpu)
            self.lengths.zero_()
            self.bound = 0
