"""The families of kernels that multiply rows by a stored weight, as records: what each is called, what it is for, where it is.

A name says architecture, operands and kind: `gemv` for a few rows, `small_m` for up to 128, `gemm` for any number. It is what
`ao_lab.explain` prints for a layer's ranges of rows. `choose` says which of them takes a product.
"""

from __future__ import annotations

from typing import NamedTuple


class Family(NamedTuple):
    """name: see the module text. about: for which products it is. source: the folder of its kernel, from the root."""

    name: str
    about: str
    source: str


SM90_W4A16_GEMV = Family(
    "sm90_w4a16_gemv",
    "up to 16 rows by a preshuffled weight of 4 or 8 bits, by bulk copies in a ring or straight from memory",
    "fast/kernels/sm90_w4a16_gemv",
)
TRITON_SMALL_M = Family(
    "triton_small_m",
    "up to 128 rows by a preshuffled weight, and rows of experts",
    "fast/kernels/linear_small",
)
SM90_W4A16_GEMM = Family(
    "sm90_w4a16_gemm",
    "33 rows and more by a preshuffled weight, decoded on the way to wgmma, and rows of experts",
    "fast/kernels/sm90_w4a16_gemm",
)
SM90_INTN_SMALL_M = Family(
    "sm90_intn_small_m",
    "up to 96 rows by a plain weight of packed integers of 2, 3, 5 or 6 bits",
    "fast/kernels/sm90_intn_small_m",
)
TRITON_GEMV_W4A16 = Family(
    "triton_gemv_w4a16", "one row by a plain weight of 4-bit integers", "fast/kernels/linear"
)
TRITON_GEMV_W8A16 = Family(
    "triton_gemv_w8a16", "one row by a plain weight of 8-bit elements", "fast/kernels/linear"
)
TRITON_GEMV_ANY = Family("triton_gemv_any", "one row by any other plain weight", "fast/kernels/linear")
TRITON_GEMM_SMALL_M = Family(
    "triton_gemm_small_m",
    "2 to 128 rows by a plain weight, 32 where scales change along K",
    "fast/kernels/linear",
)
TRITON_GEMV_W8A8 = Family(
    "triton_gemv_w8a8", "one row of 8-bit codes by codes of 8 bits", "fast/kernels/linear"
)
SM90_S8_GEMM = Family(
    "sm90_s8_gemm",
    "256 rows and more of int8 codes by int8 codes, where tiles fill the GPU",
    "fast/kernels/sm90_s8_gemm",
)
TRITON_INT_SCALED_MM = Family(
    "triton_int_scaled_mm", "2 rows and more of int8 codes by int8 codes", "fast/kernels/scaled_mm"
)
TRITON_SCALED_MM = Family(
    "triton_scaled_mm",
    "rows of float8 codes by float8 codes where it was measured to be quicker than torch's",
    "fast/kernels/scaled_mm",
)
TORCH_SCALED_MM = Family(
    "torch_scaled_mm", "any rows of float8 codes by float8 codes: `torch._scaled_mm`", ""
)
TORCH_INT_MM = Family("torch_int_mm", "any rows of int8 codes by int8 codes: `torch._int_mm`", "")
TORCH_DEQUANTIZE = Family(
    "torch_dequantize", "any rows: the weight is dequantized for the call, and torch multiplies", ""
)

FAMILIES = {
    one.name: one
    for one in (
        SM90_W4A16_GEMV,
        TRITON_SMALL_M,
        SM90_W4A16_GEMM,
        SM90_INTN_SMALL_M,
        TRITON_GEMV_W4A16,
        TRITON_GEMV_W8A16,
        TRITON_GEMV_ANY,
        TRITON_GEMM_SMALL_M,
        TRITON_GEMV_W8A8,
        SM90_S8_GEMM,
        TRITON_INT_SCALED_MM,
        TRITON_SCALED_MM,
        TORCH_SCALED_MM,
        TORCH_INT_MM,
        TORCH_DEQUANTIZE,
    )
}

__all__ = [
    "FAMILIES",
    "SM90_INTN_SMALL_M",
    "SM90_S8_GEMM",
    "SM90_W4A16_GEMM",
    "SM90_W4A16_GEMV",
    "TORCH_DEQUANTIZE",
    "TORCH_INT_MM",
    "TORCH_SCALED_MM",
    "TRITON_GEMM_SMALL_M",
    "TRITON_GEMV_ANY",
    "TRITON_GEMV_W4A16",
    "TRITON_GEMV_W8A8",
    "TRITON_GEMV_W8A16",
    "TRITON_INT_SCALED_MM",
    "TRITON_SCALED_MM",
    "TRITON_SMALL_M",
    "Family",
]
