"""One comparison: a spec at one workload on one device, with the tensors that all providers attend over."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvgen.arch import Target
from kvgen.spec import KernelSpec, Workload

SEQUENCES_CHECKED = 2


@dataclass(frozen=True)
class Case:
    """`length` is the tokens of every sequence: the workload's, adjusted to a half-full residual of kvgen's layout."""

    spec: KernelSpec
    workload: Workload
    target: Target
    length: int
    _made: dict[tuple[torch.dtype, int], torch.Tensor] = field(default_factory=dict, repr=False, compare=False)
    _spread: dict[tuple[torch.dtype, int], list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict, repr=False, compare=False)
    _expected: dict[torch.dtype, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return torch.device("cpu" if self.target == "cpu" else "cuda")

    @property
    def checked(self) -> int:
        """Sequences whose output is compared with the reference."""
        return min(SEQUENCES_CHECKED, self.workload.batch)

    def query(self, dtype: torch.dtype) -> torch.Tensor:
        """[batch, q_len, q_heads, head_dim]."""
        return self._normal(dtype, 1, self.workload.q_len, self.spec.attention.q_heads)

    def keys(self, dtype: torch.dtype) -> torch.Tensor:
        """[batch, length, kv_heads, head_dim]."""
        return self._normal(dtype, 2, self.length, self.spec.attention.kv_heads)

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """[batch, length, kv_heads, head_dim]."""
        return self._normal(dtype, 3, self.length, self.spec.attention.kv_heads)

    def by_heads(self, dtype: torch.dtype, heads: int, copies: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copies of (K, V) as [batch, heads, length, head_dim], each KV head repeated to make `heads`; computed once for all providers."""
        made = self._spread.setdefault((dtype, heads), [])
        times = heads // self.spec.attention.kv_heads
        while len(made) < copies:
            k, v = (x.transpose(1, 2).contiguous() for x in (self.keys(dtype), self.values(dtype)))
            made.append((k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1)) if times > 1 else (k, v))
        return made[:copies]

    def expected(self, dtype: torch.dtype) -> torch.Tensor:
        """fp64 attention over the unquantized tensors of a type, first sequences only: [checked, q_len, q_heads, head_dim]."""
        if dtype not in self._expected:
            self._expected[dtype] = self.attend(self.query(dtype), self.keys(dtype), self.values(dtype))
        return self._expected[dtype]

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """fp64 attention of the first sequences, with learned sinks where the spec has them: [checked, q_len, q_heads, head_dim]."""
        from kvgen.verify.attention import attend
        from kvgen.verify.data import learned_sinks

        q, k, v = (x[: self.checked] for x in (q, k, v))
        lengths = torch.full((self.checked,), k.shape[1], dtype=torch.int32)
        attention, sinks = self.spec.attention, learned_sinks(self.spec, q.device)
        return attend(q, k, v, lengths, softcap=attention.softcap, window=attention.window, sinks=sinks)[0]

    def _normal(self, dtype: torch.dtype, seed: int, tokens: int, heads: int) -> torch.Tensor:
        """Standard normal [batch, tokens, heads, head_dim], made once."""
        if (dtype, seed) not in self._made:
            random = torch.Generator(self.device).manual_seed(seed)
            shape = (tokens, heads, self.spec.attention.head_dim)
            out = torch.empty((self.workload.batch, *shape), dtype=dtype, device=self.device)
            for sequence in out:
                sequence.copy_(torch.randn(shape, generator=random, device=self.device))
            self._made[dtype, seed] = out
        return self._made[dtype, seed]
