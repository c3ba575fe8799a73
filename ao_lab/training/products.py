"""a @ b.T of quantized matrices: which function computes it.

* ``codes``: `fast.linear_of_codes` of the same codes as below, on GPUs of compute capability 9.0. It is chosen for the shapes
  where it was measured to be faster than torch: few rows, few tiles.
* ``scaled_mm``: `torch._scaled_mm` of 8-bit float codes with one scale for each tensor or each row, on GPUs that have it.
* ``scaled_mm_blocks``: the same with scales of blocks of 128 along the sum, on GPUs of compute capability 9.0
  (`ao_lab.gemm.codes` multiplies these for inference too).
* ``dequantize``: both operands dequantized to the output's dtype, and torch's own product. For scales that are powers of two
  nothing is rounded in between, as bfloat16 holds every element of 8 bits or fewer.
* ``emulate``: both dequantized to float32, the product in float32: on CPUs, and on GPUs without FP8 units.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import index
from typing import Any

import torch

import fast
from ao_lab.gemm.choices import tuned
from ao_lab.gemm.codes import BLOCK, CAPABILITY, STEP, blocks_product, blocks_reason, decodes
from ao_lab.training.casts import Matrix, quantized
from fast.gemm.choose import float8_of_training
from fast.gemm.families import TRITON_SCALED_MM
from fast.matmul.linear import linear_of_codes
from fast.ops import constant_result
from reference import Quantized, Scheme
from reference.schemes.schemes import record_of
from reference.training.recipe import Product

#: GPUs that `codes` was measured on.
HOPPER = (9, 0)
#: Rows of a training batch, by which a function is chosen where a tracer leaves them open: layers fill rows up to whole blocks,
#: so what takes these takes all others.
OPEN = 8192


def product(
    direction: str,
    a: Matrix,
    b: Matrix,
    record: Product,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    kernel: str = "auto",
) -> torch.Tensor:
    """a (M, K) @ b.T (K, N) plus bias (N), in `dtype`.

    direction: "output", "input_grad" or "weight_grad". kernel: a name of `PRODUCTS`; "auto" is `select_product`'s.
    """
    name = select_product(direction, a, b, dtype, record) if kernel == "auto" else kernel
    return PRODUCTS[name].run(a, b, record, dtype, bias)


def select_product(
    direction: str, a: Matrix, b: Matrix, dtype: torch.dtype, record: Product | None = None
) -> str:
    """The function for two operands: the one that `ao_lab.tune` chose, else the first of `PRODUCTS` that can and pays."""
    accumulation = "precise" if record is None else record.accumulation
    fast_sums = accumulation == "fast"
    # Under a tracer some are no integers.
    lengths: tuple[Any, Any, Any] = a.shape[0], b.shape[0], a.shape[1]
    m, n, k = lengths
    keys, device = (scheme_key(a), scheme_key(b)), codes_of(a).device
    name = tuned(direction, *keys, lengths, dtype, device, accumulation)
    if torch.compiler.is_compiling():
        facts = (*keys, settled(m), settled(n), settled(k), str(dtype), str(device), fast_sums)
        traced: str = _able_traced(name or "", *facts)
        return traced
    launched = not is_captured(codes_of(a))
    key = (name, fast_sums, launched, *_facts(a), *_facts(b))
    chosen = _able_before.get(key)
    if chosen is None:
        if len(_able_before) >= MOST:
            _able_before.clear()
        chosen = _able_before[key] = _able(name, a, b, fast_sums, launched)
    return chosen


def settled(length: Any) -> int:
    """A length as a number, under a tracer: of one that is left open `OPEN`, so that one program serves all."""
    from torch.fx.experimental.symbolic_shapes import has_static_value  # not imported where nothing is traced

    return index(length) if has_static_value(length) else OPEN


def is_captured(x: torch.Tensor) -> bool:
    """Whether a CUDA graph records what is done with x."""
    return x.is_cuda and torch.version.cuda is not None and torch.cuda.is_current_stream_capturing()


#: Operands that cuBLAS refused, and what its error says.
_refused: set[tuple[Any, ...]] = set()
NOT_SUPPORTED = "CUBLAS_STATUS_NOT_SUPPORTED"
#: What `_able` found, by all that it looks at.
_able_before: dict[tuple[Any, ...], str] = {}
MOST = 4096


def _facts(matrix: Matrix) -> tuple[Any, ...]:
    """All of an operand that decides who can multiply it."""
    if isinstance(matrix, Quantized):
        codes = matrix.codes
        return matrix.scheme.key, matrix.shape, matrix.packed, codes.dtype, codes.device, matrix.scale.dtype
    return "", matrix.shape, False, matrix.dtype, matrix.device, None


def _able(name: str | None, a: Matrix, b: Matrix, fast_sums: bool, launched: bool = False) -> str:
    """The function of a name where it can, else the first that can and pays. launched: one by one, by the host."""
    if name in PRODUCTS and PRODUCTS[name].unsupported_reason(a, b) is None:
        return name
    # A loop: tracers do not follow operands into a generator.
    for first, one in PRODUCTS.items():
        if one.unsupported_reason(a, b) is None and (
            first != "codes" or _codes_pay(a, b, fast_sums, launched)
        ):
            return first
    raise ValueError("no kernel supports these operands")


@constant_result
def _able_traced(
    name: str, a: str, b: str, m: int, n: int, k: int, dtype: str, device: str, fast_sums: bool
) -> str:
    """`_able` of what a tracer can give away: text and numbers."""
    left, right = stand_in(a, (m, k), dtype, device), stand_in(b, (n, k), dtype, device)
    return _able(name, left, right, fast_sums)


def stand_in(key: str, shape: tuple[int, int], dtype: str, device: str) -> Matrix:
    """An operand of a scheme's key and a shape, without memory."""
    kind = torch.uint8 if key else getattr(torch, dtype.removeprefix("torch."))
    codes = torch.empty((), dtype=kind, device=device).expand(shape)
    if not key:
        return codes
    return Quantized(codes, torch.empty((), device=device), None, None, shape, 1, record_of(key))


def scheme_key(matrix: Matrix) -> str:
    """The key of an operand's scheme; "" for a dense one."""
    return matrix.scheme.key if isinstance(matrix, Quantized) else ""


def codes_of(matrix: Matrix) -> torch.Tensor:
    """The codes of an operand, or the dense operand."""
    return matrix.codes if isinstance(matrix, Quantized) else matrix


def _scaled(
    a: Matrix, b: Matrix, record: Product, dtype: torch.dtype, bias: torch.Tensor | None
) -> torch.Tensor:
    """torch's product; lengths that cuBLAS has no kernel for (a scale for each row, few rows, a long sum: torch says so when it
    is called) go by `codes`, from then on at once."""
    try:
        return scaled_mm(a, b, record, dtype, bias)
    except RuntimeError as error:
        if NOT_SUPPORTED not in str(error) or _codes_unsupported(a, b) is not None:
            raise
    _refused.add((*_facts(a), *_facts(b)))
    _able_before.clear()
    return _codes(a, b, record, dtype, bias)


def _codes_unsupported(a: Matrix, b: Matrix) -> str | None:
    """Of the operands of `torch._scaled_mm` none is refused but on other GPUs; columns may be any number."""
    if not (isinstance(a, Quantized) and isinstance(b, Quantized)):
        return "both operands must be quantized"
    if not (a.codes.is_cuda and torch.cuda.get_device_capability(a.codes.device) == HOPPER):
        return "it needs a GPU of compute capability {}.{}".format(*HOPPER)
    if not {a.scheme.element, b.scheme.element} <= FLOAT8.keys():
        return "it supports e4m3 and e5m2"
    if not (is_one_scale(a.scheme) and is_one_scale(b.scheme)):
        return "each tensor or each row must have one float32 scale for decoding"
    if a.shape[1] % STEP or a.shape[0] * b.shape[0] == 0:
        return f"the sum's length must be a multiple of {STEP}, and there must be rows and columns"
    return None


def _codes_pay(a: Matrix, b: Matrix, fast_sums: bool, launched: bool) -> bool:
    """Whether `fast.gemm.choose` prefers our kernel to torch's, or torch refused the operands."""
    if not (isinstance(a, Quantized) and isinstance(b, Quantized)):
        return False
    if _refused and (*_facts(a), *_facts(b)) in _refused:
        return True
    shape = (b.shape[0], b.shape[1])
    return float8_of_training(a.scheme, b.scheme, shape, a.shape[0], fast_sums, launched) is TRITON_SCALED_MM


def _codes(
    a: Matrix, b: Matrix, record: Product, dtype: torch.dtype, bias: torch.Tensor | None
) -> torch.Tensor:
    fast_sums = record.accumulation == "fast"
    return linear_of_codes(quantized(a), quantized(b), bias, dtype=dtype, fast_sums=fast_sums)


def _dequantize_unsupported(a: Matrix, b: Matrix) -> str | None:
    """On CPUs, and where there are no FP8 units, recipes run emulated, in float32."""
    dense = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    return None if dense or has_fp8(codes_of(a).device) else "without FP8 units recipes are emulated"


def _supports_all(a: Matrix, b: Matrix) -> str | None:
    return None


def _dequantized(
    a: Matrix, b: Matrix, record: Product, dtype: torch.dtype, bias: torch.Tensor | None
) -> torch.Tensor:
    return torch.nn.functional.linear(values(a, dtype), values(b, dtype), bias)


def _emulated(
    a: Matrix, b: Matrix, record: Product, dtype: torch.dtype, bias: torch.Tensor | None
) -> torch.Tensor:
    wide = None if bias is None else bias.to(torch.float32)
    with without_autocast(codes_of(a).device):
        return torch.nn.functional.linear(values(a, torch.float32), values(b, torch.float32), wide).to(dtype)


def without_autocast(device: torch.device) -> torch.autocast:
    """Under autocast torch's product would round its operands to 16 bits; tensors of no memory have no autocast."""
    return torch.autocast("cpu" if device.type == "meta" else device.type, enabled=False)


def values(matrix: Matrix, dtype: torch.dtype) -> torch.Tensor:
    """What an operand stands for."""
    return fast.dequantize(matrix, dtype) if isinstance(matrix, Quantized) else matrix.to(dtype)


#: Formats that `torch._scaled_mm` multiplies, and torch's dtypes of them.
FLOAT8 = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
#: GPUs from this compute capability on multiply 8-bit floats.
FIRST = 89


def capability(device: torch.device) -> int:
    """The compute capability of a GPU, 90 for 9.0; 0 of anything else."""
    return _capability(device.index) if device.type == "cuda" else 0


@constant_result
def _capability(index: int | None) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


def has_fp8(device: torch.device) -> bool:
    """Whether a device multiplies 8-bit floats."""
    return capability(device) >= FIRST


def is_one_scale(scheme: Scheme) -> bool:
    """Whether a scheme has one float32 scale for the tensor or for each row, which multiplies codes."""
    return decodes(scheme) and scheme.scale.block in ("tensor", -1)


def unsupported_reason(a: Any, b: Any) -> str | None:
    """Why `scaled_mm` does not take two operands."""
    if not (isinstance(a, Quantized) and isinstance(b, Quantized)):
        return "both operands must be quantized"
    if not has_fp8(a.codes.device):
        return "it needs a GPU with FP8 units"
    kinds = {a.scheme.element, b.scheme.element}
    if not kinds <= FLOAT8.keys() or kinds == {"float8_e5m2"}:
        return "it supports e4m3 by e4m3 or e5m2"
    if not (is_one_scale(a.scheme) and is_one_scale(b.scheme)):
        return "each tensor or each row must have one float32 scale for decoding"
    if a.shape[1] % STEP or b.shape[0] % STEP or 0 in (*a.shape, *b.shape):
        return f"the sum's length and the columns must be multiples of {STEP}, and nothing may be empty"
    return None


def blocks_unsupported_reason(a: Any, b: Any) -> str | None:
    """Why `scaled_mm_blocks` does not take two operands."""
    if not (isinstance(a, Quantized) and isinstance(b, Quantized)):
        return "both operands must be quantized"
    if divmod(capability(a.codes.device), 10) != CAPABILITY:
        return "it needs a GPU of compute capability 9.0"
    if (reason := blocks_reason(a.scheme, b.scheme, b.shape)) is not None:
        return reason
    if a.shape[0] % STEP or 0 in (*a.shape, *b.shape):
        return f"the rows must be a multiple of {STEP}, and nothing may be empty"
    return None


def scaled_mm(a: Any, b: Any, record: Product, dtype: torch.dtype, bias: torch.Tensor | None) -> torch.Tensor:
    """a (M, K) @ b.T (K, N) plus bias (N) in `dtype`, of one scale for each tensor or each row."""
    a, b = quantized(a), quantized(b)
    left, right = a.codes.view(FLOAT8[a.scheme.element]), b.codes.view(FLOAT8[b.scheme.element])
    scale_a, scale_b = a.scale, b.scale
    if scale_a.dim() or scale_b.dim():
        # One scale in all beside one for each row becomes one for each row.
        scale_a = scale_a.view(-1, 1) if scale_a.dim() else scale_a.expand(left.shape[0], 1).contiguous()
        scale_b = scale_b.view(1, -1) if scale_b.dim() else scale_b.expand(1, right.shape[0]).contiguous()
    after = _added_after(bias, dtype)
    y: torch.Tensor = torch._scaled_mm(
        left,
        right.t(),
        scale_a=scale_a,
        scale_b=scale_b,
        bias=None if after else bias,
        out_dtype=dtype,
        use_fast_accum=record.accumulation == "fast",
    )
    return y.add_(bias) if after and bias is not None else y


def scaled_mm_blocks(
    a: Any, b: Any, record: Product, dtype: torch.dtype, bias: torch.Tensor | None
) -> torch.Tensor:
    """The same of blocks along the sum, precise whichever accumulation is asked for."""
    a, b = quantized(a), quantized(b)
    square, after = b.scheme.scale.block != BLOCK, _added_after(bias, dtype)
    y = blocks_product(a.codes, b.codes, a.scale, b.scale, square, dtype, None if after else bias)
    return y.add_(bias) if after and bias is not None else y


def _added_after(bias: torch.Tensor | None, dtype: torch.dtype) -> bool:
    """Whether the bias is added to the product: with float32 results cuBLAS takes none."""
    return bias is not None and dtype == torch.float32


@dataclass(frozen=True)
class Kernel:
    """A way to compute a product, and why it does not take two operands (None: it does)."""

    run: Callable[[Matrix, Matrix, Product, torch.dtype, torch.Tensor | None], torch.Tensor]
    unsupported_reason: Callable[[Matrix, Matrix], str | None]


#: Every function by name, the preferred first.
PRODUCTS = {
    "codes": Kernel(_codes, _codes_unsupported),
    "scaled_mm": Kernel(_scaled, unsupported_reason),
    "scaled_mm_blocks": Kernel(scaled_mm_blocks, blocks_unsupported_reason),
    "dequantize": Kernel(_dequantized, _dequantize_unsupported),
    "emulate": Kernel(_emulated, _supports_all),
}
