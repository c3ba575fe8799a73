"""On a GPU: operands of experts by kernels against the same by torch operations around the block kernel, at sizes that train.

    PYTHONPATH=. python tests/gpu/training/grouped_casts.py

Codes, scales and tables bit for bit, whatever is under them before; weights that lie along either axis; sizes beyond 2^31
elements. Exits with 1 on any difference.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from ao_lab.training.grouped import autograd
from fast.kernels.grouped import kind_of
from fast.kernels.rowwise_colwise.host import batch_columns
from reference.training import RECIPES
from reference.training.grouped import group_step, padded_rows
from reference.training.recipe import Operand, Recipe
from tests.gpu.training.validate_grouped import poison_free_memory

#: T, K, N, E: sides of whole tiles and of parts, few and many groups, a batch of more than 2^31 elements.
CASES = ((16384, 4096, 2048, 8), (5000, 2048, 1536, 64), (999, 320, 384, 3), (256, 8192, 16384, 20))
NAMES = ("rowwise", "rowwise_with_gw_hp", "tensorwise", "blockwise", "mxfp8", "mxfp6")
#: How often each is compared: a race shows in some runs.
TURNS = 3


def tensors(case: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x, w and ends; groups without rows, an infinity, a column of zeros, NaN in rows of no group."""
    rows, k, n, experts = case
    generator = torch.Generator("cuda").manual_seed(rows)
    x = torch.randn(rows, k, device="cuda", generator=generator).to(dtype)
    w = torch.randn(experts, n, k, device="cuda", dtype=dtype, generator=generator)
    w *= torch.exp2(-(torch.arange(experts, device="cuda") % 5))[:, None, None].to(dtype)
    ends = torch.randint(rows, (experts,), device="cuda", generator=generator).sort().values.to(torch.int32)
    ends[0], ends[1] = 0, ends[2]
    x[int(ends[-1]) :], x[:, 7], x[rows // 3, 3], w[1, 5, 9] = float("nan"), 0, float("inf"), float("nan")
    return x, w, ends


def same(found: Any, wanted: Any) -> bool:
    """Codes exactly, scales exactly but for the bits of NaN."""
    pairs = ((found.codes, wanted.codes), (found.scale, wanted.scale))
    return found.scheme == wanted.scheme and all(equal(a, b) for a, b in pairs)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same numbers, NaN where NaN is."""
    return a.shape == b.shape and torch.equal(a.nan_to_num(-1), b.nan_to_num(-1))


def weights_of(recipe: Recipe, w: torch.Tensor) -> Iterator[str]:
    """w.T of w, and w of one that is stored transposed."""
    turned = w.transpose(1, 2)
    operand = recipe.input_grad.b
    if operand.scheme is None or batch_columns(w, operand.scheme) is None:
        yield "no kernel"
        return
    wanted = autograd._of_rows(turned, operand, None, 0)
    for _ in range(TURNS):
        poison_free_memory("cuda")
        if not same(autograd.weight_operand(turned, operand), wanted):
            yield "w.T differs"
            return


def columns_of(recipe: Recipe, x: torch.Tensor, ends: torch.Tensor) -> Iterator[str]:
    """x.T, and the tables of the layout."""
    operand, step = recipe.weight_grad.b, group_step(recipe)
    if operand.scheme is None:
        return
    if not kind_of(x, operand.scheme, step):
        yield "no kernel"
        return
    tables = autograd._tables(ends, x.shape[0], step)
    places = padded_rows(x.shape[0], len(ends), step)
    owners = autograd._owners(tables[0], places, autograd.GRAIN)
    where = autograd.layout_of(ends, x.shape[0], step)
    if not all(
        torch.equal(a, b)
        for a, b in zip((where.ends, where.source, where.owners), (*tables, owners), strict=True)
    ):
        yield "layout differs"
    wanted = autograd._of_gathered(x, Operand(scheme=operand.scheme), where, None, 0)
    for _ in range(TURNS):
        poison_free_memory("cuda")
        found = autograd.columns_operand(x, operand, where)
        tabled = found.table is wanted.table or equal(found.table, wanted.table)
        if not (same(found.matrix, wanted.matrix) and tabled):
            yield "x.T differs"
            return


def main() -> int:
    """Compare all, and say what differs."""
    failed = 0
    for case in CASES:
        for dtype in (torch.bfloat16, torch.float16):
            x, w, ends = tensors(case, dtype)
            for name in NAMES:
                # A square that reaches into the next expert has no meaning here.
                whole = name != "blockwise" or not (case[1] % 128 or case[2] % 128)
                wrong = [
                    *columns_of(RECIPES[name], x, ends),
                    *(weights_of(RECIPES[name], w) if whole else ()),
                ]
                failed += bool(wrong)
                print(case, dtype, name, ", ".join(wrong) or "agrees", flush=True)
            del x, w
            torch.cuda.empty_cache()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
