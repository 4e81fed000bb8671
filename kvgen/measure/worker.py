"""Workers: processes that run candidates, one at a time, and may be killed at any moment.

A worker lives as long as its candidates behave, so that torch is imported and reference results are computed once. After a
crash, a hang, wrong numbers or an out-of-memory the next job gets a fresh process: what a bad candidate left behind, in
memory or in a CUDA context, touches nobody.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from kvgen._machine import available_bytes
from kvgen.errors import MeasureError
from kvgen.measure.job import Job, Outcome
from kvgen.measure.memory import resident_bytes
from kvgen.measure.watch import Watch
from kvgen.spec.target import Target
from kvgen.toolchain.cache import ArtifactCache
from kvgen.toolchain.compile import build

TIMEOUT_S = 120.0
START_S = 180.0
REFERENCE_S = 900.0
VERIFY_FLOOR_S, VERIFY_FACTOR = 10.0, 20.0
POLL_S = 0.02
LOG_LINES = 3
PINNED = {"OMP_PROC_BIND": "true"}
"""CPU threads stay on cores of their own: two that share one, while another process holds the other, wait for time slices."""


def compile_read_roofline(target: Target) -> None:
    """Compile a target's read kernel, unless that was done before. Raises ToolchainMissing or CompileError."""
    from kvgen.measure.read_roofline import source

    build(source(target), ArtifactCache())


def run_job(job: Job, timeout_s: float = TIMEOUT_S, memory_bytes: int | None = None) -> Outcome:
    """Run one job in a process of its own; see `Worker.run`."""
    with Worker(memory_bytes) as worker:
        return worker.run(job, timeout_s)


class Worker:
    """A process for candidates of one device, started when needed. Use as a context manager, from one thread at a time.

    `memory_bytes` bounds what a candidate may allocate on the host (half of what is free by default), beside what kvgen itself
    allocates there; `environment` adds to the process's own, CUDA_VISIBLE_DEVICES say. The process ends with this one, however
    that ends.
    """

    def __init__(self, memory_bytes: int | None = None, environment: dict[str, str] | None = None) -> None:
        self.memory_bytes = memory_bytes if memory_bytes is not None else available_bytes() // 2
        self._environment = {**os.environ, **(environment or {})}
        self._process: _Process | None = None
        self._verified_s = 0.0

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, device: str) -> None:
        """Start the process for a device ("cpu" or "cuda") before the first job asks for it. Raises MeasureError."""
        self._alive(device)

    def run(self, job: Job, timeout_s: float = TIMEOUT_S) -> Outcome:
        """Load, verify and time a job; whatever the candidate does becomes the outcome.

        `timeout_s` bounds each stage (load, verify, every workload); verification is given less once a candidate has shown how
        long it takes. Raises MeasureError where no worker can be started.
        """
        self._compile_read_rooflines([job])
        return self._request({"job": job.to_json()}, 1, timeout_s, job.device)[0]

    def interleave(self, jobs: Sequence[Job], rounds: int, timeout_s: float = TIMEOUT_S, seconds: float | None = None) -> list[Outcome]:
        """Time verified candidates in turns, all in one process: samples at one index are from one round. `seconds` as for
        `finalists.interleave`.

        Where a candidate kills the process, every outcome says so; `finalists.interleave` then tells them apart.
        """
        if not jobs:
            return []
        self._compile_read_rooflines(jobs)
        request = {"jobs": [job.to_json() for job in jobs], "rounds": rounds, "seconds": seconds}
        return self._request(request, len(jobs), timeout_s, jobs[0].device)

    def close(self) -> None:
        """End the process and all it started."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    @staticmethod
    def _compile_read_rooflines(jobs: Sequence[Job]) -> None:
        """Compile read kernels here: a stage of a worker has no time to spare for compilers."""
        for target in {job.target for job in jobs if job.timing is not None and job.timing.read}:
            compile_read_roofline(target)

    def _request(self, request: dict[str, Any], count: int, timeout_s: float, device: str) -> list[Outcome]:
        process = self._alive(device)
        started = time.monotonic()
        outcomes = self._follow(process, request, timeout_s)
        if isinstance(outcomes, Outcome):
            outcomes = [Outcome(outcomes.kind, outcomes.detail, seconds=time.monotonic() - started)] * count
        if not all(outcome.kind in ("ok", "unsupported") for outcome in outcomes):
            self.close()
        return outcomes

    def _alive(self, device: str) -> _Process:
        if self._process is not None and not self._process.usable(device):
            self.close()
        if self._process is None:
            pinned = PINNED if device == "cpu" else {}
            self._process = _Process(device, self.memory_bytes, {**pinned, **self._environment})
            self._process.wait_ready()
        return self._process

    def _follow(self, process: _Process, request: dict[str, Any], timeout_s: float) -> list[Outcome] | Outcome:
        """The outcomes that the process reports, or the one that its end or its silence means."""
        process.send(request)
        stage, since, limit = "load", time.monotonic(), timeout_s
        while True:
            message = process.answer(since + limit)
            if message is None:
                return process.post_mortem(stage, limit)
            now = time.monotonic()
            if "outcomes" in message:
                return [Outcome.from_json(outcome) for outcome in message["outcomes"]]
            if stage == "verify":
                self._verified_s = max(self._verified_s, now - since)
            stage, since = str(message["stage"]), now
            limit = self._limit(stage, timeout_s)

    def _limit(self, stage: str, timeout_s: float) -> float:
        if stage == "reference":
            return max(REFERENCE_S, timeout_s)
        if stage == "verify" and self._verified_s:
            return min(timeout_s, max(VERIFY_FLOOR_S, VERIFY_FACTOR * self._verified_s))
        return timeout_s


@cache
def _nursery() -> ThreadPoolExecutor:
    """The thread that starts workers. Linux kills a child that asks for it when the *thread* that started it ends, and those that
    measure come and go.
    """
    return ThreadPoolExecutor(1, thread_name_prefix="workers")


def _started(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    return _nursery().submit(lambda: subprocess.Popen(command, **options)).result()


class _Process:
    """One child process in a session of its own, with its pipes and what it printed."""

    def __init__(self, device: str, memory_bytes: int, environment: dict[str, str]) -> None:
        self.device = device
        self._watch = Watch(memory_bytes, available_bytes())
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        requests, self._to_child = os.pipe()
        self._from_child, answers = os.pipe()
        # CUDA maps far more than it uses, so there only resident memory is watched.
        numbers = (requests, answers, memory_bytes, int(device == "cpu"), os.getpid())
        command = [sys.executable, "-m", "kvgen.measure.child", *map(str, numbers)]
        package_root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [package_root, environment.get("PYTHONPATH")]))
        try:
            self._popen = _started(
                command, pass_fds=(requests, answers), start_new_session=True, env={**environment, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
            )  # fmt: skip
        except OSError as error:
            raise MeasureError(f"no worker process could be started: {error}") from error
        finally:
            os.close(requests)
            os.close(answers)
        self._buffer = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._from_child, selectors.EVENT_READ)

    def usable(self, device: str) -> bool:
        """Alive, and of this device."""
        return self.device == device and self._popen.poll() is None

    def wait_ready(self) -> None:
        """Raises MeasureError where the process does not come up."""
        if self.answer(time.monotonic() + START_S) is None:
            tail = self.log_tail()
            self.kill()
            raise MeasureError(f"a worker process did not start{': ' + tail if tail else ''}")
        self._watch.base = resident_bytes(self._popen.pid)

    def send(self, message: dict[str, Any]) -> None:
        """Write a request; a process that is gone shows when its answer is read."""
        self._watch.renew()
        data = (json.dumps(message) + "\n").encode()
        with suppress(BrokenPipeError):
            while data:
                data = data[os.write(self._to_child, data) :]

    def answer(self, deadline: float) -> dict[str, Any] | None:
        """The next message; None when the process ended, took too much memory, or the deadline passed."""
        while True:
            line = self._line(deadline)
            if line is None:
                return None
            message: dict[str, Any] = json.loads(line)
            if "stretch" not in message:
                return message
            self._watch.tell(message["stretch"])

    def _line(self, deadline: float) -> bytes | None:
        """The next line that the process writes, under the eye of the watch.

        What the process says before it allocates must be read before that allocation is judged, so a reading of its memory
        counts only where no message came after it.
        """
        while b"\n" not in self._buffer:
            if time.monotonic() > deadline or self._watch.over:
                return None
            resident = resident_bytes(self._popen.pid)
            if not self._selector.select(0 if self._watch.exceeds(resident) else POLL_S):
                self._watch.count(resident)
                continue
            data = os.read(self._from_child, 1 << 16)
            if not data:
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def post_mortem(self, stage: str, limit: float) -> Outcome:
        """Why there is no answer. Kills what is left."""
        over = self._watch.over
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(0 if over else 0.5)
        status = self._popen.returncode
        tail = self.log_tail()
        self.kill()
        if status is None and not over:
            return Outcome("timeout", f"it did not finish {stage} within {limit:.3g} s")
        if self._watch.verdict:  # also where a failed allocation was not looked at
            return Outcome("oom", f"{self._watch.verdict} during {stage}")
        assert status is not None
        reason = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        return Outcome("crash", f"it died of {reason} during {stage}{': ' + tail if tail else ''}")

    def log_tail(self) -> str:
        """The last lines that the process printed, as one."""
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 4096))
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines()]
        told = [line for line in lines if line and not line.startswith("File ")]  # stack frames say little in one line
        return " | ".join(told[-LOG_LINES:])

    def kill(self) -> None:
        """End the whole process group and free the pipes; safe to call twice."""
        with suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()
        self._selector.close()
        for handle in (self._to_child, self._from_child):
            with suppress(OSError):
                os.close(handle)
        self._to_child = self._from_child = -1
        self._log.close()
