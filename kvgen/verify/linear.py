"""Linear layers in fp64 over the weights that codes, scales and zeros mean, and the checks of a variant against it (docs/linear.md).

The reference never sees packed bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvgen.errors import CheckError
from kvgen.format.dtypes import torch_dtype
from kvgen.format.weights import Canonical
from kvgen.runtime.linear import LinearVariant
from kvgen.spec import LinearFormat
from kvgen.verify import Check, OperationCheck
from kvgen.verify.tolerance import relative_l2

CHUNK = 1 << 24
"""Elements of a weight in fp64 at once."""
ROUNDED = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-20}
"""What an output may be off by its own rounding: twice the half of its last bit."""
SUMMED = 2**-12
"""Of the sum of |x| |w|: what adding in other than fp64 may cost; docs/linear.md has the reasons for all of these."""
SCALED = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 0.0}
"""Of the root of the sum of (x w)^2: scaled weights that are rounded to 16 bits."""
FIXED = 2**-16
"""Of the largest |x| of a row and the root of the sum of w^2: a CPU multiplies whole numbers of 16 bits in place of x."""
SIGMAS = 6.0
"""Standard deviations of sums of rounding errors."""
OUTLIERS = 50.0
"""Of one channel in 128, over the others."""
GAPS = (0, 8, 40)
"""Elements between the rows of a matrix; 16 bytes are the least that kernels for GPUs take."""


def seeded_weight(linear: LinearFormat, device: torch.device | str, seed: int = 0) -> Canonical:
    """Canonical tensors with every code, zeros over their whole range, and scales of both signs over a factor of 8."""
    generator, params = torch.Generator(device=device).manual_seed(seed), (linear.n, linear.groups)
    codes = torch.randint(0, 1 << linear.bits, (linear.n, linear.k), dtype=torch.uint8, device=device, generator=generator)
    zeros = torch.randint(0, 1 << linear.bits, params, dtype=torch.uint8, device=device, generator=generator) if linear.zero else None
    scales = torch.rand(params, device=device, generator=generator).mul_(3).sub_(1).exp2_()
    scales *= torch.randint(0, 2, params, device=device, generator=generator) * 2 - 1
    return Canonical(codes, (scales / (linear.k**0.5 * (1 << linear.bits - 2))).to(torch_dtype(linear.dtype)), zeros)


def seeded_inputs(linear: LinearFormat, rows: int, device: torch.device | str, seed: int = 1) -> Tensor:
    """x [rows, k]: normal, with outlier channels; the second row is zeros."""
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(rows, linear.k, device=device, generator=generator)
    x[:, 5::128] *= OUTLIERS
    x[1:2] = 0.0
    return x.to(torch_dtype(linear.dtype))


class Expected:
    """Outputs of one call in fp64, [rows, features], and how far each may be off."""

    def __init__(self, linear: LinearFormat, weight: Canonical, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
        magnitude, spread = x.double().abs(), x.double().square()
        dtype, parts = linear.dtype, []
        for rows, w in meant(linear, weight):
            product = x.double() @ w.T
            slack = SUMMED * (magnitude @ w.abs().T) + SIGMAS * SCALED[dtype] * (spread @ w.square().T).sqrt()
            if x.device.type == "cpu":
                slack += SIGMAS * FIXED * magnitude.amax(1, keepdim=True) * w.norm(dim=1)
            if bias is not None:
                product = product + bias[rows].double()
            parts.append((product, slack))
        product, slack = (torch.cat(part, 1) for part in zip(*parts, strict=True))
        if linear.epilogue == "silu_mul":
            (gate, up), (gate_slack, up_slack) = product.chunk(2, 1), slack.chunk(2, 1)
            silu = gate * torch.sigmoid(gate)
            # the slope of silu is at most 1.1
            product, slack = silu * up, 1.1 * gate_slack * (up.abs() + up_slack) + silu.abs() * up_slack
        if residual is not None:
            product = product + residual.double()
        self.out, self.slack = product, slack + ROUNDED[dtype] * product.abs() + 1e-7

    def compare(self, where: str, got: Tensor, rows: slice, accuracy: dict[str, float]) -> None:
        """Raises CheckError that names the worst element of these rows where one is beyond its limit."""
        want, slack = self.out[rows], self.slack[rows]
        off = ((got.double() - want).abs() / slack).nan_to_num(torch.inf, torch.inf, torch.inf)
        if got.numel() and not bool((off <= 1.0).all()):
            row, column = divmod(int(off.argmax()), off.shape[1])
            told = f"{got[row, column].item():g}, and {want[row, column].item():g} is right within {slack[row, column].item():.2g}"
            raise CheckError(f"{where}: {int((off > 1).sum())} of {off.numel()}: output [{row}, {column}] is {told}")
        accuracy["relative_l2"] = max(accuracy.get("relative_l2", 0.0), relative_l2(got, want))


def meant(linear: LinearFormat, weight: Canonical) -> Iterator[tuple[slice, Tensor]]:
    """The matrix scale * (code - zero) in fp64, in ranges of rows."""
    step = max(1, CHUNK // linear.k)
    for first in range(0, linear.n, step):
        rows = slice(first, min(linear.n, first + step))
        codes = weight.codes[rows].double().view(rows.stop - first, linear.groups, -1)
        zeros = float(1 << linear.bits - 1) if weight.zeros is None else weight.zeros[rows].double().unsqueeze(2)
        yield rows, ((codes - zeros) * weight.scales[rows].double().unsqueeze(2)).flatten(1)


class LinearCheck(OperationCheck):
    """Calls of 0, 1, 2 … rows up to the most that a variant takes, in memory with gaps between rows; beyond y nothing is written.

    Outputs lie within larger memory of NaNs, and so does x; every call is repeated and must give the same bits.
    """

    variant: LinearVariant

    def prepare(self) -> None:
        """The weight, and the outputs of the most rows, of which other calls have the first."""
        self.case = Case.of(self.variant, self.device, self.variant.rows)

    def run(self) -> None:
        """Raises CheckError at the first wrong number."""
        most = self.variant.rows
        for number, rows in enumerate(
            sorted({*range(min(most, 3) + 1), 7, 8, 9, 15, 17, most // 2 + 1, most - 1, most} & {*range(most + 1)})
        ):
            self._call(rows, GAPS[number % len(GAPS)], GAPS[(number + 1) % len(GAPS)])
        if self.variant.module.expand is not None:
            self._expanded()
        if self.device == "cuda":
            self._replayed()

    def _call(self, rows: int, x_gap: int, out_gap: int) -> None:
        case, k, features = self.case, self.variant.spec.linear.k, self.variant.features

        def apart(matrix: Tensor, gap: int) -> Tensor:
            wide = torch.full((len(matrix) + 1, matrix.shape[1] + gap), torch.nan, dtype=matrix.dtype, device=matrix.device)
            return wide[: len(matrix), : matrix.shape[1]].copy_(matrix)

        x = apart(case.x[:rows], x_gap)
        residual = None if case.residual is None else apart(case.residual[:rows], x_gap)
        first: Tensor | None = None
        where = f"{rows} rows of {k} channels, {x_gap} elements between them"
        for _ in range(self.policy.repeats):
            memory = torch.full((rows + 2, features + out_gap), torch.nan, dtype=case.x.dtype, device=case.x.device)
            out = memory[1:-1, :features]
            self.variant(x, case.packed, case.bias, residual, out)
            case.expected.compare(where, out, slice(rows), self.accuracy)
            if not bool(memory[0].isnan().all() and memory[-1].isnan().all() and memory[:, features:].isnan().all()):
                raise CheckError(f"{where}: elements around out were written")
            if first is not None and not torch.equal(first, out):
                raise CheckError(f"{where}: the same inputs gave other bits")
            first = out

    def _expanded(self) -> None:
        """The weight in 16 bits: a product of a whole number and a scale has one rounding, so that no bit may differ."""
        linear, found = self.variant.spec.linear, self.variant.dequantize(self.case.packed)
        for rows, w in meant(linear, self.case.weight):
            wrong = found[rows] != w.to(found.dtype)
            if bool(wrong.any()):
                row, column = divmod(int(wrong.int().argmax()), linear.k)
                told = f"[{rows.start + row}, {column}] is {found[rows][row, column].item():g}, and {w[row, column].item():g} is right"
                raise CheckError(f"the weight in 16 bits: {told}")

    def _replayed(self) -> None:
        """Calls of a captured CUDA graph follow x."""
        case, rows = self.case, self.variant.rows
        x, out = torch.zeros_like(case.x), torch.empty((rows, self.variant.features), dtype=case.x.dtype, device=case.x.device)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            self.variant(x, case.packed, case.bias, case.residual, out)
        x.copy_(case.x)
        graph.replay()
        case.expected.compare("in a graph", out, slice(rows), self.accuracy)


class LinearWorkloadCheck(Check):
    """The call that is timed, over the inputs that it is timed with."""

    def __init__(self, variant: LinearVariant, name: str, case: Case, accuracy: dict[str, float] | None = None) -> None:
        self.variant, self.name, self.case = variant, name, case
        self.accuracy = {} if accuracy is None else accuracy

    def run(self) -> None:
        """Raises CheckError at the first wrong number."""
        case = self.case
        out = torch.full((len(case.x), self.variant.features), torch.nan, dtype=case.x.dtype, device=case.x.device)
        self.variant(case.x, case.packed, case.bias, case.residual, out)
        case.expected.compare(f"at {self.name}", out, slice(len(case.x)), self.accuracy)

    def again(self) -> None:
        """The same call after timing."""
        self.run()


class Case:
    """Seeded tensors of a call of some rows, and what it gives."""

    kept: tuple[tuple[str, str, int], Case] | None = None

    def __init__(self, variant: LinearVariant, device: torch.device | str, rows: int) -> None:
        linear = variant.spec.linear
        self.weight = seeded_weight(linear, device)
        self.x = seeded_inputs(linear, rows, device)
        self.bias = (
            seeded_inputs(linear, 1, device, 2)[0].repeat(-(-linear.n // linear.k))[: linear.n].contiguous() if linear.bias else None
        )
        self.residual: Tensor | None = None
        if linear.epilogue == "add":
            generator = torch.Generator(device=device).manual_seed(3)
            self.residual = torch.randn(rows, linear.n, device=device, generator=generator).to(self.x.dtype)
        self.expected = Expected(linear, self.weight, self.x, self.bias, self.residual)
        self.packed = variant.pack(*self.weight)

    @classmethod
    def of(cls, variant: LinearVariant, device: torch.device | str, rows: int) -> Case:
        """The case of a spec, which candidates of one search share."""
        key = (variant.spec.format_id, str(device), rows)
        if cls.kept is None or cls.kept[0] != key:
            cls.kept = key, cls(variant, device, rows)
        return cls.kept[1]
