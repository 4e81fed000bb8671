"""The rows of `kvgen bench --csv`, read back; without torch."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvgen.errors import KvgenError
from kvgen.files import read_plain
from kvgen.spec import Workload
from kvgen.spec.model import DType
from kvgen.spec.workloads import parse

NAMES = {"torch": "torch", "flashinfer": "FlashInfer", "onnxruntime": "ONNX Runtime"}
"""Providers as they write their own names."""
MOST_BYTES = 1 << 24
"""Of a file that is read."""
SHORT: dict[DType, str] = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


@dataclass(frozen=True)
class Result:
    """One provider at one workload: µs per call, and of reading the same bytes."""

    provider: str
    backend: str
    spec: str
    batch: int
    kv_len: int
    q_len: int
    us: float
    read_us: float
    load: str
    device: str
    date: str
    lengths: str = "equal"

    @property
    def workload(self) -> str:
        """The key of the workload of equal lengths."""
        return Workload(batch=self.batch, kv_len=self.kv_len, q_len=self.q_len).key

    @property
    def dtype(self) -> str:
        """What the provider's cache holds, if its name says it; else it is the spec's type."""
        found = re.search(r"(fp|bf|int)\d+", self.backend)
        return found[0] if found else ""

    def label(self, own: DType) -> str:
        """The provider and the type of its cache; `own` is the spec's."""
        return f"{NAMES.get(self.provider, self.provider)} {self.dtype or SHORT[own]}"

    @property
    def idle_rested(self) -> bool:
        """Whether it is a row of equal lengths whose timing left the device idle between samples, as on every CPU."""
        return self.load in ("", "burst", "rested") and self.lengths in ("", "equal")


def read_results(path: Path) -> list[Result]:
    """The rows of a file. Raises KvgenError where it cannot be read or is no table of `kvgen bench`."""
    found: list[Result] = []
    try:
        text = read_plain(path.resolve(), MOST_BYTES).decode()
        found.extend(map(_result, csv.DictReader(text.splitlines())))
    except OSError as error:
        raise KvgenError(f"cannot read {path}: {error.strerror}") from error
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        what = "it is not text" if isinstance(error, UnicodeDecodeError) else f"row {len(found) + 1}: {_why(error):.120}"
        raise KvgenError(f"{path} is no table that `kvgen bench --csv` wrote: {what}") from error
    return found


def _why(error: Exception) -> str:
    return f"it has no column {error}" if isinstance(error, KeyError) else str(error)


def _result(row: dict[str, str]) -> Result:
    provider, backend, spec, load, device, date = (row[name] for name in ("provider", "backend", "spec", "load", "device", "date"))
    batch, kv_len, q_len = (int(row[name]) for name in ("batch", "kv_len", "q_len"))
    times = float(row["us"]), float(row["read_us"])
    parse(f"{batch}x{kv_len}q{q_len}")
    if not all(0 < us < math.inf for us in times):
        raise ValueError(f"a time must be above 0, not {row['us']} and {row['read_us']} µs")
    return Result(provider, backend, spec, batch, kv_len, q_len, *times, load, device, date, row.get("lengths", "equal"))


def fastest_peers(results: Iterable[Result]) -> list[Result]:
    """Of every provider but kvgen the fastest over an unquantized cache, and the fastest over each quantized one; the slowest first."""
    best: dict[tuple[str, str], Result] = {}
    for one in sorted(results, key=lambda one: one.us):
        if one.provider != "kvgen":
            best.setdefault((one.provider, one.dtype if re.fullmatch(r"(int|fp)[248]", one.dtype) else ""), one)
    return sorted(best.values(), key=lambda one: -one.us)
