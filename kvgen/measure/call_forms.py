"""The forms of a call: which optional arguments it has, how its tensors lie, and who advances the lengths.

Every engine has its own: transformers asks for no LSE, a captured step has a plan, the layers of a chunked prompt advance lengths once.
`form` numbers them so that over nine of them, which are an orthogonal array, every value of one optional argument meets every value of
another. The verification of a step takes the next form instead of always the same one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvgen.measure.compare import poisoned
from kvgen.runtime.kvcache import KVCache
from kvgen.runtime.variant import Variant

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


def laid_out(x: torch.Tensor, layout: int, device: torch.device) -> torch.Tensor:
    """The same numbers [batch, tokens, heads, head_dim] as a view into memory of NaN. Any two layouts differ in all strides: heads beside
    those of other tensors, as after a fused QKV projection; tokens of a head side by side, as in transformers; batches of a token side by
    side; and a tensor of its own.
    """
    view = _memory(x.shape, x.dtype, layout, device)
    view.copy_(x)
    return view


def _memory(shape: torch.Size, dtype: torch.dtype, layout: int, device: torch.device) -> torch.Tensor:
    batch, tokens, heads, dim = shape
    if layout % LAYOUTS == 0:
        return poisoned((batch, tokens, 2 * heads, dim + GAP), dtype, device)[:, :, heads:, :dim]
    if layout % LAYOUTS == 1:
        return poisoned((batch, heads, tokens + 2, dim), dtype, device)[:, :, :tokens].transpose(1, 2)
    if layout % LAYOUTS == 2:
        return poisoned((tokens, batch, heads, dim + 2 * GAP), dtype, device)[..., :dim].transpose(0, 1)
    return poisoned(shape, dtype, device)


@dataclass(frozen=True)
class FormedCall:
    """`decode`, or `attend` where `new` is None, in one form. Its tensors exist before it runs, so that a CUDA graph has no other work."""

    q: torch.Tensor
    new: tuple[torch.Tensor, torch.Tensor] | None
    given: dict[str, Any]
    """The optional arguments but `plan` and `advance`."""
    end: str
    counts: int | list[int]
    """By which `cache.advance` ends the step: empty sequences take no part in a plan, and do without one."""

    def run(self, variant: Variant, cache: KVCache) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Output, and the LSE where the form asks for it. The lengths advance."""
        plan = variant.plan(cache, self.q.shape[1], append=self.new is not None) if self.end == "plan" else None
        if self.new is None:
            found = variant.attend(self.q, cache, plan=plan, **self.given)
        else:
            found = variant.decode(self.q, *self.new, cache, plan=plan, advance=self.end != "stay", **self.given)
            if self.end != "advance":
                cache.advance(self.counts)
        return found if isinstance(found, tuple) else (found, None)


def formed(
    form: Form,
    variant: Variant,
    device: torch.device,
    q: torch.Tensor,
    new: tuple[torch.Tensor, torch.Tensor] | None,
    sinks: torch.Tensor | None,
    *,
    empty: bool = False,
    captured: bool = False,
) -> FormedCall:
    """A call in a form. `empty`: some sequences may have no tokens; they would take no part in a plan. More query tokens than the kernel is
    compiled for have no plan either.
    """
    batch, q_len, q_heads, _ = q.shape
    end = form.end
    if end == "plan" and ((empty and new is not None) or q_len > variant.spec.attention.q_len):
        end = "stay"
    if end == "stay" and empty and captured:  # their number would be copied to the device
        end = "advance"
    given: dict[str, Any] = {"sinks": sinks}
    if form.lse is not None:
        given["lse"] = form.lse if form.lse is True else poisoned((batch, q_heads, q_len), torch.float32, device)
    if form.out is not None:
        layout = (form.number + 1) % LAYOUTS % 3 if form.out == "strided" else LAYOUTS - 1  # not that of q
        given["out"] = _memory(q.shape, q.dtype, layout, device)
    if form.scale is not None:
        given["scale"] = form.scale * variant.scale
        q = q / form.scale
    key, value = (form.number + 1, form.number + 2) if new is not None else (0, 0)
    placed = None if new is None else (laid_out(new[0], key, device), laid_out(new[1], value, device))
    counts = [q_len] * batch if empty else q_len
    return FormedCall(laid_out(q, form.number, device), placed, given, end, counts)
