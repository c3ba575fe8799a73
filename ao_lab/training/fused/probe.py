"""Whether a module computes RMSNorm, or down(silu(gate(x)) * up(x)): by its parts, and by what its forward makes of an example.

A class's name says little: Gemma's RMSNorm multiplies by 1 + weight, and its feed-forward has another activation. The class's
own forward runs on a shallow copy of the module with small parameters on the CPU, without hooks; the module is not touched.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from ao_lab.quantization.modules import is_linear

#: Names of the three linear layers of a SwiGLU: gate, up and down.
TRIPLES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
#: Names of what is added to the mean square.
EPSILONS = ("variance_epsilon", "eps", "epsilon", "norm_eps")
#: Relative difference of float32 sums in another order, and of an exponential; another formula differs by far more.
CLOSE = 1e-4


def epsilon_of(module: nn.Module) -> str | None:
    """The attribute that holds a norm's epsilon; None where there is none."""
    return next((name for name in EPSILONS if isinstance(getattr(module, name, None), float)), None)


def triple_of(module: nn.Module) -> tuple[str, str, str] | None:
    """The names of gate, up and down; None where a module has no three such linear layers."""
    children = dict(module.named_children())
    return next(
        (names for names in TRIPLES if all(name in children and is_linear(children[name]) for name in names)),
        None,
    )


def is_norm_like(module: nn.Module) -> bool:
    """Whether a module has one vector called weight, and nothing else that it could multiply by."""
    parameters = dict(module.named_parameters(recurse=False))
    lone = set(parameters) == {"weight"} and not module._modules and not module._buffers
    return lone and parameters["weight"].dim() == 1 and any(hasattr(module, name) for name in EPSILONS)


def norm_reason(module: nn.Module) -> str | None:
    """Why the fused kernel cannot replace a norm; None where it can."""
    name = epsilon_of(module)
    if name is None:
        return "its epsilon is not a number; torch chooses one by the dtype"
    length = int(module.get_parameter("weight").shape[0])
    x, weight = _example(3, length), 1 + _example(length) / 4
    clone = _clone(module)
    clone.__dict__["_parameters"] = {"weight": nn.Parameter(weight)}
    wide, epsilon = x.double(), getattr(module, name)
    wanted = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * weight.double()
    return _forward_reason(module, clone, x, wanted)


def swiglu_reason(module: nn.Module) -> str | None:
    """Why the fused kernel cannot replace a feed-forward's activation; None where it can."""
    names = triple_of(module)
    assert names is not None
    clone = _clone(module)
    weights = [_example(6, 4), _example(6, 4) / 2, _example(4, 6)]
    clone.__dict__["_modules"] = {**module._modules, **dict(zip(names, map(_linear, weights), strict=True))}
    x = 3 * _example(5, 4)
    gate, up = (functional.linear(x.double(), w.double()) for w in weights[:2])
    wanted = functional.linear(functional.silu(gate) * up, weights[2].double())
    return _forward_reason(module, clone, x, wanted)


def _forward_reason(module: nn.Module, clone: nn.Module, x: Tensor, wanted: Tensor) -> str | None:
    kind = type(module)
    if "forward" in vars(module):
        return "its forward was replaced on the module itself"
    if len(inspect.signature(kind.forward).parameters) != 2:
        return f"the forward of {kind.__name__} takes more than one tensor"
    made = _outcome(kind.forward, clone, x)
    if isinstance(made, str):
        return f"the forward of {kind.__name__} raised on an example: {made}"
    same = made.shape == wanted.shape and torch.allclose(made.double(), wanted, rtol=CLOSE, atol=CLOSE)
    return None if same else f"the forward of {kind.__name__} computes otherwise"


def _outcome(forward: Callable[..., Tensor], clone: nn.Module, x: Tensor) -> Tensor | str:
    """What a forward makes of an example, or what it raised."""
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return forward(clone, x)
    except Exception as error:  # noqa: BLE001  whatever another project's module raises, it stays as it is
        return f"{type(error).__name__}: {error}"


def _clone(module: nn.Module) -> nn.Module:
    """A shallow copy."""
    clone: nn.Module = object.__new__(type(module))
    clone.__dict__.update(vars(module))
    return clone


def _linear(weight: Tensor) -> nn.Linear:
    outputs, inputs = weight.shape
    made = nn.Linear(inputs, outputs, bias=False, device="meta")
    made.weight = nn.Parameter(weight)
    return made


def _example(*shape: int) -> Tensor:
    """Numbers between -1 and 1, the same every time, without the generators of torch."""
    count = torch.Size(shape).numel()
    return (
        torch.sin(torch.arange(1, count + 1, dtype=torch.float64, device="cpu") * 1.7).float().reshape(shape)
    )
