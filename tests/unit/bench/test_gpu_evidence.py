"""benchmarks/gpu_evidence.py: what is run in which order, what becomes of tasks that fail or take too long, and what is kept."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from benchmarks import output
from benchmarks.gpu_evidence import DEFAULT, FLUSHED, GRACE_S, ROOT, Task, collect, interrupt, pack, run, tasks
from benchmarks.gpu_words import spec_of, workload_of
from benchmarks.shape_cases import SHAPES
from kvgen.spec import Workload, load_spec

MOST_S = 600 - 2 * GRACE_S
"""What a command on a lent GPU may take is ten minutes."""


def test_every_task_runs_once_and_a_bad_one_stops_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVGEN_REGISTRY_DIR", raising=False)
    say = 'python -c \'import os; print(os.environ["CUDA_VISIBLE_DEVICES"], os.environ.get("KVGEN_REGISTRY_DIR"))\''
    chosen = [
        Task("endless", 1, ("python -c 'import time; time.sleep(60)'",)),
        Task("bad", 20, ("python -c 'raise SystemExit(3)'", "touch OUT/never")),
        *(Task(name, 20, (say, f"touch OUT/{name}.done")) for name in ("build-a", "tests-b", "c")),
    ]
    assert not run(chosen, ["4", "7"], tmp_path)
    assert sorted(file.stem for file in tmp_path.glob("*.done")) == ["build-a", "c", "tests-b"]
    assert not (tmp_path / "never").exists()
    told = {line.split("] ")[1] for line in capsys.readouterr().out.splitlines()}
    assert {line.split(":")[0] for line in told} == {"endless", "bad", "build-a", "tests-b", "c"}
    assert any(line.startswith("endless: out of time") for line in told)
    assert any(line.startswith("bad: exit status 3") for line in told)
    device, registry = (tmp_path / "build-a.txt").read_text().strip().split(" ", 1)
    assert device in ("4", "7")
    assert registry == str(tmp_path / "registry")
    assert (tmp_path / "tests-b.txt").read_text().split()[1] == "None"
    assert run(chosen[2:], ["0"], tmp_path)


def test_a_task_waits_for_the_one_it_comes_after(tmp_path: Path) -> None:
    first = Task("first", 20, ("python -c 'import time; time.sleep(0.5)'", "touch OUT/first.done"))
    then = Task("then", 20, ("test -e OUT/first.done",), after=("first",))
    assert run([then, first], ["0", "1"], tmp_path)


def test_nothing_comes_after_a_task_that_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad, then = Task("bad", 20, ("false",)), Task("then", 20, ("touch OUT/never",), after=("bad",))
    assert not run([then, bad], ["0"], tmp_path)
    assert not (tmp_path / "never").exists()
    assert "then: not begun, because bad failed" in capsys.readouterr().out


def test_a_command_that_takes_too_long_may_keep_what_it_has(tmp_path: Path) -> None:
    """It is interrupted as by Ctrl-C, and what it started is ended with it."""
    code = (
        "import pathlib, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        "try:\n    pathlib.Path('begun').touch()\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    pathlib.Path('kept').write_text(str(child.pid))\n"
    )
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # these tests may run where it is ignored
    try:
        started = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, start_new_session=True)
    finally:
        signal.signal(signal.SIGINT, before)
    while not (tmp_path / "begun").exists():
        assert started.poll() is None
        time.sleep(0.01)
    interrupt(started)
    child, deadline = (tmp_path / "kept").read_text(), time.monotonic() + 30
    while runs(child) and time.monotonic() < deadline:  # a signal takes a moment
        time.sleep(0.01)
    assert not runs(child)


def runs(process: str) -> bool:
    """Whether a process is there; a zombie has no command line."""
    try:
        return bool((Path("/proc") / process / "cmdline").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_same_command_again_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [
        Task("short", 5, ("python -c 'print(1)'",)),
        Task("long", 5000, ("touch OUT/long.done",)),
        Task("then", 5, ("false",), after=("long",)),
        Task("last", 5, ("true",)),
    ]
    assert run(chosen, ["0"], tmp_path, seconds=100.0)
    assert "not begun, for want of time: long (5000 s), then (5 s)" in capsys.readouterr().out
    known = json.loads((tmp_path / "outcomes.json").read_text())
    assert {name: outcome["outcome"] for name, outcome in known.items()} == {"short": "good", "last": "good"}
    assert known["short"]["seconds"] >= 0
    (tmp_path / "short.txt").unlink()
    assert not run(chosen, ["0"], tmp_path)
    assert (tmp_path / "long.done").exists()
    assert not (tmp_path / "short.txt").exists()
    run(chosen[:1], ["0"], tmp_path, again=True)
    assert (tmp_path / "short.txt").exists()


def test_what_is_run_exists_and_fits_into_a_command_of_ten_minutes() -> None:
    found = {task.name: task for task in tasks()}
    assert len(found) == len(tasks())
    for task in found.values():
        assert task.seconds <= MOST_S or task.name.startswith("cases-10m-"), task.name
        assert set(task.after) <= set(found), task.name
        for word in " ".join(task.commands).split():
            if word.endswith((".py", ".yaml")):
                assert (ROOT / word).exists(), task.name


def test_a_spec_without_workloads_is_built_and_compared_apart_from_all_other_entries() -> None:
    """Its workload is one of another spec's, whose entry would otherwise be measured in its place, or begin its search."""
    assert load_spec(ROOT / "examples" / f"{DEFAULT}.yaml").workloads == (Workload(batch=1, kv_len=4096),)
    build, plane = (task for task in tasks() if task.name.endswith(DEFAULT))
    assert build.name in plane.after
    assert build.after == ()
    (first,), (second,) = build.commands, plane.commands
    assert "--fresh" in first
    assert "--no-plane" not in first
    assert "--trials" not in first
    assert first.split()[:2] == second.split()[:2] == ["env", "KVGEN_REGISTRY_DIR=OUT/registry-default"]


def test_cases_are_built_under_names_of_their_own_with_the_budget_that_a_task_says() -> None:
    found = {task.name: task for task in tasks() if task.name.startswith("cases-")}
    long = [task for name, task in found.items() if name.startswith("cases-10m-")]
    assert len(long) == 3
    assert all("--budget 10m" in task.commands[0] and task.seconds > 600 for task in long)
    built, names = [], []
    for task in found.values():
        words = shlex.split(task.commands[0])
        built += words[2 : words.index("--budget")]
        names.append(words[words.index("--name") + 1])
    assert set(built) <= {shape.name for shape in SHAPES}
    assert len(set(built)) == len(built)
    assert len(set(names)) == len(names)


def test_the_flush_of_kitty_is_measured_beside_int4_and_int2() -> None:
    (flush,) = (task.commands[0].split() for task in tasks() if task.name == "flush")
    assert flush[1:5] == ["benchmarks/gpu_decode.py", ",".join(FLUSHED), "8x32768,32x8192", "default"]
    assert "--decode" in flush
    assert flush[flush.index("--name") + 1] != "gpu_decode"
    specs = [spec_of(words, "sm90", [workload_of("8x32768"), workload_of("32x8192")]) for words in FLUSHED]
    assert [(spec.key.bits, spec.key.boost.fraction) for spec in specs] == [(2, 1 / 8), (2, 1 / 4), (4, 0), (2, 0)]


def test_every_gpu_test_is_in_a_task() -> None:
    run_by = [word for task in tasks() for word in " ".join(task.commands).split() if word.startswith("tests/gpu/")]
    assert sorted(run_by) == sorted(str(file.relative_to(ROOT)) for file in (ROOT / "tests" / "gpu").glob("test_*.py"))


def test_everything_is_packed_into_one_file(tmp_path: Path) -> None:
    (tmp_path / "registry" / "deep").mkdir(parents=True)
    (tmp_path / "registry" / "deep" / "entry.json").write_text("{}")
    for _ in range(2):  # the second time, the first archive is there
        pack(tmp_path, tmp_path / "all.tar.gz")
    with tarfile.open(tmp_path / "all.tar.gz") as archive:
        assert archive.getnames() == ["registry/deep/entry.json"]


def test_rows_and_reports_are_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "gpu_identity", lambda: {"name": "NVIDIA H100 80GB HBM3"})
    report = "cuda on X, layout block=128\n1x4096  5 µs\n"
    for name in ("a", "b"):
        (tmp_path / f"bench.{name}.csv").write_text(f"provider,spec,us\nkvgen,{name},1\nflashinfer,{name},2\n")
        (tmp_path / f"h100_plane.{name}.csv").write_text(f"spec,regret\n{name},1.01\n")
        (tmp_path / f"h100_builds.60s-{name}.csv").write_text(f"case,workload,budget,us\n{name},1x512,60s,2\n")
        (tmp_path / f"build-{name}.txt").write_text(f"{name}: measuring\n{name}: {report}registered {name}\n")
    known = tmp_path / "known"
    known.mkdir()
    (known / "h100_builds.csv").write_text("case,workload,budget,us\nc,1x512,60s,9\nb,1x512,60s,9\nb,1x512,10m,9\n")
    monkeypatch.setattr("benchmarks.figures.RESULTS", known)
    collect(tmp_path)
    assert (tmp_path / "h100_attend.csv").read_text() == "provider,spec,us\nkvgen,a,1\nkvgen,b,1\n"
    assert (tmp_path / "h100_flashinfer.csv").read_text() == "provider,spec,us\nflashinfer,a,2\nflashinfer,b,2\n"
    assert (tmp_path / "h100_plane.csv").read_text() == "spec,regret\na,1.01\nb,1.01\n"
    builds = (tmp_path / "h100_builds.csv").read_text().splitlines()
    assert builds == ["case,workload,budget,us", "c,1x512,60s,9", "b,1x512,60s,2", "b,1x512,10m,9", "a,1x512,60s,2"], "other builds stay"
    assert (tmp_path / "h100_tune.txt").read_text() == f"a: {report}\nb: {report}"
