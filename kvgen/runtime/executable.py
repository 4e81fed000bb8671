"""A loaded module over caches: its workspace in each of them, its plans, its calls."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from uuid import uuid4

import torch
from torch import Tensor

from kvgen.errors import CacheMismatch
from kvgen.runtime.kvcache import KVCache, memory_for
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
        workspace = cache.workspaces.get(self.key)
        if workspace is None:
            if cache.sequences.capturing:
                raise CacheMismatch("the cache has no workspace for this kernel yet: call prepare(cache) before the graph is captured")
            with _on(cache.gpu):
                size = int(self.module.workspace_bytes(cache.batch, cache.max_len, self._most_q))
            with memory_for(f"a workspace for {cache.batch} x {cache.max_len} tokens", size, cache.device):
                workspace = torch.zeros(max(16, size), dtype=torch.uint8, device=cache.device)
            if cache.gpu is not None:  # once for each workspace: calls on other streams need not wait for the zeros
                torch.cuda.current_stream(cache.gpu).synchronize()
            cache.workspaces[self.key] = workspace
        return workspace

    def release(self, cache: KVCache) -> None:
        """Give the workspace for a cache back; a captured graph must not outlive it."""
        cache.workspaces.pop(self.key, None)

    def plan(self, sequences: Sequences, q_len: int, *, append: bool, skip_empty: bool) -> Tensor:
        """The numbers of a plan, which the device computes: int32, as `docs/abi.md` says."""
        key = (sequences.gpu, sequences.batch, sequences.max_len, q_len)  # it depends on the GPU's number of multiprocessors
        size = self._plan_sizes.get(key)
        if size is None:
            with _on(sequences.gpu):
                size = self._plan_sizes[key] = int(self.module.plan_size(sequences.batch, sequences.max_len, q_len))
        numbers = torch.empty(size, dtype=torch.int32, device=sequences.lengths.device)
        self.module.plan(sequences.lengths, numbers, q_len, int(append), int(skip_empty), sequences.max_len, sequences.overflow.address)
        return numbers

    def run(
        self,
        q: Tensor,
        new: tuple[Tensor, Tensor] | None,
        cache: KVCache,
        out: Tensor,
        lse: Tensor | None,
        sinks: Tensor | None,
        workspace: Tensor,
        scale: float,
        bound: int,
        plan: Plan | None,
        *,
        advance: bool,
    ) -> None:
        """The module's `attend`, or with `new` K and V its `decode`, by the numbers of the plan; with `advance` lengths count `new`.

        Without a plan a call makes one of its own; for the static scheduler there is none, and the CPU's modules plan for themselves.
        """
        sequences = cache.sequences
        if plan is not None:
            numbers = plan.numbers
        elif sequences.gpu is None or sequences.batch == 1 or sequences.uniform:
            numbers = None
        else:
            numbers = self.plan(sequences, q.shape[1], append=new is not None, skip_empty=new is None)
        if new is None:
            self.module.attend(
                q, cache.packed, cache.k_residual, cache.v_residual, sequences.lengths, sequences.block_table, None,
                out, lse, sinks, workspace, numbers, scale, bound,
            )  # fmt: skip
        else:
            self.module.decode(
                q, *new, cache.packed, cache.k_residual, cache.v_residual, sequences.lengths, sequences.block_table, None,
                out, lse, sinks, workspace, numbers, scale, bound, sequences.max_len, sequences.overflow.address, int(advance),
            )  # fmt: skip


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

    def check(self, launch: Executable, sequences: Sequences, q_len: int, *, append: bool) -> None:
        """Raises ValueError if the plan was made for another call."""
        if self.launch is not launch:
            raise ValueError("the plan was made by another kernel")
        if self.sequences is not sequences:
            raise ValueError("the plan was made for another cache, which does not share these lengths")
        if self.q_len != q_len or self.append != append:
            made, taken = (f"{'decode' if a else 'attend'} with {n} query tokens" for a, n in ((self.append, self.q_len), (append, q_len)))
            raise ValueError(f"the plan was made for {made}, and the call is {taken}")
        if self.captured != sequences.capturing:
            where = (
                "within a CUDA graph, whose replays compute it" if self.captured else "outside of this CUDA graph: replays would not follow"
            )
            raise ValueError(f"the plan was made {where}")
        if self.version != sequences.version:
            raise ValueError("the plan was made before lengths changed: make one for every step")
