"""`kvgen presets`, `schema`, `accuracy`, `spec` and `recommend`: what they print, write and refuse."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
import yaml

from kvgen.accuracy import evaluate
from kvgen.spec import load_spec
from tests.support.commands import ROOT, TINY


def test_presets_and_schema_describe_the_language(kvgen: Any) -> None:
    assert kvgen("presets", "--json").json()["kivi-int2"]["key"]["bits"] == 2
    assert "bits: 2" in kvgen("presets", "kivi-int2").out
    assert kvgen("schema").json() == json.loads((ROOT / "docs" / "kvgen-spec.schema.json").read_text())


@pytest.mark.filterwarnings("error::pandas.errors.PerformanceWarning")  # the command would print it
def test_accuracy_prints_and_writes_the_figures_of_formats_by_name_and_file(
    kvgen: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The model's figures are tests/unit/accuracy's task; these are numbers."""
    asked: dict[str, Any] = {}

    def evaluated(
        subject: Any, formats: dict[str, Any], texts: list[Any], sizes: Any, told: Any, kept: Any, weights: Any
    ) -> list[dict[str, Any]]:
        asked.update(formats, **({"weights": weights} if weights else {}))
        size = {
            "weights": weights[0] if weights else "16-bit",
            "bits": 4.25,
            "unquantized_tokens": 0,
            "text": "all",
            "context": sizes.context,
            "depths": "",
        }
        records = [
            {"format": name, **size, "measure": measure, "value": 0.5, "low": 0.25, "high": 0.75}
            for name in formats for measure in (*evaluate.MEASURES, *evaluate.RETRIEVAL)
        ]  # fmt: skip
        kept(records)
        return records

    subject = SimpleNamespace(name="small", limit=1024, device=torch.device("cpu"))
    monkeypatch.setattr(evaluate, "load", lambda name, dtype: subject)
    monkeypatch.setattr(evaluate, "evaluate", evaluated)
    (tmp_path / "text.txt").write_text("words")
    words = ("accuracy", "tiny.yaml", "kitty", "--text", "text.txt")
    answer = kvgen(*words, "--csv", "new/a.csv")
    assert answer.code == 0
    assert "small at 1024 tokens" in answer.out
    assert "+50.00% (+25.00% to +75.00%)" in answer.out
    assert asked == {"kitty": {"preset": "kitty"}, "tiny": {part: yaml.safe_load(TINY)[part] for part in ("key", "value")}}
    assert set(pd.read_csv(tmp_path / "new" / "a.csv").format) == set(asked)
    asked.clear()
    assert {one["format"] for one in kvgen(*words, "--layers-in-8-bits", "2", "--json").json()} == {"kitty-ends-8", "tiny-ends-8"}
    assert asked["kitty-ends-8"]["ends"] == {"layers": 2, "key": {"bits": 8}, "value": {"bits": 8}}
    assert {one["weights"] for one in kvgen(*words, "--weights", "int4", "--json").json()} == {"int4"}
    assert asked["weights"] == ["int4"]


def test_recommend_lists_formats_and_prints_the_spec_of_the_best(kvgen: Any) -> None:
    answer = kvgen("recommend", "llama-3.1-8b", "--budget-bytes-per-token", "36KB")
    assert answer.code == 0
    assert "int8-per-channel" not in answer.out
    spec = load_spec(answer.out[answer.out.index("# 32 of 32 layers") :])
    assert (spec.key.bits, spec.attention.kv_heads) == (4, 8)


GPT_OSS = {
    "model_type": "gpt_oss", "head_dim": 64, "num_attention_heads": 64, "num_hidden_layers": 24, "num_key_value_heads": 8,
    "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12, "torch_dtype": "bfloat16",
}  # fmt: skip


def test_each_kind_of_layer_has_a_spec_that_loads(kvgen: Any, tmp_path: Path) -> None:
    folder = tmp_path / "gpt oss"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(GPT_OSS))
    want = {"full": (None, True), "sliding": (128, True)}
    for model, name in ((folder, "gpt-oss"), (folder / "config.json", "gpt-oss"), ("gpt-oss-20b", "gpt-oss-20b")):
        written = tmp_path / f"specs of {Path(model).name}"
        assert kvgen("spec", model, "-o", written).code == 0
        files = {file.stem: load_spec(file) for file in sorted(written.iterdir())}
        assert list(files) == [f"{name}-bitdecoding-int4-{kind}" for kind in want]
        for stem, spec in files.items():
            kind = stem.rsplit("-", 1)[1]
            assert (spec.attention.window, spec.attention.sinks) == want[kind]
            assert (spec.attention.q_heads, spec.attention.head_dim, spec.value.group) == (64, 64, 64)
            out = kvgen("spec", model, "--layers", f"{kind}_attention").out
            assert load_spec(out) == spec == load_spec(kvgen("spec", model, "--layers", f"{kind}_attention", "--json").json())
            assert "# value.group is 64: that of the preset bitdecoding-int4, 128, does not divide head_dim (64)" in out


def test_a_spec_that_may_have_been_edited_is_not_overwritten(kvgen: Any, tmp_path: Path) -> None:
    (tmp_path / "gpt-oss-20b-bitdecoding-int4-sliding.yaml").write_text("mine")
    answer = kvgen("spec", "gpt-oss-20b", "-o", tmp_path)
    assert (answer.code, "sliding.yaml exists" in answer.err.replace("\n", "")) == (2, True)
    assert [file.read_text() for file in tmp_path.glob("gpt-oss*")] == ["mine"]


def test_a_scale_of_the_model_is_told_beside_the_spec_and_mla_is_refused(kvgen: Any, tmp_path: Path) -> None:
    config = {"model_type": "granite", "num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 64, "torch_dtype": "float32"}
    file = tmp_path / "granite.json"
    file.write_text(json.dumps({**config, "attention_multiplier": 0.0625}))
    out = kvgen("spec", file).out
    assert "argument of calls: kernel.decode(..., scale=0.0625)" in out
    assert (load_spec(out).name, load_spec(out).attention.dtype) == ("granite-bitdecoding-int4", "float32")
    file.write_text(json.dumps({**config, "model_type": "deepseek_v3", "kv_lora_rank": 512}))
    answer = kvgen("spec", file)
    assert answer.code == 3
    assert "deepseek_v3: the model has latent attention (MLA), which kvgen has not" in answer.err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["recommend", "llama-3.1-8b"], 2, "give --budget-bytes-per-token or --max-kl"),
        (["spec", "nonsense"], 2, "'nonsense' is neither a config.json, nor its folder, nor layers"),
        (["spec", "llama-3.1-8b", "--format", "k3v3"], 2, "there is no format"),
        (["spec", "llama-3.1-8b", "--dtype", "int8"], 2, "--dtype is one of float16, bfloat16, float32"),
        (["spec", "gpt-oss-20b"], 2, "have 2 specs, sliding_attention (12) and full_attention (12): write a file for each"),
        (["spec", "gpt-oss-20b", "--format", "kitty"], 2, "attention.window (128) never looks back"),
        (["spec", "llama-3.1-8b", "--layers", "sliding_attention"], 2, "no layers of type sliding_attention, but full_attention"),
        (["recommend", "llama-3.1-8b", "--budget-bytes-per-token", "36X"], 2, "no size of at least one byte"),
        (["recommend", "llama-3.1-8b", "--budget-bytes-per-token", "5"], 3, "fits llama-3.1-8b: the smallest takes 18432 bytes per token"),
        (["recommend", "llama-3.1-8b", "--max-kl", "0", "--budget-bytes-per-token", "36KB"], 3, "and the least KL divergence is 2.84e-05"),
    ],
)
def test_what_cannot_be_is_refused_with_a_reason(kvgen: Any, words: list[str], code: int, said: str) -> None:
    answer = kvgen(*words)
    assert answer.code == code
    assert said in answer.said
