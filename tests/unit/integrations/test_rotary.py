"""Rotary embedding with the rotation of a format: against its definition in fp64, and a cache whose caller rotates beside one that does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvgen import KernelSpec, SpecError, UnsupportedError, get_kernel, load_spec, rotary
from kvgen.format.rotation import rotate
from kvgen.integrations.rotary import Rotation
from kvgen.spec.layers import layer_specs

HEADS = {"q_heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": "float16"}


def spec(applied: str | None, block: int = 16) -> KernelSpec:
    key: dict[str, Any] = {"bits": 4, "axis": "token", "group": 64}
    if applied:
        key["rotate"] = {"block": block, "applied": applied}
    return load_spec({"name": "rotary", "arch": "cpu", "attention": HEADS, "key": key, "value": {"bits": 4, "group": 64}})


def tables(rows: int, pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(rows).unsqueeze(1) * 10000.0 ** (-torch.arange(pairs) / pairs)
    return angles.cos(), angles.sin()


def wanted(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Pairs of channels as complex numbers, which a position turns by its angles."""
    pairs, out = cos.shape[1], x.double().clone()
    low = slice(0, 2 * pairs, 2) if interleaved else slice(0, pairs)
    high = slice(1, 2 * pairs, 2) if interleaved else slice(pairs, 2 * pairs)
    turned = torch.complex(out[..., low], out[..., high]) * torch.complex(cos, sin).to(torch.complex128)[positions].unsqueeze(-2)
    out[..., low], out[..., high] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dtype", "pairs", "block"), [(torch.float32, 32, 64), (torch.float16, 32, 0), (torch.bfloat16, 12, 16)])
def test_pairs_are_turned_by_their_positions_and_then_rotated(dtype: torch.dtype, pairs: int, block: int, interleaved: bool) -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(3, 5, heads, 64).to(dtype) for heads in (4, 2))
    positions = torch.randint(0, 500, (3, 5), dtype=torch.int32)
    cos, sin = tables(500, pairs)
    found = rotary(q, k, cos, sin, positions, spec("caller", block) if block else None, interleaved=interleaved)
    for x, out in zip((q, k), found, strict=True):
        want = rotate(wanted(x, cos, sin, positions, interleaved), Rotation(block, True) if block else None)
        assert (out.dtype, out.shape) == (dtype, x.shape)
        assert (out.double() - want).norm() / want.norm() < {torch.float32: 1e-6, torch.float16: 4e-4, torch.bfloat16: 3e-3}[dtype]


@pytest.mark.filterwarnings("ignore::kvgen.api.FallbackWarning")
def test_a_cache_whose_caller_rotates_is_the_one_that_rotates() -> None:
    """Positions 0 turn nothing, so both caches and both outputs have the same bits."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, tokens, heads, 64).half() for tokens, heads in ((1, 4), (150, 2), (150, 2)))
    cos, sin = tables(1, 32)
    outs, packed = [], []
    for applied in ("kernel", "caller"):
        kernel = get_kernel(spec(applied))
        cache = kernel.new_cache(2, 256)
        given = [q, k]
        if applied == "caller":
            given[0] = rotary(q, k[:, :1], cos, sin, torch.zeros(2, 1, dtype=torch.int64), kernel.spec)[0]
            given[1] = rotary(k, k, cos, sin, torch.zeros(2, 150, dtype=torch.int64), kernel.spec)[1]
        kernel.prefill(cache, given[1][:, :149], v[:, :149])
        outs.append(kernel.decode(given[0], given[1][:, 149:], v[:, 149:], cache))
        packed.append(cache.packed[:, :, : 150 // cache.block_tokens])
    assert torch.equal(*outs)
    assert torch.equal(*packed)
    assert packed[0].numel()
    assert not torch.equal(outs[0], get_kernel(spec(None)).attend(q, cache)), "the rotation is there"


def test_it_compiles_whole() -> None:
    q, k = torch.randn(7, 4, 64), torch.randn(7, 2, 64)
    arguments = (q, k, *tables(9, 32), torch.arange(7), True, 16, False)
    torch.library.opcheck(torch.ops.kvgen.rotary.default, arguments, test_utils=("test_schema", "test_faketensor"))


def test_what_it_refuses() -> None:
    q, k, positions, table = torch.randn(7, 4, 64), torch.randn(7, 2, 64), torch.arange(7), tables(9, 32)
    with pytest.raises(UnsupportedError, match=r"rotate K themselves \(key.rotate.applied: kernel\)"):
        rotary(q, k, *table, positions, spec("kernel"))
    with pytest.raises(ValueError, match="must agree in all but their heads"):
        rotary(q, k, *table, positions[:5])
    with pytest.raises(ValueError, match=r"2n at most head_dim \(64\)"):
        rotary(q, k, *tables(9, 33), positions)
    with pytest.raises(TypeError, match="cos and sin must be float32"):
        rotary(q, k, table[0].double(), table[1], positions)
    with pytest.raises(SpecError, match="it rotates the output back"):
        load_spec({**spec("caller").to_json(), "value": {"bits": 4, "rotate": {"applied": "caller"}}})
    config = {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256}
    with pytest.raises(UnsupportedError, match=r"key.rotate.applied: caller: .* rotates nothing"):
        layer_specs(config, {"preset": "saw-int4", "key": {"rotate": {"applied": "caller"}}})
