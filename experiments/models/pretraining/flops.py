"""Floating-point operations of a training step, as the field counts them, and the share of a GPU's peak that they come to.

Per byte (a token) of a model with N parameters in linear layers, L layers of width w, and sequences of T bytes:

    6 N + 6 L T w

A linear layer takes 2 operations a parameter in the forward pass, and twice as many backward. Causal attention takes 2 products
(queries by keys, probabilities by values) of 2 w operations for each of the T / 2 bytes that a byte attends to on average:
2 L T w forward, and twice as many backward. Embedding, norms, rotary positions, softmax, loss and optimizer are not counted,
and neither is what a recipe of low precision adds (casts) or runs again.
"""

from __future__ import annotations

from torch import nn

from experiments.models.language_model import ModelSettings

#: Dense bfloat16 products, operations a second, by the name that torch gives the GPU: NVIDIA's data sheets, without sparsity.
BFLOAT16_PEAK = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12}


def linear_parameters(model: nn.Module) -> int:
    """Parameters of the weights of all linear layers, the output layer too."""
    return sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))


def training_flops(parameters: int, settings: ModelSettings) -> int:
    """Operations for each trained byte of a model with so many parameters in linear layers, by the formula above."""
    return 6 * parameters + 6 * settings.layers * settings.context * settings.width


def share_of_peak(flops: float, bytes_per_second: float, device: str) -> float | None:
    """Percent of the GPU's dense bfloat16 peak, of operations a byte; None for a device whose peak is not listed."""
    peak = BFLOAT16_PEAK.get(device)
    return None if peak is None else 100 * flops * bytes_per_second / peak


__all__ = ["BFLOAT16_PEAK", "linear_parameters", "share_of_peak", "training_flops"]
