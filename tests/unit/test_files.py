from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvgen.files import write_whole


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """Like a disk that has no more room: what fits of a write is taken, and the rest is an error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_page_is_written_whole_or_the_old_one_stays(tmp_path: Path):
    page = tmp_path / "page.html"
    write_whole(page, "old µ")
    with no_file_beyond(100), pytest.raises(OSError, match="File too large") as failed:
        write_whole(page, "new" * 1000)
    assert failed.value.filename == str(page)
    assert page.read_bytes() == "old µ".encode()
    assert list(tmp_path.iterdir()) == [page]
    with pytest.raises(OSError, match="No space left"):
        write_whole(Path("/dev/full"), "new")


def test_a_text_goes_through_a_pipe_that_is_named_by_its_handle() -> None:
    """As `-o /dev/stdout` before a pipe: the link to it leads to no file."""
    reader, writer = os.pipe()
    write_whole(Path(f"/dev/fd/{writer}"), "page")
    os.close(writer)
    assert os.read(reader, 100) == b"page"
    os.close(reader)
