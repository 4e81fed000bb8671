"""How the checks call a variant: on poisoned memory, and in every form of a call.

A form says which optional arguments a call has, how its tensors lie, and who advances the lengths. Every engine has its own: transformers
asks for no LSE, a captured step has a plan, the layers of a chunked prompt advance lengths once. `form` numbers them so that over nine of
them, which are an orthogonal array, every value of one optional argument meets every value of another. The verification of a step takes
the next form instead of always the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvgen.errors import CheckError
from kvgen.format.residual import first_held, residual_rows, window_places
from kvgen.lower.gpu import MAX_QUERIES
from kvgen.runtime.calls import Variant
from kvgen.runtime.executable import Plan
from kvgen.runtime.kvcache import KVCache
from kvgen.spec import KernelSpec
from kvgen.verify import Check, CheckPolicy
from kvgen.verify.data import learned_sinks
from kvgen.verify.packing import OPERANDS
from kvgen.verify.tolerance import Comparison

NAN_BYTE = 255
"""Repeated, it is NaN in every format of scales and residuals."""
OPTIONS: dict[str, tuple[Any, ...]] = {
    "lse": ("tensor", None, True),
    "out": ("strided", None, "dense"),
    "scale": (None, 2.0, -0.5),
    "end": ("advance", "stay", "plan"),
}
"""Values of the optional arguments of `decode`. None: it is not given. `scale` is a factor of the default one, and a power of two: the
reference is that of the query divided by it. `end`: the call advances the lengths; it does not (`advance=False`), or has a `plan`, and then
`cache.advance` does. Sinks are given exactly where the spec has them."""
LAYOUTS = 4
GAP = 8
"""Elements between the heads of a token: 16 bytes of a 16-bit type, at whose multiples the rows of a GPU's tensors begin."""

Output = tuple[torch.Tensor, torch.Tensor | None]
"""`out` [batch, q_len, q_heads, head_dim] and LSE [batch, q_heads, q_len], where the call gave one."""
Pair = tuple[torch.Tensor, torch.Tensor]
"""K and V; or `out` and LSE."""


@dataclass(frozen=True)
class Form:
    """Values of `OPTIONS`, and a number by which the layouts of the tensors follow one another."""

    lse: str | bool | None
    out: str | None
    scale: float | None
    end: str
    number: int


def form(step: int, turn: int = 0, scenario: int = 0) -> Form:
    """The form of a step. Two turns of two scenarios give every step each value of `lse` and `end`, and two of `out` and of `scale`."""
    i, j = 2 * step + turn + scenario, step // 2 + 2 * scenario
    lse, out, scale, end = (values[at % 3] for values, at in zip(OPTIONS.values(), (i, j, i + j, i + 2 * j), strict=True))
    return Form(lse, out, scale, end, number=step + turn + 2 * scenario)


class CallCheck(Check):
    """A check of the calls of attention."""

    def __init__(
        self,
        variant: Variant,
        device: torch.device | str,
        policy: CheckPolicy | None = None,
        comparison: Comparison | None = None,
    ) -> None:
        """`comparison` collects the errors of several parts."""
        self.variant, self.spec, self.layout = variant, variant.spec, variant.layout
        self.device = torch.device(device)
        self.gpu = self.device.type == "cuda"
        self.policy = policy or CheckPolicy()
        self.comparison = comparison or Comparison(variant.spec, self.device)
        self.rows = residual_rows(variant.spec, variant.layout.tokens)
        self.block, self.unpacked = variant.layout.tokens, variant.spec.cache.unpacked
        self.places = window_places(variant.spec, variant.layout.tokens)
        """Blocks of a sequence that a contiguous cache with a sliding window keeps; 0: all."""
        self.sinks = learned_sinks(variant.spec, self.device)

    def formed(self, form: Form, q: torch.Tensor, new: Pair | None = None, *, empty: bool = False, captured: bool = False) -> Call:
        """`decode`, or without `new` K and V `attend`, in a form, after which the lengths have advanced. Its tensors are made here, so that
        a CUDA graph has no other work.

        `empty`: some sequences may have no tokens; they would take no part in a plan. More query tokens than the kernel is compiled for
        have no plan either.
        """
        batch, q_len, q_heads, _ = q.shape
        end = form.end
        if end == "plan" and ((empty and new is not None) or q_len > self.spec.attention.q_len):
            end = "stay"
        if end == "stay" and empty and captured:  # their number would be copied to the device
            end = "advance"
        given: dict[str, Any] = {"sinks": self.sinks}
        if form.lse is not None:
            given["lse"] = form.lse if form.lse is True else poisoned((batch, q_heads, q_len), torch.float32, self.device)
        if form.out is not None:
            layout = (form.number + 1) % LAYOUTS % 3 if form.out == "strided" else LAYOUTS - 1  # not that of q
            given["out"] = _memory(q.shape, q.dtype, layout, self.device)
        if form.scale is not None:
            given["scale"] = form.scale * self.variant.scale
            q = q / form.scale
        q = laid_out(q, form.number, self.device)
        placed = None if new is None else self.laid_out(new, form.number + 1)
        counts = [q_len] * batch if empty else q_len

        def call(cache: KVCache) -> Output:
            plan = self.variant.plan(cache, q_len, append=new is not None) if end == "plan" else None
            if placed is None:
                found = self.variant.attend(q, cache, plan=plan, **given)
            else:
                found = self.variant.decode(q, *placed, cache, plan=plan, advance=end != "stay", **given)
                if end != "advance":
                    cache.advance(counts)
            return found if isinstance(found, tuple) else (found, None)

        return call

    def call(
        self,
        cache: KVCache,
        q: torch.Tensor,
        new: Pair | None = None,
        *,
        plan: Plan | None = None,
        advance: bool = True,
        lse: bool = True,
        out: torch.Tensor | None = None,
    ) -> Any:
        """`attend`, or with `new` K and V `decode`, into poisoned outputs: `out` and the LSE, None without `lse`."""
        out = poisoned(q.shape, q.dtype, self.device) if out is None else out
        heads = (q.shape[0], q.shape[2], q.shape[1])
        given = poisoned(heads, torch.float32, self.device) if lse else None
        if new is None:
            self.variant.attend(q, cache, out=out, lse=given, sinks=self.sinks, plan=plan)
        else:
            self.variant.decode(q, *new, cache, out=out, lse=given, sinks=self.sinks, plan=plan, advance=advance)
        return out, given

    def laid_out(self, new: Pair, number: int) -> Pair:
        """K and V in layouts that differ."""
        return laid_out(new[0], number, self.device), laid_out(new[1], number + 1, self.device)

    def poisoned_cache(self, batch: int, max_len: int) -> KVCache:
        """A cache whose memory is all NaN. Pages are shuffled, with gaps between them and a page of NaN before the first, where index -1 (a
        missing page) would read; the block table is a part of a wider one.
        """
        page, table, pages = self.spec.cache.page, None, None
        if page is not None:
            need = -(-max_len // page)
            pages = 2 * batch * need
            order = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).to(torch.int32)
            wide = torch.full((batch, 2 * need + 1), int(order[-1]), dtype=torch.int32, device=self.device)
            table = wide[:, :need]
            table.copy_(order[: batch * need].reshape(batch, need))
        cache = self.variant.new_cache(batch, max_len, self.device, table, pages)
        if pages is not None:
            cache.packed = cache.packed.new_full((pages + 1, *cache.packed.shape[1:]), NAN_BYTE)[1:]
        return poison(cache)

    def same_contents(self, where: str, got: Pair, want: Pair, lengths: Sequence[int]) -> torch.Tensor:
        """K and V that a cache unpacks to, [batch, tokens, kv_heads, head_dim], up to each length: a contiguous cache with a sliding window
        forgets what the window has passed. Returns which positions it does not hold, bool [batch, tokens].
        """
        tokens = min(got[0].shape[1], want[0].shape[1])
        gone = torch.tensor([first_held(self.spec, self.block, length) * self.block for length in lengths], device=self.device)
        token, end = torch.arange(got[0].shape[1], device=self.device), torch.tensor(lengths, device=self.device)
        past = (token >= end.unsqueeze(1)) | (token < gone.unsqueeze(1))
        for name, *pair in zip(("K", "V"), got, want, strict=True):
            mine, right = (x[:, :tokens].masked_fill(past[:, :tokens, None, None], 0.0) for x in pair)
            self.comparison.sequences("unpack", f"unpacked {name} {where}", mine, right)
        return past

    def schedulers(self) -> tuple[tuple[str, bool], ...]:
        """On a GPU both must give the same numbers, for all lengths; whether the host takes all lengths for equal."""
        return ((", with a plan", False), (", by the static scheduler", True)) if self.gpu else (("", False),)

    def same_output(self, where: str, got: Output, want: Output) -> None:
        """The same inputs give the same bits."""
        self.comparison.same_bits(where, got[0], want[0])
        if got[1] is not None and want[1] is not None:
            self.comparison.same_bits(f"LSE of {where}", got[1], want[1])

    def same_lengths(self, where: str, cache: KVCache, want: Sequence[int]) -> None:
        """The lengths on the device."""
        for b, (length, right) in enumerate(zip(cache.lengths.tolist(), want, strict=True)):
            if length != right:
                raise CheckError(f"{where}: lengths are wrong: sequence {b} has {length} tokens, not {right}")

    def same_codes(self, where: str, got: torch.Tensor, want: torch.Tensor) -> None:
        """Codes and params of packed blocks, uint8 [..., block_bytes]."""
        for which in OPERANDS:
            if self.layout.operand(which).quantized:
                self.comparison.codes(where, self.layout, which, got, want)


Call = Callable[[KVCache], Output]


def query_lengths(spec: KernelSpec) -> range:
    """Numbers of query tokens of a call: all that a GPU module may take. A CPU module processes more in the same blocks of rows."""
    return range(1, min(spec.attention.q_len, MAX_QUERIES) + 1)


def laid_out(x: torch.Tensor, layout: int, device: torch.device) -> torch.Tensor:
    """The same numbers [batch, tokens, heads, head_dim] as a view into memory of NaN. Any two layouts differ in all strides: heads beside
    those of other tensors, as after a fused QKV projection; tokens of a head side by side, as in transformers; batches of a token side by
    side; and a tensor of its own.
    """
    return _memory(x.shape, x.dtype, layout, device).copy_(x)


def _memory(shape: torch.Size, dtype: torch.dtype, layout: int, device: torch.device) -> torch.Tensor:
    batch, tokens, heads, dim = shape
    if layout % LAYOUTS == 0:
        return poisoned((batch, tokens, 2 * heads, dim + GAP), dtype, device)[:, :, heads:, :dim]
    if layout % LAYOUTS == 1:
        return poisoned((batch, heads, tokens + 2, dim), dtype, device)[:, :, :tokens].transpose(1, 2)
    if layout % LAYOUTS == 2:
        return poisoned((tokens, batch, heads, dim + 2 * GAP), dtype, device)[..., :dim].transpose(0, 1)
    return poisoned(shape, dtype, device)


def poisoned(shape: torch.Size | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialized memory is simulated by NaN."""
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def poison(cache: KVCache) -> KVCache:
    """Fill the memory of a cache with NaN, so that a read of what was never written shows in the result."""
    cache.packed.fill_(NAN_BYTE)
    cache.k_residual.fill_(torch.nan)
    cache.v_residual.fill_(torch.nan)
    return cache
