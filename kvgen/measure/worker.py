"""Workers: processes that run candidates, one at a time, and may be killed at any moment.

A worker serves candidates until one fails, so torch is imported and reference results are computed once. After a crash, a hang, wrong
numbers or an out-of-memory the next job gets a new process, so that damage which a bad candidate left in memory or in a CUDA context
cannot affect other candidates.
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
from kvgen.arch import Target
from kvgen.errors import MeasureError
from kvgen.measure.job import Job, Outcome
from kvgen.measure.memory import resident_bytes
from kvgen.measure.watch import Watch
from kvgen.toolchain.cache import ArtifactCache
from kvgen.toolchain.compile import build

TIMEOUT_S = 120.0
START_S = 180.0
REFERENCE_S = 900.0
VERIFY_FLOOR_S, VERIFY_FACTOR = 10.0, 20.0
POLL_S = 0.02
LOG_LINES = 3
PINNED = {"OMP_PROC_BIND": "true"}
"""Pins OpenMP threads: two threads on one core, while another process occupies the other, would wait for time slices."""


def compile_read_roofline(target: Target) -> None:
    """Compile a target's read kernel, unless it is in the cache. Raises ToolchainMissing or CompileError."""
    from kvgen.measure.read_roofline import source

    build(source(target), ArtifactCache())


def run_job(job: Job, timeout_s: float = TIMEOUT_S, memory_bytes: int | None = None) -> Outcome:
    """Run one job in a process of its own; see `Worker.run`."""
    with Worker(memory_bytes) as worker:
        return worker.run(job, timeout_s)


class Worker:
    """A process for candidates of one device, started when needed. Use as a context manager, from one thread at a time.

    `memory_bytes` bounds what a candidate may allocate on the host (half of what is free by default), in addition to kvgen's own
    memory there. `environment` adds variables to the process's own, for example CUDA_VISIBLE_DEVICES. The process ends when this one ends,
    in whatever way.
    """

    def __init__(self, memory_bytes: int | None = None, environment: dict[str, str] | None = None) -> None:
        self.memory_bytes = memory_bytes if memory_bytes is not None else available_bytes() // 2
        self._environment = {**os.environ, **(environment or {})}
        self._process: _Process | None = None
        self._verified_s: dict[str, float] = {}
        """Seconds of the longest stage of verification so far, by format: another one may take much longer."""

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, device: str) -> None:
        """Start the process for a device ("cpu" or "cuda") before the first job asks for it. Raises MeasureError."""
        self._alive(device)

    def run(self, job: Job, timeout_s: float = TIMEOUT_S) -> Outcome:
        """Load, verify and time a job. A crash, a hang or a wrong result of the candidate becomes the outcome.

        `timeout_s` bounds each stage (load, verify, every workload); verification is given less once a candidate has shown how
        long it takes. Raises MeasureError where no worker can be started.
        """
        self._compile_read_rooflines([job])
        return self._request({"job": job.to_json()}, [job], timeout_s)[0]

    def interleave(self, jobs: Sequence[Job], rounds: int, timeout_s: float = TIMEOUT_S, seconds: float | None = None) -> list[Outcome]:
        """Time verified candidates A B C A B C … in one process: samples at one index are from one round. `seconds` as for
        `finalists.interleave`.

        If a candidate kills the process, every outcome reports it; `finalists.interleave` then finds out which candidate it was.
        """
        if not jobs:
            return []
        self._compile_read_rooflines(jobs)
        request = {"jobs": [job.to_json() for job in jobs], "rounds": rounds, "seconds": seconds}
        return self._request(request, jobs, timeout_s)

    def close(self) -> None:
        """End the process and all processes that it started."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    @staticmethod
    def _compile_read_rooflines(jobs: Sequence[Job]) -> None:
        """Compile read kernels in this process: the time limit of a worker's stage does not include a compiler."""
        for target in {job.target for job in jobs if job.timing is not None and job.timing.read}:
            compile_read_roofline(target)

    def _request(self, request: dict[str, Any], jobs: Sequence[Job], timeout_s: float) -> list[Outcome]:
        process = self._alive(jobs[0].device)
        started = time.monotonic()
        try:
            outcomes = self._follow(process, request, jobs[0].spec.format_id, timeout_s)
        except BaseException:  # the answer, which still comes, would be read as that of the next request
            self.close()
            raise
        if isinstance(outcomes, Outcome):
            outcomes = [Outcome(outcomes.kind, outcomes.detail, seconds=time.monotonic() - started)] * len(jobs)
        if not all(outcome.kind in ("ok", "unsupported") for outcome in outcomes):
            self.close()
        return outcomes

    def _alive(self, device: str) -> _Process:
        if self._process is not None and not self._process.usable(device):
            self.close()
        if self._process is None:
            pinned = PINNED if device == "cpu" else {}
            try:
                self._process = _Process(device, self.memory_bytes, {**pinned, **self._environment})
            except OSError as error:  # of the process, its pipes, or the file of its output
                raise MeasureError(f"no worker process could be started: {error}") from error
            self._process.wait_ready()
        return self._process

    def _follow(self, process: _Process, request: dict[str, Any], family: str, timeout_s: float) -> list[Outcome] | Outcome:
        """The outcomes that the process reports, or the outcome that follows from its end or its silence. `family`: the jobs' format."""
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
                self._verified_s[family] = max(self._verified_s.get(family, 0.0), now - since)
            stage, since = str(message["stage"]), now
            limit = self._limit(stage, family, timeout_s)

    def _limit(self, stage: str, family: str, timeout_s: float) -> float:
        if stage == "reference":
            return max(REFERENCE_S, timeout_s)
        if stage == "verify" and (longest := self._verified_s.get(family)):
            return min(timeout_s, max(VERIFY_FLOOR_S, VERIFY_FACTOR * longest))
        return timeout_s


@cache
def _nursery() -> ThreadPoolExecutor:
    """The thread that starts workers. PR_SET_PDEATHSIG kills a child when the *thread* that started it ends, and measuring threads end
    earlier.
    """
    return ThreadPoolExecutor(1, thread_name_prefix="workers")


def _started(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    return _nursery().submit(lambda: subprocess.Popen(command, **options)).result()


class _Process:
    """One child process in a session of its own, with its pipes and its output."""

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
        finally:
            os.close(requests)
            os.close(answers)
        self._buffer, self._closed = b"", False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._from_child, selectors.EVENT_READ)

    def usable(self, device: str) -> bool:
        """Whether it is alive and serves this device."""
        return self.device == device and self._popen.poll() is None

    def wait_ready(self) -> None:
        """Wait until the process has started. Raises MeasureError if it does not."""
        if self.answer(time.monotonic() + START_S) is None:
            tail = self.log_tail()
            self.kill()
            raise MeasureError(f"a worker process did not start{': ' + tail if tail else ''}")
        self._watch.base = resident_bytes(self._popen.pid)

    def send(self, message: dict[str, Any]) -> None:
        """Write a request. If the process has ended, reading its answer will show it."""
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
        """The next line that the process writes; meanwhile its memory is watched.

        The process sends a message before it allocates, and the message must be read before the allocation is judged. So a reading of
        its memory counts only if no message came after it.
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
                self._closed = True
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def post_mortem(self, stage: str, limit: float) -> Outcome:
        """The outcome of a process that gave no answer; kills its process group."""
        over = self._watch.over
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(0 if over else 0.5)
        status = self._popen.returncode
        tail = self.log_tail()
        self.kill()
        if status is None and self._closed and not over:
            return Outcome("crash", f"it closed its pipe during {stage}{': ' + tail if tail else ''}")
        if status is None and not over:
            return Outcome("timeout", f"it did not finish {stage} within {limit:.3g} s")
        if self._watch.verdict:  # also if the candidate ignored a failed allocation
            return Outcome("oom", f"{self._watch.verdict} during {stage}")
        assert status is not None
        reason = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        return Outcome("crash", f"it died of {reason} during {stage}{': ' + tail if tail else ''}")

    def log_tail(self) -> str:
        """The last lines that the process printed, joined to one."""
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
