"""Pages that a KV connector of vLLM's writes to files and reads back."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvgen.errors import UnsupportedError
from tests.vllm.engines import INT4, SAW, Engines, Watched, generate, ids, same


def test_pages_out_of_files(engine: Engines, model: Path, tmp_path: Path, watched: Watched) -> None:
    """They are the bytes that were written; a format with residuals refuses connectors."""
    connector = {
        "kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }  # fmt: skip
    llm = engine(model, SAW, kv_transfer_config=connector)
    first, hits = generate(llm, [ids(7, 300)], 4)
    assert hits == [0]
    assert llm.reset_prefix_cache()
    watched.limit = float("inf")  # the reference was given K and V of other pages
    again, hits = generate(llm, [ids(7, 300)], 4)
    assert hits == [256]
    same(again, first, limit=1e-4)
    del llm
    with pytest.raises(UnsupportedError, match="KV connectors"):
        engine(model, INT4, kv_transfer_config=connector)
