"""Where kernels of weights in 2:4 storage enter `ao_lab.gemm.select.PRODUCTS`: a module of each, imported by
`ao_lab.tensor.sparse`.

Each is one `Kernel`, which refuses dense weights (`w.meta.layout != "2:4"`), so that those are chosen among the others as
before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ao_lab.gemm.operand import QuantizedWeight
from ao_lab.gemm.select import PRODUCTS, Kernel
from fast.device import is_traced
from fast.matmul.weights import LONGEST_INT8
from reference import Scheme

Function = Callable[..., torch.Tensor]


def enter(name: str, kernel: Kernel, *, before: str | None = None) -> None:
    """Add a kernel: behind all others, where `ao_lab.tune` alone chooses it, or `before` one, to be the default in its place.

    A name that is there already stays. KeyError where `before` names no kernel.
    """
    if name in PRODUCTS:
        return
    names = list(PRODUCTS)
    place = len(names) if before is None else names.index(before) if before in PRODUCTS else -1
    if place < 0:
        raise KeyError(f"no kernel is called {before!r}; there are {', '.join(names)}")
    later = {one: PRODUCTS.pop(one) for one in names[place:]}
    PRODUCTS[name] = kernel
    PRODUCTS.update(later)


def traceable(name: str, function: Function, fake: Function) -> Function:
    """`function` of two tensors and more, which for what traces programs is the operator ao_lab::`name` with the same body.

    Its annotations are the operator's types; `fake` says what it returns, without values.
    """
    operator: Any = torch.library.custom_op(f"ao_lab::{name}", function, mutates_args=())
    operator.register_fake(fake)

    def call(*args: Any) -> torch.Tensor:
        traced = torch.compiler.is_compiling() or is_traced(args[0]) or is_traced(args[1])
        result: torch.Tensor = (operator if traced else function)(*args)
        return result

    return call


def device_reason(w: QuantizedWeight, oldest: tuple[int, int], *, later: bool = True) -> str | None:
    """Why a kernel for Nvidia GPUs of a compute capability (and later ones) does not run where a weight is; None: it does."""
    if not w.is_cuda:
        return f"it is for Nvidia GPUs, this weight is on {w.device.type}"
    capability = torch.cuda.get_device_capability(w.device)
    if capability == oldest or (later and capability > oldest):
        return None
    needs = f"compute capability {oldest[0]}.{oldest[1]}{' and later' if later else ''}"
    return f"it is for {needs}, this GPU has {capability[0]}.{capability[1]}"


def shape_reason(w: QuantizedWeight, step: int, *, features: bool) -> str | None:
    """Why a weight (K, N) has no shape that is multiplied where K, and with `features` N too, are multiples of a step."""
    if len(w.shape) != 2 or w.block_axis != -2:
        return "the weight must be a matrix, stored as (out, in)"
    lengths = tuple(w.shape) if features else (w.shape[0],)
    if any(length % step or not length for length in lengths):
        what = f"its lengths must be multiples of {step}, got {lengths}"
        return what if features else f"its sums must have a multiple of {step} terms, got {lengths[0]}"
    if w.scheme.element == "int8" and w.shape[0] > LONGEST_INT8:
        return f"sums longer than {LONGEST_INT8} may overflow int32"
    return None


def kind_of(scheme: Scheme) -> str:
    """What elements of a scheme are multiplied with: int8 with int8, 8-bit floats ("float8") with each other."""
    return f"{scheme.format.kind}{scheme.format.bits}"


__all__ = ["device_reason", "enter", "kind_of", "shape_reason", "traceable"]
