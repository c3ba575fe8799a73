"""Times of one linear layer forward and backward with 2:4 weights, and of its parts, beside torch's dense layer."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

import ao_lab
from ao_lab.sparsity.training.layers import Rule, masked_linear
from ao_lab.sparsity.training.masks import find_mask
from ao_lab.sparsity.training.products import masked
from tests.gpu.sparsity.progress import Progress

ROUNDS, WARM = 15, 3


def calls(shape: tuple[int, int, int], dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """What is timed for one layer, by name."""
    tokens, k, n = shape
    x, g = (torch.randn(tokens, width, device="cuda", dtype=dtype) for width in (k, n))
    w = torch.randn(n, k, device="cuda", dtype=dtype) / k**0.5
    x.requires_grad_(), w.requires_grad_()
    config = ao_lab.SparseTrainingConfig(masks="recomputed", transposable=True)
    rows = ao_lab.SparseTrainingConfig(masks="recomputed")
    mask = find_mask(w, config)
    sparse = Rule("masked", 0.0, "cusparselt", True)
    one_way = Rule("masked", 0.0, "cusparselt", False)
    own = Rule("masked", 0.0, "sparse_wgmma", True)
    kept = masked(w.detach(), mask)
    turned, packed = kept.t().contiguous(), torch._cslt_compress(kept)
    packed_turned = torch._cslt_compress(turned)
    x0, g0 = x.detach(), g

    def both(call: Callable[[], torch.Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(call(), (x, w), g)

    return {
        "dense, forward and backward": both(lambda: F.linear(x, w)),
        "masked, dense products": both(
            lambda: masked_linear(x, w, mask, None, Rule("masked", 0.0, "dense", True))
        ),
        "cusparselt, transposable mask that stays": both(lambda: masked_linear(x, w, mask, None, sparse)),
        "cusparselt, transposable mask found": both(
            lambda: masked_linear(x, w, find_mask(w, config), None, sparse)
        ),
        "cusparselt, mask of rows found": both(
            lambda: masked_linear(x, w, find_mask(w, rows), None, one_way)
        ),
        "sparse_wgmma, transposable mask that stays": both(lambda: masked_linear(x, w, mask, None, own)),
        "sparse_wgmma, transposable mask found": both(
            lambda: masked_linear(x, w, find_mask(w, config), None, own)
        ),
        "find mask of rows": lambda: find_mask(w, rows),
        "find transposable mask": lambda: find_mask(w, config),
        "mask and compress both ways": lambda: (
            torch._cslt_compress(masked(w.detach(), mask)),
            torch._cslt_compress(masked(w.detach().t(), mask.t()).contiguous()),
        ),
        "compress one way": lambda: torch._cslt_compress(kept),
        "output, dense": lambda: F.linear(x0, kept),
        "output, compressed": lambda: torch._cslt_sparse_mm(packed, x0.t(), transpose_result=True),
        "input gradient, dense": lambda: g0.mm(kept),
        "input gradient, compressed": lambda: torch._cslt_sparse_mm(
            packed_turned, g0.t(), transpose_result=True
        ),
        "weight gradient": lambda: g0.t().mm(x0),
    }


def measure(progress: Progress, shape: tuple[int, int, int], dtype: torch.dtype) -> list[dict[str, Any]]:
    """Medians in milliseconds, with 20 and 80 % quantiles."""
    named = calls(shape, dtype)
    took: dict[str, list[float]] = {name: [] for name in named}
    for turn in range(WARM + ROUNDS):
        for name, call in named.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            call()
            end.record()
            end.synchronize()
            if turn >= WARM:
                took[name].append(start.elapsed_time(end))
    found = []
    dense = statistics.median(took["dense, forward and backward"])
    for name, times in took.items():
        fifths = statistics.quantiles(times, n=5)
        middle = statistics.median(times)
        row = {
            "shape": shape,
            "dtype": str(dtype),
            "call": name,
            "ms": middle,
            "low": fifths[0],
            "high": fifths[-1],
        }
        found.append(row | {"dense / this": dense / middle})
        progress.say(f"{shape} {dtype} {name}: {middle:.4f} ms, {dense / middle:.2f}x of dense")
    return found


__all__ = ["calls", "measure"]
