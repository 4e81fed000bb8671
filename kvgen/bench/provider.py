"""The interface of the providers of a comparison, the tensors that all of them attend over, and kvgen's own provider."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from kvgen.api.kernel import Kernel
from kvgen.arch import Target
from kvgen.measure.device import cold_bytes
from kvgen.measure.inputs import WorkloadInputs
from kvgen.measure.measurement import TimingPolicy
from kvgen.measure.timer import timer_for
from kvgen.spec import KernelSpec, Workload
from kvgen.verify.attention import attend
from kvgen.verify.data import learned_sinks
from kvgen.verify.quantize import DTYPES
from kvgen.verify.tolerance import relative_l2

SEQUENCES_CHECKED = 2
MOST_COPIES = 64


@dataclass(frozen=True)
class Entrant:
    """A provider that is ready to run a case."""

    sample: Callable[[TimingPolicy], tuple[float, ...]]
    """One round: samples in µs per call, over inputs that are not in the device's cache."""
    nbytes: int
    """Bytes that a call must read."""
    error: Callable[[], float]
    """Relative L2 of the output against fp64 attention over what was read."""
    backend: str = ""
    """The variant of the provider that is used for this case, if it has several."""


class Provider(Protocol):
    """One way to compute the attention: `name` is the library, `backend` its variant."""

    name: str
    backend: str

    def prepare(self, case: Case) -> Entrant:
        """Raises UnsupportedError, with the reason, if it cannot run the case, ToolchainMissing if it is not installed."""
        ...


@dataclass(frozen=True)
class Case:
    """One workload on one device. Sequences have `length` tokens: the workload's, with a half-full residual of kvgen's layout."""

    spec: KernelSpec
    workload: Workload
    target: Target
    length: int
    _made: dict[tuple[str, torch.dtype], torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return torch.device("cpu" if self.target == "cpu" else "cuda")

    @property
    def checked(self) -> int:
        """Sequences whose output is compared with the reference."""
        return min(SEQUENCES_CHECKED, self.workload.batch)

    def tensors(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Standard normal q [batch, q_len, q_heads, head_dim], K and V [batch, length, kv_heads, head_dim], made once."""
        a = self.spec.attention
        shapes = {"q": (self.workload.q_len, a.q_heads), "k": (self.length, a.kv_heads), "v": (self.length, a.kv_heads)}
        for seed, (name, (tokens, heads)) in enumerate(shapes.items()):
            if (name, dtype) not in self._made:
                random = torch.Generator(self.device).manual_seed(seed)
                out = torch.empty((self.workload.batch, tokens, heads, a.head_dim), dtype=dtype, device=self.device)
                for sequence in out:  # the whole in float32 might not fit
                    sequence.copy_(torch.randn(sequence.shape, generator=random, device=self.device))
                self._made[name, dtype] = out
        return self._made["q", dtype], self._made["k", dtype], self._made["v", dtype]

    def copies(self, nbytes: int) -> int:
        """Copies of inputs of so many bytes that calls take in turn, so that none finds its own in the device's cache."""
        return max(1, min(MOST_COPIES, -(-cold_bytes(self.device.type) // nbytes)))

    def sampler(self, calls: Sequence[Callable[[], torch.Tensor]]) -> Callable[[TimingPolicy], tuple[float, ...]]:
        """An entrant's `sample` over these calls in turn."""
        return lambda policy: timer_for(self.device).time(calls, policy)

    def error(self, out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
        """Relative L2 of an output [batch, q_len, q_heads, head_dim] against fp64 attention of the first sequences, with sinks."""
        q, k, v, out = (x[: self.checked] for x in (q, k, v, out))
        lengths = torch.full((self.checked,), k.shape[1], dtype=torch.int32)
        a, sinks = self.spec.attention, learned_sinks(self.spec, q.device)
        return relative_l2(out, attend(q, k, v, lengths, softcap=a.softcap, window=a.window, sinks=sinks)[0])


class Ours:
    """kvgen's kernel as `get_kernel` gives it: `attend`, or `decode` with append and flush."""

    name = "kvgen"

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.backend = kernel.entry.backend if kernel.entry else "default"

    def prepare(self, case: Case) -> Entrant:
        """See `Provider`. The entrant names the back end of the launch that serves the case."""
        variant, launch = self.kernel.variant(case.workload), self.kernel.launch(case.workload)
        inputs = WorkloadInputs(variant, case.workload, case.device)

        def error() -> float:
            """Against attention over the cache as the kernel reads it: packed blocks dequantized, the other tokens unchanged."""
            q, k, v = (x[: case.checked] for x in case.tensors(DTYPES[case.spec.attention.dtype]))
            cache = self.kernel.new_cache(case.checked, case.length, case.device)
            self.kernel.prefill(cache, k, v)
            out = variant.attend(q, cache, sinks=learned_sinks(case.spec, case.device))
            return case.error(out, q, *self.kernel.unpack(cache))

        return Entrant(lambda policy: inputs.time(variant, policy), inputs.nbytes, error, launch.backend if launch else "")
