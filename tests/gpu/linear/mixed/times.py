"""Times of `sm90_w4a16_gemm` beside torch's bfloat16 product and the dense route, as CUDA graphs, in turn."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from fast.kernels.linear_small.dense import arranged_dense
from fast.kernels.linear_small.layout import ArrangedWeight
from fast.kernels.sm90_w4a16_gemm.host import Product, weight_of
from fast.kernels.sm90_w4a16_gemm.select import candidates
from fast.kernels.sm90_w4a16_gemm.variants import Variant
from tests.gpu.harness.graph_times import captured, in_turn
from tests.gpu.linear.small import weights

#: Bytes that weights in turn have together at least, and rounds.
COLD, ROUNDS = 150e6, 7


def calls_of(
    x: torch.Tensor, arranged: list[ArrangedWeight], variant: Variant | None
) -> list[Callable[[], Any]]:
    """By the kernel, with each weight."""
    call = Product(x, arranged[0], None, variant)
    return [partial(call, x, w.words, w.scale, w.zero) for w in arranged]


def by_dense(x: torch.Tensor, w: ArrangedWeight) -> torch.Tensor:
    """What larger products were before."""
    made = arranged_dense(w, x.dtype)
    assert made is not None
    return F.linear(x, made)


class Weights:
    """Of a shape."""

    def __init__(self, name: str, shape: tuple[int, int]) -> None:
        first = weights.filled_weight(name, shape)
        self.name, self.shape = name, shape
        self.arranged = [
            first,
            *(weights.filled_weight(name, shape) for _ in range(int(COLD / first.nbytes))),
        ]
        draw = partial(torch.randn, shape, device=weights.DEVICE, dtype=torch.bfloat16)
        self.dense = [draw() * 0.02 for _ in range(int(COLD / (2 * shape[0] * shape[1])) + 1)]

    def timed(self, count: int, swept: bool) -> dict[str, float]:
        """Microseconds by the name of a variant, of bf16 and of the dense route."""
        x = torch.randn(count, self.shape[1], device=weights.DEVICE, dtype=torch.bfloat16)
        graphs = {
            "bf16": captured([partial(F.linear, x, w) for w in self.dense]),
            "dense": captured([partial(by_dense, x, w) for w in self.arranged[:3]]),
            "rule": captured(calls_of(x, self.arranged, None)),
        }
        some = candidates(count, self.shape[1], weight_of(self.arranged[0])) if swept else ()
        graphs |= {one.name: captured(calls_of(x, self.arranged, one)) for one in some}
        return in_turn(graphs, ROUNDS)

    def told(self, count: int, swept: bool) -> tuple[str, dict[str, float]]:
        """A line, and its times."""
        took = self.timed(count, swept)
        chosen = Product(
            torch.empty(count, self.shape[1], device=weights.DEVICE, dtype=torch.bfloat16),
            self.arranged[0],
            None,
        )
        own = sorted((us, name) for name, us in took.items() if name not in ("bf16", "dense", "rule"))
        text = (
            f"{self.name} {self.shape} {count:5} rows: bf16 {took['bf16']:8.2f} dense {took['dense']:8.2f} "
            f"rule {took['rule']:8.2f} x{took['bf16'] / took['rule']:.3f} ({chosen.variant.name})"
        )
        return text + "".join(f" {name}={us:.1f}" for us, name in own[:5]), took


__all__ = ["Weights"]
