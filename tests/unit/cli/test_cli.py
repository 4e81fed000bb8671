from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from benchmarks.gpu_words import spec_of, workload_of
from kvgen import __version__
from kvgen.accuracy.suite import suite
from kvgen.cli.app import app, main
from kvgen.cli.describe import describe
from kvgen.cli.output import parse_bytes, parse_seconds, parse_shape, parse_tokens, parse_workload
from kvgen.errors import HostError
from kvgen.registry.store import Store
from kvgen.spec import KernelSpec, dump_spec, load_spec
from tests.support.commands import ROOT, TINY
from tests.support.entries import put_changed, tuned
from tests.support.tilelang import needs_tilelang
from tests.support.tuning import FakeBackend


class Answer:
    """What a command printed, and how it ended."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def kvgen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run commands with empty registries, in a folder that holds `tiny.yaml`."""
    for name in ("CACHE", "REGISTRY", "SITE"):
        monkeypatch.setenv(f"KVGEN_{name}_DIR", str(tmp_path / name.lower()))
    (tmp_path / "tiny.yaml").write_text(TINY)
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> Answer:
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        captured = capsys.readouterr()
        return Answer(int(ended.value.code or 0), captured.out, captured.err)

    return run


def quick(option: str) -> str:
    """What the command prints for an option that needs no heavy library."""
    script = (
        "import sys\n"
        "from kvgen.cli import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit as ended:\n    assert not ended.code\n"
        "print([m for m in ('torch', 'optuna', 'jinja2', 'tilelang', 'pydantic', 'yaml', 'numpy') if m in sys.modules])"
    )
    printed, _, heavy = subprocess.run(
        [sys.executable, "-c", script, option], capture_output=True, text=True, check=True
    ).stdout.strip().rpartition("\n")  # fmt: skip
    assert heavy == "[]"
    return printed


def test_help_loads_nothing_heavy():
    printed = quick("--help")
    assert all(command in printed for command in (*COMMANDS, "--version", "--debug"))


def test_the_version_is_one_line_and_loads_nothing_heavy():
    assert quick("--version") == f"kvgen {__version__}"


def test_a_process_that_calls_again_registers_no_command_twice(kvgen: Any):
    for _ in range(2):
        assert kvgen("presets").code == 0
    names = [command.name or command.callback.__name__ for command in app.registered_commands if command.callback]
    assert len(names) == len(set(names)) >= len(COMMANDS)


COMMANDS = (
    "build", "list", "show", "why", "bench", "accuracy", "recommend", "spec", "space",
    "doctor", "check", "report", "export", "import", "presets", "schema",
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_how_it_is_called(kvgen: Any, command: str):
    answer = kvgen(command, "--help")
    usage = next(line for line in answer.out.splitlines() if "Usage:" in line)
    assert answer.code == 0
    assert f"kvgen {command} " in usage
    assert not any(doubled in usage for doubled in ("[[", "......", "...}"))  # typer marks what is optional and what may be repeated


def test_a_shell_completes_commands() -> None:
    """What `kvgen --install-completion` has a shell ask for."""
    asked = {"_KVGEN_COMPLETE": "complete_bash", "COMP_WORDS": "kvgen re", "COMP_CWORD": "1"}
    done = subprocess.run([sys.executable, "-m", "kvgen"], env={**os.environ, **asked}, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["recommend", "report"]


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_tokens, "16k", 16384), (parse_tokens, "2M", 2 << 20), (parse_tokens, "300", 300),
        (parse_bytes, "36000", 36000), (parse_bytes, "36KB", 36000), (parse_bytes, "36 kib", 36864),
        (parse_bytes, "1.5MiB", 1.5 * (1 << 20)),
        (parse_bytes, "2GB", 2e9), (parse_bytes, "1GiB", 1 << 30), (parse_bytes, "5B", 5),
        (parse_seconds, "5min", 300), (parse_seconds, "0.5", 0.5), (parse_seconds, "1h", 3600),
        (lambda text: parse_workload(text).key, "8x16k", "8x16384"),
        (lambda text: parse_workload(text).key, "48x1k-24Kq4:sustained", "48x1024-24576q4:sustained"),
        (lambda text: parse_shape(text).key, "128kx1k", "131072x1024"),
    ],
)  # fmt: skip
def test_numbers_are_read_as_they_are_usually_written(parse: Callable[[str], object], text: str, value: object) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        *((parse_tokens, text) for text in ("", "k", "16kb", "1.5k", "-1", "16 k", "16g")),
        *((parse_bytes, text) for text in ("", "KB", "36K B", "36kk", "-1", "0", "0.5", "1e3", "36T")),
        *((parse_seconds, text) for text in ("", "5mx", "-1", "1d")),
        *((parse_workload, text) for text in ("8x16kb", "8kkx1", "8x1.5k", "x16k", "8x1k2")),
    ],
)
def test_other_spellings_of_numbers_are_refused(parse: Callable[[str], object], text: str) -> None:
    with pytest.raises(typer.BadParameter, match="write|range"):
        parse(text)


def test_a_bad_spec_is_exit_2_with_every_mistake(kvgen: Any, tmp_path: Path):
    (tmp_path / "bad.yaml").write_text(TINY.replace("bits: 4", "bits: 5").replace("kv_heads: 1", "kv_head: 1"))
    for command in ("build", "why", "space", "bench"):
        answer = kvgen(command, "bad.yaml")
        assert answer.code == 2
        assert "kv_heads" in answer.err
        assert "key.bits" in answer.err
        assert "Traceback" not in answer.err


def test_errors_are_json_where_json_is_asked_for(kvgen: Any, tmp_path: Path):
    (tmp_path / "bad.yaml").write_text(TINY.replace("bits: 4", "bits: 5"))
    error = kvgen("build", "bad.yaml", "--json").json()["error"]
    assert error["kind"] == "SpecError"
    assert error["exit"] == 2
    assert "key.bits" in error["message"]


@pytest.mark.parametrize(("words", "built"), [((), "tuner.tune"), (("--compile-only",), "compile_only.compile_space")])
@pytest.mark.parametrize(
    ("error", "code", "said"), [(HostError("no space is left"), 3, "no space is left"), (KeyboardInterrupt(), 130, "interrupted")]
)
def test_a_spec_that_fails_leaves_the_json_of_those_before_it(
    kvgen: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    built: str,
    error: BaseException,
    code: int,
    said: str,
):
    def build(spec: KernelSpec, **_: object) -> SimpleNamespace:
        if spec.name == "other":
            raise error
        return SimpleNamespace(to_json=lambda: {"spec": spec.name}, interrupted=False)

    monkeypatch.setattr(f"kvgen.tune.{built}", build)
    (tmp_path / "other.yaml").write_text(TINY.replace("name: tiny", "name: other"))
    both, alone = (kvgen("build", *specs, "--json", *words) for specs in (("tiny.yaml", "other.yaml"), ("other.yaml",)))
    for answer in (both, alone):
        assert (answer.code, answer.err) == (code, f"kvgen: {said}\n")
    assert alone.json() == {"error": {"kind": type(error).__name__, "message": said, "exit": code}}
    assert both.json() == [{"spec": "tiny"}, alone.json()]


@pytest.mark.parametrize(
    "words",
    [
        ("build",),
        ("build", "no-such-preset"),
        ("build", "no-such-file.yaml"),
        ("build", "tiny.yaml", "--budget", "soon"),
        ("build", "tiny.yaml", "--trials", "0"),
        ("build", "tiny.yaml", "--backend", "fortran"),
        ("build", "tiny.yaml", "--arch", "sm12"),
        ("build", "tiny.yaml", "--workload", "big"),
        ("bench", "tiny.yaml", "--against", "nobody"),
        ("bench",),
        ("bench", "--suite", "no-such-suite"),
        ("bench", "tiny.yaml", "--suite", "int8-kernels"),
        ("bench", "--suite", "int8-kernels", "--decode"),
        ("bench", "--suite", "int8-kernels", "--against", "flash"),
        ("import", "no-such-file.tar.gz"),
        ("check", "no-such-folder"),
        ("check", "--arch", "sm12"),
        ("presets", "no-such-preset"),
        ("no-such-command",),
    ],
)
def test_bad_arguments_are_exit_2(kvgen: Any, words: tuple[str, ...]):
    answer = kvgen(*words)
    assert answer.code == 2, answer.err
    assert "Traceback" not in answer.err


def test_a_file_that_cannot_be_written_is_named_before_anything_is_measured(kvgen: Any, monkeypatch: pytest.MonkeyPatch):
    from kvgen.cli import bench

    monkeypatch.setattr(bench, "pin_threads", lambda: None)
    monkeypatch.setattr(bench, "run", lambda *_: pytest.fail("it was measured"))
    monkeypatch.setattr(bench, "run_suite", lambda *_, **__: pytest.fail("it was measured"))
    for words in (("tiny.yaml",), ("--suite", "int8-kernels")):
        answer = kvgen("bench", *words, "--csv", "tiny.yaml/rows.csv")
        assert (answer.code, answer.err.count("\n")) == (3, 1)
        assert answer.err.startswith("kvgen: cannot write tiny.yaml")


def test_debug_shows_the_traceback(kvgen: Any):
    from kvgen.errors import RegistryMiss

    assert kvgen("show", "0000").code == 3
    with pytest.raises(RegistryMiss):
        main(["show", "0000", "--debug"])


def test_nothing_registered_is_an_empty_list_and_exit_3_for_a_question(kvgen: Any):
    assert [one for one in kvgen("list", "--json").json() if one["registry"] != "packaged"] == []
    answer = kvgen("why", "tiny.yaml", "--json")
    assert answer.code == 3
    assert answer.json()[0]["how"] == "default"
    assert kvgen("show", "0123").code == 3
    assert kvgen("export", "out.tar.gz").code == 3


def test_a_target_without_gpu_or_compiler_says_all_that_is_missing(kvgen: Any, monkeypatch: pytest.MonkeyPatch):
    from kvgen.errors import ToolchainMissing
    from kvgen.runtime import device
    from kvgen.toolchain import compilers

    def no_nvcc() -> None:
        raise ToolchainMissing("nvcc was not found")

    monkeypatch.setattr(device, "gpu_capability", lambda: None)
    monkeypatch.setattr(compilers, "find_nvcc", no_nvcc)
    answer = kvgen("build", "bitdecoding-int4", "--arch", "sm90", "--backend", "cuda")
    assert answer.code == 3
    assert "nvcc was not found" in answer.err
    assert "no NVIDIA GPU is visible" in answer.err
    assert len(answer.err.strip().splitlines()) == 1


@pytest.mark.parametrize("words", [("--jobs", 2), ("--limit", 3), ("--compile-only", "--trials", 4), ("--compile-only", "--fresh")])
def test_a_build_refuses_options_that_would_say_nothing(kvgen: Any, words: tuple[object, ...]):
    answer = kvgen("build", "tiny.yaml", *words)
    assert answer.code == 2
    assert "--compile-only" in answer.err


@pytest.mark.parametrize("devices", ["3", "all", "0,1"])
def test_a_build_for_a_cpu_refuses_gpus(kvgen: Any, devices: str):
    answer = kvgen("build", "tiny.yaml", "--devices", devices)
    assert answer.code == 2
    assert "--devices names GPUs, and this build is for cpu" in " ".join(answer.err.replace("│", " ").split())


def test_a_back_end_of_another_target_refuses_by_name(kvgen: Any):
    answer = kvgen("build", "tiny.yaml", "--backend", "cpu", "--arch", "sm90")
    assert answer.code == 3
    assert "cpu back end does not support this spec: it does not target sm90" in answer.err


def test_space_counts_and_explains(kvgen: Any):
    (space,) = kvgen("space", "tiny.yaml", "--backend", "cpu", "--explain", "--schedules", "--json").json()["spaces"]
    assert space["size"] == len(space["schedules"]) > 0
    assert space["excluded"]
    assert space["unsearched"]
    assert all(reason["schedules"] > 0 and reason["examples"] for reason in space["excluded"] + space["unsearched"])
    assert set(space["launches"]) == set(space["defaults"]) == {"1x256"}
    shown = kvgen("space", "tiny.yaml", "--backend", "cpu", "--explain").out
    assert "cannot be built" in shown
    assert "can be built, not searched" in shown
    assert "default at 1x256: block=" in shown
    assert "where nothing is tuned: block=" in shown


def test_a_back_end_that_cannot_take_a_spec_leaves_it_to_the_others_and_all_reasons_are_told(kvgen: Any, tmp_path: Path):
    needs_tilelang()
    gpu, both = TINY.replace("float32", "float16"), ("--arch", "sm90", "--backend", "cuda", "--backend", "tilelang")
    (tmp_path / "odd.yaml").write_text(gpu.replace("head_dim: 32", "head_dim: 80").replace("group: 32", "group: 80"))
    told = kvgen("space", "odd.yaml", *both, "--json").json()
    assert [space["backend"] for space in told["spaces"]] == ["cuda"]
    (reason,) = told["refused"]
    assert "attention.head_dim (80) is no multiple of 32" in reason
    (tmp_path / "wide.yaml").write_text(gpu.replace("head_dim: 32", "head_dim: 128").replace("batch: 1,", "batch: 4096,"))
    answer = kvgen("space", "wide.yaml", *both)
    assert answer.code != 0
    for backend in ("cuda", "tilelang"):
        told = next(line for line in answer.err.splitlines() if f"the {backend} back end does not support this spec" in line)
        assert "a launch takes at most 2048 sequences" in told


def test_formats_that_differ_are_described_differently():
    specs = [load_spec(file) for file in sorted((ROOT / "examples").glob("*.yaml"))]
    specs += [load_spec({**specs[0].to_json(), **change}) for change in ({"cache": {"rollback": 8}}, {"cache": {"local": 64}})]
    described = {spec.format_id: describe(spec) for spec in (*specs, *suite().values())}
    assert len(set(described.values())) == len(described)


def test_presets_and_schema_describe_the_language(kvgen: Any):
    presets = kvgen("presets", "--json").json()
    assert presets["kivi-int2"]["key"]["bits"] == 2
    assert "bits: 2" in kvgen("presets", "kivi-int2").out
    assert kvgen("schema").json() == json.loads((ROOT / "docs" / "kvgen-spec.schema.json").read_text())


def test_doctor_tells_compilers_back_ends_and_places(kvgen: Any, tmp_path: Path):
    facts = kvgen("doctor", "--json").json()
    assert {"g++", "nvcc", "GPU", "back end cpu", "back end cuda"} <= {check["name"] for check in facts["checks"]}
    assert facts["places"]["cache"] == str(tmp_path / "cache")
    assert "cpu" in facts["targets"]
    assert "g++" in kvgen("doctor").out


def test_doctor_tells_of_places_that_are_files(kvgen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    for variable in ("KVGEN_REGISTRY_DIR", "KVGEN_CACHE_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / "file"))
    places = kvgen("doctor", "--json").json()["places"]
    assert places["cache"].endswith("/file is no folder")
    assert "cannot list" in places["user registry"]


def test_a_pipe_is_a_spec_and_a_folder_no_archive(kvgen: Any, tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_text((tmp_path / "tiny.yaml").read_text()))
    writer.start()
    assert "tiny on cpu" in kvgen("why", "pipe").out
    writer.join()
    assert "is no plain file" in " ".join(kvgen("import", tmp_path).err.replace("│", "").split())


def test_doctor_tells_which_parts_are_installed(kvgen: Any, monkeypatch: pytest.MonkeyPatch):
    from kvgen import extras

    find = extras.find_spec
    monkeypatch.setattr(extras, "find_spec", lambda package: None if package == "optuna" else find(package))
    checks = {check["name"]: check for check in kvgen("doctor", "--json").json()["checks"]}
    assert checks["kvgen[build]"] == {
        "name": "kvgen[build]",
        "ok": False,
        "detail": "kvgen[build] needs optuna: pip install 'kvgen[build]'",
    }
    assert checks["kvgen[pytest]"]["detail"] == f"pytest {pytest.__version__}"
    assert "kvgen[build] needs optuna: pip install 'kvgen[build]'" in kvgen("doctor").out


@pytest.mark.parametrize(("words", "packages"), [(("build", "tiny.yaml"), "optuna"), (("report",), "optuna")])
def test_a_command_without_its_packages_names_the_line_to_type(
    kvgen: Any, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], packages: str
):
    from kvgen import extras

    monkeypatch.setattr(extras, "find_spec", lambda package: None)
    answer = kvgen(*words)
    assert (answer.code, answer.err) == (3, f"kvgen: kvgen {words[0]} needs {packages}: pip install 'kvgen[build]'\n")


def test_an_error_nobody_foresaw_is_one_line(kvgen: Any, monkeypatch: pytest.MonkeyPatch):
    from kvgen.lower import backends

    def broken(name: str) -> None:
        raise AttributeError("oops")

    monkeypatch.setattr(backends, "get_backend", broken)
    answer = kvgen("space", "tiny.yaml", "--backend", "cpu")
    assert answer.code == 3
    assert answer.err.strip() == "kvgen: internal error: AttributeError: oops (--debug shows where)"


@pytest.mark.parametrize(
    ("put", "reason"),
    [
        (lambda *where: put_changed(*where, lambda data: data.update(schema=2)), "schema 2: this kvgen reads 4"),
        (lambda *where: put_changed(*where, lambda data: data["provenance"].update(tuned=[])), "ValueError: provenance.tuned: "),
    ],
)
def test_damaged_entries_are_named_by_what_leaves_them_out(kvgen: Any, tmp_path: Path, put: Callable[..., Path], reason: str):
    entry = tuned(spec_of("k4v4", "sm90", [workload_of("1x4096")]))
    put(Store(tmp_path / "registry"), entry)
    report, export = kvgen("report", "-o", "x.html"), kvgen("export", "x.tar.gz")
    assert (report.code, export.code) == (0, 3)
    assert entry.key not in (tmp_path / "x.html").read_text()
    for left_out in (report, export):
        assert entry.key in left_out.err
        assert reason in left_out.err
    for command in (("show", entry.key), ("report", "--key", entry.key[:9])):
        answer = kvgen(*command)
        assert (answer.code, answer.out, answer.err.count("\n")) == (3, "", 1)
        assert answer.err.startswith(f"kvgen: the user registry's entry {entry.key} is damaged: ")
        assert reason in answer.err


def test_entries_print_no_control_characters(kvgen: Any, tmp_path: Path):
    hostile = "\x1b[2Jgone\rnow\nnext\x07\u202e"
    entry = tuned(spec_of("k4v4", "sm90", [workload_of("1x4096")]))
    facts = {"device": {"name": hostile}, "provenance": {"why": hostile, "tool": hostile}, "toolchain": {"compiler": hostile}}
    entry = replace(entry, **facts, runner_up={"launches": {"1x4096": {"backend": hostile, "launch": {}, "us": 11.0}}})
    Store(tmp_path / "registry").put(entry)
    for command in (("show", entry.key), ("list",), ("why", "k4v4.yaml")):
        (tmp_path / "k4v4.yaml").write_text(dump_spec(entry.spec))
        answer = kvgen(*command)
        assert answer.code == 0
        assert all(line.isprintable() for line in answer.out.split("\n"))
        assert "\\x1b[2J" in answer.out
    assert "decision: \\x1b[2Jgone\\rnow\\nnext\\x07\\u202e\n" in kvgen("show", entry.key).out


@pytest.mark.parametrize(("device", "told"), [({"name": "Some GPU"}, "compiled on Some GPU, never tuned"), ({}, "compiled, never tuned")])
def test_an_entry_that_was_never_tuned_is_shown_as_compiled(kvgen: Any, tmp_path: Path, device: dict[str, str], told: str):
    entry = replace(tuned(spec_of("k4v4", "sm90", [workload_of("1x4096")])), device=device)
    Store(tmp_path / "registry").put(replace(entry, timings=(), runner_up=None))
    assert f"cuda for sm90, {told}; layout" in kvgen("show", entry.key).out


def test_a_workload_out_of_range_says_the_range(kvgen: Any):
    answer = kvgen("why", "tiny.yaml", "--workload", "1x99999999999")
    assert answer.code == 2
    assert "up to 16777216 tokens" in " ".join(answer.err.replace("│", " ").split())


def test_an_import_says_what_came_from_where_and_can_be_pinned(kvgen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvgen.lower.cpu.backend", FakeBackend)
    assert kvgen("build", "tiny.yaml", "--compile-only", "--limit", "1").code == 0
    sent = kvgen("export", "a.tar.gz", "--json").json()
    assert sent["sha256"] == hashlib.sha256((tmp_path / "a.tar.gz").read_bytes()).hexdigest()
    for name in ("CACHE", "REGISTRY"):
        monkeypatch.setenv(f"KVGEN_{name}_DIR", str(tmp_path / f"other {name}"))
    assert kvgen("import", "a.tar.gz", "--sha256", "abc").code == 2
    wrong = kvgen("import", "a.tar.gz", "--sha256", "0" * 64)
    assert (wrong.code, wrong.out) == (3, "")
    assert f"its sha256 is {sent['sha256']}, not {'0' * 64}" in wrong.err
    assert not (tmp_path / "other REGISTRY").exists()
    good = kvgen("import", "a.tar.gz", "--sha256", sent["sha256"].upper())
    assert good.code == 0
    assert f"(entries: 1, modules: 1, sha256: {sent['sha256']})" in good.out
    assert f"modules (native code) compiled on: {sent['origins'][0]}" in good.out


def test_a_truncated_archive_is_refused_in_a_sentence(kvgen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvgen.lower.cpu.backend", FakeBackend)
    kvgen("build", "tiny.yaml", "--compile-only", "--limit", "1")
    kvgen("export", "a.tar.gz")
    content = (tmp_path / "a.tar.gz").read_bytes()
    for size in (0, 5, 60, len(content) // 2, len(content) - 1):
        (tmp_path / "a.tar.gz").write_bytes(content[:size])
        answer = kvgen("import", "a.tar.gz")
        assert answer.code == 3
        assert answer.err.startswith("kvgen: a.tar.gz is refused, and nothing of it was taken: it is ")
        assert "Aborted" not in answer.err


def test_places_that_cannot_be_written_or_read_are_named(kvgen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    for variable in ("KVGEN_REGISTRY_DIR", "KVGEN_CACHE_DIR"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, str(tmp_path / "file" / "x"))
            for words in (("build", "tiny.yaml"), ("build", "tiny.yaml", "--compile-only")):
                answer = kvgen(*words)
                assert answer.code == 3
                assert f"{tmp_path}/file/x" in answer.err
                assert answer.err.rstrip().endswith("Not a directory")
                assert "measur" not in answer.err
    monkeypatch.setenv("KVGEN_REGISTRY_DIR", str(tmp_path / "file" / "x"))
    answer = kvgen("list")
    assert (answer.code, answer.err) == (3, f"kvgen: cannot list {tmp_path}/file/x: Not a directory\n")
