"""Lowering of operations on a matrix: refusals, spaces, sources; modules of the CPU back end."""

from __future__ import annotations

import copy
import re
import subprocess

import pytest
import torch

from kvgen._machine import cores
from kvgen.errors import CheckError, UnsupportedError
from kvgen.lower.backend import get_backend, refusal
from kvgen.lower.matrix import NO_LAYOUT, PAPER_VARIANTS
from kvgen.lower.schedule import Params, Schedule, layout_id
from kvgen.verify import CheckPolicy
from kvgen.verify import matrix as reference
from kvgen.verify.matrix import MatrixCheck
from tests.support.cpu import cpu_matrix, matrix_spec


def test_a_back_end_without_such_kernels_says_so() -> None:
    spec = matrix_spec(arch="sm90")
    assert refusal(get_backend("tilelang"), spec, "sm90") == "it has no kernels for the operation quantize"
    with pytest.raises(UnsupportedError, match="tilelang back end does not support this spec: it has no kernels"):
        get_backend("tilelang").lower(spec, Schedule("tilelang", NO_LAYOUT, Params()), "sm90")
    assert refusal(get_backend("cpu"), spec, "sm90") == "it does not target sm90"


def test_the_papers_variants_are_schedules_of_one_template() -> None:
    spec, backend = matrix_spec(arch="sm80"), get_backend("cuda")
    space = backend.space(spec, "sm80")
    texts = {}
    for name, launch in PAPER_VARIANTS.items():
        schedule = Schedule("cuda", NO_LAYOUT, launch)
        assert space.check(schedule, spec.workloads[0]) == []
        source = backend.lower(spec, schedule, "sm80")
        assert source.functions == ("dequantize", "quantize", "scales")
        assert {header.name for header in source.headers} >= {"kernels.cuh", "elements.cuh", "arguments.hpp", "ffi.hpp"}
        texts[name] = source.text
    assert len(set(texts.values())) == len(PAPER_VARIANTS)


def test_the_default_is_in_the_space_and_other_schedules_are_refused_by_reason() -> None:
    for name, target in (("cuda", "sm90"), ("cpu", "cpu")):
        for dtype in ("float32", "float16", "bfloat16"):
            spec, backend = matrix_spec(dtype=dtype, arch=target, shapes=("131072x2048",)), get_backend(name)
            default = backend.default(spec, target)
            assert backend.space(spec, target).doubts(default, spec.workloads[0]) == []
            assert 0 < backend.space(spec, target).size < 400
    huge = Params({**default.launch, "rows": 3})
    with pytest.raises(UnsupportedError, match="rows = 3 is not one of"):
        backend.lower(spec, Schedule("cpu", NO_LAYOUT, huge), "cpu")
    with pytest.raises(ValueError, match="no layout parameters"):
        layout_id(spec, Params(block=16))


@pytest.mark.parametrize(("dtype", "rows", "channels"), [("float32", 16, 128), ("bfloat16", 256, 512)])
def test_cpu_modules_are_right_to_the_bit(dtype: str, rows: int, channels: int) -> None:
    variant = cpu_matrix(dtype, rows, channels)
    assert variant.module.set_threads is not None
    variant.module.set_threads(min(2, cores()) if rows == 256 else 1)
    check = MatrixCheck(variant, "cpu", CheckPolicy(repeats=2))
    check.run()
    check.again()


def test_a_planted_fault_is_found() -> None:
    variant = cpu_matrix()
    faulty = copy.copy(variant)
    faulty.module = copy.copy(variant.module)

    def last_code_off_by_one(x: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> None:
        variant.module.quantize(x, scales, codes)
        codes[-1:, -1:] += 1

    faulty.module.quantize = last_code_off_by_one
    with pytest.raises(CheckError, match=r"codes of 1x1.*element of the memory around it \[1, 0\] is"):
        MatrixCheck(faulty, "cpu", CheckPolicy()).run()


def test_calls_allocate_what_is_not_given_and_refuse_what_does_not_fit() -> None:
    variant, x = cpu_matrix(), reference.uniform(50, 37, torch.float32, "cpu")
    codes, scales = variant.quantize(x)
    assert torch.equal(codes, reference.codes(x, scales))
    assert variant.dequantize(codes, scales).sub(x).abs().max() <= scales.max() / 2 * (1 + 1e-6)
    for error, told, call in (
        (TypeError, "x must be float32, is float16", lambda: variant.quantize(x.half())),
        (ValueError, "scales has size 5 in dimension 0, must be 37", lambda: variant.quantize(x, scales[:5])),
        (ValueError, "x must be contiguous in its last dimension", lambda: variant.scales(x.t())),
        (ValueError, r"x must be a matrix \[tokens, channels\], and has 1 dimensions", lambda: variant.quantize(x[0])),
        (ValueError, "rows of codes must not overlap", lambda: variant.quantize(x, scales, codes[:1].expand(50, 37))),
        (TypeError, "codes must be int8, is uint8", lambda: variant.dequantize(codes.to(torch.uint8), scales)),
    ):
        with pytest.raises(error, match=told):
            call()


def test_each_module_has_threads_of_its_own() -> None:
    """The linker merges visible inline variables of all modules of a process."""
    symbols = subprocess.run(["nm", "-D", str(cpu_matrix().module.path)], capture_output=True, text=True, check=True).stdout
    assert "__tvm_ffi_quantize" in symbols
    assert not re.findall(r"^\S+ [uVB] .*", symbols, re.MULTILINE)
