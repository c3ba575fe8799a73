"""`convert_for_training_`: linear layers and experts of a model train in low precision, in place."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn
from torch.nn.parameter import is_lazy

from ao_lab.tensor.quantized_tensor import QuantizedTensor
from ao_lab.training.fused_modules import fuse_layers_, fusions, unfuse_layers_
from ao_lab.training.grouped.experts import (
    LowPrecisionExperts,
    experts_reason,
    plain_experts_again,
    train_experts_by,
)
from ao_lab.training.layers import (
    LowPrecisionLinear,
    Settings,
    class_of,
    never_ran,
    plain_again,
    train_by,
    unsupported_reason,
)
from ao_lab.training.products import PRODUCTS, has_fp8
from ao_lab.transforms.layers import (
    TABLES,
    check_model,
    full_name,
    is_experts,
    is_linear,
    routers,
    shorten,
)
from ao_lab.transforms.plan import REFUSED, Filter, Selection, all_or_none, check_called
from ao_lab.transforms.report import folded_names
from ao_lab.transforms.training_records import warn_of_saved_training
from reference.arrays.namespace import choice
from reference.training.recipe import Recipe, recipe_of

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Converted:
    """The result of `convert_for_training_`: names of converted layers, and of those left with the reason."""

    recipe: Recipe
    changed: tuple[str, ...] = ()
    left: dict[str, str] = field(default_factory=dict)
    #: Of the FP8 all-gather: layers whose weight FSDP2 gathers in its own dtype, with the reason.
    gathered_whole: dict[str, str] = field(default_factory=dict)
    #: Of `fuse`: norms, feed-forwards and attentions with one kernel each way, and those without, with the reason.
    fused: tuple[str, ...] = ()
    not_fused: dict[str, str] = field(default_factory=dict)
    #: Why the matmuls are not faster than before on the device of the model; "" where kernels multiply 8-bit operands.
    slow: str = ""
    #: Of `pad`: linear layers whose lengths blocks do not divide, with the lengths that they are padded to.
    padded: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        count = f"{len(self.changed)} of {len(self.changed) + len(self.left)} layers"
        told = {name: f"trains{self.padded.get(name, '')}" for name in self.changed}
        lines = [f"{count} train by {self.recipe.name}{'; ' * bool(self.slow)}{self.slow}"]
        lines += [f"  {line}" for line in folded_names(told)]
        lines += [f"  {line}" for line in folded_names(self.left, "left: ")]
        lines += [f"  {line}" for line in folded_names(self.gathered_whole, "gathered in its own dtype: ")]
        if self.fused or self.not_fused:
            both = len(self.fused) + len(self.not_fused)
            lines.append(f"{len(self.fused)} of {both} norms, feed-forwards and attentions are fused")
        lines += [f"  {line}" for line in folded_names(self.not_fused, "not fused: ")]
        return "\n".join(lines)


class Reverted(tuple[str, ...]):
    """The result of `convert_from_training_`: the names of modules that are again what they were before."""

    def __str__(self) -> str:
        if not self:
            return "no module trained in low precision; nothing was changed"
        return f"{len(self)} modules no longer train in low precision" + "".join(
            f"\n  {line}" for line in folded_names(dict.fromkeys(self, ""))
        )


def without_speed(model: nn.Module, settings: Settings) -> str:
    """Why the matmuls of a recipe take no less time than without it on a model's devices; "" where they may."""
    devices = {parameter.device for parameter in model.parameters() if not parameter.is_meta}
    slow = [device.type for device in devices if not has_fp8(device)]
    emulated = settings.kernel == "emulate" or (settings.kernel == "auto" and slow)
    if settings.recipe.is_dense or not emulated:
        return ""
    where = "on CPUs" if "cpu" in slow else "on GPUs without FP8 units" if slow else "by kernel='emulate'"
    cost = "several times slower than in bfloat16 (an H100 has FP8 units)" if "cpu" in slow else "no speedup"
    return f"{where} quantized operands are multiplied in float32: the same training, {cost}"


def padded_lengths(settings: Settings, layer: nn.Linear) -> str:
    """What a linear layer is padded to, as the end of a line of a report; "" where blocks divide its lengths."""
    _, n, k = settings.steps
    lengths = (("in_features", layer.in_features, k), ("out_features", layer.out_features, n))
    return "".join(
        f", {name} {length} padded to {length + -length % step}"
        for name, length, step in lengths
        if length % step
    )


def convert_for_training_(
    model: nn.Module,
    recipe: str | Recipe,
    filter_fn: Filter | None = None,
    *,
    pad: bool = False,
    kernel: str = "auto",
    experts: bool = True,
    fsdp_float8_all_gather: bool = False,
    fuse: bool | Iterable[str] = False,
) -> Converted:
    """Let linear layers of `model` train in low precision by a recipe: "tensorwise", "rowwise", ..., a name of `RECIPES`, or a
    record.

    filter_fn(module, name) selects modules. Default: all nn.Linear except routers and adapters of PEFT, a head that is tied to
    the embedding included (`quantize_` leaves it), and (unless `experts` is False) modules of batched experts: parameters with
    three axes, in modules of transformers and in those that call torch's grouped matmuls.
    Modules, parameters, names and hooks stay the same: checkpoints load both ways, and optimizers need no change. Layers whose
    dimensions the recipe does not support, and subclasses of nn.Linear, are left and listed with the reason; layers prepared
    for QAT (without learned scales) first round their operands and then train with the recipe. Other modules with matrices
    (convolutions, LSTMs, embeddings) that filter_fn selects are listed too.
    pad: pad unsupported dimensions with zeros instead. The number of tokens is free: zero rows are added if blocks along tokens
    need them. kernel: "auto": the choice of `ao_lab.tune`, else the default; "emulate": float32 matmuls of the operands, which
    is the default on CPUs and on GPUs without FP8 units; "dequantize"; "scaled_mm".
    fsdp_float8_all_gather: FSDP2 gathers quantized weights, half the bytes of bfloat16, if `fully_shard` follows; the weight in
    the input gradient is then computed from these (see `ao_lab.training.fsdp`). Saved models have ordinary weights.
    fuse: True computes RMSNorm and SwiGLU between the linear layers in one kernel forward and one backward, whichever class
    they have; names among "norm", "swiglu" and "rotary" select (see `ao_lab.training.fused_modules`). Modules that compute
    something else are left and listed.
    Raises ValueError for an unknown recipe, if the filter selects nothing, if no layer can be converted, and if the fast path
    of nn.TransformerEncoderLayer would bypass converted layers in eval mode; TypeError for anything but a model. After an error
    the model is unchanged.
    """
    check_model(model)
    record = recipe_of(recipe)
    choice(kernel, ("auto", *PRODUCTS), "kernel")
    if fsdp_float8_all_gather:
        from ao_lab.training.fsdp import gather_recipe

        record = gather_recipe(record)
    settings, kinds = Settings(record, pad, kernel), fusions(fuse)
    found = selected(model, settings, filter_fn, experts)
    linears = {name: module for name, module in found.chosen.items() if isinstance(module, nn.Linear)}
    with all_or_none(_restore) as begun:
        for module in found.modules:
            begun.append(module)
            if isinstance(module, nn.Linear):
                train_by(module, settings)
            else:
                train_experts_by(module, settings)
        gathered_whole = _gather(model, linears) if fsdp_float8_all_gather else {}
        fused, not_fused = fuse_layers_(model, kinds)
    LOG.info("recipe %s: %d modules converted, %d left", record.name, len(found.chosen), len(found.left))
    slow = without_speed(model, settings)
    warn_of_saved_training(model, "recipe")
    padded = {name: told for name, layer in linears.items() if (told := padded_lengths(settings, layer))}
    return Converted(record, tuple(found.chosen), found.left, gathered_whole, fused, not_fused, slow, padded)


ADAPTER = "an adapter trains in its own dtype; a filter_fn that selects it converts it too"
ROUTER = "it routes tokens to experts"
QUANTIZED = (
    "its weight is quantized, and recipes train dense weights: convert the model before it is quantized, or train adapters "
    "beside it (QATConfig with lora=LoRA())"
)


@dataclass
class Chosen:
    """Modules by name that are to train by a recipe, and the reasons of those that stay."""

    chosen: dict[str, nn.Module] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    @property
    def modules(self) -> list[nn.Module]:
        """The chosen modules, each once."""
        return list({id(module): module for module in self.chosen.values()}.values())


def selected(model: nn.Module, settings: Settings, filter_fn: Filter | None, experts: bool) -> Chosen:
    """What is to be converted; ValueError where nothing is, for lazy layers, or where torch would compute past what is."""
    found, unsupported = Chosen(), list[str]()

    def linear_or_experts(module: nn.Module, name: str) -> tuple[bool, str]:
        return is_candidate(module, experts) or isinstance(module, nn.Linear), REFUSED

    kept = dict.fromkeys(routers(model), ROUTER) | dict.fromkeys(adapters(model), ADAPTER)
    routing = kept if filter_fn is None else {}
    select = Selection(filter_fn, linear_or_experts, routing)
    for name, module in model.named_modules(remove_duplicate=False):
        candidate = is_candidate(module, experts)
        if not candidate and not holds_matrices(module):
            continue
        wanted, reason = select(module, name)
        if not wanted:
            # What reports of the other transforms list as well.
            if candidate or (filter_fn is None and isinstance(module, TABLES)):
                found.left[name] = reason if candidate else other_reason(module)
            continue
        if any(map(is_lazy, module.parameters(recurse=False))):
            raise ValueError(
                f"{name or 'the model itself'}: a {type(module).__name__} has no shape yet; run one forward of "
                f"the model first, which gives it one"
            )
        unable = _reason(settings, module) if candidate else other_reason(module)
        if unable is None:
            found.chosen[name] = module
        else:
            found.left[name] = unable
            unsupported.append(name)
    _check_any(found, unsupported, settings)
    check_called(model, found.chosen.values())
    return found


def adapters(model: nn.Module) -> list[str]:
    """Names of the layers that PEFT has put beside others (`lora_A`, `lora_B`, ...), as classes of its layers list them."""
    names = []
    for path, module in model.named_modules(remove_duplicate=False):
        for attribute in getattr(type(module), "adapter_layer_names", ()):
            beside = getattr(module, attribute, None)
            inner = beside.named_modules(remove_duplicate=False) if isinstance(beside, nn.Module) else ()
            names += [f"{full_name(path, attribute)}.{name}".rstrip(".") for name, _ in inner]
    return names


def _check_any(found: Chosen, unsupported: list[str], settings: Settings) -> None:
    if found.chosen:
        return
    if not unsupported:
        raise ValueError("no layer to convert: filter_fn refused all, or the model has only routers")
    alike: dict[str, list[str]] = {}
    for name in unsupported:
        alike.setdefault(found.left[name], []).append(name)
    told = [f"{shorten(names)}: {why}" if names != [""] else why for why, names in alike.items()]
    raise ValueError(
        f"recipe {settings.recipe.name!r} supports none of {len(unsupported)} selected layers; {'; '.join(told)}"
    )


def _reason(settings: Settings, module: nn.Module) -> str | None:
    """Why a linear layer or experts cannot train by a recipe; None where they can."""
    if any(isinstance(parameter, QuantizedTensor) for parameter in module.parameters(recurse=False)):
        return QUANTIZED
    if not is_linear(module):
        return experts_reason(settings, module)
    known = class_of(module)
    if isinstance(known, str) or not isinstance(module, nn.Linear):
        return str(known)
    return unsupported_reason(settings.recipe, module, settings.pad)


def is_candidate(module: nn.Module, experts: bool) -> bool:
    """Whether a module is one that recipes train."""
    return is_linear(module) or (experts and is_experts(module))


def holds_matrices(module: nn.Module) -> bool:
    """Whether a module has parameters of two axes or more of its own that a filter may have meant; lazy ones have none yet."""
    return any(
        not is_lazy(parameter) and parameter.dim() > 1 for parameter in module.parameters(recurse=False)
    )


def other_reason(module: nn.Module) -> str:
    """Why a module that holds matrices is none that recipes train."""
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention uses its weight without calling it"
    if is_experts(module):
        return "experts=False"
    kind = type(module).__name__
    article = "an" if kind[:1] in "AEIOU" else "a"
    return f"recipes train nn.Linear and batched experts, and this is {article} {kind}"


def _gather(model: nn.Module, chosen: dict[str, nn.Linear]) -> dict[str, str]:
    """Let FSDP2 gather the weights of converted layers as codes; the reasons of those that it does not."""
    from ao_lab.training.fsdp import gather_as_codes

    converted = {id(module) for module in chosen.values()}
    elsewhere = {
        id(parameter)
        for module in model.modules()
        if id(module) not in converted
        for parameter in module.parameters(recurse=False)
    }
    shared = "a layer that is not converted has the same weight"
    left = {name: shared for name, module in chosen.items() if id(module.weight) in elsewhere}
    for name, module in chosen.items():
        if type(module) is not LowPrecisionLinear:
            left[name] = f"a {type(module).__name__} rounds its weight before the cast"
    gather_as_codes([module for name, module in chosen.items() if name not in left])  # type: ignore[misc]
    return left


def _restore(module: object) -> None:
    """Make a module what it was before, where it was converted."""
    if isinstance(module, LowPrecisionLinear):
        plain_again(module)
    elif isinstance(module, LowPrecisionExperts):
        plain_experts_again(module)


def convert_from_training_(model: nn.Module) -> Reverted:
    """Undo `convert_for_training_`: every converted module becomes what it was; returns their names, a tuple that prints as a
    report. Parameters and parametrizations stay.

    A UserWarning names modules whose forward never ran while others' did (for instance a chunked loss that uses
    `lm_head.weight` directly): they did not train with the recipe. For compiled programs this is unknown, and there is no
    warning.
    """
    check_model(model)
    kinds = (LowPrecisionLinear, LowPrecisionExperts)
    found = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, kinds)
    }
    idle = never_ran(found)
    for module in {id(module): module for module in found.values()}.values():
        _restore(module)
    if idle:
        warnings.warn(
            f"forward never ran: {shorten(idle)} did not train with the recipe; code that uses their weight directly "
            f"(a fused or chunked loss) has to call the module",
            UserWarning,
            stacklevel=2,
        )
    return Reverted((*found, *unfuse_layers_(model)))


__all__ = ["Converted", "Reverted", "convert_for_training_", "convert_from_training_"]
