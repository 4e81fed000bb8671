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
    assert kvgen("recommend", "llama-3.1-8b", "--budget-bytes-per-token", "36KB") == (code, out, "")
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


GPT_OSS = {
    "model_type": "gpt_oss", "head_dim": 64, "num_attention_heads": 64, "num_hidden_layers": 24, "num_key_value_heads": 8,
    "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize("command", [("spec", "--format"), ("recommend", "--spec")])
def test_each_kind_of_layer_has_a_spec_that_loads(kvgen: Command, tmp_path: Path, command: tuple[str, str]) -> None:
    folder = tmp_path / "gpt oss"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(GPT_OSS))
    want = {"full": (None, True), "sliding": (128, True)}
    for model, name in ((str(folder), "gpt-oss"), (str(folder / "config.json"), "gpt-oss"), ("gpt-oss-20b", "gpt-oss-20b")):
        words = (command[0], model, command[1], "bitdecoding-int4")
        assert kvgen(*words, "-o", str(tmp_path / name))[0] == 0
        files = {file.stem: load_spec(file) for file in sorted((tmp_path / name).iterdir())}
        assert list(files) == [f"{name}-bitdecoding-int4-{kind}" for kind in want]
        for stem, spec in files.items():
            kind = stem.rsplit("-", 1)[1]
            assert (spec.attention.window, spec.attention.sinks) == want[kind]
            assert (spec.name, spec.attention.q_heads, spec.attention.head_dim, spec.value.group) == (stem, 64, 64, 64)
            code, out, _ = kvgen(*words, "--layers", f"{kind}_attention")
            assert (code, load_spec(out)) == (0, spec)
            assert "# value.group is 64: that of the preset bitdecoding-int4, 128, does not divide head_dim (64)" in out
            assert load_spec(json.loads(kvgen(*words, "--layers", f"{kind}_attention", "--json")[1])) == spec


def test_a_scale_of_the_model_is_told_beside_the_spec_and_mla_is_refused(kvgen: Command, tmp_path: Path) -> None:
    config = {"model_type": "granite", "num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 64, "torch_dtype": "float32"}
    file = tmp_path / "granite.json"
    file.write_text(json.dumps({**config, "attention_multiplier": 0.0625}))
    code, out, _ = kvgen("spec", str(file))
    assert code == 0
    assert "argument of calls: kernel.decode(..., scale=0.0625)" in out
    assert (load_spec(out).name, load_spec(out).attention.dtype) == ("granite-bitdecoding-int4", "float32")
    file.write_text(json.dumps({**config, "model_type": "deepseek_v3", "kv_lora_rank": 512}))
    code, _, err = kvgen("spec", str(file))
    assert code == 3
    assert "deepseek_v3: the model has latent attention (MLA), which kvgen has not" in err


def test_times_of_recommend_are_of_the_models_own_heads(kvgen: Command) -> None:
    """An H200's entries are of Llama-3.1-8B's heads in float16: no other model has their times."""

    def times(*words: str) -> dict[str, list[float | None]]:
        out = kvgen("recommend", *words, "--max-perplexity-increase", "100%", "--json")[1]
        return {item["name"]: item["step_us"] for item in json.loads(out)["formats"]}

    assert times("llama-3.1-8b", "--dtype", "float16")["bitdecoding-int4"][0] is not None
    assert set(map(str, times("qwen3-14b").values())) == {"[None]"}
    assert set(map(str, times("gpt-oss-20b").values())) == {"[None, None]"}


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["llama-3.1-8b"], 2, "give --budget-bytes-per-token, --max-perplexity-increase or --spec"),
        (["nonsense"], 2, "'nonsense' is neither a config.json, nor its folder, nor layers"),
        (["llama-3.1-8b", "--max-perplexity-increase", "much"], 2, "is a number like"),
        (["llama-3.1-8b", "--spec", "k3v3"], 2, "there is no format"),
        (["llama-3.1-8b", "--dtype", "int8", "--spec", "k4v2"], 2, "--dtype is one of float16, bfloat16, float32"),
        (["gpt", "--budget-bytes-per-token", "5"], 2, "'gpt' is neither a config.json"),
        (["gpt-oss-20b", "--spec", "k4v2"], 2, "have 2 specs, sliding_attention (12) and full_attention (12): write a file for each"),
        (["gpt-oss-20b", "--spec", "kitty"], 2, "attention.window (128) never looks back"),
        (["llama-3.1-8b", "--spec", "k4v2", "--layers", "sliding_attention"], 2, "no layers of type sliding_attention, but full_attention"),
        (["llama-3.1-8b", "--budget-bytes-per-token", "36X"], 2, "is no size of at least one byte; write 36000, 36KB or 36KiB"),
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
