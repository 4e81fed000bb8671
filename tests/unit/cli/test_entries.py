"""`kvgen why --workload`: which launch a call takes, and what the grid says of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvgen.cli import main
from kvgen.lower.backends import get_backend
from kvgen.registry import Store
from kvgen.spec import Workload, dump_spec, load_spec
from kvgen.spec.timing import Timing
from kvgen.toolchain import ArtifactCache
from kvgen.tune.result import TuningResult
from kvgen.tune.tuner import tune
from tests.support.tuning import FakeBackend, FakeRunner, tiny_spec


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TuningResult:
    for name in ("CACHE", "REGISTRY", "SITE"):
        monkeypatch.setenv(f"KVGEN_{name}_DIR", str(tmp_path / name.lower()))
    monkeypatch.chdir(tmp_path)
    spec = tiny_spec()
    (tmp_path / "tiny.yaml").write_text(dump_spec(spec))
    place = {"store": Store(tmp_path / "registry"), "cache": ArtifactCache(tmp_path / "cache")}
    return tune(spec, "cpu", backends=[FakeBackend()], runner=FakeRunner(), **place)  # type: ignore[arg-type]


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit):
        main(list(words))
    return capsys.readouterr().out


def test_it_names_the_launch_its_times_and_why_it_serves(built: TuningResult, capsys: pytest.CaptureFixture[str]):
    capsys.readouterr()
    text = printed(capsys, "why", "tiny.yaml")
    timing = built.entry.timing(built.entry.spec.workloads[1])
    assert timing is not None
    assert "2x512 takes launch 1" in text
    assert f"tuned for 2x512, {timing.us:.3g} µs, {timing.read_us / timing.us:.0%} of the read's speed, the default" in text


def test_list_and_show_say_when_times_are_of_other_sources(built: TuningResult, capsys: pytest.CaptureFixture[str]):
    """A build times what it registers; an entry whose source was rendered anew has the times of the old one."""
    store, (file, code) = Store(built.path.parents[2]), next(iter(built.entry.codes.items()))
    text = code.text + "int anew;\n"
    other = replace(code, text=text)
    launches = {one: replace(one, file=other.file) for one in built.entry.every_launch if one.file == file}
    renewed = replace(
        built.entry,
        codes={one.file: one for one in (other, *built.entry.codes.values()) if one is not code},
        launches=tuple(launches.get(one, one) for one in built.entry.launches),
        further=tuple(launches.get(one, one) for one in built.entry.further),
    )
    for entry, others in ((built.entry, False), (renewed, True), (replace(built.entry, provenance={}), True)):
        store.put(entry)
        capsys.readouterr()
        (listed,) = [one for one in json.loads(printed(capsys, "list", "--json")) if one["key"] == entry.key]
        assert listed["timed_with_others"] is json.loads(printed(capsys, "show", entry.key, "--json"))["timed_with_others"] is others
        assert ("times of other sources" in printed(capsys, "show", entry.key)) is others
        line = printed(capsys, "list").partition(entry.key)[2]
        assert (f"(of other{' '}sources)" in " ".join(line.split()[:40])) is others


def test_launches_count_in_the_order_of_what_show_prints(built: TuningResult, capsys: pytest.CaptureFixture[str]):
    capsys.readouterr()
    shown = json.loads(printed(capsys, "show", built.entry.key, "--json"))["schedule"]
    launches = [*shown["launches"], *shown["further"]]
    words = [f"--workload={name}" for name in ("1x128", "2x512", "64x512", "1x100000", "8x64-512")]
    served = [answer["serving"][0] for answer in json.loads(printed(capsys, "why", "tiny.yaml", *words, "--json"))]
    assert len({one["launch"] for one in served}) > 1
    assert all(one["params"] == launches[one["launch"]]["launch"] for one in served)


def test_beside_the_workloads_it_tells_the_modelled_time(built: TuningResult, capsys: pytest.CaptureFixture[str]):
    capsys.readouterr()
    (served,) = json.loads(printed(capsys, "why", "tiny.yaml", "--workload", "4x450", "--json"))[0]["serving"]
    assert served["us"] is None
    assert served["modelled_us"] == pytest.approx(min(built.entry.look_up().times(4, 450, 1800)))
    assert "of the least modelled time" in served["why"]
    assert "µs modelled" in printed(capsys, "why", "tiny.yaml", "--workload", "4x450")


def test_of_two_loads_the_specs_own_decides(built: TuningResult, capsys: pytest.CaptureFixture[str]):
    rested, sustained = Workload(batch=2, kv_len=512), Workload(batch=2, kv_len=512, load="sustained")
    first, second = built.entry.launches
    launches = tuple(replace(launch, workload=work) for launch, work in ((first, rested), (second, sustained)))
    timings = (Timing(rested, 10.0, (), 5.0, 20.0), Timing(sustained, 12.0, (), 6.0, 24.0, 640.2, 1540.0))
    assert first.params != second.params
    Store(built.path.parents[2]).put(replace(built.entry, launches=launches, timings=timings))
    capsys.readouterr()
    words = [f"--workload={name}" for name in ("2x512", "2x512:sustained")]
    served = [answer["serving"][0] for answer in json.loads(printed(capsys, "why", "tiny.yaml", *words, "--json"))]
    assert [one["launch"] for one in served] == [0, 0], "calls take the launch for the spec's own load"


# --- without an entry ------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """`kvgen why` for a spec over empty registries: exit code, stdout, and stderr without frames."""
    for name in ("CACHE", "REGISTRY", "SITE"):
        monkeypatch.setenv(f"KVGEN_{name}_DIR", str(tmp_path / name.lower()))

    def ask(changes: dict[str, object], *words: str) -> tuple[int, str, str]:
        (tmp_path / "asked.yaml").write_text(dump_spec(load_spec({**tiny_spec().to_json(), "name": "asked", **changes})))
        with pytest.raises(SystemExit) as ended:
            main(["why", str(tmp_path / "asked.yaml"), *words])
        told = capsys.readouterr()
        return int(ended.value.code or 0), told.out, " ".join(told.err.replace("│", " ").split())

    return ask


HEADS = {"q_heads": 32, "kv_heads": 8, "head_dim": 128}
WHOLE = {"arch": "cpu", "attention": HEADS, "key": {"bits": 4, "group": 4096}, "value": {"bits": 4}}
WIDE = {"arch": "sm90", "attention": {**HEADS, "head_dim": 320}, "key": {"bits": 4}, "value": {"bits": 4, "group": 64}}


def test_a_spec_that_no_back_end_supports_has_no_default(asked):
    code, out, _ = asked(WHOLE)
    assert code == 3
    assert out.splitlines()[0] == "asked on cpu: none: cpu: whole groups need blocks of 4096 tokens, more than 2048"
    assert "default" not in out
    code, out, _ = asked(WHOLE, "--json")
    (answer,) = json.loads(out)
    assert (code, answer["how"], answer["key"], answer["backend"], answer["serving"]) == (3, "none", None, None, [])
    assert answer["why"][0] == "cpu: whole groups need blocks of 4096 tokens, more than 2048"


def test_every_back_end_for_the_target_says_why_it_refuses(asked):
    code, out, _ = asked(WIDE)
    assert code == 3
    assert out.startswith("asked on sm90: none: cuda: attention.head_dim (320) is more than 256")
    assert "tilelang" in out
    assert "does not target" not in out


@pytest.mark.parametrize("arch", ["cpu", "sm90"])
def test_without_an_entry_the_launches_of_the_default_are_told(asked, arch):
    works = [{"batch": 1, "kv_len": 8192}, {"batch": 32, "kv_len": 8192}]
    spec = {"arch": arch, "attention": HEADS, "key": {"bits": 4}, "value": {"bits": 4}, "cache": {"local": 64}, "workloads": works}
    code, out, _ = asked(spec)
    assert code == 3
    backend = get_backend("cpu" if arch == "cpu" else "cuda")
    wanted = load_spec({"name": "asked", **spec})
    for work in wanted.workloads:
        launch = backend.default(wanted, arch, work).launch
        assert f"{work.key} takes {backend.name} {launch}: " in out
    code, out, _ = asked(spec, "--workload", "1x8192", "--json")
    (answer,) = json.loads(out)
    assert (code, answer["how"], answer["key"], answer["backend"], answer["launches"]) == (3, "default", None, backend.name, [])
    (served,) = answer["serving"]
    assert (served["workload"], served["backend"], served["us"]) == ("1x8192", backend.name, None)
    assert served["params"] == dict(backend.default(wanted, arch, wanted.workloads[0]).launch)


def test_a_workload_of_extend_attention_is_refused(asked):
    code, out, err = asked({"arch": "cpu"}, "--workload", "1x512q4")
    assert (code, out) == (2, "")
    assert "q_len (4) is more than attention.q_len (1): calls with more query tokens are extend attention" in err
