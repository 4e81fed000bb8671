"""A PostgreSQL server of its own, for a test: in a temporary folder, on a Unix socket, as another user where the tests run as root."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PATIENCE_S = 60.0


def binaries() -> Path | None:
    """The folder of `initdb` and `postgres`; None where PostgreSQL's server is not installed."""
    found = shutil.which("initdb")
    folders = [Path(found).resolve().parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    folders += sorted(Path("/usr").glob("pgsql-*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "initdb").exists() and (folder / "postgres").exists()), None)


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """Start a server from these binaries; yields the URL of its database. It writes nothing safely, because nothing of it is kept."""
    root = Path(tempfile.mkdtemp(prefix="kvgen-pg-", dir="/tmp"))  # a socket's path has at most 107 bytes
    data, user = root / "data", _user()
    if user:
        os.chown(root, user["user"], user["group"])
    running: subprocess.Popen[bytes] | None = None
    try:
        words = ["-D", data, "-U", "kvgen", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"]
        subprocess.run([folder / "initdb", *words], check=True, capture_output=True, cwd=root, **user)
        with (root / "log").open("wb") as log:
            options = ["-D", data, "-k", root, "-c", "listen_addresses=", "-c", "fsync=off"]
            running = subprocess.Popen([folder / "postgres", *options], stdout=log, stderr=log, cwd=root, start_new_session=True, **user)
        until = time.monotonic() + PATIENCE_S
        asking = [folder / "pg_isready", "-q", "-h", root, "-U", "kvgen", "-d", "postgres"]
        while subprocess.run(asking, check=False).returncode:
            if running.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"PostgreSQL did not start: {(root / 'log').read_text(errors='replace')}")
            time.sleep(0.1)
        yield f"postgresql://kvgen@/postgres?host={root}"
    finally:
        if running is not None:
            running.send_signal(signal.SIGINT)  # fast shutdown: it ends the connections that are open
            running.wait()
        shutil.rmtree(root, ignore_errors=True)


def _user() -> dict[str, Any]:
    """Options of a process that runs as `postgres` or `nobody`, because the server refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        try:
            found = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": found.pw_uid, "group": found.pw_gid, "extra_groups": []}
    raise RuntimeError("there is no user postgres and no user nobody to run PostgreSQL as")
