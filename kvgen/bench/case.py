"""One comparison: a spec at one workload on one device, with the numbers everybody attends over."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvgen.spec import KernelSpec, Workload
from kvgen.spec.target import Target

SEQUENCES_CHECKED = 2


@dataclass(frozen=True)
class Case:
    """`length` is the tokens of every sequence: the workload's, with the residual of our layout half full."""

    spec: KernelSpec
    workload: Workload
    target: Target
    length: int

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return torch.device("cpu" if self.target == "cpu" else "cuda")

    @property
    def checked(self) -> int:
        """Sequences whose output is compared with the reference."""
        return min(SEQUENCES_CHECKED, self.workload.batch)

    def tensor(self, tokens: int, heads: int, dtype: torch.dtype, seed: int, batch: int | None = None) -> torch.Tensor:
        """Standard normal [batch, tokens, heads, head_dim]; the first sequences are the same for every batch."""
        random = torch.Generator(self.device).manual_seed(seed)
        shape = (tokens, heads, self.spec.attention.head_dim)
        count = self.workload.batch if batch is None else batch
        out = torch.empty((count, *shape), dtype=dtype, device=self.device)
        for sequence in out:
            sequence.copy_(torch.randn(shape, generator=random, device=self.device))
        return out

    def query(self, dtype: torch.dtype, batch: int | None = None) -> torch.Tensor:
        """[batch, q_len, q_heads, head_dim]."""
        return self.tensor(self.workload.q_len, self.spec.attention.q_heads, dtype, 1, batch)

    def keys(self, dtype: torch.dtype, batch: int | None = None) -> torch.Tensor:
        """[batch, length, kv_heads, head_dim]."""
        return self.tensor(self.length, self.spec.attention.kv_heads, dtype, 2, batch)

    def values(self, dtype: torch.dtype, batch: int | None = None) -> torch.Tensor:
        """[batch, length, kv_heads, head_dim]."""
        return self.tensor(self.length, self.spec.attention.kv_heads, dtype, 3, batch)

    def expected(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """fp64 attention [checked, q_len, q_heads, head_dim] over the first sequences of the given tensors."""
        from kvgen.reference.attention import attend

        first = [x[: self.checked].cpu() for x in (q, k, v)]
        lengths = torch.full((self.checked,), first[1].shape[1], dtype=torch.int32)
        attention = self.spec.attention
        return attend(first[0], first[1], first[2], lengths, softcap=attention.softcap, window=attention.window)[0]
