"""SignRound for torch tensors; `reference.calibration.signround` states the rules, and its steps run here too.

CPU tensors run the reference; elsewhere codes, values and their gradients come from the kernels of `fast.quantize`, the rest is
operations of torch in the reference's order: the same bits. Gradients are given by `vjp`, not by autograd.
"""

from __future__ import annotations

import torch

from fast.calibration.inputs import float_tensor, numpy_of, torch_of, weight_matrix
from fast.quantize.fake_quantize import fake_quantize_vjp
from fast.quantize.quantize import dequantize, quantize
from reference.calibration import signround as rule
from reference.calibration.signround import Functions, Rounding, SignRounded, SignRoundState
from reference.quantize.stored import Quantized, Scales
from reference.schemes.schemes import Scheme, scheme_of

TORCH = Functions(quantize, dequantize, fake_quantize_vjp)


def signround_start(
    w: torch.Tensor, scheme: str | Scheme, quantized: Quantized | None = None
) -> SignRoundState:
    """V = 0 and factors of 1, or V at the codes of `quantized`, on w's device: see `reference.signround_start`."""
    w = weight_matrix(w, "signround_start")
    if w.device.type == "cpu":
        return _tensors(rule.signround_start(numpy_of(w), scheme, numpy_of(quantized)))
    return rule.start(TORCH, w, scheme_of(scheme), quantized)


def signround_quantize(
    w: torch.Tensor,
    v: torch.Tensor,
    low: torch.Tensor | None,
    high: torch.Tensor | None,
    scheme: str | Scheme,
    *,
    scales: Scales | None = None,
) -> SignRounded:
    """The values that a scheme stores for w under v, low and high, and their gradients: see `reference.signround_quantize`."""
    w, state = weight_matrix(w, "signround_quantize"), SignRoundState(v, low, high)
    if w.device.type != "cpu":
        return signround_on_device(w, state, scheme, scales).result()
    result = rule.signround_quantize(numpy_of(w), *map(numpy_of, state), scheme, scales=numpy_of(scales))
    return SignRounded(
        torch_of(result.values),
        lambda g: _tensors(result.vjp(numpy_of(float_tensor(g, "signround_quantize", "g")))),
    )


def signround_unchecked(
    w: torch.Tensor,
    v: torch.Tensor,
    low: torch.Tensor | None,
    high: torch.Tensor | None,
    scheme: str | Scheme,
    *,
    scales: Scales | None = None,
) -> SignRounded:
    """`signround_quantize` for loops: w, that it has taken once, and states of `signround_start` and `signround_step`.

    Off the host values are not looked at, so no call waits for the device. The same bits; NaN, and v or factors out of range,
    give what they give.
    """
    if w.device.type == "cpu":
        return signround_quantize(w, v, low, high, scheme, scales=scales)
    return signround_on_device(
        w.detach(), SignRoundState(v, low, high), scheme, scales, checked=False
    ).result()


def signround_codes(
    w: torch.Tensor,
    v: torch.Tensor,
    low: torch.Tensor | None,
    high: torch.Tensor | None,
    scheme: str | Scheme,
    *,
    scales: Scales | None = None,
) -> Quantized:
    """What `signround_quantize` stores: see `reference.signround_codes`."""
    w, state = weight_matrix(w, "signround_codes"), SignRoundState(v, low, high)
    if w.device.type != "cpu":
        return signround_on_device(w, state, scheme, scales).quantized
    result = rule.signround_codes(numpy_of(w), *map(numpy_of, state), scheme, scales=numpy_of(scales))
    return torch_of(result)  # type: ignore[no-any-return]


def signround_step(
    state: SignRoundState, grads: SignRoundState, rate: float, *, range_rate: float | None = None
) -> SignRoundState:
    """state moved against the signs of its gradients, within its bounds: see `reference.signround_step`."""
    return rule.step(state, grads, rate, range_rate)


def signround_on_device(
    w: torch.Tensor, state: SignRoundState, scheme: str | Scheme, scales: Scales | None, checked: bool = True
) -> Rounding:
    """One evaluation by torch operations on w's device, whatever it is; unchecked it waits for the device nowhere."""
    parts = [None if part is None else float_tensor(part, "signround", "its state") for part in state]
    return Rounding(TORCH, w, SignRoundState(*parts), scheme_of(scheme), scales, checked)


def _tensors(state: SignRoundState) -> SignRoundState:
    return SignRoundState(*map(torch_of, state))


__all__ = [
    "signround_codes",
    "signround_quantize",
    "signround_start",
    "signround_step",
    "signround_unchecked",
]
