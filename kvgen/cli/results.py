"""The JSON of commands that give one result after the other: an error takes none of those before it away."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvgen.cli.exit import error_json
from kvgen.cli.output import print_json


class Told(Exception):
    """Raised from an error that the JSON on stdout already has."""


@contextmanager
def json_list(wanted: bool) -> Iterator[list[dict[str, Any]]]:
    """A list to fill with results, which is printed at the end if wanted. After an error the last item is that error: the results before
    it, alone, would pass for all of them. Raises Told then.
    """
    results: list[dict[str, Any]] = []
    try:
        yield results
    except (Exception, KeyboardInterrupt) as error:
        if not (wanted and results):
            raise
        print_json([*results, error_json(error)])
        raise Told from error
    if wanted:
        print_json(results)
