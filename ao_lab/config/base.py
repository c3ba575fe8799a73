"""Configurations of `ao_lab.quantize_`: torchao's names and parameters, each a recipe.

A configuration is data. `recipe()` is all that `quantize_` asks of it: the scheme of the weight, the scheme of the input (or
None) and the kernel; `SchemeConfig` names any two schemes directly, and every other class is a name for some of them. A user
of torchao changes the import.

The bits are those of the default schemes (`reference.schemes.schemes`): correctly rounded scales, no clipping of the largest
value, and finite input never becomes NaN. Torchao's own bits are records too: `ao_lab.as_torchao(config)` is the configuration
in them. Or give one as `scheme=`, for instance `Int8WeightOnlyConfig(scheme="torchao.int8_rowwise")`, and
`activation_scheme=` for the input; `reference.schemes.conventions` says which record is which class's.

Five keyword parameters are in every class: `scheme`, `activation_scheme` (names or records that replace the class's own),
`kernel` ("auto", or one of `ao_lab.config.recipe.KERNELS`, or of its `SPARSE_KERNELS` beside `sparsity`), and `axis`, along
which blocks run: by default (None) the contraction axis of each weight (-1 for nn.Linear; for batched experts found from the
module, -2 where they are stored as (experts, in, out)), and `sparsity`: "2:4" stores weights that are 2:4 already, as
`ao_lab.sparsify_` makes them, as their kept
codes and the places of these (`ao_lab.tensor.sparse`); what torchao asked for by a layout. `set_inductor_config` and `version`
are accepted and mean nothing: no global setting is touched, and there is one version. Parameters that choose a memory layout of
torchao's kernels, or an algorithm that is not here, raise ValueError unless they ask for what is done anyway.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from ao_lab.config.recipe import Recipe, check_sparsity, named, recipe_of
from reference import SCHEMES, Scales, Scheme
from reference.arrays.namespace import check_keywords, lookup

if TYPE_CHECKING:
    import torch
    from torch import nn


#: Every configuration that files and the command line may name, by its class's name.
CONFIGS: dict[str, type[Config]] = {}


@dataclass(frozen=True)
class Config:
    """What all configurations have. A class says what its schemes are in `_weight` and `_activation`.

    A subclass is registered under its name (`CONFIGS`) when it is defined: files and `ao-lab quantize` know it from then on.
    `class Base(Config, registered=False)` is for classes that are no configuration of quantized weights themselves. The first
    class of a name keeps it.
    """

    scheme: str | Scheme | None = field(default=None, kw_only=True)
    activation_scheme: str | Scheme | None = field(default=None, kw_only=True)
    kernel: str = field(default="auto", kw_only=True)
    axis: int | None = field(default=None, kw_only=True)
    sparsity: str | None = field(default=None, kw_only=True)

    #: The parameters that name the schemes of weight and input.
    SCHEME_FIELDS: ClassVar[tuple[str, str]] = ("scheme", "activation_scheme")
    #: Parameters that may only have these values.
    ONLY: ClassVar[dict[str, tuple[Any, ...]]] = {}

    def __init_subclass__(cls, *, registered: bool = True, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # In place of the one that the decorator of a subclass makes.
        cls.__repr__ = cls.__dict__.get("__repr__", Config.__repr__)  # type: ignore[method-assign]
        if registered:
            CONFIGS.setdefault(cls.__name__, cls)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """TypeError for parameters that a configuration lacks, with the nearest."""
        own = sorted((f for f in fields(cls) if f.init), key=lambda f: f.kw_only is True)
        check_keywords(cls.__name__, kwargs, [f.name for f in own])
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, values in self.ONLY.items():
            given = getattr(self, name)
            if getattr(given, "value", given) not in values:
                raise ValueError(
                    f"{type(self).__name__}: {name} is {' or '.join(map(repr, values))}; got {given!r}"
                )
        if self.axis is not None and type(self.axis) is not int:
            raise TypeError(f"{type(self).__name__}: axis is an integer or None, got {self.axis!r}")
        check_group_size(type(self).__name__, getattr(self, "group_size", None))
        check_sparsity(type(self).__name__, self.sparsity, self.recipe())

    def recipe(self) -> Recipe:
        """How layers of this configuration run; ValueError where the parameters name no scheme. Computed once."""
        known: Recipe | None = self.__dict__.get("_recipe")
        if known is None:
            weight = named(self.scheme) or self._weight()
            activation = named(self.activation_scheme) or self._activation()
            known = self.__dict__["_recipe"] = recipe_of(
                weight=weight, activation=activation, kernel=self.kernel
            )
        return known

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone, for pickles and copies."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __repr__(self) -> str:
        """The parameters that are not the defaults, schemes by their names; without those that a given scheme replaces."""
        own = [f for f in fields(self) if f.init and f.name not in self._common()]
        every = [*own, *(f for f in fields(self) if f.name in self._common())]
        given = {f.name: getattr(self, f.name) for f in every if not _is_default(self, f)}
        for f in own:
            if f.name in given and self._is_replaced(f):
                del given[f.name]
        return f"{type(self).__name__}({', '.join(f'{name}={shown_value(value)}' for name, value in given.items())})"

    @classmethod
    def _common(cls) -> tuple[str, ...]:
        """The parameters that every class has."""
        return tuple(f.name for f in fields(Config))

    def _is_replaced(self, parameter: Any) -> bool:
        """Whether a parameter chooses schemes, and no longer does because schemes are given."""
        schemes: dict[str, Any] = dict.fromkeys(self.SCHEME_FIELDS)
        default: dict[str, Any] = {parameter.name: parameter.default}
        try:
            without = replace(self, **schemes)
            chooses = replace(without, **default).recipe() != without.recipe()
            return chooses and replace(self, **default).recipe() == self.recipe()
        except (ValueError, TypeError):
            return False

    @property
    def quant_method(self) -> str:
        """What transformers asks of a `quantization_config`: AttributeError, since one is made by `ao_lab.HfConfig`."""
        raise AttributeError(
            f"{type(self).__name__} is no quantization_config of transformers; pass quantization_config=ao_lab.HfConfig(config)"
        )

    @property
    def changes(self) -> tuple[str, ...]:
        """What `for_layout` has changed in the configuration, and why, a sentence each; () where it has not."""
        told: tuple[str, ...] = self.__dict__.get("_changes", ())
        return told

    def _with_changes(self, told: tuple[str, ...]) -> Self:
        """This configuration, just made, with what `changes` tells of it."""
        if told:
            self.__dict__["_changes"] = told
        return self

    def with_recipe(self, recipe: Recipe) -> Self:
        """This configuration with the schemes and the kernel of another recipe; itself where these are its own."""
        own, (weight, activation) = self.recipe(), self.SCHEME_FIELDS
        changed: dict[str, Any] = {
            name: new
            for name, old, new in (
                (weight, own.weight, recipe.weight),
                (activation, own.activation, recipe.activation),
                ("kernel", own.kernel, recipe.kernel),
            )
            if new != old
        }
        return replace(self, **changed) if changed else self

    def for_layout(self, layout: str) -> Self:
        """This configuration for a layout of `save_pretrained`, so that plain readers of it compute what the model here does.

        "compressed-tensors": integers without zero points, scales of weights in the weight's dtype, inputs by the readers' own
        records (`compressed_tensors.*`); `ao_lab.config.compressed_tensors` has the rules. "ao_lab": unchanged. The result's
        `changes` says what was changed, and why.
        ValueError, with the reason, where the layout has nothing like this configuration (nf4, float8_e5m2, inputs in
        nvfp4 and others).
        """
        from ao_lab.config.compressed_tensors import changes, recipe_for_layout

        adapted = recipe_for_layout(self.recipe(), layout)
        result = self.with_recipe(adapted)
        return result if result is self else result._with_changes(tuple(changes(self.recipe(), adapted)))

    def input_scales(self) -> Scales | None:
        """Static scales of the input that are given; None where there are none."""
        return None

    def observer(self) -> Observer | None:
        """A new observer that has to see a layer's inputs before its weight is quantized; None where nothing has to."""
        return None

    def unsupported_reason(self, module: nn.Module) -> str | None:
        """Why this configuration does not apply to a module, whatever its weight; None where it does."""
        return None

    @property
    def prepares(self) -> bool:
        """Whether this is torchao's step "prepare": layers are watched, nothing is quantized yet."""
        return getattr(self, "step", None) == "prepare"

    def _weight(self) -> Scheme:
        raise ValueError(f"{type(self).__name__} names no scheme; give scheme=")

    def _activation(self) -> Scheme | None:
        return None


@dataclass(frozen=True)
class SchemeConfig(Config):
    """Any scheme for weights, any or none for activations: `SchemeConfig(scheme="mxfp4", activation_scheme="mxfp8_e4m3")`."""


#: What is for all other layers, and how a regular expression begins.
DEFAULT, PATTERN = "_default", "re:"


@dataclass(frozen=True)
class FqnToConfig:
    """Configurations by the full name of a parameter or module; None leaves it as it is.

    An exact name of a parameter comes first, then an exact name of a module, then "re:" and a regular expression that
    matches the whole name of a parameter, or else of a module (the first in the order given), then "_default", which is for
    nn.Linear (but a head that is tied to the embedding). Each name and pattern must match something.
    """

    fqn_to_config: Mapping[str, Config | None] = field(default_factory=dict)
    version: int = 1

    def __post_init__(self) -> None:
        for name, config in self.fqn_to_config.items():
            if config is not None and not isinstance(config, Config):
                raise TypeError(f"FqnToConfig: {name!r} is a configuration or None, got {kind_of(config)}")
            if name.startswith(PATTERN):
                compiled_pattern(name)

    def for_layout(self, layout: str) -> FqnToConfig:
        """Each of the configurations for a layout, see `Config.for_layout`."""
        result = {}
        for name, one in self.fqn_to_config.items():
            try:
                result[name] = None if one is None else one.for_layout(layout)
            except ValueError as error:
                raise ValueError(f"FqnToConfig {name!r}: {error}") from error
        return replace(self, fqn_to_config=result)

    @property
    def changes(self) -> tuple[str, ...]:
        """What `for_layout` has changed, see `Config.changes`, each after the name of its layers."""
        named = [(name, one.changes) for name, one in self.fqn_to_config.items() if one is not None]
        return tuple(f"{name}: {told}" for name, changes in named for told in changes)


def config_named(name: str) -> Any:
    """The configuration of a class's name with its defaults, or that of a scheme's; ValueError with the nearest names."""
    if name in CONFIGS:
        return CONFIGS[name]()
    try:
        return SchemeConfig(scheme=named(name))
    except ValueError:
        both: dict[str, Any] = {**CONFIGS, **SCHEMES}
        return lookup(name, both, "configuration or scheme")


def _is_default(config: Config, parameter: Any) -> bool:
    """Whether a parameter of a configuration has its default; tensors never are."""
    value, default = getattr(config, parameter.name), parameter.default
    return value is default or (type(value) is type(default) and bool(value == default))


def shown_value(value: Any) -> str:
    """A parameter as it is typed: a record of a scheme by its name, where that names it."""
    if not isinstance(value, Scheme):
        return repr(value)
    try:
        return repr(value.name) if named(value.name) == value else repr(value)
    except ValueError:
        return repr(value)


def compiled_pattern(name: str) -> re.Pattern[str]:
    """The regular expression of a name that begins with "re:"; ValueError where it is none."""
    try:
        return re.compile(name.removeprefix(PATTERN))
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{name!r} is no regular expression: {error}") from error


class Observer(Protocol):
    """What a configuration may ask for before a weight is quantized: it observes the inputs of the weight's layers."""

    def observe(self, name: str, module: nn.Module, x: torch.Tensor) -> None:
        """Take in the input of a layer, as its product sees it; `name` is the weight's full name."""

    def unsupported_reason(self) -> str | None:
        """Why no weight can be quantized yet; None where one can."""

    def weight(self, dense: torch.Tensor, recipe: Recipe, axis: int) -> torch.Tensor:
        """The quantized weight (a `QuantizedTensor`) of a dense one (out, in)."""


def dtype_name(dtype: Any) -> str:
    """A torch dtype's name; torchao's "fp6_e2m3" and torch's float4 pairs by the names of `reference.FORMATS`."""
    name = str(dtype).removeprefix("torch.")
    return {
        "fp6_e2m3": "float6_e2m3fn",
        "fp6_e3m2": "float6_e3m2fn",
        "fp4_e2m1": "float4_e2m1fn",
        "float4_e2m1fn_x2": "float4_e2m1fn",
    }.get(name, name)


def operands(granularity: Any) -> tuple[Any, Any]:
    """The granularities of input and weight: a pair, or one for both."""
    if isinstance(granularity, (list, tuple)):
        if len(granularity) != 2:
            raise ValueError(f"granularity is one, or a pair for input and weight; got {len(granularity)}")
        return granularity[0], granularity[1]
    return granularity, granularity


def static_scales(scale: Any, zero: Any = None) -> Scales:
    """One scale for every input, and a zero point, as `reference` stores them; ValueError where there are more."""
    import torch

    parts = []
    for value, dtype, name in (
        (scale, torch.float32, "act_quant_scale"),
        (zero, torch.int8, "act_quant_zero_point"),
    ):
        part = None if value is None else torch.as_tensor(value).detach().to(dtype, copy=True)
        if part is not None and part.numel() != 1:
            raise ValueError(
                f"{name} is one number for all inputs, got shape {tuple(part.shape)}; use PerTensor"
            )
        if (
            part is not None
            and dtype.is_floating_point
            and not part.is_meta
            and not 0 < float(part) < torch.inf
        ):
            raise ValueError(f"{name} is a positive finite float32, got {value}")
        parts.append(None if part is None else part.reshape(()))
    return Scales(parts[0], None, parts[1])


def check_group_size(name: str, given: Any) -> None:
    """TypeError or ValueError for a `group_size` that is no length of groups."""
    if given is None:
        return
    rule = (
        f"{name}: group_size is 1 or more weights that share a scale, or -1 for one scale per output channel"
    )
    if isinstance(given, bool) or not hasattr(given, "__index__"):
        raise TypeError(f"{rule}; got {given!r}")
    if given < 1 and given != -1:
        raise ValueError(f"{rule}; got {given!r}")


def kind_of(given: object) -> str:
    """What was given in place of a configuration, for a message: its class, or a class that was not called."""
    if isinstance(given, type):
        return f"the class {given.__name__}; call it: {given.__name__}()"
    kind = type(given)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


__all__ = [
    "CONFIGS", "DEFAULT", "PATTERN", "Config", "FqnToConfig", "Observer", "SchemeConfig", "compiled_pattern", "config_named",
    "dtype_name", "kind_of", "operands", "static_scales",
]  # fmt: skip
