from __future__ import annotations

import json

import pytest

from kvgen._resources import generated
from kvgen.lower import flags
from kvgen.lower.backend import get_backend
from kvgen.measure import read_roofline
from tests.support.tuning import tiny_spec


def test_back_ends_emit_only_flags_that_are_listed() -> None:
    backend = get_backend("cpu")
    source = backend.lower(tiny_spec(), backend.default(tiny_spec(), "cpu"), "cpu")
    assert source.flags == flags.CPU
    for one in (source, read_roofline.source("cpu"), read_roofline.source("sm90")):
        assert flags.refused(one.language, one.flags) is None


def test_shipped_entries_ask_for_nothing_else() -> None:
    for file in generated().glob("*/*/*/entry.json"):
        for source in json.loads(file.read_text())["sources"].values():
            assert flags.refused(source["language"], source["flags"]) is None, file


@pytest.mark.parametrize("flag", ["-wrapper", "sh,-c,x", "-fplugin=/x.so", "-B/tmp", "@/etc/passwd", "-include", "-fopenmp ", "", "-o"])
def test_any_other_flag_is_refused(flag: str) -> None:
    assert flags.refused("c++", ("-fopenmp", flag)) == flag
    assert flags.refused("cuda", (flag,)) == flag


def test_flags_of_one_language_are_not_those_of_the_other() -> None:
    assert flags.refused("cuda", flags.CPU) == flags.CPU[0]
    assert flags.refused("c++", flags.TILELANG) == flags.TILELANG[0]
