"""Kernels of calibration against the torch operations that they stand for.

    TRITON_INTERPRET=1 python -m tests.emulator.interpreter_process calibration columns [day]

day: few schemes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from ao_lab.testing.strategies import assert_same_bits
from fast.calibration import gptq
from fast.kernels.calibration import columns as kernel
from fast.quantize.quantize import choose_scales
from reference import SCHEMES, Scheme
from reference.quantize.blocks import Blocks

#: Blocks of so few columns: an interpreted column takes a tenth of a second.
COLUMNS = 16
BY_DAY = ("mxfp4", "int3_g32_asymmetric", "nvfp4")
BY_NIGHT = (
    "int4_g32", "int8_rowwise", "int8_tensorwise", "mxint8", "mxfp6_e2m3", "mxfp8_e5m2", "fp8_128x128", "stretched2_g32",
    "te.nvfp4", "compressed_tensors.nvfp4", "torchao.int4_g32_tinygemm", "torchao.mxfp4_rceil",
    "torchao.fp8_rowwise_training",
)  # fmt: skip


def narrow(scheme: Scheme) -> Scheme:
    """With blocks of four columns, or tiles of two rows by four."""
    block = scheme.scale.block
    if block in (-1, "tensor"):
        return scheme
    size = (2, 4) if isinstance(block, tuple) else 4
    return replace(scheme, name=f"{scheme.name}_narrow", scale=replace(scheme.scale, block=size))


def compare_columns(scheme: Scheme, rows: int, k: int, each: int) -> None:
    """All that a sweep gives, of a matrix with a block and a rest, in another order; each: rows of a warp."""
    rng = np.random.default_rng(rows)
    w = torch.from_numpy(rng.standard_normal((rows, k)).astype(np.float32))
    upper = torch.from_numpy(np.triu(rng.standard_normal((k, k)) / 4, 1) + np.diag(1 + rng.random(k)))
    rule = gptq.ColumnRule.of(scheme, choose_scales(w, scheme), Blocks.of((rows, k), scheme.scale, -1), w)
    picked = torch.arange(rows)[rows % 2 :: 1 + rows % 2]
    sweep = gptq.Sweep.of(w.double(), upper, torch.from_numpy(rng.permutation(k)), picked)
    kernel.rows_of_warp = lambda _: each
    wanted, made = sweep.run(rule), sweep.run(replace(rule, kernel=True))
    for part in ("targets", "change", "loss"):
        assert_same_bits(getattr(made, part), getattr(wanted, part))


def main(_: str, day: str = "") -> None:
    """See the module text."""
    gptq.BLOCK = kernel.BLOCK = COLUMNS
    for name in BY_DAY if day else (*BY_DAY, *BY_NIGHT):
        scheme = narrow(SCHEMES[name])
        compare_columns(scheme, 5 if day else 6, 20, 2)
        if not day:
            compare_columns(scheme, 5, 20, 1)
        print(name, flush=True)
