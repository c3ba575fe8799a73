"""Kernels of calibration against the torch operations that they stand for.

    TRITON_INTERPRET=1 python -m tests.emulator.interpreter_process calibration columns|candidates [day]

day: few schemes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from ao_lab.testing.strategies import assert_same_bits
from fast.calibration import gptq
from fast.calibration.search import DeviceSearch
from fast.kernels.calibration import columns as kernel
from fast.quantize.quantize import choose_scales, quantize
from reference import SCHEMES, Scales, Scheme
from reference.arrays.namespace import namespace_of
from reference.calibration.search import Search, has_steps
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


def compare_candidates(scheme: Scheme, dtype: torch.dtype, k: int) -> None:
    """The scales of rows whose blocks do not fill the last program."""
    rng = np.random.default_rng(k)
    w = torch.from_numpy(rng.standard_normal((3, k)).astype(np.float32)).to(dtype)
    weights = torch.from_numpy(rng.exponential(size=k))
    blocks, name = Blocks.of((3, k), scheme.scale, -1), str(dtype).removeprefix("torch.")
    tried = (0, -1, 1, 2) if has_steps(scheme) else (1.0, 0.9, 0.7)
    one = DeviceSearch(Search.of(scheme, name, weights.numpy(), tried, 2.0, blocks), weights, name)
    assert one.covered(blocks)
    given = Scales(outer=quantize(w, scheme).outer) if scheme.outer is not None else None
    made, wanted = one.best_by_kernel(namespace_of(w), w, blocks, given), one.best(w, given)
    for part in ("scale", "outer", "zero"):
        if getattr(wanted, part) is not None:
            assert_same_bits(getattr(made, part), getattr(wanted, part))


def main(what: str, day: str = "") -> None:
    """See the module text."""
    gptq.BLOCK = kernel.BLOCK = COLUMNS
    for name in BY_DAY if day else (*BY_DAY, *BY_NIGHT):
        scheme = narrow(SCHEMES[name])
        if what == "columns":
            compare_columns(scheme, 5 if day else 6, 20, 2)
            if not day:
                compare_columns(scheme, 5, 20, 1)
        elif isinstance(scheme.scale.block, int) and scheme.scale.block > 0:
            scheme = replace(
                scheme, name=f"{scheme.name}_24", scale=replace(scheme.scale, block=24 if not day else 16)
            )
            compare_candidates(scheme, torch.bfloat16, 48)
            compare_candidates(scheme, torch.float32, 480)
        print(name, flush=True)
