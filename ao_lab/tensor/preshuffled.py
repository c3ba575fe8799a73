"""When a weight is preshuffled: the one place that decides.

`for_products` is asked where a weight comes to rest on a GPU: by `quantize_`, by loading, and by moves from the host. Products
of up to 128 rows of 16-bit inputs then read it as it is stored (`fast.matmul.preshuffled`), and nothing is kept twice; all
else goes through the plain layout, made for the call. `to_layout("plain")` is the way out, and stays plain on its device.
Inputs may be quantized, where no kernel multiplies their codes by the weight's.
"""

from __future__ import annotations

from typing import Any

import torch

from ao_lab.config.recipe import Recipe
from ao_lab.gemm.codes import BLOCK
from ao_lab.tensor.metadata import PRESHUFFLED
from fast.device import PLAIN, has_kernels, is_traced, is_transformed
from fast.matmul.preshuffled.layout import unsupported_reason as stored_reason
from fast.matmul.preshuffled.linear import INPUTS
from fast.matmul.weights import MULTIPLIED, one_scale
from reference import Scheme

#: A `QuantizedTensor`, whose module imports this one.
Weight = Any
#: Kernels of recipes that multiply by it.
KERNELS = ("auto", "fused")


def recipe_reason(recipe: Recipe) -> str | None:
    """Why weights of a recipe are not preshuffled; None where the stored weight decides."""
    if recipe.activation is not None and _are_multiplied_as_codes(recipe.activation, recipe.weight):
        return "its codes are multiplied by those of its inputs as they are"
    return None if recipe.kernel in KERNELS else f"its kernel must be {' or '.join(KERNELS)}"


def _are_multiplied_as_codes(inputs: Scheme, weight: Scheme) -> bool:
    """Whether kernels "int8" and "scaled_mm" take both (`ao_lab.gemm.select`)."""
    together = weight.element in MULTIPLIED.get(inputs.element, ()) and weight.zero is None
    blocks = inputs.scale.block == BLOCK and weight.scale.block in (BLOCK, (BLOCK, BLOCK))
    return together and (blocks or (one_scale(inputs) and one_scale(weight)))


def unsupported_reason(t: Weight) -> str | None:
    """Why a weight cannot be preshuffled: its recipe, shape, scheme or values; None where it can."""
    if t.meta.layout == PRESHUFFLED:
        return None
    return recipe_reason(t.recipe) or _inputs_reason(t) or stored_reason(t.quantized)


def _inputs_reason(t: Weight) -> str | None:
    """Why a weight whose inputs are quantized is multiplied otherwise; None where it is not for that."""
    if t.recipe.activation is None:
        return None
    if len(t.shape) != 2:
        return "inputs of experts must not be quantized"
    return None if t.input_scales is None else "scales of its inputs must not be given"


def for_products(t: Weight) -> Weight:
    """The weight as products on its device read it best: preshuffled where a kernel takes it, else itself.

    Itself too: what trains, has another dtype than 16-bit inputs, shows one axis, has no memory of its own, or is traced,
    transformed or captured. On a GPU where zero points or NaN decide, the host waits for these values.
    """
    if t.meta.layout != "plain" or t.meta.flat is not None or t.requires_grad or t.dtype not in INPUTS:
        return t
    if type(t.codes) not in PLAIN or is_traced(t.codes) or is_transformed() or not has_kernels(t.codes):
        return t
    if (t.is_cuda and torch.cuda.is_current_stream_capturing()) or unsupported_reason(t) is not None:
        return t
    return t.to_layout(PRESHUFFLED)


def moved_to_gpu(before: Weight, after: Weight) -> Weight:
    """What a copy on another device becomes: `for_products` where it came from the host.

    Not where processes share a model: there a copy may be a shard (FSDP2, DTensor), which travels plain.
    """
    shared = torch.distributed.is_available() and torch.distributed.is_initialized()
    comes = before.device.type == "cpu" and after.is_cuda
    return for_products(after) if comes and not before.requires_grad and not shared else after


def stays(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a preshuffled weight that is copied to a device in a dtype stays so; elsewhere it becomes plain."""
    return device.type == "cuda" and dtype in INPUTS


__all__ = ["KERNELS", "for_products", "moved_to_gpu", "recipe_reason", "stays", "unsupported_reason"]
