"""Which function computes a product with a `QuantizedTensor`: the one place that decides.

A `Kernel` says why it cannot take a weight (or that it can) and computes the product. "auto" is what `ao_lab.tune`
chose for the weight and the number of rows, else the first that can, in the order of `PRODUCTS`; a recipe that names
one gets that one or ValueError. Nothing is measured here.

* ``int8``: exact integer sums; then the input's scale, the weight's scale and the bias in float32, and one rounding
  to the output's dtype. That is `reference.matmul(..., accumulation="blocked")` with one block, bit for bit. On
  Hopper GPUs all of it is one kernel (`fast.linear_of_codes`), elsewhere `torch._int_mm` or `fast.cpu.linear` and what
  follows.
* ``scaled_mm``: `torch._scaled_mm` of float8 codes, within `reference.matmul_error_bound` of the exact product; on
  Hopper GPUs with scales of blocks too, 1x128 of inputs and 128x128 or 1x128 of weights. On a CPU one scale is given
  as one for each row; torch before 2.13 takes none of these there. "auto" is ``fused`` on a CPU. Of one row on a GPU
  it is `fast.linear.linear_of_codes`, which reads the weight once, inside the same bound, with other bits than that
  row has among several; of several rows too, where that was measured to be faster (`codes_beat_torch`).
* ``fused``: for weights alone, codes are decoded on the way to the products: on a GPU by `fast.linear`, of one row or
  of a few, on a CPU by `fast.cpu.linear`; within `reference.linear_error_bound` of the exact product. On a CPU, where
  it has products of bfloat16, several rows of such inputs are multiplied by the weight rounded to it, as
  ``dequantize`` rounds; inputs in a scheme are rounded as there. No size of a weight is asked, so that shards of one
  are multiplied as it is. A preshuffled weight is multiplied by `fast.matmul.preshuffled`, of up to 128 rows of
  16-bit inputs, and so are groups of rows by experts' weights, up to 64 of an expert on average; more rows on Hopper,
  which decode to the inputs' dtype, as ``dequantize`` rounds. Inputs of a preshuffled matrix may have a scheme: where
  16-bit floats hold it exactly (8 bits under a scale for each row, MX) the product is that of what is stored, in
  others (NVFP4) inputs are rounded as by ``dequantize``. Beyond the rows that `explain` names as ``dequantize``.
* ``dequantize``: the weight is dequantized to the input's dtype, the input (if its recipe says so) goes through its
  scheme and back, and torch multiplies. For weight-only recipes this is F.linear(x, reference.dequantize(w)), bit for
  bit.
* ``reference``: `reference.matmul` of both, on the host, in the recipe's accumulation. Slow; for tests and questions.

A weight in 2:4 storage (`ao_lab.tensor.sparse`) is stored as no kernel of dense codes reads it: `dequantize` and `reference`
take its dense equivalent. Kernels of its own are in `ao_lab.gemm.sparse`: `sparse_int4` is the default for int4 weights, on
Hopper `sparse_wgmma` for int8, float8 and 16-bit elements; cuSPARSELt's is what `ao_lab.tune` may choose.

A recipe's activation scheme holds where the sum runs along the weight's blocks, as it does in a layer. Other products
(those that autograd makes for the input's gradient) take the operands as they are.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ao_lab.gemm import codes, dense
from ao_lab.gemm.choices import choices_for, pinned, rows_range, tuned
from ao_lab.gemm.codes import BLOCK, FLOAT8, activation, multiplies_codes
from ao_lab.gemm.dense import PRESHUFFLED, dequantized, is_host, loses_nan, sums_along_blocks
from ao_lab.gemm.operand import Kernel, Product, QuantizedWeight
from fast.gemm import families
from fast.gemm.choose import Range, able, by_rows, choose, codes_of_layer, running
from fast.gemm.families import Family, Problem, of_codes, of_preshuffled, of_sparse, of_sparse_int4, of_stored
from fast.layers.hadamard import hadamard
from fast.ops import LATE
from fast.prepared import (
    Program,
    ScaledProduct,
    prepared_linear,
    prepared_linear_of_codes,
    prepared_linear_small,
    prepared_scaled_mm,
)
from fast.scale_factors import form_of


def product(x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (M, K) or (B, M, K) times w (K, N) or (B, K, N), plus bias (N), in x's dtype."""
    if w.recipe.rotation and sums_along_blocks(w):
        x, w = hadamard(x, w.recipe.rotation), w.without_rotation
    return runner(selected(w, x.dtype, x.shape[-2]))(x, w, bias)


class Selected(NamedTuple):
    """A kernel of PRODUCTS, and the family that it asks first, where one was measured to be the quickest; else ""."""

    kernel: str
    family: str = ""


def runner(one: Selected) -> Product:
    """The function that computes the product."""
    return partial(dense.fused, first=one.family) if one.family else PRODUCTS[one.kernel].run


def select_kernel(w: QuantizedWeight, dtype: torch.dtype, rows: Any = None) -> str:
    """The name of the kernel for a weight (K, N) and inputs of a dtype; ValueError where the recipe's own cannot.

    rows: of the input; with them the kernel is the one that `ao_lab.tune` chose. None, and rows that a tracer leaves open: the
    default.
    """
    return selected(w, dtype, rows).kernel


def selected(w: QuantizedWeight, dtype: torch.dtype, rows: Any = None) -> Selected:
    """`select_kernel`, and the family that was tuned for these rows."""
    if rows is not None and len(w.shape) == 2 and sums_along_blocks(w) and w.recipe.kernel == "auto":
        shape = (rows, w.shape[1], w.shape[0])
        chosen = tuned("inference", *inference_keys(w), shape, dtype, w.device)
        one = Selected("fused", chosen) if chosen in families.FAMILIES else Selected(chosen or "")
        takes = one.kernel in PRODUCTS and PRODUCTS[one.kernel].unsupported_reason(w, dtype) is None
        if takes and (not one.family or multiplies_by_family(w)):
            return one
    return Selected(_default(w, dtype))


def multiplies_by_family(w: QuantizedWeight) -> bool:
    """Whether a weight (K, N) has families to choose among: a preshuffled matrix on a GPU, by inputs as they are."""
    is_plain = w.recipe.activation is None and not w.recipe.rotation
    return w.meta.layout == PRESHUFFLED and len(w.shape) == 2 and w.is_cuda and is_plain


def candidates(w: QuantizedWeight, dtype: torch.dtype, rows: int) -> dict[str, Selected]:
    """All that may multiply so many rows by a weight (K, N), by the names that choices have, the default first of those that
    can: kernels, and in place of "fused" its families where a weight has several (`fast.gemm.families`)."""
    result = {name: Selected(name) for name in PRODUCTS}
    if not multiplies_by_family(w) or PRODUCTS["fused"].unsupported_reason(w, dtype) is not None:
        return result
    p = problem_of(w, dtype, rows)
    order = able(p)
    others = (one for one in families.FAMILIES.values() if one not in order and p.layout in one.layouts)
    split = {one.name: Selected("fused", one.name) for one in (*order, *others)}
    dense_first = ("dequantize",) if next(choose(p)) is families.TORCH_DEQUANTIZE else ()
    before = {name: result.pop(name) for name in (*takewhile("fused".__ne__, PRODUCTS), *dense_first)}
    return before | split | {name: one for name, one in result.items() if name != "fused"}


def problem_of(w: QuantizedWeight, dtype: torch.dtype, rows: int) -> Problem:
    """Rows of a dtype by a weight (K, N) that kernel "fused" takes, on a GPU."""
    return _by_weight(w, dtype, rows)[1]


def _default(w: QuantizedWeight, dtype: torch.dtype) -> str:
    """The kernel where nothing was tuned; see `select_kernel`."""
    if not sums_along_blocks(w):
        return "dequantize"
    wanted = w.recipe.kernel
    if wanted != "auto":
        reason = PRODUCTS[wanted].unsupported_reason(w, dtype)
        if reason is not None:
            able = ", ".join(
                name for name, kernel in PRODUCTS.items() if kernel.unsupported_reason(w, dtype) is None
            )
            raise ValueError(f"kernel {wanted!r} does not take {w.recipe}: {reason}; these do: {able}")
        return wanted
    return next(name for name in _by_default(w) if PRODUCTS[name].unsupported_reason(w, dtype) is None)


def _by_default(w: QuantizedWeight) -> Iterator[str]:
    """The kernels that "auto" may be, the preferred first. On a CPU `scaled_mm` is none: torch's product of 8-bit floats takes
    much longer than one of bfloat16 (times: reports/LOG.md), and `fused` takes what it does."""
    if w.recipe.activation is None:
        return (name for name in PRODUCTS if name not in OF_CODES)
    return (name for name in PRODUCTS if name != "scaled_mm" or not is_host(w.device))


def inference_keys(w: QuantizedWeight) -> tuple[str, str]:
    """The keys of the schemes of a layer's input ("" where it is not quantized) and its weight."""
    return "" if w.recipe.activation is None else w.recipe.activation.key, w.scheme.key


def select_product(w: QuantizedWeight, dtype: torch.dtype) -> Product:
    """The function for a weight (K, N) and inputs of a dtype, of any number of rows; found once by who calls it often.

    Where something was tuned for inference on the device it asks for each range of rows once. What it found holds for
    `choices.VERSION`.
    """
    if w.recipe.rotation and sums_along_blocks(w):
        return _of_rotated(w, dtype)
    default = PRODUCTS[select_kernel(w, dtype)].run
    if not is_tuned(w.device):
        return default
    result: dict[int, Product] = {}

    def run(x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        if pinned():
            return default(x, w, bias)
        rows = rows_range(x.shape[0])
        if rows not in result:
            result[rows] = runner(selected(w, dtype, rows))
        return result[rows](x, w, bias)

    return run


def _of_rotated(w: QuantizedWeight, dtype: torch.dtype) -> Product:
    """The product with inputs that are rotated first."""
    length, stored = w.recipe.rotation, w.without_rotation
    run = select_product(stored, dtype)
    return lambda x, _, bias: run(hadamard(x, length), stored, bias)


def _supports_all(w: QuantizedWeight, dtype: torch.dtype) -> str | None:
    return None


def _of_sparse(name: str, module: str, kernel: str) -> Kernel:
    """A kernel of weights in 2:4 storage, whose module is imported for the first one and takes its place in the table."""

    def imported() -> Kernel:
        PRODUCTS[name] = getattr(importlib.import_module(module), kernel)
        return PRODUCTS[name]

    def run(x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        return imported().run(x, w, bias)

    def unsupported_reason(w: QuantizedWeight, dtype: torch.dtype) -> str | None:
        if w.meta.layout != "2:4":
            return "the weight is not in 2:4 storage"
        return imported().unsupported_reason(w, dtype)

    return Kernel(run, unsupported_reason)


SPARSE_INT4 = "sparse_int4"


#: Every kernel by name, the preferred first. Weights in 2:4 storage are stored as no kernel of dense codes reads them.
PRODUCTS = {
    "int8": Kernel(codes.int8, codes.int8_unsupported_reason),
    "scaled_mm": Kernel(codes.scaled_mm, codes.scaled_mm_unsupported_reason),
    "fused": Kernel(dense.fused, dense.fused_unsupported_reason),
    SPARSE_INT4: _of_sparse(SPARSE_INT4, "ao_lab.gemm.sparse", "INT4"),
    "sparse_wgmma": _of_sparse("sparse_wgmma", "ao_lab.gemm.sparse", "WGMMA"),
    "dequantize": Kernel(dequantized, _supports_all),
    "reference": Kernel(dense.reference, _supports_all),
    "cusparselt": _of_sparse("cusparselt", "ao_lab.gemm.cusparselt", "KERNEL"),
}
#: Of them those that multiply codes by codes, which inputs without a scheme do not have.
OF_CODES = ("int8", "scaled_mm")
LATE.update(sparse_wgmma_mm="ao_lab.gemm.sparse", cusparselt_mm="ao_lab.gemm.cusparselt")


if TYPE_CHECKING:  # compiled loops of a CPU are imported by who has them
    from fast.cpu.products import Dequantized, Fused, Integers

    #: What is called as `prepared.launch(prepared, x, bias)`.
    Prepared = Program | ScaledProduct | Dequantized | Fused | Integers
else:
    Prepared = Any


#: Of inputs (M, K) that were multiplied just now, a weight (K, N), a bias, the shape of the result and `Selected.family`.
Prepare = Callable[
    [torch.Tensor, QuantizedWeight, torch.Tensor | None, tuple[int, ...], str], Prepared | None
]


def is_tuned(device: torch.device) -> bool:
    """Whether something was tuned for inference on a device: then the kernel depends on the rows, and on what is pinned."""
    return any(choice.problem.direction == "inference" for choice in choices_for(device))


def prepared_product(
    x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None, shape: tuple[int, ...]
) -> Prepared | None:
    """The product of x (M, K), which was computed just now, as a program for inputs like x, its result in a shape of as many
    elements; None for kernels that are more than launches, and for inputs that are rotated first."""
    if w.recipe.rotation:
        return None
    kernel, family = selected(w, x.dtype, x.shape[0] if is_tuned(w.device) else None)
    if is_host(w.device):
        return _on_host(kernel, x, w, shape)
    make = PREPARE.get(kernel)
    return None if make is None or not w.is_cuda else make(x, w, bias, shape, family)


def _on_host(
    kernel: str, x: torch.Tensor, w: QuantizedWeight, shape: tuple[int, ...]
) -> Dequantized | Fused | Integers | None:
    """By compiled loops of the CPU."""
    scheme = w.recipe.activation
    if not sums_along_blocks(w) or not w.meta.transposed or w.meta.layout != "plain":
        return None
    from fast.cpu.products import prepared_dequantized, prepared_fused, prepared_integers

    if kernel == "fused":
        return prepared_fused(x, w.quantized, shape, scheme, w.input_scales)
    if scheme is not None and kernel == "dequantize":
        return prepared_dequantized(x, w.quantized, shape, scheme, w.input_scales)
    if scheme is not None and kernel == "int8":
        return prepared_integers(x, w.quantized, shape, scheme, w.input_scales)
    return None


def _fused(
    x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None, shape: tuple[int, ...], first: str
) -> Prepared | None:
    if w.meta.layout == PRESHUFFLED:
        return prepared_linear_small(x, w.stored, bias, shape, w.recipe.activation, first)
    return prepared_linear(x, w.quantized, bias, shape)


def _codes(
    x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None, shape: tuple[int, ...], first: str
) -> Prepared | None:
    """Of rows that are multiplied as codes: by kernels of ours, or by torch of 8-bit floats under scales alike."""
    scheme = w.recipe.activation
    if scheme is None:
        return None
    if multiplies_codes(x, w):
        by_rows = loses_nan(w)
        return prepared_linear_of_codes(x, w.quantized, bias, shape, scheme, w.input_scales, by_rows)
    blocks = scheme.scale.block, w.scheme.scale.block
    if scheme.element not in FLOAT8 or BLOCK in blocks or blocks[0] != blocks[1]:
        return None
    dtypes = FLOAT8[scheme.element], FLOAT8[w.scheme.element]
    return prepared_scaled_mm(x, w.quantized, shape, scheme, w.input_scales, dtypes)


#: By the names of `select.PRODUCTS`.
PREPARE: dict[str, Prepare] = {"fused": _fused, "int8": _codes, "scaled_mm": _codes}


# Which families of kernels multiply by a weight on a GPU, by ranges of rows: what `ao_lab.explain` prints.

#: Rows of inputs that are asked for, at most: what multiplies these multiplies more.
MOST = 1 << 15


def families_by_rows(w: QuantizedWeight, dtype: torch.dtype) -> tuple[tuple[Range, ...], dict[str, str]]:
    """The ranges of rows of inputs in a dtype by a weight (K, N) on a GPU, each with the name of what multiplies them: a family
    of `fast.gemm.families`, or the kernel of `ao_lab.gemm.select` where that is one for all rows; and why families that are
    quicker did not load in this process, by name: ranges say where another one multiplies for them. Nothing elsewhere."""
    failures: dict[str, str] = {}
    if not w.is_cuda or len(w.shape) != 2:
        return (), failures
    return by_rows(lambda rows: _name(w, dtype, rows, failures), MOST), failures


def _name(w: QuantizedWeight, dtype: torch.dtype, rows: int, failures: dict[str, str]) -> str:
    """What multiplies so many rows, and for what it does; `failures` learns why."""
    kernel, first = selected(w, dtype, rows)
    if kernel == "dequantize":
        return families.TORCH_DEQUANTIZE.name
    if kernel not in ORDERS:
        return kernel
    order, p = ORDERS[kernel](w, dtype, rows)
    order = choose(p, first) if first else order
    family, failed = running(order, p, w.codes.get_device())
    failures |= failed
    return f"{family.name} (for {', '.join(failed)}, which did not load)" if failed else family.name


def _by_weight(w: QuantizedWeight, dtype: torch.dtype, rows: int) -> tuple[Iterable[Family], Problem]:
    """The order of families of inputs as they are, or in a scheme in front of the product."""
    if w.meta.layout != PRESHUFFLED:
        p = of_stored(w.quantized, rows, dtype)
        return choose(p), p
    from fast.scale_factors import ArrangedWeight

    stored = w.stored
    shape = (int(stored.shape[0]), int(stored.shape[1]))
    form = form_of(stored.scheme, shape[1])
    arranged = ArrangedWeight(stored.codes, stored.scale, stored.zero, shape, *form)
    p = of_preshuffled(arranged, rows, dtype)
    return choose(p), p


def _by_codes(w: QuantizedWeight, dtype: torch.dtype, rows: int) -> tuple[Iterable[Family], Problem]:
    """The same of inputs that are quantized to 8 bits."""
    scheme, shape = activation(w), (int(w.shape[1]), int(w.shape[0]))
    p = of_codes(scheme, w.scheme, shape, rows, dtype, w.device)
    if scheme.scale.block == BLOCK:
        return (families.TORCH_SCALED_MM,), p
    return (codes_of_layer(scheme, w.scheme, p), *choose(p)), p


def _by_sparse(w: QuantizedWeight, dtype: torch.dtype, rows: int) -> tuple[Iterable[Family], Problem]:
    """The same of a weight in 2:4 storage, beside inputs of its element."""
    from ao_lab.gemm.sparse import CODES, PLAIN

    p = of_sparse(w.codes.view({**PLAIN, **CODES}[w.scheme.element]), rows, dtype)
    return choose(p), p


def _by_sparse_int4(w: QuantizedWeight, dtype: torch.dtype, rows: int) -> tuple[Iterable[Family], Problem]:
    """The same of int4 there."""
    from ao_lab.gemm.sparse import group_of

    p = of_sparse_int4(w.codes, rows, dtype, group_of(w), w.zero is not None)
    return choose(p), p


#: By the names of PRODUCTS whose products more than one family may multiply: these, the quickest first.
ORDERS: dict[str, Callable[[QuantizedWeight, torch.dtype, int], tuple[Iterable[Family], Problem]]] = {
    "int8": _by_codes,
    "scaled_mm": _by_codes,
    "fused": _by_weight,
    SPARSE_INT4: _by_sparse_int4,
    "sparse_wgmma": _by_sparse,
}


__all__ = [
    "PRODUCTS",
    "Kernel",
    "Prepared",
    "Selected",
    "candidates",
    "families_by_rows",
    "inference_keys",
    "is_tuned",
    "multiplies_by_family",
    "prepared_product",
    "problem_of",
    "product",
    "runner",
    "select_kernel",
    "select_product",
    "selected",
]
