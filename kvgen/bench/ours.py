"""kvgen's own kernel, as `get_kernel` gives it."""

from __future__ import annotations

from kvgen.api.kernel import Kernel
from kvgen.bench.case import Case
from kvgen.bench.provider import Entrant
from kvgen.measure.inputs import WorkloadInputs
from kvgen.measure.job import TimingPolicy
from kvgen.verify.data import learned_sinks
from kvgen.verify.quantize import DTYPES
from kvgen.verify.tolerance import relative_l2


class Ours:
    """`attend` of a fetched kernel, or `decode` with append and flush."""

    name = "kvgen"

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.backend = kernel.entry.backend if kernel.entry else "default"
        """All back ends of the kernel's launches; an entrant names the back end of its launch."""

    def prepare(self, case: Case) -> Entrant:
        """See `Provider`."""
        variant = self.kernel.variant(case.workload)
        launch = self.kernel.launch(case.workload)
        inputs = WorkloadInputs(variant, case.workload, case.device)

        def sample(policy: TimingPolicy) -> tuple[float, ...]:
            return inputs.time(variant, policy)

        return Entrant(sample, inputs.nbytes, lambda: self._error(case), launch.backend if launch else "")

    def _error(self, case: Case) -> float:
        """Error against attention over the cache as the kernel reads it: packed blocks dequantized, the other tokens unchanged."""
        dtype = DTYPES[case.spec.attention.dtype]
        q, k, v = (x[: case.checked] for x in (case.query(dtype), case.keys(dtype), case.values(dtype)))
        cache = self.kernel.new_cache(case.checked, case.length, case.device)
        self.kernel.prefill(cache, k, v)
        out = self.kernel.variant(case.workload).attend(q, cache, sinks=learned_sinks(case.spec, case.device))
        return relative_l2(out, case.attend(q, *self.kernel.unpack(cache)))
