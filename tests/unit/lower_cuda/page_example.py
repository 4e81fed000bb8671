"""The example of docs/kernels.md, ALiBi as a score modifier: the page's own text in a kernel's source, and the formula in fp64."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import torch

from kvgen.lower.backend import Source
from kvgen.lower.template import reached_headers

PAGE = Path(__file__).resolve().parents[3] / "docs" / "kernels.md"
WORDS = "k4v4:h8/2:kg64:q2"
"""A spec of as many query heads as `with_alibi` gives slopes."""


def with_alibi(source: Source, folder: Path) -> Source:
    """A kernel's source with the page's header, a file below `folder`, and the page's two lines of change."""
    found = re.search(r"```cpp\n(#pragma once\n.*?struct Alibi.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    header = folder / "kvgen" / "mainloop" / "alibi.cuh"
    header.parent.mkdir(parents=True, exist_ok=True)
    header.write_text(found[1])
    text, include = source.text, (*source.include, folder)
    first = '#include "kvgen/host/attend.cuh"\n'
    for line, changed in ((first, f'{first}#include "kvgen/mainloop/alibi.cuh"\n'), ("kvgen::NoModifier", "kvgen::Alibi<8>")):
        assert text.count(line) == 1
        text = text.replace(line, changed)
    return replace(source, text=text, include=include, headers=reached_headers(text, include))


def alibi(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of one sequence whose scores lose 2^-(h + 1) of the distance between query and token.

    q is [q_len, q_heads, head_dim], k and v are [kv_heads, length, head_dim]; the output is like q, in fp64.
    """
    (q_len, heads, dim), length = q.shape, k.shape[1]
    keys, values = (x.double().repeat_interleave(heads // k.shape[0], 0) for x in (k, v))
    slope = (2.0 ** -torch.arange(1, heads + 1, dtype=torch.float64, device=q.device))[:, None, None]
    token = torch.arange(length, device=q.device)
    distance = torch.arange(length - q_len, length, device=q.device)[:, None] - token
    scores = torch.einsum("qhd,htd->hqt", q.double(), keys) * dim**-0.5 - slope * distance
    weights = scores.masked_fill(distance < 0, -torch.inf).softmax(-1).nan_to_num()
    return torch.einsum("hqt,htd->qhd", weights, values)
