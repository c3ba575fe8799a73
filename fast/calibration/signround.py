"""SignRound for torch tensors; `reference.calibration.signround` states the rules, and its steps run here too.

CPU tensors run the reference; elsewhere codes, values and their gradients come from the kernels of `fast.quantize`, the rest is
operations of torch in the reference's order: the same bits. Gradients are given by `vjp`, not by autograd.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fast.calibration.inputs import check_finite, float_tensor
from fast.quantize.fake_quantize import fake_quantize_vjp
from fast.quantize.least_error import tree_sum
from fast.quantize.quantize import dequantize, quantize
from reference.arrays.bridges import to_numpy, to_torch
from reference.calibration import signround as rule
from reference.calibration.signround import Functions, Rounding, SignRounded, SignRoundState
from reference.quantize.stored import Quantized, Scales
from reference.schemes.schemes import Scheme, scheme_of

TORCH = Functions(quantize, dequantize, fake_quantize_vjp, tree_sum)


def signround_start(
    w: torch.Tensor, scheme: str | Scheme, quantized: Quantized | None = None
) -> SignRoundState:
    """V = 0 and factors of 1, or V at the codes of `quantized`, on w's device: see `reference.signround_start`."""
    w = _matrix(w, "signround_start")
    if w.device.type == "cpu":
        return _tensors(rule.signround_start(to_numpy(w), scheme, _arrays(quantized)))
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
    w, state = _matrix(w, "signround_quantize"), SignRoundState(v, low, high)
    if w.device.type != "cpu":
        return signround_on_device(w, state, scheme, scales).result()
    made = rule.signround_quantize(to_numpy(w), *map(to_numpy, state), scheme, scales=_arrays(scales))
    return SignRounded(
        to_torch(made.values),
        lambda g: _tensors(made.vjp(to_numpy(float_tensor(g, "signround_quantize", "g")))),
    )


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
    w, state = _matrix(w, "signround_codes"), SignRoundState(v, low, high)
    if w.device.type != "cpu":
        return signround_on_device(w, state, scheme, scales).quantized
    made = rule.signround_codes(to_numpy(w), *map(to_numpy, state), scheme, scales=_arrays(scales))
    return replace(
        made, **{name: to_torch(getattr(made, name)) for name in ("codes", "scale", "outer", "zero")}
    )


def signround_step(
    state: SignRoundState, grads: SignRoundState, rate: float, *, range_rate: float | None = None
) -> SignRoundState:
    """state moved against the signs of its gradients, within its bounds: see `reference.signround_step`."""
    return rule.step(state, grads, rate, range_rate)


def signround_on_device(
    w: torch.Tensor, state: SignRoundState, scheme: str | Scheme, scales: Scales | None
) -> Rounding:
    """One evaluation by torch operations on w's device, whatever it is."""
    parts = [None if part is None else float_tensor(part, "signround", "its state") for part in state]
    return Rounding(TORCH, w, SignRoundState(*parts), scheme_of(scheme), scales)


def _matrix(w: torch.Tensor, what: str) -> torch.Tensor:
    """A finite matrix without history."""
    w = float_tensor(w, what, "w")
    if w.dim() != 2:
        raise ValueError(
            f"{what} takes w as a matrix (outputs, inputs), got shape {tuple(w.shape)}; reshape it"
        )
    check_finite(w, what, "w")
    return w


def _arrays(value: Any) -> Any:
    """The parts of `Scales` or `Quantized` as NumPy arrays."""
    if value is None or not isinstance(value, (Scales, Quantized)):
        return value
    names = ("scale", "outer", "zero", *(("codes",) if isinstance(value, Quantized) else ()))
    return replace(value, **{name: to_numpy(getattr(value, name)) for name in names})


def _tensors(state: SignRoundState) -> SignRoundState:
    return SignRoundState(*map(to_torch, state))


__all__ = ["signround_codes", "signround_quantize", "signround_start", "signround_step"]
