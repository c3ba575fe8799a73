"""Models of flax.nnx with quantized weights: which kernels of which modules, and what stands in their place.

Modules of nnx read a weight as `self.kernel[...]`, which is `dequantize` of a `QuantizedParam`. So nothing else of a module
changes, `nnx.split` and `nnx.merge` carry codes and scales, and `nnx.state` has them as leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import nnx

from ao_lab.config.base import Config
from ao_lab.jax.params import KERNEL, TABLE, Axes, is_quantized, stored
from ao_lab.jax.selection import (
    ACCEPTED,
    ALREADY,
    REFUSED,
    Entry,
    ParamReport,
    check_filter,
    checked,
    lined,
    noting_types,
)


class QuantizedVariable(nnx.Variable):  # type: ignore[type-arg]
    """A quantized weight of an nnx module: holds a `QuantizedParam`, no gradient is taken with respect to it."""


#: Modules with a weight that can be quantized, in this order; the name of that, and of what only a filter selects.
KERNELS = (nnx.Linear, nnx.LinearGeneral, nnx.Conv, nnx.ConvTranspose)
EMBEDDING = "an Embed, left without a filter_fn that selects it"
EINSUM = "an Einsum, whose kernel has axes in any order; its weight goes to ao_lab.jax.quantize"
TRANSPOSED = "ConvTranspose with transpose_kernel, whose kernel is (..., out, in)"


def quantize_model(
    model: nnx.Module, config: Config, filter_fn: Callable[[Any, str], Any] | None
) -> ParamReport:
    """`ao_lab.jax.quantize_` by a configuration."""
    check_filter(filter_fn)
    found = [
        (module, entry)
        for path, module in nnx.iter_modules(model)
        if (entry := _entry(module, ".".join(map(str, path)), filter_fn)) is not None
    ]
    entries = checked([entry for _, entry in found], config, "quantize_")
    lines, known = [], {}
    for (module, _), entry in zip(found, entries, strict=True):
        leaf = entry.name.rpartition(".")[2]
        variable = getattr(module, leaf)
        if entry.axes is not None and id(variable) not in known:
            value = stored(variable[...], config.recipe().weight, entry.axes)
            known[id(variable)] = variable, QuantizedVariable(value)
        if entry.axes is not None:  # a variable that modules share stays shared
            setattr(module, leaf, known[id(variable)][1])
        lines.append(lined(entry, getattr(module, leaf).get_raw_value()))
    return ParamReport(tuple(lines))


def _entry(module: Any, path: str, filter_fn: Callable[[Any, str], Any] | None) -> Entry | None:
    """What is to be done with a module's weight; None for modules that have none."""
    leaf = "embedding" if isinstance(module, nnx.Embed) else "kernel"
    if not isinstance(module, (*KERNELS, nnx.Embed, nnx.Einsum)):
        return None
    value = getattr(module, leaf).get_raw_value()
    name, kind = f"{path}.{leaf}" if path else leaf, type(module).__name__
    if is_quantized(value):
        return Entry(name, kind, value, None, ALREADY)
    axes, reason = _axes_of(module, value.ndim)
    if filter_fn is not None:
        with noting_types(filter_fn, "filter_fn(module, name)"):
            wanted = filter_fn(module, path)
        return Entry(
            name,
            kind,
            value,
            axes if wanted else None,
            (reason or ACCEPTED) if wanted else REFUSED,
        )
    if isinstance(module, nnx.Embed):
        return Entry(name, kind, value, None, EMBEDDING)
    return Entry(name, kind, value, axes, reason or kind)


def _axes_of(module: Any, count: int) -> tuple[Axes | None, str]:
    """The axes of a module's weight with so many; None and the reason where it cannot be quantized."""
    if isinstance(module, nnx.Einsum):
        return None, EINSUM
    if isinstance(module, nnx.ConvTranspose) and module.transpose_kernel:
        return None, TRANSPOSED
    if isinstance(module, (nnx.Conv, nnx.ConvTranspose)):
        return Axes(len(module.kernel_shape) - 1, 1), ""
    if isinstance(module, nnx.LinearGeneral):
        return Axes(len(module.in_features), len(module.out_features)), ""
    return (TABLE if isinstance(module, nnx.Embed) else KERNEL), ""


__all__ = ["QuantizedVariable", "quantize_model"]
