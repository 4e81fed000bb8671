"""The reference gives the same bits on the GPU as on the CPU, so that large cases may be checked there."""

from __future__ import annotations

import pytest
import torch

from kvgen.format.layout import packed_layout
from kvgen.spec import presets
from kvgen.verify import matrix
from kvgen.verify.attention import attend
from kvgen.verify.data import structured
from kvgen.verify.packing import from_blocks, pack_blocks, to_blocks, unpack_blocks


@pytest.mark.parametrize("name", presets())
def test_packing_and_attention_do_not_depend_on_the_device(name: str) -> None:
    spec = presets()[name]
    layout = packed_layout(spec, 128, "mma")
    data = structured(spec, 2, 512, q_len=3)
    k, v = (to_blocks(x, 128) for x in (data.k, data.v))
    here, there = pack_blocks(layout, k, v), pack_blocks(layout, k.cuda(), v.cuda())
    assert torch.equal(here, there.cpu())
    read, read_there = unpack_blocks(layout, here, data.k.dtype), unpack_blocks(layout, there, data.k.dtype)
    for a, b in zip(read, read_there, strict=True):
        assert torch.equal(a, b.cpu())
    want = attend(data.q, *(from_blocks(x) for x in read))
    got = attend(data.q.cuda(), *(from_blocks(x) for x in read_there))
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(b.cpu(), a, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_scales_and_codes_of_a_matrix_do_not_depend_on_the_device(dtype: torch.dtype) -> None:
    x = matrix.uniform(300, 1000, dtype, "cpu") * torch.logspace(-3, 3, 1000).to(dtype)
    scale = matrix.scales(x)
    assert torch.equal(matrix.scales(x.cuda()).cpu(), scale)
    code = matrix.codes(x, scale)
    assert torch.equal(matrix.codes(x.cuda(), scale.cuda()).cpu(), code)
    assert torch.equal(matrix.dequantized(code.cuda(), scale.cuda(), dtype).cpu(), matrix.dequantized(code, scale, dtype))
