"""Static scales out of tokens."""

from __future__ import annotations

import torch

from kvgen.format.codecs import codec_of
from kvgen.format.layout import rotation_of
from kvgen.format.rotation import rotate
from kvgen.spec import KernelSpec, QuantSpec


def calibrated_scales(spec: KernelSpec, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Scales of K and of V by which no number of k and v [..., kv_heads, head_dim] saturates: the largest magnitude over that of a code.
    Of nvfp4 over that of a code times the largest scale of a group, so that no such scale saturates.

    None for an operand whose blocks hold scales. What the format rotates is rotated first. float32, on the CPU: [], [kv_heads] or
    [kv_heads, head_dim]; 1 where all numbers are 0.
    """

    def one(quant: QuantSpec, x: torch.Tensor) -> torch.Tensor | None:
        if not quant.static:
            return None
        found = rotate(x, rotation_of(quant, x.shape[-1])).float().abs().flatten(0, -3).amax(0).cpu()
        found = {"tensor": found.amax(), "head": found.amax(-1), "channel": found}[quant.scale] / codec_of(quant).reach
        return torch.where(found > 0, found, 1.0)

    return one(spec.key, k), one(spec.value, v)
