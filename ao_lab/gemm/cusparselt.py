"""cuSPARSELt's product of a 2:4 weight, through torch: a candidate of `ao_lab.tune`, never a default.

y' (N, M) = W x' with the sparse operand on the left, written transposed, so y (M, N) comes out row-major. By operands:

* 16-bit elements stored as they are, and inputs of that dtype: float32 sums, one rounding, the bias added before it.
* int8 by int8, a scale for each row: int32 sums, then what kernel "int8" does after its sums: the same bits as the dense layer.
* float8_e4m3fn by float8_e4m3fn: float32 sums, written as float32; then scales and bias as for int8, in float32, and one
  rounding.

The library's own arrangement of the weight is made from the canonical parts when a product first needs it and kept beside them
(as many bytes again); changed parts are arranged anew. Its traps, and what guards here: 8-bit outputs are e4m3 or int8 unless
`out_dtype` says otherwise, and 16-bit ones refuse it; a vector alpha, a scale for each row of the weight, is refused for float8
("operation not supported": Hopper, torch 2.11, CUDA 13.0), and an alpha of one element waits for the GPU, so none is given; a
right operand that is not contiguous is read as a packed transpose, and pointers are expected at multiples of 16 bytes, so the
input and the bias are copied where they are not so; a bias of another dtype is read unchecked, so the dense equivalent is
multiplied; few rows are padded to 8 or 16. What the library refuses for lengths and element `ao_lab.tune` asks it beforehand.
Algorithms are those that `ao_lab.gemm.cusparselt_algorithms` has searched and verified; without one the dense equivalent is
multiplied.

Sources: cuSPARSELt 0.8 documentation, cusparseLtMatmul; PyTorch's cuSPARSELtOps.cpp.
"""

from __future__ import annotations

from typing import Any

import torch

import fast
from ao_lab.gemm.arranged import kept
from ao_lab.gemm.cusparselt_algorithms import OUT, Algorithm, Call, known, refusal, search, searches
from ao_lab.gemm.operand import QuantizedWeight
from ao_lab.gemm.products.codes import quantized_input
from ao_lab.gemm.select import PRODUCTS, Kernel
from ao_lab.gemm.sparse import device_reason, enter, kind_of, shape_reason, traceable
from fast.matmul.weights import one_scale

NAME = "cusparselt"
#: torch's dtypes of the elements that it multiplies, and what lengths are multiples of.
ELEMENTS = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn,
}  # fmt: skip
STEPS = {1: 32, 2: 16}
#: Rows are padded to multiples of these.
ROWS = {1: 16, 2: 8}
#: The compute capability from which there are products of 16-bit elements and integers, and of float8.
OLDEST, OLDEST_FLOAT8 = (8, 0), (8, 9)
#: Bytes that addresses of operands are multiples of.
ALIGNMENT = 16


def unsupported_reason(w: QuantizedWeight, dtype: torch.dtype) -> str | None:
    """Why it does not take a weight (K, N) beside inputs of a dtype; None where it does."""
    if w.meta.layout != "2:4":
        return "the weight is not in 2:4 storage"
    if (reason := _operands_reason(w, dtype)) is not None:
        return reason
    step = STEPS[ELEMENTS[w.scheme.element].itemsize]
    return shape_reason(w, step, features=True) or _device_reason(w) or _library_reason(w)


def _operands_reason(w: QuantizedWeight, dtype: torch.dtype) -> str | None:
    element, activation = w.scheme.element, w.recipe.activation
    if element in ("bfloat16", "float16"):
        if activation is not None or dtype != ELEMENTS[element]:
            return f"inputs of {element} weights must be {element} themselves, got {dtype}"
        return None
    if element not in ELEMENTS:
        return f"it multiplies bfloat16, float16, int8 and float8_e4m3fn, not {element}"
    if activation is None or activation.element != element:
        return f"inputs of {element} weights must be {element} too"
    if not (one_scale(activation) and one_scale(w.scheme)) or w.zero is not None:
        return "each row must have one float32 scale for decoding, and the weight no zero point"
    return None


def _device_reason(w: QuantizedWeight) -> str | None:
    if w.is_cuda and not torch.backends.cusparselt.is_available():
        return f"torch {torch.__version__} was built without cuSPARSELt"
    return device_reason(w, OLDEST_FLOAT8 if kind_of(w.scheme) == "float8" else OLDEST)


def _library_reason(w: QuantizedWeight) -> str | None:
    """What the library itself says; asked while `ao_lab.tune` measures. At other times only verified algorithms run."""
    if not searches():
        return None
    return refusal(int(w.shape[1]), int(w.shape[0]), ELEMENTS[w.scheme.element], w.device)


def run(x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x (M, K) times w (K, N), plus bias, in x's dtype; by the dense equivalent where no algorithm is known for the rows."""
    rows = x.shape[0]
    element = ELEMENTS[w.scheme.element]
    other = element.itemsize == 2 and bias is not None and bias.dtype != x.dtype
    if not isinstance(rows, int) or not rows or other:
        return PRODUCTS["dequantize"].run(x, w, bias)
    algorithm = known(str(w.device), int(w.shape[1]), int(w.shape[0]), rows, str(element))
    if algorithm is None and searches():
        algorithm = search(_call(x, w, bias), (int(w.shape[1]), int(w.shape[0]), rows), element, w.device)
    if algorithm is None:
        return PRODUCTS["dequantize"].run(x, w, bias)
    return _multiplied(x, w, bias, algorithm)


def _multiplied(
    x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None, algorithm: Algorithm
) -> torch.Tensor:
    element = ELEMENTS[w.scheme.element]
    scheme = w.recipe.activation
    parts, chosen = (w.codes, w.metadata, str(element)), tuple(algorithm)  # type: ignore[attr-defined]
    if scheme is None:
        return _rows(product_of(x, *parts, bias, *chosen), x.shape[0])
    inputs = quantized_input(x, w, scheme)
    sums = _rows(product_of(inputs.codes.view(element), *parts, None, *chosen), x.shape[0])
    if inputs.zero is not None:
        sums = sums - inputs.zero.to(torch.int32) * w.codes.view(torch.int8).sum(1, dtype=torch.int32)
    y = sums.to(torch.float32) * inputs.scale * (w.scale if w.scale.dim() == 0 else w.scale.reshape(-1))
    total: torch.Tensor = y if bias is None else y + bias.to(torch.float32)
    return total.to(x.dtype)


def _call(x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None) -> Call:
    """What a search calls with an algorithm: this product, its input's cast included."""
    return lambda algorithm: _multiplied(x, w, bias, algorithm)


def _rows(y: torch.Tensor, rows: int) -> torch.Tensor:
    return y[:rows]


def _product(
    b: torch.Tensor,
    codes: torch.Tensor,
    metadata: torch.Tensor,
    element: str,
    bias: torch.Tensor | None,
    alg_id: int,
    split_k: int,
    mode: int,
) -> torch.Tensor:
    """b (M, K) times the 2:4 codes (N, K/2), padded rows below: (M', N)."""
    packed = arranged(codes, metadata, ELEMENTS[element.removeprefix("torch.")])
    step = ROWS[b.dtype.itemsize]
    # A byte view is padded: torch pads no float8.
    missing = -b.shape[0] % step
    padded = torch.nn.functional.pad(b.view(torch.uint8), (0, 0, 0, missing)).view(b.dtype) if missing else b
    settings: dict[str, Any] = {"alg_id": alg_id, "split_k": split_k, "split_k_mode": mode}
    if (out := OUT.get(b.dtype)) is not None:
        settings["out_dtype"] = out
    if bias is not None:
        settings["bias"] = _readable(bias)
    return torch._cslt_sparse_mm(packed, _readable(padded).t(), transpose_result=True, **settings)


def _fake(
    b: torch.Tensor, codes: torch.Tensor, metadata: torch.Tensor, element: str, *rest: Any
) -> torch.Tensor:
    step = ROWS[b.dtype.itemsize]
    return b.new_empty((-(-b.shape[0] // step) * step, codes.shape[0]), dtype=OUT.get(b.dtype, b.dtype))


def _readable(x: torch.Tensor) -> torch.Tensor:
    """Itself where the library can read it, else a copy: contiguous, at an address that is a multiple of `ALIGNMENT`."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % ALIGNMENT else x


def arranged(codes: torch.Tensor, metadata: torch.Tensor, element: torch.dtype) -> torch.Tensor:
    """The library's arrangement of canonical codes and metadata, kept with the codes until either changes."""

    def make() -> torch.Tensor:
        return torch._cslt_compress(fast.decompress(codes.view(element), metadata))

    return kept(codes, metadata, NAME, make)


product_of = traceable("cusparselt_mm", _product, _fake)
enter(NAME, Kernel(run, unsupported_reason))

__all__ = ["NAME", "arranged", "product_of", "run", "unsupported_reason"]
