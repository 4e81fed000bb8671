"""`kvgen accuracy` and `kvgen recommend`: what they print, write and refuse."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvgen.accuracy import recommend, run
from kvgen.accuracy.row import read_csv
from kvgen.accuracy.run import Table
from kvgen.accuracy.train import Point
from kvgen.cli.app import main
from kvgen.registry import packaged_store
from kvgen.registry.store import Store
from kvgen.spec import load_spec
from tests.support.commands import TINY

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def kvgen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    for name in ("CACHE", "REGISTRY", "SITE"):
        monkeypatch.setenv(f"KVGEN_{name}_DIR", str(tmp_path / name.lower()))
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)

    def command(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(words)
        told = capsys.readouterr()
        return int(ended.value.code or 0), told.out, told.err

    return command


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The committed rows of the formats that are asked for, instead of a run; what was asked."""
    asked: dict[str, Any] = {"error": 1e-4}
    committed, facts = read_csv(recommend.results())

    def table(specs: Any, target: str, recipe: Any, **options: Any) -> Table:
        asked.update(specs=specs, target=target, recipe=recipe, **options)
        rows = [replace(row, kernel_error=asked["error"]) for row in committed if row.name in specs]
        rows = rows or [replace(committed[0], name=name, kernel_error=asked["error"]) for name in specs]
        found = Table((), (Point(1, 2, 3.0, 4.0),), facts)
        for count in range(1, len(rows) + 1):
            if asked.get("interrupted_after") == count - 1:
                raise KeyboardInterrupt
            found = replace(found, rows=tuple(rows[:count]))
            options["kept"](found)
        return found

    monkeypatch.setattr(run, "table", table)
    return asked


def test_accuracy_prints_rows_orders_and_facts(kvgen: Command, measured: dict[str, Any]) -> None:
    code, out, _ = kvgen("accuracy", "kitty", "kitty-pro", "--arch", "cpu", "--seed", "3", "--length", "512", "--json")
    data = json.loads(out)
    assert code == 0
    assert {row["name"] for row in data["rows"]} == {"kitty", "kitty-pro"}
    assert data["orders"][0]["claim"].startswith("Kitty-Pro before Kitty")
    assert (measured["recipe"].name, measured["recipe"].seed, measured["lengths"], measured["target"]) == ("small", 3, [512], "cpu")


def test_all_formats_are_measured_by_default_and_told_in_tables(kvgen: Command, measured: dict[str, Any]) -> None:
    code, out, _ = kvgen("accuracy", "--arch", "cpu")
    assert code == 0
    assert len(measured["specs"]) >= 12
    assert all(name in out for name in measured["specs"])
    assert "not told apart" in out or "comes out" in out


def test_an_interrupt_keeps_the_rows_of_the_formats_before(kvgen: Command, measured: dict[str, Any], tmp_path: Path) -> None:
    measured["interrupted_after"] = 3
    code, _, _ = kvgen("accuracy", "--arch", "cpu", "--csv", "a.csv")
    assert (code, len(read_csv(tmp_path / "a.csv")[0])) == (130, 3)


def test_accuracy_writes_what_it_is_told_to(kvgen: Command, measured: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code, _, _ = kvgen("accuracy", "k4v2", "--arch", "cpu", "--csv", "a.csv", "--curve", "c.csv", "--html", "a.html", "--png", "a.png")
    assert code == 0
    assert {row.name for row in read_csv(tmp_path / "a.csv")[0]} == {"k4v2"}
    assert next(csv.DictReader((tmp_path / "c.csv").open()))["loss"] == "3.00000"
    assert "k4v2" in (tmp_path / "a.html").read_text()
    assert (tmp_path / "a-dark.png").exists()


def test_a_file_that_cannot_be_written_is_named_before_anything_is_measured(kvgen: Command, measured: dict[str, Any]) -> None:
    code, _, err = kvgen("accuracy", "k4v2", "--arch", "cpu", "--csv", "new/a.csv", "--curve", "tiny.yaml/c.csv")
    assert (code, measured) == (3, {"error": 1e-4})
    assert err.startswith("kvgen: cannot write tiny.yaml")
    assert kvgen("accuracy", "k4v2", "--arch", "cpu", "--csv", "new/a.csv")[0] == 0


def test_a_kernel_that_is_wrong_in_one_head_is_a_regression(kvgen: Command, measured: dict[str, Any]) -> None:
    measured["error"] = 0.03
    code, _, err = kvgen("accuracy", "tiny.yaml", "--arch", "cpu", "--json")
    assert code == 1
    assert f"{load_spec(TINY).name}: its kernel is 3.0e-02 from the reference" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "huge"], "--model is small or large"),
        (["kitty", "--registered"], "--registered takes the formats"),
        (["--registered"], "has no entries"),
        (["no-such-format"], "is neither a file nor a format; formats: "),
        (["--length", "256"], "257"),
        (["kitty", "kitty"], "two specs are called"),
        (["--arch", "sm10"], "--arch is one of"),
    ],
)
def test_wrong_arguments_are_refused(kvgen: Command, measured: dict[str, Any], words: list[str], said: str) -> None:
    code, _, err = kvgen("accuracy", *words, *([] if "--arch" in words else ["--arch", "cpu"]))
    assert code == 2
    assert said in " ".join(err.replace("│", "").split())


def test_recommend_lists_formats_and_prints_the_spec_of_the_best(kvgen: Command) -> None:
    code, out, _ = kvgen("recommend", "llama-3.1-8b", "--budget-bytes-per-token", "36000")
    assert code == 0
    assert "bitdecoding-int4" in out
    assert "int8-per-channel" not in out
    spec = load_spec(out[out.index("# bitdecoding-int4") :])
    assert (spec.key.bits, spec.attention.kv_heads) == (4, 8)


def test_recommend_by_quality_takes_the_smallest(kvgen: Command) -> None:
    code, out, _ = kvgen("recommend", "32x32/8x128", "--max-perplexity-increase", "0.5%", "--json")
    data = json.loads(out)
    assert code == 0
    sizes = {item["name"]: item["bytes_per_token"] for item in data["formats"]}
    assert sizes[data["best"]] == min(sizes.values())
    assert all(item["increase"] <= 0.005 for item in data["formats"])
    assert kvgen("recommend", "32x32/8x128", "--max-perplexity-increase", "0.005", "--json")[1] == out


def test_recommend_prints_one_spec_alone(kvgen: Command) -> None:
    code, out, _ = kvgen("recommend", "qwen3-8b", "--spec", "k4v2", "--dtype", "bfloat16")
    assert code == 0
    assert load_spec(out).attention.dtype == "bfloat16"
    assert load_spec(json.loads(kvgen("recommend", "qwen3-8b", "--spec", "k4v2", "--dtype", "bfloat16", "--json")[1])) == load_spec(out)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["llama-3.1-8b"], 2, "give --budget-bytes-per-token, --max-perplexity-increase or --spec"),
        (["nonsense"], 2, "'nonsense' is no model shape"),
        (["llama-3.1-8b", "--max-perplexity-increase", "much"], 2, "is a number like"),
        (["llama-3.1-8b", "--spec", "k3v3"], 2, "there is no format"),
        (["llama-3.1-8b", "--dtype", "int8", "--spec", "k4v2"], 2, "--dtype is float16 or bfloat16"),
        (["gpt", "--budget-bytes-per-token", "5"], 2, "is no model shape"),
        (["llama-3.1-8b", "--budget-bytes-per-token", "5"], 3, "fits llama-3.1-8b: the smallest takes 18432 bytes per token"),
        (["llama-3.1-8b", "--max-perplexity-increase", "0"], 3, "fits llama-3.1-8b: perplexity rises by"),
        (["llama-3.1-8b", "--spec", "k4v2", "--budget-bytes-per-token", "5"], 2, "--spec names the format"),
        (["llama-3.1-8b", "--budget-bytes-per-token", "5", "--table", "none.csv"], 3, "none.csv"),
    ],
)
def test_recommend_refuses_with_a_reason(kvgen: Command, words: list[str], code: int, said: str) -> None:
    ended, _, err = kvgen("recommend", *words)
    assert ended == code
    assert said in " ".join(err.replace("│", "").split())


def test_the_page_names_every_model_of_recommend() -> None:
    page = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
    assert [name for name in recommend.MODELS if f"`{name}`" not in page] == []


def test_show_tells_the_quality_of_an_entry(kvgen: Command, tmp_path: Path) -> None:
    entry = next(one.entry for one in packaged_store().all() if one.entry is not None and one.entry.spec.name == "kitty")
    code, out, _ = kvgen("show", entry.key)
    assert code == 0
    assert "structured data L2 0.85" in out
    assert f"perplexity at 2048 {entry.quality['model']['lengths']['2048']['increase']:+.3%}" in out
    Store(tmp_path / "registry").put(replace(entry, quality=None))
    code, out, _ = kvgen("show", entry.key)
    assert code == 0
    assert "data L2" not in out
