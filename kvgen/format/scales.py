"""Static scales of K and V: given with a cache, for all its tokens, and not stored in blocks. x = scale * code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvgen.format.codecs import codec_of

if TYPE_CHECKING:
    from kvgen.spec import KernelSpec, QuantSpec

SMALLEST, LARGEST = 1e-20, 1e20
"""Scales whose quotients and products with numbers of 16 bits float32 holds."""
RANGE = 4.0
"""Magnitude that the largest code of `trial_scales` stands for."""


def has_static_scales(spec: KernelSpec) -> bool:
    """Whether caches of a format have scales of K or of V."""
    return (spec.key.scale, spec.value.scale) != ("dynamic", "dynamic")


def static_scales(spec: KernelSpec, key: Any, value: Any, device: torch.device | str = "cpu") -> torch.Tensor | None:
    """The scales of K and of V in the one form that kernels read: float32 [2, kv_heads, head_dim]; None where the format has none.

    `key` and `value` are numbers or tensors: of granularity `tensor` one number, of `head` [kv_heads], of `channel` [kv_heads, head_dim];
    ones around that do not count. Exactly those operands have one whose `scale` is static; the other's half is 1.

    Raises ValueError for another shape, for numbers that are not finite and positive (`SMALLEST` to `LARGEST`), and where one is missing
    or too many.
    """
    attention = spec.attention
    shapes: dict[str, tuple[int, ...]] = {
        "tensor": (), "head": (attention.kv_heads,), "channel": (attention.kv_heads, attention.head_dim),
    }  # fmt: skip
    both = torch.ones(2, attention.kv_heads, attention.head_dim)
    for which, (name, quant, given) in enumerate((("key", spec.key, key), ("value", spec.value, value))):
        if quant.scale == "dynamic":
            if given is not None:
                raise ValueError(f"scales of {name} were given, and {name}.scale of this format is {quant.scale}: its blocks hold them")
            continue
        if given is None:
            raise ValueError(f"{name}.scale of this format is {quant.scale}: give scales=(key, value) with the cache")
        x = torch.as_tensor(given, dtype=torch.float32).detach().cpu()
        want = shapes[quant.scale]
        if [n for n in x.shape if n != 1] != [n for n in want if n != 1]:
            raise ValueError(f"{name}.scale is {quant.scale}: its scales are {list(want)}, not {list(x.shape)}")
        if not bool(((x >= SMALLEST) & (x <= LARGEST)).all()):
            raise ValueError(f"the scales of {name} must be finite and above 0: from {SMALLEST} to {LARGEST}")
        both[which] = x.reshape(*want, *[1] * (2 - len(want)))
    return both.to(device) if has_static_scales(spec) else None


def trial_scales(spec: KernelSpec, device: torch.device | str = "cpu") -> torch.Tensor | None:
    """Static scales for seeded data, other ones for every head and channel as far as the granularity has them: some saturate."""
    if not has_static_scales(spec):
        return None
    attention = spec.attention
    spread = {
        "tensor": torch.ones(()), "head": torch.linspace(0.6, 1.5, attention.kv_heads),
        "channel": torch.linspace(0.5, 2.0, attention.kv_heads * attention.head_dim).reshape(attention.kv_heads, attention.head_dim),
    }  # fmt: skip

    def one(quant: QuantSpec) -> torch.Tensor | None:
        return spread[quant.scale] * (RANGE / codec_of(quant).reach) if quant.scale != "dynamic" else None

    return static_scales(spec, one(spec.key), one(spec.value), device)
