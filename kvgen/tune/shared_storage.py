"""Studies in a database that several processes share: claims of living processes are kept alive, those of dead ones lapse.

A claim is a running trial with a counter, which its process increases every HEARTBEAT_S. Other processes watch the counters with their own
clocks, so those of hosts need not agree. A claim whose counter stands still for GRACE_S belongs to a process that was killed or cut off:
any other process ends the trial, and may measure its schedule.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Lock, Thread
from typing import Any

import optuna
from optuna.trial import FrozenTrial

from kvgen.errors import HostError, KvgenError
from kvgen.extras import require

HEARTBEAT_S = 15.0
GRACE_S = 90.0
"""Seconds without a heartbeat after which a claim lapses."""
BEAT = "heartbeat"
"""The attribute of a trial that holds the counter."""
ATTEMPTS = 6
"""Processes that open a new database at once collide while they create its tables; all but one try again."""
COLLISION = re.compile("already exists|duplicate|UniqueViolation|UNIQUE constraint|locked", re.IGNORECASE)
POSTGRESQL = re.compile(r"^postgres(ql)?://")
SECRETS = (
    re.compile(r"^(?:[a-z][a-z0-9+.-]*://)?(.*)@", re.IGNORECASE | re.DOTALL),
    re.compile(r"//[^/?#@\[]*?:(?!\d*(?:[/?#,]|$))([^/?#@]*)(?!.*@)"),
    re.compile(r"[?&;](?:password|passwd|pwd|passfile|sslpassword)=([^&;]*)", re.IGNORECASE),
)
"""What no one may read of a URL: all before its last `@`, which may contain anything; where there is none, what stands after a colon and is
no port; passwords in its query.
"""


class SharedStorage(optuna.storages.RDBStorage):
    """A database of studies. While this process has claims, a thread increases their counters."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._claims: set[int] = set()
        self._changing = Lock()
        self._ending = Event()
        self._thread: Thread | None = None

    def keep(self, trial_id: int) -> None:
        """Keep the claim of a trial alive from now on, until `drop`."""
        with self._changing:
            self._claims.add(trial_id)
            if self._thread is None:
                self._ending.clear()
                self._thread = Thread(target=self._beat, name="heartbeats", daemon=True)
                self._thread.start()

    def drop(self, trial_id: int) -> None:
        """Let the claim of a trial lapse, because the trial ends."""
        with self._changing:
            self._claims.discard(trial_id)

    def close(self) -> None:
        """End the thread. Claims that were not dropped lapse."""
        with self._changing:
            thread, self._thread = self._thread, None
            self._claims.clear()
        if thread is not None:
            self._ending.set()
            thread.join()

    def _beat(self) -> None:
        beat = 0
        while not self._ending.wait(HEARTBEAT_S):
            beat += 1
            with self._changing:
                claims = list(self._claims)
            for trial_id in claims:
                with suppress(Exception):  # a trial that has ended meanwhile; of a lost database the run's next access tells
                    self.set_trial_user_attr(trial_id, BEAT, beat)


class Watch:
    """Counters of other processes' claims, and since when each of them stands still, by this process's clock."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Any, float]] = {}

    def lapsed(self, trials: Iterable[FrozenTrial]) -> set[int]:
        """Numbers of the running trials whose counter has stood still for GRACE_S."""
        now = time.monotonic()
        seen = {}
        for trial in trials:
            beat = trial.user_attrs.get(BEAT)
            before, since = self._seen.get(trial.number, (beat, now))
            seen[trial.number] = (beat, since if before == beat else now)
        self._seen = seen
        return {number for number, (_, since) in seen.items() if now - since > GRACE_S}


def open_database(url: str) -> SharedStorage:
    """Storage in a database that several hosts share, e.g. postgresql://user@host/name. Raises KvgenError if it cannot be opened,
    ToolchainMissing without PostgreSQL's driver.
    """
    place = url
    if POSTGRESQL.match(url):
        require("--storage postgresql://", "psycopg")
        place = POSTGRESQL.sub("postgresql+psycopg://", url)
    for attempt in range(1, ATTEMPTS + 1):
        found = _opened(place)
        if isinstance(found, SharedStorage):
            return found
        reason = _reason(found)
        if attempt == ATTEMPTS or not COLLISION.search(reason):
            raise KvgenError(f"cannot open the storage {without_password(url)}: {without_password(url, reason)}") from None
        time.sleep(random.uniform(0.1, 0.5) * attempt)
    raise AssertionError("unreachable")


def _opened(url: str) -> SharedStorage | Exception:
    try:
        return SharedStorage(url)
    except Exception as error:  # of optuna, of SQLAlchemy, or of the database's driver
        return error


def _reason(error: Exception) -> str:
    return next(iter(str(error.__cause__ or error).splitlines()), type(error).__name__)


def without_password(url: str, said: str | None = None) -> str:
    """What is `said` of a URL (by default the URL itself) as it may be printed: without user and password, and without a password in its
    query. A library may repeat a part that it takes for the host.
    """
    said = url if said is None else said
    for secret in filter(None, (secret for pattern in SECRETS for secret in pattern.findall(url))):
        said = said.replace(f"{secret}@", "…@").replace(f"={secret}", "=…").replace(f":{secret}", ":…")
        for part in re.split("[:/@]", secret.partition(":")[2] or secret):
            said = said.replace(part, "…") if len(part) > 2 else said
    return said


@contextmanager
def storage_errors(storage: object) -> Iterator[None]:
    """Turn failures of a shared database into HostError, and end its thread at the end."""
    try:
        yield
    except optuna.exceptions.StorageInternalError as error:
        raise HostError(f"the storage failed, and what was measured until then is in it: {_reason(error)}") from error
    finally:
        if isinstance(storage, SharedStorage):
            storage.close()


class Given(optuna.samplers.BaseSampler):
    """Samples a trial with given parameters; the others as `base` does.

    A queue of waiting trials (`Study.enqueue_trial`) would not do: another process may take what this one has put there.
    """

    def __init__(self, base: optuna.samplers.BaseSampler, given: dict[str, Any]) -> None:
        self._base, self._given = base, given

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """See `BaseSampler`."""
        self._base.before_trial(study, trial)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, Any]:
        """What `base` samples jointly, without the given parameters."""
        space = self._base.infer_relative_search_space(study, trial)
        return {name: values for name, values in space.items() if name not in self._given}

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, Any]) -> dict[str, Any]:
        """See `BaseSampler`."""
        return dict(self._base.sample_relative(study, trial, search_space)) if search_space else {}

    def sample_independent(self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: Any) -> Any:
        """See `BaseSampler`."""
        if param_name in self._given:
            return self._given[param_name]
        return self._base.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(self, study: optuna.Study, trial: FrozenTrial, state: Any, values: Any) -> None:
        """See `BaseSampler`."""
        self._base.after_trial(study, trial, state, values)
