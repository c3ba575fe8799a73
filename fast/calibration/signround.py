"""SignRound for torch tensors; `reference.calibration.signround` states the rules, and its steps run here too.

CPU tensors run the reference; elsewhere codes, values and their gradients come from the kernels of `fast.quantize`, what is
elementwise besides from `fast.kernels.calibration.signround`, the rest is operations of torch in the order of the reference:
the same bits. Gradients are given by `vjp`, not by autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

from fast.calibration.inputs import float_tensor, numpy_of, torch_of, weight_matrix
from fast.dispatch import has_kernels
from fast.quantize.fake_quantize import fake_quantize_vjp
from fast.quantize.quantize import dequantize, quantize
from reference.calibration import signround as rule
from reference.calibration.signround import Functions, Rounding, SignRounded, SignRoundState, Span
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


class Looped(NamedTuple):
    """values of w's shape and dtype, and step(g, rate): the state after `signround_step` by the gradients of g * values."""

    values: torch.Tensor
    step: Callable[[torch.Tensor, float], SignRoundState]


def signround_unchecked(
    w: torch.Tensor,
    v: torch.Tensor,
    low: torch.Tensor | None,
    high: torch.Tensor | None,
    scheme: str | Scheme,
    *,
    scales: Scales | None = None,
    span: Span | None = None,
) -> Looped:
    """`signround_quantize` for loops: w, that it has taken once, and states of `signround_start` and of steps.

    Off the host values are not looked at, so no call waits for the device. The same bits; NaN, and v or factors out of range,
    give what they give. span: `signround_span(w, scheme)`, which stays for all steps of a loop without given scales.
    """
    state = SignRoundState(v, low, high)
    if w.device.type == "cpu":
        values, vjp = signround_quantize(w, *state, scheme, scales=scales)
        return Looped(values, lambda g, rate: signround_step(state, vjp(g), rate))
    rounding = signround_on_device(w.detach(), state, scheme, scales, checked=False, span=span)
    return Looped(rounding.result().values, partial(rounding.step, state))


def signround_span(w: torch.Tensor, scheme: str | Scheme) -> Span | None:
    """What steps need of w (N, K) and would find anew: its blocks' ends and its second-level scale; None on a CPU."""
    return None if w.device.type == "cpu" else Span.of(weight_matrix(w, "signround_span"), scheme_of(scheme))


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
    v, g = state.v, grads.v
    if not (has_kernels(v) and v.dtype == g.dtype == torch.float32 and v.shape == g.shape):
        return rule.step(state, grads, rate, range_rate)
    from fast.kernels.calibration import signround as kernel

    return _factors_moved(state, grads, rate, range_rate)._replace(v=kernel.step(v, g, rate))


def signround_keep(better: torch.Tensor, new: SignRoundState, kept: SignRoundState) -> None:
    """Copy a state into `kept`, in place, where `better` (bool, one element) is True; no call waits for the device.

    new, kept: states of one shape and device; parts that are None stay None. What is kept already costs no pass over memory.
    """
    flag = better.to(kept.v.device).reshape(1)
    for one, old in zip(new, kept, strict=True):
        if old is None:
            continue
        if not (has_kernels(old) and old.is_contiguous()):
            torch.where(flag, one, old, out=old)
            continue
        from fast.kernels.calibration import signround as kernel

        kernel.keep(flag.view(torch.uint8), one, old)


def _factors_moved(
    state: SignRoundState, grads: SignRoundState, rate: float, range_rate: float | None = None
) -> SignRoundState:
    """The step of low and high alone; nothing of v."""
    empty = state.v[:0]
    return rule.step(state._replace(v=empty), grads._replace(v=empty), rate, range_rate)


class DeviceRounding(Rounding):
    """One evaluation whose elementwise parts are kernels, where they know the place of a weight's scale."""

    #: What a step of v is, where `_by_v` moves v and makes no gradient of it.
    rate: float | None = None

    @cached_property
    def _unit(self) -> Any:
        if not has_kernels(self.w):
            return None
        from fast.kernels.calibration import signround as kernel

        return kernel.unit(self.scale, self.scheme.format, self.blocks)

    def _moved(self) -> torch.Tensor:
        if self._unit is None:
            return super()._moved()  # type: ignore[no-any-return]
        from fast.kernels.calibration import signround as kernel

        return kernel.moved(self.w, self.v, self._unit)

    def step(self, state: SignRoundState, g: torch.Tensor, rate: float) -> SignRoundState:
        """`signround_step` of its state by the gradients of g * values: v moves in the pass that would make its gradient."""
        if self._unit is None or not self._sums_in_kernel:
            return signround_step(state, self.gradients(g), rate)
        self.rate = rate
        found = self.gradients(g)
        return _factors_moved(state, found, rate)._replace(v=found.v)

    @property
    def _sums_in_kernel(self) -> bool:
        from fast.kernels.calibration import signround as kernel

        return self.ranges is None or kernel.sums_blocks(self.w, self._unit)

    def _by_v(self, dx: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if self._unit is None:
            return super()._by_v(dx)
        from fast.kernels.calibration import signround as kernel

        sums = self.ranges is not None
        dv, through = kernel.gradient(dx, self.w, self.v, self._unit, sums=sums, rate=self.rate)
        if not sums:
            return dv, None
        return dv, self._sums(dv) if through is None else through.reshape(self.scale.shape)


def signround_on_device(
    w: torch.Tensor,
    state: SignRoundState,
    scheme: str | Scheme,
    scales: Scales | None,
    checked: bool = True,
    span: Span | None = None,
) -> DeviceRounding:
    """One evaluation on w's device, whatever it is; unchecked it waits for the device nowhere."""
    parts = [None if part is None else float_tensor(part, "signround", "its state") for part in state]
    return DeviceRounding(TORCH, w, SignRoundState(*parts), scheme_of(scheme), scales, checked, span)


def _tensors(state: SignRoundState) -> SignRoundState:
    return SignRoundState(*map(torch_of, state))


__all__ = [
    "signround_codes",
    "signround_keep",
    "signround_quantize",
    "signround_span",
    "signround_start",
    "signround_step",
    "signround_unchecked",
]
