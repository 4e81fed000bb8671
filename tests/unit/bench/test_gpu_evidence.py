from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu_evidence import ROOT, Task, collect, run, tasks


def test_every_task_runs_once_and_a_bad_one_stops_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVGEN_REGISTRY_DIR", raising=False)
    say = 'python -c \'import os; print(os.environ["CUDA_VISIBLE_DEVICES"], os.environ.get("KVGEN_REGISTRY_DIR"))\''
    chosen = [
        Task("endless", 1, ("python -c 'import time; time.sleep(60)'",)),
        Task("bad", 20, ("python -c 'raise SystemExit(3)'", "touch OUT/never")),
        *(Task(name, 20, (say, f"touch OUT/{name}.done")) for name in ("build-a", "b", "c")),
    ]
    assert not run(chosen, ["4", "7"], tmp_path)
    assert sorted(file.stem for file in tmp_path.glob("*.done")) == ["b", "build-a", "c"]
    assert not (tmp_path / "never").exists()
    told = {line.split("] ")[1] for line in capsys.readouterr().out.splitlines()}
    assert {line.split(":")[0] for line in told} == {"endless", "bad", "build-a", "b", "c"}
    assert any(line.startswith("endless: out of time") for line in told)
    assert any(line.startswith("bad: exit status 3") for line in told)
    device, registry = (tmp_path / "build-a.txt").read_text().strip().split(" ", 1)
    assert device in ("4", "7")
    assert registry == str(tmp_path / "registry")
    assert (tmp_path / "b.txt").read_text().split()[1] == "None"
    assert run(chosen[2:], ["0"], tmp_path)


def test_a_task_waits_for_the_one_it_comes_after(tmp_path: Path) -> None:
    first = Task("first", 20, ("python -c 'import time; time.sleep(0.5)'", "touch OUT/first.done"))
    then = Task("then", 20, ("test -e OUT/first.done",), after="first")
    assert run([then, first], ["0", "1"], tmp_path)


def test_what_is_run_exists() -> None:
    for task in tasks():
        for word in " ".join(task.commands).split():
            if word.endswith((".py", ".yaml")):
                assert (ROOT / word).exists(), task.name


def test_rows_and_reports_are_collected(tmp_path: Path) -> None:
    report = "cuda on X, layout block=128\n1x4096  5 µs\n"
    for name in ("a", "b"):
        (tmp_path / f"bench.{name}.csv").write_text(f"provider,spec,us\nkvgen,{name},1\nflashinfer,{name},2\n")
        (tmp_path / f"h200_plane.{name}.csv").write_text(f"spec,regret\n{name},1.01\n")
        (tmp_path / f"build-{name}.txt").write_text(f"{name}: measuring\n{name}: {report}registered {name}\n")
    collect(tmp_path)
    assert (tmp_path / "h200_attend.csv").read_text() == "provider,spec,us\nkvgen,a,1\nkvgen,b,1\n"
    assert (tmp_path / "h200_flashinfer.csv").read_text() == "provider,spec,us\nflashinfer,a,2\nflashinfer,b,2\n"
    assert (tmp_path / "h200_plane.csv").read_text() == "spec,regret\na,1.01\nb,1.01\n"
    assert (tmp_path / "h200_tune.txt").read_text() == f"a: {report}\nb: {report}"
