from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvgen.bench.case import Case
from kvgen.bench.provider import Entrant
from kvgen.bench.results import read_results
from kvgen.bench.run import Row, compare, csv_rows, write_csv
from kvgen.bench.torch_sdpa import FORMS, TorchSdpa, cpu_providers
from kvgen.csvfile import CsvFile
from kvgen.errors import ToolchainMissing, UnsupportedError
from kvgen.measure.inputs import NoRoom
from kvgen.measure.job import TimingPolicy
from kvgen.spec import KernelSpec, Workload
from kvgen.spec.model import Lengths
from tests.support.tuning import tiny_spec

POLICY = TimingPolicy(seconds=0.001, warmup_seconds=0.0, samples=5, cold_bytes=0)


def grouped(q_len: int = 1, **attention: object) -> KernelSpec:
    heads = {"q_heads": 6, "kv_heads": 2, "head_dim": 32, "dtype": "float32", "q_len": q_len, **attention}
    return tiny_spec(attention=heads, workloads=[{"batch": 2, "kv_len": 100, "q_len": q_len}])


def case(spec: KernelSpec) -> Case:
    return Case(spec, spec.workloads[0], "cpu", 100)


class Fixed:
    """Takes as long as it says."""

    name, backend = "fixed", "time"

    def __init__(self, us: float = 10.0, refuses: bool = False) -> None:
        self.us, self.refuses, self.rounds = us, refuses, 0

    def prepare(self, case: Case) -> Entrant:
        if self.refuses:
            raise UnsupportedError("fixed", "it is Sunday")
        return Entrant(self._sample, 1_000_000, lambda: 1e-4)

    def _sample(self, policy: TimingPolicy) -> tuple[float, ...]:
        self.rounds += 1
        return (self.us, self.us + self.rounds, self.us - 1)


def test_a_slow_provider_has_three_rounds_and_its_row_says_so(monkeypatch: pytest.MonkeyPatch):
    from kvgen.bench import run
    from kvgen.measure import read_roofline

    monkeypatch.setattr(read_roofline, "read_us", lambda target, nbytes, policy: 5.0)
    monkeypatch.setattr(run, "SLOW_SECONDS", 0.0)
    spec = grouped()
    (row,) = compare(spec, "cpu", spec.workloads, [Fixed()], lambda work: 64, policy=POLICY, rounds=9)
    assert row.rounds == 3
    (told,) = csv_rows([replace(row, workload=Workload(batch=2, kv_len=100, lengths=Lengths(min=10)))], {})
    assert (told["lengths"], told["rounds"]) == ("10-100", 3)
    assert csv_rows([row], {})[0]["lengths"] == "equal"


def test_rows_are_medians_over_turns_beside_a_pure_read(monkeypatch: pytest.MonkeyPatch):
    from kvgen.measure import read_roofline

    monkeypatch.setattr(read_roofline, "read_us", lambda target, nbytes, policy: 5.0)
    one, other, told = Fixed(), Fixed(40.0, refuses=True), []
    spec = grouped()
    (row,) = compare(spec, "cpu", spec.workloads, [one, other], lambda work: 64, policy=POLICY, rounds=4, told=told.append)
    assert one.rounds == 4
    assert row.to_json() == {
        "provider": "fixed", "backend": "time", "spec": "tiny", "workload": {"batch": 2, "kv_len": 100, "q_len": 1}, "us": 10.0,
        "bytes": 1_000_000, "tb_s": 0.1, "read_us": 5.0, "read_fraction": 0.5, "relative_l2": 1e-4,
        "watts": None, "clock_mhz": None, "rounds": 4,
    }  # fmt: skip
    assert told == ["2x100: fixed: it is Sunday"]


def test_other_providers_are_told_that_they_take_sequences_of_one_length(monkeypatch: pytest.MonkeyPatch):
    from kvgen.measure import read_roofline

    monkeypatch.setattr(read_roofline, "read_us", lambda target, nbytes, policy: 5.0)
    ours, told, policies = Fixed(), [], []
    ours.name = "kvgen"
    monkeypatch.setattr(Fixed, "_sample", lambda self, policy: (policies.append(policy), (1.0,))[1])
    works = [{"batch": 2, "kv_len": 100, "lengths": {"min": 20}, "load": "sustained"}]
    spec = tiny_spec(workloads=works)
    (row,) = compare(spec, "cpu", spec.workloads, [ours, Fixed(), Fixed()], lambda work: 64, policy=POLICY, rounds=1, told=told.append)
    assert row.provider == "kvgen"
    assert row.to_json()["workload"]["lengths"]["min"] == 20
    assert policies[0].sustained_seconds > 0
    assert told == ["2x20-100:sustained: fixed: its sequences have one length"]


def test_a_workload_that_does_not_fit_ends_no_other(monkeypatch: pytest.MonkeyPatch):
    from kvgen.measure import read_roofline

    class Large(Fixed):
        def prepare(self, case: Case) -> Entrant:
            if case.workload.batch > 2:
                raise NoRoom("the caches take 21 GB, and 3 GB are free")
            return super().prepare(case)

    monkeypatch.setattr(read_roofline, "read_us", lambda target, nbytes, policy: 5.0)
    spec, told = grouped(), []
    works = [Workload(batch=4000, kv_len=100), *spec.workloads]
    rows = compare(spec, "cpu", works, [Large()], lambda work: 64, policy=POLICY, rounds=1, told=told.append)
    assert [row.workload for row in rows] == [*spec.workloads]
    assert told == ["the caches take 21 GB, and 3 GB are free"]


def test_what_is_missing_on_this_machine_is_told_once(monkeypatch: pytest.MonkeyPatch):
    from kvgen.measure import read_roofline

    class Absent(Fixed):
        def prepare(self, case: Case) -> Entrant:
            raise ToolchainMissing("it is not installed")

    monkeypatch.setattr(read_roofline, "read_us", lambda target, nbytes, policy: 5.0)
    spec = tiny_spec(workloads=[{"batch": 1, "kv_len": 100}, {"batch": 2, "kv_len": 100}])
    others, told = [Absent(), Absent(), Fixed(refuses=True)], []
    rows = compare(spec, "cpu", spec.workloads, [Fixed(), *others], lambda work: 64, policy=POLICY, rounds=1, told=told.append)
    assert [row.workload.batch for row in rows] == [1, 2]
    assert [text.partition(":")[0] for text in told] == ["it is not installed", "1x100", "2x100"]


def test_an_interrupt_leaves_the_rows_of_the_workloads_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from kvgen.measure import read_roofline

    class Interrupted(Fixed):
        def prepare(self, case: Case) -> Entrant:
            if case.workload.batch == 3:
                raise KeyboardInterrupt
            return super().prepare(case)

    monkeypatch.setattr(read_roofline, "read_us", lambda target, nbytes, policy: 5.0)
    spec = tiny_spec(workloads=[{"batch": batch, "kv_len": 100} for batch in (1, 2, 3)])
    file = CsvFile(tmp_path / "rows.csv")
    facts = {"load": "", "device": "a box", "date": "2026-01-01"}
    with pytest.raises(KeyboardInterrupt):
        compare(
            spec, "cpu", spec.workloads, [Interrupted()], lambda work: 64, policy=POLICY, rounds=1,
            kept=lambda rows: file.add(csv_rows(rows, facts)),
        )  # fmt: skip
    assert [result.batch for result in read_results(file.file)] == [1, 2]


def test_a_row_names_the_back_end_that_the_case_took(monkeypatch: pytest.MonkeyPatch):
    from kvgen.measure import read_roofline

    class Several(Fixed):
        def prepare(self, case: Case) -> Entrant:
            return replace(super().prepare(case), backend="cuda" if case.workload.batch == 1 else "tilelang")

    monkeypatch.setattr(read_roofline, "read_us", lambda target, nbytes, policy: 5.0)
    spec = tiny_spec(workloads=[{"batch": 1, "kv_len": 100}, {"batch": 2, "kv_len": 100}])
    rows = compare(spec, "cpu", spec.workloads, [Several(), Fixed()], lambda work: 64, policy=POLICY, rounds=1)
    assert [row.backend for row in rows] == ["cuda", "time", "tilelang", "time"]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_torch_is_the_same_attention(form: str):
    entrant = TorchSdpa("fp32", form).prepare(case(grouped()))  # type: ignore[arg-type]
    assert entrant.error() < 1e-5
    share = 6 if form == "expanded" else 2
    assert entrant.nbytes == 2 * 2 * 100 * share * 32 * 4
    assert all(sample > 0 for sample in entrant.sample(POLICY))


@pytest.mark.parametrize("form", ["gqa", "expanded"])
def test_several_query_tokens_are_causal(form: str):
    assert TorchSdpa("fp32", form).prepare(case(grouped(q_len=3))).error() < 1e-5  # type: ignore[arg-type]


def test_what_torch_cannot_say_is_refused():
    for spec in (grouped(softcap=30.0), grouped(window=50), grouped(sinks=True)):
        with pytest.raises(UnsupportedError):
            TorchSdpa("fp32", "gqa").prepare(case(spec))
    with pytest.raises(UnsupportedError, match="several query tokens"):
        TorchSdpa("fp32", "folded").prepare(case(grouped(q_len=3)))
    assert TorchSdpa("fp32", "gqa").prepare(case(grouped(window=100))).error() < 1e-5


def test_the_cpu_has_every_type_in_every_form():
    assert len({provider.backend for provider in cpu_providers()}) == 9


def test_sequences_of_a_case_are_the_same_for_every_user():
    one = case(grouped())
    assert torch.equal(one.keys(torch.float32), case(grouped()).keys(torch.float32))
    assert not torch.equal(one.keys(torch.float32), one.values(torch.float32))


def test_csv_has_a_line_per_row_with_the_machine(tmp_path: Path):
    row = Row("kvgen", "cpu", "tiny", Workload(batch=2, kv_len=100), 10.0, 100, 5.0, 1e-4)
    write_csv(tmp_path / "results" / "rows.csv", [row, row], {"device": "a box", "date": "2026-01-01"})
    with (tmp_path / "results" / "rows.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 2
    assert (lines[0]["provider"], lines[0]["kv_len"], lines[0]["us"], lines[0]["device"]) == ("kvgen", "100", "10.0", "a box")
