"""The linear layers of several experts in autograd, their three products on quantized operands; see `training.autograd`.

Operands are quantized by `fast`; `reference.training.grouped.grouped_operands` says the bits.

A scale of one group reaches over blocks that a kernel sees apart. Scales rise with the maximum that they are made of, so the
scale of many blocks is the largest of theirs: blocks get their scales, those of a group are replaced by their largest, and
codes are made with given scales. Nothing of it depends on how many rows a group has, so the host need not know.
Where the rows of each expert stand (`Layout`) follows from offsets that stay on their device, every buffer's size from T and E.

Weights of experts are operands of which every expert is a matrix of its own, along either axis. A weight that lies along the
other axis (the transposed view of a contiguous batch) is read by kernels that turn tiles
(`fast.kernels.rowwise_colwise.host.batch_columns`); where none serves, of a copy: the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import fast
from ao_lab.training.autograd import is_drawn, new_seed, tuned_recipe
from ao_lab.training.casts import Matrix, joined, of_record, parts, quantize_one, quantized, words
from ao_lab.training.grouped.products import Columns, columns_product, rows_product
from fast.dispatch import has_kernels, is_operator
from fast.layers.gather import gather_transposed
from fast.layers.hadamard import hadamard
from fast.ops import derived, once_differentiable
from fast.quantize.quantize import fresh_codes, fresh_scales
from fast.quantize.two_levels import scales_of_two_levels, without_outer
from reference import Quantized, Scheme
from reference.schemes.schemes import record_of
from reference.training.grouped import group_step, padded_rows
from reference.training.recipe import Operand, Recipe

Grad = torch.Tensor | None
#: Streams of random bits: the place of an operand among the six.
X, W, G, W_T, G_T, X_T = range(6)


class GroupedLinear(torch.autograd.Function):
    """y[t] = x[t] @ w[expert of t].T for x (T, K) sorted by expert and w (E, N, K)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        offsets: torch.Tensor,
        recipe: Recipe,
        kernel: str,
        kept: bool = True,
        evaluated: bool = False,
    ) -> torch.Tensor:
        """The output; x's copy for the weight gradient is made where that is wanted. One seed serves forward and backward.

        kept, evaluated: as of `TrainingLinear.forward`.
        """
        wants = ctx.needs_input_grad
        layout = layout_of(offsets, x.shape[0], group_step(recipe))
        seed = new_seed(recipe) if is_drawn(recipe, wants, kept, evaluated) else None
        rows = rows_operand(x, recipe.output.a, layout, seed, X)
        columns = Columns(x[:0])
        if kept and wants[1]:
            columns = token_columns(x, rows, recipe.weight_grad.b, recipe.output.a, layout, seed, X_T)
        tensors, ctx.settings = parts(columns.matrix)
        ctx.save_for_backward(
            w, layout.offsets, layout.ends, layout.source, layout.owners, columns.table, *tensors
        )
        ctx.recipe, ctx.dtype, ctx.kernel, ctx.rows, ctx.seed = recipe, x.dtype, kernel, x.shape[0], seed
        b = weight_operand(w, recipe.output.b, seed, W)
        return rows_product(rows, b, offsets, recipe.output, x.dtype, kernel)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> tuple[Grad, ...]:
        """Gradients of x and w, which have none of their own."""
        w, offsets, ends, source, owners, table, *tensors = ctx.saved_tensors
        recipe, seed = ctx.recipe, ctx.seed
        layout = Layout(offsets, ends, ctx.rows, group_step(recipe), source, owners)
        g = g.contiguous()
        dx = dw = None
        if ctx.needs_input_grad[0]:
            a = rows_operand(g, recipe.input_grad.a, layout, seed, G)
            b = weight_columns(w, recipe.input_grad.b, recipe.output.b, seed, W_T)
            dx = rows_product(a, b, offsets, recipe.input_grad, ctx.dtype, ctx.kernel, "input_grad")
        if ctx.needs_input_grad[1]:
            left = columns_operand(g, recipe.weight_grad.a, layout, seed, G_T)
            right = Columns(joined(list(tensors), ctx.settings), table)
            dw = columns_product(left, right, ends, recipe.weight_grad, w.dtype, ctx.kernel, ctx.rows)
        return dx, dw, None, None, None, None, None


#: Told of x, w, offsets, recipe, kernel and the output of each call, while `ao_lab.tune` records.
LISTENERS: list[Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Recipe, str, torch.Tensor], None]] = []


def grouped_linear(
    x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, recipe: Recipe, kernel: str = "auto", *, tuned: bool = True,
    evaluated: bool = False,
) -> torch.Tensor:  # fmt: skip
    """x (T, K), sorted by expert, times the transposed weight of each row's expert, w (E, N, K): (T, N) in autograd.

    Operands and their bits as in `reference.grouped_linear`. offsets: (E,) int32 or int64 on x's device, the row after
    each expert's, which do not fall and end within T; on a GPU the host reads none of them, so wrong ones raise nothing. Rows
    from the last offset on are of no expert: zeros, with gradients of zeros, whatever they hold. kernel: of the
    products, as for linear layers: "auto", "scaled_mm", "dequantize" or "emulate". tuned, evaluated: as for linear layers.
    Raises ValueError for shapes that do not fit, TypeError for dtypes that do not.
    """
    _check(x, w, offsets)
    low = tuned_recipe(recipe, x, w) if tuned and kernel == "auto" else recipe
    kept = torch.is_grad_enabled()
    y: torch.Tensor = GroupedLinear.apply(  # type: ignore[no-untyped-call]
        x.contiguous(), w, offsets.to(torch.int32), low, kernel, kept, evaluated
    )
    for listener in LISTENERS:
        listener(x, w, offsets, recipe, kernel, y)
    return y


def _check(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> None:
    if x.dim() != 2 or w.dim() != 3 or x.shape[1] != w.shape[2] or offsets.shape != w.shape[:1]:
        raise ValueError(
            f"grouped_linear takes x (T, K), w (E, N, K) and offsets (E,), got shapes {tuple(x.shape)}, {tuple(w.shape)} and "
            f"{tuple(offsets.shape)}"
        )
    if x.dtype != w.dtype or offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"grouped_linear takes x and w of one dtype and int32 offsets, got {x.dtype}, {w.dtype} and {offsets.dtype}; cast "
            f"one, or use torch.autocast"
        )


#: Places that have one owner: every step beyond 1 is a multiple of it, in recipes.
GRAIN = 16


@dataclass(frozen=True)
class Layout:
    """T rows sorted by expert; for sums over tokens P rows, where each group is followed by zeros to a multiple of `step`."""

    #: (E,) int32: the row after each group, among T rows and among P.
    offsets: torch.Tensor
    ends: torch.Tensor
    rows: int
    step: int
    #: (P,) int32: the row at each of P places, -1 for zeros. None where step is 1: rows stay where they are.
    source: torch.Tensor | None
    #: (P / 16,) int32: the group of each 16 places, E beyond the last. None where step is no multiple of 16.
    owners: torch.Tensor | None = None

    @property
    def experts(self) -> int:
        """How many experts."""
        return int(self.offsets.shape[0])

    @property
    def places(self) -> int:
        """P."""
        return padded_rows(self.rows, self.experts, self.step)

    def of_rows(self) -> torch.Tensor:
        """(T,) int64: the expert of each row, E for rows of none."""
        return _owners(self.offsets, self.rows, 1)

    def of_chunks(self) -> torch.Tensor:
        """(P / step,) int64: the expert of each `step` of P rows, E beyond the last."""
        return _owners(self.ends, self.places, self.step)

    def columns(self, x: torch.Tensor) -> torch.Tensor:
        """x (T, C) as (C, P): groups and zeros after each. A view where nothing is padded."""
        return x.t() if self.source is None else gather_transposed(x, self.source)


def layout_of(offsets: torch.Tensor, rows: int, step: int) -> Layout:
    """The layout of `rows` rows in groups that end at `offsets` (E,) int32."""
    if step == 1:
        return Layout(offsets, offsets, rows, step, None)
    if step % GRAIN:
        ends, source = _tables(offsets, rows, step)
        return Layout(offsets, ends, rows, step, source)
    traced = is_operator(offsets)
    ends, source, owners = (_layout_op if traced else _layout)(offsets, rows, step)
    return Layout(offsets, ends, rows, step, source, owners)


def _layout(offsets: torch.Tensor, rows: int, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ends, source and owners: by a kernel, or by torch operations."""
    places = padded_rows(rows, offsets.shape[0], step)
    if has_kernels(offsets) and places:
        from fast.kernels import grouped as layout

        if offsets.shape[0] <= layout.MOST_EXPERTS:
            return layout.group_layout(offsets.contiguous(), rows, places, step)
    ends, source = _tables(offsets, rows, step)
    return ends, source, _owners(ends, places, GRAIN).to(torch.int32)


@torch.library.custom_op("ao_lab::group_layout", mutates_args=())
def _layout_op(offsets: torch.Tensor, rows: int, step: int) -> list[torch.Tensor]:
    return list(_layout(offsets, rows, step))


@_layout_op.register_fake
def _layout_fake(offsets: torch.Tensor, rows: int, step: int) -> list[torch.Tensor]:
    places = padded_rows(rows, offsets.shape[0], step)
    sizes = offsets.shape[0], places, places // GRAIN
    return [offsets.new_empty((size,), dtype=torch.int32) for size in sizes]


def _tables(offsets: torch.Tensor, rows: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ends and source, by torch operations."""
    starts = torch.cat([offsets.new_zeros(1), offsets[:-1]])
    filled = (offsets - starts + (step - 1)) // step * step
    ends = torch.cumsum(filled, 0, dtype=torch.int32)
    place = torch.arange(padded_rows(rows, offsets.shape[0], step), device=offsets.device, dtype=torch.int32)
    owner = torch.searchsorted(ends, place, right=True)
    inside = owner < offsets.shape[0]
    owner = owner.clamp(max=offsets.shape[0] - 1)
    row = place - (ends - filled)[owner] + starts[owner]
    return ends, torch.where(inside & (row < offsets[owner]), row, -1)


def _owners(ends: torch.Tensor, rows: int, step: int) -> torch.Tensor:
    places = torch.arange(0, rows, step, device=ends.device, dtype=torch.int32)
    return torch.searchsorted(ends, places, right=True)


def fine_scales(
    x: torch.Tensor, scheme: Scheme, block: int, shared: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[Scheme, torch.Tensor]:
    """The scheme in blocks that lie within groups, and scales that `shared` has made the groups' own."""
    if scheme.outer is not None:
        return without_outer(scheme.key), scales_of_two_levels(x, scheme, shared)
    fine = in_blocks(scheme.key, block)
    scales: torch.Tensor = fast.choose_scales(x, fine).scale
    return fine, shared(scales)


@derived
def in_blocks(key: str, block: int) -> Scheme:
    """The record of a key in blocks of another length."""
    scheme = record_of(key)
    if scheme.scale.block == block:
        return scheme
    return replace(scheme, name=f"{scheme.name}_in_{block}", scale=replace(scheme.scale, block=block))


def weight_operand(w: torch.Tensor, operand: Operand, seed: int | None = None, stream: int = 0) -> Matrix:
    """w (E, R, C) along C as (E * R, C): every expert as a matrix of its own.

    A dense one whose experts do not lie one after the other stays (E, R, C).
    """
    if operand.scheme is None and not operand.hadamard and not w.is_contiguous():
        return w
    if _turns(w, operand):
        return _of_turned(w.transpose(1, 2), operand)
    return _of_rows(w, operand, seed, stream)


def weight_columns(
    w: torch.Tensor, operand: Operand, forward: Operand, seed: int | None = None, stream: int = 0
) -> Matrix:
    """w (E, N, K) as (E * K, N) along N, of what the forward operand stands for where the recipe says so."""
    if operand.source == "output" and forward.scheme is not None:
        w = fast.dequantize(quantized(weight_operand(w, forward)), w.dtype).reshape(w.shape)
    return weight_operand(w.transpose(1, 2), operand, seed, stream)


def _of_rows(w: torch.Tensor, operand: Operand, seed: int | None, stream: int) -> Matrix:
    """Of the experts' rows one after the other, copied where they do not lie so."""
    experts, rows, length = w.shape
    flat, scheme = w.reshape(experts * rows, length), operand.scheme
    if scheme is None or (scheme.outer is None and scheme.scale.block != "tensor"):
        return quantize_one(flat, operand, seed, stream)
    flat = hadamard(flat, operand.hadamard) if operand.hadamard else flat

    def shared(block_scales: torch.Tensor) -> torch.Tensor:
        largest = block_scales.reshape(experts, -1).amax(1, keepdim=True)
        return (
            largest.expand(experts, block_scales.numel() // experts).reshape(block_scales.shape).contiguous()
        )

    fine, scales = fine_scales(flat, scheme, -1, shared)
    q = fast.quantize(flat, fine, scales=scales, random_bits=words(flat, operand, seed, stream))
    return of_record(q, fine)


def _turns(w: torch.Tensor, operand: Operand) -> bool:
    """Whether w is the transposed view of a contiguous batch, and nothing is mixed or drawn."""
    scheme = operand.scheme
    if scheme is None or operand.hadamard or operand.is_stochastic or scheme.outer is not None:
        return False
    return scheme.zero is None and not w.is_contiguous() and w.transpose(1, 2).is_contiguous()


def _of_turned(x: torch.Tensor, operand: Operand) -> Matrix:
    """The columns of each matrix of a contiguous batch x (E, R, C), along R."""
    scheme = operand.scheme
    if scheme is None:
        raise ValueError("a scheme is missing")
    codes, scale = _weight_columns_op(x, scheme.key) if is_operator(x) else _weight_columns(x, scheme)
    return Quantized(codes, scale, None, None, tuple(codes.shape), 1, _own_scales(scheme))


def _own_scales(scheme: Scheme) -> Scheme:
    """The scheme with a scale for each row where it has one for the tensor."""
    return in_blocks(scheme.key, -1) if scheme.scale.block == "tensor" else scheme


def _weight_columns(x: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales, by kernels or of a copy."""
    x = x.detach()
    if has_kernels(x):
        from fast.kernels.rowwise_colwise.host import batch_columns

        copies = batch_columns(x, scheme)
        if copies is not None:
            return copies
    matrix = quantized(_of_rows(x.transpose(1, 2), Operand(scheme=scheme), None, 0))
    return matrix.codes, matrix.scale


@torch.library.custom_op("ao_lab::batch_columns", mutates_args=())
def _weight_columns_op(x: torch.Tensor, scheme: str) -> list[torch.Tensor]:
    return list(_weight_columns(x, record_of(scheme)))


@_weight_columns_op.register_fake
def _weight_columns_fake(x: torch.Tensor, scheme: str) -> list[torch.Tensor]:
    record, shape = record_of(scheme), (x.shape[0] * x.shape[2], x.shape[1])
    own = _own_scales(record)
    return [fresh_codes(x, shape, own, False), *fresh_scales(x, own, -1, False, shape)]


#: Blocks of schemes with one scale for the rows of a group, for each column or for all.
ONE = ("tensor", -1)


def rows_operand(
    x: torch.Tensor, operand: Operand, layout: Layout, seed: int | None = None, stream: int = 0
) -> Matrix:
    """x (T, C) along C: one scale for each group where the scheme has one for the tensor."""
    scheme = operand.scheme
    if scheme is None or not _reaches_over_rows(scheme):
        return quantize_one(x, operand, seed, stream)
    _refuse_square(scheme)
    x = hadamard(x, operand.hadamard) if operand.hadamard else x
    owners = layout.of_rows()
    fine, scales = fine_scales(
        x, scheme, -1, lambda block_scales: _largest(block_scales, owners, layout.experts, whole=True)[0]
    )
    return of_record(fast.quantize(x, fine, scales=scales, random_bits=words(x, operand, seed, stream)), fine)


def columns_operand(
    x: torch.Tensor, operand: Operand, layout: Layout, seed: int | None = None, stream: int = 0
) -> Columns:
    """x (T, C) as (C, P) along P: no block and no scale reaches over a group's end."""
    scheme = operand.scheme
    if scheme is not None:
        _refuse_square(scheme)
    if scheme is None or operand.hadamard or operand.is_stochastic or scheme.outer is not None:
        return _of_gathered(x, operand, layout, seed, stream)
    if layout.source is None or layout.owners is None:
        return _of_gathered(x, operand, layout, seed, stream)
    if is_operator(x):
        tables = layout.offsets, layout.ends, layout.source, layout.owners
        codes, scale, *table = _columns_op(x, *tables, layout.step, scheme.key)
        fine = scheme if scheme.scale.block not in ONE else in_blocks(scheme.key, layout.step)
        return Columns(Quantized(codes, scale, None, None, tuple(codes.shape), 1, fine), *table)
    return _columns(x, scheme, layout, layout.source, layout.owners)


def _columns(
    x: torch.Tensor, scheme: Scheme, layout: Layout, source: torch.Tensor, owners: torch.Tensor
) -> Columns:
    """By kernels that read rows where they lie, or of gathered columns: the same bits."""
    x = x.detach()
    if has_kernels(x):
        from fast.kernels.grouped import group_columns

        copies = group_columns(x.contiguous(), scheme, source, owners, layout.experts, layout.step)
        if copies is not None:
            codes, scale, table = copies
            fine = scheme if table is None else in_blocks(scheme.key, layout.step)
            return Columns(Quantized(codes, scale, None, None, tuple(codes.shape), 1, fine), table)
    return _of_gathered(x, Operand(scheme=scheme), layout, None, 0)


@torch.library.custom_op("ao_lab::group_columns", mutates_args=())
def _columns_op(
    x: torch.Tensor, offsets: torch.Tensor, ends: torch.Tensor, source: torch.Tensor, owners: torch.Tensor, step: int,
    scheme: str,
) -> list[torch.Tensor]:  # fmt: skip
    layout = Layout(offsets, ends, x.shape[0], step, source, owners)
    columns = _columns(x, record_of(scheme), layout, source, owners)
    matrix = quantized(columns.matrix)
    return [matrix.codes, matrix.scale, *([] if columns.table is None else [columns.table])]


@_columns_op.register_fake
def _columns_fake(
    x: torch.Tensor, offsets: torch.Tensor, ends: torch.Tensor, source: torch.Tensor, owners: torch.Tensor, step: int,
    scheme: str,
) -> list[torch.Tensor]:  # fmt: skip
    record, shape = record_of(scheme), (x.shape[1], source.shape[0])
    one = record.scale.block in ONE
    own = in_blocks(scheme, step) if one else record
    table = [x.new_empty((offsets.shape[0], x.shape[1]), dtype=torch.float32)] if one else []
    return [fresh_codes(x, shape, own, False), *fresh_scales(x, own, -1, False, shape), *table]


def _of_gathered(x: torch.Tensor, operand: Operand, layout: Layout, seed: int | None, stream: int) -> Columns:
    """By torch operations around `fast.quantize` of the gathered columns."""
    columns, scheme = layout.columns(x), operand.scheme
    columns = hadamard(columns, operand.hadamard) if operand.hadamard else columns
    if scheme is None:
        return Columns(columns)
    drawn = words(columns, operand, seed, stream)
    if scheme.outer is None and scheme.scale.block not in ONE:
        return Columns(of_record(fast.quantize(columns, scheme, random_bits=drawn), scheme))
    owners, whole, tables = layout.of_chunks(), scheme.scale.block == "tensor" or scheme.outer is not None, []

    def shared(block_scales: torch.Tensor) -> torch.Tensor:
        per_chunk = owners.repeat_interleave(block_scales.shape[1] // max(owners.shape[0], 1))
        spread, table = _largest(block_scales.t(), per_chunk, layout.experts, whole=whole)
        tables.append(table)
        return spread.t().contiguous()

    fine, scales = fine_scales(columns, scheme, layout.step, shared)
    q = of_record(fast.quantize(columns, fine, scales=scales, random_bits=drawn), fine)
    return Columns(q, tables[0] if scheme.outer is None else None)


def token_columns(
    x: torch.Tensor, rows: Matrix, operand: Operand, forward: Operand, layout: Layout, seed: int | None = None, stream: int = 0,
) -> Columns:  # fmt: skip
    """x (T, K) as (K, P), of what the forward operand `rows` stands for where the recipe says so."""
    if operand.source == "output" and forward.scheme is not None:
        x = fast.dequantize(quantized(rows), x.dtype)
    return columns_operand(x, operand, layout, seed, stream)


def _largest(
    scales: torch.Tensor, owners: torch.Tensor, experts: int, *, whole: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales (n, m) replaced by the largest of their group, for each of m or (whole) for all; and those of E groups.

    owners: (n,) the group of each row, E for none. NaN is the largest, so a group that has one is NaN.
    """
    scales = scales.amax(1, keepdim=True).expand_as(scales) if whole else scales
    index = owners[:, None].expand_as(scales)
    table = scales.new_zeros((experts + 1, scales.shape[1])).scatter_reduce(0, index, scales, "amax")
    return table[owners], table[:experts]


def _reaches_over_rows(scheme: Scheme) -> bool:
    block = scheme.scale.block
    return scheme.outer is not None or block == "tensor" or (isinstance(block, tuple) and block[0] > 1)


def _refuse_square(scheme: Scheme) -> None:
    """ValueError for blocks over several tokens, which no end of a group divides."""
    block = scheme.scale.block
    if isinstance(block, tuple) and block[0] > 1:
        raise ValueError(
            f"scheme {scheme.name} has blocks of {block}, over several tokens and over the ends of experts; "
            f"use it for weights, and blocks along the sum for tokens"
        )
