"""Configurations with one scale for all inputs of a layer, given or found by calibration; see `ao_lab.config.base`.

Without act_quant_scale the scale of each layer comes from its inputs: `quantize_(..., forward_loop=...)`, or torchao's
step="prepare", data, step="convert" (`ao_lab.transforms.data`). `statistic` says what is kept of the inputs: "minmax"
(exact, as if all were one tensor), "absmax", "moving_average", "percentile", or a function that makes an
`ao_lab.calibration.statistics.Statistic`.

An observer belongs to one weight: it sees the inputs of the layers that have it, and quantizes the weight at the end.
`ao_lab.calibration.statistics.InputScales` is the one for static scales; methods that choose codes from data (GPTQ, AWQ) are
others, which a configuration names in `Config.observer`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from ao_lab.config.base import Config, Observer, operands, static_scales
from ao_lab.config.classes import NO_LAYOUT, float8_scheme
from ao_lab.config.compressed_tensors import OWN
from ao_lab.config.granularity import PER_ROW, PerTensor, block_of, is_asymmetric
from ao_lab.config.recipe import integer_scheme
from reference import Scales, Scheme
from reference.arrays.namespace import choice

#: Ranges of inputs by name; `ao_lab.calibration.statistics` has what keeps them.
NAMES = ("minmax", "absmax", "moving_average", "percentile")


def check_statistic(wanted: Any) -> None:
    """ValueError or TypeError for what is neither the name of a statistic nor a function that makes one."""
    if isinstance(wanted, str):
        choice(wanted, NAMES, "statistic")
    elif not callable(wanted):
        raise TypeError(
            f"statistic is a name or a function that makes a new one for each layer, got {type(wanted).__name__}"
        )


#: Torchao's: watch inputs; take the scales that were found.
STEPS = ("prepare", "convert")


@dataclass(frozen=True)
class StaticConfig(Config, registered=False):
    """What both have: a scale, or how it is found."""

    statistic: Any = field(default="minmax", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_statistic(self.statistic)
        if (scheme := self.recipe().activation) is None or scheme.scale.block != "tensor" or scheme.outer:
            raise ValueError(
                f"{type(self).__name__}: a static scale is one number for all inputs, not {scheme and scheme.name}; tokens, "
                f"channels and blocks of inputs to come have no scales yet: use PerTensor, or a Dynamic configuration"
            )
        if (step := getattr(self, "step", None)) is not None:
            choice(step, STEPS, f"{type(self).__name__}: step")
        scale, zero = self.fixed
        if scale is not None and self.prepares:
            raise ValueError('step="prepare" finds act_quant_scale; leave one of the two out')
        if (scheme.zero is not None and scale is not None) != (zero is not None):
            raise ValueError(
                "act_quant_zero_point belongs to act_quant_scale of act_mapping_type ASYMMETRIC, and to it alone"
            )
        self.input_scales()

    @property
    def fixed(self) -> tuple[Any, Any]:
        """The scale and the zero point that the caller has given, or None."""
        return getattr(self, "act_quant_scale"), getattr(self, "act_quant_zero_point", None)  # noqa: B009  (of subclasses)

    def input_scales(self) -> Scales | None:
        """The given scale, and zero point; None where they are to be found."""
        scale, zero = self.fixed
        return None if scale is None else static_scales(scale, zero)

    def for_layout(self, layout: str) -> Self:
        """See `Config.for_layout`; a given scale becomes what readers in bfloat16 still have, ValueError for a zero point."""
        result = super().for_layout(layout)
        scale, zero = self.fixed
        if layout == OWN or scale is None:
            return result
        if zero is not None:
            raise ValueError(
                f"{type(self).__name__}: loaders of compressed-tensors add act_quant_zero_point before they round; give a "
                f"symmetric act_quant_scale, or use layout='ao_lab'"
            )
        import torch

        rounded = torch.as_tensor(scale).detach().to(torch.bfloat16).to(torch.float32)
        changed: Any = {"act_quant_scale": rounded}
        return replace(result, **changed)._with_changes(result.changes)

    def observer(self) -> Observer | None:
        """What finds the scale; None where it is given."""
        scheme = self.recipe().activation
        if self.fixed[0] is not None or scheme is None:
            return None
        from ao_lab.calibration.statistics import STATISTICS, InputScales

        kind = STATISTICS[self.statistic] if isinstance(self.statistic, str) else self.statistic
        return InputScales(scheme, kind())


@dataclass(frozen=True)
class Int8StaticActivationInt8WeightConfig(StaticConfig):
    """INT8 weights and activations (W8A8), static: one activation scale, from calibration. One granularity is the weight's."""

    act_quant_scale: Any = None
    act_quant_zero_point: Any = None
    granularity: Any = PER_ROW
    act_mapping_type: Any = "SYMMETRIC"
    set_inductor_config: bool = True
    version: int = 1
    reduce_range: bool | None = False
    step: Any = field(default=None, kw_only=True)
    ONLY: ClassVar[dict[str, tuple[Any, ...]]] = {"reduce_range": (False, None)}

    def _weight(self) -> Scheme:
        return integer_scheme(8, block_of(operands(self.granularity)[1]), asymmetric=False)

    def _activation(self) -> Scheme:
        return integer_scheme(8, block_of(_of_input(self.granularity)), is_asymmetric(self.act_mapping_type))


@dataclass(frozen=True)
class Float8StaticActivationFloat8WeightConfig(StaticConfig):
    """FP8 weights and activations (W8A8), static: one activation scale, from calibration. One granularity is the weight's."""

    step: Any = None
    act_quant_scale: Any = None
    activation_dtype: Any = "float8_e4m3fn"
    weight_dtype: Any = "float8_e4m3fn"
    granularity: Any = None
    mm_config: Any = None
    kernel_preference: Any = "auto"
    set_inductor_config: bool = True
    quantize_and_dequantize_output: bool = False
    output_act_quant_scale: Any = None
    ONLY: ClassVar[dict[str, tuple[Any, ...]]] = {
        **NO_LAYOUT,
        "mm_config": (None,),
        "quantize_and_dequantize_output": (False,),
        "output_act_quant_scale": (None,),
    }

    def _weight(self) -> Scheme:
        return float8_scheme(self.weight_dtype, operands(self.granularity or PerTensor())[1])

    def _activation(self) -> Scheme:
        return float8_scheme(self.activation_dtype, _of_input(self.granularity))


def _of_input(granularity: Any) -> Any:
    """The input's granularity where a pair names it; a single one is the weight's."""
    return operands(granularity)[0] if isinstance(granularity, (list, tuple)) else PerTensor()


__all__ = ["Float8StaticActivationFloat8WeightConfig", "Int8StaticActivationInt8WeightConfig"]
