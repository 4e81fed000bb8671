"""Every supported format against the fp64 reference: ragged lengths, poisoned memory, flushes, LSE, scores up to 60."""

from __future__ import annotations

import pytest

from tests.support.kernel_cases import KernelCase, verify

FORMATS = (
    "k4v4", "k8v8", "k2v2", "k8v4", "k4v2", "k2v8", "k16v16", "k16v4", "k4v16", "k8v2:kg64:vg32",
    "k4v4:kg32:vg32", "k2v2:kg64:vg64", "k8v8:kg32", "k2v2:kg32:vg32", "k4v4:sym", "k8v8:sym", "k2v2:sym:vg64",
    "k4v4:token", "k8v8:token", "k2v2:token", "k4v4:token:kg32:vg32", "k8v8:token:sym", "k2v2:token:kg64", "k16v8:token",
    "k8v8:vchannel:sym", "k4v4:vchannel", "k2v2:vchannel:kg64:vg64", "k4v2:vchannel:vg32:token", "k2v2:kg16:vchannel:vg16", "k4v4:kg16",
    "k16v4:vchannel:vg256", "k8v4:kg512:vchannel:vg512:sym",
    "ke4m3ve4m3:token", "ke4m3ve4m3", "ke5m2ve5m2:token:bf16", "ke5m2v4:kg32", "k4ve4m3:token", "ke4m3ve5m2:vchannel:kg64:vg32:page64",
    "ke4m3ve4m3:token:kg16:vg80:d80:h5/1", "ke4m3ve4m3:h32/2:q4:sinks:bf16", "ke4m3v2:token:page16:q3",
    "k4v4:token:arrival:bf16", "k4v4:token:krot128:vrot64:arrival",
    "k2v8:token:page32:q4:kg32:vg32:arrival", "k16v16:window300:sinks:page64:arrival", "ke4m3v16:token:arrival:d64",
    "k8v8:kscale-channel:vscale-channel:page16:arrival", "k4v4:kscale-channel:vscale-head:arrival:q4:d64",
    "ke4m3ve5m2:kscale-tensor:vscale-channel:bf16:page64:arrival", "k8v4:kscale-head:krot16:d80:arrival",
    "ke4m3ve4m3:token:sink32:local128:rollback8:d64", "ke4m3ve4m3:window300:cap20:kg32", "ke5m2v16:d256",
    "knvfp4vnvfp4", "kmxfp4vmxfp4:bf16", "knvfp4vmxfp4:page16:d64:q3", "kmxfp4v4", "ke4m3vnvfp4:h32/2:d80", "k4vmxfp4:kg32:h5/1:d96",
    "knvfp4vmxfp4:sink32:local128:rollback8:q4", "knvfp4vnvfp4:kscale-tensor:vscale-tensor",
    "knvfp4vnvfp4:kscale-head:vscale-tensor:bf16:h32/2:d80:sink32:local128", "knvfp4v8:kscale-head:vscale-channel:page16:q4:arrival",
    "kmxfp4vnvfp4:window300:cap20:d256",
)  # fmt: skip
SHAPES = (
    "k4v4:h32/32", "k8v8:h8/1", "k2v2:h6/2", "k4v4:h5/1", "k4v4:h12/2", "k8v8:h7/1", "k4v4:h16/1", "k2v2:h32/2", "k4v4:h15/1:token",
    "k4v4:d64", "k8v8:d96", "k2v2:d256", "k4v4:d256", "k8v8:d64:token", "k4v4:d96:token:h5/1", "k2v2:d64:kg32:vg32", "k4v4:d32",
    "k4v4:d160",
    "k4v4:d80:kg32", "k8v8:token:d80:kg16:vg16:q2", "k2v4:d112:page64:kg32", "k16v16:d112:bf16", "k4v8:d144:vg48:h6/2", "k4v4:d16:h2/1",
    "k8v8:kscale-head:vscale-head", "k4v4:kscale-channel:vscale-channel:krot64:h16/2", "ke4m3ve4m3:kscale-tensor:vscale-tensor:bf16",
    "k8v4:kscale-channel:page128:q4", "ke4m3v4:kscale-channel:vscale-head:h8/1:sink32:local128", "k4v8:token:vscale-channel:q8:h16/2",
    "k4v4:d192", "k8v8:d240:token:sym:h5/1",
    "k4v4:d512:bf16:h16/2", "k8v8:d512:token:h8/1", "k2v2:d512:h8/2:page128", "k4v4:d512:vchannel:q4:h8/2", "k8v4:d384:sink32:h16/2",
    "k4v4:h32/1", "k4v4:q8", "k2v2:h64/2:kg64:page128", "k4v4:h128/1:token", "k8v4:q8:h32/2:d80",
    "k4v8:token:q5:h20/1:d144:page32:window300:cap20",
    "k16v16:q8:h12/1:d64:bf16",
    "k4v4:vchannel:d96:h7/1:kg32", "k2v2:vchannel:d256:bf16", "k8v8:vchannel:sym:h32/2", "k4v8:kg16:h8/8:vchannel:vg64",
    "k4v4:vchannel:q4:page128:vg64", "k8v8:vchannel:sym:d80", "k4v4:vchannel:d112:h32/1:vg32",
    "k4v4:bf16", "k8v8:bf16", "k2v2:bf16", "k16v16:bf16", "k4v4:bf16:token:kg32:vg32", "k2v2:bf16:d64:h6/2",
    "k4v4:q4", "k2v2:q4:h8/1", "k8v8:q2:h32/32", "k4v4:q8:h8/4", "k4v4:q3:token", "k8v8:q8:h4/4:bf16", "k4v4:q4:h12/2:d64",
    "k4v4:page128", "k4v4:page256", "k8v8:page64:kg64", "k2v2:page64:token", "k4v4:page32:token", "k8v8:page256:h8/1",
    "k4v4:q4:page64:kg32", "k4v4:token:page16", "k8v8:token:page16:bf16", "k4v4:token:page48:d96:h5/1", "k16v16:page16:h8/1",
    "k4v4:q4:page128:window200:cap30",
    "k2v2:boost1/8:page128", "k2v2:boost1/4", "k2v2:boost1/2range:h6/2", "k2v2:boost1/4static:bf16:d64", "k2v4:boost1/2:d96:kg64:h16/2",
    "k2v2:boost1/8:d256:q4", "k2v8:boost1/4:kg32:page64:q3",
    "k2v2:d80", "k2v2:d80:boost1/5", "k2v2:d112:boost3/7:h32/4", "k4v2:d48:vg16", "k2v2:vchannel:d80:bf16", "k8v2:d16:token:q4",
    "k4v4:kg48", "k2v2:kg48:vchannel:vg48", "k8v8:kg80:page160:q2", "k4v4:kg96:vchannel:vg96", "k2v4:kg112:h16/2:bf16", "k4v4:kg496:h8/1",
    "k4v4:token:bf16:krot128:vrot128", "k4v4:token:bf16:krot16u", "k4v4:krot64:vrot64u:page128:q4",
    "k2v2:vchannel:kg64:vg64:d80:krot16:vrot16",
    "k8v4:d256:token:krot256:vrot256:h16/1:q8", "k4v4:token:page16:d64:krot64:vrot64:sink40:local33:rollback9:q3:sinks",
    "k4v2:token:page16:q4:kg32:vg32:h12/2", "k8v4:token:page16:d64:sym", "k4v2:token:page16:d32:sym",
)  # fmt: skip


SCHEDULES = (
    "w8u4d1", "w8u2d2", "w8u2d1c2", "w8u4d2", "w4u2d2c2", "w16u2d1", "w8u1d4", "n256.w8u4d1", "w8u4d1.bulk", "w8u4d1.tile", "w8u2d2.bulk",
    "w8u2d2.tile", "w8u4d1.cl2", "w8u4d1.cl4", "w8u4d1.cl8", "w4u4d1c2",
)  # fmt: skip


WIDE = tuple(schedule for schedule in SCHEDULES if schedule not in ("w8u4d2", "w8u2d1c2", "w16u2d1"))
"""Those whose rings leave room for the merge of sixteen columns."""
EIGHT = ("w8u1d2", "w8u2d1", "w8u1d2.bulk", "w8u2d1.tile", "w8u1d2.cl8", "w4u2d1c2")
GATHERED = ("w8u1d4", "w8u4d1", "w8u2d2.bulk", "w8u4d1.bulk", "w8u2d2.tile", "w8u4d1.cl4")
"""Units of one page, of two, and of more."""
BOOSTED = ("w6u4d1c2", "w12u4d1.cl2", "w8u2d2", "w8u4d1.bulk", "w8u2d2.tile", "w8u4d1.tile")
VARIED = [
    *[KernelCase("k2v2", schedule) for schedule in SCHEDULES],
    *[KernelCase("k4v4:h16/2", schedule) for schedule in WIDE],
    *[KernelCase(words, schedule) for words in ("k8v8:h16/2", "k8v8:h8/8:kg64") for schedule in EIGHT],
    KernelCase("k4v4:h16/2", "w8u1d2.noexact"),
    *[KernelCase("k4v4:token:bf16:krot128:vrot128", schedule) for schedule in ("w8u4d1.cl8", "w4u2d2c2", "w8u4d1.bulk", "n256.w8u4d1")],
    *[KernelCase(words, schedule) for words in ("k4v4:h64/2", "k4v4:d80:q8") for schedule in ("w8u2d1", "w8u2d1.cl8", "w8u2d1.bulk")],
    *[KernelCase("k4v4:vchannel", schedule) for schedule in ("w8u1d4", "w8u2d2.bulk", "w8u4d1.bulk", "w8u4d1.tile", "w8u4d1.cl4")],
    *[KernelCase("k4v4:kg32:vchannel:vg32", schedule) for schedule in ("w8u4d1.bulk", "w8u4d1.tile", "w8u2d2")],
    *[KernelCase("k8v8:vchannel:sym:page256", schedule) for schedule in ("w8u2d1", "w8u1d2.bulk", "n256.w8u2d1.tile")],
    *[KernelCase("k4v4:kg48:vchannel:vg48", f"n96.w8u1d2{copy}") for copy in ("", ".bulk", ".tile")],
    *[KernelCase(words, "w8u4d1.exact") for words in ("k2v2", "k4v2", "k2v2:kg32:vg32", "k2v2:h64/8", "k2v2:boost1/8:page128")],
    KernelCase("k4v4:kg64:d48", "n64.w8u2d2.tile"),
    KernelCase("k4v4:page128", "w8u4d1.bulk.cl2"),
    KernelCase("k4v4:kg64:page64", "w8u2d2.bulk.cl2"),
    *[KernelCase("k2v2:boost1/4", schedule) for schedule in BOOSTED],
    KernelCase("k2v2:boost1/4:kg64", "n128.w8u2d2.bulk"),
    *[KernelCase(f"k4v4:token:page{page}", schedule) for page in (16, 32, 64) for schedule in GATHERED],
]


OLDER = tuple(
    KernelCase(words, schedule, target)
    for target in ("sm80", "sm89")
    for words, schedule in (
        ("k4v4", "default"), ("k8v8", "default"), ("k2v2", "default"), ("k4v4:token:kg32:vg32", "default"), ("k2v2", "w8u2d1"),
            ("k4v4", "w8u2d1"), ("k4v4:q4:page128:d64", "w8u2d1"), ("k4v4:q8:d80", "default"),
        ("k2v2:boost1/8:page128", "default"), ("k4v4:bf16:q4:page128", "default"), ("k8v8:d64:h5/1", "default"), ("k4v4:d256", "default"),
        ("k8v8:vchannel:sym", "default"), ("k2v2:kg16:vchannel:vg16", "default"), ("k16v16:d256", "default"),
        ("ke4m3ve4m3:token", "default"), ("ke4m3ve5m2:vchannel:kg32", "default"), ("knvfp4vmxfp4", "default"),
        ("k8v8:kscale-channel:vscale-channel", "default"), ("ke4m3ve4m3:kscale-tensor:vscale-head", "default"),
        ("ke4m3v4:kscale-channel:vscale-tensor:page16:arrival", "default"), ("knvfp4vnvfp4:kscale-tensor:vscale-head", "default"),
        ("k4v4:d512:h8/2", "default"), ("k8v8:d512:token:h8/2", "default"),
    )
)  # fmt: skip


UNQUANTIZED = (
    KernelCase("k2v2:sink32:local128:page128"),
    KernelCase("k2v2:sink32:local128:rollback8:q4:h8/1", "w8u4d1"),
    KernelCase("k4v4:sink21:local5:rollback8:q4:kg32", "w8u1d2.bulk"),
    KernelCase("k8v8:sink200:sinks:h12/2", "w8u1d2.tile"),
    KernelCase("k4v8:token:page16:d64:sink40:rollback30:q3:sinks", "w8u2d2.bulk"),
    KernelCase("k4v4:window200:local70:page64:kg64:sinks"),
    KernelCase("k4v4:h16/2:sinks:cap30", "w8u4d1.cl8"),
    KernelCase("k16v4:bf16:sink3:rollback2:d64", "w4u4d1c2"),
    KernelCase("k2v2:sink32:local128:page128:q4:sinks", target="sm80"),
)
"""Sink, local and rollback tokens, and learned sinks."""
CASES = [*[KernelCase(words) for words in FORMATS + SHAPES], *VARIED, *OLDER, *UNQUANTIZED]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_formats_and_schedules_agree_with_the_reference(case: KernelCase) -> None:
    """Those for older targets through their PTX."""
    verify(case)
