"""Muon with the dtype of its products as a setting.

`torch.optim.Muon` orthogonalizes every update by five Newton-Schulz iterations, and always multiplies in bfloat16. A GPU has
matrix units for that. A CPU without bfloat16 instructions runs such products 13 to 50 times slower than float32, and the
iterations then take longer than the model's forward and backward passes together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` that multiplies in `dtype`: with torch.bfloat16 it takes the same steps, bit for bit.

    Arguments beside `dtype` are torch's; `state_dict` is as well. Parameters are matrices, real and dense; a parameter
    without a gradient stays as it is. `adjust_lr_fn` other than None or "original" raises ValueError.
    """

    def __init__(self, params: Iterable[Tensor], *, dtype: torch.dtype, **options: Any) -> None:
        if options.get("adjust_lr_fn") not in (None, "original"):
            raise ValueError(f"adjust_lr_fn is None or 'original'; got {options['adjust_lr_fn']!r}")
        super().__init__(params, **options)
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step; returns the loss of `closure`, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        buffer, momentum, rate = state["momentum_buffer"], group["momentum"], float(group["lr"])
        gradient: Tensor = parameter.grad  # type: ignore[assignment]
        buffer.lerp_(gradient, 1 - momentum)
        update = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
        update = orthogonal(
            update, group["ns_coefficients"], group["ns_steps"], eps=group["eps"], dtype=self.dtype
        )
        rows, columns = parameter.shape
        parameter.mul_(1 - rate * group["weight_decay"])
        parameter.add_(update, alpha=-rate * math.sqrt(max(1, rows / columns)))


def orthogonal(
    x: Tensor, coefficients: tuple[float, float, float], steps: int, *, eps: float, dtype: torch.dtype
) -> Tensor:
    """The matrix x with singular values near 1, in `dtype`: `steps` times a x + (b g + c g g) x with g = x x^T.

    x is divided by its Frobenius norm first, at least `eps`. The iterations run along the shorter side. x is not modified.
    """
    a, b, c = coefficients
    tall = x.shape[0] > x.shape[1]
    y = x.to(dtype, copy=True)
    y = y.T if tall else y
    y.div_(y.norm().clamp(min=eps))
    for _ in range(steps):
        gram = y @ y.T
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.T if tall else y


__all__ = ["Muon", "orthogonal"]
