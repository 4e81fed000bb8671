"""The cases of gpu_shapes.py: words of gpu_words.py for spec, workload and the schedules of each back end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu_words import schedules_of, spec_of, workload_of
from kvgen.arch import Target
from kvgen.errors import KvgenError
from kvgen.lower.backends import get_backend
from kvgen.lower.schedule import Schedule
from kvgen.spec import KernelSpec

TARGET: Target = "sm90"
PLAIN, MANY, SHORT = "8x32768", "64x32768", "8x8192"
UNEQUAL = "1x131072+63x1024"
MODERATE = "1x57344+1x50176+1x43008+1x35840+1x28672+1x21504+1x14336+1x11264"
MIXED = "4x2048+4x4096+4x6144+4x8192+4x10240+4x12288+4x14336+4x16384"
WIDE = ("w8u4d1", "w8u4d1.cl2", "w8u1d2.cl2", "w4u4d1c2")
PAGES = (*WIDE, "w8u4d1.bulk.cl2")
FINE = ("w8u2d2.cl2", "w8u2d2", "w4u2d2c2", "w8u1d2.cl2")
"""CUDA schedules for KV tiles of 128 tokens, on pages too, and for KV tiles of 64."""
RAGGED = ("w8u1d2", "w8u4d1", "w8u2d2", "w4u4d1c2", "w4u2d2c2", "w4u1d2c2")
"""CUDA schedules for unequal lengths: a plan takes no clusters."""
BYTE, CRUMB = ("w8u2d1.cl2", "w8u1d2.cl2", "w8u1d2", "w4u2d1c2"), ("w12u4d1.cl2", "w12u4d1", "w6u4d1c2", "w4u4d1c2")
"""CUDA schedules for codes of 8 and of 2 bits."""
BOOSTED = ("w8u4d1.cl2", "w8u4d1", "w12u4d1.cl2", "w6u4d1c2")
SHORT_HEADS = (
    "w8u4d2.cl2",
    "w8u4d1.cl2",
    "w12u4d1.cl2",
    "w12u4d1",
    "w6u4d1c2",
    "w4u4d2c2",
    "w6u4d1c2.noexact",
    "w8u4d1.cl2.noexact",
    "w8u4d1",
    "w2u2d2c4",
    "w2u4d2c4",
)
SIXTEEN_ROWS = ("w8u4d1.cl2", "w8u4d1", "w8u2d1.cl2", "w8u4d1.cl2.noexact", "w8u2d1.cl2.noexact", "w8u4d1.noexact")
MANY_ROWS = ("w8u4d1", "w8u4d1.cl2", "w8u2d1.cl2", "w4u2d2", "w8u4d1.noexact", "w8u2d1.noexact", "w8u2d1.cl2.noexact", "w4u2d2.noexact")
UNQUANTIZED = ("w4u1d2.cl2", "w4u1d2", "w6u1d2", "w8u1d1")
CRUMB_PAGES = ("w8u1d2", "w12u2d2.cl2", "w8u2d2.cl2", "w12u2d1.cl2", "w6u2d2c2")
"""CUDA schedules for K with boost, for short heads, for many packed-GQA rows, for 16 bits, and for 2-bit codes in small blocks."""
MANY_HEADS = ("w8u4d1", "w8u1d2", "w4u4d1c2", "w4u2d2c2", "w6u2d1c2")
MANY_HEADS_BYTE = ("w8u1d2", "w8u2d1", "w4u1d2c2")
MANY_HEADS_CRUMB = ("w8u4d1", "w12u4d1", "w6u4d1c2", "w4u4d1c2", "w4u4d1c3")
MANY_HEADS_ROWS = ("w8u4d1", "w8u2d1", "w4u2d2", "w4u4d1c2", "w8u4d1.noexact", "w8u2d1.noexact", "w4u4d1c2.noexact")
"""CUDA schedules for more heads than multiprocessors: of codes of 4, 8 and 2 bits, and of many packed-GQA rows."""
TILES, FINE_TILES = ("w8u2s2", "w8u2s2.cl", "w8u4s4.cl", "w12u4s4.cl"), ("w8u2s2", "w8u2s2.cl")
"""TileLang schedules for about as many heads as multiprocessors, or half as many, and those of them for KV tiles of 64 tokens."""
SPREAD = ("w8u2s2", "w8u4s4", "w12u4s4", "w4u4s4c2")
"""TileLang schedules for few heads or very many: clusters suit neither."""
CRUMB_TILES = ("w12u4s4", "w12u4s4.cl", "w16u4s4.cl", "w8u4s4c2", "w8u4s4c2.cl")
FOURS = ("w8u4s4", "w8u4s4.cl", "w12u4s4", "w12u4s4.cl")
"""TileLang schedules for 2-bit codes, and for codes of which two sub-tiles are too few."""
COLUMN_TILES = ("w8u2s2t2", "w8u2s2t2.cl", "w8u4s4t2.cl")
"""TileLang schedules for more than 8 packed-GQA rows."""


@dataclass
class Shape:
    """A case: words of spec and workload, the name of its sibling, which has as many bytes in a plainer shape, schedules to try.

    `modules` are those that were compiled.
    """

    name: str
    words: str
    work: str = PLAIN
    sibling: str | None = None
    cuda: tuple[str, ...] = WIDE
    tilelang: tuple[str, ...] = TILES
    modules: list[dict[str, Any]] = field(default_factory=list)

    @property
    def spec(self) -> KernelSpec:
        """The spec, for its workload."""
        return spec_of(self.words, TARGET, [workload_of(self.work)])

    def default(self, backend: str) -> Schedule:
        """The back end's own default for this shape."""
        return get_backend(backend).default(self.spec, TARGET)

    def points_with_default(self, backend: str) -> list[Schedule]:
        """The schedules to try, and the default; none where the back end is not asked for or refuses the shape."""
        points = self.points(backend)
        return list(dict.fromkeys([*points, self.default(backend)])) if points else []

    def points(self, backend: str) -> list[Schedule]:
        """Schedules of a back end for this shape; what it refuses, and why, is told."""
        spec, found = self.spec, get_backend(backend)
        if not getattr(self, backend):
            return []
        try:
            space = found.space(spec, TARGET)
        except KvgenError as error:
            print(f"- {self.name}: {error}", flush=True)
            return []
        points = [schedules_of(words, found, spec, TARGET)[0] for words in getattr(self, backend)]
        for schedule in points:
            for problem in space.check(schedule)[:1]:
                print(f"- {self.name} {backend} {dict(schedule.launch)}: {problem}", flush=True)
        return [schedule for schedule in points if not space.check(schedule)]


SHORTER = "32x8192"


def _shorter(name: str, words: str, cuda: tuple[str, ...], work: str = SHORTER) -> Shape:
    """The case `name` at more and shorter sequences, on CUDA."""
    return Shape(f"{name}, 32x8192", words, work, cuda=cuda, tilelang=())


SHAPES = (
    Shape("plain", "k4v4"),
    Shape("page 128", "k4v4:page128", sibling="plain", cuda=PAGES),
    Shape("page 256", "k4v4:page256", sibling="plain", cuda=PAGES),
    Shape("groups of 64", "k4v4:kg64", cuda=FINE, tilelang=FINE_TILES),
    Shape("page 64", "k4v4:kg64:page64", sibling="groups of 64", cuda=FINE, tilelang=FINE_TILES),
    Shape("token", "k4v4:token"),
    Shape("token, page 64", "k4v4:token:page64", sibling="token", tilelang=FINE_TILES),
    Shape("token, page 32", "k4v4:token:page32", sibling="token", tilelang=("w8u1s2", "w8u1s2.cl")),
    Shape("token, page 16", "k4v4:token:page16", sibling="token"),
    Shape("as many bytes as 1x131072+63x1024", "k4v4", "8x24448"),
    Shape("ragged, one long", "k4v4", UNEQUAL, "as many bytes as 1x131072+63x1024", ("w8u4d1", "w4u4d1c2", "w8u2d2", "w4u2d2c2"), SPREAD),
    Shape("ragged, moderate", "k4v4", MODERATE, "plain", RAGGED, SPREAD),
    Shape("ragged, moderate, page 128", "k4v4:page128", MODERATE, "page 128", RAGGED, FINE_TILES),
    Shape("56 empty sequences", "k4v4", PLAIN + "+56x0", "plain", RAGGED, SPREAD),
    Shape("as many bytes as 2K to 16K", "k4v4", "32x9216", None, ("w8u4d1", "w8u1d2", "w4u4d1c2"), SPREAD),
    Shape("ragged, 2K to 16K", "k4v4", MIXED, "as many bytes as 2K to 16K", RAGGED, SPREAD),
    Shape("symmetric", "k4v4:sym", tilelang=()),
    Shape("softcap 50", "k4v4:cap50", sibling="plain"),
    Shape("as many bytes as a window of 4096", "k4v4", "8x4096"),
    Shape("window 4096", "k4v4:window4096", sibling="as many bytes as a window of 4096", cuda=(*WIDE, "w8u1d2", "w8u2d2", "w4u1d2c2")),
    Shape("bfloat16", "k4v4:bf16", sibling="plain"),
    Shape("q_len 4", "k4v4:q4", PLAIN + "q4", "plain", SIXTEEN_ROWS, COLUMN_TILES),
    Shape("group 16", "k4v4:h128/8", PLAIN, "plain", (*SIXTEEN_ROWS, "w8u1d2.cl2", "w8u2d2.cl2"), COLUMN_TILES),
    Shape("group 5", "k4v4:h40/8", PLAIN, "plain", ("w8u4d1.cl2", "w8u4d1", "w8u4d1.cl2.noexact"), (*TILES, "w8u2s2.cl.noexact")),
    Shape("head_dim 64", "k4v4:d64", cuda=("w8u4d2.cl2", "w8u4d2", "w8u4d1.cl2", "w12u4d1.cl2", "w4u4d2c2"), tilelang=FOURS),
    Shape("head_dim 96", "k4v4:d96", cuda=("w12u4d1.cl2", "w8u4d1", "w8u4d1.cl2"), tilelang=FOURS),
    Shape("head_dim 256", "k4v4:d256", cuda=("w8u2d1", "w8u2d1.cl2"), tilelang=("default", "w8u2s2", "w8u2s2.cl")),
    Shape("7 of 5120", "k4v4", "7x5120", cuda=("w8u4d1.cl2", "w8u4d1", "w8u2d2.cl2", "w8u1d2.cl2")),
    Shape("13 of 20000", "k4v4", "13x20000", cuda=("w8u2d2", "w8u4d1", "w4u4d1c2")),
    Shape("K 4 bits, V 2 bits", "k4v2", cuda=("w12u4d1.cl2", "w8u4d1", "w8u4d1.cl2"), tilelang=FOURS),
    Shape("K 8 bits, V 4 bits", "k8v4", cuda=BYTE, tilelang=("w8u2s2", "w8u2s2.cl", "w8u4s4.cl")),
    Shape("8 bits", "k8v8", cuda=BYTE, tilelang=FINE_TILES),
    Shape("8 bits, token", "k8v8:token", sibling="8 bits", cuda=BYTE, tilelang=FINE_TILES),
    Shape("ragged, moderate, 8 bits", "k8v8", MODERATE, "8 bits", ("w8u1d2", "w8u2d1", "w4u2d1c2"), FINE_TILES),
    Shape("2 bits", "k2v2", cuda=(*CRUMB, "w12u4d1.cl2.noexact", "w6u4d1c2.noexact"), tilelang=CRUMB_TILES),
    Shape("ragged, moderate, 2 bits", "k2v2", MODERATE, "2 bits", ("w12u4d1", "w6u4d1c2", "w4u4d1c2", "w4u4d1c3"), SPREAD),
    Shape(
        "as many bytes as 1x131072 of one KV head",
        "k4v4",
        "1x16384",
        cuda=("w8u4d1", "w8u1d2", "w8u1d2.cl8", "w8u4d1.cl8"),
        tilelang=SPREAD,
    ),
    Shape(
        "one KV head, one sequence",
        "k4v4:h8/1",
        "1x131072",
        "as many bytes as 1x131072 of one KV head",
        ("w8u4d1.two", "w8u1d2.cl8", "w8u1d4.cl8", "w8u4d1.cl8"),
        SPREAD,
    ),
    Shape("one KV head", "k4v4:h8/1", MANY, "plain"),
    Shape("one KV head, 8 bits", "k8v8:h8/1", MANY, "8 bits", BYTE, FINE_TILES),
    Shape("one KV head, 2 bits", "k2v2:h8/1", MANY, "2 bits", ("w8u4d1.cl2", "w8u4d1.cl2.noexact", "w12u4d1.cl2.noexact"), CRUMB_TILES),
    Shape("MHA", "k4v4:h32/32", SHORT, "plain", tilelang=SPREAD),
    Shape("MHA, 8 bits", "k8v8:h32/32", SHORT, "8 bits", BYTE, FINE_TILES),
    Shape("MHA, 2 bits", "k2v2:h32/32", SHORT, "2 bits", CRUMB, CRUMB_TILES),
    Shape("kitty", "k2v2:boost1/8:sink32:local128:page128", PLAIN, None, BOOSTED, tilelang=()),
    Shape("kitty, 32x8192", "k2v2:boost1/8:sink32:local128:page128", "32x8192", None, BOOSTED, tilelang=()),
    Shape("kitty pro", "k2v2:boost1/4:sink32:local128:page128", PLAIN, None, BOOSTED, tilelang=()),
    Shape("kitty pro, 32x8192", "k2v2:boost1/4:sink32:local128:page128", "32x8192", None, BOOSTED, tilelang=()),
    Shape("sink 32, local 128", "k4v4:sink32:local128", sibling="plain", tilelang=()),
    Shape("learned sinks", "k4v4:sinks", sibling="plain", tilelang=()),
    Shape("window 4096, 8 bits", "k8v8:window4096", cuda=BYTE, tilelang=()),
    Shape("V per channel, 8 bits", "k8v8:sym:vchannel", PLAIN, None, BYTE, tilelang=()),
    Shape("V per channel, 4 bits", "k4v4:vchannel", PLAIN, None, FINE, tilelang=()),
    Shape("head_dim 64, 64 heads, 1x16384", "k4v4:d64:h64/8", "1x16384", cuda=(*SHORT_HEADS, "w8u1d2", "w8u1d2.noexact"), tilelang=()),
    Shape("head_dim 64, 64 heads, 16x16384", "k4v4:d64:h64/8", "16x16384", cuda=SHORT_HEADS, tilelang=()),
    Shape("head_dim 64, 64 heads, 64x4096", "k4v4:d64:h64/8", "64x4096", cuda=SHORT_HEADS, tilelang=()),
    Shape("head_dim 80", "k4v4:d80", cuda=SHORT_HEADS, tilelang=()),
    Shape("head_dim 112", "k4v4:d112", cuda=("w8u4d1.cl2", "w8u4d1", "w8u2d2.cl2"), tilelang=()),
    Shape("head_dim 192", "k4v4:d192", cuda=("w8u1d2", "w8u2d1.cl2", "w8u2d1", "w8u1d2.cl2"), tilelang=()),
    Shape("group 32", "k4v4:h256/8", cuda=MANY_ROWS, tilelang=()),
    Shape("group 64", "k4v4:h512/8", cuda=MANY_ROWS, tilelang=()),
    Shape("q_len 8", "k4v4:q8", PLAIN + "q8", cuda=MANY_ROWS, tilelang=()),
    Shape("group 8, 2 bits", "k2v2:h64/8", cuda=(*CRUMB, "w12u4d1.cl2.noexact", "w6u4d1c2.noexact", "w8u4d1.cl2.noexact"), tilelang=()),
    Shape("groups of 32, 2 bits", "k2v2:kg32:vg32", cuda=("w8u4d1", "w8u4d1.cl2", "w12u2d1.cl2", "w12u4d1.cl2", "w4u1d4c3"), tilelang=()),
    Shape("page 64, 2 bits", "k2v2:kg64:page64", cuda=CRUMB_PAGES, tilelang=()),
    Shape("K 2 bits, V 4 bits", "k2v4", cuda=("w12u4d1.cl2", "w8u4d1", "w8u4d1.cl2"), tilelang=()),
    Shape("groups of 32", "k4v4:kg32:vg32", cuda=("w8u4d1.cl2", "w8u4d1", "w8u1d2.cl2"), tilelang=()),
    Shape("K groups of 16", "k4v4:kg16", cuda=("w8u4d1", "w8u4d1.cl2", "w8u2d2"), tilelang=()),
    Shape("K groups of 48", "k4v4:kg48", cuda=("w8u1d4", "w8u1d4.cl2", "w8u1d2"), tilelang=()),
    Shape("K groups of 96", "k4v4:kg96", cuda=("w8u1d4", "w8u1d4.cl2", "w8u1d2"), tilelang=()),
    Shape("head_dim 80, 2 bits", "k2v2:d80", cuda=("w12u4d1.cl2", "w8u4d1", "w8u4d1.cl2"), tilelang=()),
    Shape("boost at head_dim 80", "k2v2:d80:boost1/5", cuda=("w12u4d1.cl2", "w8u4d1", "w8u4d1.cl2"), tilelang=()),
    Shape(
        "group 7", "k4v4:h28/4", "16x32768", cuda=("w8u4d1", "w8u4d1.cl2", "w8u1d2.cl2", "w8u2d2.cl2", "w8u4d1.cl2.noexact"), tilelang=()
    ),
    Shape("16 bits", "k16v16", "8x8192", cuda=UNQUANTIZED, tilelang=()),
    Shape("16 bits, 8x32768", "k16v16", PLAIN, cuda=UNQUANTIZED, tilelang=()),
    _shorter("window 4096", "k4v4:window4096", MANY_HEADS),
    _shorter("window 4096, 8 bits", "k8v8:window4096", MANY_HEADS_BYTE),
    _shorter("V per channel, 8 bits", "k8v8:sym:vchannel", MANY_HEADS_BYTE),
    _shorter("V per channel, 4 bits", "k4v4:vchannel", MANY_HEADS),
    _shorter("head_dim 80", "k4v4:d80", (*MANY_HEADS, "w6u4d1c2")),
    _shorter("head_dim 112", "k4v4:d112", MANY_HEADS),
    _shorter("head_dim 192", "k4v4:d192", MANY_HEADS_BYTE),
    _shorter("group 16", "k4v4:h128/8", MANY_HEADS_ROWS),
    _shorter("group 32", "k4v4:h256/8", MANY_HEADS_ROWS),
    _shorter("group 64", "k4v4:h512/8", MANY_HEADS_ROWS),
    _shorter("q_len 4", "k4v4:q4", MANY_HEADS_ROWS, SHORTER + "q4"),
    _shorter("q_len 8", "k4v4:q8", MANY_HEADS_ROWS, SHORTER + "q8"),
    _shorter("group 8, 2 bits", "k2v2:h64/8", (*MANY_HEADS_CRUMB, "w6u4d1c2.noexact", "w4u4d1c3.noexact")),
    _shorter("groups of 32, 2 bits", "k2v2:kg32:vg32", MANY_HEADS_CRUMB),
    _shorter("page 64, 2 bits", "k2v2:kg64:page64", ("w8u2d2", "w12u2d2", "w6u2d2c2", "w4u2d2c2", "w4u2d2c3")),
    _shorter("K 4 bits, V 2 bits", "k4v2", (*MANY_HEADS, "w4u4d1c2.noexact")),
    _shorter("K 2 bits, V 4 bits", "k2v4", MANY_HEADS),
    _shorter("groups of 32", "k4v4:kg32:vg32", MANY_HEADS),
    _shorter("group 7", "k4v4:h28/4", (*MANY_HEADS, "w4u4d1c2.noexact"), "64x8192"),  # as many heads
    _shorter("16 bits", "k16v16", ("w4u1d2", "w6u1d2", "w8u1d1", "w2u1d2c2")),
)


def named(shape: Shape, word: str, shapes: Sequence[Shape]) -> bool:
    """Whether a word of the command line asks for a case: by its whole name, or by a part of it if no case has that name."""
    return shape.name == word if any(one.name == word for one in shapes) else word in shape.name
