"""A quantized KV cache: its tensors, and the sequences that it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvgen.runtime import checks
from kvgen.runtime.sequences import CallOrder, Sequences, described

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, None]
"""packed, k_residual, v_residual, lengths, block_table, residual_slots of a cache; the last is reserved."""


class _Referable:
    """Instances can be referred to weakly, which a dataclass with slots allows by itself from Python 3.11 on."""

    __slots__ = ("__weakref__",)


@dataclass(slots=True, eq=False)
class KVCache(_Referable):
    """Quantized keys and values of `batch` sequences; shapes are those of `docs/abi.md`.

    Lengths stay on the device. Several caches may have the same sequences (`new_cache(like=...)`): the layers of a model, whose lengths
    advance once per step. Calls over such caches run one after the other, from whichever thread or stream they come.
    """

    packed: torch.Tensor
    k_residual: torch.Tensor
    v_residual: torch.Tensor
    layout_id: str
    block_tokens: int
    """Tokens of a packed block, N_r."""
    sequences: Sequences
    device: torch.device = field(init=False)
    gpu: int | None = field(init=False)
    """Index of the GPU that holds the tensors; None on the CPU."""

    def __post_init__(self) -> None:
        self.device = self.packed.device
        self.gpu = self.sequences.gpu
        self.sequences.layers.add(self)

    def __setstate__(self, state: tuple[None, dict[str, Any]]) -> None:
        """Of a copy. Caches that are deeply copied together share their sequences again; a shallow copy is the same layer."""
        for name, value in state[1].items():
            setattr(self, name, value)
        self.sequences.layers.add(self)

    def __repr__(self) -> str:
        known = f"batch={self.batch}, max_len={self.max_len}, {self.sequences.lengths_known}"
        held = {"packed": self.packed, "k_residual": self.k_residual, "v_residual": self.v_residual, "block_table": self.block_table}
        shapes = ", ".join(f"{name}={described(tensor)}" for name, tensor in held.items() if tensor is not None)
        return f"KVCache({known}, {shapes}, nbytes={self.nbytes}, device={str(self.device)!r}, layout_id={self.layout_id!r})"

    @property
    def tensors(self) -> Tensors:
        """The tensors of a cache, in the order of a module's arguments."""
        return self.packed, self.k_residual, self.v_residual, self.sequences.lengths, self.sequences.block_table, None

    @property
    def nbytes(self) -> int:
        """Bytes of packed blocks and residuals."""
        return sum(t.numel() * t.element_size() for t in (self.packed, self.k_residual, self.v_residual))

    @property
    def lengths(self) -> torch.Tensor:
        """Tokens of every sequence, int32 [batch] on the device."""
        return self.sequences.lengths

    @property
    def block_table(self) -> torch.Tensor | None:
        """Pages of every sequence, int32 [batch, max_pages]; None where the cache is contiguous."""
        return self.sequences.block_table

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.sequences.batch

    @property
    def max_len(self) -> int:
        """Most tokens of a sequence."""
        return self.sequences.max_len

    @property
    def bound(self) -> int:
        """No length exceeds it, as far as the host knows; `max_len` once a change of lengths was captured in a CUDA graph."""
        return self.sequences.longest

    @bound.setter
    def bound(self, tokens: int) -> None:
        self.sequences.bound = tokens

    @property
    def call_order(self) -> CallOrder:
        """The order of calls over these sequences."""
        return self.sequences.call_order

    @property
    def workspaces(self) -> dict[str, torch.Tensor]:
        """Workspaces of kernels for these sequences: one for all caches that have them."""
        return self.sequences.workspaces

    def after(self, tokens: int) -> int:
        """The bound after `tokens` more tokens per sequence. Raises CacheMismatch beyond `max_len`."""
        return self.sequences.after(tokens)

    def grow(self, tokens: int) -> int:
        """Count `tokens` more tokens per sequence; the new bound. Raises CacheMismatch beyond `max_len`, which counts nothing.

        For callers of a bare module, who advance lengths without kvgen. Replays of a captured graph do not need it: the device refuses
        a step beyond `max_len`, and calls that must know the longest sequence ask the device.
        """
        tokens = checks.whole("tokens", tokens, 0)
        with self.call_order.lock:
            self.sequences.appended(self.after(tokens))
            return self.bound

    def advance(self, tokens: int | torch.Tensor | Sequence[int]) -> None:
        """The end of a step over a plan: lengths advance by `tokens`, once for all caches that share them (`Sequences.advance`)."""
        self.sequences.advance(tokens)

    def crop(self, tokens: int | torch.Tensor | Sequence[int]) -> None:
        """Take back the newest tokens of the sequences, of all caches that share them: rejected drafts, for example (`Sequences.crop`)."""
        self.sequences.crop(tokens)

    def reset(self, rows: Sequence[int] | torch.Tensor) -> None:
        """Forget every token of some sequences, of all caches that share them; memory is kept (`Sequences.reset`)."""
        self.sequences.reset(rows)

    def reorder(self, index: Sequence[int] | torch.Tensor) -> None:
        """Sequence b becomes a copy of sequence `index[b]`, in all caches that share them: beam search (`Sequences.reorder`)."""
        self.sequences.reorder(index)

    def copy_rows(self, index: torch.Tensor, longest: int) -> None:
        """Copy the tensors of sequence `index[b]`, int64 [batch], of at most `longest` tokens, to b; lengths are the caller's."""
        blocks = self.packed[:, :, : -(-longest // self.block_tokens)]
        for tensor in (blocks, self.k_residual, self.v_residual):
            tensor.copy_(tensor[index])

    def clear(self) -> None:
        """Forget every token; memory is kept."""
        self.sequences.clear()
