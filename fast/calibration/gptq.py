"""`gptq` for torch tensors; `reference.calibration.gptq` states the algorithm.

CPU tensors run the reference. Elsewhere the factor and what blocks of 128 columns do to those behind them are float64 products
of torch. Inside a block one kernel keeps rows in registers and goes through the columns (`fast.kernels.calibration.columns`);
where no kernel covers the device or the record, torch operations take the same steps, with the same bits. Results differ from
the reference's where sums in another order move a target past the middle of two values, and in the last bits of the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import reference
from fast.calibration.hessian import checked_hessian, factor_on_device
from fast.calibration.inputs import float_tensor, numpy_of, torch_of
from fast.calibration.search import check_weights, search_scales_on_device
from fast.dispatch import has_kernels
from fast.quantize.quantize import quantize
from reference import GPTQResult, Scales, Scheme
from reference.arrays.namespace import Namespace, namespace_of
from reference.calibration.gptq import BLOCK, column_order
from reference.calibration.hessian import TriangularFactor
from reference.calibration.inputs import LARGEST
from reference.calibration.nearest import Nearest
from reference.quantize.blocks import Blocks
from reference.quantize.scales import check_scales
from reference.schemes.schemes import flat_size, scheme_of


def gptq(
    w: torch.Tensor,
    hessian: torch.Tensor,
    scheme: str | Scheme,
    *,
    scales: Scales | torch.Tensor | None = None,
    order: str = "stored",
    damping: float = 0.01,
    cross: torch.Tensor | None = None,
    packed: bool = False,
) -> GPTQResult:
    """Codes of w (N, K) by `reference.gptq`; results are tensors on w's device, where hessian and cross may lie or not.

    The device needs about 30 bytes a weight and 24 an element of the Hessian, its own 8 among them.
    """
    w, hessian = float_tensor(w, "gptq", "w"), float_tensor(hessian, "gptq", "the hessian")
    options = {"scales": scales, "order": order, "damping": damping, "cross": cross, "packed": packed}
    if w.device.type != "cpu":
        return gptq_on_device(w, hessian, scheme, **options)
    options |= {"scales": numpy_of(scales), "cross": numpy_of(cross)}
    result = reference.gptq(numpy_of(w), numpy_of(hessian), scheme, **options)
    return result._replace(
        **{name: torch_of(getattr(result, name)) for name in ("quantized", "loss", "dead")}
    )


def gptq_on_device(
    w: torch.Tensor,
    hessian: torch.Tensor,
    scheme: str | Scheme,
    *,
    scales: Scales | torch.Tensor | None = None,
    order: str = "stored",
    damping: float = 0.01,
    cross: torch.Tensor | None = None,
    packed: bool = False,
) -> GPTQResult:
    """The same on w's device, whatever it is."""
    record = scheme_of(scheme)
    check_weights(w, record, "gptq")
    h = checked_hessian(hessian, w.shape[1], w.device)
    blocks = Blocks.of(tuple(w.shape), record.scale, -1)
    columns = device_order(h, order, blocks)
    factor = factor_on_device(h, damping, columns)
    wide = w.double()
    if cross is not None:
        wide = wide + cross_term(wide, factor.factor, columns, cross)
        w = wide
    scales = scales_of(w, record, scales, h)
    return swept_result(wide, factor, columns, ColumnRule.of(record, scales, blocks, w), packed)


def swept_result(
    wide: torch.Tensor,
    factor: TriangularFactor,
    columns: torch.Tensor,
    rule: ColumnRule,
    packed: bool = False,
) -> GPTQResult:
    """The result of a sweep over float64 weights by a factor, which is used up."""
    return result_of(Sweep.of(wide, factor.factor, columns).run(rule), factor, rule, packed)


def result_of(swept: Swept, factor: TriangularFactor, rule: ColumnRule, packed: bool = False) -> GPTQResult:
    """The result of a sweep of all rows, of whose factor only what it took is read."""
    quantized = quantize(swept.targets, rule.scheme, scales=rule.scales, packed=packed)
    return GPTQResult(quantized, swept.loss, factor.damping, factor.floor, factor.dead)


def device_order(h: torch.Tensor, order: str, blocks: Blocks) -> torch.Tensor:
    """`column_order` of the diagonal, on the device of the Hessian."""
    columns = column_order(h.diagonal().cpu().numpy(), order, blocks)
    return torch.from_numpy(columns).to(h.device)


def scales_of(w: torch.Tensor, scheme: Scheme, scales: Any, h: torch.Tensor) -> Scales:
    """The scales that are given, or those of a search weighted by the diagonal, around an outer scale given alone."""
    if scales is None or (isinstance(scales, Scales) and scales.scale is None):
        outer = None if scales is None else scales.outer
        return search_scales_on_device(w, scheme, weights=h.diagonal(), outer=outer)
    return scales if isinstance(scales, Scales) else Scales(scales)


def cross_term(
    wide: torch.Tensor, upper: torch.Tensor, order: torch.Tensor, cross: torch.Tensor
) -> torch.Tensor:
    """W C H^-1, (N, K), by the factor of H in its order."""
    k = wide.shape[1]
    cross = float_tensor(cross, "gptq", "the cross term").to(wide.device, torch.float64)
    if tuple(cross.shape) != (k, k) or not bool(cross.isfinite().all()):
        raise ValueError(
            f"the cross term is finite, of shape ({k}, {k}), the mean of (x - x_q) x_q^T; got shape {tuple(cross.shape)}"
        )
    moved = (wide @ cross)[:, order].mT
    solved = torch.linalg.solve_triangular(upper, moved, upper=True)
    shift = torch.empty_like(wide)
    shift[:, order] = torch.linalg.solve_triangular(upper.mT, solved, upper=False).mT
    return shift


@dataclass(frozen=True)
class ColumnRule:
    """The rounding of columns: the record, its scales flat, and which of them an element (row, column) has.

    With rows and columns of a block (`height`, `width`) and `across` blocks beside each other it is number
    row // height * across + column // width; `flat` stands for blocks of the flattened matrix that do not end with rows.
    """

    scheme: Scheme
    scales: Scales
    nearest: Nearest
    ns: Namespace
    height: int
    width: int
    across: int
    flat: int
    length: int
    kernel: bool

    @classmethod
    def of(cls, scheme: Scheme, scales: Scales, blocks: Blocks, w: torch.Tensor) -> ColumnRule:
        """The rule of a matrix; ValueError where the scales do not fit."""
        ns = namespace_of(w)
        stored = check_scales(ns, scales, scheme, blocks)
        if stored is None:
            raise ValueError(f"scheme {scheme.name} needs its scales; see choose_scales")
        nearest = Nearest.of(ns, stored, blocks, scheme, plain=False).mapped(lambda scale: scale.reshape(-1))
        rows, k = blocks.shape
        block, flat = blocks.block, flat_size(blocks.block)
        height, width = block if isinstance(block, tuple) else (1, flat or block)
        if block == "tensor":
            height, width = max(rows, 1), k
        width = k if width == -1 else int(width)
        flat = flat if flat and k % flat else 0
        kernel = not flat and has_kernels(w)
        return cls(scheme, stored, nearest, ns, height, width, -(-k // width), flat, k, kernel)

    def blocks_of(self, rows: torch.Tensor, column: int) -> torch.Tensor:
        """The numbers of the blocks of a column's elements in these rows."""
        if self.flat:
            return (rows * self.length + column) // self.flat
        return rows // self.height * self.across + column // self.width


@dataclass
class Swept:
    """float32 `targets` (N, K) in their places, whose codes are the result; `loss` (N,); `change` (N, K), w - q in the order of
    the sweep.
    """

    targets: torch.Tensor
    loss: torch.Tensor
    change: torch.Tensor


@dataclass(frozen=True)
class Sweep:
    """weights: (N, K) in the order of the sweep. ratios: (K, K), R_ij / R_jj. diagonal: R_jj. rows: which of a matrix's."""

    weights: torch.Tensor
    ratios: torch.Tensor
    diagonal: torch.Tensor
    order: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def of(
        cls, wide: torch.Tensor, upper: torch.Tensor, order: torch.Tensor, rows: torch.Tensor | None = None
    ) -> Sweep:
        """Of all rows of a matrix, or of some. The ratios take the place of the factor, which is used up."""
        diagonal = upper.diagonal().clone()
        rows = torch.arange(len(wide), device=wide.device) if rows is None else rows.contiguous()
        weights = wide[rows].index_select(1, order).contiguous()
        return cls(weights, upper.div_(diagonal), diagonal, order, rows)

    def run(self, rule: ColumnRule) -> Swept:
        """All columns, block by block."""
        count, k = self.weights.shape
        swept = Swept(
            torch.empty((count, k), dtype=torch.float32, device=self.weights.device),
            torch.zeros(count, dtype=torch.float64, device=self.weights.device),
            torch.empty_like(self.weights),
        )
        block = _kernel(self, rule, swept) if rule.kernel else None
        for start in range(0, k, BLOCK):
            part = slice(start, min(start + BLOCK, k))
            moved = self.weights[:, part]
            if start:
                moved = torch.addmm(moved, swept.change[:, :start], self.ratios[:start, part])
            if block is None:
                columns_by_torch(self, rule, swept, part, moved)
            else:
                block(part, moved)
        return swept


def columns_by_torch(sweep: Sweep, rule: ColumnRule, swept: Swept, part: slice, moved: torch.Tensor) -> None:
    """The columns of a block: their targets, what they change, and what they add to the loss.

    Columns lie beside each other here as rows do in `moved`, so that each is read and written in one piece.
    """
    targets, weights = moved.mT.contiguous(), sweep.weights[:, part].mT.contiguous()
    ratios, diagonal = sweep.ratios[part, part], sweep.diagonal[part]
    change, loss = torch.empty_like(weights), torch.zeros_like(swept.loss)
    order = sweep.order[part].tolist()
    for j, column in enumerate(order):
        short = targets[j].clamp(-LARGEST, LARGEST).float()
        index = rule.blocks_of(sweep.rows, column)
        value = rule.nearest.take(index).values(rule.ns, short)
        change[j] = weights[j] - value
        error = (targets[j] - value) * diagonal[j]
        loss += error * error
        swept.targets[:, column] = short
        # Product and sum are rounded one after the other, as the kernel does.
        targets[j + 1 :] += torch.outer(ratios[j, j + 1 :], change[j])
    swept.change[:, part] = change.mT
    swept.loss += loss


def _kernel(sweep: Sweep, rule: ColumnRule, swept: Swept) -> Any:
    """The kernel's block, a function of its columns and their targets so far."""
    from fast.kernels.calibration.columns import block_of

    return block_of(sweep, rule, swept)


__all__ = ["gptq", "gptq_on_device"]
