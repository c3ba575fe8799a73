"""Which tensors the kernels take: CUDA tensors on Hopper or later, with triton; which calls have to be operators."""

from __future__ import annotations

import importlib.util
import warnings
from functools import lru_cache

import torch
from torch.autograd import forward_ad

# Conversion instructions and the block sizes here are those of sm_90.
OLDEST = (9, 0)

# Fake tensors and other subclasses have no memory of their own that a kernel could be given.
PLAIN = (torch.Tensor, torch.nn.Parameter)

_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack


def has_kernels(x: torch.Tensor) -> bool:
    """Whether kernels run on this tensor. Where they cannot, a warning says once what runs instead."""
    return x.is_cuda and type(x) in PLAIN and not x.is_neg() and _reason(x.get_device()) is None


def is_traced(x: torch.Tensor) -> bool:
    """Whether a call is being recorded, or has shapes alone (meta): then it has to appear as an operator (see `fast.ops`)."""
    return torch.compiler.is_compiling() or type(x) not in PLAIN or x.is_meta


def is_transformed() -> bool:
    """Whether a mode listens to the dispatcher, or a transform (vmap, `torch.func.grad`, tangents) may have wrapped tensors.

    The wrappers of functorch have the class of plain tensors; only its stack tells them.
    """
    return _modes() > 0 or _transforms() is not None or forward_ad._current_level >= 0


def functional_transform() -> str | None:
    """The transform of torch.func (or forward-mode differentiation) that a call runs under, by name; None where there is none.

    Under one, an `autograd.Function` needs `setup_context` and rules of its own for vmap and jvp.
    """
    level = _transforms()
    if level is not None:
        return f"torch.func.{level.key().name.lower()}"
    return "torch.autograd.forward_ad" if forward_ad._current_level >= 0 else None


@lru_cache(maxsize=64)
def _reason(index: int) -> str | None:
    """Why there are no kernels on a CUDA device, or None; warns when there is a reason."""
    reason = None
    if torch.version.hip is not None:
        reason = "this build of torch is for ROCm, the kernels are for NVIDIA GPUs"
    elif importlib.util.find_spec("triton") is None:
        reason = "triton is not installed (pip install triton)"
    elif torch.cuda.get_device_capability(index) < OLDEST:
        name = torch.cuda.get_device_name(index)
        reason = f"{name} is older than compute capability {OLDEST[0]}.{OLDEST[1]}"
    if reason is not None:
        warnings.warn(
            f"ao_lab's kernels do not run on cuda:{index}: {reason}. The same functions run as torch operations there, "
            f"with the same bits, many times slower; CPU tensors run the reference.",
            RuntimeWarning,
            stacklevel=4,
        )
    return reason
