"""`quantize_params` and `quantize_`: the weights of models in JAX by a configuration, as `ao_lab.quantize_` does for torch.

A model of linen has its parameters in a tree beside it: `quantize_params` gives a tree with codes and scales in place of
kernels, which `model.apply` takes as it is. A model of nnx holds them: `quantize_` changes it in place. Both name parameters
as torch does ("layers_0.attention.query.kernel"), take a configuration or a name, and report on each weight what was done and
why. Weights alone are quantized, and each layer dequantizes its own: smaller memory, the products of arrays. Layers that
multiply quantized inputs have `DotGeneral`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax

from ao_lab.config.base import Config, kind_of
from ao_lab.jax.params import rounded, stored
from ao_lab.jax.selection import (
    Entry,
    Filter,
    ParamReport,
    checked,
    configured,
    entries_of,
    lined,
    named_parameters,
)
from reference import Scheme


def quantize_params(
    params: Any, config: Config | Scheme | str, filter_fn: Filter | None = None
) -> tuple[Any, ParamReport]:
    """A tree of parameters with kernels as `QuantizedParam`, and the report on each parameter.

    params: the tree of linen (`variables` too), haiku or any other, of JAX or NumPy arrays; those in float32, bfloat16 and
    float16 with at least two axes are looked at. config: one that quantizes weights alone (`Int8WeightOnlyConfig()`), a scheme,
    or the name of either. filter_fn(array, name) selects parameters, by names as "Dense_0.kernel"; it may give `Axes` in
    place of True. Default: all named "kernel", which are those of dense layers, attention and convolutions. A kernel that
    blocks do not divide stays an array, with the reason in the report; a call with another configuration takes what is left.

    `model.apply` of linen takes the result, under jit, vmap, grad of inputs, and for layers that `nn.scan` stacks along axis
    0: each layer dequantizes its own where it runs. For other libraries there is `dequantize_params`, called inside of jit.
    The tree that was given is unchanged. Works under jit and `jax.eval_shape`.

    Raises TypeError for another config or filter, ValueError for configurations that quantize inputs or store 2:4, for unknown
    names, and where no parameter can be quantized; UserWarning where blocks divide the fewest kernels.
    """
    one = configured(config, "quantize_params")
    named, tree = named_parameters(params)
    entries = {entry.name: entry for entry in checked(entries_of(named, filter_fn), one, "quantize_params")}
    made = {name: _stored(entries.get(name), leaf, one) for name, leaf in named}
    lines = tuple(lined(entry, made[name]) for name, entry in entries.items())
    return jax.tree.unflatten(tree, list(made.values())), ParamReport(lines)


def _stored(entry: Entry | None, leaf: Any, config: Config) -> Any:
    """A parameter as its entry says."""
    return leaf if entry is None or entry.axes is None else stored(leaf, config.recipe().weight, entry.axes)


def fake_quantize_params(params: Any, config: Config | Scheme | str, filter_fn: Filter | None = None) -> Any:
    """The tree of the arrays that `quantize_params` stands for, with straight-through gradients: quantization-aware training.

    Arguments, selection and errors as there. `model.apply(fake_quantize_params(params, config), x)` in a loss trains `params`;
    `quantize_params` of the trained ones then stores the values that were trained with.
    """
    one = configured(config, "fake_quantize_params")
    named, tree = named_parameters(params)
    entries = {
        entry.name: entry for entry in checked(entries_of(named, filter_fn), one, "fake_quantize_params")
    }
    made = [_rounded(entries.get(name), leaf, one) for name, leaf in named]
    return jax.tree.unflatten(tree, made)


def _rounded(entry: Entry | None, leaf: Any, config: Config) -> Any:
    """A parameter as `quantize_params` rounds it."""
    return leaf if entry is None or entry.axes is None else rounded(leaf, config.recipe().weight, entry.axes)


def quantize_(
    model: Any, config: Config | Scheme | str, filter_fn: Callable[[Any, str], Any] | None = None
) -> ParamReport:
    """Quantize the kernels of a flax.nnx model in place; the report on each.

    Linear, LinearGeneral, Conv and ConvTranspose are quantized by default; filter_fn(module, name) selects modules by names as
    "layers.0.linear", and Embed too. config, errors and what runs: as `quantize_params`. A quantized kernel
    is an `nnx.Variable` that is no `nnx.Param`: gradients and optimizers of parameters leave it out. TypeError for what is no
    module of nnx.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not isinstance(model, nnx.Module):
        raise TypeError(
            f"ao_lab.jax.quantize_ takes a model of flax.nnx, got {kind_of(model)}; parameters of linen and of others go to "
            f"ao_lab.jax.quantize_params, models of torch to ao_lab.quantize_"
        )
    from ao_lab.jax.nnx_models import quantize_model  # imports flax

    return quantize_model(model, configured(config, "quantize_"), filter_fn)


__all__ = ["fake_quantize_params", "quantize_", "quantize_params"]
