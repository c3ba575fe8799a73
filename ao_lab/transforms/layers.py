"""Which parameters of a model can be quantized: the weights of linear layers and embeddings, and batched experts.

Batched experts are parameters with three axes, (experts, out, in) or (experts, in, out). Nothing here knows a model by its
name: which axis is the contraction axis is read from the module (`contraction_axis`), and which layers route tokens to experts
from where they stand and how many outputs they have (`routers`).
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

#: A linear layer of transformers (GPT-2 and its relatives) that stores its weight as (in, out); known by name, not imported.
CONV1D = ("transformers.pytorch_utils", "Conv1D")
#: Modules that look up rows of their weight.
TABLES = (nn.Embedding, nn.EmbeddingBag)


def check_model(model: object) -> None:
    """TypeError unless a model is a torch module."""
    if not isinstance(model, nn.Module):
        folder = (
            "; of a folder ao_lab.load_pretrained (quantized) or transformers' from_pretrained makes it, and "
        )
        way = folder + "ao_lab.quantize_pretrained(folder, config) quantizes it while loading"
        more = way if isinstance(model, (str, os.PathLike)) else ""
        raise TypeError(f"the model is a torch.nn.Module, got {type(model).__name__}: {model!r:.60}{more}")


class Slot(NamedTuple):
    """A parameter where it is: the name of its module, the module, its own name there, and itself."""

    path: str
    module: nn.Module
    name: str
    parameter: torch.Tensor

    @property
    def full(self) -> str:
        """Its full name."""
        return full_name(self.path, self.name)


def full_name(path: str, name: str) -> str:
    """The name in the model of what a module has under a name; the model itself has no path."""
    return f"{path}.{name}" if path else name


def quantizable_parameters(model: nn.Module) -> Iterator[Slot]:
    """Every parameter that could be quantized, or that one would expect to be.

    Matrices of nn.Linear, transformers' Conv1D, nn.Embedding and nn.EmbeddingBag (subclasses too), those that a
    parametrization holds instead, and floating-point parameters with three axes: batched experts. `unsupported_reason` says
    which of them cannot be.

    ValueError for a lazy layer among them, whose parameters have no shape yet; other lazy parameters are passed over.
    """
    for path, module in model.named_modules():
        layer = isinstance(module, (nn.Linear, *TABLES, ParametrizationList)) or is_transposed(module)
        for name, parameter in module.named_parameters(recurse=False):
            if is_lazy(parameter):
                if layer:
                    raise ValueError(
                        f"{full_name(path, name)} of a {type(module).__name__} has no shape yet; run one forward of the "
                        f"model first, which gives it one"
                    )
                continue
            experts = parameter.dim() == 3 and parameter.is_floating_point() and not is_no_batch(module)
            if experts or (layer and parameter.dim() >= 2):
                yield Slot(path, module, name, parameter)


def unsupported_reason(module: nn.Module, name: str, parameter: torch.Tensor) -> str | None:
    """Why a candidate cannot be quantized, from what its module does with it; None where it can."""
    if isinstance(module, ParametrizationList):
        return "a parametrization computes the layer's weight from it; remove_parametrizations makes it an ordinary weight"
    if parameter.dim() == 2 and name != "weight":
        return "it is not the weight of the layer's matmul"
    if parameter.dim() == 3 and parameter.shape[0] == 1:
        return f"shape {tuple(parameter.shape)} is not a batch of experts: it has one entry"
    if parameter.dim() == 3 and 1 in parameter.shape:
        return f"shape {tuple(parameter.shape)} is not a batch of experts: its entries are no matrices"
    if isinstance(module, TABLES) and module.max_norm is not None:
        return f"max_norm={module.max_norm} changes rows of the table in every forward pass; set it to None first"
    if isinstance(module, TABLES) and not looks_up(module):
        return f"{type(module).__name__} does not read its table like nn.Embedding"
    return module.unsupported_reason() if isinstance(module, ConvertedModule) else None


def adapters_of_peft(model: nn.Module) -> set[int]:
    """Ids of the modules that are, or lie in, adapters: peft's layers name the attributes that hold them."""
    return {
        id(part)
        for module in model.modules()
        for name in getattr(type(module), "adapter_layer_names", ())
        if isinstance(held := getattr(module, name, None), nn.Module)
        for part in held.modules()
    }


def first_matrix(module: nn.Module) -> str | None:
    """The name of a module's first own parameter with two axes or more; None where it has none."""
    own = module.named_parameters(recurse=False)
    return next((name for name, p in own if not is_lazy(p) and p.dim() > 1), None)


def other_reason(module: nn.Module) -> str:
    """Why a module that a filter accepts is none whose weights are quantized."""
    return f"{type(module).__name__}: of modules that hold weights nn.Linear, nn.Embedding and batched experts are quantized"


#: Pre-forward hooks of torch.nn.utils that compute a weight, and what makes that plain again.
WEIGHT_HOOKS = {
    "WeightNorm": "torch.nn.utils.remove_weight_norm(module)",
    "SpectralNorm": "torch.nn.utils.remove_spectral_norm(module)",
    "BasePruningMethod": "torch.nn.utils.prune.remove(module, 'weight')",
}


def computed_reason(module: nn.Module) -> str | None:
    """What computes a module's weight from other parameters, and how that ends; None where the weight is a plain parameter."""
    if is_parametrized(module, "weight"):
        names = " and ".join(type(one).__name__ for one in module.parametrizations["weight"])  # type: ignore[index]
        return (
            f"the parametrization {names} computes its weight; "
            f"torch.nn.utils.parametrize.remove_parametrizations(module, 'weight') makes it an ordinary weight"
        )
    for hook in module._forward_pre_hooks.values():
        kinds = {kind.__name__ for kind in type(hook).__mro__}
        for kind, remove in WEIGHT_HOOKS.items():
            if kind in kinds and "weight" in (
                getattr(hook, "name", None),
                getattr(hook, "_tensor_name", None),
            ):
                return f"a hook ({type(hook).__name__}) computes its weight; {remove} makes it an ordinary weight"
    return None


#: The key of a layer's record in the metadata of a state_dict.
TRAINING = "ao_lab_training"
#: The list of errors of the last `load_state_dict` that warned: all layers of one are given the same.
_warned: list[object] = []


def _warn_once_a_load(errors: object, prefix: str, saved: Mapping[str, str], now: Mapping[str, str]) -> None:
    """A UserWarning of what a state trained with, unless this `load_state_dict` has given one."""
    if _warned and _warned[0] is errors:
        return
    _warned[:] = [errors]
    before, after = (", ".join(f"{kind} {what}" for kind, what in each.items()) for each in (saved, now))
    warnings.warn(
        f"load_state_dict: the state was saved in training with {before} ({prefix[:-1] or 'the model itself'}, ...), and this "
        f"model trains with {after}: training goes on with that",
        UserWarning,
        stacklevel=6,
    )


class ConvertedModule:
    """Base of the classes that a module gets in place, such as layers in training, which say themselves how they are."""

    #: How step "prepare" has prepared it, for reports; "" where it has not.
    preparation: ClassVar[str] = ""
    #: Whether it is in training, so that its weight stays in the layout that it has.
    for_training: ClassVar[bool] = True

    def unsupported_reason(self) -> str | None:
        """Why its weight cannot be quantized as it is; None where the weight alone decides."""
        return None

    def parameter_reason(self, name: str) -> str | None:
        """Why one of its parameters is as it is, for a report; None where nothing is to be said."""
        return None

    def training_record(self) -> dict[str, str]:
        """What it trains with, by kind (recipe, QAT, LoRA, sparsity): what checkpoints are compared by; empty for nothing."""
        return {}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """torch's; the record goes into the metadata, and no name is added."""
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        own: Any = getattr(destination, "_metadata", {}).get(prefix[:-1])
        if own is not None and (record := self.training_record()):
            own[TRAINING] = record

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """torch's; a UserWarning, one for all layers, where the state is of a layer that trained otherwise."""
        super()._load_from_state_dict(*args, **kwargs)  # type: ignore[misc]
        (_, prefix, metadata), errors = args[:3], args[-1]
        saved, now = metadata.get(TRAINING), self.training_record()
        if isinstance(saved, dict) and any(saved.get(kind, what) != what for kind, what in now.items()):
            _warn_once_a_load(errors, prefix, saved, now)


def is_converted(module: nn.Module) -> bool:
    """Whether a module is of a class that it got in place."""
    return isinstance(module, ConvertedModule)


def is_in_training(module: nn.Module) -> bool:
    """Whether a module is of a class that it got in place to train."""
    return isinstance(module, ConvertedModule) and module.for_training


def looks_up(table: nn.Module) -> bool:
    """Whether a table's forward is that of torch's module, or calls it or torch's lookup; True where no code can be seen."""
    forward = inspect.unwrap(type(table).forward)
    code = getattr(forward, "__code__", None)
    torchs = forward in [kind.forward for kind in TABLES]
    return torchs or code is None or bool({"super", "embedding", "embedding_bag"} & {*code.co_names})


def is_no_batch(module: nn.Module) -> bool:
    """Whether the module's weight has three axes without being a batch of matrices that it multiplies with."""
    return isinstance(module, (nn.modules.conv._ConvNd, nn.Bilinear))


def is_transposed(module: nn.Module) -> bool:
    """Whether a linear layer stores its weight as (in, out), the other way round than nn.Linear: transformers' Conv1D."""
    return any((kind.__module__, kind.__name__) == CONV1D for kind in type(module).__mro__)


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds several matrices in one parameter, as experts are kept: floating-point, three axes, none of 1."""
    return not is_no_batch(module) and any(map(is_batch, module.parameters(recurse=False)))


def is_batch(parameter: torch.Tensor) -> bool:
    """Whether a parameter is a batch of matrices."""
    return (
        not is_lazy(parameter)
        and parameter.dim() == 3
        and parameter.is_floating_point()
        and 1 not in parameter.shape
    )


def linear_and_experts(module: nn.Module, name: str) -> bool:
    """A filter for `quantize_`: linear layers and batched experts. Routers and heads that are tied to the embedding stay
    unquantized, as by default.

    `quantize_(model, config, ao_lab.linear_and_experts)`. By default (no filter) experts stay unquantized, as in torchao.

    Experts are parameters with three axes whose module defines which axis its matmuls contract (`is_transposed`, as
    transformers marks them; the shapes of two projections; a forward that uses torch's `linear` only). Other parameters, such
    as position tables and attention kernels, are left: your own filter that selects their module, and a configuration with
    axis=-1 or axis=-2, quantizes them.
    """
    return is_linear(module) or (is_experts(module) and says_its_axis(module))


def says_its_axis(module: nn.Module) -> bool:
    """Whether a module of several matrices says along which axis its products with all of them sum."""
    batches = [p for p in module.parameters(recurse=False) if not is_lazy(p) and is_batch(p)]
    return all(contraction_axis(module, parameter) is not None for parameter in batches)


def contraction_axis(module: nn.Module, parameter: torch.Tensor) -> int | None:
    """The axis of a weight that its product sums over, -1 or -2; None where the module does not say it.

    Linear layers and embeddings: -1 (transformers' Conv1D after its transposition). Batched experts: what the module says of
    itself (`is_transposed`, as transformers marks experts (experts, in, out)); else what the shapes of its two projections
    say, hidden to 2 x intermediate and back; else -1 where its own forward multiplies with it by torch's `linear` alone.
    """
    if parameter.dim() < 3:
        return -1
    said = getattr(module, "is_transposed", None)
    if isinstance(said, bool):
        return -2 if said else -1
    return _axis_of_shapes(module) or _axis_of_code(module, parameter)


def _axis_of_shapes(module: nn.Module) -> int | None:
    """From a fused projection and its counterpart: (h, 2f) with (f, h), or (2f, h) with (h, f); never both."""
    batches = [p for p in module.parameters(recurse=False) if is_batch(p)]
    shapes = [tuple(p.shape[1:]) for p in batches]
    if len(shapes) != 2 or batches[0].shape[0] != batches[1].shape[0]:
        return None
    for (a, b), (c, d) in (shapes, shapes[::-1]):
        if (a, b) == (d, 2 * c):
            return -2
        if (a, b) == (2 * d, c):
            return -1
    return None


#: What multiplies a batch of matrices without saying which way round, and what turns a matrix before `linear`.
PRODUCTS = {"bmm", "baddbmm", "matmul", "einsum", "grouped_mm", "_grouped_mm", "mm", "addmm"}
TURNS = {"T", "mT", "t", "H", "mH", "transpose", "swapaxes", "swapdims", "adjoint"}


def _axis_of_code(module: nn.Module, parameter: torch.Tensor) -> int | None:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    names = set() if code is None else _names(code)
    used = any(name in names for name, own in module._parameters.items() if own is parameter)
    return -1 if used and "linear" in names and not names & (PRODUCTS | TURNS) else None


def _names(code: CodeType) -> set[str]:
    """What a function's code names, comprehensions inside it included."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return {*code.co_names}.union(*inner)


def routers(model: nn.Module) -> frozenset[str]:
    """Names of linear layers that route tokens: beside batched experts, in the same block, with one output for each expert.

    So is a gate with a single output there, which weighs an expert that all tokens share.
    """
    modules = dict(model.named_modules())
    found: set[str] = set()
    for path, module in modules.items():
        if not path or not is_experts(module):
            continue
        batches = [p for p in module.parameters(recurse=False) if is_batch(p)]
        counts = {1, *(p.shape[0] for p in batches)}
        # What may be no experts has a router only where that reads what they multiply with.
        widths = None if says_its_axis(module) else {size for p in batches for size in p.shape[1:]}
        block = path.rpartition(".")[0]
        for name, layer in modules[block].named_modules(prefix=block):
            if not is_linear(layer) or f"{name}.".startswith(f"{path}."):
                continue
            outputs, inputs = _sizes(layer)
            if outputs in counts and (widths is None or inputs in widths):
                found.add(name)
    return frozenset(found)


def _sizes(layer: nn.Module) -> tuple[int | None, int | None]:
    """How many outputs and inputs a linear layer has."""
    weight = getattr(layer, "weight", None)
    if weight is None:
        return None, None
    outputs, inputs = weight.shape[:: -1 if is_transposed(layer) else 1]
    return int(outputs), int(inputs)


def tied_layers(model: nn.Module) -> dict[str, str]:
    """Names of linear layers whose weight is an embedding's, a language model's head mostly, and of that embedding."""
    tables = {id(m.weight): name for name, m in model.named_modules() if isinstance(m, TABLES)}
    return {
        name: tables[id(weight)]
        for name, module in model.named_modules()
        if tables and is_linear(module) and id(weight := module._parameters.get("weight")) in tables
    }


def is_untied(model: nn.Module) -> bool:
    """Whether a transformers model has a table and a head with weights of their own; quantizing one of two parts them."""
    head = table_or_head(model, "get_output_embeddings")
    table = table_or_head(model, "get_input_embeddings") if head is not None else None
    # Some models have a list of heads there.
    ours, its = getattr(head, "weight", None), getattr(table, "weight", None)
    return ours is not None and its is not None and ours is not its


def table_or_head(model: nn.Module, method: str) -> Any:
    """A transformers model's table or head; None where it has none."""
    if not hasattr(model, method):
        return None
    try:
        return getattr(model, method)()
    except NotImplementedError:  # a model without a table (Wav2Vec2)
        return None


@contextmanager
def untying(model: nn.Module) -> Iterator[None]:
    """Where what is done parts a head from the table that it was tied to, the configuration says so afterwards.

    Otherwise transformers' `tie_weights`, which `resize_token_embeddings` calls, would tie them again.
    """
    modules: list[Any] = [*model.modules()]
    configs = [(one, getattr(one, "config", None)) for one in modules]
    tied = [(one, config) for one, config in configs if says_tied(config) and not is_untied(one)]
    try:
        yield
    finally:
        for one, config in tied:
            if is_untied(one):
                told: Any
                for told in (config, getattr(config, "text_config", None)):
                    if says_tied(told):
                        told.tie_word_embeddings = False


def says_tied(config: Any) -> bool:
    """Whether a configuration of transformers asks for a head with the table's weight."""
    return getattr(config, "tie_word_embeddings", None) is True


def offloaded(model: nn.Module) -> frozenset[str]:
    """Full names of parameters that are placeholders on the meta device, while a hook of accelerate holds their values.

    The hooks of `cpu_offload`, `disk_offload` and `dispatch_model` bring values for one forward of their module and then
    restore what they hold, so that a change in between is lost.
    """
    found: set[str] = set()
    for path, module in model.named_modules():
        hook: Any = getattr(module, "_hf_hook", None)
        away = [one for one in getattr(hook, "hooks", [hook]) if getattr(one, "offload", False)]
        if not away:
            continue
        inside = any(getattr(one, "place_submodules", False) for one in away)
        own = module.named_parameters(recurse=inside, remove_duplicate=False)
        found.update(full_name(path, name) for name, x in own if x.is_meta)
    return frozenset(found)


def refuse_offloaded(names: Iterable[str], away: Collection[str]) -> None:
    """ValueError for parameters among those that are `offloaded`."""
    if found := [name for name in names if name in away]:
        raise ValueError(
            f"{shorten(found)}: offloaded by accelerate, on the meta device there are no values; quantize_ changed nothing. "
            f"Quantize first, then offload; or call accelerate.hooks.remove_hook_from_module(model, recurse=True) before"
        )


def is_linear(module: nn.Module) -> bool:
    """nn.Linear and transformers' Conv1D; not the output of nn.MultiheadAttention, whose fast path reads its weight as plain
    memory."""
    inside = isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
    return (isinstance(module, nn.Linear) and not inside) or is_transposed(module)


def never_called(model: nn.Module) -> dict[int, str]:
    """The encoder layer's name by the id of each layer in it whose weight torch's fast path reads in eval mode without calling
    the layer, so that what it does with its weight is passed over. Nothing where the fast path is switched off."""
    if not torch.backends.mha.get_fastpath_enabled():
        return {}
    return {
        id(layer): name or "the model"
        for name, module in model.named_modules()
        if isinstance(module, nn.TransformerEncoderLayer) and module.self_attn.batch_first
        for layer in (module.linear1, module.linear2)
    }


def shorten(names: Sequence[str], most: int = 5) -> str:
    """Names in a row, and how many more there are than `most`; a model that is one layer has no name."""
    shown = ", ".join(name or "the model itself" for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def rounded_buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Buffers of transformers' modules that no file holds and that a cast of the model has rounded, with their own values.

    `model.to(torch.bfloat16)` rounds frequencies of rotary embeddings too, which every loader computes anew in float32. A new
    module of the class has them, where all that its constructor takes is an attribute of the module; what differs from the cast
    of those (frequencies that grew with the inputs) is left out.
    """
    for module in model.modules():
        names = [
            name
            for name in sorted(module._non_persistent_buffers_set)
            if getattr(module._buffers.get(name), "dtype", None) in (torch.bfloat16, torch.float16)
        ]
        fresh = _made_anew(module, module.get_buffer(names[0]).dtype) if names else None
        for name in names if fresh is not None else ():
            held, own = module.get_buffer(name), fresh._buffers.get(name) if fresh is not None else None
            if own is None or own.dtype == held.dtype or own.shape != held.shape or held.is_meta:
                continue
            own = own.to(held.device)
            if torch.equal(own.to(held.dtype), held):
                yield module, name, own


def _made_anew(module: nn.Module, dtype: torch.dtype) -> nn.Module | None:
    """Another module of a class of transformers, by attributes called as the constructor's arguments; None where that fails.

    dtype: that of the model, which is torch's default while loaders construct it: tables without a dtype of their own have it.
    """
    kind = type(module)
    if not kind.__module__.startswith("transformers.") or next(module.parameters(), None) is not None:
        return None
    needed = [
        name
        for name, one in inspect.signature(kind).parameters.items()
        if one.default is one.empty and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    ]
    if not all(hasattr(module, name) for name in needed):
        return None
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        return kind(**{name: getattr(module, name) for name in needed})
    except (TypeError, ValueError, AttributeError, KeyError, RuntimeError):
        return None
    finally:
        torch.set_default_dtype(before)


#: `quantize_` leaves routers, and layers that are tied to an embedding, dense under a filter that has these attributes, and
#: without a filter.
linear_and_experts.leaves_routers = linear_and_experts.leaves_tied = True  # type: ignore[attr-defined]

__all__ = ["linear_and_experts"]
