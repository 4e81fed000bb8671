"""Loops of a listing of machine code, and what counts as one of their instructions."""

from __future__ import annotations

import pytest

from benchmarks.loop_instructions import CASES, Case
from benchmarks.sass import Instruction, count, hot_loop, parse
from benchmarks.shape_cases import TARGET
from kvgen.lower.backends import get_backend
from tests.support.tilelang import needs_tilelang

KERNEL = """
\t\tFunction : _Z6attendv
\t.headerflags\t@"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;                  /* 0x00000a00ff017b82 */
        /*0010*/                   HMMA.16816.F32 R4, R4, R8, RZ ;         /* 0x00000a00ff017b82 */
        /*0020*/              @P1  BRA 0x10 ;                              /* 0x00000a00ff017b82 */
        /*0030*/                   LDS.128 R4, [R2+0x10] ;                 /* 0x00000a00ff017b82 */
        /*0040*/                   LOP3.LUT R5, R4, 0xf000f, RZ, 0xc0, !PT ;
        /*0050*/                   HMMA.16816.F32 R8, R4, R12, R8 ;
        /*0060*/                   HMMA.16816.F32 R8, R4, R14, R8 ;
        /*0070*/                   VOTE.ANY P0, P0 ;
        /*0080*/              @!P0 BRA 0xb0 ;
        /*0090*/                   SHFL.BFLY PT, R3, R3, 0x10, 0x1f ;
        /*00a0*/                   MUFU.EX2 R3, R3 ;
        /*00b0*/               @P2 BRA 0xe0 ;
        /*00c0*/                   IMAD.MOV.U32 R7, RZ, RZ, R6 ;
        /*00d0*/                   LDGSTS.E.BYPASS.128 [R17], desc[UR8][R12.64] ;
        /*00e0*/                   IMAD R7, R161, UR32, RZ ;
        /*00f0*/               @P3 BRA 0x30 ;
        /*0100*/                   EXIT ;
        /*0110*/                   BRA 0x110 ;
\t\tFunction : _Z4packv
        /*0000*/                   EXIT ;
"""


def test_the_hot_loop_has_the_copies_that_an_iteration_may_skip_and_not_the_rare_maximum() -> None:
    functions = parse(KERNEL)
    assert list(functions) == ["_Z6attendv", "_Z4packv"]
    loop = hot_loop(functions["_Z6attendv"])
    assert [instruction.address for instruction in loop] == [*range(0x30, 0x90, 16), *range(0xB0, 0x100, 16)]
    counts = {name: number for name, number in count(loop).items() if number}
    assert counts == {
        "all": 11, "mma": 2, "shared_load": 1, "copy": 1, "expand": 1, "sync": 1, "address": 1, "move": 1, "branch": 3, "half_rate": 2
    }  # fmt: skip


def test_code_for_diverged_lanes_is_rare() -> None:
    [code] = parse("""
\t\tFunction : _Z6attendv
        /*0000*/                   BRA.DIV UR5, 0x40 ;
        /*0010*/                   HMMA.16816.F32 R4, R4, R8, RZ ;
        /*0020*/              @P1  BRA 0x0 ;
        /*0030*/                   EXIT ;
        /*0040*/                   WARPSYNC.COLLECTIVE R112, 0x60 ;
        /*0050*/                   ENDCOLLECTIVE ;
        /*0060*/                   BRA 0x10 ;
""").values()
    assert [instruction.address for instruction in hot_loop(code)] == [0, 0x10, 0x20]


def test_a_function_without_mma_has_no_hot_loop() -> None:
    with pytest.raises(ValueError, match="no loop has MMAs"):
        hot_loop(parse(KERNEL)["_Z4packv"])


@pytest.mark.parametrize(("text", "category"), [
    ("@P0 LDS.64 R2, [R4]", "shared_load"), ("HADD2.F32 R41, -RZ, R28.H0_H0", "half"), ("USHF.R.U32.HI UR4, URZ, 0x5, UR4", "uniform"),
    ("HFMA2.MMA R4, -RZ, RZ, 0, 0", "move"), ("BSSY B0, 0x6810", "sync"), ("IADD3 R8, P2, R14, 0x1000, RZ", "address"),
    ("IMMA.16832.U8.S8 R4, R8.ROW, R10.COL, R4", "mma"), ("FROBNICATE R1", "other"),
])  # fmt: skip
def test_an_instruction_has_one_category(text: str, category: str) -> None:
    assert Instruction(0, text).category == category


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_has_a_schedule_that_its_shape_can_run(case: Case) -> None:
    if case.backend == "tilelang":
        needs_tilelang()
    assert get_backend(case.backend).space(case.spec, TARGET).check(case.schedule) == []
