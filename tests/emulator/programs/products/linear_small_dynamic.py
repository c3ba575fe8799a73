"""`linear_small_dynamic` on CPU tensors in Triton's interpreter: inputs to the bit, products against exact ones and the bound.

    TRITON_INTERPRET=1 python tests/emulator/programs/products/linear_small_dynamic.py [SCHEME ...]

Prints what agreed, a line for each scheme of inputs; raises at the first difference. The sequences of Hopper are emulated.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from math import floor, log2
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

import torch
import triton

import fast
import reference
from ao_lab.config.recipe import Recipe, named
from ao_lab.gemm import select
from ao_lab.tensor.preshuffled import unsupported_reason
from ao_lab.tensor.quantized_tensor import from_quantized
from ao_lab.testing.strategies import assert_same_bits
from fast import dispatch
from fast.kernels.exact_inputs import host
from fast.kernels.exact_inputs.kernel import row_codes_kernel
from fast.kernels.quantize.geometry import power_above
from fast.kernels.scheme.constants import block_op, constants_of
from fast.matmul.preshuffled import layout
from fast.matmul.preshuffled.dynamic import CODES, kind_of, linear_small_dynamic
from reference import Quantized, Scheme
from tests.emulator import ptx_interpreter
from tests.support.linear_cases import exact_weight, inputs, weight

BF16, HALF = torch.bfloat16, torch.float16
NAMES = {BF16: "bfloat16", HALF: "float16"}
SCHEMES = (
    "int8_rowwise", "int8_rowwise_asymmetric", "fp8_rowwise", "fp8_rowwise_e5m2", "torchao.int8_rowwise",
    "torchao.int8_rowwise_asymmetric", "compressed_tensors.fp8_token", "int8_rowwise_bf16", "mxfp8_e4m3", "mxfp8_e4m3_rceil",
    "mxfp8_e5m2_rceil", "mxfp4_rceil", "mxfp6_e2m3", "mxint8",
)  # fmt: skip
#: Schemes of weights, and rows of X of the products.
WEIGHTS = (("int4_g128", 3), ("int4_g32_asymmetric", 17), ("int8_rowwise", 1), ("mxfp8_e4m3", 5))


def rows_of(dtype: torch.dtype, length: int) -> torch.Tensor:
    """Random rows, and rows of zeros, of one element, of the ends of the range, with infinities and NaN."""
    x = inputs(12, length, torch.float32) * 2.0 ** (5 * torch.arange(12) % 17 - 8)[:, None]
    x = x.to(dtype)
    info = torch.finfo(dtype)
    x[1], x[2], x[3], x[4] = 0.0, -0.0, info.max, info.smallest_normal
    x[5, 1:] = 0.0
    x[6, 7], x[7, 9] = float("inf"), float("nan")
    x[8] = x[8].abs()
    return x


def expected(x: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Of the reference: values, or decoded codes less the zero point, and scales."""
    if kind_of(scheme) != CODES:
        return reference.fake_quantize(x, scheme), None
    q = reference.quantize(x, scheme)
    values = torch.from_numpy(scheme.format.values.copy())[q.codes.long()]
    values = values if q.zero is None else values - q.zero.float()
    scale = q.scale if scheme.scale.storage == "float32" else q.scale.view(torch.bfloat16).float()
    return values.to(x.dtype), scale[:, 0]


def same_inputs(made: tuple[torch.Tensor, torch.Tensor | None], x: torch.Tensor, scheme: Scheme) -> None:
    """Scales to the bit; elements where the scale is a number."""
    values, scale = expected(x, scheme)
    if scale is None:
        assert_same_bits(made[0], values)
        return
    assert made[1] is not None
    assert_same_bits(made[1], scale)
    real = ~scale.isnan()
    assert torch.equal(made[0].isnan()[real], values.isnan()[real])
    assert torch.equal(made[0].nan_to_num()[real], values.nan_to_num()[real])


def inputs_agree(scheme: Scheme) -> None:
    """By the rules, and of codes by the sequences of a GPU; rows that fill a program and rows that do not."""
    for dtype in host.product.INPUTS:
        for length in (256, 384):
            x = rows_of(dtype, length)
            kind = str(kind_of(scheme))
            made = host.exact_inputs(x, scheme, kind)
            assert made is not None
            same_inputs(made, x, scheme)
            if kind != CODES:
                continue
            y, scale = torch.empty_like(x), torch.empty(len(x))
            rule = constants_of(scheme, NAMES[dtype])
            row_codes_kernel[(len(x),)](x, y, scale, length, power_above(length), rule, block_op(), False)
            same_inputs((y, scale), x, scheme)


def with_exact_scales(count: int, length: int, dtype: torch.dtype, scheme: Scheme) -> torch.Tensor:
    """Small integers times a power of two, and the largest in each block, so that its scale is one and nothing is rounded."""
    x = torch.randint(-2, 3, (count, length), generator=torch.Generator().manual_seed(1)).float()
    top = scheme.scale.target if kind_of(scheme) == CODES else 2.0 ** floor(log2(scheme.scale.target))
    x *= 2.0 ** max(floor(log2(top)) - 8, 0)
    x[:, ::32] = top
    if scheme.zero is not None:
        x[:, ::32], x[:, 1::32] = top // 2 + 1, -(top // 2)
    return x.to(dtype)


def multiplied(q: Quantized, x: torch.Tensor, scheme: Scheme, bias: torch.Tensor | None) -> torch.Tensor:
    """The product of what is stored, with all digits and rounded once."""
    values = reference.dequantize(reference.quantize(x, scheme)).double()
    result = values @ fast.dequantize(q).double().t()
    result = result if bias is None else result + bias.double()
    narrow = result.float()
    assert torch.equal(narrow.double(), result)
    return narrow.to(x.dtype)


def products_agree(scheme: Scheme, weights: Iterable[tuple[str, int]]) -> None:
    """Exact sums to the bit, random ones within the bound, through the public function and through layers."""
    for name, count in weights:
        length, dtype = 256, (BF16, HALF)[count % 2]
        w, bias = exact_weight(named(name), 128, length), 64 * (torch.arange(128) % 7 - 3).to(dtype)
        x = with_exact_scales(count, length, dtype, scheme)
        stored = layout.preshuffled(w)
        made = linear_small_dynamic(x, scheme, stored, bias)
        assert_same_bits(made, multiplied(w, x, scheme, bias))
        layer = from_quantized(w, Recipe(weight=named(name), activation=scheme), dtype)
        if unsupported_reason(layer) is None:
            t = layer.to_layout("preshuffled")
            assert_same_bits(select.PRODUCTS["fused"].run(x, t.transposed(), bias), made)
        w, x = weight(named(name), 128, length), inputs(count, length, dtype)
        made = linear_small_dynamic(x[None], scheme, layout.preshuffled(w))[0]
        values = reference.dequantize(reference.quantize(x, scheme))
        bound = reference.linear_error_bound(values, w, out_dtype=NAMES[dtype])
        exact = values.double() @ fast.dequantize(w).double().t()
        assert bool(((made.double() - exact).abs() <= bound).all())
        many = inputs(130, length, dtype)
        wanted = fast.fake_quantize(many, scheme) @ fast.dequantize(w, dtype).t()
        assert_same_bits(linear_small_dynamic(many, scheme, layout.preshuffled(w)), wanted)


def main() -> None:
    """Compare all."""
    assert triton.knobs.runtime.interpret, "TRITON_INTERPRET=1 is missing"
    ptx_interpreter.install()
    dispatch.has_kernels = lambda x: True
    for at, name in enumerate(SCHEMES):
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        scheme = named(name)
        inputs_agree(scheme)
        # Each by two of the weights in turn.
        products_agree(scheme, [WEIGHTS[(at + more) % len(WEIGHTS)] for more in range(2)])
        print(name, flush=True)
    print("agreed", flush=True)


if __name__ == "__main__":
    main()
