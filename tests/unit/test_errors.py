from __future__ import annotations

import errno
from pathlib import Path

import pytest

from kvgen.errors import CompileError, CompilerCrash, HostError, KvgenError, UnsupportedError, host_errors, markdown


@pytest.mark.parametrize(
    ("raised", "reason"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/a/x"), "cannot write /a/x: No such file or directory"),
        (OSError(errno.ENOSPC, "No space left on device"), "cannot write /cache: No space left on device"),
    ],
    ids=["its file", "the folder"],
)
def test_an_os_error_becomes_one_that_names_file_and_reason(raised: OSError, reason: str) -> None:
    with pytest.raises(HostError, match=f"^{reason}$"), host_errors("write", Path("/cache")):
        raise raised


def test_a_failure_of_the_machine_is_never_one_of_the_kernel() -> None:
    assert issubclass(HostError, KvgenError)
    assert issubclass(CompilerCrash, HostError)
    assert not issubclass(HostError, CompileError)
    assert not issubclass(CompileError, HostError)


def test_a_refusal_names_what_refuses() -> None:
    assert str(UnsupportedError("cpu", "it is Sunday")) == "the cpu back end does not support this spec: it is Sunday"
    assert str(UnsupportedError("KvgenCache", "it is Sunday", is_backend=False)) == "KvgenCache: it is Sunday"


def test_markdown_shows_what_it_is_given() -> None:
    assert markdown("NVIDIA H200, 24.1 MiB") == "NVIDIA H200, 24.1 MiB"
    assert markdown("a\x1b[2J\n# <img src=x>|`") == "a&#92;x1b&#91;2J&#92;n&#35; &#60;img src=x&#62;&#124;&#96;"
