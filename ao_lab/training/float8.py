"""torchao's call for FP8 training: `convert_to_float8_training` with `Float8LinearConfig`, names and defaults as there.

Scales and codes are those of ao_lab's schemes: a scale is amax / 448, or the next power of two above, so that nothing
saturates and finite gradients stay finite; see `reference.training.recipe`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import nn

from ao_lab.training.api import convert_for_training_
from reference import SCHEMES
from reference.arrays.namespace import and_nearest
from reference.training.recipe import RECIPES, Operand, Product, Recipe, power_of_two

#: Suffix of a scheme for each dtype.
SUFFIXES = {torch.float8_e4m3fn: "", torch.float8_e5m2: "_e5m2"}


class ScalingType(Enum):
    """Whether a tensor is cast: with a scale from its own values, or not at all."""

    DYNAMIC = "dynamic"
    DISABLED = "disabled"


class ScalingGranularity(Enum):
    """One scale for the tensor, or one for each row along the sum."""

    TENSORWISE = "tensorwise"
    AXISWISE = "axiswise"


class Float8LinearRecipeName(Enum):
    """torchao's recipes by name."""

    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    ROWWISE_WITH_GW_HP = "rowwise_with_gw_hp"


@dataclass(frozen=True)
class CastConfig:
    """How one tensor is cast. target_dtype: None is e4m3 for inputs and weights, e5m2 for the output's gradient."""

    scaling_type: ScalingType = ScalingType.DYNAMIC
    scaling_granularity: ScalingGranularity = ScalingGranularity.TENSORWISE
    target_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.target_dtype is not None and self.target_dtype not in SUFFIXES:
            raise ValueError(
                f"target_dtype is one of {', '.join(map(str, SUFFIXES))}, got {self.target_dtype}"
            )

    def operand(self, dtype: torch.dtype, pow2: bool) -> Operand:
        """The operand. dtype: where there is no target_dtype."""
        if self.scaling_type is ScalingType.DISABLED:
            return Operand()
        kind = "rowwise" if self.scaling_granularity is ScalingGranularity.AXISWISE else "tensorwise"
        scheme = SCHEMES[f"fp8_{kind}{SUFFIXES[self.target_dtype or dtype]}"]
        return Operand(scheme=power_of_two(scheme) if pow2 else scheme)


@dataclass(frozen=True)
class Float8GemmConfig:
    """How a matmul accumulates: fast uses the accumulator of the tensor core alone."""

    use_fast_accum: bool = False


@dataclass(frozen=True)
class Float8LinearConfig:
    """As torchao's class of this name: the cast of each operand and the accumulation of each matmul.

    A cast for a gradient matmul that is None is that of the output's matmul. pad_inner_dim: dimensions that are no
    multiple of 16 are padded with zeros; otherwise such layers are left as they are. emulate: matmuls in float32.
    enable_fsdp_float8_all_gather: FSDP2 gathers quantized weights; `precompute_float8_dynamic_scale_for_fsdp` after each step
    finds the scales of all of them at once. Rowwise scaling has it too where scales are powers of two.
    """

    cast_config_input: CastConfig = CastConfig()
    cast_config_input_for_grad_weight: CastConfig | None = None
    cast_config_weight: CastConfig = CastConfig()
    cast_config_weight_for_grad_input: CastConfig | None = None
    cast_config_grad_output: CastConfig = CastConfig()
    cast_config_grad_output_for_grad_weight: CastConfig | None = None
    gemm_config_output: Float8GemmConfig = Float8GemmConfig(use_fast_accum=True)
    gemm_config_grad_input: Float8GemmConfig = Float8GemmConfig()
    gemm_config_grad_weight: Float8GemmConfig = Float8GemmConfig()
    enable_fsdp_float8_all_gather: bool = False
    pad_inner_dim: bool = False
    emulate: bool = False
    force_recompute_fp8_weight_in_bwd: bool = False
    round_scales_to_power_of_2: bool = False

    def __post_init__(self) -> None:
        products = {"output": self._output, "grad_input": self._grad_input, "grad_weight": self._grad_weight}
        for product, (a, b) in products.items():
            if (a.scaling_type is ScalingType.DISABLED) != (b.scaling_type is ScalingType.DISABLED):
                raise ValueError(
                    f"both operands of {product} are cast or neither; got {a.scaling_type.value} and {b.scaling_type.value}"
                )

    @property
    def _output(self) -> tuple[CastConfig, CastConfig]:
        return self.cast_config_input, self.cast_config_weight

    @property
    def _grad_input(self) -> tuple[CastConfig, CastConfig]:
        return self.cast_config_grad_output, self.cast_config_weight_for_grad_input or self.cast_config_weight

    @property
    def _grad_weight(self) -> tuple[CastConfig, CastConfig]:
        g = self.cast_config_grad_output_for_grad_weight or self.cast_config_grad_output
        return g, self.cast_config_input_for_grad_weight or self.cast_config_input

    @staticmethod
    def from_recipe_name(recipe_name: Float8LinearRecipeName | str) -> Float8LinearConfig:
        """torchao's configuration of a recipe; ValueError for an unknown name, with the known ones."""
        known = [one.value for one in Float8LinearRecipeName]
        name = recipe_name.value if isinstance(recipe_name, Float8LinearRecipeName) else recipe_name
        if name not in known:
            raise ValueError(
                f"recipe_name is one of {', '.join(known)}, got {recipe_name!r}{and_nearest(recipe_name, known)}"
            )
        if name == "tensorwise":
            return Float8LinearConfig()
        e4m3, off = torch.float8_e4m3fn, CastConfig(ScalingType.DISABLED)
        row = CastConfig(ScalingType.DYNAMIC, ScalingGranularity.AXISWISE, e4m3)
        both = Float8LinearConfig(
            cast_config_input=row, cast_config_weight=row, cast_config_grad_output=row, round_scales_to_power_of_2=True
        )  # fmt: skip
        if name == "rowwise":
            return both
        return replace(
            both,
            cast_config_input_for_grad_weight=off,
            cast_config_weight_for_grad_input=CastConfig(target_dtype=e4m3),
            cast_config_grad_output_for_grad_weight=off,
        )

    def recipe(self) -> Recipe:
        """The recipe: one of `RECIPES` where it is the same but for its name."""
        e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
        products = []
        for casts, dtypes, sums in (
            (self._output, (e4m3, e4m3), self.gemm_config_output),
            (self._grad_input, (e5m2, e4m3), self.gemm_config_grad_input),
            (self._grad_weight, (e5m2, e4m3), self.gemm_config_grad_weight),
        ):
            a, b = (
                cast.operand(dtype, self.round_scales_to_power_of_2)
                for cast, dtype in zip(casts, dtypes, strict=True)
            )
            products.append(Product(a=a, b=b, accumulation="fast" if sums.use_fast_accum else "precise"))
        output, grad, weight = products
        made = Recipe(name="float8", output=output, input_grad=grad, weight_grad=weight)
        known = (one for one in RECIPES.values() if replace(one, name="float8", note="") == made)
        return next(known, made)


def convert_to_float8_training(
    module: nn.Module,
    *,
    config: Float8LinearConfig | None = None,
    module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> nn.Module:
    """Let the linear layers of `module` train in FP8, in place, as torchao's function of this name; returns the module.

    config: None is tensorwise scaling. module_filter_fn(module, name): selects layers. Unlike in torchao, modules, their
    parameters and hooks stay the same objects, and layers that FP8 does not support are left. Errors as in
    `convert_for_training_`, which returns a report.
    """
    config = Float8LinearConfig() if config is None else config
    if not isinstance(config, Float8LinearConfig):
        raise TypeError(
            f"config is a Float8LinearConfig, got {type(config).__name__}; or use convert_for_training_ for others"
        )
    convert_for_training_(
        module,
        config.recipe(),
        module_filter_fn,
        pad=config.pad_inner_dim,
        kernel="emulate" if config.emulate else "auto",
        fsdp_float8_all_gather=config.enable_fsdp_float8_all_gather,
        experts=False,
    )
    return module


__all__ = [
    "CastConfig",
    "Float8GemmConfig",
    "Float8LinearConfig",
    "Float8LinearRecipeName",
    "ScalingGranularity",
    "ScalingType",
    "convert_to_float8_training",
]
