"""Mods: reusable changes of a model that make low precision stable or quick, a record each (LoKA, arXiv 2605.10886).

A record says what it matches, whether the model computes the same function afterwards, and what it costs. `exact` mods may be
applied to a trained model; the others change it, so that it has to be trained with them. What the paper's mods do exactly is
not public: names and blocks of `no_bias`, `block_norm` and `hard_swish` are a reconstruction from notes on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ao_lab.config.base import SchemeConfig
from ao_lab.mods.modules import BLOCK, BlockNorm, HardSwish, JoinedLinear, PaddedLinear, Siblings
from ao_lab.quantization.api import quantize_
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from ao_lab.training.fused_modules import (
    FusedRMSNorm,
    fuse_layers_,
    is_norm_like,
    norm_reason,
    unfuse_layers_,
)
from ao_lab.transforms.layers import TABLES

#: Where a changed module keeps what it was, in a tuple that torch does not look into.
REPLACED = "ao_lab_replaced"
#: Of layers that stay in 16 bits.
MARK = "ao_lab_16_bits"
#: The shortest sum that is worth 8 bits, and the scheme of tables.
SHORTEST, TABLE_SCHEME = 512, "int8_rowwise"


@dataclass(frozen=True)
class Place:
    """A module of a model: its name, itself, and what is known of the model."""

    model: nn.Module
    name: str
    module: nn.Module
    #: Names of the first and the last linear layer, in the order of modules.
    ends: tuple[str, str]
    #: Names of layers with the same input, by name, where an example ran.
    siblings: Mapping[str, tuple[str, ...]] | None = None

    def put(self, module: nn.Module) -> None:
        """Another module in its place, under all names that the model has for it."""
        for name, one in list(self.model.named_modules(remove_duplicate=False)):
            if one is self.module:
                path, _, leaf = name.rpartition(".")
                setattr(self.model.get_submodule(path), leaf, module)


@dataclass(frozen=True)
class Mod:
    """name; exact: whether the function stays (but for the order of sums); about, cost: for people; source: where it is from.

    matches(module): whether it is of the kind. reason(place): why one stays; None where it is changed. apply(place) changes it,
    restore(place) puts back what it was, is_applied(module) tells one.
    """

    name: str
    exact: bool
    about: str
    cost: str
    matches: Callable[[nn.Module], bool]
    apply: Callable[[Place], None]
    restore: Callable[[Place], None]
    is_applied: Callable[[nn.Module], bool]
    reason: Callable[[Place], str | None] = field(default=lambda place: None)
    source: str = "LoKA, by notes on it"


MODS: dict[str, Mod] = {}


def register(mod: Mod) -> Mod:
    """Make a mod known by its name; ValueError for a second one of a name."""
    if MODS.setdefault(mod.name, mod) is not mod:
        raise ValueError(f"a mod is called {mod.name!r} already; give yours another name")
    return mod


def kept(module: nn.Module) -> Any:
    """What a module was or had before; None where nothing is kept."""
    return next(iter(module.__dict__.get(REPLACED, ())), None)


def replace(place: Place, module: nn.Module) -> None:
    """Another module in a place, which keeps the one that was there."""
    module.__dict__[REPLACED] = (place.module,)
    module.train(place.module.training)
    place.put(module)


def put_back(place: Place) -> None:
    """What `replace` has put away, where its successor is now."""
    parameter = next(place.module.parameters(), None)
    before = kept(place.module)
    place.put(before if parameter is None else before.to(parameter.device))


def is_linear(module: nn.Module) -> bool:
    """Whether a module is an nn.Linear, changed or not, whose weight is dense."""
    kinds = (nn.Linear, PaddedLinear, JoinedLinear)
    return type(module) in kinds and not isinstance(module.weight, QuantizedTensor)


# No bias


def _drop_bias(place: Place) -> None:
    place.module.__dict__[REPLACED] = (place.module._parameters["bias"],)
    place.module._parameters["bias"] = None


def _give_bias(place: Place) -> None:
    bias, weight = place.module.__dict__.pop(REPLACED)[0], place.module.get_parameter("weight")
    place.module._parameters["bias"] = nn.Parameter(bias.detach().to(weight), bias.requires_grad)


NO_BIAS = register(
    Mod(
        "no_bias", False, "linear layers without a bias: one vector less to read and to add in the epilogue",
        "the model has to be trained so; the last layer keeps its bias, which holds the share of ones",
        lambda m: is_linear(m) and m._parameters["bias"] is not None,
        _drop_bias, _give_bias, lambda m: is_linear(m) and isinstance(kept(m), nn.Parameter),
        lambda place: "the last layer's bias sets the mean prediction" if place.name == place.ends[1] else None,
    )
)  # fmt: skip

# Block norm


def _to_block_norm(place: Place) -> None:
    norm: Any = place.module
    (width,) = norm.normalized_shape
    weight = norm.weight
    made = BlockNorm(width, BLOCK, norm.eps or 1e-6, elementwise_affine=weight is not None)
    if weight is not None:
        made.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
    replace(place, made)


def _norm_reason(place: Place) -> str | None:
    shape: Any = getattr(place.module, "normalized_shape", ())
    if len(shape) != 1 or shape[0] % BLOCK:
        return f"it normalises {tuple(shape)}, no whole blocks of {BLOCK} columns"
    return None


BLOCK_NORM = register(
    Mod(
        "block_norm", False, f"norms as a root mean square over {BLOCK} columns: a tile of the GEMM holds a block",
        "the model has to be trained so", lambda m: type(m) in (nn.LayerNorm, nn.RMSNorm),
        _to_block_norm, put_back, lambda m: isinstance(m, BlockNorm) and kept(m) is not None, _norm_reason,
    )
)  # fmt: skip

HARD_SWISH = register(
    Mod(
        "hard_swish", False, "SiLU as x * relu6(x + 3) / 6: no exponential in the epilogue", "the model has to be trained so",
        lambda m: type(m) is nn.SiLU, lambda place: replace(place, HardSwish()), put_back,
        lambda m: isinstance(m, HardSwish) and kept(m) is not None,
    )
)  # fmt: skip

# Padding


def _pad(place: Place) -> None:
    place.module.__class__ = PaddedLinear


def _plain(place: Place) -> None:
    place.module.__class__ = nn.Linear
    place.module.__dict__.pop("siblings", None)


def _pad_reason(place: Place) -> str | None:
    module: Any = place.module
    if type(module) is not nn.Linear:
        return "it has been changed by another mod"
    step = PaddedLinear.STEP
    whole = not (module.in_features % step or module.out_features % step)
    return f"its lengths are multiples of {step}" if whole else None


PAD = register(
    Mod(
        "pad", True, "lengths of linear layers filled by zeros up to multiples of 16", "zeros are multiplied, 15 a length; "
        "recipes of training pad by themselves (pad=True)", is_linear, _pad, _plain,
        lambda m: isinstance(m, PaddedLinear), _pad_reason, "cuBLAS: lengths of aligned GEMMs",
    )
)  # fmt: skip

# Siblings


def _join(place: Place) -> None:
    names = (place.siblings or {})[place.name]
    members: list[Any] = [place.model.get_submodule(name) for name in names]
    joined = Siblings(members)
    for one in members:
        one.__class__ = JoinedLinear
        one.__dict__["siblings"] = joined


def _join_reason(place: Place) -> str | None:
    if place.siblings is None:
        return "no example ran: give apply_mods_ example=, which shows which layers have one input"
    if isinstance(place.module, JoinedLinear):
        return None
    if type(place.module) is not nn.Linear:
        return "it has been changed by another mod"
    return None if place.name in place.siblings else "no other layer has its input"


JOIN = register(
    Mod(
        "join_siblings", True, "linear layers of one input as one GEMM (query, key and value; heads of tasks)",
        "in eager mode; weights are put side by side in each call; outputs of siblings have one backward", is_linear,
        lambda place: None if isinstance(place.module, JoinedLinear) else _join(place), _plain,
        lambda m: isinstance(m, JoinedLinear), _join_reason, "open HSTU code: one GEMM for u, v, q, k",
    )
)  # fmt: skip

# Norms in one kernel


def _fuse(place: Place) -> None:
    fuse_layers_(place.module, ("norm",))


def _unfuse(place: Place) -> None:
    unfuse_layers_(place.module)


def _fuse_reason(place: Place) -> str | None:
    if isinstance(place.module, FusedRMSNorm):
        return "it is fused already"
    if isinstance(place.module, nn.LayerNorm):
        return "torch's LayerNorm is one kernel each way; fast.layer_norm_quantize writes its codes, without a gradient"
    return norm_reason(place.module)


FUSED_NORM = register(
    Mod(
        "fused_norm", True, "RMSNorm as one kernel each way; codes of a norm, without a gradient: `fast.rms_norm_quantize`",
        "none; the last bit may differ where a module rounds before the weight",
        lambda m: is_norm_like(m) or isinstance(m, (FusedRMSNorm, nn.LayerNorm)), _fuse, _unfuse,
        lambda m: isinstance(m, FusedRMSNorm), _fuse_reason, "open HSTU code: the norm writes bfloat16 and FP8 codes",
    )
)  # fmt: skip

# What stays in 16 bits


def marks(module: nn.Module) -> frozenset[str]:
    """Names of mods that have marked a module to stay in 16 bits."""
    return frozenset(module.__dict__.get(MARK, ()))


def _marks(name: str, about: str, reason: Callable[[Place], str | None]) -> Mod:
    def mark(place: Place) -> None:
        place.module.__dict__[MARK] = marks(place.module) | {name}

    def unmark(place: Place) -> None:
        place.module.__dict__[MARK] = marks(place.module) - {name}

    return register(
        Mod(
            name, True, about, "their GEMMs stay as they are; in_low_precision is the filter of the others", is_linear, mark,
            unmark, lambda m: name in marks(m), reason, "torchao: filters of float8 training",
        )
    )  # fmt: skip


ENDS_16_BITS = _marks(
    "ends_in_16_bits", "the first and the last linear layer stay in 16 bits",
    lambda place: None if place.name in place.ends else "it is neither the first nor the last linear layer",
)  # fmt: skip
SMALL_16_BITS = _marks(
    "small_in_16_bits", f"linear layers that have fewer than {SHORTEST} inputs stay in 16 bits",
    lambda place: None if place.module.in_features < SHORTEST else f"it has {place.module.in_features} inputs",  # type: ignore[operator]
)  # fmt: skip


def in_low_precision(module: nn.Module, name: str) -> bool:
    """A filter: linear layers that no mod has marked to stay in 16 bits."""
    return is_linear(module) and not marks(module)


# Tables


def _quantize_table(place: Place) -> None:
    quantize_(place.module, SchemeConfig(scheme=TABLE_SCHEME), lambda module, name: module is place.module)


def _dequantize_table(place: Place) -> None:
    weight: Any = place.module._parameters["weight"]
    place.module._parameters["weight"] = nn.Parameter(weight.dequantize())


def _is_stored(module: nn.Module) -> bool:
    return isinstance(module, TABLES) and isinstance(module.weight, QuantizedTensor)


def _table_reason(place: Place) -> str | None:
    module: Any = place.module
    if module.max_norm is not None:
        return f"max_norm={module.max_norm} changes rows of the table in every forward pass"
    return None


TABLES_8_BITS = register(
    Mod(
        "tables_in_8_bits", False, f"embedding tables as {TABLE_SCHEME}: half the bytes of bfloat16 and a scale a row",
        "values are rounded, and undoing leaves them so; tables do not train", lambda m: isinstance(m, TABLES), _quantize_table,
        _dequantize_table, _is_stored, _table_reason, "arXiv 2010.11305",
    )
)  # fmt: skip


def example_siblings(model: nn.Module, example: Any) -> dict[str, tuple[str, ...]]:
    """Names of linear layers that had one input in a run of the model, by each of their names."""
    seen: dict[Any, list[str]] = {}
    held: list[torch.Tensor] = []
    handles = []

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else kwargs["input"]
            held.append(x)  # so that no other input gets its memory
            seen.setdefault((x.data_ptr(), x.shape, x.stride(), x.dtype, x._version), []).append(name)

        return hook

    for name, module in model.named_modules():
        if is_linear(module):
            handles.append(module.register_forward_pre_hook(watch(name), with_kwargs=True))
    try:
        with torch.no_grad():
            model(*example) if isinstance(example, tuple) else model(example)
    finally:
        for handle in handles:
            handle.remove()
    groups = [tuple(dict.fromkeys(names)) for names in seen.values()]
    return {name: group for group in groups if len(group) > 1 for name in group}


__all__ = ["MODS", "Mod", "Place", "example_siblings", "in_low_precision", "register"]
