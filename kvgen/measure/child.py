"""The worker process: `python -m kvgen.measure.child REQUESTS ANSWERS MEMORY BOUND PARENT`.

The arguments are two pipe ends, the bytes of host memory that a candidate may allocate, whether RLIMIT_DATA enforces that (1 or 0), and the
id of the parent process. Requests and answers are lines of JSON. A request is {"job"} or {"jobs", "rounds", "seconds"}; its answers are any
number of {"stage"} and of {"stretch"} (`kvgen.measure.allowance`), then one {"outcomes"}. The very first answer is {"ready"}, once torch is
loaded.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, in whatever way."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before prctl took effect
        os._exit(1)


def main() -> None:
    """Serve requests until the pipe closes."""
    requests, answers, memory, bound, parent = (int(arg) for arg in sys.argv[1:6])
    die_with_parent(parent)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # where all processes of a job get it: the parent ends this one, and records no crash
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    from kvgen.measure.allowance import Allowance, Stretch
    from kvgen.measure.job import Job
    from kvgen.measure.perform import perform, perform_interleaved

    with os.fdopen(requests) as incoming, os.fdopen(answers, "w") as outgoing:

        def say(**message: Any) -> None:
            outgoing.write(json.dumps(message) + "\n")
            outgoing.flush()

        def stage(name: str) -> None:
            say(stage=name)

        def stretch(begun: Stretch | None) -> None:
            say(stretch=begun)

        def allow() -> Allowance:
            return Allowance(memory, stretch, bound=bool(bound))

        say(ready=True)
        for line in incoming:
            request = json.loads(line)
            if "job" in request:
                outcomes = [perform(Job.from_json(request["job"]), stage, allow)]
            else:
                jobs = [Job.from_json(job) for job in request["jobs"]]
                outcomes = perform_interleaved(jobs, request["rounds"], stage, request["seconds"], allow)
            say(outcomes=[outcome.to_json() for outcome in outcomes])


if __name__ == "__main__":
    main()
