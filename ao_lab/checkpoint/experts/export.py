"""Batched experts in compressed-tensors: a matrix for each expert and projection, under the names of published checkpoints.

Programs that read compressed-tensors know experts as matrices of their own (`mlp.experts.0.gate_proj.weight_packed`), while
modules of transformers 5 hold all in one parameter. The names, and how the parameter is sliced, are transformers' own
conversion for saving, which is given the numbers of rows (`ao_lab.checkpoint.experts.conversion`) instead of weights;
`load_pretrained` goes the same way back.

transformers 5.23 dequantizes experts while it loads them, with `dequantize=True` or without: symmetric integers, MXFP4, and
e4m3 with a scale for each row, to float32 where scales are float32. Of others it loses a part without a word (the outer scale
of NVFP4) or fails; inputs of experts it never quantizes. What is not read is not written.

Experts that stay dense keep the names of the modules, which transformers reads too: beside packed weights it would drop their
matrices.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ao_lab.checkpoint.experts.conversion import STEP, gathered, grouped_names, mapping_of, row_numbers
from ao_lab.checkpoint.export.plain_reader import Reading
from ao_lab.config.recipe import Recipe
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from ao_lab.tensor.slicing import select
from ao_lab.transforms.layers import is_batch, is_experts

METHOD = "compressed-tensors"
#: What readers of compressed-tensors match experts' names with; transformers looks for the word in it.
TARGET = r"re:.*\.experts\.\d+\..*"
Tensors = dict[str, torch.Tensor]


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
            f"{name}: transformers does not read experts in {t.recipe.weight.name} (it does in symmetric integers, in MXFP4, "
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


def as_expert(read: Reading, t: QuantizedTensor) -> Reading:
    """The tensors of an expert's matrix: scales in the weight's dtype where that changes no number.

    For transformers makes experts in the dtype of their scales, and the model's products want one dtype.
    """
    scale = read.tensors["weight_scale"]
    cast = scale.to(t.dtype)
    if t.is_meta or scale.dtype != torch.float32 or not torch.equal(cast.to(scale.dtype), scale):
        return read
    return replace(read, tensors={**read.tensors, "weight_scale": cast})


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
                f"{name}: transformers 5.23 loses what it makes of several dense tensors beside quantized experts"
            )
    return Named(tensors, frozenset(matrices), renamed)


def _matrix(experts: list[QuantizedTensor], rows: torch.Tensor) -> QuantizedTensor:
    """The matrix of these rows, all of one parameter."""
    whole = experts[int(rows.flatten()[0]) // STEP]
    place, height = rows % STEP, whole.shape[1]
    return gathered(lambda index: select(whole, 0, index), place // height * STEP + place % height)


__all__ = ["TARGET", "Named", "as_expert", "ignored", "published"]
