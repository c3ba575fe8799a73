"""`layer_norm_quantize` in Triton's interpreter, on CPU tensors, against the reference, bit for bit.

TRITON_INTERPRET=1 python -m tests.emulator.interpreter_process layer_norm

Prints how many were the same.
"""

from __future__ import annotations

import torch

import reference
from fast.kernels.layers import layer_norm
from tests.emulator.programs.producers import DTYPES, extreme, normal, same

#: Rows of one program and of several, filled up in columns and in rows; blocks of rows and of 32.
SHAPES = ((2, 5, 96), (3, 1536), (33, 1), (5, 512))
SCHEMES = ("fp8_rowwise", "mxfp8_e4m3", "int4_g32_asymmetric")


def main(few: str = "") -> None:
    """All dtypes, shapes and schemes, with a bias and without; few: one of each kind."""
    done = 0
    for dtype in DTYPES[:1] if few else DTYPES:
        for x in [*(normal(shape, dtype, 2) for shape in (SHAPES[:1] if few else SHAPES)), extreme(dtype)]:
            weight, bias = (normal(x.shape[-1:], dtype, seed) for seed in (3, 4))
            for name in SCHEMES[:2] if few else SCHEMES:
                for added, eps in ((None, 1e-5), (bias, 0.0)):
                    done += _compared(x, weight, added, name, eps)
    print(done)


def _compared(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, name: str, eps: float) -> int:
    """1 if the kernel takes it; raises where a bit differs."""
    if x.shape[-1] % max(reference.SCHEMES[name].scale.block, 1):
        return 0
    got = layer_norm.layer_norm_quantize(x, weight, bias, name, eps, False)
    wanted = reference.layer_norm_quantize(x, weight, name, bias=bias, eps=eps)
    return 0 if got is None else same(f"{name} {x.dtype} {tuple(x.shape)} {eps}", got, wanted)
