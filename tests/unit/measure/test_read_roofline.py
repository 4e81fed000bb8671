from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvgen.measure import read_roofline as module
from kvgen.measure.measurement import TimingPolicy
from kvgen.measure.read_roofline import PIECE, READS, source
from kvgen.runtime.module import load_library
from kvgen.toolchain import ArtifactCache, build

POLICY = TimingPolicy(seconds=0.02, warmup_seconds=0.0, cold_bytes=0, samples=5, threads=1)


@pytest.mark.nvcc
def test_gpu_read_kernels_compile_without_spills(tmp_path: Path) -> None:
    for target, reads in (("sm80", {"read"}), ("sm90", {*READS})):
        artifact = build(source(target), ArtifactCache(tmp_path))
        assert len(artifact.resources.kernels) == len(reads) + 1
        assert artifact.resources.spill_bytes == 0
        library = load_library(artifact.path)
        assert {name for name in READS if library.implements_function(name)} == reads
        assert library.implements_function("copy")


def test_the_fastest_read_of_a_size_counts(monkeypatch) -> None:
    class Clock:
        def time(self, calls, policy):
            return (calls[0](),)

    monkeypatch.setattr(module, "timer_for", lambda device: Clock())
    meter = module.ReadRoofline(build(source("cpu")).path, "cpu")
    asked: list[tuple[float, int]] = []
    meter._reads = [lambda buffer, _, us=us: asked.append((us, buffer.numel())) or us for us in (3.0, 2.0, 4.0)]
    for _ in range(2):
        assert meter.samples(5 * PIECE - 7, POLICY) == (2.0,)
    assert asked == [(us, 5 * PIECE) for us in (3.0, 2.0, 4.0, 2.0)], "all of the bytes; the others are tried once"


def test_a_copy_moves_half_of_the_bytes_from_one_half_to_the_other() -> None:
    meter = module.ReadRoofline(build(source("cpu")).path, "cpu")
    size, (buffer,) = meter._buffers(5 * PIECE, POLICY, 2)
    assert size == 6 * PIECE
    buffer[: 3 * PIECE] = torch.arange(3 * PIECE) % 251
    buffer[3 * PIECE :] = 0
    assert min(meter.copies(5 * PIECE, POLICY)) > 0
    assert torch.equal(buffer[3 * PIECE :], buffer[: 3 * PIECE])
