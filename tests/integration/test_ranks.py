"""Ranks start at once with a cold cache: all of them take the same launch everywhere, and its outputs are the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT
from tests.support.naive import naive_spec

RANKS = 4
PROGRAM = """
import hashlib, json, os, sys
import torch
import kvgen
import kvgen.api.kernel, kvgen.registry.select, kvgen.toolchain.compile  # before the fork: they take longer than what the ranks do
from kvgen.spec import Workload

spec = kvgen.load_spec(json.loads(sys.argv[1]))
plane = [Workload(batch=b, kv_len=n) for b in (1, 3, 16, 200) for n in (16, 500, 9000)]
torch.manual_seed(0)
k, v, q = torch.randn(2, 70, 2, 32), torch.randn(2, 70, 2, 32), torch.randn(2, 1, 4, 32)

def rank():
    torch.set_num_threads(1)
    kernel = kvgen.get_kernel(spec)
    cache = kernel.new_cache(2, 128)
    kernel.prefill(cache, k, v)
    out = kernel.attend(q, cache).numpy().tobytes()
    return [[str(kernel.variant(work).module.path) for work in plane], hashlib.sha256(out).hexdigest()]

begin, go = os.pipe()
ranks = []
for _ in range(int(sys.argv[2])):
    answer, told = os.pipe()
    if (child := os.fork()) == 0:
        os.read(begin, 1)
        os.write(told, json.dumps(rank()).encode())
        os._exit(0)
    os.close(told)
    ranks.append((child, answer))
os.write(go, b"g" * len(ranks))
print(json.dumps([json.loads(os.fdopen(answer).read()) for _, answer in ranks]))
sys.exit(sum(os.waitpid(child, 0)[1] != 0 for child, _ in ranks))
"""


@pytest.mark.slow
def test_ranks_take_the_same_launches_and_modules(tmp_path: Path):
    own = {f"KVGEN_{name}": str(tmp_path / name) for name in ("REGISTRY_DIR", "SITE_DIR", "CACHE_DIR")}
    words = [sys.executable, "-W", "ignore", "-c", PROGRAM, json.dumps(naive_spec().to_json()), str(RANKS)]
    run = subprocess.run(
        words, env={**os.environ, **own, "PYTHONPATH": str(ROOT)}, text=True, capture_output=True, check=False, cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr
    answers = json.loads(run.stdout)
    assert len(answers) == RANKS
    assert all(answer == answers[0] for answer in answers)
    modules, _ = answers[0]
    assert {Path(module).parents[2] for module in modules} == {tmp_path / "CACHE_DIR" / "modules"}
