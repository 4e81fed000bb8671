"""`kvgen check` over a real kernel of the CPU: a comment, and a slow loop in a header."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ROOT, Machine

BEGIN = "  static void attend(const ffi::Attend& call) {\n"
LOOP = "    for (volatile int i = 0; i < 2000000; i = i + 1) {\n    }\n"


@pytest.mark.slow
def test_a_comment_of_a_header_changes_nothing_and_a_slow_loop_regresses(tmp_path: Path):
    machine, data = Machine(tmp_path), tmp_path / "data"
    for name in ("templates", "search_spaces"):
        shutil.copytree(ROOT / name, data / name)
    (data / "generated").mkdir()
    machine.environment["KVGEN_DATA_DIR"] = str(data)
    header = data / "templates" / "cpu" / "include" / "kvgen" / "module.hpp"
    original = header.read_text()
    assert original.count(BEGIN) == 1
    machine.json("build", machine.spec, "--backend", "cpu", "--trials", "1")

    def check(text: str, *words: str, code: int) -> dict[str, Any]:
        """What is found with a text at the beginning of `attend`."""
        header.write_text(original.replace(BEGIN, BEGIN + text))
        (result,) = machine.json("check", machine.root / "registry", *words, code=code)
        return {finding["aspect"]: finding for finding in result["findings"]}

    assert check("    // a comment\n", code=0)["source"]["status"] == "good"
    found = check(LOOP, "--speed", code=1)
    assert {name: one["status"] for name, one in found.items() if name != "resources"} == {
        "source": "changed", "numerics": "good", "speed": "regressed",
    }  # fmt: skip
    assert "when tuned" in found["speed"]["detail"]
