"""`get_kernel`: which kernel comes, from where, with which warning, and with which error when none can."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kvgen
from kvgen import api
from kvgen.api import verify
from kvgen.errors import CheckError, ToolchainMissing, UnsupportedError
from kvgen.lower import backend as backends
from kvgen.measure.worker import Worker
from kvgen.registry.store import Store
from kvgen.spec import dump_spec, load_spec
from kvgen.spec.dispatch import ALIKE
from kvgen.toolchain import compile as compile_module
from tests.support.naive import naive_schedule, naive_source
from tests.unit.api.conftest import naive_entry


@pytest.fixture
def naive_backend(monkeypatch):
    """The naive module as the only back end; its default is what is used when nothing is registered."""

    class Naive:
        name, targets = "cpu", ("cpu",)
        reason: str | None = None
        fault: str | None = None

        def missing(self):
            return None

        def unsupported(self, spec, target):
            return self.reason

        def default(self, spec, target, work=None):
            return naive_schedule()

        def defaults(self, spec, target):
            return (naive_schedule(),)

        def tiling(self, spec, schedule, target):
            return ALIKE

        def lower(self, spec, schedule, target):
            return naive_source(self.fault)

    backend = Naive()
    monkeypatch.setattr(backends, "NAMES", ("cpu",))
    monkeypatch.setattr(backends, "get_backend", lambda name: backend)
    return backend


def test_the_registered_kernel_comes_without_warning(registered, spec):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel = kvgen.get_kernel(spec)
    assert kernel.entry == registered
    assert kernel.selection.how == "exact"


def test_the_same_spec_gives_the_same_kernel(registered, spec, tmp_path):
    kernel = kvgen.get_kernel(spec)
    assert kvgen.get_kernel(load_spec(spec.to_json())) is kernel
    assert kvgen.get_kernel(spec.to_json()) is kernel
    (tmp_path / "spec.yaml").write_text(dump_spec(spec))
    assert kvgen.get_kernel(tmp_path / "spec.yaml") is kernel


def test_the_default_comes_with_one_warning(places, spec, naive_backend):
    with pytest.warns(kvgen.FallbackWarning, match="nothing is tuned for this format on cpu; using cpu's default schedule") as caught:
        kernel = kvgen.get_kernel(spec)
    assert Path(caught[0].filename) == Path(__file__)
    assert (kernel.entry, kernel.selection.how) == (None, "default")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvgen.get_kernel(spec)


def test_nothing_supports_the_spec(places, spec, naive_backend):
    naive_backend.reason = "it is too naive"
    with pytest.raises(
        UnsupportedError, match=r"^no kernel for naive on cpu: cpu: it is too naive; user .*nothing for this format"
    ) as missed:
        kvgen.get_kernel(spec)
    assert "default" not in str(missed.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_target_without_gpu_says_what_is_missing(places, spec):
    with pytest.raises(ToolchainMissing, match=r"no kernel for sm90 runs here: no NVIDIA GPU is visible"):
        kvgen.get_kernel(replace(spec, arch="sm90"))


# --- compiling -------------------------------------------------------------------------------------------------------


def _no_compiler(*_):
    raise ToolchainMissing("g++ was not found")


def test_a_module_that_is_here_needs_no_compiler(registered, spec, monkeypatch):
    monkeypatch.setattr(compile_module, "compiler_for", _no_compiler)
    assert kvgen.get_kernel(spec).entry == registered


def test_without_a_compiler_the_error_says_so(registered, spec, tmp_path, monkeypatch):
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setattr(compile_module, "compiler_for", _no_compiler)
    with pytest.raises(ToolchainMissing, match=r"not compiled on this machine yet, and cannot be: g\+\+ was not found"):
        kvgen.get_kernel(spec)


def test_a_module_for_other_instructions_is_not_loaded(places, spec, tmp_path, monkeypatch):
    """It would die of an illegal instruction."""
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(tmp_path / "own"))
    entry = naive_entry(spec)
    shutil.rmtree(tmp_path / "own" / "sources")  # as if it had come from another machine
    Store(places).put(replace(entry, launches=tuple(replace(launch, machine="another") for launch in entry.launches)))
    monkeypatch.setattr(compile_module, "compiler_for", _no_compiler)
    with pytest.raises(ToolchainMissing):
        kvgen.get_kernel(spec)


# --- verifying -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["wrong", "crash", "hang"])
def test_a_default_that_fails_verification_is_not_served(places, spec, naive_backend, tmp_path, monkeypatch, fault):
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setattr(verify, "TIMEOUT_S", 3.0 if fault == "hang" else 60.0)
    naive_backend.fault = fault
    kind = "timeout" if fault == "hang" else fault
    with pytest.raises(CheckError, match=rf"^launch 0 \(cpu\) of naive \(.*failed verification and is not served: {kind}: "):
        kvgen.get_kernel(spec)
    assert not list((tmp_path / "own" / "modules").rglob("*.so"))


def test_a_module_is_verified_once_by_its_bytes(places, spec, naive_backend, tmp_path, monkeypatch):
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(tmp_path / "own"))
    jobs = []
    real = Worker.run
    monkeypatch.setattr(Worker, "run", lambda worker, job, *rest: jobs.append(job) or real(worker, job, *rest))

    def fetched():
        api.forget()
        with pytest.warns(kvgen.FallbackWarning):
            kvgen.get_kernel(spec)
        return len(jobs)

    assert [fetched(), fetched()] == [1, 1]
    (record,) = (tmp_path / "own" / "modules").rglob("verified-*")
    record.write_text("0" * 64)  # of other bytes
    assert [fetched(), fetched()] == [2, 2]


# --- what is imported ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import kvgen; dir(kvgen)", "torch pydantic yaml tvm_ffi"),
        ("import kvgen; kvgen.load_spec({spec!r})", "torch tvm_ffi jinja2 numpy rich"),
        ("import kvgen; kvgen.get_kernel({spec!r})", "optuna tilelang rich typer pytest hypothesis"),
    ],
    ids=["kvgen", "load_spec", "get_kernel"],
)
def test_imports_are_those_of_what_is_asked(registered, spec, code, absent):
    words = [sys.executable, "-c", f"{code.format(spec=spec.to_json())}\nimport sys; print(*sys.modules)"]
    run = subprocess.run(words, capture_output=True, text=True, check=True, env=dict(os.environ))
    assert not {name.split(".")[0] for name in run.stdout.split()} & set(absent.split())


def test_threads_that_ask_at_once_get_one_kernel(registered, spec, monkeypatch):
    """Fetched once, and none of them warns twice."""
    fetched = []
    real = api._fetch
    together = threading.Barrier(16)

    def slow(asked):
        fetched.append(asked)
        time.sleep(0.05)
        return real(asked)

    monkeypatch.setattr(api, "_fetch", slow)
    api.forget()
    kernels = []

    def ask():
        together.wait()
        kernels.append(kvgen.get_kernel(spec))

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fetched) == 1
    assert len(kernels) == 16
    assert len(set(map(id, kernels))) == 1
