"""`linear_sparse` and `linear_sparse_int4` on a GPU where all sums are exact: bit for bit, twice, outputs poisoned beforehand.

Shapes of one row and of many, whole tiles and cut ones, every dtype; of `linear_sparse` the variants that it chooses for them
(every variant: `validate_linear_sparse.py`), scaled and not, with canonical and with arranged metadata.
"""

from __future__ import annotations

import torch

from reference.sparsity.linear_sparse_int4 import sparse_int4_weight
from tests.gpu.harness.pool import Job
from tests.gpu.harness.run import Run, Settings
from tests.gpu.sparsity.products.inputs import case, wanted
from tests.gpu.sparsity.products.int4_cases import EXACT, as_tensors, exact_case
from tests.support.linear_cases import exact_result

INT4, LINEAR = "linear_sparse_int4", "linear_sparse"
#: Of values and of x.
PAIRS = (
    ("float8_e4m3fn", "float8_e4m3fn"), ("bfloat16", "bfloat16"), ("int8", "int8"), ("float16", "float16"),
    ("float8_e5m2", "float8_e4m3fn"), ("float8_e4m3fn", "float8_e5m2"),
)  # fmt: skip
#: Rows of x and of the weight, columns of the weight.
SHAPES = ((3, 72, 160), (1, 256, 1024), (131, 331, 544), (300, 640, 2048))
FEW = 0.2


def jobs(settings: Settings) -> list[Job]:
    """Family "sparsity"."""
    few = settings.fraction <= FEW
    made = [
        Job("sparsity", f"int4 {shape}", INT4, int4_case, (shape, seed), 8.0)
        for seed, shape in enumerate(EXACT)
        if not (few and seed % 3)
    ]
    pairs = PAIRS[:4] if few else PAIRS
    return made + [
        Job("sparsity", f"product {pair[0]} x {pair[1]}", LINEAR, product_case, pair, 4.0) for pair in pairs
    ]


def int4_case(run: Run, shape: tuple[int, int, int, int], seed: int) -> None:
    """Both dtypes of x, one dtype of scales with each; a bias every other time."""
    if run.missing(INT4):
        return
    for at, dtype in enumerate(("bfloat16", "float16")):
        storage = ("float32", "bfloat16")[(seed // 2 + at) % 2]
        one = as_tensors(exact_case(*shape, dtype, storage, seed))
        one = one if seed % 2 else one._replace(bias=None)
        right = exact_result(one.x, sparse_int4_weight(*one[1:4]), one.bias)
        placed = [None if part is None else part.to(run.device) for part in one]
        for call in ("first", "again"):
            got = run.guarded(lambda placed=placed: run.fast.linear_sparse_int4(*placed))
            run.compare(INT4, f"{dtype} scales {storage} {call}", got, right)


def product_case(run: Run, values: str, x: str) -> None:
    """Every shape, results scaled and rounded to bfloat16, and the sums themselves."""
    if run.missing(LINEAR):
        return
    kinds = (getattr(torch, values), getattr(torch, x))
    for shape in SHAPES if run.device.type == "cuda" else SHAPES[:2]:
        torch.manual_seed(0)
        one = case(*shape, kinds, whole=True, device=run.device.type)
        for out in (torch.bfloat16, torch.int32 if values == "int8" else torch.float32):
            scaled = out != torch.int32
            right = wanted(one, out, scaled)
            extra = (one.bias, one.x_scale, one.scale) if scaled else (None, None, None)
            for call, metadata in (
                ("canonical", one.metadata),
                ("arranged", one.arranged),
                ("again", one.arranged),
            ):
                if metadata.dim() == 3 and run.device.type != "cuda":
                    continue
                got = run.guarded(lambda metadata=metadata, extra=extra, out=out, one=one: run.fast.linear_sparse(
                    one.x, one.values, metadata, extra[0], x_scale=extra[1], scale=extra[2], out_dtype=out
                ))  # fmt: skip
                run.compare(LINEAR, f"{shape} {out} {call}", got, right)


__all__ = ["jobs"]
