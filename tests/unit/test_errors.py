from __future__ import annotations

import errno
from pathlib import Path

import pytest

from kvgen.errors import CompileError, CompilerCrash, HostError, KvgenError, UnsupportedError, host_errors


def test_an_os_error_becomes_one_that_names_file_and_reason() -> None:
    with (
        pytest.raises(HostError, match=r"^cannot write /proc/nowhere/x: No such file or directory$") as caught,
        host_errors("write", Path("/a")),
    ):
        open("/proc/nowhere/x", "w").close()
    assert caught.value.path == Path("/proc/nowhere/x")


def test_without_a_file_of_its_own_the_folder_is_named() -> None:
    with pytest.raises(HostError, match=r"^cannot write /cache: No space left on device$"), host_errors("write", Path("/cache")):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_other_errors_pass() -> None:
    with pytest.raises(CompileError, match="no"), host_errors("write", Path("/a")):
        raise CompileError("no")


def test_a_failure_of_the_machine_is_never_one_of_the_kernel() -> None:
    assert issubclass(HostError, KvgenError)
    assert issubclass(CompilerCrash, HostError)
    assert not issubclass(HostError, CompileError)
    assert not issubclass(CompileError, HostError)


def test_a_refusal_names_what_refuses() -> None:
    assert str(UnsupportedError("cpu", "it is Sunday")) == "the cpu back end does not support this spec: it is Sunday"
    assert str(UnsupportedError("KvgenCache", "it is Sunday", is_backend=False)) == "KvgenCache: it is Sunday"


def test_markdown_shows_what_it_is_given() -> None:
    from kvgen.errors import markdown

    assert markdown("NVIDIA H200, 24.1 MiB") == "NVIDIA H200, 24.1 MiB"
    assert markdown("a\x1b[2J\n# <img src=x>|`") == "a&#92;x1b&#91;2J&#92;n&#35; &#60;img src=x&#62;&#124;&#96;"
