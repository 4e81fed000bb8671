"""One spec on this GPU: schedules verified and timed over random packed caches, one JSON line per result on stdout.

Started by gpu_decode.py, which restarts it after a crash. Reads its task as JSON from the file named by its argument.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.turns import take_turns
from kvgen.lower.schedule import Schedule, layout_of
from kvgen.measure.bytes import half_full, sequence_bytes
from kvgen.measure.device import cold_bytes
from kvgen.reference.data import learned_sinks
from kvgen.reference.layout import PackedLayout
from kvgen.reference.packing import pack_blocks, unpack_blocks
from kvgen.reference.quantize import DTYPES
from kvgen.reference.residual import ResidualRows, residual_rows
from kvgen.reference.window import window_places
from kvgen.runtime.module import Module, load, load_library
from kvgen.runtime.sequences import OverflowFlag
from kvgen.spec import KernelSpec, Workload

LEAST_CAPTURED = 20
"""Calls in a graph: launches overlap within one, and not with the next."""
UNIQUE = 64
"""Different random blocks; caches are made of them in random order."""


@dataclass
class Caches:
    """Random caches of one workload, several so that none is left in L2, and fp32 attention over the first of them."""

    q: torch.Tensor
    packed: list[torch.Tensor]
    tables: list[torch.Tensor | None]
    residual: list[tuple[torch.Tensor, torch.Tensor]]
    lengths: list[torch.Tensor]
    new: tuple[torch.Tensor, torch.Tensor]
    sinks: torch.Tensor | None
    """Learned sink logits, float32 [q_heads], where the spec has them."""
    want: torch.Tensor
    bytes: int
    room: int
    """Most tokens that a sequence can have."""


def make_caches(spec: KernelSpec, layout: PackedLayout, work: Workload, kv_lens: list[int], logit: float) -> Caches:
    """Caches of `half_full(kv_len)` tokens per sequence, none where `kv_len` is 0, with room for a block more."""
    random = torch.Generator("cuda").manual_seed(work.batch * 7919 + work.kv_len)
    a, dtype, n = spec.attention, DTYPES[spec.attention.dtype], layout.tokens
    held = [half_full(spec, layout, kv_len) if kv_len else 0 for kv_len in kv_lens]
    blocks, rows = -(-(max(held) + 2 * n) // n), residual_rows(spec, n).rows
    k, v = (torch.randn(UNIQUE, n, a.head_dim, generator=torch.Generator().manual_seed(s)).to(dtype) for s in (1, 2))
    unique = pack_blocks(layout, k, v)
    read = [x.float().cuda() for x in unpack_blocks(layout, unique, dtype)]
    nbytes = sum(sequence_bytes(spec, layout, length) for length in held)
    count = min(256, max(1, -(-cold_bytes("cuda") // nbytes)))
    q = torch.randn(work.batch, work.q_len, a.q_heads, a.head_dim, generator=random, device="cuda")
    q = (q * (logit / 4.0)).to(dtype)
    packed, tables, residuals, lengths, first = [], [], [], [], None
    for _ in range(count):
        index = torch.randint(UNIQUE, (work.batch, a.kv_heads, blocks), generator=random, device="cuda")
        first = index if first is None else first
        data = unique.cuda()[index]
        table = None
        if spec.cache.page:
            data, table = _paged(data, spec.cache.page // n, random)
        elif places := window_places(spec, n):
            data = in_places(data, [residual_rows(spec, n).packed_blocks(length) for length in held], places)
        packed.append(data)
        tables.append(table)
        rest = [torch.randn(work.batch, a.kv_heads, rows, a.head_dim, generator=random, device="cuda").to(dtype) for _ in range(2)]
        residuals.append((rest[0], rest[1]))
        lengths.append(torch.tensor(held, dtype=torch.int32, device="cuda"))
    new = [torch.randn(work.batch, work.q_len, a.kv_heads, a.head_dim, generator=random, device="cuda").to(dtype) for _ in range(2)]
    assert first is not None
    sinks = learned_sinks(spec, "cuda")
    want = _attention(spec, q, first, read, residuals[0], held, sinks)
    return Caches(q, packed, tables, residuals, lengths, (new[0], new[1]), sinks, want, nbytes, blocks * n)


def in_places(data: torch.Tensor, counts: Sequence[int], places: int) -> torch.Tensor:
    """[batch, heads, blocks, bytes], of which the first `counts` of a sequence are packed, as a cache with a sliding window has them:
    [batch, heads, places, bytes], block i in place i mod places.
    """
    kept = data[:, :, :places].clone()
    for b, count in enumerate(counts):
        for block in range(max(0, count - places), count):
            kept[b, :, block % places] = data[b, :, block]
    return kept


def _paged(data: torch.Tensor, page_blocks: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """[batch, heads, blocks, bytes] as shuffled pages and their table."""
    batch, heads, blocks, size = data.shape
    short = -blocks % page_blocks
    data = torch.cat([data, data[:, :, :short]], 2).reshape(batch, heads, -1, page_blocks, size).transpose(1, 2).flatten(0, 1)
    order = torch.randperm(data.shape[0], generator=random, device="cuda")
    return data[order].contiguous(), order.argsort().to(torch.int32).reshape(batch, -1).contiguous()


def _attention(
    spec: KernelSpec,
    q: torch.Tensor,
    index: torch.Tensor,
    read: list[torch.Tensor],
    rest: tuple[torch.Tensor, torch.Tensor],
    held: list[int],
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Output [batch, q_len, q_heads, head_dim], fp32, over `held` tokens: full blocks `index` of the unique ones, then the residual."""
    out = torch.empty(q.shape, dtype=torch.float32, device="cuda")
    group, (q_len, dim) = spec.attention.group, (q.shape[1], q.shape[3])
    kept = residual_rows(spec, read[0].shape[1])
    for b, length in enumerate(held):
        full, sink = kept.packed_blocks(length), range(min(length, kept.sink))
        newest = [kept.row(position) for position in range(max(kept.first(length), len(sink)), length)]
        k, v = (
            torch.cat([r[b, :, list(sink)].float(), x[index[b, :, :full]].flatten(1, 2), r[b, :, newest].float()], 1)
            for x, r in zip(read, rest, strict=True)
        )
        rows = q[b].float().reshape(q_len, -1, group, dim).permute(1, 2, 0, 3)  # [heads, group, q_len, dim]
        scores = rows.flatten(1, 2) @ k.transpose(1, 2) * dim**-0.5
        if softcap := spec.attention.softcap:
            scores = softcap * (scores / softcap).tanh()
        scores = scores.unflatten(1, (group, q_len))
        query = (k.shape[1] - q_len + torch.arange(q_len, device="cuda")).unsqueeze(1)
        token = torch.arange(k.shape[1], device="cuda")
        hidden = token > query
        if window := spec.attention.window:
            hidden |= token <= query - window
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:  # one more score, which has no value
            scores = torch.cat([scores, sinks.reshape(-1, group, 1, 1).expand(*scores.shape[:-1], 1)], -1)
        part = scores.softmax(-1)[..., : k.shape[1]].flatten(1, 2) @ v
        out[b] = part.unflatten(1, (group, q_len)).permute(2, 0, 1, 3).reshape(q_len, -1, dim)
    return out


class Runner:
    """One module's calls over a workload's caches."""

    def __init__(self, spec: KernelSpec, module: Module, caches: Caches, work: Workload, *, planned: bool = False) -> None:
        self.module, self.caches, self.planned = module, caches, planned
        self.scale = spec.attention.head_dim**-0.5
        size = int(module.workspace_bytes(work.batch, caches.room, work.q_len))
        self.workspace = torch.zeros(max(16, size), dtype=torch.uint8, device="cuda")
        self.out = torch.full_like(caches.q, torch.nan)
        self.overflow = OverflowFlag(gpu=True)
        self.plans = [self._plan(lengths, work.q_len) for lengths in caches.lengths]

    def _plan(self, lengths: torch.Tensor, q_len: int) -> torch.Tensor | None:
        """The plan of `attend`; a decode step appends nothing that would change it. None for equal lengths, unless a plan is asked for."""
        if not self.planned and len(set(lengths.tolist())) == 1:
            return None
        plan = torch.empty(self.module.plan_size(len(lengths), self.caches.room, q_len), dtype=torch.int32, device="cuda")
        self.module.plan(lengths, plan, q_len, 0, 1, self.caches.room, self.overflow.address)
        return plan

    def attend(self, i: int, decode: bool = False) -> None:
        """One call over cache `i`."""
        c = self.caches
        new = c.new if decode else ()
        function = self.module.decode if decode else self.module.attend
        step = (c.room, self.overflow.address, 1) if decode else ()
        function(
            c.q, *new, c.packed[i], *c.residual[i], c.lengths[i], c.tables[i], None, self.out, None, c.sinks, self.workspace,
            self.plans[i], self.scale, c.room, *step,
        )  # fmt: skip

    def error(self) -> float:
        """Relative L2 of `attend` over the first cache; inf where a repeated call gives other bits."""
        self.attend(0)
        first = self.out.clone()
        for _ in range(3):
            self.out.fill_(torch.nan)
            self.attend(0)
        torch.cuda.synchronize()
        if not torch.equal(first.view(torch.int16), self.out.view(torch.int16)):
            return float("inf")
        error = float((first.float() - self.caches.want).norm() / self.caches.want.norm())
        return error if error == error else float("inf")


def capture(calls: list[Callable[[], None]], least: int = LEAST_CAPTURED) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of the calls in turn, at least `least` of them, and their number."""
    number = len(calls) * -(-least // len(calls))
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(number):
            calls[i % len(calls)]()
    return graph, number


def timed(graph: torch.cuda.CUDAGraph, number: int) -> float:
    """µs per call of one replay."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / number


def replayed(graph: tuple[torch.cuda.CUDAGraph, int]) -> list[float]:
    """µs per call of one replay, as the sample of a turn."""
    return [timed(*graph)]


@dataclass(frozen=True)
class Steps:
    """Decode steps that follow each other: tokens in the newest block before the first of them, and their number."""

    filled: int
    count: int

    def start(self, lengths: torch.Tensor, rows: ResidualRows) -> torch.Tensor:
        """Lengths before the first step: those whose newest block has `filled` tokens, near `lengths`."""
        return lengths - (lengths - rows.sink - rows.local) % rows.block + self.filled


def block_of_steps(block: int, q_len: int) -> tuple[list[Steps], list[Steps]]:
    """An even number of steps, of which the last packs the block that they fill; and as many steps over as many tokens on average that pack
    none: half of them, twice. Of the latter there are none where two steps fill more than a block.
    """
    half = block // q_len // 2
    if not half:
        return [Steps(max(0, block - q_len), 1)], []
    count = 2 * half
    return [Steps(block - count * q_len, count)], [Steps(block - (count + half) * q_len // 2, half)] * 2


def decode_us(runner: Runner, rows: ResidualRows) -> tuple[float, float | None]:
    """µs per decode over a whole block of steps, its flush included; and what the flush adds to that, on average over these steps (None
    where a step has a block of tokens or more).
    """
    caches = runner.caches
    state = [*caches.lengths, *[part for pair in caches.residual for part in pair]]
    before = [tensor.clone() for tensor in state]
    calls = [lambda i=i: runner.attend(i, decode=True) for i in range(len(caches.packed))]
    whole, middle = block_of_steps(rows.block, int(caches.q.shape[1]))
    most = middle[0].count if middle else whole[0].count
    turns = next(n for n in range(1, most + 1) if most % n == 0 and (n * len(calls) >= LEAST_CAPTURED or n == most))
    graph, _ = capture(calls, turns * len(calls))  # type: ignore[arg-type]

    def us(part: Steps) -> float:
        """Of all its steps, over every cache."""
        for tensor, old in zip(state, before, strict=True):
            tensor.copy_(old)
        for lengths in caches.lengths:
            lengths.copy_(part.start(lengths, rows))
        replays = part.count // turns
        return replays * timed_many(graph, replays)

    samples = [
        [sum(map(us, parts)) / sum(part.count for part in parts) / len(calls) for parts in (whole, middle) if parts] for _ in range(3)
    ]
    for tensor, old in zip(state, before, strict=True):
        tensor.copy_(old)
    step, *without = (min(found) for found in zip(*samples, strict=True))
    return step, step - without[0] if without else None


def timed_many(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """µs per replay of several in a row."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / replays


def read_graph(path: str, nbytes: int) -> tuple[torch.cuda.CUDAGraph, int]:
    """The read kernel over as many bytes, whose parts together have as many bytes as inputs do."""
    read = load_library(Path(path)).get_function("read")
    size = -(-nbytes // 4096) * 4096
    count = max(1, -(-cold_bytes("cuda") // size))
    pool, sink = torch.ones(size * count, dtype=torch.uint8, device="cuda"), torch.zeros(4096, dtype=torch.uint8, device="cuda")
    keep.extend([pool, sink])
    return capture([lambda part=pool[i * size : (i + 1) * size]: read(part, sink) for i in range(count)])  # type: ignore[misc]


keep: list[torch.Tensor] = []


def say(kind: str, **values: Any) -> None:
    """One line for the parent."""
    print(json.dumps({"kind": kind, **values}), flush=True)


def run(task: dict[str, Any]) -> None:
    """Every workload of the task over every module."""
    torch.backends.cuda.matmul.allow_tf32 = False
    spec = KernelSpec(**task["spec"])
    modules = {m["schedule"]: load(Path(m["path"])) for m in task["modules"]}
    layout = layout_of(spec, Schedule.from_json(task["modules"][0]["json"]).layout)
    for number in task["workloads"]:
        work = spec.workloads[number]
        caches = make_caches(spec, layout, work, task["lengths"][number], task["logit"])
        graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {"read": read_graph(task["read"], caches.bytes)}
        errors, decodes, runners = {}, {}, []  # decodes: µs of a step, and of the flush in it
        for name, module in modules.items():
            if [name, number] in task["skip"]:
                continue
            say("begin", schedule=name, workload=number)
            runner = Runner(spec, module, caches, work)
            errors[name] = runner.error()
            graphs[name] = capture([lambda i=i, r=runner: r.attend(i) for i in range(len(caches.packed))])  # type: ignore[misc]
            if task["decode"]:
                decodes[name] = decode_us(runner, residual_rows(spec, layout.tokens))
            torch.cuda.synchronize()
            runners.append(runner)
        say("begin", schedule="timing", workload=number)
        samples, _ = take_turns({name: partial(replayed, graph) for name, graph in graphs.items()}, task["rounds"])
        read_us = median(samples.pop("read"))
        for name, found in samples.items():
            say(
                "result", schedule=name, workload=number, us=median(found), low=min(found), read_us=read_us, bytes=caches.bytes,
                relative_l2=errors[name], decode_us=decodes.get(name, (None, None))[0], flush_us=decodes.get(name, (None, None))[1],
            )  # fmt: skip
        graphs.clear()
        runners.clear()
        keep.clear()
        del caches
        torch.cuda.empty_cache()


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text()))
