"""The suites by name: their faults and cases."""

from __future__ import annotations

from tests.mutants import cases_cpu, cases_gpu, faults_calls, faults_cpu, faults_cuda, faults_pack, faults_sizes, faults_tilelang
from tests.mutants.fault import Case, Fault

SUITES: dict[str, tuple[Fault, ...]] = {
    "cpu": (*faults_cpu.FAULTS, *faults_calls.CPU_FAULTS, *faults_sizes.CPU),
    "cuda": (*faults_cuda.FAULTS, *faults_pack.FAULTS, *faults_calls.CUDA_FAULTS, *faults_tilelang.FAULTS, *faults_sizes.CUDA),
}
CASES: dict[str, dict[str, Case]] = {"cpu": cases_cpu.CASES, "cuda": cases_gpu.CASES}
