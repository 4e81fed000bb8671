"""Is a variant right? Against the fp64 reference, on poisoned memory, call after call; the same on every device."""

from __future__ import annotations

import torch

from kvgen.errors import CheckError
from kvgen.measure.job import CheckPolicy
from kvgen.measure.scenario import Scenario, Step, scenarios
from kvgen.reference.packing import read_codes
from kvgen.reference.tolerance import relative_l2, tolerance, worst_relative_l2
from kvgen.toolchain.launch import KVCache, Variant

ROW_FACTOR = 10
"""A single output row may be this much further off than all rows together."""
TIES = 1e-3
"""Share of codes and scales that may differ by one step on a GPU, where rounding ties fall the other way."""
SENTINEL = -77.0


def check(variant: Variant, device: torch.device | str, policy: CheckPolicy | None = None) -> dict[str, float]:
    """The worst errors of a variant. Raises CheckError at the first wrong number."""
    return Checker(variant, device, policy).run()


class Checker:
    """Verification of one variant; `again` repeats its last call, to see whether anything was overwritten meanwhile."""

    def __init__(self, variant: Variant, device: torch.device | str, policy: CheckPolicy | None = None) -> None:
        self.variant = variant
        self.device = torch.device(device)
        self.policy = policy or CheckPolicy()
        self.limit = tolerance(variant.dtype)
        self.accuracy: dict[str, float] = {}
        self._last: tuple[KVCache, torch.Tensor, torch.Tensor] | None = None

    def run(self) -> dict[str, float]:
        """All scenarios; the worst errors by name. Raises CheckError."""
        for scenario in scenarios(self.variant.spec, self.variant.layout, self.policy, self.device.type):
            self._life(scenario)
        return self.accuracy

    def again(self) -> None:
        """Raises CheckError where the last call of `run` now gives other bits."""
        if self._last is not None:
            cache, q, out = self._last
            self._same_bits("after timing", self.variant.attend(q, cache, out=torch.full_like(out, torch.nan)), out)

    def _life(self, scenario: Scenario) -> None:
        cache = self._poisoned_cache(scenario)
        for k, v, new in scenario.chunks:
            self.variant.prefill(cache, k.to(self.device), v.to(self.device), new)
        self._attend(scenario, cache)
        for number, step in enumerate(scenario.steps):
            out, lse = self._call(step, cache)
            self._compare(f"decode {number + 1} of {scenario.name}", step, out, lse)
        if tuple(cache.lengths.tolist()) != scenario.lengths:
            raise CheckError(f"{scenario.name}: lengths are {cache.lengths.tolist()}, not {list(scenario.lengths)}")
        self._unpack(scenario, cache)
        self._codes(scenario, cache)
        q = scenario.attend.q.to(self.device)
        self._last = (cache, q, self.variant.attend(q, cache))

    def _poisoned_cache(self, scenario: Scenario) -> KVCache:
        """A cache whose memory is all NaN, with its pages shuffled and holes between them."""
        page = self.variant.spec.cache.page
        table = pages = None
        if page is not None:
            need = -(-scenario.max_len // page)
            pages = 2 * scenario.batch * need
            order = torch.randperm(pages, generator=torch.Generator().manual_seed(self.policy.seed))
            table = order[: scenario.batch * need].reshape(scenario.batch, need).to(torch.int32)
        cache = self.variant.new_cache(scenario.batch, scenario.max_len, self.device, table, pages)
        cache.packed.fill_(255)
        cache.k_residual.fill_(torch.nan)
        cache.v_residual.fill_(torch.nan)
        return cache

    def _attend(self, scenario: Scenario, cache: KVCache) -> None:
        step = scenario.attend
        out, lse = self._call(step, cache)
        self._compare(f"attend of {scenario.name}", step, out, lse)
        for _ in range(self.policy.repeats - 1):
            same, same_lse = self._call(step, cache)
            self._same_bits(f"attend of {scenario.name} repeated", same, out)
            self._same_bits(f"LSE of {scenario.name} repeated", same_lse, lse)
        without = self.variant.attend(self._strided(step.q), cache)
        self._same_bits(f"attend of {scenario.name} without LSE", without, out)

    def _call(self, step: Step, cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one step into poisoned outputs."""
        q = self._strided(step.q)
        out = torch.full(q.shape, torch.nan, dtype=q.dtype, device=self.device)
        lse = torch.full(step.lse.shape, torch.nan, dtype=torch.float32, device=self.device)
        if step.k is None or step.v is None:
            self.variant.attend(q, cache, out=out, lse=lse)
        else:
            self.variant.decode(q, self._strided(step.k), self._strided(step.v), cache, out=out, lse=lse)
        return out, lse

    def _strided(self, x: torch.Tensor) -> torch.Tensor:
        """The same numbers as a view into wider rows of NaN, as after a fused QKV projection."""
        wide = torch.full((*x.shape[:2], 2 * x.shape[2], x.shape[3]), torch.nan, dtype=x.dtype, device=self.device)
        view = wide[:, :, x.shape[2] :]
        view.copy_(x)
        return view

    def _compare(self, where: str, step: Step, out: torch.Tensor, lse: torch.Tensor) -> None:
        self._bounded("relative_l2", where, relative_l2(out, step.out), self.limit)
        self._bounded("worst_row", where, worst_relative_l2(out, step.out), ROW_FACTOR * self.limit)
        got, want = lse.double(), step.lse
        nothing = torch.isinf(want)
        if not torch.equal(got[nothing], want[nothing]):
            raise CheckError(f"{where}: LSE of a query that sees nothing is not -inf")
        error = ((got - want).abs() / (1 + want.abs()))[~nothing]
        self._bounded("lse_error", where, float(error.max()) if error.numel() else 0.0, self.limit)

    def _unpack(self, scenario: Scenario, cache: KVCache) -> None:
        shape = (scenario.batch, cache.bound, *scenario.k.shape[2:])
        got = [torch.full(shape, SENTINEL, dtype=self.variant.dtype, device=self.device) for _ in range(2)]
        self.variant.unpack(cache, *got)
        for name, mine, want in zip(("K", "V"), got, (scenario.k, scenario.v), strict=True):
            for b, length in enumerate(scenario.lengths):
                where = f"unpacked {name} of sequence {b} of {scenario.name}"
                self._bounded("unpack", where, relative_l2(mine[b, :length], want[b, :length]), self.limit)
                if not bool((mine[b, length:] == SENTINEL).all()):
                    raise CheckError(f"{where}: positions past the length were written")

    def _codes(self, scenario: Scenario, cache: KVCache) -> None:
        """Packed codes and their scales against the reference's."""
        layout = self.variant.layout
        ties = 0.0 if self.device.type == "cpu" else TIES
        if scenario.codes:
            self.accuracy.setdefault("code_mismatches", 0.0)
        for b, length in enumerate(scenario.lengths):
            count = length // layout.tokens
            if count == 0:
                continue
            mine = self._blocks(cache, b, count)
            for which, want in scenario.codes.items():
                got = read_codes(layout, which, mine)
                where = f"codes of {which} of sequence {b} of {scenario.name}"
                for name, x, truth in (("code", got.codes, want.codes[b, :, :count]), ("scale", got.scale, want.scale[b, :, :count])):
                    if torch.equal(x, truth):
                        continue
                    self._bounded(f"{name}_mismatches", where, float((x != truth).double().mean()), ties)
                    if name == "code":
                        self._bounded("code_steps", where, float((x.int() - truth.int()).abs().max()), 1.0)

    @staticmethod
    def _blocks(cache: KVCache, b: int, count: int) -> torch.Tensor:
        """The first `count` blocks of a sequence, [kv_heads, count, block_bytes]."""
        if cache.block_table is None:
            return cache.packed[b, :, :count]
        pages = cache.packed[cache.block_table[b].long()]  # [pages, kv_heads, blocks, block_bytes]
        return pages.transpose(0, 1).flatten(1, 2)[:, :count]

    def _bounded(self, name: str, where: str, error: float, limit: float) -> None:
        self.accuracy[name] = max(self.accuracy.get(name, 0.0), error)
        if not error <= limit:
            raise CheckError(f"{where}: {name.replace('_', ' ')} is {error:.2g}, and at most {limit:.2g} is allowed")

    @staticmethod
    def _same_bits(where: str, got: torch.Tensor, want: torch.Tensor) -> None:
        whole = {2: torch.int16, 4: torch.int32}[got.element_size()]
        if not torch.equal(got.view(whole), want.view(whole)):
            raise CheckError(f"{where}: the same inputs gave other bits")
