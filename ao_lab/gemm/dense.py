"""Products of values: "dequantize" and "reference", with the dequantized weight, which take every recipe, and "fused"; what is
asked of devices.

"fused" decodes a weight's codes on the way to the products, on CPUs and on GPUs that its kernels are for. Inputs are taken as
they are; with a preshuffled weight, or on a CPU, also in a scheme. Where 16-bit floats hold it exactly
(`fast.matmul.preshuffled.dynamic`) a kernel in front of a GPU's product quantizes them; in others they go through their
scheme and back in their own dtype, as `dequantize` has them, and are multiplied by the weight as it is stored.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

import fast
from ao_lab.gemm.operand import QuantizedWeight
from fast.dispatch import OLDEST
from fast.gemm.choose import rows_stored
from fast.gemm.families import of_stored
from fast.matmul.preshuffled.dynamic import inputs_reason, linear_small_dynamic
from fast.matmul.preshuffled.grouped import grouped_linear_small
from fast.matmul.preshuffled.linear import ALL_ROWS, INPUTS, MOST_ROWS, linear_small, rows_as_stored
from reference.matmul.linear import transposed
from reference.quantize.quantize import unpacked, with_plain_scales


def dequantized(x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x (M, K) or (B, M, K) as its scheme represents it times w (K, N) or (B, K, N), plus bias (N), all in x's dtype, whatever
    theirs are: so are the products that decode codes on the way, of fewer rows."""
    x, dense = rounded(x, w), w.dequantize(x.dtype)
    bias = bias if bias is None or bias.dtype == x.dtype else bias.to(x.dtype)
    if x.dim() == 2:
        return torch.mm(x, dense) if bias is None else torch.addmm(bias, x, dense)
    return torch.bmm(x, dense) if bias is None else torch.baddbmm(bias, x, dense)


def rounded(x: torch.Tensor, w: QuantizedWeight) -> torch.Tensor:
    """The input as its scheme represents it; itself where it has none."""
    scheme = w.recipe.activation
    if scheme is None or not sums_along_blocks(w):
        return x
    y = fast.fake_quantize(x, scheme, axis=-1, scales=w.input_scales)
    return torch.where(x.isnan(), x, y) if loses_nan(w) else y


def loses_nan(w: QuantizedWeight) -> bool:
    """Whether an input's NaN has no code: of elements without one under static scales; scales that are found hold it."""
    scheme, scales = w.recipe.activation, w.input_scales
    if scheme is None or scales is None or scales.scale is None:
        return False
    return scheme.format.nan_code is None


def nan_rows(x: torch.Tensor) -> torch.Tensor:
    """Bool (..., M, 1): which rows of x (..., M, K) hold a NaN."""
    return x.isnan().any(-1, keepdim=True)


def sums_along_blocks(w: QuantizedWeight) -> bool:
    """Whether the product's sum, over the axis before the last, runs along the blocks."""
    return w.block_axis == -2


# Kernel "reference": `reference.matmul` of both operands, on the host.


def reference(x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x times w plus bias in the recipe's accumulation, in x's dtype."""
    if torch.compiler.is_compiling() or type(x) is not torch.Tensor:
        raise ValueError("kernel 'reference' runs on the host and cannot be traced; use kernel='dequantize'")
    scheme = w.recipe.activation
    left: Any = x if scheme is None else fast.quantize(x, scheme, axis=-1, scales=w.input_scales)
    options: dict[str, Any] = {"accumulation": w.recipe.accumulation, "out_dtype": x.dtype, "bias": bias}
    y: torch.Tensor = fast.matmul(left, as_right_operand(w), **options)
    return torch.where(nan_rows(x), float("nan"), y) if loses_nan(w) else y


def as_right_operand(w: QuantizedWeight) -> Any:
    """The weight (K, N) as `reference.matmul` takes it: a `Quantized` of that shape, or dense float32 where there is none."""
    return transposed(w.quantized) if w.meta.transposed else unpacked(with_plain_scales(w.quantized))


# Kernel "fused": products that decode a weight's codes on the way, on CPUs and on GPUs that its kernels are for.


#: Products that read the codes as they are stored read rows along which they sum.
STORED = "the weight must be a matrix, stored as (out, in)"


#: The layout of weights that `linear_small` multiplies by (`ao_lab.tensor.metadata`).
PRESHUFFLED = "preshuffled"


def fused(x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None, first: str = "") -> torch.Tensor:
    """x (M, K) times w (K, N) plus bias (N), in x's dtype. first: the family that is asked first by a preshuffled weight whose
    inputs are taken as they are, see `linear_small`."""
    scheme = w.recipe.activation
    if w.meta.layout == PRESHUFFLED:
        if scheme is not None and inputs_reason(scheme) is None:
            return linear_small_dynamic(x, scheme, w.stored, bias)
        return linear_small(rounded(x, w), w.stored, bias, first)
    if w.is_cuda:
        return fast.linear(x, w.quantized, bias)
    from fast.matmul.cpu_ops import linear as cpu_linear

    return cpu_linear(rounded(x, w), w.quantized, bias)


def fused_unsupported_reason(w: QuantizedWeight, dtype: torch.dtype) -> str | None:
    """Why it does not take a weight beside inputs of a dtype; None where it does."""
    device = w.device.type
    if device not in ("cpu", "cuda") or (device == "cuda" and capability(w.device.index or 0) < OLDEST):
        where = "on " + device
        if device == "cuda":
            where = "of compute capability {}.{}".format(*capability(w.device.index or 0))
        needs = f"CPUs and GPUs of compute capability {OLDEST[0]}.{OLDEST[1]} and later"
        return f"its kernels are for {needs}, this weight is {where}"
    return weight_reason(w, dtype)


def weight_reason(w: QuantizedWeight, dtype: torch.dtype) -> str | None:
    """Why it does not take a weight beside inputs of a dtype, whatever the device; None where it does."""
    reason = _dynamic_reason(w, dtype)
    if reason is not None:
        return reason
    if w.meta.layout == PRESHUFFLED and len(w.shape) == 2:
        return _preshuffled_reason(w, dtype)
    if len(w.shape) != 2 or not w.meta.transposed or w.meta.layout != "plain":
        return f"{STORED}, its scales plain"
    return (
        None
        if most_fused_rows(w, dtype)
        else f"its kernels do not read {w.scheme.name} in shape {tuple(w.shape)} for {dtype}"
    )


def _dynamic_reason(w: QuantizedWeight, dtype: torch.dtype) -> str | None:
    """Why it does not quantize a weight's inputs; None where it does, or they are not quantized."""
    if w.recipe.activation is None or w.device.type == "cpu":
        return None
    if w.meta.layout != PRESHUFFLED or len(w.shape) != 2:
        return "its inputs must not be quantized, but those of preshuffled matrices"
    return None if w.input_scales is None else "scales of its inputs must not be given"


def _preshuffled_reason(w: QuantizedWeight, dtype: torch.dtype) -> str | None:
    """Other floats than 16-bit ones it takes as `dequantize` does: recipes that name it keep working."""
    if not w.is_cuda:
        return "preshuffled weights are for GPUs"
    return None if dtype in (*INPUTS, torch.float32) else f"it does not write {dtype}"


def most_fused_rows(w: QuantizedWeight, dtype: torch.dtype) -> int:
    """The most rows of inputs of a dtype that "fused" multiplies by a weight's codes; 0 for none."""
    if w.meta.layout == PRESHUFFLED:
        few = MOST_ROWS if dtype in INPUTS and w.is_cuda else 0
        return max(few, rows_as_stored(w.stored, dtype)) if len(w.shape) == 2 else few
    if w.is_cuda:
        return rows_stored(of_stored(w.quantized, 1, dtype))
    return ALL_ROWS if _on_cpu(w, dtype) else 0


def _on_cpu(w: QuantizedWeight, dtype: torch.dtype) -> bool:
    """Whether a CPU decodes a weight on the way to the products, of any number of rows. The weight's size is not asked: shards
    of a weight are multiplied as the whole one is."""
    if w.device.type != "cpu" or len(w.shape) != 2 or not w.meta.transposed or w.meta.layout != "plain":
        return False
    from fast.cpu.linear import takes

    q = w.quantized
    # A compiler's sizes become numbers here: which kernel there is depends on them.
    return q.axis == 1 and takes(q.scheme, tuple(map(int, q.shape)), dtype)


# Products of rows sorted by expert and experts' weights.


def grouped_product(
    x: torch.Tensor, w: QuantizedWeight, func: Any, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """torch._grouped_mm (`func`) of tokens sorted by expert and the experts' weights (E, K, N).

    args, kwargs: offsets, bias and dtype, as torch has them. Kernel "fused" where the weights are preshuffled on a GPU, inputs
    have 16 bits and nothing but offsets is asked for; else "dequantize".
    """
    able = groups_reason(w, x.dtype) is None
    if sums_along_blocks(w) and not able and w.recipe.kernel not in ("auto", "dequantize"):
        raise ValueError(f"kernel {w.recipe.kernel!r} does not support grouped matmuls; these do: dequantize")
    given = {**dict(zip(("offs", "bias", "out_dtype"), args, strict=False)), **kwargs}
    plain = given.get("bias") is None and given.get("out_dtype") in (None, x.dtype)
    if able and plain and x.dim() == 2 and given.get("offs") is not None:
        return grouped_linear_small(x, w.stored, given["offs"])
    result: torch.Tensor = func(rounded(x, w), w.dequantize(x.dtype), *args, **kwargs)
    return result


def groups_reason(w: QuantizedWeight, dtype: torch.dtype) -> str | None:
    """Why groups of rows of a dtype are not multiplied by weights (E, K, N) as these are stored; None where they are."""
    if w.meta.layout != PRESHUFFLED or len(w.shape) != 3 or not w.meta.transposed:
        return "the weights must be preshuffled, and stored as (experts, out, in)"
    if w.recipe.activation is not None:
        return "its inputs must not be quantized"
    if not w.is_cuda or capability(w.device.index or 0) < OLDEST:
        return "its kernel is for GPUs of compute capability {}.{} and later".format(*OLDEST)
    return None if dtype in INPUTS else f"it does not read {dtype}"


# What a product asks of the device that a weight is on, of torch there, and of sizes that a tracer leaves open.


@lru_cache(maxsize=64)
def capability(index: int) -> tuple[int, int]:
    """The compute capability of a GPU, asked for once."""
    return torch.cuda.get_device_capability(index)


def is_host(device: torch.device) -> bool:
    """Whether torch multiplies float8 as it does on CPUs."""
    return device.type == "cpu"


def is_unbacked(size: Any) -> bool:
    """Whether a program is traced for any value of a size, of which nothing may be asked (`mark_unbacked`)."""
    if isinstance(size, int):
        return False
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(size))


@lru_cache(maxsize=1)
def cpu_scales_rows() -> bool:
    """Whether torch's float8 product on CPUs takes a scale for each row: some versions fail an assertion there."""
    with _disable_current_modes():  # those that trace would answer for torch
        a, scale = torch.zeros(16, 16, device="cpu").to(torch.float8_e4m3fn), torch.ones(16, 1, device="cpu")
        try:
            torch._scaled_mm(a, a.t(), scale_a=scale, scale_b=scale.t(), out_dtype=torch.float32)
        except RuntimeError:
            return False
    return True


__all__ = [
    "PRESHUFFLED",
    "STORED",
    "as_right_operand",
    "capability",
    "cpu_scales_rows",
    "dequantized",
    "fused",
    "fused_unsupported_reason",
    "grouped_product",
    "groups_reason",
    "is_host",
    "is_unbacked",
    "loses_nan",
    "most_fused_rows",
    "nan_rows",
    "reference",
    "rounded",
    "sums_along_blocks",
    "weight_reason",
]
