"""`as_torchao`: a configuration in torchao's own bits instead of the house's.

A configuration of ao_lab means the house's records. Torchao's public classes compute otherwise: symmetric integers clip the
largest positive value, `Int8Tensor` has a smallest scale, `IntxUnpackedToInt8Tensor` computes in the weight's dtype, float8
scales are rounded to it. Which record of `reference.schemes.torchao` each class means is the table here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ao_lab.config.base import Config, SchemeConfig, dtype_name, operands
from ao_lab.config.fqn import FqnToConfig
from ao_lab.config.granularity import MappingType, PerRow, PerTensor, block_of
from ao_lab.config.recipe import block_name, named
from reference.arrays.errors import choice
from reference.schemes.default_schemes import mx_name

#: Names of the records of weight and input; None: inputs are not quantized.
Names = tuple[str, str | None]
MAPPINGS = {"SYMMETRIC": "", "ASYMMETRIC": "_asymmetric", "SYMMETRIC_NO_CLIPPING_ERR": "_no_clipping"}
SCALE_DTYPES = {"None": "", "float32": "_f32", "bfloat16": "_bf16", "float16": "_f16"}


def as_torchao(config: Any) -> Any:
    """The same configuration with the schemes whose codes, scales and values are those of torchao 0.18, bit for bit.

    config: one of ao_lab's configurations, or torchao's object itself. One of ao_lab's comes back with `scheme` and
    `activation_scheme` set, `FqnToConfig` with each of its configurations so; torchao's becomes a `SchemeConfig`.

    `scale_dtype` other than float32 is exact for weights of that dtype. `Int4WeightOnlyConfig` gets the record of tinygemm.
    ValueError for what torchao does not have, or computes by GPU kernels of others alone; TypeError for no configuration.
    """
    if type(config).__name__ in ("FqnToConfig", "ModuleFqnToConfig"):
        each = config.fqn_to_config.items()
        return FqnToConfig({name: None if one is None else as_torchao(one) for name, one in each})
    kind = type(config).__name__
    ours = isinstance(config, Config)
    if not ours and not type(config).__module__.startswith("torchao."):
        raise TypeError(f"as_torchao takes a configuration of ao_lab or torchao, got {kind}: {config!r}")
    if kind not in RECORDS_OF or (not ours and "Static" in kind):
        known = ", ".join(sorted(RECORDS_OF))
        raise ValueError(
            f"as_torchao: no record says what {kind} of torchao computes; those of {known} are known"
        )
    weight, activation = RECORDS_OF[kind](config)
    made, inputs = named(weight), named(activation)
    if ours:
        return replace(config, scheme=made, activation_scheme=inputs)
    return SchemeConfig(scheme=made, activation_scheme=inputs)


def _mapping(value: Any) -> str:
    name = str(getattr(value, "name", value)).upper()
    return MAPPINGS[choice(name, tuple(MappingType), "mapping type")]


def _int8(config: Any) -> Names:
    group = getattr(config, "group_size", None)
    return f"torchao.int8_{block_name(group or block_of(config.granularity))}", None


def _int8_int8(config: Any) -> Names:
    given = PerRow() if config.granularity is None else config.granularity
    inputs, weight = (block_name(block_of(one)) for one in operands(given))
    return f"torchao.int8_{weight}", f"torchao.int8_{inputs}{_mapping(config.act_mapping_type)}"


def _static_int8(config: Any) -> Names:
    """One scale for all inputs, whatever the weight's granularity is."""
    weight = block_name(block_of(operands(config.granularity)[1]))
    return f"torchao.int8_{weight}", f"torchao.int8_tensorwise{_mapping(config.act_mapping_type)}"


def _intx_name(dtype: Any, granularity: Any, mapping: Any, scale_dtype: Any) -> str:
    stored = choice(str(dtype_name(scale_dtype)), tuple(SCALE_DTYPES), "scale_dtype")
    block = block_name(block_of(granularity))
    return f"torchao.intx{dtype_name(dtype).removeprefix('int')}_{block}{_mapping(mapping)}{SCALE_DTYPES[stored]}"


def _intx(config: Any) -> Names:
    _check_algorithm(config)
    return _intx_name(config.weight_dtype, config.granularity, config.mapping_type, config.scale_dtype), None


def _int8_intx(config: Any) -> Names:
    _check_algorithm(config)
    if _mapping(config.act_mapping_type) != "_asymmetric":
        raise ValueError("torchao's Int8DynamicActivationIntxWeightConfig has asymmetric inputs alone")
    weight = _intx_name(
        config.weight_dtype, config.weight_granularity, config.weight_mapping_type, config.weight_scale_dtype
    )
    return weight, "torchao.intx8_rowwise_asymmetric"


def _check_algorithm(config: Any) -> None:
    algorithm = config.intx_choose_qparams_algorithm
    choice(str(getattr(algorithm, "value", algorithm)), ("affine",), "intx_choose_qparams_algorithm")


def _int4(config: Any) -> Names:
    algorithm = config.int4_choose_qparams_algorithm
    choice(str(getattr(algorithm, "value", algorithm)), ("tinygemm",), "int4_choose_qparams_algorithm")
    return f"torchao.int4_g{config.group_size}_tinygemm", None


def _float8_name(dtype: Any, granularity: Any) -> str:
    block = block_name(block_of(granularity))
    suffix = "_e5m2" if dtype_name(dtype) == "float8_e5m2" else ""
    return f"torchao.fp8_{'1x128' if block == 'g128' else block}_inference{suffix}"


def _float8(config: Any) -> Names:
    return _float8_name(config.weight_dtype, config.granularity or PerRow()), None


def _float8_float8(config: Any) -> Names:
    for bound in ("activation_value_lb", "activation_value_ub"):
        if getattr(config, bound, None) is not None:
            raise ValueError(f"{bound} is in no record; leave it out")
    inputs, weight = operands(config.granularity or PerTensor())
    return _float8_name(config.weight_dtype, weight), _float8_name(config.activation_dtype, inputs)


def _static_float8(config: Any) -> Names:
    weight = operands(config.granularity or PerTensor())[1]
    return _float8_name(config.weight_dtype, weight), _float8_name(config.activation_dtype, PerTensor())


def _mx_name(dtype: Any, mode: Any) -> str:
    rule = choice(
        str(getattr(mode, "value", mode)).lower(), ("rceil", "floor", "ceil", "even"), "scaling_mode"
    )
    return f"torchao.{mx_name(dtype_name(dtype))}_{rule}"


def _mx(config: Any) -> Names:
    return _mx_name(config.weight_dtype, config.scaling_mode), None


def _mx_mx(config: Any) -> Names:
    mode = config.scaling_mode
    return _mx_name(config.weight_dtype, mode), _mx_name(config.activation_dtype, mode)


def _nvfp4(config: Any) -> Names:
    return "torchao.nvfp4" if config.use_dynamic_per_tensor_scale else "torchao.nvfp4_single_level", None


def _nvfp4_nvfp4(config: Any) -> Names:
    name = _nvfp4(config)[0]
    return name, name


#: The records of each class, from its parameters.
RECORDS_OF: dict[str, Callable[[Any], Names]] = {
    "Float8DynamicActivationFloat8WeightConfig": _float8_float8,
    "Float8StaticActivationFloat8WeightConfig": _static_float8,
    "Float8WeightOnlyConfig": _float8,
    "Int4WeightOnlyConfig": _int4,
    "Int8DynamicActivationInt8WeightConfig": _int8_int8,
    "Int8DynamicActivationIntxWeightConfig": _int8_intx,
    "Int8StaticActivationInt8WeightConfig": _static_int8,
    "Int8WeightOnlyConfig": _int8,
    "IntxWeightOnlyConfig": _intx,
    "MXDynamicActivationMXWeightConfig": _mx_mx,
    "MXWeightOnlyConfig": _mx,
    "NF4WeightOnlyConfig": lambda config: ("torchao.nf4", None),
    "NVFP4DynamicActivationNVFP4WeightConfig": _nvfp4_nvfp4,
    "NVFP4WeightOnlyConfig": _nvfp4,
}

__all__ = ["RECORDS_OF", "as_torchao"]
