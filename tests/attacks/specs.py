"""Malformed specs by the thousand: a SpecError each, in bounded time, with a message of bounded length.

`python -m tests.attacks.specs --count 12000 --seed 0`, in the repository's root. Prints one line and exits 0, or prints the first
spec that got through, with the reason, and exits 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvgen.errors import MAX_ISSUE_TEXT, MAX_ISSUES, SpecError
from kvgen.spec import dump_spec, load_spec
from tests.attacks import spec_nasties
from tests.attacks.spec_mutants import mutants

SECONDS = 1.0
"""CPU time of this process that one spec may take."""


class Failure(AssertionError):
    """A spec that was not answered as it should be."""

    def __init__(self, name: str, source: Any, reason: str) -> None:
        self.name, self.source, self.reason = name, source, reason
        super().__init__(f"{name}: {reason}")


@dataclass
class Tally:
    """What an attack came to."""

    malformed: int = 0
    valid: int = 0
    slowest: float = 0.0
    slowest_name: str = ""

    def add(self, name: str, source: Any) -> None:
        """Try one spec. Raises Failure."""
        refused, seconds = attempt(name, source)
        self.malformed += refused
        self.valid += not refused
        if seconds > self.slowest:
            self.slowest, self.slowest_name = seconds, name


def attempt(name: str, source: Any) -> tuple[bool, float]:
    """Whether the spec was refused, and the CPU seconds that it took. A valid one survives a round trip. Raises Failure."""
    start = time.process_time()
    try:
        spec, error = load_spec(source), None
    except SpecError as refusal:
        spec, error = None, refusal
    except Exception as other:
        raise Failure(name, source, f"{type(other).__name__}: {str(other)[:200]}") from other
    seconds = time.process_time() - start
    if seconds >= SECONDS:
        raise Failure(name, source, f"it took {seconds:.2f} s of CPU time, of {SECONDS} s")
    if error is not None and (reason := unbounded(error)):
        raise Failure(name, source, reason)
    if spec is not None and load_spec(dump_spec(spec)) != spec:
        raise Failure(name, source, "it was accepted, and written out it is another spec")
    return error is not None, seconds


def unbounded(error: SpecError) -> str | None:
    """What is wrong with how a spec was refused, None where nothing is."""
    if not 1 <= len(error.issues) <= MAX_ISSUES:
        return f"the SpecError has {len(error.issues)} issues"
    for issue in error.issues:
        if not issue.message or not str(issue).isprintable() or len(str(issue)) > 3 * MAX_ISSUE_TEXT + 30:
            return f"an issue is empty, too long or not printable: {str(issue)[:400]!r}"
    if len(str(error).splitlines()) > MAX_ISSUES + 2:
        return "the message has more lines than issues"
    return None


def nasties(folder: Path) -> Iterator[tuple[str, Any]]:
    """Everything in `spec_nasties`."""
    yield from spec_nasties.texts()
    yield from spec_nasties.objects()
    yield from spec_nasties.files(folder)


def attack(count: int, seed: int) -> Tally:
    """Try all nasties, every one of which is malformed, then mutants until `count` malformed specs were refused. Raises Failure."""
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        for name, source in nasties(Path(folder)):
            tally.add(name, source)
            if tally.valid:
                raise Failure(name, source, "it was accepted")
    for name, source in mutants(seed):
        if tally.malformed >= count:
            return tally
        tally.add(name, source)
    return tally


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=12_000, help="malformed specs to try (default 12000)")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations (default 0)")
    options = parser.parse_args()
    try:
        tally = attack(options.count, options.seed)
    except Failure as failure:
        text = failure.source if isinstance(failure.source, str) else repr(failure.source)[:4000]
        sys.stdout.buffer.write(f"{failure}\n{text}\n".encode("utf-8", "backslashreplace"))
        return 1
    slowest = f"{tally.slowest:.2f} s of CPU time at most ({tally.slowest_name.encode('unicode_escape').decode()})"
    print(f"{tally.malformed} malformed specs: SpecError each, {slowest}; {tally.valid} mutants were valid")
    return 0


if __name__ == "__main__":
    sys.exit(main())
