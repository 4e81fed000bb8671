"""Workers: processes that run candidates, one at a time, and may be killed at any moment.

A worker serves candidates until one fails, so torch is imported and reference results are computed once. After a crash, a hang, wrong
numbers or an out-of-memory the next job gets a new process, so that damage which a bad candidate left in memory or in a CUDA context
cannot affect other candidates.

The process is `python -m kvgen.measure.worker CONNECTION PARENT`: the file descriptor of a connection and the id of the parent process.
Messages are JSON. A request is {"jobs", "rounds", "seconds"}, of one job where rounds are null; its answers are any number of {"stage"},
then one {"found"} with a measurement of each job. The very first answer is {"ready"}, once torch is loaded.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvgen._machine import available_bytes
from kvgen.errors import MeasureError
from kvgen.measure.measurement import Job, Measurement
from kvgen.toolchain.compile import build

TIMEOUT_S = 120.0
START_S = 180.0
OWN_S = 900.0
ROUNDS = 15
POLL_S = 0.02
LOG_LINES = 3
PINNED = {"OMP_PROC_BIND": "true"}
"""Pins OpenMP threads: two threads on one core, while another process occupies the other, would wait for time slices."""
FATAL = ("crash", "timeout", "oom")
NEARLY = 0.8
"""Part of its limit of memory from which on a process that was killed is taken to have run out of it."""
OWN = ("reference", "read")
"""Stages in which kvgen's own code runs: their memory is not the candidate's, and they may take OWN_S."""
PR_SET_PDEATHSIG = 1


class Worker:
    """A process for candidates of one device, started when needed. Use as a context manager, from one thread at a time.

    `memory_bytes` bounds the host memory that the process takes while a candidate of the CPU runs (half of what is free by default), in
    addition to kvgen's own caches, inputs and references; with these, and on a GPU, it may take what was free at its start. `environment`
    adds variables to the process's own, for example CUDA_VISIBLE_DEVICES. The process ends when this one ends, in whatever way.
    """

    def __init__(self, memory_bytes: int | None = None, environment: dict[str, str] | None = None) -> None:
        self.memory_bytes = memory_bytes if memory_bytes is not None else available_bytes() // 2
        self._environment = {**os.environ, **(environment or {})}
        self._process: _Process | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, device: str) -> None:
        """Start the process for a device ("cpu" or "cuda") before the first job asks for it. Raises MeasureError."""
        if self._process is not None and not self._process.usable(device):
            self.close()
        if self._process is None:
            pinned = PINNED if device == "cpu" else {}
            try:
                self._process = _Process(device, self.memory_bytes, {**pinned, **self._environment})
            except OSError as error:  # of the process, its pipe, or the file of its output
                raise MeasureError(f"no worker process could be started: {error}") from error
            self._process.wait_ready()

    def run(self, job: Job, timeout_s: float = TIMEOUT_S, seconds: float = math.inf) -> Measurement:
        """Load, verify and time a job. A crash, a hang or a wrong result of the candidate becomes the measurement.

        `timeout_s` bounds each stage: load, verify, time. Raises MeasureError where no worker can be started, TimeoutError where the job
        takes longer than `seconds` as a whole, which says nothing of the candidate.
        """
        return self._request([job], None, timeout_s, whole_s=seconds)[0]

    def interleave(
        self, jobs: Sequence[Job], rounds: int = ROUNDS, timeout_s: float = TIMEOUT_S, *, seconds: float | None = None
    ) -> list[Measurement]:
        """Time verified candidates A B C A B C … in one process, so that drift of clocks and temperature affects all of them alike: of
        jobs at one workload, sample i is from round i.

        With `seconds`, each workload gets an equal part of the time, and fewer rounds if that is short, but at least LEAST_ROUNDS.
        If the process dies, each candidate runs one round by itself, which shows which one failed; the others are then timed again without
        it. Candidates that fail only together keep the sample of their single round.
        """
        found = self._request(jobs, rounds, timeout_s, seconds)
        if len(jobs) < 2 or not all(one.kind in FATAL and one.detail == found[0].detail for one in found):
            return found
        single = [self._request([job], 1, timeout_s)[0] for job in jobs]
        again = self._request([job for job, one in zip(jobs, single, strict=True) if one.ok], rounds, timeout_s, seconds)
        if all(one.kind in FATAL for one in again):
            return single
        more = iter(again)
        return [next(more) if one.ok else one for one in single]

    def close(self) -> None:
        """End the process and all processes that it started."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def _request(
        self, jobs: Sequence[Job], rounds: int | None, timeout_s: float, seconds: float | None = None, whole_s: float = math.inf
    ) -> list[Measurement]:
        """What the process says of each job: of one that is done as a whole where `rounds` is None, else of interleaved ones."""
        if not jobs:
            return []
        until = time.monotonic() + whole_s  # the start of a process takes its part
        for target in {job.target for job in jobs if job.timing is not None and job.timing.read}:
            from kvgen.measure.read_roofline import source

            build(source(target))  # here: the time limit of a worker's stage does not include a compiler
        request = {"jobs": [job.to_json() for job in jobs], "rounds": rounds, "seconds": seconds}
        self.start(jobs[0].device)
        assert self._process is not None
        started = time.monotonic()
        try:
            answer = self._process.outcome(request, timeout_s, until)
        except BaseException:  # the answer, which still comes, would be read as that of the next request
            self.close()
            raise
        seconds = time.monotonic() - started
        answers = [Measurement.from_json(one) for one in answer] if isinstance(answer, list) else [answer] * len(jobs)
        if not all(one.kind in ("ok", "unsupported") for one in answers):
            self.close()
        return [replace(one, schedule=job.schedule, workload=job.workload, seconds=seconds) for one, job in zip(answers, jobs, strict=True)]


class _Process:
    """One process in a session of its own, with its connection and its output."""

    def __init__(self, device: str, memory_bytes: int, environment: dict[str, str]) -> None:
        self.device = device
        self._ceiling = max(memory_bytes, available_bytes())
        self._limit = memory_bytes if device == "cpu" else self._ceiling  # CUDA maps far more than a candidate uses
        self._ready = 0
        """Resident bytes once torch is loaded."""
        self._seen = 0
        """Resident bytes when it was last looked at."""
        self._over = self._closed = False
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._connection, theirs = Pipe()
        root = str(Path(__file__).resolve().parents[2])
        environment = {**environment, "PYTHONPATH": os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))}

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                [sys.executable, "-m", "kvgen.measure.worker", str(theirs.fileno()), str(os.getpid())], pass_fds=[theirs.fileno()],
                start_new_session=True, env=environment, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
            )  # fmt: skip

        with theirs:
            self._popen = _nursery().submit(start).result()

    def usable(self, device: str) -> bool:
        """Whether it is alive and serves this device."""
        return self.device == device and self._popen.poll() is None

    def wait_ready(self) -> None:
        """Wait until the process has started. Raises MeasureError if it does not."""
        if self._answer(time.monotonic() + START_S, sys.maxsize) is None:
            tail = self._log_tail()
            self.kill()
            raise MeasureError(f"a worker process did not start{tail}")
        self._ready = self._resident()

    def outcome(self, request: dict[str, Any], timeout_s: float, until: float) -> list[Any] | Measurement:
        """What the process reports of each job, or the measurement that follows from its end or its silence. Raises TimeoutError at the
        time `until`.
        """
        with suppress(OSError):  # if the process has ended, reading its answer will show it
            self._connection.send_bytes(json.dumps(request).encode())
        own = begun = self._resident()  # what is kvgen's own: also what it keeps of earlier jobs
        stage, limit_s, most = "load", timeout_s, own + self._limit
        while (message := self._answer(min(until, time.monotonic() + limit_s), most)) is not None:
            if "found" in message:
                return list(message["found"])
            now = self._resident()
            own += now - begun if stage in OWN else 0
            stage, begun = str(message["stage"]), now
            limit_s, most = (max(OWN_S, timeout_s), self._ready + self._ceiling) if stage in OWN else (timeout_s, own + self._limit)
        if time.monotonic() >= until:
            raise TimeoutError(f"there was no time left during {stage}")
        return self._post_mortem(stage, limit_s)

    def kill(self) -> None:
        """End the whole process group and free the pipe; safe to call twice."""
        with suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()
        self._connection.close()
        self._log.close()

    def _answer(self, deadline: float, most: int) -> dict[str, Any] | None:
        """The next message; None when the process ended or closed the pipe, has more resident bytes than `most`, or the deadline passed."""
        while time.monotonic() < deadline and not self._over:
            try:
                if self._connection.poll(POLL_S):
                    message: dict[str, Any] = json.loads(self._connection.recv_bytes())
                    return message
            except (EOFError, OSError):
                self._closed = True
                return None
            self._seen = self._resident() or self._seen
            self._over = self._seen > most
        return None

    def _resident(self) -> int:
        """Resident bytes without pages of files, of which a library brings many when it is first used."""
        with suppress(OSError):
            _, resident, shared, *_ = Path(f"/proc/{self._popen.pid}/statm").read_text().split()
            return (int(resident) - int(shared)) * resource.getpagesize()
        return 0

    def _post_mortem(self, stage: str, limit_s: float) -> Measurement:
        """What follows of a process that gave no answer; kills its process group."""
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(0 if self._over else 0.5)
        status, tail = self._popen.returncode, self._log_tail()
        self.kill()
        most = self._ceiling if stage in OWN else self._limit
        if self._over or (status == -signal.SIGKILL and self._seen > NEARLY * most):  # which the system kills, too
            return Measurement("oom", f"it took more than {most >> 20} MiB of host memory during {stage}")
        if status is None and self._closed:
            return Measurement("crash", f"it closed its pipe during {stage}{tail}")
        if status is None:
            return Measurement("timeout", f"it did not finish {stage} within {limit_s:.3g} s")
        reason = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        return Measurement("crash", f"it died of {reason} during {stage}{tail}")

    def _log_tail(self) -> str:
        """The last lines that the process printed, joined to one, behind a colon; empty where there are none."""
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 4096))
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines()]
        told = [line for line in lines if line and not line.startswith("File ")]  # stack frames say little in one line
        return ": " + " | ".join(told[-LOG_LINES:]) if told else ""


@cache
def _nursery() -> ThreadPoolExecutor:
    """The thread that starts workers. PR_SET_PDEATHSIG kills a child when the *thread* that started it ends, and measuring threads end
    earlier.
    """
    return ThreadPoolExecutor(1, thread_name_prefix="workers")


def serve(handle: int, parent: int) -> None:
    """The process: serve requests until the connection closes."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the system kills this process when its parent ends, in whatever way
    if os.getppid() != parent:  # it ended before prctl took effect
        os._exit(1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # where all processes of a job get it: the parent ends this one, and records no crash
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    from kvgen.measure.perform import perform, perform_interleaved

    with Connection(handle) as connection:

        def say(**message: Any) -> None:
            connection.send_bytes(json.dumps(message).encode())

        def stage(name: str) -> None:
            say(stage=name)

        say(ready=True)
        while True:
            try:
                request = json.loads(connection.recv_bytes())
            except EOFError:
                return
            jobs, rounds = [Job.from_json(job) for job in request["jobs"]], request["rounds"]
            found = [perform(jobs[0], stage)] if rounds is None else perform_interleaved(jobs, rounds, stage, request["seconds"])
            say(found=[one.to_json() for one in found])


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
