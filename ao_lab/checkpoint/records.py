"""The records of a folder's quantized weights: read as data, checked against the files, before a tensor is read.

Everything that a record says is compared with something else: its fields with the types and rules of schemes, its tensors'
dtypes and shapes with the files' headers, its format with what the format holds. What does not fit is a ValueError that names
the file, the weight and the rule; records never decide what is imported, called or allocated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import nn

from ao_lab.checkpoint.export import EXPORTS, INPUT_SPECS, export_of
from ao_lab.checkpoint.io.shards import Folder, Spec, Specs, Tensors
from ao_lab.checkpoint.io.strict_json import check_scheme_fields, check_value, parsed_object, shown
from ao_lab.config.recipe import SPARSE_KERNELS, Recipe
from ao_lab.gemm.select import select_kernel
from ao_lab.kv_cache.static_scales import CacheScales, read_cache_scales
from ao_lab.tensor.metadata import (
    DTYPES,
    LAYOUTS,
    PRESHUFFLED,
    SPARSE,
    Meta,
    described,
    meta_from,
    stored_shape,
)
from ao_lab.tensor.quantized_tensor import QuantizedTensor, SparseQuantizedTensor, from_quantized
from ao_lab.tensor.slicing import COLUMNS
from ao_lab.tensor.sparse import check_stored
from reference.formats.storage import packed_shape
from reference.quantize.blocks import Blocks
from reference.quantize.quantize import check_quantized
from reference.quantize.scales import stored_parts
from reference.quantize.stored import check_tiled, tiled_size
from reference.schemes.schemes import flat_size

KEY, SCALE = "ao_lab", "weight_scale"
OWN = "ao_lab"
#: Types of the plain fields of `described`, and its schemes.
DESCRIPTION: dict[str, Any] = {
    "version": int, "kernel": str, "accumulation": str, "axis": int, "dtype": str, "transposed": bool, "layout": str,
    "flat": tuple[int, ...] | None,
}  # fmt: skip
SCHEMES_OF = ("weight", "activation")
#: Layouts that files have.
FILE_LAYOUTS = (*(name for name in LAYOUTS if name != PRESHUFFLED), SPARSE)
#: Fields of one weight; "recipe" is the place of its description in the list of them.
FIELDS: dict[str, Any] = {"recipe": int, "shape": tuple[int, ...], "format": str, "parts": tuple[str, ...]}
OPTIONAL: dict[str, Any] = {"outer": float | None}
#: Blocks may reach beyond a short axis, which is filled up; never so far that the filler is what takes the memory.
LONGEST_BLOCK = 4096
#: What weights may be in, by name.
WEIGHT_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


@dataclass(frozen=True)
class Weight:
    """One quantized weight: its description, its shape, the tensors that it is made of, and how they become it."""

    meta: Meta
    shape: tuple[int, ...]
    #: The names of its tensors in the folder, by part.
    names: Mapping[str, str]
    #: What these are, by part.
    specs: Specs
    #: The weight of its tensors (by part).
    build: Callable[[Tensors], QuantizedTensor]
    #: What wrote it, as config.json names it, and compressed-tensors' name of the format.
    method: str = "ao_lab"
    format: str = ""


@dataclass(frozen=True)
class Computed:
    """A tensor of the state that is not quantized and is not stored under its name: renamed, or made of others."""

    spec: Spec
    #: The names of the tensors that it is made of in the folder, by part.
    names: Mapping[str, str]
    #: The tensor of these (by part).
    build: Callable[[Tensors], torch.Tensor]


@dataclass(frozen=True)
class Records:
    """What a folder says of a model's state: quantized weights, dense tensors, and names that share a tensor with another."""

    weights: Mapping[str, Weight]
    dense: tuple[str, ...]
    shared: Mapping[str, str]
    #: Dense tensors of the state that are stored otherwise, by their names in the state.
    computed: Mapping[str, Computed] = field(default_factory=dict)
    #: Tensors of the folder that are no part of the state, and why they are left out.
    left_out: Mapping[str, str] = field(default_factory=dict)

    def specs(self, folder: Folder) -> dict[str, Spec]:
        """dtype and shape of every tensor of the state that is not quantized."""
        result = {name: folder.specs[name] for name in self.dense}
        return result | {name: computed.spec for name, computed in self.computed.items()}

    def shapes(self, folder: Folder) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor of the state."""
        result = {name: weight.shape for name, weight in self.weights.items()}
        result |= {name: spec.shape for name, spec in self.specs(folder).items()}
        return result | {name: result[other] for name, other in self.shared.items()}


@dataclass
class Stored:
    """Tensors by name, the records of quantized weights among them, and the configuration."""

    tensors: Tensors = field(default_factory=dict)
    #: By the weight's name: the place of its description, its shape, and where it lies.
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: Names of one and the same tensor: the other name of each.
    shared: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    #: Descriptions as JSON, once each, and their places in the list of them.
    recipes: dict[str, int] = field(default_factory=dict)
    #: dtypes of the tensors that are not quantized.
    dense: dict[str, str] = field(default_factory=dict)
    #: Bytes of the tensors of quantized weights.
    quantized: int = 0
    #: What readers without this library have to know, and what of that keeps a plain one from computing the same, once each.
    limits: dict[str, None] = field(default_factory=dict)
    inexact: dict[str, None] = field(default_factory=dict)

    def record(self, name: str, t: QuantizedTensor, **fields: Any) -> None:
        """What is to be known of a quantized weight; its description, which many share, by its place."""
        place = self.recipes.setdefault(json.dumps(described(t.meta)), len(self.recipes))
        self.records[name] = {"recipe": place, "shape": list(t.shape), **fields}

    def put(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The tensors of a quantized weight."""
        self.tensors.update(tensors)
        self.quantized += sum(tensor.nbytes for tensor in tensors.values())

    def bits(self) -> float:
        """Bits of a quantized weight with its scales and zero points; of those that several names share once."""
        count: int = sum(prod(record["shape"]) for record in self.records.values())
        return 8 * self.quantized / max(count, 1)

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """A tensor as it is."""
        self.tensors[name] = tensor
        self.dense[name] = str(tensor.dtype).removeprefix("torch.")


def read_records(folder: Folder) -> Records:
    """The checked records of a folder that `save_pretrained` wrote; ValueError as the module says."""
    where = f"the records of {folder.path}"
    given = parsed_object(folder.metadata[KEY], where)
    fields = {name: given.get(name, {}) for name in ("weights", "shared", "dense")}
    recipes = given.get("recipes")
    objects = all(isinstance(part, dict) for part in fields.values()) and isinstance(recipes, list)
    if set(given) - {*fields, "recipes"} or not objects or recipes is None:
        raise ValueError(
            f"{where} are a list, recipes, and objects, {', '.join(fields)}; got {shown(list(given))}; fetch the folder again"
        )
    metas = [_description(index, recipe, folder) for index, recipe in enumerate(recipes)]
    weights = {name: _weight(name, record, metas, folder) for name, record in fields["weights"].items()}
    result = Records(weights, dense_names(weights, folder), fields["shared"])
    _check_names(result, where)
    _check_dense(fields["dense"], result, folder)
    return result


def whole_weights(folder: Folder, records: Records) -> Tensors:
    """The state of a model, quantized weights whole; what their numbers say beside the records is checked here."""
    tensors = folder.read(name for name in folder.specs if name not in records.left_out)
    state = {name: tensors[name] for name in records.dense}
    for name, computed in records.computed.items():
        state[name] = computed.build({part: tensors[full] for part, full in computed.names.items()})
    for name, weight in records.weights.items():
        try:
            result = weight.build({part: tensors[full] for part, full in weight.names.items()})
            check_quantized_tensor(result)
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"weight {shown(name)} of {folder.path}: {error}; fetch or write the folder again"
            ) from error
        state[name] = result
    return {**state, **{name: state[other] for name, other in records.shared.items()}}


def check_quantized_tensor(t: QuantizedTensor) -> None:
    """ValueError or TypeError where parts, recipe and shape of a weight do not fit together, or its kernel does not take it."""
    if isinstance(t, SparseQuantizedTensor):
        check_stored(t)
    q = t.quantized
    check_quantized(q)
    if t.recipe.kernel in SPARSE_KERNELS and isinstance(t, SparseQuantizedTensor) and not t.is_cuda:
        # They run on GPUs alone, to which a model may go when it was read: the first product says the rest.
        return
    if t.recipe.kernel != "auto":
        select_kernel(t if t.block_axis == -2 else t.transposed(), t.dtype)


def check_recipe(meta: Meta, shape: tuple[int, ...]) -> None:
    """ValueError where blocks are far longer than a tensor of this stored shape, or inputs of its layer."""
    longest = max(LONGEST_BLOCK, *shape)
    for scheme in (meta.recipe.weight, meta.recipe.activation):
        for record in () if scheme is None else (scheme.scale, scheme.outer):
            if record is not None and any(n > longest for n in _sizes(record.block)):
                raise ValueError(
                    f"blocks of {shown(record.block)} are too long for a tensor of shape {shape}"
                )


def _check_rotation(meta: Meta, stored: tuple[int, ...]) -> None:
    """ValueError where inputs of a layer of this stored shape cannot be mixed as a recipe says."""
    length = meta.recipe.rotation
    if length and (len(stored) != 2 or meta.axis != -1 or meta.layout == SPARSE or stored[-1] % length):
        raise ValueError(
            f"rotation mixes blocks of {length} inputs of a matrix, which divide their number; got shape {stored}"
        )


def _sizes(block: Any) -> tuple[int, ...]:
    if isinstance(block, str):
        return (flat_size(block),) if block != "tensor" else ()
    return block if isinstance(block, tuple) else (block,)


def _weight(name: str, record: Any, metas: list[Meta], folder: Folder) -> Weight:
    """One record; every error names the folder and the weight."""
    where = f"the record of {shown(name)} in {folder.path}"
    try:
        _check_fields(record, FIELDS, OPTIONAL)
        if not 0 <= record["recipe"] < len(metas):
            raise ValueError(f"recipe is one of {len(metas)}, got {record['recipe']}")
        meta, shape = metas[record["recipe"]], tuple(record["shape"])
        _check_description(meta, shape)
        check_recipe(meta, stored_shape(meta, shape))
        _check_rotation(meta, stored_shape(meta, shape))
        weight = (_own if record["format"] == OWN else _exported)(name, record, meta, shape)
        if set(weight.specs) != set(record["parts"]) or len(record["parts"]) != len(weight.specs):
            raise ValueError(f"parts are {', '.join(weight.specs)}, got {shown(record['parts'])}")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}; fetch or write the folder again") from error
    weight = _with_stored_scales(weight, folder)
    check_specs(weight, folder)
    return weight


def _with_stored_scales(weight: Weight, folder: Folder) -> Weight:
    """The weight with float32 scales as the folder has them: those of compressed-tensors in the weight's dtype if they fit."""
    wanted, full = weight.specs.get(SCALE), weight.names.get(SCALE, "")
    found = folder.specs.get(full)
    if wanted is None or found is None or (wanted.dtype, found.dtype) != (torch.float32, weight.meta.dtype):
        return weight
    return replace(weight, specs={**weight.specs, SCALE: Spec(found.dtype, wanted.shape)})


def check_specs(weight: Weight, folder: Folder) -> None:
    """ValueError where a tensor of a weight is missing, or is another than its scheme and shape need."""
    for part, spec in weight.specs.items():
        full = weight.names[part]
        if full not in folder.specs:
            raise ValueError(
                f"{folder.path} lacks tensor {shown(full)}, which its records name; fetch the folder again"
            )
        if folder.specs[full] != spec:
            raise ValueError(
                f"tensor {shown(full)} of {folder.files[full]} is {spec} in {weight.meta.recipe}, got "
                f"{folder.specs[full]}; fetch it again"
            )


def _description(index: int, given: Any, folder: Folder) -> Meta:
    """One description, which many weights may have, its types checked."""
    try:
        _check_fields(given, DESCRIPTION | dict.fromkeys(SCHEMES_OF, None), {"rotation": int})
        check_scheme_fields(given["weight"], "weight")
        if given["activation"] is not None:
            check_scheme_fields(given["activation"], "activation")
        if given["dtype"] not in WEIGHT_DTYPES:
            raise ValueError(
                f"dtype is one of torch's floating-point types that weights have, got {shown(given['dtype'])}"
            )
        if given["version"] < 1:
            raise ValueError(f"version is a count from 1, got {given['version']}")
        return meta_from(given)
    except (ValueError, TypeError) as error:
        where = f"recipe {index} of the records of {folder.path}"
        raise ValueError(f"{where}: {error}; fetch or write the folder again") from error


def _check_fields(given: Any, needed: Mapping[str, Any], optional: Mapping[str, Any]) -> None:
    """ValueError where an object lacks fields, has others, or has them of another type (None: not looked at here)."""
    if not isinstance(given, dict):
        raise ValueError(f"it is an object, got {shown(given)}")
    wrong = [f"lacks {name}" for name in needed if name not in given]
    wrong += [f"has an unknown field {shown(name)}" for name in given if name not in {*needed, *optional}]
    if wrong:
        raise ValueError(f"it {wrong[0]}")
    for name, hint in {**needed, **optional}.items():
        if hint is not None and name in given:
            check_value(given[name], hint, name)


def _check_description(meta: Meta, shape: tuple[int, ...]) -> None:
    """ValueError where axis, orientation, layout and shape do not go together."""
    stored = meta.flat if meta.flat is not None else shape
    if meta.layout not in FILE_LAYOUTS:
        raise ValueError(f"layout is one of {', '.join(FILE_LAYOUTS)}, got {shown(meta.layout)}")
    if any(n < 0 for n in (*shape, *stored)) or len(stored) > 8:
        raise ValueError(f"shape is up to 8 counts, got {shown(stored)}")
    if meta.flat is not None and (len(shape) != 1 or prod(stored) != shape[0]):
        raise ValueError(
            f"flat, the shape behind one axis, has as many elements as shape {shape}; got {meta.flat}"
        )
    if not -max(len(stored), 1) <= meta.axis < 0 or (meta.transposed and len(stored) < 2):
        raise ValueError(
            f"axis {meta.axis}{' transposed' if meta.transposed else ''} is none of shape {stored}"
        )


def _own(name: str, record: Mapping[str, Any], meta: Meta, shape: tuple[int, ...]) -> Weight:
    static = tuple(part for part in ("input_scale", "input_zero") if part in record["parts"])
    _check_static(static, meta.recipe)
    specs = own_specs(meta, shape, static)
    names = {part: f"{name}.{part}" for part in specs}
    return Weight(meta, shape, names, specs, lambda parts: QuantizedTensor(parts, meta, shape))


#: Static scales of a layer's input in our layout.
STATIC_SPECS = {"input_scale": Spec(torch.float32, ()), "input_zero": Spec(torch.int8, ())}


def own_specs(meta: Meta, shape: tuple[int, ...], static: tuple[str, ...] = ()) -> Specs:
    """Our layout: what `reference.quantize` makes, codes packed below 8 bits; `static` names the input's scale and zero point.

    ValueError where the scheme's blocks do not fit the shape.
    """
    if meta.layout == SPARSE:
        return _sparse_specs(meta, shape, static)
    scheme, stored = meta.recipe.weight, stored_shape(meta, shape)
    blocks = Blocks.of(stored, scheme.scale, meta.axis)
    wide = torch.uint8 if scheme.format.bits <= 8 else torch.uint16
    result = {"codes": Spec(wide, packed_shape(stored, scheme.format))}
    for name, part in stored_parts(scheme, blocks).items():
        if part is not None:
            result[name] = Spec(getattr(torch, part[0]), part[1])
    if meta.layout == "tiled":
        check_tiled(scheme, stored, meta.axis)
        rows, columns = blocks.scale_shape
        result["scale"] = Spec(torch.uint8, (tiled_size((rows, columns)),))
    return {**result, **{name: STATIC_SPECS[name] for name in static}}


def _sparse_specs(meta: Meta, shape: tuple[int, ...], static: tuple[str, ...]) -> Specs:
    """2:4 storage: half of the codes and a byte of metadata for 8 columns, along the last stored axis; scales of the dense
    weight."""
    stored = stored_shape(meta, shape)
    if len(stored) < 2 or stored[-1] % 4 or meta.axis != -1:
        raise ValueError(
            f"2:4 storage holds matrices with groups of four along their blocks' axis, got shape {stored}"
        )
    scheme = meta.recipe.weight
    dense = own_specs(replace(meta, layout="plain", transposed=False, flat=None), stored, static)
    codes = packed_shape((*stored[:-1], stored[-1] // 2), scheme.format)
    metadata = Spec(torch.uint8, (*stored[:-1], -(-stored[-1] // COLUMNS)))
    return {**dense, "codes": Spec(dense["codes"].dtype, codes), "metadata": metadata}


def _exported(name: str, record: Mapping[str, Any], meta: Meta, shape: tuple[int, ...]) -> Weight:
    """A weight in a format of compressed-tensors: a matrix with blocks along its rows, as `written` makes it."""
    export = EXPORTS.get(record["format"])
    if export is None or export_of(meta.recipe) is not export:
        raise ValueError(f"format {shown(record['format'])} does not hold {meta.recipe}")
    if (
        len(shape) != 2
        or meta.axis != -1
        or meta.transposed
        or meta.flat is not None
        or meta.layout != "plain"
    ):
        raise ValueError(
            f"format {export.name} holds matrices with blocks along their rows; got shape {shape}"
        )
    if not name.endswith("weight"):
        raise ValueError("compressed-tensors' formats are for parameters named weight")
    static = tuple(key for key in INPUT_SPECS if key in record["parts"])
    _check_static(static, meta.recipe)
    specs = export.specs(meta.recipe.weight, shape)
    specs |= {key: INPUT_SPECS[key] for key in static}
    outer, scheme = record.get("outer"), meta.recipe.weight
    if (scheme.outer is None) != (outer is None):
        raise ValueError(
            f"outer is {'none' if scheme.outer is None else 'a number'} in {scheme.name}, got {shown(outer)}"
        )

    def build(tensors: Tensors) -> QuantizedTensor:
        _check_said(tensors, shape, outer)
        q = export.read(tensors, scheme, shape)
        parts = from_quantized(q, meta.recipe, meta.dtype).parts
        if outer is not None:
            parts["outer"] = torch.tensor(outer, dtype=torch.float32)
        for part, key in (("input_scale", "input_scale"), ("input_zero", "input_zero_point")):
            parts[part] = tensors[key].reshape(()) if key in tensors else None
        return QuantizedTensor(parts, meta, shape)

    path = name.removesuffix("weight")
    return Weight(
        meta, shape, {key: path + key for key in specs}, specs, build, "compressed-tensors", export.name
    )


def _check_static(static: tuple[str, ...], recipe: Recipe) -> None:
    """Static scales belong to quantized inputs, zero points to those with zero points."""
    scheme = recipe.activation
    if static and scheme is None:
        raise ValueError(f"{static[0]} belongs to quantized inputs, and the record has no activation")
    if static and scheme is not None and len(static) != 1 + (scheme.zero is not None):
        raise ValueError(
            f"static inputs in {scheme.name} need a scale{' and a zero point' if scheme.zero else ' alone'}"
        )


def _check_said(tensors: Tensors, shape: tuple[int, ...], outer: float | None) -> None:
    """Numbers that are in the tensors and in the record say the same."""
    stored = tensors.get("weight_shape")
    if stored is not None and tuple(stored.tolist()) != shape:
        raise ValueError(f"weight_shape says {stored.tolist()}, its record {shape}")
    if outer is not None and not _reciprocal_or_same(tensors["weight_global_scale"].reshape(()), outer):
        read = tensors["weight_global_scale"].item()
        raise ValueError(f"weight_global_scale is {read}, its record's outer scale {outer}")


def _reciprocal_or_same(stored: torch.Tensor, outer: float) -> bool:
    """Whether a stored outer scale is what `ao_lab.checkpoint.export` writes: the scale, its
    reciprocal, or a neighbour of that."""
    scale = torch.tensor(outer, dtype=torch.float32)
    exact = 1.0 / scale
    near = [torch.nextafter(exact, torch.tensor(end)) for end in (torch.inf, 0.0)]
    return any(torch.equal(stored, value) for value in (scale, exact, *near))


def dense_names(
    made: Mapping[str, Weight | Computed], folder: Folder, left_out: Iterable[str] = ()
) -> tuple[str, ...]:
    """Tensors of which nothing is made and that are not left out; ValueError where two claim one."""
    used = dict.fromkeys(left_out, "what is left out")
    for name, one in made.items():
        for full in one.names.values():
            if used.setdefault(full, name) != name:
                raise ValueError(
                    f"{folder.path}: {shown(name)} and {shown(used[full])} are both made from {shown(full)}; fetch it again"
                )
    return tuple(name for name in folder.specs if name not in used)


def taken_scales(folder: Folder, records: Records, given: Any) -> tuple[Records, dict[str, CacheScales]]:
    """The records without the scales that a folder's kv_cache_scheme is about, and these.

    Those of other libraries' folders are told of as before: a cache of theirs is not made.
    """
    names = [name for name in (*records.dense, *records.left_out) if name.endswith((".k_scale", ".v_scale"))]
    found = read_cache_scales(folder.read(names), given) if given and names else {}
    used = {f"{path}.{part}_scale" for path in found for part in ("k", "v")}
    dense = tuple(name for name in records.dense if name not in used)
    return replace(records, dense=dense), found


def _check_names(records: Records, where: str) -> None:
    """Each name stands for one thing, and shared ones for a tensor that is there."""
    own = {*records.weights, *records.dense}
    if len(own) != len(records.weights) + len(records.dense):
        twice = next(name for name in records.weights if name in records.dense)
        raise ValueError(
            f"{where}: {shown(twice)} is a quantized weight and a tensor too; fetch the folder again"
        )
    for name, other in records.shared.items():
        if name in own or not isinstance(other, str) or other not in own:
            raise ValueError(
                f"{where}: {shown(name)} shares the tensor of {shown(other)}, which must be there, and it must not; fetch the "
                "folder again"
            )


def _check_dense(given: Mapping[str, Any], records: Records, folder: Folder) -> None:
    """Tensors that are not quantized are of the dtype that was written; folders of earlier versions do not say it."""
    for name, dtype in given.items():
        spec = folder.specs.get(name)
        if spec is None or name not in records.dense:
            raise ValueError(
                f"{folder.path} lacks tensor {shown(name)}, which its records name; fetch the folder again"
            )
        if str(spec.dtype).removeprefix("torch.") != dtype:
            raise ValueError(
                f"tensor {shown(name)} of {folder.files[name]} is {shown(dtype)}, got {spec}; fetch it again"
            )


# Biases of layers that have none: AutoGPTQ wrote zeros for every layer that it packed, whether it had a bias or not.

REASON = "zeros in place of a bias that the layer does not have"


def without_spare_biases(records: Records, folder: Folder, model: nn.Module) -> Records:
    """The records without the biases of quantized layers that the model lacks, where all of their elements are 0.

    Other tensors that the model lacks stay: who fills it compares names. Of the files only such biases are read.
    """
    state = model.state_dict(keep_vars=True)
    stored = {name: name for name in records.dense}
    stored |= {name: one.names[""] for name, one in records.computed.items() if set(one.names) == {""}}
    unknown = {name: full for name, full in stored.items() if name not in state and name.endswith(".bias")}
    beside = {n: full for n, full in unknown.items() if n.removesuffix("bias") + "weight" in records.weights}
    spare = {name: full for name, full in beside.items() if not folder.read([full])[full].any()}
    if not spare:
        return records
    return replace(
        records,
        dense=tuple(name for name in records.dense if name not in spare),
        computed={name: one for name, one in records.computed.items() if name not in spare},
        left_out={**records.left_out, **dict.fromkeys(spare.values(), REASON)},
    )
