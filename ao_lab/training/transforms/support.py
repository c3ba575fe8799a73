"""Which transforms a layer that trains by a recipe takes part in, and what it says under others."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch.autograd import forward_ad

_transforms = torch._C._functorch.peek_interpreter_stack
_traces = torch._C._get_tracing_state
FORWARD = "forward-mode gradients (torch.autograd.forward_ad)"
ONCE = (
    "first gradients by torch.func.grad, vjp and jacrev, and vmap of them, are defined; "
    "ao_lab.convert_from_training_(model) makes the layers dense again"
)


def is_functional() -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp, jacrev) may have wrapped tensors."""
    return _transforms() is not None


def is_transformed() -> bool:
    """Whether torch.func, torch.jit.trace or forward-mode gradients listen; to be asked outside of compiled programs."""
    return is_functional() or _traces() is not None or forward_ad._current_level >= 0


def check_traced(w: torch.Tensor) -> None:
    """For a layer of weight w (N, K): ValueError under torch.jit.trace, and NotImplementedError, as of torch's own functions,
    under forward-mode gradients."""
    n, k = _untraced_shape(w)
    layer = f"LowPrecisionLinear(in_features={k}, out_features={n})"
    _refuse_trace(layer)
    if not is_functional():
        refuse(layer, FORWARD)


def check_experts_traced(w: torch.Tensor) -> None:
    """For experts of weights w (E, N, K): the same, and NotImplementedError under transforms of torch.func too."""
    if torch.compiler.is_compiling() or not is_transformed():
        return
    experts, n, k = _untraced_shape(w)
    layer = f"{experts} experts of ({n}, {k})"
    _refuse_trace(layer)
    refuse(layer, "transforms of torch.func" if is_functional() else FORWARD)


def _untraced_shape(w: torch.Tensor) -> tuple[int, ...]:
    """The shape in numbers: inside torch.jit.trace lengths are tensors."""
    state, set_state = _traces(), torch._C._set_tracing_state  # type: ignore[attr-defined]
    set_state(None)
    try:
        return tuple(w.shape)
    finally:
        set_state(state)


def _refuse_trace(layer: str) -> None:
    if _traces() is not None:
        raise ValueError(
            f"{layer}: torch.jit.trace keeps no quantization of values that it has not seen, so a layer that trains by a "
            f"recipe is not traced; call ao_lab.convert_from_training_(model) first, or use torch.export"
        )


def refuse(layer: str, transform: str) -> NoReturn:
    """NotImplementedError that names a layer and a transform."""
    raise NotImplementedError(
        f"{layer} trains by a recipe, whose products have no rule for {transform}; of linear layers {ONCE}"
    )


__all__ = ["check_experts_traced", "check_traced", "is_functional", "is_transformed", "refuse"]
