"""The whole run over a tiny model, and its record in a registry's entries."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvgen.accuracy.model import Transformer
from kvgen.accuracy.record import record
from kvgen.accuracy.run import Table, table
from kvgen.accuracy.text import Corpus
from kvgen.accuracy.train import Point
from kvgen.registry import packaged_store
from kvgen.registry.manifest import manifest_problems, write_manifest
from kvgen.registry.store import Store
from kvgen.spec import MatrixSpec, load_spec
from tests.support.specs import base
from tests.unit.accuracy.conftest import TINY


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, text: Corpus, trained: tuple[Transformer, list[Point]]) -> Table:
    """Rows of two specs, one of which the other tests of this folder compile too."""
    monkeypatch.setattr("kvgen.accuracy.run.text_of", lambda recipe: text)
    monkeypatch.setattr("kvgen.accuracy.run.model_of", lambda *arguments, **options: trained)
    monkeypatch.setattr("kvgen.accuracy.run.KV_LEN", 128)
    fields = base(key={"bits": 8, "axis": "channel", "group": 32}, value={"bits": 8, "axis": "token", "group": 64})
    own = load_spec({**fields, "attention": {**fields["attention"], "window": 64, "softcap": 30.0}})
    kept: list[Table] = []
    found = table({"one": own}, "cpu", TINY, lengths=(320,), times={"one": 7.5}, told=lambda message: None, kept=kept.append)
    assert kept == [found]
    return found


def test_a_run_has_rows_and_facts_and_leaves_threads_alone(measured: Table) -> None:
    (row,) = measured.rows
    assert (row.name, row.length, row.step_us, row.bits) == ("one", 320, 7.5, 8 + (32 / 32 + 32 / 64) / 2)
    assert 0 < row.divergence < 1e-3
    assert row.kernel_error < 2e-3
    assert measured.wrong({"one": load_spec(base())}) == {}
    assert list(replace(measured, rows=(replace(row, kernel_error=0.1),)).wrong({"one": load_spec(base())})) == ["one"]
    assert measured.facts["model"] == "tiny"
    assert float(measured.facts["outliers"]) > float(measured.facts["outliers_trained"])
    assert torch.get_num_threads() == 1


def test_quality_is_recorded_as_a_new_revision_that_changes_nothing_else(measured: Table, tmp_path: Path) -> None:
    shipped = next(one.entry for one in packaged_store().all() if one.entry is not None and one.entry.spec.name == "llama31-70b-tp8-kv4")
    store = Store(tmp_path)
    before = store.put(replace(shipped, quality=None))
    write_manifest(tmp_path)
    renamed = replace(measured, rows=tuple(replace(row, name=shipped.key) for row in measured.rows))
    (path,) = record(store, renamed)
    assert not before.exists()
    (found,) = store.all()
    assert (found.path, found.problem) == (path, None)
    assert found.entry is not None
    quality = found.entry.quality
    assert quality is not None
    assert quality["model"]["lengths"]["320"]["divergence"] == measured.rows[0].divergence
    assert quality["outputs"]["normal"]["relative_l2"] > 0
    assert replace(found.entry, quality=None) == replace(shipped, quality=None)
    assert manifest_problems(tmp_path) == []


def test_every_shipped_entry_of_attention_carries_the_quality_of_its_format() -> None:
    for one in packaged_store().all():
        assert one.entry is not None
        quality = one.entry.quality
        if isinstance(one.entry.spec, MatrixSpec):  # codes and read-back elements are the same bits everywhere; no model is involved
            assert quality is None, one.label
            continue
        assert quality is not None, one.label
        assert quality["outputs"]["structured"]["relative_l2"] > 0
        assert quality["model"]["lengths"]
