"""`kvgen check` over real kernels of the CPU: a slow loop in a header, a compiler that is gone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ROOT, Machine

BEGIN = "  static void attend(const ffi::Attend& call) {\n"
LOOP = "    for (volatile int i = 0; i < 2000000; i = i + 1) {\n    }\n"


class Own(Machine):
    """A machine with templates of its own, and one entry."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        data = root / "data"
        for name in ("templates", "search_spaces"):
            shutil.copytree(ROOT / name, data / name)
        (data / "generated").mkdir()
        self.environment["KVGEN_DATA_DIR"] = str(data)
        self.header = data / "templates" / "cpu" / "include" / "kvgen" / "module.hpp"
        self.original = self.header.read_text()
        self.json("build", self.spec, "--backend", "cpu", "--trials", "1")

    def write(self, text: str, after: str = BEGIN) -> None:
        """Change the header: some text after a line of it, or as it was."""
        assert self.original.count(after) == 1
        self.header.write_text(self.original.replace(after, after + text))

    def check(self, *words: object, code: int) -> dict[str, Any]:
        (result,) = self.json("check", self.root / "registry", *words, code=code)
        return {finding["aspect"]: finding for finding in result["findings"]} | {"verdict": result["verdict"]}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Own:
    return Own(tmp_path_factory.mktemp("machine"))


@pytest.mark.slow
def test_a_comment_of_a_header_changes_nothing_and_a_slow_loop_regresses(machine: Own):
    machine.write("    // a comment\n")
    assert machine.check(code=0)["source"]["status"] == "good"
    machine.write(LOOP)
    found = machine.check("--speed", code=1)
    assert (found["source"]["status"], found["numerics"]["status"]) == ("changed", "good")
    assert found["speed"]["status"] == "regressed"
    assert "when tuned" in found["speed"]["detail"]


@pytest.mark.slow
def test_a_compiler_that_is_gone_is_exit_3(machine: Own):
    machine.write("    (void)1;\n")
    hidden = {**machine.environment, "PATH": "", "CXX": ""}
    whole, machine.environment = machine.environment, hidden
    try:
        found = machine.check(code=3)
    finally:
        machine.environment = whole
    assert found["resources"] == {"aspect": "resources", "status": "unable", "detail": found["resources"]["detail"], "environment": True}
    assert "g++ was not found" in found["resources"]["detail"]
