"""Kernels of linear layers as a program gets them, on the CPU."""

from __future__ import annotations

import pytest
import torch

from kvgen import LinearKernel, get_kernel, get_linear_kernel
from kvgen.api import FallbackWarning
from kvgen.errors import CheckError, SpecError
from kvgen.lower import linear
from kvgen.spec import LinearFormat, LinearSpec
from kvgen.verify import linear as reference

FORMAT = LinearFormat(n=96, k=256, group=64, zero=True, dtype="bfloat16", bias=True, epilogue="silu_mul")


@pytest.fixture(scope="module")
def kernel() -> LinearKernel:
    with pytest.warns(FallbackWarning, match="nothing is tuned for this format on cpu"):
        return get_linear_kernel(LinearSpec(arch="cpu", linear=FORMAT))


def test_a_fetched_kernel_multiplies_what_it_quantized(kernel: LinearKernel) -> None:
    weight = torch.randn(96, 256, generator=torch.Generator().manual_seed(0))
    packed = kernel.quantize(weight, clip="mse")
    canonical = kernel.unpack(packed)
    assert torch.equal(kernel.pack(*canonical), packed)
    assert float((kernel.dequantize(packed).float() - weight).norm() / weight.norm()) < 0.1
    x, bias = reference.seeded_inputs(FORMAT, 13, "cpu"), torch.randn(96).bfloat16()
    want = reference.Expected(FORMAT, canonical, x, bias, None)
    want.compare("a call", kernel(x, packed, bias), slice(13), {})
    out = torch.full((13, 64), torch.nan, dtype=torch.bfloat16)[:, :48]
    assert kernel(x, packed, bias=bias, out=out) is out
    want.compare("given rows that lie apart", out, slice(13), {})
    assert kernel(x[:0], packed, bias).shape == (0, 48)
    assert (kernel.rows, kernel.entry, kernel.variant(5).rows) == (128, None, 5)


def test_what_it_cannot_compute_is_refused_by_name(kernel: LinearKernel) -> None:
    packed = kernel.pack(*reference.seeded_weight(FORMAT, "cpu"))
    x, bias = reference.seeded_inputs(FORMAT, 4, "cpu"), torch.zeros(96).bfloat16()
    for told, error, given in (
        (r"x has 129 rows.*compiled for 128: multiply more by `dequantize", ValueError, (x[:1].expand(129, 256), packed, bias)),
        (r"x must be bfloat16|x .*bfloat16", TypeError, (x.half(), packed, bias)),
        (r"x .*256", ValueError, (x[:, :128], packed, bias)),
        (r"x ", ValueError, (x.T.contiguous().T, packed, bias)),
        (r"packed ", ValueError, (x, packed[:-1], bias)),
        (r"bias must be given", ValueError, (x, packed)),
        (r"residual must be None", ValueError, (x, packed, bias, x)),
        (r"x is on meta|x has no memory", ValueError, (x.to("meta"), packed, bias)),
        (r"x must be a torch tensor", TypeError, ([1.0], packed, bias)),
    ):
        with pytest.raises(error, match=told):
            kernel(*given)
    with pytest.raises(SpecError, match="get_linear_kernel takes it"):
        get_kernel({"operation": "linear", "linear": {"n": 16, "k": 64, "group": 64}})
    with pytest.raises(ValueError, match="at most 128"):
        kernel.variant(129)


def test_a_kernel_that_fails_verification_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its source takes the scales of groups for those of rows, which lie elsewhere."""
    spec = LinearSpec(arch="cpu", linear=LinearFormat(n=32, k=128, group=64))
    monkeypatch.setattr(linear, "group_of", lambda _: 0)
    with pytest.raises(CheckError, match="failed verification and is not served"):
        get_linear_kernel(spec)
