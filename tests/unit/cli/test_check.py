"""`kvgen check`: exit codes, the last line, files of a registry, and what can be accepted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvgen.cli import main
from kvgen.errors import HostError
from kvgen.tune import regression
from tests.support.checking import Place

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    for name in ("CACHE", "REGISTRY", "SITE"):
        monkeypatch.setenv(f"KVGEN_{name}_DIR", str(tmp_path / name.lower()))
    return Place(tmp_path, monkeypatch)


@pytest.fixture
def check(place: Place, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `kvgen check` over the place's registry: its exit code, and what it printed, but for the number of kernels to compile."""

    def run(*words: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(["check", str(place.store.root), *map(str, words)])
        captured = capsys.readouterr()
        told = [line for line in captured.err.splitlines(keepends=True) if not line.startswith("compiling ")]
        return int(ended.value.code or 0), captured.out + "".join(told)

    return run


def only(text: str) -> dict[str, Any]:
    (result,) = json.loads(text)
    return result


def file(place: Place) -> Path:
    (found,) = place.store.all()
    return found.path


def test_good_is_exit_0(check: Run):
    code, out = check()
    assert (code, out.splitlines()[-1]) == (0, "1 entry, 1 good, 0 regressed, 0 unable")
    code, out = check("--json")
    assert (code, only(out)["verdict"], only(out)["reason"]) == (0, "good", "")


def test_what_selects_no_entry_is_refused(check: Run, place: Place):
    for words, expected, reason in (
        (["--key", ""], 3, "no entry has a key that begins with ''"),
        (["--arch", "sm90"], 2, "no entry is for sm90"),
        (["--arch", "sm80", "--arch", "sm90", "--key", place.entry.key[:4]], 2, "no such entry is for sm80 or sm90"),
    ):
        code, out = check(*words)
        assert code == expected
        assert reason in " ".join(out.replace("│", " ").split())
    shutil.rmtree(place.store.root)
    place.store.root.mkdir()
    code, out = check()
    assert code == 2
    assert "holds no entries" in " ".join(out.replace("│", " ").split())


@pytest.mark.parametrize("changes", [{"reason": "not any more"}, {"comment": "int changed;\n"}])
def test_what_get_kernel_would_not_take_or_render_as_it_was_is_exit_1(check: Run, place: Place, changes: dict[str, Any]):
    place.later(**changes)
    code, out = check("--json")
    assert (code, only(out)["verdict"]) == (1, "regressed")
    assert only(out)["reason"].startswith("source: ")


def test_a_full_disk_is_exit_3_and_no_regression(check: Run, place: Place):
    def full(*_: object) -> None:
        raise HostError("cannot write module.so: No space left on device")

    place.build(full)
    code, out = check()
    assert code == 3
    assert "0 regressed, 1 unable; not checked: resources of 1 (cannot write module.so: No space left on device)" in out
    code, out = check("--json")
    assert (code, only(out)["verdict"], only(out)["environment"]) == (3, "unable", True)


def test_a_missing_device_is_exit_0_and_told_in_the_last_line(check: Run, place: Place):
    place.patch.setattr(regression, "cannot_run_here", lambda target: "no NVIDIA GPU is visible")
    code, out = check()
    assert code == 0
    assert out.splitlines()[-1] == "1 entry, 0 good, 0 regressed, 1 unable; not checked: numerics of 1 (no NVIDIA GPU is visible)"
    code, out = check("--json")
    assert (code, only(out)["verdict"], only(out)["reason"]) == (0, "unable", "numerics: no NVIDIA GPU is visible")


def test_a_damaged_entry_fails_is_no_regression_and_cannot_be_accepted(check: Run, place: Place):
    file(place).write_text(file(place).read_text().replace('"tiny"', '"tony"'))
    code, out = check("--json")
    assert (code, only(out)["key"], only(out)["verdict"], only(out)["regressed"]) == (1, place.entry.key, "damaged", False)
    assert "/q2kv1d32-float32-k4c32-v4t32-contiguous.json: it was changed after it was written" in only(out)["reason"]
    last = "1 entry, 0 good, 0 regressed, 0 unable, 1 damaged"
    assert check()[1].splitlines()[-1] == last
    code, out = check("--accept")
    assert (code, out.splitlines()[-1]) == (1, f"{last}; of these accepted: 0")
