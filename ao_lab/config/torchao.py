"""`as_torchao`: a configuration in torchao's own bits instead of the default ones.

A configuration of ao_lab means the default schemes. Torchao's public classes compute otherwise: symmetric integers clip the
largest positive value, `Int8Tensor` has a smallest scale, `IntxUnpackedToInt8Tensor` computes in the weight's dtype, float8
scales are rounded to it. Which record of `reference.schemes.conventions` each class means is the table here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ao_lab.config.base import Config, FqnToConfig, SchemeConfig, dtype_name, operands
from ao_lab.config.classes import integer_bits
from ao_lab.config.granularity import MappingType, PerRow, PerTensor, block_of
from ao_lab.config.recipe import block_name, named
from reference import SCHEMES, Scheme
from reference.arrays.namespace import choice
from reference.schemes.conventions import integer_record
from reference.schemes.schemes import Block, mx_name

#: The records of weight and input, by name where torchao has only those that are named; None: inputs are not quantized.
Records = tuple[str | Scheme, str | Scheme | None]
MAPPINGS = {"SYMMETRIC": "", "ASYMMETRIC": "_asymmetric", "SYMMETRIC_NO_CLIPPING_ERR": "_no_clipping"}
SCALE_DTYPES = {"None": "", "float32": "_f32", "bfloat16": "_bf16", "float16": "_f16"}


def as_torchao(config: Any) -> Any:
    """The same configuration with schemes whose quantized values and scales are bitwise equal to those of torchao 0.18.

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
    result, inputs = named(weight), named(activation)
    if ours:
        return replace(config, scheme=result, activation_scheme=inputs)
    return SchemeConfig(scheme=result, activation_scheme=inputs)


def int8_record(block: Block, mapping: str = "") -> Scheme:
    """torchao's Int8Tensor in any block; `mapping` is one of `MAPPINGS`' values."""
    name = f"torchao.int8_{block_name(block)}{mapping}"
    return SCHEMES.get(name) or integer_record(name, 8, block, mapping, False, None)


def intx_record(bits: int, block: Block, mapping: str = "", storage: str = "") -> Scheme:
    """torchao's IntxUnpackedToInt8Tensor in any block; `storage`, one of `SCALE_DTYPES`' values, is the dtype of its scales.

    ValueError for symmetric integers of one bit: torchao's map every weight to 0.
    """
    name = f"torchao.intx{bits}_{block_name(block)}{mapping}{storage}"
    if bits == 1 and mapping != "_asymmetric":
        raise ValueError(
            f"{name}: torchao's symmetric integers of one bit are 0 for every weight; add _asymmetric, or use 2 bits"
        )
    return SCHEMES.get(name) or integer_record(name, bits, block, mapping, True, storage.lstrip("_") or None)


def float8_record(element: str, block: Block) -> Scheme:
    """torchao's float8 of its inference path in any block; ValueError for another element."""
    choice(element, ("float8_e4m3fn", "float8_e5m2"), "a float8 dtype")
    suffix = "_e5m2" if element == "float8_e5m2" else ""
    name = f"torchao.fp8_{'1x128' if block == 128 else block_name(block)}_inference{suffix}"
    model = SCHEMES[f"torchao.fp8_rowwise_inference{suffix}"]
    return SCHEMES.get(name) or replace(model, name=name, scale=replace(model.scale, block=block))


def mx_record(element: str, rule: str) -> Scheme:
    """torchao's MX record of an element and a rule of scales; ValueError for others."""
    result = named(f"torchao.{mx_name(element)}_{rule}")
    if result is None:
        raise ValueError(f"torchao has no MX floats {element} with scales by {rule}")
    return result


def _mapping(value: Any) -> str:
    name = str(getattr(value, "name", value)).upper()
    return MAPPINGS[choice(name, tuple(MappingType), "mapping type")]


def _int8_int8(config: Any) -> Records:
    given = PerRow() if config.granularity is None else config.granularity
    inputs, weight = map(block_of, operands(given))
    return int8_record(weight).name, int8_record(inputs, _mapping(config.act_mapping_type)).name


def _intx_of(dtype: Any, granularity: Any, mapping: Any, scale_dtype: Any) -> str:
    """The name of a record: torchao's configurations have rows and groups alone."""
    stored = choice(str(dtype_name(scale_dtype)), tuple(SCALE_DTYPES), "scale_dtype")
    return intx_record(
        integer_bits(dtype), block_of(granularity), _mapping(mapping), SCALE_DTYPES[stored]
    ).name


def _intx(config: Any) -> Records:
    _check_algorithm(config)
    return _intx_of(config.weight_dtype, config.granularity, config.mapping_type, config.scale_dtype), None


def _int8_intx(config: Any) -> Records:
    _check_algorithm(config)
    if _mapping(config.act_mapping_type) != "_asymmetric":
        raise ValueError("torchao's Int8DynamicActivationIntxWeightConfig has asymmetric inputs alone")
    weight = _intx_of(
        config.weight_dtype, config.weight_granularity, config.weight_mapping_type, config.weight_scale_dtype
    )
    return weight, "torchao.intx8_rowwise_asymmetric"


def _check_algorithm(config: Any) -> None:
    algorithm = config.intx_choose_qparams_algorithm
    choice(str(getattr(algorithm, "value", algorithm)), ("affine",), "intx_choose_qparams_algorithm")


def _int4(config: Any) -> Records:
    algorithm = config.int4_choose_qparams_algorithm
    choice(str(getattr(algorithm, "value", algorithm)), ("tinygemm",), "int4_choose_qparams_algorithm")
    return f"torchao.int4_g{config.group_size}_tinygemm", None


def _float8_of(dtype: Any, granularity: Any) -> str:
    """The name of a record: torchao has no kernels for other blocks."""
    return float8_record(dtype_name(dtype), block_of(granularity)).name


def _float8_float8(config: Any) -> Records:
    for bound in ("activation_value_lb", "activation_value_ub"):
        if getattr(config, bound, None) is not None:
            raise ValueError(f"{bound} is in no record; leave it out")
    inputs, weight = operands(config.granularity or PerTensor())
    return _float8_of(config.weight_dtype, weight), _float8_of(config.activation_dtype, inputs)


def _mx_of(dtype: Any, mode: Any) -> Scheme:
    rule = choice(
        str(getattr(mode, "value", mode)).lower(), ("rceil", "floor", "ceil", "even"), "scaling_mode"
    )
    return mx_record(dtype_name(dtype), rule)


def _nvfp4_of(config: Any) -> str:
    return "torchao.nvfp4" if config.use_dynamic_per_tensor_scale else "torchao.nvfp4_single_level"


#: The records of each class, from its parameters. Static configurations have one scale for all inputs.
RECORDS_OF: dict[str, Callable[[Any], Records]] = {
    "Float8DynamicActivationFloat8WeightConfig": _float8_float8,
    "Float8StaticActivationFloat8WeightConfig": lambda c: (
        _float8_of(c.weight_dtype, operands(c.granularity or PerTensor())[1]),
        _float8_of(c.activation_dtype, PerTensor()),
    ),
    "Float8WeightOnlyConfig": lambda c: (_float8_of(c.weight_dtype, c.granularity or PerRow()), None),
    "Int4WeightOnlyConfig": _int4,
    "Int8DynamicActivationInt8WeightConfig": _int8_int8,
    "Int8DynamicActivationIntxWeightConfig": _int8_intx,
    "Int8StaticActivationInt8WeightConfig": lambda c: (
        int8_record(block_of(operands(c.granularity)[1])).name,
        int8_record("tensor", _mapping(c.act_mapping_type)).name,
    ),
    "Int8WeightOnlyConfig": lambda c: (
        int8_record(getattr(c, "group_size", None) or block_of(c.granularity)).name,
        None,
    ),
    "IntxWeightOnlyConfig": _intx,
    "MXDynamicActivationMXWeightConfig": lambda c: (
        _mx_of(c.weight_dtype, c.scaling_mode),
        _mx_of(c.activation_dtype, c.scaling_mode),
    ),
    "MXWeightOnlyConfig": lambda c: (_mx_of(c.weight_dtype, c.scaling_mode), None),
    "NF4WeightOnlyConfig": lambda c: ("torchao.nf4", None),
    "NVFP4DynamicActivationNVFP4WeightConfig": lambda c: (_nvfp4_of(c), _nvfp4_of(c)),
    "NVFP4WeightOnlyConfig": lambda c: (_nvfp4_of(c), None),
}

__all__ = ["RECORDS_OF", "as_torchao", "float8_record", "int8_record", "intx_record", "mx_record"]
