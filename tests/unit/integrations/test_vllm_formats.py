"""What vLLM's plugin decides without vLLM: formats of layers, refusals, slots of requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvgen.errors import KvgenError, UnsupportedError
from kvgen.integrations.vllm import formats
from kvgen.integrations.vllm.slots import RequestSlots

INT4 = {"key": {"bits": 4, "axis": "channel", "group": 64}, "value": {"bits": 4, "axis": "token", "group": 64}}
LAYER = formats.Layer(4, 2, 64, "float16", None, 0.0, False, 1)


def config(given: Any, dtype: str = "auto", **changes: Any) -> Any:
    plain = {
        "additional_config": {"kvgen": given}, "speculative_config": None, "kv_transfer_config": None,
        "cache_config": SimpleNamespace(enable_prefix_caching=True, cache_dtype=dtype), "parallel_config": SimpleNamespace(),
    }  # fmt: skip
    return SimpleNamespace(**(plain | changes))


def test_a_layer_has_the_format_of_its_kind_with_the_models_heads() -> None:
    sliding = formats.Layer(4, 2, 64, "float16", 100, 0.0, True, 1)
    given = config(
        {"full_attention": {"preset": "saw-int4"}, "sliding_attention": INT4}, speculative_config=SimpleNamespace(num_speculative_tokens=3)
    )
    full, windowed = formats.add(given, LAYER).spec(256), formats.add(given, sliding).spec(128)
    assert full.attention.window is None
    assert windowed.attention.window == 100
    assert windowed.attention.sinks
    assert [spec.cache.page for spec in (full, windowed)] == [256, 128]
    assert windowed.cache.rollback == 3, "drafts are taken back"
    assert formats.of(SimpleNamespace(num_kv_heads=2, head_size=64, sliding_window=100)).spec(128) == windowed
    for named in (config("saw-int4"), config(None, "kvgen-saw-int4")):
        assert formats.chosen(named, "full_attention") == {"preset": "saw-int4"}
    with pytest.raises(UnsupportedError, match="--additional-config has a format already"):
        formats.chosen(config("saw-int4", "kvgen-kitty"), "full_attention")


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (None, "needs a format: --additional-config"),
        ({"sliding_attention": INT4}, "layers of full_attention, and there is none for them"),
        (INT4 | {"attention": {"window": 5}}, r"attention.window of the format: it is 5, and None"),
        (INT4 | {"cache": {"sink": 4}}, "cache.sink and cache.local beside prefix caching"),
        ({"key": {"bits": 3}, "value": {"bits": 4}}, "the format"),
    ],
)
def test_formats_that_cannot_be_served_are_refused_by_name(given: Any, match: str) -> None:
    with pytest.raises(UnsupportedError, match=match):
        formats.add(config(given), LAYER).spec(128)


def test_what_moves_pages_or_splits_sequences_is_refused() -> None:
    formats.check(config(INT4))
    formats.add(config("saw-int4", kv_transfer_config=object()), LAYER)
    with pytest.raises(UnsupportedError, match="KV connectors"):
        formats.add(config(INT4, kv_transfer_config=object()), LAYER)
    with pytest.raises(UnsupportedError, match="context parallelism"):
        formats.check(config(INT4, parallel_config=SimpleNamespace(decode_context_parallel_size=2)))


def test_a_request_keeps_its_slot_until_it_ends() -> None:
    slots, alive = RequestSlots(3), {"a", "b", "c", "d"}
    assert slots.of(["a", "b"], alive, [0, 128], 128) == [0, 1]
    assert slots.of(["b", "a", "c"], alive, [140, 5, 0], 128) == [1, 0, 2]
    assert slots.of(["a", "c"], alive, [6, 1], 128) == [0, 2]
    assert slots.of(["d", "a"], alive, [0, 7], 128) == [1, 0], "b has waited longest"
    with pytest.raises(KvgenError, match="request b goes on at 141 tokens"):
        slots.of(["b"], alive, [141], 128)
    assert slots.of(["b"], {"b"}, [128], 128)[0] in (0, 1, 2)
