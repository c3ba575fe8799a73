"""`layer_score` for torch tensors: `reference.calibration.allocate` in float64 on the device of d."""

from __future__ import annotations

import torch

from fast.calibration.inputs import float_tensor
from fast.cpu.capability import cpu_capability

#: Tokens that are multiplied at a time.
TOKENS = 1 << 14


def layer_score(d: torch.Tensor, x: torch.Tensor, g: torch.Tensor) -> float:
    """The mean over tokens of (g . D x)^2 / 2 by `reference.layer_score`: d (N, K), x (T, K), g (T, N).

    D x of 16-bit d and x is a product of their dtype's instructions: on a GPU into float32, on a CPU rounded to bfloat16 where
    both are and it has such instructions. Everything else is float64.
    """
    d, x, g = (float_tensor(tensor, "layer_score", name) for tensor, name in ((d, "d"), (x, "x"), (g, "g")))
    fits = d.dim() == x.dim() == g.dim() == 2 and (x.shape[1], g.shape[1]) == (d.shape[1], d.shape[0])
    if not fits or len(x) != len(g) or not len(x):
        raise ValueError(
            f"layer_score takes d (N, K), x (T, K) and g (T, N) with T >= 1, got {tuple(d.shape)}, {tuple(x.shape)} and "
            f"{tuple(g.shape)}"
        )
    total = torch.zeros((), dtype=torch.float64, device=d.device)
    for inputs, gradients in zip(x.split(TOKENS), g.split(TOKENS), strict=True):
        moved = (_outputs(inputs.to(d.device), d) * gradients.to(d.device).double()).sum(1)
        total += moved.square().sum()
    if not bool(total.isfinite()):
        raise ValueError(
            "layer_score takes finite values, and some product is not; look for NaN in x, g and d"
        )
    return float(total) / len(x) / 2


def _outputs(x: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """D x of some tokens in float64."""
    if x.is_cuda and x.dtype == d.dtype and d.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(x, d.mT, out_dtype=torch.float32).double()
    if x.device.type == "cpu" and x.dtype == d.dtype == torch.bfloat16 and cpu_capability().bfloat16:
        return (x @ d.mT).double()
    return x.double() @ d.double().mT


__all__ = ["layer_score"]
