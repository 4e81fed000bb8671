"""`kvgen check`: exit codes, the last line, files of a registry, and what can be accepted."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvgen.cli import main
from kvgen.errors import HostError
from kvgen.registry.manifest import manifest_problems, write_manifest
from kvgen.tune.regression import entry as entry_check
from kvgen.tune.regression import registry as registry_check
from kvgen.tune.regression.finding import Checked
from kvgen.tune.regression.registry import RegistryFiles
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


def folder(place: Place) -> Path:
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
        (["--arch", "sm80", "--arch", "sm90", "--key", folder(place).name[:4]], 2, "no such entry is for sm80 or sm90"),
    ):
        code, out = check(*words)
        assert code == expected
        assert reason in " ".join(out.replace("│", " ").split())
    shutil.rmtree(place.store.root)
    place.store.root.mkdir()
    code, out = check()
    assert code == 2
    assert "holds no entries" in " ".join(out.replace("│", " ").split())


@pytest.mark.parametrize("changes", [{"reason": "not any more"}, {"blocks": (4096,)}, {"comment": "int changed;\n"}])
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
    place.patch.setattr(entry_check, "cannot_run_here", lambda target: "no NVIDIA GPU is visible")
    code, out = check()
    assert code == 0
    assert out.splitlines()[-1] == "1 entry, 0 good, 0 regressed, 1 unable; not checked: numerics of 1 (no NVIDIA GPU is visible)"
    code, out = check("--json")
    assert (code, only(out)["verdict"], only(out)["reason"]) == (0, "unable", "numerics: no NVIDIA GPU is visible")


def test_a_key_that_matches_nothing_is_a_miss_with_close_keys(check: Run, place: Place):
    key = place.entry.key
    code, out = check("--key", key[:4] + "typo")
    assert code == 3
    assert key in out.replace("\n", "")
    code, out = check("--key", key[:6], "--json")
    assert (code, only(out)["key"]) == (0, key)


def test_a_damaged_entry_fails_is_no_regression_and_cannot_be_accepted(check: Run, place: Place):
    write_manifest(place.store.root)
    (folder(place) / "entry.json").write_text("{}")
    code, out = check("--json")
    assert code == 1
    damaged, listed = json.loads(out)
    assert (damaged["key"], damaged["reason"]) == (place.entry.key, "registry: entry.json was changed after it was written")
    assert (listed["key"], listed["findings"][0]["aspect"]) == ("manifest.json", "registry")
    assert all((one["verdict"], one["regressed"]) == ("damaged", False) for one in (damaged, listed))
    last = "1 entry, 0 good, 0 regressed, 0 unable, 1 damaged, files not as the manifest lists them: 1"
    assert check()[1].splitlines()[-1] == last
    code, out = check("--accept")
    assert (code, out.splitlines()[-1]) == (1, f"{last}; of these accepted: 0")


def test_entries_that_the_manifest_lists_and_that_are_gone_regress(check: Run, place: Place):
    key = place.entry.key
    write_manifest(place.store.root)
    shutil.rmtree(folder(place))
    for words in ((), ("--accept",), ("--key", key[:5]), ()):
        code, out = check(*words, "--json")
        assert code == 1
        assert (only(out)["key"], only(out)["verdict"]) == (key, "regressed")
        assert "it is missing, and manifest.json lists it" in only(out)["reason"]
    place.store.put(place.entry)
    assert check()[0] == 0


def test_an_entry_in_the_wrong_folder_is_a_regression(check: Run, place: Place):
    path = folder(place)
    path.parent.rename(path.parent.with_name("another-format.0123456789abcdef"))
    code, out = check("--json")
    assert code == 1
    assert any("get_kernel looks for it in a folder" in one["reason"] for one in json.loads(out))


def test_what_renders_differently_is_accepted_and_manifest_with_it(check: Run, place: Place):
    write_manifest(place.store.root)
    (place.store.root / "notes").write_text("by hand")
    place.later(comment="int changed;\n")
    code, out = check("--accept")
    assert code == 0
    assert out.splitlines()[-1].endswith("; of these accepted: 2")
    assert manifest_problems(place.store.root) == []
    assert check()[0] == 0


@pytest.mark.parametrize("selection", ["--key", "--arch"])
def test_only_what_was_selected_is_accepted(check: Run, place: Place, selection: str):
    write_manifest(place.store.root)
    other = place.store.put(dataclasses.replace(place.entry, device={"name": "Other"}, arch="cpu" if selection == "--key" else "sm90"))
    for found in place.store.all():
        (found.path / "notes").write_text("by hand")
    (place.store.root / "notes").write_text("by hand")
    check("--accept", selection, place.entry.key if selection == "--key" else "cpu")
    left = manifest_problems(place.store.root)
    assert {line.split()[0] for line in left} == {"notes", (other / "notes").relative_to(place.store.root).as_posix()}


def test_what_cannot_be_written_is_not_accepted(check: Run, place: Place):
    from kvgen.registry import Store

    def full(store: Store, entry: object) -> Path:
        raise HostError("cannot write to the registry: No space left on device")

    place.patch.setattr(Store, "put", full)
    place.later(comment="int changed;\n")
    code, out = check("--accept")
    assert code == 1
    assert "accepted: 0; not checked: registry of 1 (cannot write to the registry: No space left on device)" in out


def test_a_registry_that_cannot_be_read_is_exit_3(check: Run, place: Place):
    def unreadable(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    place.patch.setattr(registry_check, "differences", unreadable)
    write_manifest(place.store.root)
    code, out = check("--json")
    assert (code, only(out)["environment"]) == (3, True)
    assert "Permission denied" in only(out)["reason"]


@pytest.mark.parametrize("words", [[], ["--json"]], ids=["table", "json"])
def test_an_interrupted_check_tells_what_it_has_checked(check: Run, monkeypatch: pytest.MonkeyPatch, words: list[str]):
    def interrupted(self: RegistryFiles, wanted: object) -> list[Checked]:
        raise KeyboardInterrupt

    monkeypatch.setattr(RegistryFiles, "entry_problems", interrupted)
    code, told = check(*words)
    assert code == 130
    assert ("so far: 1 entry, 1 good" in told) == (not words)
    assert told.endswith("kvgen: interrupted\n")
