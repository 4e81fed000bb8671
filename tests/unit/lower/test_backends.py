"""The table of back ends."""

from __future__ import annotations

import pytest

from kvgen.errors import KvgenError, ToolchainMissing
from kvgen.lower import backends
from kvgen.spec import presets


def test_the_cpu_back_end_is_always_there_and_serves_the_cpu() -> None:
    assert backends.get_backend("cpu").name == "cpu"
    assert [b.name for b in backends.backends_for("cpu")] == ["cpu"]
    assert "cpu" not in {b.name for b in backends.backends_for("sm90")}
    assert "cpu" not in backends.missing_backends()


def test_a_back_end_can_be_asked_for_twice() -> None:
    assert type(backends.get_backend("cpu")) is type(backends.get_backend("cpu"))


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(KvgenError, match="there is no back end 'metal': choose from cuda, tilelang, cpu"):
        backends.get_backend("metal")


def test_a_missing_library_is_reported_and_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def importer(name: str) -> object:
        if name.endswith("tilelang"):
            raise ImportError("No module named 'tilelang'")
        return imported(name)

    imported = backends.importlib.import_module
    monkeypatch.setattr(backends.importlib, "import_module", importer)
    with pytest.raises(ToolchainMissing, match="the tilelang back end cannot be loaded: No module named 'tilelang'"):
        backends.get_backend("tilelang")
    assert backends.missing_backends()["tilelang"].endswith("No module named 'tilelang'")
    assert [b.name for b in backends.backends_for("cpu")] == ["cpu"]


@pytest.mark.parametrize("name", ["bitdecoding-int4", "bitdecoding-int2", "turbomind-int8"])
def test_gpu_back_ends_share_layout_parts(name: str) -> None:
    """What entries with launches of both rest on."""
    spec = presets()[name]
    cuda, tilelang = backends.get_backend("cuda"), backends.get_backend("tilelang")
    shared = set(cuda.space(spec, "sm90").layouts()) & set(tilelang.space(spec, "sm90").layouts())
    assert tilelang.default(spec, "sm90").layout in shared
