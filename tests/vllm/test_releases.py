"""What differs among releases of vLLM: names of types of KV cache, and the metadata of the second model runner, which runs on a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode

from tests.vllm.engines import Engines, Watched, generate, ids


def named(preset: str) -> dict[str, Any]:
    """The format as a release takes it."""
    from vllm.config import cache

    if hasattr(cache, "register_kv_cache_dtype"):
        return {"kv_cache_dtype": f"kvgen-{preset}"}
    return {"additional_config": {"kvgen": {"preset": preset}}}


def test_a_preset_by_name_and_the_second_runners_step(engine: Engines, model: Path, watched: Watched) -> None:
    """The second runner's own code makes metadata and calls the builder: a decode step, a later chunk, and a row that pads a graph."""
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    llm = engine(model, None, attention_backend="CUSTOM", **named("bitdecoding-int4"))
    found, _ = generate(llm, [ids(0, 200)], 4)
    assert len(found[0][0]) == 4
    assert watched.rows == {"exact": 2, "cached": 6}

    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    count, new, lengths = 3, [1, 20, 0], [131, 276, 0]
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    numbers = lambda values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    batch = SimpleNamespace(
        num_reqs=2, num_reqs_after_padding=count, num_tokens=21, num_tokens_after_padding=24, query_start_loc_np=starts,
        query_start_loc=numbers(starts), num_scheduled_tokens=np.array(new[:2]), max_query_len=None, seq_lens=numbers(lengths),
        seq_lens_cpu_upper_bound=numbers(lengths), dcp_local_seq_lens=None, dcp_local_seq_lens_cpu_upper_bound=None, pcp=None,
        positions=None, is_prefilling_np=np.array([False, True, False]), prompt_lens=None, idx_mapping_np=np.array([4, 1]),
        fast_prefill=None,
    )  # fmt: skip
    tables, slots = torch.arange(3 * 4, dtype=torch.int32).view(3, 4), torch.arange(24).view(1, 24)
    metadata = DefaultModelState.prepare_attn(
        SimpleNamespace(max_model_len=512, supports_mm_inputs=False),  # type: ignore[arg-type]
        batch, CUDAGraphMode.FULL, (tables,), slots, runner.attn_groups, runner.kv_cache_config,
    )  # fmt: skip
    assert len(metadata) == 2
    m = next(iter(metadata.values()))
    counts, before = m.packed
    spare = runner.attn_groups[0][0].get_metadata_builder()._places
    assert counts.tolist() == new
    assert before.lengths.tolist() == [130, 256, 0]
    assert m.after.lengths.tolist() == lengths
    assert m.after.slots.tolist() == [4, 1, spare]
    assert torch.equal(m.after.block_table, tables)
    assert (list(m.starts), m.bounds) == (starts.tolist(), lengths)
