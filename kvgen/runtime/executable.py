"""A loaded module, its workspaces and plans, and its calls, whose lengths belong to the caller."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from uuid import uuid4

import torch
from torch import Tensor

from kvgen.errors import CacheMismatch
from kvgen.runtime.kvcache import KVCache, Tensors, memory_for
from kvgen.runtime.module import Module
from kvgen.runtime.sequences import Sequences


class Executable:
    """One module; several executables, of one module too, may share caches of one layout."""

    def __init__(self, module: Module, most_q: int) -> None:
        """`most_q` is the number of query tokens that the module is compiled for."""
        self.module = module
        self.key = uuid4().hex
        """Names its workspaces, in any process."""
        self._most_q = most_q
        self._plan_sizes: dict[tuple[int | None, int, int, int], int] = {}

    def workspace(self, cache: KVCache) -> Tensor:
        """The workspace for a cache, and for all caches that share its sequences; allocated once.

        Raises CacheMismatch if it would be allocated while a graph is captured, because every replay would zero it.
        """
        workspace = cache.sequences.workspaces.get(self.key)
        if workspace is None:
            if cache.sequences.capturing:
                raise CacheMismatch("the cache has no workspace for this kernel yet: call prepare(cache) before the graph is captured")
            with _on(cache.gpu):
                size = int(self.module.workspace_bytes(cache.batch, cache.max_len, self._most_q))
            with memory_for(f"a workspace for {cache.batch} x {cache.max_len} tokens", size, cache.device):
                workspace = torch.zeros(max(16, size), dtype=torch.uint8, device=cache.device)
            if cache.gpu is not None:  # once for each workspace: calls on other streams need not wait for the zeros
                torch.cuda.current_stream(cache.gpu).synchronize()
            cache.sequences.workspaces[self.key] = workspace
        return workspace

    def release(self, cache: KVCache) -> None:
        """Give the workspace for a cache back; a captured graph must not outlive it."""
        cache.sequences.workspaces.pop(self.key, None)

    def plan(self, lengths: Tensor, q_len: int, max_len: int, overflow: int, *, append: bool, skip_empty: bool) -> Tensor:
        """The numbers of a plan, which the device computes: int32, as `docs/abi.md` says. At `overflow` it says that there is no room."""
        gpu = lengths.device.index if lengths.is_cuda else None
        key = (gpu, len(lengths), max_len, q_len)  # it depends on the GPU's number of multiprocessors
        size = self._plan_sizes.get(key)
        if size is None:
            with _on(gpu):
                size = self._plan_sizes[key] = int(self.module.plan_size(len(lengths), max_len, q_len))
        numbers = torch.empty(size, dtype=torch.int32, device=lengths.device)
        self.module.plan(lengths, numbers, q_len, int(append), int(skip_empty), max_len, overflow)
        return numbers

    def run(
        self,
        q: Tensor,
        new: tuple[Tensor, Tensor] | None,
        cache: Tensors,
        out: Tensor,
        lse: Tensor | None,
        sinks: Tensor | None,
        workspace: Tensor,
        plan: Tensor | None,
        scale: float,
        bound: int,
        max_len: int,
        overflow: int,
        *,
        advance: bool,
    ) -> None:
        """The module's `attend`, or with `new` K and V its `decode`; with `advance` lengths count `new`. Lengths and plan are the caller's.

        Without a plan all lengths are equal, or there is one; the CPU's modules plan for themselves.
        """
        rest = (out, lse, sinks, workspace, plan, scale, bound)
        if new is None:
            self.module.attend(q, *cache, *rest)
        else:
            self.module.decode(q, *new, *cache, *rest, max_len, overflow, int(advance))


def _on(gpu: int | None) -> torch.cuda.device | nullcontext[None]:
    """The device context for functions of a module that take no tensor."""
    return torch.cuda.device(gpu) if gpu is not None else nullcontext()


@dataclass(frozen=True, eq=False)
class Plan:
    """Which KV tiles each CTA attends to in a step, for one launch and the lengths of one moment.

    `Kernel.plan` makes it. It is valid until lengths change: in every layer of a step, before `cache.advance`. One that was captured in a
    CUDA graph is valid within that graph, whose replays compute it anew.
    """

    launch: Executable
    sequences: Sequences
    q_len: int
    append: bool
    """Whether it is for `decode`, which appends q_len tokens, or for `attend`."""
    bound: int
    """No length exceeds it after the step."""
    numbers: Tensor | None
    """int32, as `docs/abi.md` says; None for the static scheduler."""
    version: int
    captured: bool

    def check(self, sequences: Sequences, q_len: int, *, append: bool) -> None:
        """Raises ValueError if the plan was made for another call."""
        reason = None
        if self.sequences is not sequences:
            reason = "for another cache, which does not share these lengths"
        elif self.q_len != q_len or self.append != append:
            made, taken = (f"{'decode' if a else 'attend'} with {n} query tokens" for a, n in ((self.append, self.q_len), (append, q_len)))
            reason = f"for {made}, and the call is {taken}"
        elif self.captured != sequences.capturing:
            reason = (
                "within a CUDA graph, whose replays compute it" if self.captured else "outside of this CUDA graph: replays would not follow"
            )
        elif self.version != sequences.version:
            reason = "before lengths changed: make one for every step"
        if reason is not None:
            raise ValueError(f"the plan was made {reason}")
