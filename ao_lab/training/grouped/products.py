"""Grouped products of quantized operands: which function computes them. On a GPU none has the host read the groups' ends.

* ``scaled_grouped_mm``: `torch._scaled_grouped_mm` of e4m3 codes with one scale for each row, on Hopper and Blackwell.
* ``grouped_mm``: both operands dequantized to bfloat16, and `torch._grouped_mm`. Exact for scales that are powers of two.
* ``emulate``: both dequantized to float32, the products in float32: on CPUs one for each group, on GPUs (where the host does
  not know the groups) one over all rows for each expert, E times the work.

A product of rows a (T, C) with the experts' b (E, R, C) is (T, R), rows of no expert zero; a product of columns a (N, P) with b
(K, P) is (E, N, K), experts without rows zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ao_lab.gemm.choices import tuned
from ao_lab.gemm.codes import STEP
from ao_lab.training.casts import Matrix, quantized
from ao_lab.training.products import capability, is_one_scale, values, without_autocast
from fast.dispatch import has_kernels, is_operator
from reference import Quantized
from reference.training.recipe import Operand, Product

#: First numbers of compute capabilities whose tensor cores `torch._scaled_grouped_mm` knows.
SCALED = (9, 10)
#: What kernels of linear layers are called here; None: the first that serves.
KERNELS = {"auto": None, "scaled_mm": "scaled_grouped_mm", "dequantize": "grouped_mm", "emulate": "emulate"}
#: The first that `torch._grouped_mm` knows.
GROUPED = 80


@dataclass(frozen=True)
class Columns:
    """A matrix (C, P) for sums over tokens."""

    matrix: Matrix
    #: (E, C) float32: the scale of each row in each group, where there is one; it stands in the matrix's blocks too.
    table: torch.Tensor | None = None


@dataclass(frozen=True)
class Operands:
    """Operands as a function takes them: both in one dtype, with a scale for each row where they are codes."""

    a: torch.Tensor
    b: torch.Tensor
    scale_a: torch.Tensor | None = None
    scale_b: torch.Tensor | None = None


def rows_product(
    a: Matrix, b: Matrix, offsets: torch.Tensor, record: Product, dtype: torch.dtype, kernel: str = "auto",
    direction: str = "output",
) -> torch.Tensor:  # fmt: skip
    """a (T, C) times the transposed b of each row's expert, b (E * R, C): (T, R) in `dtype`. direction: for what is tuned.

    A dense b may be (E, R, C), along any axis.
    """
    experts = offsets.shape[0]
    if kernel == "auto":
        lengths = a.shape[0], rows_of_each(b, experts), a.shape[1]
        kernel = tuned_kernel(direction, lengths, record, dtype, offsets)
    name = select_rows(a, b, offsets, kernel)
    if name == "scaled_grouped_mm":
        left, right = codes(a), codes(b)
        operands = Operands(
            left, right.view(experts, -1, right.shape[1]), scale_of(a), scale_of(b).view(experts, -1)
        )
    else:
        left, right = (values(one, VALUES[name]) for one in (a, b))
        operands = Operands(left, right.reshape(experts, -1, right.shape[-1]))
    return in_dtype(run(name, operands, offsets, record.accumulation == "fast"), dtype)


def columns_product(
    a: Columns, b: Columns, ends: torch.Tensor, record: Product, dtype: torch.dtype, kernel: str = "auto",
    rows: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """For each group the product of its columns of a (N, P) and b (K, P), over them: (E, N, K) in `dtype`.

    rows: of the layer, for what is tuned; None: P.
    """
    if kernel == "auto":
        lengths = a.matrix.shape[0], b.matrix.shape[0], a.matrix.shape[1] if rows is None else rows
        kernel = tuned_kernel("weight_grad", lengths, record, dtype, ends)
    name = select_columns(a, b, ends, kernel)
    if name == "scaled_grouped_mm" and a.table is not None and b.table is not None:
        operands = Operands(codes(a.matrix), codes(b.matrix), a.table.reshape(-1), b.table.reshape(-1))
    else:
        operands = Operands(*(values(one.matrix, VALUES[name]) for one in (a, b)))
    return in_dtype(run(name, operands, ends, record.accumulation == "fast"), dtype)


def in_dtype(y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """y in a dtype, without a conversion that converts nothing.

    Dynamo of torch 2.11 takes the result of one for a tensor beside y, which an autograd function then gives two of: the
    layer's output, and another one that gets its gradient. The gradients of x and w would be zeros.
    """
    return y if y.dtype == dtype else y.to(dtype)


def tuned_kernel(
    direction: str, shape: tuple[Any, Any, Any], record: Product, dtype: torch.dtype, ends: torch.Tensor
) -> str:
    """The kernel that `ao_lab.tune` chose for a product; "auto" where it chose none, or the first that serves."""
    keys = operand_key(record.a), operand_key(record.b)
    name = tuned(direction, *keys, shape, dtype, ends.device, record.accumulation, ends.shape[0])
    return "dequantize" if name == "grouped_mm" else "auto"


def operand_key(operand: Operand) -> str:
    """The key of a recipe's scheme, whatever blocks groups make of it; "" for a dense operand."""
    return "" if operand.scheme is None else operand.scheme.key


def rows_of_each(b: Matrix, experts: int) -> int:
    """The rows of one expert's matrix in (E * R, C) or (E, R, C)."""
    shape = tuple(b.shape)
    return shape[1] if len(shape) == 3 else shape[0] // max(experts, 1)


def select_rows(a: Matrix, b: Matrix, offsets: torch.Tensor, kernel: str = "auto") -> str:
    """The function for rows and the experts' matrices."""
    both = isinstance(a, Quantized) and isinstance(b, Quantized)
    lengths = a.shape[1], rows_of_each(b, offsets.shape[0])
    scaled = both and all(is_e4m3(one) and is_one_scale(one.scheme) for one in (a, b))  # type: ignore[union-attr]
    return _select(offsets, kernel, scaled and not any(length % STEP for length in lengths))


def select_columns(a: Columns, b: Columns, ends: torch.Tensor, kernel: str = "auto") -> str:
    """The function for sums over tokens."""
    tables = a.table is not None and b.table is not None
    lengths = *a.matrix.shape, *b.matrix.shape
    scaled = tables and is_e4m3(a.matrix) and is_e4m3(b.matrix)
    return _select(ends, kernel, scaled and not any(length % STEP for length in lengths))


def _select(ends: torch.Tensor, kernel: str, scaled: bool) -> str:
    """The function of a kernel's name, for "auto" the first that serves. scaled: `scaled_grouped_mm` takes the operands."""
    name, capable = KERNELS[kernel], capability(ends.device)
    if name == "emulate" or capable < GROUPED:
        return "emulate"
    scaled = scaled and capable // 10 in SCALED
    if name == "scaled_grouped_mm" and not scaled:
        raise ValueError(
            "kernel 'scaled_mm' supports experts in e4m3 with a scale for each row, lengths multiples of 16, on Hopper "
            "and Blackwell; use 'auto'"
        )
    return "scaled_grouped_mm" if scaled and name != "grouped_mm" else "grouped_mm"


def is_e4m3(matrix: Matrix) -> bool:
    """Whether a matrix has codes that `torch._scaled_grouped_mm` takes."""
    return isinstance(matrix, Quantized) and matrix.scheme.element == "float8_e4m3fn"


def codes(matrix: Matrix) -> torch.Tensor:
    """Codes in torch's dtype of e4m3."""
    e4m3: torch.Tensor = quantized(matrix).codes.view(torch.float8_e4m3fn)
    return e4m3


def scale_of(matrix: Matrix) -> torch.Tensor:
    """(rows,) scales."""
    scales: torch.Tensor = quantized(matrix).scale.reshape(-1)
    return scales


def run(name: str, operands: Operands, ends: torch.Tensor, fast_sums: bool) -> torch.Tensor:
    """The product, through an operator where a tracer listens."""
    if is_operator(operands.a):
        y: torch.Tensor = _op(
            operands.a, operands.b, operands.scale_a, operands.scale_b, ends, name, fast_sums
        )
        return y
    return PRODUCTS[name](operands, ends, fast_sums)


@torch.library.custom_op("ao_lab::grouped_product", mutates_args=())
def _op(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor | None, scale_b: torch.Tensor | None, ends: torch.Tensor,
    name: str, fast_sums: bool,
) -> torch.Tensor:  # fmt: skip
    return PRODUCTS[name](Operands(a, b, scale_a, scale_b), ends, fast_sums)


@_op.register_fake
def _fake(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor | None, scale_b: torch.Tensor | None, ends: torch.Tensor,
    name: str, fast_sums: bool,
) -> torch.Tensor:  # fmt: skip
    dtype = torch.float32 if name == "emulate" else torch.bfloat16
    return ends.new_empty(_shape(a, b, ends), dtype=dtype)


def _shape(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> tuple[int, ...]:
    return (a.shape[0], b.shape[1]) if b.dim() == 3 else (ends.shape[0], a.shape[0], b.shape[0])


def _scaled_grouped_mm(operands: Operands, ends: torch.Tensor, fast_sums: bool) -> torch.Tensor:
    if operands.scale_a is None or operands.scale_b is None:
        raise ValueError("scaled_grouped_mm takes a scale for each row of both operands")
    if not operands.a.numel() or not operands.b.numel():
        return ends.new_zeros(_shape(operands.a, operands.b, ends), dtype=torch.bfloat16)
    y: torch.Tensor = torch._scaled_grouped_mm(
        operands.a,
        operands.b.transpose(-2, -1),
        operands.scale_a,
        operands.scale_b,
        offs=ends,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast_sums,
    )
    return _with_zeros(y, ends, rows=operands.b.dim() == 3)


def _grouped_mm(operands: Operands, ends: torch.Tensor, fast_sums: bool) -> torch.Tensor:
    if not operands.a.numel() or not operands.b.numel():
        return ends.new_zeros(_shape(operands.a, operands.b, ends), dtype=torch.bfloat16)
    y: torch.Tensor = torch._grouped_mm(operands.a, operands.b.transpose(-2, -1), offs=ends)
    return _with_zeros(y, ends, rows=operands.b.dim() == 3)


def _with_zeros(y: torch.Tensor, ends: torch.Tensor, *, rows: bool) -> torch.Tensor:
    """y with zeros where torch's grouped products write nothing."""
    if has_kernels(y):
        from fast.kernels import grouped

        y = y.contiguous()
        (grouped.zero_tail_ if rows else grouped.zero_empty_)(y, ends)
        return y
    if rows:
        kept = torch.arange(y.shape[0], device=y.device)[:, None] < ends[-1]
    else:
        kept = (torch.diff(ends, prepend=ends.new_zeros(1)) > 0)[:, None, None]
    return torch.where(kept, y, y.new_zeros(()))


def _emulated(operands: Operands, ends: torch.Tensor, fast_sums: bool) -> torch.Tensor:
    a, b = operands.a, operands.b
    y = a.new_zeros(_shape(a, b, ends))
    with without_autocast(ends.device):
        if ends.device.type != "cpu":
            return _emulated_unread(operands, ends, y)
        start = 0
        for expert, end in enumerate(ends.tolist()):
            if end > start and b.dim() == 3:
                y[start:end] = a[start:end] @ b[expert].t()
            elif end > start:
                y[expert] = a[:, start:end] @ b[:, start:end].t()
            start = end
    return y


def _emulated_unread(operands: Operands, ends: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """By products over all rows, chosen afterwards, or of rows that are zeros elsewhere."""
    rows = operands.b.dim() == 3
    places = torch.arange(operands.a.shape[0 if rows else 1], device=ends.device, dtype=ends.dtype)
    owners, nothing = torch.searchsorted(ends, places, right=True), y.new_zeros(())
    for expert in range(ends.shape[0]):
        mine = owners == expert
        if rows:
            y = torch.where(mine[:, None], operands.a @ operands.b[expert].t(), y)
        else:
            a, b = (torch.where(mine, one, nothing) for one in (operands.a, operands.b))
            y[expert] = a @ b.t()
    return y


Function = Callable[[Operands, torch.Tensor, bool], torch.Tensor]
PRODUCTS: dict[str, Function] = {
    "scaled_grouped_mm": _scaled_grouped_mm,
    "grouped_mm": _grouped_mm,
    "emulate": _emulated,
}
#: What operands that are no codes are dequantized to.
VALUES = {"grouped_mm": torch.bfloat16, "emulate": torch.float32}
