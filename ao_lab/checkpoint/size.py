"""Sizes of quantized weights and models, from shapes alone: on the meta device as well, and before anything is quantized.

A size is that of the stored tensors (codes, scales of both levels, zero points), the bytes that `save_pretrained` writes for a
weight, and what it takes in memory. What `save_pretrained` would write of a whole model, layout and bytes, `written_as` says.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ao_lab.checkpoint.api import stored_as
from ao_lab.checkpoint.export import export_of
from ao_lab.checkpoint.io.shards import Specs
from ao_lab.checkpoint.plain_readers import holds, reading, rounds_scales
from ao_lab.checkpoint.records import own_specs
from ao_lab.config.base import Config, FqnToConfig
from ao_lab.config.recipe import Recipe, named
from ao_lab.quantization.plan import Change, planned
from ao_lab.tensor.metadata import SPARSE, Meta
from ao_lab.tensor.quantized_tensor import QuantizedTensor, SparseQuantizedTensor
from ao_lab.transforms.layers import check_model, quantizable_parameters
from ao_lab.transforms.low_rank import LowRankLinear
from ao_lab.transforms.plan import Filter
from reference import Scheme
from reference.arrays.namespace import choice
from reference.schemes.schemes import scheme_of

LAYOUTS = ("ao_lab", "compressed-tensors")
SCALES = ("scale", "outer", "weight_scale", "weight_global_scale", "input_scale")
ZEROS = ("zero", "weight_zero_point", "input_zero", "input_zero_point")


@dataclass(frozen=True)
class Size:
    """Bytes of one weight: of its quantized values (or elements, if it is unquantized), scales and zero points."""

    codes: int
    scales: int = 0
    zeros: int = 0

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.codes + self.scales + self.zeros


@dataclass(frozen=True)
class LayerSize:
    """One parameter of a model: its name, the class of its module, its scheme ("" where it stays dense) and its size."""

    name: str
    kind: str
    scheme: str
    size: Size


@dataclass(frozen=True)
class ModelSize:
    """Every parameter that can be quantized, each once, and the bytes of all other parameters and buffers."""

    layers: tuple[LayerSize, ...]
    rest: int

    def of(self, accepts: Callable[[LayerSize], bool]) -> Size:
        """The sum over some layers."""
        sizes = [layer.size for layer in self.layers if accepts(layer)]
        return Size(sum(s.codes for s in sizes), sum(s.scales for s in sizes), sum(s.zeros for s in sizes))

    @property
    def linear(self) -> Size:
        """The weights of linear layers, as published tables count: without embeddings, norms and biases; with the factors of
        low-rank residuals."""
        return self.of(lambda layer: layer.kind in ("Linear", LowRankLinear.__name__))

    @property
    def bytes(self) -> int:
        """The whole model."""
        return self.of(lambda layer: True).bytes + self.rest

    def __str__(self) -> str:
        """A line for each scheme, its parameters by bytes, and the whole."""
        lines = []
        for scheme, kind in dict.fromkeys((layer.scheme, layer.kind) for layer in self.layers):
            found = [layer for layer in self.layers if (layer.scheme, layer.kind) == (scheme, kind)]
            lines.append(
                (f"{len(found)} {kind}, {scheme or 'not quantized'}", sum(one.size.bytes for one in found))
            )
        lines += [("other parameters and buffers", self.rest), ("whole model", self.bytes)]
        wide = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:{wide}}  {size / 1e6:12,.3f} MB" for name, size in lines)


def weight_size(
    shape: Sequence[int],
    recipe: Recipe | Scheme | str,
    *,
    layout: str = "ao_lab",
    axis: int = -1,
    dtype: torch.dtype = torch.bfloat16,
) -> Size:
    """The size of a weight of this shape in a scheme, stored in a layout.

    dtype: that of the weight. In layout "compressed-tensors" schemes whose scales are numbers of it store them in it. Files of
    float16 weights in 2 bits have float32 scales where a block is zeros or near 2^-14, which only `written_as` knows.
    ValueError if the scheme's blocks do not divide the shape, or if compressed-tensors has no format for the recipe.
    """
    choice(layout, LAYOUTS, "layout")
    if not isinstance(recipe, Recipe):
        recipe = Recipe(weight=named(recipe) or scheme_of(recipe))
    if not isinstance(shape, (list, tuple)) or not all(hasattr(n, "__index__") for n in shape):
        raise TypeError(
            f"weight_size takes the shape of a weight, some lengths, got {type(shape).__name__}: {shape!r:.60}"
        )
    size = tuple(shape)
    if layout == "ao_lab":
        specs = own_specs(Meta(recipe, axis - len(size) if axis >= 0 else axis, torch.float32), size)
    else:
        export = export_of(recipe)
        if export is None or axis not in (-1, len(size) - 1):
            raise ValueError(
                f"compressed-tensors has no format for {recipe} along axis {axis}; use layout='ao_lab'"
            )
        specs = export.specs(recipe.weight, size)
        if rounds_scales(recipe.weight, dtype):
            specs["weight_scale"] = specs["weight_scale"]._replace(dtype=dtype)
    return _size(specs)


def _size(specs: Specs) -> Size:
    """The sums over a weight's tensors; metadata counts as codes."""
    sums = [sum(spec.bytes for name, spec in specs.items() if name in names) for names in (SCALES, ZEROS)]
    return Size(sum(spec.bytes for spec in specs.values()) - sum(sums), *sums)


def model_size(
    model: nn.Module, config: Config | FqnToConfig | None = None, filter_fn: Filter | None = None
) -> ModelSize:
    """The size of the model that `quantize_(model, config, filter_fn)` would make, or of the model as it is.

    Nothing is computed or changed. Shared weights count once. Layers that the configuration does not reach, or cannot change,
    count with their current size. Raises as `quantize_` does if nothing would change.
    """
    changes = {} if config is None else planned(model, config, filter_fn, streamed=True).changes
    check_model(model)
    layers: dict[int, LayerSize] = {}
    for slot in quantizable_parameters(model):
        parameter, kind = slot.parameter, type(slot.module).__name__
        change, size, scheme = changes.get(id(parameter)), _dense(parameter), ""
        if isinstance(parameter, QuantizedTensor):
            scheme = parameter.scheme.name
        if change is not None:
            shape = tuple(parameter.shape)[::-1] if change.transposed else tuple(parameter.shape)
            size = size_of(change, shape)
            scheme = change.recipe.weight.name
        layers.setdefault(id(parameter), LayerSize(slot.full, kind, scheme, size))
    others = {id(t): t for t in (*model.parameters(), *model.buffers()) if id(t) not in layers}
    return ModelSize(tuple(layers.values()), sum(_dense(t).bytes for t in others.values()))


def size_of(change: Change, shape: tuple[int, ...]) -> Size:
    """What a weight will be under a change, of 2:4 storage half of the codes and metadata."""
    if change.config.sparsity is None:
        return weight_size(shape, change.recipe, axis=change.axis)
    return _size(own_specs(Meta(change.recipe, -1, torch.float32, layout=SPARSE), shape))


def _dense(t: torch.Tensor) -> Size:
    """A tensor as it is."""
    if isinstance(t, QuantizedTensor):
        if isinstance(t, SparseQuantizedTensor):
            return _size(own_specs(t.meta, tuple(t.shape)))
        return weight_size(t.stored_shape, t.recipe, axis=t.meta.axis)
    return Size(t.nbytes)


@dataclass(frozen=True)
class Written:
    """What `save_pretrained` would write of a model: the layout, and the bytes of the files' tensors, without their headers."""

    layout: str
    bytes: int


def written_as(model: nn.Module, layout: str = "auto") -> Written:
    """What `save_pretrained(model, layout=...)` would write, without writing: no tensor is copied; values are looked at where
    they decide the layout, a weight at a time, until one does.

    A model without quantized weights is its own tensors, layout "". ValueError as `save_pretrained` raises for
    layout="compressed-tensors".
    """
    quantized = [one for one in model.parameters() if isinstance(one, QuantizedTensor)]
    if layout == "auto" and not all(map(_is_read, quantized)):
        layout = "ao_lab"
    stored = stored_as(without_values(model), layout if quantized else "ao_lab")
    size = sum(tensor.nbytes for tensor in stored.tensors.values())
    if quantized and stored.config["quant_method"] != "ao_lab":
        size += sum(map(_wider_scales, quantized))
    return Written(stored.config["quant_method"] if quantized else "", size)


def _wider_scales(weight: QuantizedTensor) -> int:
    """Bytes that a weight's scales take beyond what its scheme says, since they are no numbers of its dtype."""
    scale = weight.scale
    if weight.is_meta or scale is None or not rounds_scales(weight.scheme, weight.dtype):
        return 0
    return 0 if holds(weight.dtype, scale) else scale.numel() * (scale.element_size() - weight.dtype.itemsize)


def _is_read(weight: QuantizedTensor) -> bool:
    """Whether plain readers compute a weight of a layer as it is; batched experts are looked at without values."""
    if weight.dim() != 2 or weight.is_meta:
        return True
    try:
        return reading(weight.plain).exact
    except ValueError:
        return False


def without_values(model: nn.Module) -> nn.Module:
    """A copy on the meta device, quantized as it is, which takes no memory; tensors that modules share are one there too."""
    memo: dict[int, torch.Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = tensor.detach().to("meta")
        held = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if held else empty
    return copy.deepcopy(model, memo)


__all__ = ["LayerSize", "ModelSize", "Size", "Written", "model_size", "weight_size", "written_as"]
