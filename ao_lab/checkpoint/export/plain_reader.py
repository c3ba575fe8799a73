"""What transformers makes of an exported layer without this library, and where that is not what the model computes.

The reader is transformers 5.23 with compressed-tensors 0.20, called as `from_pretrained(folder)`. It allocates scales in the
model's dtype and casts stored ones to it, dequantizes in that dtype, quantizes inputs by `compressed_tensors.*` records, and
multiplies. Four things follow, each tried in tests:

* float32 scales of a bfloat16 or float16 model are rounded, unless their values fit that dtype (`compute="input"` records);
* zero points of packed integers do not load: their place is allocated unpacked on the meta device;
* 6- and 4-bit floats and MX weights are made in bfloat16, whatever the model's dtype: other models fail in their products;
* where the folder, or the call, says `dequantize`, weights are made in the dtype of their scales while they are loaded, which
  avoids the first two, and inputs are left as they are (`ao_lab.checkpoint.export.dequantizing`).

A `Reading` says of a layer what is lost by that call. `exact` means: nothing, bit for bit, where codes are kept too, as vLLM
keeps them; zero points count as read, since a folder that has them says `dequantize` or is not written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ao_lab.checkpoint.export.compressed_tensors import (
    EXPORTS,
    Export,
    Tensors,
    export_of,
    same_bits,
    value_read,
    variants,
)
from ao_lab.checkpoint.io.weight_specs import WORD_BYTES
from ao_lab.config.compressed_tensors import is_as_read
from ao_lab.config.recipe import Recipe
from ao_lab.tensor.quantized_tensor import QuantizedTensor, SparseQuantizedTensor
from reference import Scheme
from reference.quantize.blocks import Blocks

#: What the way out is called in messages.
WAY_OUT = 'quantize the model with config.for_layout("compressed-tensors"), or save with layout="ao_lab"'
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Why nothing is exported in 2:4 storage.
NO_SPARSE = (
    "compressed-tensors 0.20 reads no 2:4 storage: its sparse-24-bitmask and marlin-24 are names of earlier versions; quantize "
    'with sparsity=None for plain readers, or save with layout="ao_lab"'
)
#: The format whose zero points are packed like its codes.
PACKED = EXPORTS["pack-quantized"]
ZERO = "weight_zero_point"


@dataclass(frozen=True)
class Reading:
    """A layer as a plain reader sees it: its format and tensors, whether it computes the same, and what to know otherwise.

    `dequantize`: a reader has its values only, and certainly, where it dequantizes while it loads.
    """

    format: str
    tensors: Tensors
    exact: bool = True
    limits: tuple[str, ...] = ()
    dequantize: bool = False


def reading(t: QuantizedTensor, dtype: torch.dtype | None = None) -> Reading:
    """How a linear layer's weight is written for a model that is read in `dtype` (None: the weight's own).

    ValueError where compressed-tensors cannot say what the layer computes, however the folder is read. Of a weight on the meta
    device the rules alone are looked at, not what rounding does to its values.
    """
    dtype = dtype or t.dtype
    if isinstance(t, SparseQuantizedTensor):
        raise ValueError(f"{t!r}: {NO_SPARSE}")
    export = export_of(t.recipe)
    if export is None or len(t.shape) != 2 or t.block_axis != -1:
        raise ValueError(f"compressed-tensors has no format for {t!r}")
    if dtype not in DTYPES:
        raise ValueError(f"{t!r}: readers compute in float32, bfloat16 or float16, not {dtype}")
    check_recipe(t.recipe)
    _check_groups(t)
    if (reason := unread_zero_points(t.recipe, tuple(t.shape))) is not None:
        raise ValueError(f"{reason}; {WAY_OUT}")
    tensors = _tensors(export, t, torch.bfloat16 if made_in_bfloat16(t.scheme) else t.dtype)
    if t.is_meta:
        lost = _loading(t, dtype)
        return Reading(export.name, tensors, not lost, tuple(lost), t.zero is not None and export is PACKED)
    rounded = _scales(export, tensors, t, dtype)
    lost = [*_loading(t, dtype), *rounded, *_static(t, dtype)]
    wanted = _wants_dequantizing(export, tensors, t, dtype, bool(rounded))
    return Reading(export.name, tensors, not lost, (*lost, *_notes(tensors, t, dtype)), wanted)


def _tensors(export: Export, t: QuantizedTensor, dtype: torch.dtype) -> Tensors:
    """The tensors that stand for a weight; ValueError where no reader would get its values."""
    q, wanted = t.quantized, t.dequantize(dtype)
    for tensors in variants(export.write(q)):
        if t.is_meta or same_bits(value_read(export, tensors, q, dtype), wanted):
            static = {} if t.input_scale is None else {"input_scale": t.input_scale.reshape(1)}
            return {**tensors, **static}
    raise ValueError(
        f"{t!r}: a reader of compressed-tensors would see other values (NaN blocks, extreme scales, or an outer scale without "
        f"an exact reciprocal); {WAY_OUT}"
    )


def check_recipe(recipe: Recipe) -> None:
    """ValueError where no reader of compressed-tensors computes a recipe, however the folder is read."""
    if export_of(recipe) is None:
        raise ValueError(f"compressed-tensors has no format for {recipe}")
    inputs, weight = recipe.activation, recipe.weight
    if inputs is None:
        return
    if not is_as_read(inputs):
        raise ValueError(
            f"readers of compressed-tensors quantize inputs by other rules than {inputs.name}, and would compute another "
            f"model; {WAY_OUT}"
        )
    if weight.zero is not None and export_of(recipe) is PACKED:
        raise ValueError(
            f"transformers 5.23 reads packed zero points of {weight.name} with dequantize=True alone, which leaves inputs as "
            f"they are; {WAY_OUT}"
        )


def _check_groups(t: QuantizedTensor) -> None:
    """ValueError where readers refuse the inputs' length."""
    scheme = t.recipe.activation
    group, length = 1 if scheme is None else scheme.scale.block, t.shape[-1]
    if isinstance(group, int) and group > 0 and length % group:
        raise ValueError(f"readers want inputs in whole groups of {group}, and rows have {length}")


def unread_zero_points(recipe: Recipe, shape: tuple[int, ...]) -> str | None:
    """Why readers cannot unpack the zero points of a matrix, with dequantize=True neither; None where they can.

    4-bit ones are unpacked by a view of the transposed words as bytes. With a single row of words its stride is not 1.
    """
    scheme = recipe.weight
    if scheme.zero is None or scheme.format.bits != 4 or export_of(recipe) is not PACKED:
        return None
    rows, groups = Blocks.of(shape, scheme.scale, -1).scale_shape
    if rows * scheme.format.bits > 8 * WORD_BYTES or groups == 1:
        return None
    return (
        f"compressed-tensors 0.20 cannot read the packed zero points of {rows} rows, which fill no more than one word of "
        f"{8 * WORD_BYTES} bits"
    )


def made_in_bfloat16(scheme: Scheme) -> bool:
    """Whether readers make the weight in bfloat16, whatever the model's dtype: all whose scales are codes."""
    return scheme.scale.storage in ("float8_e8m0fnu", "float8_e4m3fn")


def _loading(t: QuantizedTensor, dtype: torch.dtype) -> list[str]:
    """Why products of a folder that `from_pretrained` reads fail."""
    if not made_in_bfloat16(t.scheme) or dtype == torch.bfloat16:
        return []
    return [
        f"readers make weights of {t.scheme.name} in bfloat16, and products with {_name(dtype)} inputs fail: read it with "
        f"dtype=torch.bfloat16, or quantize the model in bfloat16"
    ]


def _wants_dequantizing(
    export: Export, tensors: Tensors, t: QuantizedTensor, dtype: torch.dtype, rounded: bool
) -> bool:
    """Whether a plain reader needs to dequantize a layer while it loads; ValueError where zero points would not survive that.

    The product is made in the scales' own dtype then, and cast to the model's.
    """
    packed = t.zero is not None and export is PACKED
    if t.recipe.activation is not None or not (packed or rounded):
        return False
    kept = tensors["weight_scale"].dtype
    if same_bits(value_read(export, tensors, t.quantized, kept).to(dtype), t.dequantize(dtype)):
        return True
    if packed:
        raise ValueError(
            f"{t!r}: readers dequantize weights with packed zero points in the dtype of their scales, {_name(kept)}, which "
            f"rounds values of {_name(dtype)}; take float32 scales; {WAY_OUT}"
        )
    return False


def _scales(export: Export, tensors: Tensors, t: QuantizedTensor, dtype: torch.dtype) -> list[str]:
    """Whether the scales survive being cast to the model's dtype."""
    if made_in_bfloat16(t.scheme):
        return []
    cast = {**tensors, "weight_scale": tensors["weight_scale"].to(dtype)}
    if same_bits(value_read(export, cast, t.quantized, dtype), t.dequantize(dtype)):
        return []
    inputs = "" if t.recipe.activation is None else ", which leaves inputs as they are"
    return [
        f"scales: readers that keep codes, as vLLM does and transformers without dequantize=True{inputs}, round the float32 "
        f"scales of {t.scheme.name} to {_name(dtype)}"
    ]


def _static(t: QuantizedTensor, dtype: torch.dtype) -> list[str]:
    """Whether static scales of inputs survive the same."""
    scale = t.input_scale
    if scale is None or torch.equal(scale.to(dtype).to(scale.dtype), scale):
        return []
    return [f"input scales: readers round float32 scales of inputs to {_name(dtype)}"]


def _notes(tensors: Tensors, t: QuantizedTensor, dtype: torch.dtype) -> list[str]:
    """What holds beside an exact reading."""
    notes, scale = [], tensors["weight_scale"]
    rounded = scale.dtype == torch.float32 and not torch.equal(
        scale.to(torch.bfloat16).to(scale.dtype), scale
    )
    if dtype == torch.float32 and rounded:
        notes.append(
            "float32 scales: with dtype=torch.bfloat16 readers that keep codes round each by up to 0.4 percent; read the "
            "folder in float32, or quantize the model in bfloat16"
        )
    scheme = t.recipe.activation
    if scheme is not None:
        notes.append(
            "inputs: transformers leaves them unquantized where it is told dequantize=True; its outputs differ then"
        )
    if scheme is not None and scheme.scale.block == -1:
        notes.append(
            "per-token scales: of inputs with two axes (poolers, experts) transformers takes one scale for all tokens, vLLM "
            "one for each"
        )
    return notes


def refusal(reasons: Sequence[str]) -> str:
    """What is said of a model that is not written: its first reasons, and the way out once."""
    told = "; ".join(reason.removesuffix(f"; {WAY_OUT}") for reason in reasons[:5])
    # Some reasons have a way out of their own.
    end = "" if "layout=" in told else f"; {WAY_OUT}"
    return f"compressed-tensors cannot hold this model: {told}{end}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


__all__ = [
    "WAY_OUT",
    "ZERO",
    "Reading",
    "check_recipe",
    "made_in_bfloat16",
    "reading",
    "refusal",
    "unread_zero_points",
]
