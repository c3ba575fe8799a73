"""A checkpoint's tensors under the names and shapes of the model that transformers builds.

Published files hold other tensors than transformers' modules have: `experts.0.w1.weight` for each expert where the module
has one `experts.gate_up_proj`, other prefixes, fused projections that are split. Which becomes which is transformers' own
mapping (`transformers.conversion_mapping`), and so are the operations; nothing of it is repeated here. Quantized weights
follow the operations row by row, dense tensors go through them as they are.

Rows of quantized matrices follow these operations by number (`ao_lab.checkpoint.matrix_rows`).

*Batched experts in compressed-tensors.* Programs that read compressed-tensors know experts as matrices of their own
(`mlp.experts.0.gate_proj.weight_packed`), while modules of transformers 5 hold all in one parameter. The names, and how the
parameter is sliced, are transformers' own conversion for saving, which is given the numbers of rows instead of weights;
`load_pretrained` goes the same way back.

transformers 5.23 dequantizes experts while it loads them, with `dequantize=True` or without: symmetric integers, MXFP4, and
e4m3 with a scale for each row, to float32 where scales are float32. Of others it loses a part without a word (the outer
scale of NVFP4) or fails; inputs of experts it never quantizes. What is not read is not written.

Experts that stay dense keep the names of the modules, which transformers reads too: beside packed weights it would drop
their matrices.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ao_lab.checkpoint.io.shards import Folder, Spec, Tensors
from ao_lab.checkpoint.io.strict_json import shown
from ao_lab.checkpoint.matrix_rows import STEP, gathered, row_numbers
from ao_lab.checkpoint.records import Computed, Records, Weight, check_quantized_tensor
from ao_lab.config.recipe import Recipe
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from ao_lab.tensor.slicing import select
from ao_lab.transforms.layers import is_batch, is_experts

IGNORED = "transformers' model of this kind has no such parameter and ignores it"
#: The list that a layer is in, and its number.
LAYER = re.compile(r"(.*?)\.(\d+)\.")


@dataclass
class Group:
    """Tensors of a checkpoint that one operation makes parameters of: names by the pattern that they match."""

    converter: Any
    names: dict[str, list[str]] = field(default_factory=dict)

    @property
    def members(self) -> list[str]:
        """All names, in transformers' order."""
        return [name for names in self.names.values() for name in names]


def converted(records: Records, folder: Folder, model: nn.Module) -> Records:
    """The records under the names of a model's state; those of models that are not transformers' stay as they are.

    `model`: the one that the tensors are for; it may be on the meta device. ValueError, which names the folder and the weight,
    for quantized weights that cannot be put together without rounding again. Names that the model does not have remain: who
    fills it compares them.
    """
    names = [*records.weights, *records.dense, *records.computed]
    state = model.state_dict(keep_vars=True)
    mapping = mapping_of(model)
    if mapping is None or all(name in state for name in names):
        return records
    dense = {name: Computed(folder.specs[name], {"": name}, _itself) for name in records.dense}
    sources: dict[str, Weight | Computed] = {**records.weights, **dense, **records.computed}
    renamed, groups = grouped_names(names, state, mapping, str(model.base_model_prefix))
    result: dict[str, Weight | Computed] = {new: sources[old] for old, new in renamed.items()}
    for first, group in groups.items():
        try:
            result.update(_joined(first, group, sources, model))
        except ValueError as error:
            raise ValueError(f"{shown(first)} of {folder.path}: {error}") from error
    left, result = _without_ignored(result, renamed, state, model)
    return _records(records, result, left, renamed)


def mapping_of(model: nn.Module) -> tuple[list[Any], list[Any]] | None:
    """transformers' renamings and converters for a model, in the order in which it applies them; None for other models."""
    # A model of transformers has imported it.
    library = sys.modules.get("transformers")
    if library is None or not isinstance(model, library.PreTrainedModel):
        return None
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    found = get_model_conversion_mapping(model)
    return (
        [entry for entry in found if isinstance(entry, WeightRenaming)],
        [entry for entry in found if isinstance(entry, WeightConverter)],
    )


def grouped_names(
    names: Iterable[str], state: dict[str, Any], mapping: tuple[list[Any], list[Any]], prefix: str
) -> tuple[dict[str, str], dict[str, Group]]:
    """The new names of tensors that stay one, and by the first new name those that an operation changes."""
    from transformers.core_model_loading import dot_natural_key, rename_source_key

    renamings, converters = mapping
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    renamed: dict[str, str] = {}
    groups: dict[str, Group] = {}
    for name in sorted(names, key=dot_natural_key):
        new, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if new not in state and name in state:
            new, pattern = name, None
        if pattern is None or new not in state:
            renamed[name] = new
        else:
            group = groups.setdefault(new, Group(deepcopy(by_pattern[pattern])))
            group.names.setdefault(pattern, []).append(name)
    return renamed, groups


def unused_names(folder: Folder, model: nn.Module) -> tuple[list[str], list[str]]:
    """Tensors of a folder that a model of transformers has no place for: those that its class says files may have beside it
    (layers that predict later tokens, for instance), and others. Neither for models that are not transformers'."""
    unused = _unused(folder, model)
    beside = _beside(unused, model)
    return [old for old in unused if old in beside], [old for old in unused if old not in beside]


def left_out_layers(folder: Folder, model: nn.Module) -> list[str]:
    """Whole layers of a folder that a model has fewer of, as `model.layers.2`: its configuration counts too few.

    Not those that its class says files may have beside it, nor layers that predict later tokens, which follow the last.
    """
    unused = _unused(folder, model)
    counts = {name: len(one) for name, one in model.named_modules() if isinstance(one, nn.ModuleList)}
    later = getattr(getattr(model, "config", None), "num_nextn_predict_layers", None) or 0
    places = (LAYER.match(unused[old]) for old in unused.keys() - _beside(unused, model))
    found = {(m[1], int(m[2])) for m in places if m and int(m[2]) >= counts.get(m[1], math.inf) + later}
    return [f"{name}.{number}" for name, number in sorted(found)]


def _unused(folder: Folder, model: nn.Module) -> dict[str, str]:
    """A folder's tensors that a model of transformers has no place for, and what they would be called in it."""
    mapping = mapping_of(model)
    if mapping is None:
        return {}
    state = model.state_dict(keep_vars=True)
    renamed, _ = grouped_names(folder.specs, state, mapping, str(model.base_model_prefix))
    return {old: new for old, new in renamed.items() if new not in state}


def _beside(names: Mapping[str, str], model: Any) -> set[str]:
    """Those of these names (the files', and what becomes of each) that a model's class ignores in files."""
    patterns = [re.compile(text) for text in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    return {old for old, new in names.items() if any(p.search(key) for p in patterns for key in (new, old))}


def _joined(
    first: str, group: Group, sources: Mapping[str, Weight | Computed], model: nn.Module
) -> dict[str, Weight | Computed]:
    """The parameters that an operation makes of its sources: all quantized, or all dense."""
    found = [sources[name] for name in group.members]
    quantized = [one for one in found if isinstance(one, Weight)]
    if not quantized:
        return _joined_dense(first, group, [one for one in found if isinstance(one, Computed)], model)
    if len(quantized) != len(found):
        plain = next(name for name in group.members if isinstance(sources[name], Computed))
        raise ValueError(f"some of the tensors it is made from are quantized, and {shown(plain)} is not")
    return _joined_quantized(first, group, quantized, model)


def _joined_quantized(
    first: str, group: Group, found: list[Weight], model: nn.Module
) -> dict[str, Weight | Computed]:
    numbers = _through(group, first, row_numbers([one.shape for one in found]), model)
    names = {f"{i}.{part}": full for i, one in enumerate(found) for part, full in one.names.items()}
    specs = {f"{i}.{part}": spec for i, one in enumerate(found) for part, spec in one.specs.items()}

    def making(rows: torch.Tensor) -> Callable[[Tensors], QuantizedTensor]:
        def build(tensors: Tensors) -> QuantizedTensor:
            def load(index: int) -> QuantizedTensor:
                one = found[index]
                part = one.build({name: tensors[f"{index}.{name}"] for name in one.names})
                check_quantized_tensor(part)
                return part

            return gathered(load, rows)

        return build

    columns = found[0].shape[-1]
    return {
        name: replace(
            found[0], shape=(*rows.shape[:-1], columns), names=names, specs=specs, build=making(rows)
        )
        for name, rows in numbers.items()
    }


def _joined_dense(
    first: str, group: Group, found: list[Computed], model: nn.Module
) -> dict[str, Weight | Computed]:
    shapes = _through(
        group, first, [torch.empty(c.spec.shape, dtype=c.spec.dtype, device="meta") for c in found], model
    )
    names = {f"{i}.{part}": full for i, one in enumerate(found) for part, full in one.names.items()}

    def making(target: str) -> Callable[[Tensors], torch.Tensor]:
        def build(tensors: Tensors) -> torch.Tensor:
            own = [one.build({p: tensors[f"{i}.{p}"] for p in one.names}) for i, one in enumerate(found)]
            return _through(group, first, own, model)[target]

        return build

    return {
        name: Computed(Spec(shape.dtype, tuple(shape.shape)), names, making(name))
        for name, shape in shapes.items()
    }


def _through(group: Group, first: str, tensors: list[torch.Tensor], model: Any) -> Tensors:
    """transformers' operation on these tensors, by the names of the parameters that it makes."""
    converter, given = deepcopy(group.converter), iter(tensors)
    for pattern, names in group.names.items():
        for name in names:
            converter.add_tensor(first, name, pattern, next(given))
    try:
        result = converter.convert(first, model=model, config=model.config)
    except (ValueError, RuntimeError, KeyError, IndexError, TypeError, AttributeError) as error:
        # The operations are transformers', written for whole files; what they raise for others is theirs.
        raise ValueError(
            f"transformers' {converter.operations} cannot make it of {len(tensors)} tensors: {shown(str(error))}"
        ) from error
    return {name: value[0] if isinstance(value, list) else value for name, value in result.items()}


def _without_ignored(
    result: dict[str, Weight | Computed], renamed: Mapping[str, str], state: Mapping[str, Any], model: Any
) -> tuple[dict[str, str], dict[str, Weight | Computed]]:
    """What the model's class says that files may have beside it, apart."""
    before = {new: old for old, new in renamed.items()}
    unused = {before.get(name, name): name for name in result if name not in state}
    gone = {unused[old] for old in _beside(unused, model)}
    left = dict.fromkeys((full for name in gone for full in result[name].names.values()), IGNORED)
    return left, {name: one for name, one in result.items() if name not in gone}


def _records(
    records: Records,
    result: Mapping[str, Weight | Computed],
    left: Mapping[str, str],
    renamed: Mapping[str, str],
) -> Records:
    """Records of what was made; dense tensors that kept their names stay what they were."""
    weights = {name: one for name, one in result.items() if isinstance(one, Weight)}
    computed = {name: one for name, one in result.items() if isinstance(one, Computed)}
    dense = tuple(
        name
        for name in records.dense
        if name in computed and computed[name].build is _itself and renamed.get(name) == name
    )
    kept = set(dense)
    rest = {name: one for name, one in computed.items() if name not in kept}
    shared = {renamed.get(name, name): renamed.get(other, other) for name, other in records.shared.items()}
    return replace(
        records,
        weights=weights,
        dense=dense,
        computed=rest,
        shared=shared,
        left_out={**records.left_out, **left},
    )


def _itself(tensors: Tensors) -> torch.Tensor:
    return tensors[""]


METHOD = "compressed-tensors"
#: What readers of compressed-tensors match experts' names with; transformers looks for the word in it.
TARGET = r"re:.*\.experts\.\d+\..*"


@dataclass
class Named:
    """A model's state as a published checkpoint names it."""

    tensors: Tensors
    #: Names of experts' matrices, which are no modules of the model.
    matrices: frozenset[str] = frozenset()
    #: New names by those of the model's state, of tensors that stay what they are.
    renamed: Mapping[str, str] = field(default_factory=dict)


def published(model: nn.Module, state: Tensors, reasons: list[str]) -> Named:
    """The state with quantized experts as matrices, and the names that go with them; as it is where no expert is quantized.

    What keeps it from that is added to `reasons`.
    """
    if kind := patched(model):
        reasons.append(
            f"transformers replaces {kind} before it reads compressed-tensors and loses their weights"
        )
    experts = {name: t for name, t in state.items() if isinstance(t, QuantizedTensor) and t.dim() == 3}
    found = [reason for name, t in experts.items() if (reason := refusal(model, name, t)) is not None]
    if len({t.recipe for t in experts.values()}) > 1:
        found.append("experts are quantized in several schemes, and transformers reads all in one")
    reasons += found
    if found or not experts:
        reasons += changed_by_readers(model, state)
        return Named(state)
    numbers = row_numbers([tuple(t.shape) for t in experts.values()])
    batches = {name: t for name, t in state.items() if is_batch(t) and name not in experts}
    others = {name: t for name, t in state.items() if name not in batches}
    try:
        saved = _as_saved(model, {**others, **dict(zip(experts, numbers, strict=True))})
        result = _cut(others, list(experts.values()), numbers, saved)
    except ValueError as error:
        reasons.append(str(error))
        return Named(state)
    reasons += changed_by_readers(model, batches)
    result.tensors.update(batches)
    return under_names_that_parts_have(model, result)


def under_names_that_parts_have(model: nn.Module, named: Named) -> Named:
    """The same, quantized matrices under their own names where a mapping renames `weight` and not what stands for it."""
    from transformers.core_model_loading import rename_source_key

    renamings, converters = mapping_of(model) or ([], [])
    tensors, renamed, prefix = dict(named.tensors), dict(named.renamed), str(model.base_model_prefix)
    for old, new in named.renamed.items():
        if not isinstance(tensors[new], QuantizedTensor):
            continue
        stored, own = (f"{name.removesuffix('weight')}weight_scale" for name in (new, old))
        if rename_source_key(stored, renamings, converters, prefix, {own: None})[0] != own:
            tensors[old], renamed[old] = tensors.pop(new), old
    return replace(named, tensors=tensors, renamed=renamed)


def changed_by_readers(model: nn.Module, state: Tensors) -> list[str]:
    """Dense tensors that transformers would change while it reads them under the names that they have in the model."""
    mapping = mapping_of(model)
    if mapping is None or not any(mapping):
        return []
    _, groups = grouped_names(state, model.state_dict(keep_vars=True), mapping, str(model.base_model_prefix))
    found = [(name, group) for group in groups.values() for name in group.members]
    return [
        f"{name}: transformers reads it through {group.converter.operations}, and it is stored as the model has it"
        for name, group in found
    ]


def refusal(model: nn.Module, name: str, t: QuantizedTensor) -> str | None:
    """Why experts cannot be matrices of compressed-tensors; None where readers give their values."""
    if mapping_of(model) is None:
        return f"{name}: batched experts are read into models of transformers alone"
    if t.recipe.activation is not None:
        return f"{name}: transformers reads experts as dense weights and quantizes none of their inputs"
    if t.meta.transposed or t.meta.axis != -1 or t.meta.layout != "plain":
        return f"{name}: experts are stored as (experts, in, out), and compressed-tensors holds (out, in)"
    if not read_while_loading(t.recipe):
        return (
            f"{name}: transformers does not load experts in {t.recipe.weight.name} (it does in symmetric integers, in MXFP4, "
            "and in e4m3 with a scale for each row)"
        )
    return None


def read_while_loading(recipe: Recipe) -> bool:
    """Whether transformers dequantizes experts of a recipe to what they mean.

    Its operation reads packed codes beside one array of scales, without zero points or a scale of scales, and elements of one
    byte beside scales that spread over rows.
    """
    scheme = recipe.weight
    if scheme.outer is not None or scheme.zero is not None or not isinstance(scheme.scale.block, int):
        return False
    bytes_ = scheme.format.kind == "float" and scheme.format.bits == 8
    return scheme.scale.block == -1 if bytes_ else True


def patched(model: nn.Module) -> str | None:
    """The class of experts that transformers replaces before it reads compressed-tensors: their dense weights are lost then."""
    if mapping_of(model) is None:
        return None
    from transformers.quantizers.base import MODULES_TO_PATCH_FOR_QUANTIZATION

    table: Any = MODULES_TO_PATCH_FOR_QUANTIZATION
    for module in model.modules():
        kind = type(module).__name__
        methods = table[kind]["quantization_methods"] if kind in table else ()
        if METHOD in [str(getattr(method, "value", method)) for method in methods]:
            return kind
    return None


def ignored(model: nn.Module, named: Named, dense: list[str]) -> list[str]:
    """Modules that readers are to leave as they are, dense linear layers and routers: by their names and by those of
    checkpoints."""
    routers = [
        path
        for path, module in model.named_modules()
        if not isinstance(module, (nn.Linear, nn.Embedding))
        and not is_experts(module)
        and _has_matrix(module)
    ]
    found = [*dense, *(routers if named.matrices else ())]
    other = [named.renamed.get(f"{path}.weight", "").removesuffix(".weight") for path in found]
    return sorted({*found, *other} - {""})


def _has_matrix(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and not is_batch(weight)


def _as_saved(model: Any, state: Tensors) -> Tensors:
    """The state as transformers' save_pretrained names and cuts it, by the mapping of the model's class."""
    from transformers.core_model_loading import revert_weight_conversion

    shallow = copy(model)
    # What the model was read with may be less than its class knows.
    vars(shallow).pop("_weight_conversions", None)
    result: Tensors = revert_weight_conversion(shallow, state)
    return result


def _cut(
    state: Tensors, experts: list[QuantizedTensor], numbers: list[torch.Tensor], saved: Tensors
) -> Named:
    """Named tensors of what `_as_saved` has made of the rows' numbers; ValueError where experts are not cut into matrices."""
    before = {id(value): name for name, value in state.items()}
    tensors: Tensors = {}
    renamed: dict[str, str] = {}
    matrices: set[str] = set()
    for name, value in saved.items():
        old = before.get(id(value))
        if old is not None:
            tensors[name], renamed[old] = value, name
        elif any(value is one for one in numbers):
            raise ValueError(
                f"{name}: published checkpoints of this model hold experts in one tensor, not as matrices"
            )
        elif isinstance(value, QuantizedTensor):
            raise ValueError(f"{name} is stored in other pieces than it was quantized in")
        elif value.dtype == torch.int64 and value.dim() == 2:
            tensors[name] = _matrix(experts, value)
            matrices.add(name)
        elif value.dtype == torch.int64:
            raise ValueError(
                f"{name}: published checkpoints of this model hold experts in one tensor turned otherwise, "
                "not as matrices"
            )
        else:
            # Beside packed experts transformers asks every operation's tensors for scales, and loses those that have none.
            raise ValueError(
                f"{name}: transformers 5.23 loses tensors that it merges from several dense ones next to quantized experts"
            )
    return Named(tensors, frozenset(matrices), renamed)


def _matrix(experts: list[QuantizedTensor], rows: torch.Tensor) -> QuantizedTensor:
    """The matrix of these rows, all of one parameter."""
    whole = experts[int(rows.flatten()[0]) // STEP]
    place, height = rows % STEP, whole.shape[1]
    return gathered(lambda index: select(whole, 0, index), place // height * STEP + place % height)
