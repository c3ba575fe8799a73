"""What transformers makes of an exported layer without this library, and where that is not what the model computes.

The reader is transformers 5.23 with compressed-tensors 0.20, called as `from_pretrained(folder)`. It allocates scales in the
model's dtype and casts stored ones to it, dequantizes in that dtype, quantizes inputs by `compressed_tensors.*` records, and
multiplies. Four things follow, each tried in tests:

* float32 scales of a bfloat16 or float16 model are rounded, unless their values fit that dtype (`compute="input"` records);
* zero points of packed integers do not load: their place is allocated unpacked on the meta device; * 6- and 4-bit floats and
MX weights are made in bfloat16, whatever the model's dtype: other models fail in their products; * where the folder, or the
call, says `dequantize`, weights are made in the dtype of their scales while they are loaded, which avoids the first two, and
inputs are left as they are. All layers but experts are dequantized by one group then.

A `Reading` says of a layer what is lost by that call. `exact` means: nothing, bit for bit, where codes are kept too, as vLLM
keeps them; zero points count as read, since a folder that has them says `dequantize` (`with_dequantizing`) or is not
written. Programs that keep codes, as vLLM does, do not look at that field.

Some classes cannot load at all (`unsupported_reasons`). While it loads, transformers runs `_init_weights` and looks up tied
parameters. Packed formats have no parameter `weight` then, and tied weights are compared with their partner: classes that
ask for either fail in `from_pretrained`. Both are tried here on a model of the class without memory. Modules are initialized
by the model of transformers that they lie in, a vision tower's for instance, and not by the outermost one.

Of an input (batch, tokens, features) the strategy "token" finds a scale for each token. Of one with two axes (poolers,
classifiers, OPT's feed-forward layers, shared experts) transformers finds one scale for all rows: each token's result
depends on the others, later ones included, and no record of a layer can say so. `flat_inputs` runs the model once to find
such layers. The strategy "group" finds a scale for each row of both kinds where a group is as long as a row
(`with_row_groups`): so such layers are described. vLLM lists no kernel for that, and none of its tokens have three axes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ao_lab.checkpoint.export import EXPORTS, WORD_BYTES, Export, export_of, same_bits, value_read, variants
from ao_lab.checkpoint.io.shards import Tensors
from ao_lab.config.compressed_tensors import is_as_read, recipe_for_layout
from ao_lab.config.recipe import Recipe
from ao_lab.tensor.quantized_tensor import QuantizedTensor, SparseQuantizedTensor
from reference import Scheme
from reference.quantize.blocks import Blocks

#: What the way out is called in messages.
WAY_OUT = 'quantize the model with config.for_layout("compressed-tensors"), or save with layout="ao_lab"'
#: The way out where compressed-tensors has nothing like a scheme.
OWN_LAYOUT = 'save with layout="ao_lab"'
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Why nothing is exported in 2:4 storage.
NO_SPARSE = (
    "compressed-tensors 0.20 cannot load 2:4 storage: its sparse-24-bitmask and marlin-24 are names of earlier versions; "
    "quantize "
    'with sparsity=None for other loaders, or save with layout="ao_lab"'
)
#: What readers do with a float32 model.
FLOAT32_SCALES = (
    "float32 scales: with dtype=torch.bfloat16, as vLLM loads float32 models, loaders that keep quantized values round each by "
    "up to 0.4 percent; read the folder in float32, or quantize the model in bfloat16"
)
#: What a folder with quantized inputs asks of whoever loads it by transformers alone.
ROUNDS_INPUTS = (
    "inputs: load it without CompressedTensorsConfig(dequantize=True): with it transformers does not round inputs, and "
    "results differ"
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
        what = t.recipe if export is None else repr(t)
        raise ValueError(f"compressed-tensors has no format for {what}")
    if dtype not in DTYPES:
        raise ValueError(f"{t!r}: loaders compute in float32, bfloat16 or float16, not {dtype}")
    check_recipe(t.recipe)
    _check_groups(t)
    if (reason := unread_zero_points(t.recipe, tuple(t.shape))) is not None:
        raise ValueError(f"{reason}; {WAY_OUT}")
    tensors = _tensors(export, t, torch.bfloat16 if decoded_in_bfloat16(t.scheme) else t.dtype)
    if t.is_meta:
        lost = _loading(t, dtype)
        return Reading(export.name, tensors, not lost, tuple(lost), t.zero is not None and export is PACKED)
    rounded = _scales(export, tensors, t, dtype)
    lost = [*_loading(t, dtype), *rounded, *_static(t, dtype)]
    wanted = _wants_dequantizing(export, tensors, t, dtype, bool(rounded))
    return Reading(export.name, tensors, not lost, (*lost, *_notes(tensors, t, dtype)), wanted)


def with_own_scales(read: Reading, t: QuantizedTensor) -> Reading:
    """The tensors of a weight, its float32 scales stored in the weight's dtype where that changes no number.

    So `cast_scales` rounds them: files have the two bytes a scale that readers keep, and transformers makes experts in the
    dtype of their scales, which has to be that of the model's products. Of a weight on the meta device the scheme says it.
    """
    scale = read.tensors["weight_scale"]
    if scale.dtype != torch.float32:
        return read
    if not (rounds_scales(t.scheme, t.dtype) if t.is_meta else holds(t.dtype, scale)):
        return read
    return replace(read, tensors={**read.tensors, "weight_scale": scale.to(t.dtype)})


def holds(dtype: torch.dtype, scale: torch.Tensor) -> bool:
    """Whether float32 scales are numbers of a dtype."""
    return torch.equal(scale.to(dtype).to(scale.dtype), scale)


def rounds_scales(scheme: Scheme, dtype: torch.dtype) -> bool:
    """Whether a scheme's float32 scales of a weight in this dtype are numbers of it: those that are rounded to it, and a
    magnitude of the weight over a power of two. In float16 the latter has an end: files of a weight with blocks of zeros, or
    of magnitudes under 2^-14 times that power, have float32 scales (`holds` says it of values)."""
    scale = scheme.scale
    kept = scale.statistic == "absmax" and scale.rule == "ratio" and math.frexp(scale.target or 0.0)[0] == 0.5
    return scale.storage == "float32" and (scale.compute == "input" or (kept and dtype != torch.float32))


def _tensors(export: Export, t: QuantizedTensor, dtype: torch.dtype) -> Tensors:
    """The tensors that stand for a weight; ValueError where no reader would get its values."""
    q, wanted = t.quantized, t.dequantize(dtype)
    for tensors in variants(export.write(q)):
        if t.is_meta or same_bits(value_read(export, tensors, q, dtype), wanted):
            static = {} if t.input_scale is None else {"input_scale": t.input_scale.reshape(1)}
            return {**tensors, **static}
    raise ValueError(
        f"{t!r}: a loader of compressed-tensors would compute other values (NaN blocks, extreme scales, or an outer scale "
        f"without an exact reciprocal); {WAY_OUT}"
    )


def check_recipe(recipe: Recipe) -> None:
    """ValueError where no reader of compressed-tensors computes a recipe, however the folder is read."""
    if recipe.rotation:
        raise ValueError(
            f"loaders of compressed-tensors do not transform inputs, and {recipe} mixes blocks of {recipe.rotation} of them; "
            f"{WAY_OUT}"
        )
    if export_of(recipe) is None:
        raise ValueError(f"compressed-tensors has no format for {recipe}")
    inputs, weight = recipe.activation, recipe.weight
    if inputs is None:
        return
    if not is_as_read(inputs):
        raise ValueError(
            f"loaders of compressed-tensors quantize inputs by other rules than {inputs.name}, and would compute another "
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
        raise ValueError(f"loaders need inputs in whole groups of {group}, and rows have {length}")


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
        f"compressed-tensors 0.20 cannot read the packed zero points of {rows} rows, which fit in one word of "
        f"{8 * WORD_BYTES} bits"
    )


def decoded_in_bfloat16(scheme: Scheme) -> bool:
    """Whether readers make the weight in bfloat16, whatever the model's dtype: all whose scales are codes."""
    return scheme.scale.storage in ("float8_e8m0fnu", "float8_e4m3fn")


def _loading(t: QuantizedTensor, dtype: torch.dtype) -> list[str]:
    """Why products of a folder that `from_pretrained` reads fail."""
    if not decoded_in_bfloat16(t.scheme) or dtype == torch.bfloat16:
        return []
    return [
        f"loaders make weights of {t.scheme.name} in bfloat16, and matmuls with {_name(dtype)} inputs fail: read it with "
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
            f"{t!r}: loaders dequantize weights with packed zero points in the dtype of their scales, {_name(kept)}, which "
            f"rounds values of {_name(dtype)}; take float32 scales; {WAY_OUT}"
        )
    return False


def _scales(export: Export, tensors: Tensors, t: QuantizedTensor, dtype: torch.dtype) -> list[str]:
    """Whether the scales survive being cast to the model's dtype."""
    if decoded_in_bfloat16(t.scheme):
        return []
    cast = {**tensors, "weight_scale": tensors["weight_scale"].to(dtype)}
    if same_bits(value_read(export, cast, t.quantized, dtype), t.dequantize(dtype)):
        return []
    inputs = "" if t.recipe.activation is None else ", which leaves inputs as they are"
    return [
        f"scales: loaders that keep quantized values, as vLLM does and transformers without dequantize=True{inputs}, round "
        f"the float32 scales of {t.scheme.name} to {_name(dtype)}"
    ]


def _static(t: QuantizedTensor, dtype: torch.dtype) -> list[str]:
    """Whether static scales of inputs survive the same."""
    scale = t.input_scale
    if scale is None or torch.equal(scale.to(dtype).to(scale.dtype), scale):
        return []
    return [f"input scales: loaders round float32 scales of inputs to {_name(dtype)}"]


def _notes(tensors: Tensors, t: QuantizedTensor, dtype: torch.dtype) -> list[str]:
    """What holds beside an exact reading."""
    notes, scale = [], tensors["weight_scale"]
    rounded = scale.dtype == torch.float32 and not torch.equal(
        scale.to(torch.bfloat16).to(scale.dtype), scale
    )
    if dtype == torch.float32 and rounded:
        notes.append(FLOAT32_SCALES)
    scheme = t.recipe.activation
    if scheme is not None:
        notes.append(ROUNDS_INPUTS)
    return notes


def is_adaptable(model: torch.nn.Module) -> bool:
    """Whether `Config.for_layout("compressed-tensors")` has something for the scheme of every quantized weight."""
    recipes = {weight.recipe for weight in model.parameters() if isinstance(weight, QuantizedTensor)}
    try:
        for recipe in recipes:
            check_recipe(recipe_for_layout(recipe, "compressed-tensors"))
    except ValueError:
        return False
    return True


#: The shape of a weight in a reason.
SHAPE = re.compile(r"\b(of )?shape [(\[][^)\]]*[)\]]:? ?")


def grouped(reasons: Sequence[str]) -> list[str]:
    """Each reason once, with the first weight that it is of and how many others; reasons that differ in a shape are one."""
    found: dict[str, list[str]] = {}
    for reason in reasons:
        _, colon, why = reason.partition(": ")
        found.setdefault(SHAPE.sub("", why if colon else reason), []).append(reason)
    return [
        f"{first} (and {len(more)} more weights)"
        if len(more) > 1
        else f"{first} (and 1 more weight)"
        if more
        else first
        for first, *more in found.values()
    ]


def fallback_note(reasons: Sequence[str], adaptable: bool) -> str:
    """What a user has to know of a folder that is not in compressed-tensors' layout."""
    # The way out stands once, at the end.
    reasons = [reason.removesuffix(f"; {WAY_OUT}") for reason in grouped(reasons)]
    left = len(reasons) - 2
    more = f"; and {left} other reason{'s' * (left > 1)}" if left > 0 else ""
    way = (
        'For these loaders quantize with config.for_layout("compressed-tensors")'
        if adaptable
        else "Their format has nothing like this scheme; choose another (ao-lab schemes) where they are to read the folder"
    )
    return (
        f"save_pretrained wrote layout 'ao_lab', which transformers loads after `import ao_lab`: other loaders of "
        f"compressed-tensors would not compute this model. {'; '.join(reasons[:2])}{more}. {way}"
    )


def refusal(reasons: Sequence[str], adaptable: bool = True) -> str:
    """What is said of a model that is not written: its first reasons, and the way out once.

    adaptable: whether `for_layout` has a scheme for each of its weights.
    """
    told = "; ".join(reason.removesuffix(f"; {WAY_OUT}") for reason in grouped(reasons)[:5])
    # Some reasons have a way out of their own.
    end = "" if "layout=" in told else f"; {WAY_OUT if adaptable else OWN_LAYOUT}"
    return f"compressed-tensors cannot store this model: {told}{end}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


#: Small enough for any vocabulary, and no padding, which is 0 or the end of the range as a rule.
TOKENS = ((3, 4, 5), (5, 4, 3))
SAMPLES = 4000
#: What a model's own code may raise for inputs that it does not take.
FORWARD_ERRORS = (
    RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, NotImplementedError,
)  # fmt: skip


def with_row_groups(recipe: Recipe, length: int) -> Recipe:
    """The recipe, its inputs with a scale for each group of `length` elements in place of one for each token, which is the same
    for rows of that length; ValueError where it quantizes no inputs."""
    inputs = recipe.activation
    if inputs is None:
        raise ValueError(f"{recipe} quantizes no inputs")
    return replace(recipe, activation=replace(inputs, scale=replace(inputs.scale, block=length)))


@dataclass
class Seen:
    """Layers by how many axes their inputs had; those that were not reached are in neither."""

    flat: set[str] = field(default_factory=set)
    deep: set[str] = field(default_factory=set)


def flat_inputs(model: nn.Module, layers: Collection[str]) -> tuple[list[str], list[str]] | None:
    """(layers whose inputs had two axes, layers that a small input did not reach); None for models of no transformers class.

    The model runs in evaluation mode without gradients, and is left as it was. Where its own code raises, what was reached
    until then is known; a model that takes none of the inputs that its configuration describes reaches nothing.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict") or not hasattr(model, "main_input_name"):
        return None
    seen = Seen()
    with _evaluated(model), _watched(model, layers, seen), torch.no_grad(), suppress(*FORWARD_ERRORS):
        model(**_inputs(model, config))
    return sorted(seen.flat), sorted(set(layers) - seen.flat - seen.deep)


def _inputs(model: nn.Module, config: Any) -> dict[str, torch.Tensor]:
    """A small input of the kind that the model's configuration asks for."""
    first = next(p for p in model.parameters() if p.is_floating_point())
    device, dtype = first.device, first.dtype
    tokens = torch.tensor(TOKENS, device=device)
    name = str(model.main_input_name)
    result = {name: tokens}
    if (shape := _shape(name, config)) is not None:
        result = {name: torch.zeros(shape, device=device, dtype=dtype)}
    return result | ({"decoder_input_ids": tokens} if getattr(config, "is_encoder_decoder", False) else {})


def _shape(name: str, config: Any) -> tuple[int, ...] | None:
    """The shape of an image, a spectrum or a wave; None for tokens."""
    if name == "pixel_values":
        size = config.image_size
        return 2, config.num_channels, *(size if isinstance(size, (list, tuple)) else (size, size))
    if name == "input_features":
        return 2, config.num_mel_bins, 2 * config.max_source_positions
    return (2, SAMPLES) if name == "input_values" else None


@contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while: no dropout, and running statistics stay."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _watched(model: nn.Module, layers: Collection[str], seen: Seen) -> Iterator[None]:
    """Inputs of these layers are looked at as they come."""
    handles = []
    for name in layers:

        def look(module: nn.Module, inputs: tuple[Any, ...], name: str = name) -> None:
            if inputs and isinstance(inputs[0], torch.Tensor):
                (seen.flat if inputs[0].dim() < 3 else seen.deep).add(name)

        handles.append(model.get_submodule(name).register_forward_pre_hook(look))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


WHY = "so that from_pretrained fails in transformers 5.23; leave these layers dense, or use layout='ao_lab'"


def unsupported_reasons(
    model: nn.Module, quantized: Collection[str], packed: Collection[str], untied: bool
) -> list[str]:
    """Why transformers fails to load a model of its own with these quantized (and packed) layers; none for other models."""
    config: Any = getattr(model, "config", None)
    if not hasattr(model, "_init_weights") or not hasattr(config, "to_dict"):
        return []
    # As readers make it of config.json: some classes tie whatever it says.
    fields = config.to_dict() | ({"tie_word_embeddings": False} if untied else {})
    config = type(config).from_dict(fields)
    with torch.device("meta"):
        skeleton: Any = type(model)(config)
    tied = {
        name for pair in (getattr(skeleton, "all_tied_weights_keys", None) or {}).items() for name in pair
    }
    found = [
        f"{path}: {type(model).__name__} ties it, {WHY}" for path in quantized if f"{path}.weight" in tied
    ]
    return found + _initialized(skeleton, packed)


def _initialized(skeleton: Any, packed: Collection[str]) -> list[str]:
    """Modules whose initialization asks for weights that packed formats do not have."""
    for path in packed:
        skeleton.get_submodule(path)._parameters.pop("weight", None)
    found: dict[str, str] = {}
    for owner, model, name, module in _owned("", skeleton, "", skeleton):
        try:
            model._init_weights(module)
        except AttributeError:
            # Of a nested model its name says most, once: it is what can be left dense.
            kind = f"{type(model).__name__} initializes a {type(module).__name__}" if owner else ""
            told = kind or f"a {type(module).__name__} is initialized"
            place = owner or name or "the model"
            found.setdefault(place, f"{place}: {told} by weights that packed formats lack, {WHY}")
    return list(found.values())


def _owned(owner: str, model: Any, path: str, module: nn.Module) -> Iterator[tuple[str, Any, str, nn.Module]]:
    """Of a module and all in it: path and model of transformers that initializes it, its own path, and itself."""
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        nested = hasattr(child, "_init_weights") and hasattr(child, "_initialize_weights")
        who, initializing = (inner, child) if nested else (owner, model)
        yield from _owned(who, initializing, inner, child)
    yield owner, model, path, module


FIELD = "dequantize"
TOLD = (
    "dequantize: config.json has transformers 5.23 make dense weights while it loads, because it would not load packed zero "
    "points, or would round float32 scales; CompressedTensorsConfig(dequantize=False) undoes that"
)


#: The same of an encoder-decoder, whose `generate` calls the encoder before the model as a whole was called; and where inputs
#: are quantized, too, so that the field would make another model.
TOLD_OF_ENCODER = (
    "dequantize: config.json has transformers 5.23 make dense weights while it loads, because it would do so in the first call "
    "of the whole model, and generate() calls the encoder before that"
)
FIRST_CALL = (
    "first call: transformers 5.23 decompresses weights in the first call of the whole model, and generate() of an "
    "encoder-decoder calls the encoder before that: call model(...) once, then generate()"
)


def with_dequantizing(
    config: Mapping[str, Any], readings: Mapping[str, Reading], experts: str, has_encoder: bool = False
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The configuration of a folder, with the field where layers (but experts) want it, and what is to be known of that.

    `experts`: the target of a group for experts alone. `has_encoder`: of an encoder-decoder all layers want it.
    ValueError that names a layer with packed zero points where the field would make another model of the others.
    """
    wanting = {name: reading for name, reading in readings.items() if reading.dequantize}
    if not wanting and not (has_encoder and readings):
        return dict(config), ()
    reason = _obstacle([g for g in config["config_groups"].values() if g["targets"] != [experts]])
    if reason is None:
        return {**config, FIELD: True}, (TOLD if wanting else TOLD_OF_ENCODER,)
    if not wanting:
        return dict(config), (FIRST_CALL,)
    zeros = [name for name, reading in wanting.items() if ZERO in reading.tensors]
    if zeros:
        raise ValueError(
            f"{', '.join(zeros[:3])}{' and others' if len(zeros) > 3 else ''}: transformers 5.23 reads packed zero points only "
            f"where it dequantizes the whole model while it loads, and {reason}; {WAY_OUT}"
        )
    return dict(config), ()


def _obstacle(groups: Sequence[Mapping[str, Any]]) -> str | None:
    """Why the layers of these groups would be others, dequantized while they are loaded; None where they are the same."""
    if any(group["input_activations"] is not None for group in groups):
        return "inputs of some layers would not be quantized then"
    kinds = [(group["weights"], group["format"]) for group in groups]
    if any(kind != kinds[0] for kind in kinds):
        return "all layers are read in the scheme of the first then, while this model has several"
    return None
