from __future__ import annotations

import errno
from pathlib import Path

import pytest

from kvgen.errors import HostError, host_errors


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
