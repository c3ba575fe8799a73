"""What others multiply with: torch's dense products, cuSPARSELt after a search, torchao's CUTLASS kernel where it is
installed."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.gpu.sparsity.products.inputs import Case
from tests.gpu.sparsity.products.timing import Method


def dense(cases: Sequence[Case]) -> Method:
    """bfloat16 by torch.mm, float8 by torch._scaled_mm with scales of rows and fast sums."""
    if cases[0].x.dtype in (torch.bfloat16, torch.float16):
        return Method("torch.mm", lambda i: torch.mm(cases[i].x, cases[i].dense.t()))

    def scaled(i: int) -> Any:
        one = cases[i]
        return torch._scaled_mm(
            one.x, one.dense.t(), scale_a=one.x_scale, scale_b=one.scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True
        )  # fmt: skip

    return Method("torch._scaled_mm", scaled)


def cusparselt(cases: Sequence[Case], seconds: float) -> Method:
    """The fastest algorithm and split of K of those that there is time for; scales of rows of float8 in a pass after it."""
    eight = cases[0].x.dtype not in (torch.bfloat16, torch.float16)
    stored = [torch._cslt_compress(one.dense) for one in cases]
    alphas = [one.scale.reshape(-1).contiguous() if eight else None for one in cases]
    x_scales = [one.x_scale.to(torch.bfloat16) for one in cases]

    def product(i: int, algorithm: tuple[int, int, int]) -> Any:
        alg, splits, mode = algorithm
        made = torch._cslt_sparse_mm(
            stored[i], cases[i].x.t(), alpha=alphas[i], out_dtype=torch.bfloat16, transpose_result=True,
            alg_id=alg, split_k=splits, split_k_mode=mode,
        )  # fmt: skip
        return made.mul_(x_scales[i]) if eight else made

    one = cases[0]
    right = one.x.float() @ one.dense.float().t()
    right = right * one.x_scale * one.scale.t() if eight else right
    best, chosen = float("inf"), (0, 1, -1)
    end = time.monotonic() + seconds
    for algorithm in _algorithms(stored[0], one):
        if time.monotonic() > end:
            break
        took = _timed(lambda a=algorithm: product(0, a), right, best)
        if took < best:
            best, chosen = took, algorithm
    return Method(f"cuSPARSELt {chosen}", lambda i: product(i, chosen))


def _algorithms(stored: torch.Tensor, one: Case) -> list[tuple[int, int, int]]:
    """What the library's own search gives first, then every algorithm, then splits of K."""
    found: list[tuple[int, int, int]] = []
    most = 30
    try:
        alg, splits, mode, most = torch._C._cusparselt.mm_search(
            stored, one.x.t(), None, None, torch.bfloat16, True
        )
        found.append((alg, splits, mode))
    except Exception as error:  # noqa: BLE001  the search is private and may be missing
        print(f"    cuSPARSELt: no search ({type(error).__name__}: {str(error)[:100]})", flush=True)
    found += [(alg, 1, -1) for alg in range(most)]
    return found + [(alg, splits, mode) for splits in (2, 4) for mode in (1, 2) for alg in range(0, most, 3)]


def _timed(call: Callable[[], Any], right: torch.Tensor, best: float) -> float:
    """Milliseconds of a call; infinite where it fails or is wrong."""
    try:
        made = call()
        torch.cuda.synchronize()
        if made.shape != right.shape or float((made.float() - right).abs().max()) > 0.05 * float(
            right.abs().max()
        ):
            return float("inf")
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(3):
            call()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 3
    except RuntimeError:
        return float("inf")


def torchao(cases: Sequence[Case]) -> Method:
    """Its CUTLASS kernel of float8 with scales of rows; ImportError where it is not there."""
    importlib.import_module("torchao")
    ops = importlib.import_module("torchao.ops")
    stored = [ops.to_sparse_semi_structured_cutlass_sm9x_f8(one.dense) for one in cases]

    def call(i: int) -> Any:
        one = cases[i]
        return ops.rowwise_scaled_linear_sparse_cutlass_f8f8(
            one.x, one.x_scale.reshape(-1), *stored[i], one.scale.reshape(-1), None, torch.bfloat16
        )

    return Method("torchao CUTLASS", call)


__all__ = ["cusparselt", "dense", "torchao"]
