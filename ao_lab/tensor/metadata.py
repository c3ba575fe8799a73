"""What a `QuantizedTensor` is beside its tensors: names of parts, layouts, and the description that files and guards hold.

When a weight is preshuffled `for_products` says. It is asked where a weight comes to rest on a GPU: by `quantize_`, by
loading, and by moves from the host. Products of up to 128 rows of 16-bit inputs then read it as it is stored
(`fast.matmul.preshuffled`), and nothing is kept twice; all else goes through the plain layout, made for the call.
`to_layout("plain")` is the way out, and stays plain on its device. Inputs may be quantized, where no kernel multiplies their
codes by the weight's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from ao_lab.config.recipe import SPARSE_KERNELS, Recipe, recipe_of
from ao_lab.gemm.codes import BLOCK
from fast.dispatch import has_kernels, is_operator
from fast.matmul.preshuffled.layout import unsupported_reason as stored_reason
from fast.matmul.preshuffled.layout import unsupported_reasons as stored_reasons
from fast.matmul.preshuffled.linear import INPUTS, rearranged, restored
from fast.matmul.weights import MULTIPLIED, one_scale
from reference import Quantized, Scheme
from reference.quantize.quantize import with_plain_scales, with_tiled_scales
from reference.schemes.in_files import loaded_scheme, stored_fields

#: Names of the tensors inside, in the order in which tracers see them. Those that a scheme or a storage lacks are None.
PARTS = ("codes", "scale", "outer", "zero", "input_scale", "input_zero", "metadata")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
VERSION = 1


@dataclass(frozen=True)
class Layout:
    """Where the parts lie: a change of the canonical `Quantized`, of one that can be changed so, and its inverse."""

    forward: Callable[[Quantized], Quantized]
    inverse: Callable[[Quantized], Quantized]


def _same(q: Quantized) -> Quantized:
    return q


#: The layout of codes, scales and zero points in which `fast.matmul.preshuffled` multiplies few rows; no file has it.
PRESHUFFLED = "preshuffled"
#: `Meta.layout` of weights whose codes are the kept two of every four, beside `metadata`, and the pattern that they store.
SPARSE = "2:4"
#: Of dense weights. "plain": row-major, what checkpoints hold. "tiled": scales as block-scaled GEMMs read them
#: (`reference.tile_scales`).
LAYOUTS = {
    "plain": Layout(_same, _same),
    "tiled": Layout(with_tiled_scales, with_plain_scales),
    PRESHUFFLED: Layout(rearranged, restored),
}


@dataclass(frozen=True, eq=False)
class Meta:
    """All of a `QuantizedTensor` that is no tensor; comparable, for guards of compiled programs.

    Guards ask for equality at every call of a program, of every weight. It never changes, so that a copy is itself, and the
    comparison with itself looks at no field.
    """

    recipe: Recipe
    axis: int
    dtype: torch.dtype
    transposed: bool = False
    layout: str = "plain"
    #: The shape before `view(-1)`: the tensor shows one axis, the parts are those of this shape. Only views lead back.
    flat: tuple[int, ...] | None = None

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return self._fields == other._fields if isinstance(other, Meta) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._fields)

    def __deepcopy__(self, memo: object) -> Meta:
        return self

    @property
    def _fields(self) -> tuple[Any, ...]:
        return self.recipe, self.axis, self.dtype, self.transposed, self.layout, self.flat

    @cached_property
    def swapped_axes(self) -> Meta:
        """Of the transposed tensor; made once, since every linear layer asks for it in every call."""
        return replace(self, transposed=not self.transposed)


def stored_shape(meta: Meta, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the parts of a tensor that shows `shape`: before `view(-1)`, in the stored orientation."""
    shape = shape if meta.flat is None else meta.flat
    return swapped(shape) if meta.transposed else shape


def swapped(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with its last two axes swapped."""
    return (*shape[:-2], shape[-1], shape[-2])


def described(meta: Meta) -> dict[str, Any]:
    """A description as plain values, for files."""
    recipe = meta.recipe
    return {
        "version": VERSION,
        "weight": stored_fields(recipe.weight),
        "activation": None if recipe.activation is None else stored_fields(recipe.activation),
        "kernel": recipe.kernel,
        "accumulation": recipe.accumulation,
        "axis": meta.axis,
        "dtype": str(meta.dtype).removeprefix("torch."),
        "transposed": meta.transposed,
        "layout": meta.layout,
        "flat": None if meta.flat is None else list(meta.flat),
        # Readers that know no rotation refuse a field that they do not know.
        **({"rotation": recipe.rotation} if recipe.rotation else {}),
    }


def meta_from(fields: Mapping[str, Any]) -> Meta:
    """The description that `described` took apart; ValueError for one of a later version, or with another storage's kernel."""
    if fields["version"] > VERSION:
        raise ValueError(
            f"a QuantizedTensor of version {fields['version']}; this ao_lab reads up to {VERSION}: install a newer one"
        )
    activation, kernel, layout, flat = (fields[name] for name in ("activation", "kernel", "layout", "flat"))
    if kernel in SPARSE_KERNELS and layout != SPARSE:
        raise ValueError(
            f"kernel {kernel!r} supports weights in {SPARSE} storage only, this one's is {layout!r}"
        )
    recipe = recipe_of(
        weight=loaded_scheme(fields["weight"]),
        activation=None if activation is None else loaded_scheme(activation),
        kernel=kernel,
        accumulation=fields["accumulation"],
        rotation=fields.get("rotation", 0),
    )
    axis, transposed, dtype = fields["axis"], fields["transposed"], getattr(torch, fields["dtype"])
    if layout == SPARSE and axis == -2 and not transposed:  # how orientation was described before
        axis, transposed = -1, True
    return Meta(recipe, axis, dtype, transposed, layout, None if flat is None else tuple(flat))


# When a weight is preshuffled: the one place that decides.


#: A `QuantizedTensor`, whose module imports this one.
Weight = Any
#: Kernels of recipes that multiply by it.
KERNELS = ("auto", "fused")


def recipe_reason(recipe: Recipe) -> str | None:
    """Why weights of a recipe are not preshuffled; None where the stored weight decides."""
    if recipe.activation is not None and _are_multiplied_as_codes(recipe.activation, recipe.weight):
        return "its quantized values are multiplied directly with those of its inputs"
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
    return t.rearranged(PRESHUFFLED) if read_preshuffled([t])[0] else t


def read_preshuffled(weights: Sequence[Weight]) -> list[bool]:
    """Of each weight whether `for_products` makes it another one; where values decide the host waits once for all weights."""
    asked = [place for place, t in enumerate(weights) if _may_be_preshuffled(t)]
    reasons = stored_reasons(weights[place].quantized for place in asked) if asked else []
    taken = {place for place, reason in zip(asked, reasons, strict=True) if reason is None}
    return [place in taken for place in range(len(weights))]


def _may_be_preshuffled(t: Weight) -> bool:
    """Whether the stored values decide: nothing else of a weight keeps it as it is."""
    if t.meta.layout != "plain" or t.meta.flat is not None or t.requires_grad or t.dtype not in INPUTS:
        return False
    if is_operator(t.codes) or not has_kernels(t.codes):
        return False
    if t.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return recipe_reason(t.recipe) is None and _inputs_reason(t) is None


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


__all__ = [
    "DTYPES",
    "LAYOUTS",
    "PARTS",
    "PRESHUFFLED",
    "SPARSE",
    "Layout",
    "Meta",
    "described",
    "for_products",
    "meta_from",
    "moved_to_gpu",
    "read_preshuffled",
    "recipe_reason",
    "stays",
    "stored_shape",
    "swapped",
    "unsupported_reason",
]
