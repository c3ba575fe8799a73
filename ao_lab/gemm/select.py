"""Which function computes a product with a `QuantizedTensor`: the one place that decides.

A `Kernel` says why it cannot take a weight (or that it can) and computes the product. "auto" is what `ao_lab.tune` chose for
the weight and the number of rows, else the first that can, in the order of `PRODUCTS`; a recipe that names one gets that one or
ValueError. Nothing is measured here.

* ``int8``: exact integer sums; then the input's scale, the weight's scale and the bias in float32, and one rounding to the
  output's dtype. That is `reference.matmul(..., accumulation="blocked")` with one block, bit for bit. On Hopper GPUs all of it
  is one kernel (`fast.linear_of_codes`), elsewhere `torch._int_mm` or `fast.cpu.int8` and what follows.
* ``scaled_mm``: `torch._scaled_mm` of float8 codes, within `reference.matmul_error_bound` of the exact product; on Hopper GPUs
  with scales of blocks too, 1x128 of inputs and 128x128 or 1x128 of weights. On a CPU one scale is given as one for each row;
  torch before 2.13 takes none of these there, and "auto" is ``dequantize``.
  Of one row on a GPU it is `fast.linear.linear_of_codes`, which reads the weight once, inside the same bound, with other bits
  than that row has among several; of several rows too, where that was measured to be faster (`codes_beat_torch`).
* ``fused``: for weights alone, codes are decoded on the way to the products: on a GPU by `fast.linear`, of one row or of a few,
  on a CPU by `fast.cpu.linear`, of one row; within `reference.linear_error_bound` of the exact product. A preshuffled weight
  is multiplied by `fast.matmul.preshuffled`, of up to 128 rows of 16-bit inputs, and so are groups of rows by experts' weights,
  up to 64 of an expert on average; more rows on Hopper, which decode to the inputs' dtype, as ``dequantize`` rounds. Inputs of
  a preshuffled matrix may have a scheme: where 16-bit floats hold it exactly (8 bits under a scale for each row, MX) the
  product is that of what is stored, in others (NVFP4) inputs are rounded as by ``dequantize``. Beyond the rows that `explain`
  names as ``dequantize``.
* ``dequantize``: the weight is dequantized to the input's dtype, the input (if its recipe says so) goes through its scheme and
  back, and torch multiplies. For weight-only recipes this is F.linear(x, reference.dequantize(w)), bit for bit.
* ``reference``: `reference.matmul` of both, on the host, in the recipe's accumulation. Slow; for tests and questions.

A weight in 2:4 storage (`ao_lab.tensor.sparse`) is stored as no kernel of dense codes reads it: `dequantize` and `reference`
take its dense equivalent. Kernels of its own enter by `ao_lab.gemm.sparse`: `sparse_int4` is the default for int4 weights, on
Hopper `sparse_wgmma` for int8, float8 and 16-bit elements; cuSPARSELt's is what `ao_lab.tune` may choose.

A recipe's activation scheme holds where the sum runs along the weight's blocks, as it does in a layer. Other products (those
that autograd makes for the input's gradient) take the operands as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

import fast
from ao_lab.gemm.choices import choices_for, pinned, rows_range, tuned
from ao_lab.gemm.operand import QuantizedWeight
from ao_lab.gemm.products.dense import dequantized, rounded, sums_along_blocks
from ao_lab.gemm.products.fused import PRESHUFFLED, STORED, fused, most_fused_rows, unsupported_reason
from ao_lab.gemm.products.scaled_blocks import BLOCK, CAPABILITY, blocks_product, blocks_reason, whole_steps
from fast.cpu.int8 import integer_sums
from fast.device import OLDEST
from fast.matmul.linear import linear_of_codes
from fast.matmul.preshuffled.grouped import grouped_linear_small
from fast.matmul.preshuffled.linear import INPUTS
from fast.matmul.weights import LONGEST_INT8, codes_beat_torch, one_scale, takes_codes
from reference import Quantized, Scales, Scheme
from reference.matmul.linear import transposed
from reference.quantize.quantize import unpacked, with_plain_scales

Product = Callable[[torch.Tensor, QuantizedWeight, torch.Tensor | None], torch.Tensor]
UnsupportedReason = Callable[[QuantizedWeight, torch.dtype], str | None]

#: Formats that `torch._scaled_mm` multiplies, and torch's dtypes of them.
FLOAT8 = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
#: What products of codes write.
RESULTS = (torch.float32, torch.bfloat16, torch.float16)
#: cuBLAS's integer product takes more rows than this, and lengths that are multiples of 8; its float8 product, of 16. So does
#: our product of codes.
FEWEST_ROWS, STEP_INT8, STEP_FLOAT8, STEP_CODES = 17, 8, 16, 16


@dataclass(frozen=True)
class Kernel:
    """A way to compute x @ w + bias, and why it does not take a weight (None: it does) beside inputs of a dtype."""

    run: Product
    unsupported_reason: UnsupportedReason


def product(x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (M, K) or (B, M, K) times w (K, N) or (B, K, N), plus bias (N), in x's dtype."""
    return PRODUCTS[select_kernel(w, x.dtype, x.shape[-2])].run(x, w, bias)


def grouped_product(
    x: torch.Tensor, w: QuantizedWeight, func: Any, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """torch._grouped_mm (`func`) of tokens sorted by expert and the experts' weights (E, K, N).

    args, kwargs: offsets, bias and dtype, as torch has them. Kernel "fused" where the weights are preshuffled on a GPU, inputs
    have 16 bits and nothing but offsets is asked for; else "dequantize".
    """
    able = groups_reason(w, x.dtype) is None
    if sums_along_blocks(w) and not able and w.recipe.kernel not in ("auto", "dequantize"):
        raise ValueError(f"kernel {w.recipe.kernel!r} multiplies no groups; these do: dequantize")
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
    if not w.is_cuda or _capability(w.device.index or 0) < OLDEST:
        return "its kernel is for GPUs of compute capability {}.{} and later".format(*OLDEST)
    return None if dtype in INPUTS else f"it does not read {dtype}"


def select_kernel(w: QuantizedWeight, dtype: torch.dtype, rows: Any = None) -> str:
    """The name of the kernel for a weight (K, N) and inputs of a dtype; ValueError where the recipe's own cannot.

    rows: of the input; with them the kernel is the one that `ao_lab.tune` chose. None, and rows that a tracer leaves open: the
    default.
    """
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
    if rows is not None and len(w.shape) == 2:
        shape = (rows, w.shape[1], w.shape[0])
        chosen = tuned("inference", *inference_keys(w), shape, dtype, w.device)
        if chosen in PRODUCTS and PRODUCTS[chosen].unsupported_reason(w, dtype) is None:
            return chosen
    return next(name for name in _by_default(w) if PRODUCTS[name].unsupported_reason(w, dtype) is None)


def _by_default(w: QuantizedWeight) -> Iterator[str]:
    """The kernels that "auto" may be, the preferred first: not `scaled_mm` on a CPU whose torch takes one scale alone, since
    it multiplies element by element then, a thousand times as long as `dequantize`."""
    slow = _is_host(w.device) and not _cpu_scales_rows()
    return (name for name in PRODUCTS if not (slow and name == "scaled_mm"))


def inference_keys(w: QuantizedWeight) -> tuple[str, str]:
    """The keys of the schemes of a layer's input ("" where it is not quantized) and its weight."""
    return "" if w.recipe.activation is None else w.recipe.activation.key, w.scheme.key


def select_product(w: QuantizedWeight, dtype: torch.dtype) -> Product:
    """The function for a weight (K, N) and inputs of a dtype, of any number of rows; found once by who calls it often.

    Where something was tuned for inference on the device it asks for each range of rows once. What it found holds for
    `choices.VERSION`.
    """
    default = PRODUCTS[select_kernel(w, dtype)].run
    if not any(choice.problem.direction == "inference" for choice in choices_for(w.device)):
        return default
    found: dict[int, Product] = {}

    def run(x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        if pinned():
            return default(x, w, bias)
        rows = rows_range(x.shape[0])
        if rows not in found:
            found[rows] = PRODUCTS[select_kernel(w, dtype, rows)].run
        return found[rows](x, w, bias)

    return run


def quantized_input(x: torch.Tensor, w: QuantizedWeight, scheme: Scheme) -> Quantized:
    """The input in its scheme: static scales where the weight brings them, else found anew."""
    return fast.quantize(x, scheme, axis=-1, scales=w.input_scales)


def _fused_unsupported(w: QuantizedWeight, dtype: torch.dtype) -> str | None:
    device = w.device.type
    if device not in ("cpu", "cuda") or (device == "cuda" and _capability(w.device.index or 0) < OLDEST):
        found = "on " + device
        if device == "cuda":
            found = "of compute capability {}.{}".format(*_capability(w.device.index or 0))
        needs = f"CPUs and GPUs of compute capability {OLDEST[0]}.{OLDEST[1]} and later"
        return f"its kernels are for {needs}, this weight is {found}"
    return unsupported_reason(w, dtype)


def _supports_all(w: QuantizedWeight, dtype: torch.dtype) -> str | None:
    return None


def _int8(x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    inputs = quantized_input(x, w, _activation(w))
    if multiplies_codes(x, w) and (bias is None or bias.shape == w.shape[1:]):
        return linear_of_codes(inputs, w.quantized, bias, dtype=x.dtype)
    weight = w.codes.view(torch.int8)
    sums = _integer_sums(inputs.codes.view(torch.int8), weight.t())
    if inputs.zero is not None:
        sums = sums - inputs.zero.to(torch.int32) * weight.sum(1, dtype=torch.int32)
    y = sums.to(torch.float32) * inputs.scale * _row(w.scale)
    total: torch.Tensor = y if bias is None else y + bias.to(torch.float32)
    return total.to(x.dtype)


def _is_one_row(x: torch.Tensor, w: QuantizedWeight) -> bool:
    """Whether x is one row that a kernel multiplies as codes. A number of rows that a tracer leaves open is not one."""
    if not (w.is_cuda and isinstance(x.shape[0], int) and x.shape[0] == 1):
        return False
    sizes: tuple[Any, ...] = tuple(w.codes.shape)
    rows, length = sizes
    if not (isinstance(rows, int) and isinstance(length, int)):
        # Of sizes that a tracer leaves open the kernel asks one thing; the program keeps the answer.
        rows = length = STEP_CODES if length % STEP_CODES == 0 else 1
    able = _capability(w.device.index or 0) >= OLDEST
    return able and takes_codes(_activation(w).key, w.scheme.key, (rows, length), x.dtype)


def multiplies_codes(x: torch.Tensor, w: QuantizedWeight) -> bool:
    """Whether kernels "int8" and "scaled_mm" are `linear_of_codes` for these inputs."""
    if w.scheme.element == "int8":
        return _are_integer_codes(x, w)
    return _is_one_row(x, w) or _are_few_rows(x, w)


def _are_integer_codes(x: torch.Tensor, w: QuantizedWeight) -> bool:
    """Whether `linear_of_codes` multiplies these integers: one row as `_is_one_row` says, on Hopper's tensor cores any number
    of rows, those that a tracer leaves open too. No rows at all are none."""
    if _is_one_row(x, w):
        return True
    count: Any = x.shape[0]
    none_or_one = isinstance(count, int) and count < 2
    if not w.is_cuda or none_or_one or _capability(w.device.index or 0) != OLDEST:
        return False
    whole: bool = w.codes.shape[1] % STEP_CODES == 0
    return whole and x.dtype in RESULTS


def _are_few_rows(x: torch.Tensor, w: QuantizedWeight) -> bool:
    """Whether x is rows that `linear_of_codes` multiplies faster than torch; sizes that a tracer leaves open are not."""
    sizes: tuple[Any, ...] = (x.shape[0], *w.codes.shape)
    if not w.is_cuda or not all(isinstance(size, int) for size in sizes) or sizes[0] < 2:
        return False
    if _capability(w.device.index or 0) != OLDEST or sizes[2] % STEP_CODES:
        return False
    return codes_beat_torch(_activation(w).key, w.scheme.key, sizes[1:], sizes[0])


def _integer_sums(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Exact sums in int32; with rows of zeros where the GPU wants more of them."""
    count = a.shape[0]
    if a.device.type == "cpu":
        if a.shape[1] != b.shape[0]:  # whose parts may fit each other
            raise ValueError(
                f"inputs of shape {tuple(a.shape)} by a weight (in, out) of {tuple(b.shape)}: inputs have "
                f"{b.shape[0]} columns"
            )
        return integer_sums(a, b)
    if a.is_cuda and count < FEWEST_ROWS:
        a = torch.nn.functional.pad(a, (0, 0, 0, FEWEST_ROWS - count))
    return torch._int_mm(a, b)[:count]


def _int8_unsupported(w: QuantizedWeight, dtype: torch.dtype) -> str | None:
    scheme = w.recipe.activation
    if scheme is None or scheme.element != "int8" or w.scheme.element != "int8":
        return "both operands must be int8"
    if not (one_scale(scheme) and one_scale(w.scheme)) or w.zero is not None:
        return "each row must have one float32 scale, and the weight no zero point"
    if len(w.shape) != 2 or not w.meta.transposed:
        return STORED
    if w.shape[0] > LONGEST_INT8:
        return f"sums longer than {LONGEST_INT8} may overflow int32"
    if w.is_cuda and any(length % STEP_INT8 for length in w.shape):
        return f"its lengths must be multiples of {STEP_INT8} on a GPU"
    return None


def _scaled_mm(x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    if isinstance(x.shape[0], int) and x.shape[0] == 0:  # torch._scaled_mm takes no empty scales
        return dequantized(x, w, bias)
    if _activation(w).scale.block == BLOCK:
        return _scaled_blocks(x, w, bias)
    inputs = quantized_input(x, w, _activation(w))
    if multiplies_codes(x, w):
        return linear_of_codes(inputs, w.quantized, bias, dtype=x.dtype)
    a, b = inputs.codes.view(FLOAT8[inputs.scheme.element]), w.codes.view(FLOAT8[w.scheme.element])
    if a.device != b.device:  # On a CPU torch does not look, and returns memory that nothing was written to.
        raise ValueError(f"inputs are on {a.device}, the weight is on {b.device}; move either by .to(device)")
    scale_a, scale_b = inputs.scale, _row(w.scale)
    if scale_a.dim() != scale_b.dim() or (_is_host(a.device) and w.shape[1] and _cpu_scales_rows()):
        # One scale in all becomes a column or row, which torch multiplies on a CPU by matrices, others element by element; of
        # 0-d, a column of one would have strides of 0.
        scale_a, scale_b = (s.reshape(1, 1) if s.dim() == 0 else s for s in (scale_a, scale_b))
        scale_a, scale_b = scale_a.expand(x.shape[0], 1), scale_b.expand(1, w.shape[1])
    scale_a, scale_b = scale_a.contiguous(), scale_b.contiguous()
    return torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=x.dtype)


def _scaled_blocks(x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    padded = whole_steps(x)
    inputs = quantized_input(padded, w, _activation(w))
    square = w.scheme.scale.block != BLOCK
    y = blocks_product(inputs.codes, w.codes, inputs.scale, w.scale, square, x.dtype, bias)
    return y if padded is x else y[: x.shape[0]]


def _scaled_mm_unsupported(w: QuantizedWeight, dtype: torch.dtype) -> str | None:
    scheme = w.recipe.activation
    if scheme is None or scheme.element not in FLOAT8 or w.scheme.element not in FLOAT8:
        return "both operands must be float8_e4m3fn or float8_e5m2"
    if len(w.shape) != 2 or not w.meta.transposed:
        return STORED
    if dtype not in RESULTS:
        return f"it does not write {dtype}"
    if scheme.scale.block == BLOCK:
        return _scaled_blocks_unsupported(w, scheme, dtype)
    if not (one_scale(scheme) and one_scale(w.scheme)):
        return "each row must have one float32 scale for decoding"
    if w.is_cuda:
        return _scaled_mm_unsupported_on_gpu(w, scheme, dtype)
    if -1 in (scheme.scale.block, w.scheme.scale.block) and not _cpu_scales_rows():
        return f"torch {torch.__version__} takes one scale for each operand on a CPU, 2.13 one for each row"
    return None


def _scaled_blocks_unsupported(w: QuantizedWeight, scheme: Scheme, dtype: torch.dtype) -> str | None:
    if not w.is_cuda or _capability(w.device.index or 0) != CAPABILITY:
        return "its products of blocks are for GPUs of compute capability 9.0"
    if dtype != torch.bfloat16:
        return f"of blocks it writes bfloat16, not {dtype}"
    return blocks_reason(scheme, w.scheme, (w.shape[1], w.shape[0]))


def _scaled_mm_unsupported_on_gpu(w: QuantizedWeight, scheme: Scheme, dtype: torch.dtype) -> str | None:
    if (capability := _capability(w.device.index or 0)) < (8, 9):
        return f"compute capability {capability[0]}.{capability[1]} has no float8 product, 8.9 has"
    if any(length % STEP_FLOAT8 for length in w.shape):
        return f"its lengths must be multiples of {STEP_FLOAT8} on a GPU"
    if scheme.element == w.scheme.element == "float8_e5m2":
        return "GPUs multiply no float8_e5m2 by float8_e5m2"
    rowwise = "tensor" not in (scheme.scale.block, w.scheme.scale.block)
    if dtype != torch.bfloat16 and (rowwise or dtype == torch.float32):
        return f"on a GPU it writes bfloat16, not {dtype}"
    return None


def _is_host(device: torch.device) -> bool:
    """Whether torch multiplies float8 as it does on CPUs."""
    return device.type == "cpu"


@lru_cache(maxsize=1)
def _cpu_scales_rows() -> bool:
    """Whether torch's float8 product on CPUs takes a scale for each row: some versions fail an assertion there."""
    with _disable_current_modes():  # those that trace would answer for torch
        a, scale = torch.zeros(16, 16, device="cpu").to(torch.float8_e4m3fn), torch.ones(16, 1, device="cpu")
        try:
            torch._scaled_mm(a, a.t(), scale_a=scale, scale_b=scale.t(), out_dtype=torch.float32)
        except RuntimeError:
            return False
    return True


@lru_cache(maxsize=64)
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def _reference(x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    if torch.compiler.is_compiling() or type(x) is not torch.Tensor:
        raise ValueError("kernel 'reference' runs on the host and cannot be traced; use kernel='dequantize'")
    scheme = w.recipe.activation
    left: Any = x if scheme is None else quantized_input(x, w, scheme)
    options: dict[str, Any] = {"accumulation": w.recipe.accumulation, "out_dtype": x.dtype, "bias": bias}
    return fast.matmul(left, as_right_operand(w), **options)


def as_right_operand(w: QuantizedWeight) -> Any:
    """The weight (K, N) as `reference.matmul` takes it: a `Quantized` of that shape, or dense float32 where there is none."""
    return transposed(w.quantized) if w.meta.transposed else unpacked(with_plain_scales(w.quantized))


def _activation(w: QuantizedWeight) -> Scheme:
    scheme = w.recipe.activation
    if scheme is None:
        raise ValueError(f"{w.recipe} has no scheme for its input")
    return scheme


def _row(scale: torch.Tensor) -> torch.Tensor:
    """A weight's stored scales (N, 1) as a row; one over the whole tensor as it is."""
    return scale if scale.dim() == 0 else scale.t()


#: Every kernel by name, the preferred first.
PRODUCTS = {
    "int8": Kernel(_int8, _int8_unsupported),
    "scaled_mm": Kernel(_scaled_mm, _scaled_mm_unsupported),
    "fused": Kernel(fused, _fused_unsupported),
    "dequantize": Kernel(dequantized, _supports_all),
    "reference": Kernel(_reference, _supports_all),
}

__all__ = [
    "PRODUCTS",
    "Kernel",
    "Scales",
    "as_right_operand",
    "grouped_product",
    "groups_reason",
    "inference_keys",
    "most_fused_rows",
    "multiplies_codes",
    "product",
    "select_kernel",
    "select_product",
    "sums_along_blocks",
]
