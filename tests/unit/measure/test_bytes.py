from __future__ import annotations

import pytest

from kvgen.format.layout import packed_layout
from kvgen.format.sizes import half_full, must_read, sequence_bytes
from kvgen.spec import KernelSpec, load_spec


def int4(window: int | None = None, **cache: int) -> KernelSpec:
    return load_spec(
        {
            "attention": {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "window": window},
            "key": {"bits": 4, "axis": "channel", "group": 128},
            "value": {"bits": 4, "axis": "token", "group": 128},
            "cache": cache,
        }
    )


BLOCK = 128 * 128  # codes of K and V of one block and head: 4 + 4 bits
SCALES = 2 * 128 * 4  # 128 scales and zeros of 2 bytes for K, as many for V


def test_blocks_count_codes_and_scales_and_the_residual_its_dtype() -> None:
    spec = int4()
    layout = packed_layout(spec, 128, "simd")
    assert sequence_bytes(spec, layout, 0) == 0
    assert sequence_bytes(spec, layout, 128) == 8 * (BLOCK + SCALES)
    assert sequence_bytes(spec, layout, 128 + 64) == 8 * (BLOCK + SCALES + 2 * 64 * 128 * 2)
    assert must_read(spec, layout, [128, 0, 64]) == 8 * (BLOCK + SCALES + 2 * 64 * 128 * 2)


def test_padding_need_not_be_read() -> None:
    spec = int4()
    layout = packed_layout(spec, 128, "simd")
    assert sequence_bytes(spec, layout, 1280) == 8 * 10 * layout.payload_bytes


def test_a_window_bounds_the_blocks_that_are_reached() -> None:
    spec = int4(window=100)
    layout = packed_layout(spec, 128, "simd")
    assert sequence_bytes(spec, layout, 1280) == 8 * layout.payload_bytes
    assert sequence_bytes(spec, layout, 1280 + 64) == 8 * (layout.payload_bytes + 2 * 64 * 128 * 2)
    assert sequence_bytes(spec, layout, 1280 + 110) == 8 * 2 * 100 * 128 * 2


def test_unquantized_tokens_are_read_in_their_dtype() -> None:
    spec = int4(sink=32, local=128, rollback=8)
    layout, token = packed_layout(spec, 128, "simd"), 8 * 2 * 128 * 2
    assert sequence_bytes(spec, layout, 20) == 20 * token
    assert sequence_bytes(spec, layout, 287) == 287 * token
    assert sequence_bytes(spec, layout, 288) == 8 * (BLOCK + SCALES) + 160 * token
    assert half_full(spec, layout, 4096) == 32 + 30 * 128 + 128 + 64


@pytest.mark.parametrize(("kv_len", "length"), [(4096, 4032), (128, 64), (5000, 5000), (64, 64), (1, 1)])
def test_a_workload_stands_for_a_half_full_residual(kv_len: int, length: int) -> None:
    assert half_full(int4(), packed_layout(int4(), 128, "simd"), kv_len) == length
