"""The product with block norm in its epilogue in Triton's interpreter, against `reference.linear_block_norm`, bit for bit.

TRITON_INTERPRET=1 python -m tests.emulator.interpreter_process block_norm
"""

from __future__ import annotations

import torch

import reference
from fast.kernels.triton_scaled_mm import block_norm as host
from tests.support.block_norm import CASES, operands


def main(few: str = "") -> None:
    """Each case, by one program that makes all tiles; and a program a tile, of 64 rows."""
    host.MULTIPROCESSORS = 1
    for case in CASES[1:2] if few else CASES:
        _, activation, scheme, dtype, _ = case
        x, w, gain, bias = operands(case)
        expected = reference.linear_block_norm(
            x, w, gain, bias=bias, activation=activation, scheme=scheme or None, dtype=dtype
        )
        wanted = [expected.codes, expected.scale] if scheme else [expected]
        for variant in (host.USUAL, host.Variant(64, along=2)):
            found = host.linear_block_norm(
                x,
                w,
                gain,
                bias,
                1e-6,
                activation == "hard_swish",
                scheme,
                getattr(torch, dtype),
                True,
                variant,
            )
            for one, other in zip(found, wanted, strict=True):
                size = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[one.element_size()]
                different = int((one.view(size) != other.view(size)).sum())
                assert not different, f"{case}, {variant}: {different} of {one.numel()} differ"
        print(case)
