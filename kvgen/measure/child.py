"""The worker process: `python -m kvgen.measure.child CONNECTION PARENT [MEMORY]`.

The arguments are the file descriptor of a connection, the id of the parent process, and the bytes of host memory that a candidate may
allocate. Messages are JSON. A request is {"job"} or {"jobs", "rounds", "seconds"}; its answers are any number of {"stage"}, then one
{"found"} with a measurement of each job. The very first answer is {"ready"}, once torch is loaded.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve requests until the connection closes."""
    handle, parent, *memory = (int(arg) for arg in sys.argv[1:])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the system kills this process when its parent ends, in whatever way
    if os.getppid() != parent:  # it ended before prctl took effect
        os._exit(1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # where all processes of a job get it: the parent ends this one, and records no crash
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    from kvgen.measure.measurement import Job
    from kvgen.measure.perform import perform, perform_interleaved

    with Connection(handle) as connection:

        def say(**message: Any) -> None:
            connection.send_bytes(json.dumps(message).encode())

        def stage(name: str) -> None:
            say(stage=name)

        nbytes = memory[0] if memory else None
        say(ready=True)
        while True:
            try:
                request = json.loads(connection.recv_bytes())
            except EOFError:
                return
            if "job" in request:
                found = [perform(Job.from_json(request["job"]), stage, nbytes)]
            else:
                jobs = [Job.from_json(job) for job in request["jobs"]]
                found = perform_interleaved(jobs, request["rounds"], stage, request["seconds"], nbytes)
            say(found=[one.to_json() for one in found])


if __name__ == "__main__":
    main()
