from __future__ import annotations

from pathlib import Path

import pytest

from kvgen.csvfile import CsvFile
from kvgen.errors import HostError
from tests.support.full_disk import no_file_beyond


def test_rows_are_in_the_file_once_they_are_added(tmp_path: Path):
    file = CsvFile(tmp_path / "new" / "rows.csv")
    file.add([])
    assert not file.file.exists()
    file.add([{"name": "a,b", "us": 1.5}])
    assert file.file.read_text() == 'name,us\n"a,b",1.5\n'
    file.add([{"name": "c", "us": 2}, {"name": "d", "us": None}])
    assert file.file.read_text() == 'name,us\n"a,b",1.5\nc,2\nd,\n'


def test_another_run_replaces_the_file_with_its_first_rows(tmp_path: Path):
    (tmp_path / "rows.csv").write_text("us\n1\n2\n3\n")
    file = CsvFile(tmp_path / "rows.csv")
    assert file.file.read_text() == "us\n1\n2\n3\n"
    file.add([{"us": 4}])
    assert file.file.read_text() == "us\n4\n"


def test_a_full_disk_takes_no_part_of_a_row(tmp_path: Path):
    file = CsvFile(tmp_path / "rows.csv")
    file.add([{"name": "first"}])
    kept = file.file.read_bytes()
    with no_file_beyond(len(kept) + 5), pytest.raises(HostError, match=r"cannot write .*rows\.csv: File too large"):
        file.add([{"name": "longer than five"}])
    assert file.file.read_bytes() == kept
    file.add([{"name": "next"}])
    assert file.file.read_text() == "name\nfirst\nnext\n"


def test_a_full_disk_leaves_what_an_earlier_run_wrote(tmp_path: Path):
    old = tmp_path / "rows.csv"
    old.write_text("us\n1\n")
    with no_file_beyond(5), pytest.raises(HostError, match=r"cannot write .*rows\.csv: File too large"):
        CsvFile(old).add([{"name": "longer than five"}])
    assert old.read_text() == "us\n1\n"
    assert list(tmp_path.iterdir()) == [old]


def test_a_device_that_takes_nothing_is_named_with_the_reason():
    with pytest.raises(HostError, match="cannot write /dev/full: No space left on device"):
        CsvFile(Path("/dev/full")).add([{"us": 1}])
