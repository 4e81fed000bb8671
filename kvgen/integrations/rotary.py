"""`kvgen::rotary`: rotary embedding of q and K, and the rotation of a format whose kernels leave it to the caller (`key.rotate.applied`),
as one torch operator, and on a GPU as one kernel.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvgen.arch import Target, target_of
from kvgen.errors import UnsupportedError
from kvgen.format.layout import Rotation
from kvgen.format.rotation import rotate
from kvgen.lower.backend import Source
from kvgen.runtime.extend import aligned
from kvgen.runtime.module import load_library
from kvgen.toolchain.compile import build

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvgen.spec import KernelSpec

ELEMENTS = {torch.float16: ("kvgen::Half", "kFloat16"), torch.bfloat16: ("kvgen::Bfloat", "kBfloat16")}
STEP = 8
"""Channels of a thread."""


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, spec: KernelSpec | None = None, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """q and k with rotary embedding, and rotated as K's cache holds them where `spec` says `key: {rotate: {applied: caller}}`.

    q is [..., q_heads, head_dim], k [..., kv_heads, head_dim], of one dtype, `positions` whole numbers [...]. cos and sin, float32
    [rows, n], have a row for each position and turn the first 2n channels of a head: channels i and i + n (as Llama and GPT-NeoX do), or
    `interleaved`, 2i and 2i + 1 (GPT-J). Both results are new and contiguous; they are computed in float32 and rounded once. Positions are
    not checked on a GPU.

    Raises ValueError on shapes that do not fit, TypeError on wrong dtypes, UnsupportedError for a `spec` whose kernels rotate K
    themselves, and on a GPU for other dtypes than those of 16 bits, and for numbers of channels that are no multiples of 8.
    """
    rotation: Rotation | None = None
    if spec is not None and spec.key.rotate is not None:
        if spec.key.rotate.applied == "kernel":
            raise UnsupportedError("rotary", "kernels of this format rotate K themselves (key.rotate.applied: kernel)", is_backend=False)
        rotation = Rotation(spec.key.rotate.channels(spec.attention.head_dim), spec.key.rotate.signs)
    if q.dtype != k.dtype or not q.is_floating_point() or positions.is_floating_point():
        raise TypeError(f"q and k must have one floating dtype, positions an integer one, not {q.dtype}, {k.dtype}, {positions.dtype}")
    if cos.dtype != torch.float32 or sin.dtype != torch.float32:
        raise TypeError(f"cos and sin must be float32, not {cos.dtype} and {sin.dtype}")
    dim, shape = q.shape[-1], positions.shape
    if k.shape[-1] != dim or q.shape[:-2] != shape or k.shape[:-2] != shape or (spec is not None and spec.attention.head_dim != dim):
        raise ValueError(f"q {[*q.shape]}, k {[*k.shape]} and positions {[*shape]} must agree in all but their heads, and with the spec")
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > dim:
        raise ValueError(f"cos {[*cos.shape]} and sin {[*sin.shape]} must be alike, [rows, n], and 2n at most head_dim ({dim})")
    block, signs = (0, False) if rotation is None else (rotation.block, rotation.signs)
    of_q, of_k = _rotary(q, k, cos, sin, positions, interleaved, block, signs)
    return of_q, of_k


@torch.library.custom_op("kvgen::rotary", mutates_args=())
def _rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool, block: int, signs: bool
) -> tuple[Tensor, Tensor]:
    rotation = Rotation(block, signs) if block else None
    if not q.is_cuda:
        return plain(q, cos, sin, positions, interleaved, rotation), plain(k, cos, sin, positions, interleaved, rotation)
    dim = q.shape[-1]
    if q.dtype not in ELEMENTS or dim % STEP or cos.shape[1] % STEP:
        reason = f"on a GPU it takes 16-bit types, head_dim and n of multiples of {STEP}, not {q.dtype}, {dim} and {cos.shape[1]}"
        raise UnsupportedError("rotary", reason, is_backend=False)
    outs: tuple[Tensor, Tensor] = _empty(q, k)
    rows = (aligned(x).flatten(0, -3) for x in (q, k))
    call = _module(target_of(torch.cuda.get_device_capability(q.device)), q.dtype, dim, block, signs)
    call(*rows, cos.contiguous(), sin.contiguous(), positions.long().flatten(), *(x.flatten(0, -3) for x in outs), int(interleaved))
    return outs


@_rotary.register_fake
def _empty(q: Tensor, k: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    first, second = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    return first, second


def plain(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool, rotation: Rotation | None) -> Tensor:
    """One of q and k by torch, in float32 (float64 stays)."""
    turned = 2 * cos.shape[1]
    wide = x if x.dtype == torch.float64 else x.float()
    c, s = (table[positions].to(wide.dtype).unsqueeze(-2) for table in (cos, sin))
    pairs = wide[..., :turned].reshape(*x.shape[:-1], *((-1, 2) if interleaved else (2, -1)))
    low, high = pairs.unbind(-1 if interleaved else -2)
    pairs = torch.stack((low * c - high * s, high * c + low * s), -1 if interleaved else -2)
    return rotate(torch.cat((pairs.flatten(-2), wide[..., turned:]), -1), rotation).to(x.dtype)


def source(target: Target, dtype: torch.dtype, head_dim: int, block: int, signs: bool) -> Source:
    """The kernel's source, from `templates/cuda/rotary.cu.jinja`."""
    element, kind = ELEMENTS[dtype]
    rotation = f"kvgen::Hadamard<{block}, {str(signs).lower()}>" if block else "kvgen::NoRotation"
    return Source.of_template("cuda/rotary.cu.jinja", target, ("rotary",), element=element, type=kind, head_dim=head_dim, rotation=rotation)


@cache
def _module(target: Target, dtype: torch.dtype, head_dim: int, block: int, signs: bool) -> Callable[..., object]:
    """The compiled kernel; the first call of its kind compiles it. Raises as `build` does."""
    function: Callable[..., object] = load_library(build(source(target, dtype, head_dim, block, signs)).path).get_function("rotary")
    return function
