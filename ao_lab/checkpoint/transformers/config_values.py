"""Configurations as plain values, for JSON, and back.

What is read may come from anywhere: classes are looked up among the registered ones (`ao_lab.config.base.CONFIGS`), and their
constructors check the values. Nothing else is imported or called.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import torch

from ao_lab import calibration as calibration  # registers configurations with static scales
from ao_lab.checkpoint.io.plain_values import check_scheme_fields
from ao_lab.checkpoint.io.strict_json import shown
from ao_lab.config import granularity
from ao_lab.config.base import CONFIGS, Config
from ao_lab.config.fqn import FqnToConfig
from reference import Scheme
from reference.schemes.record_text import scheme_fields, scheme_from

#: Keys of objects that stand for what JSON has no word for.
CLASS, DTYPE, SCHEME = "class", "dtype", "record"


def config_values(config: Config | FqnToConfig) -> dict[str, Any]:
    """A configuration as JSON can have it: its class and the fields that are not as by default.

    ValueError for a class that is not ao_lab's own, and for fields without such a form (functions, observers).
    """
    if isinstance(config, FqnToConfig):
        inner = {
            name: None if one is None else config_values(one) for name, one in config.fqn_to_config.items()
        }
        return {CLASS: "FqnToConfig", "fqn_to_config": inner}
    name = type(config).__name__
    if CONFIGS.get(name) is not type(config):
        raise ValueError(f"{type(config).__module__}.{name} is no configuration that ao_lab can name in JSON")
    return {CLASS: name, **_fields(config)}


def config_from(values: Any) -> Config | FqnToConfig:
    """The configuration that `config_values` wrote; ValueError or TypeError for anything else."""
    name = values.get(CLASS) if isinstance(values, Mapping) else None
    if name == "FqnToConfig":
        inner = values.get("fqn_to_config")
        if not isinstance(inner, Mapping):
            raise ValueError(f"fqn_to_config is an object, got {shown(inner)}")
        result = {key: None if one is None else _single(one) for key, one in inner.items()}
        return FqnToConfig(result)
    return _single(values)


def _single(values: Any) -> Config:
    name = values.get(CLASS) if isinstance(values, Mapping) else None
    kind = CONFIGS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(f"a configuration is an object with the name of its class, got {shown(values)}")
    known = {field.name for field in fields(kind) if field.init}
    if unknown := [key for key in values if key not in {CLASS, *known}]:
        raise ValueError(f"{name} has no field {shown(unknown[0])}; it has {', '.join(sorted(known))}")
    return kind(**{key: _from_plain(value) for key, value in values.items() if key != CLASS})


def _fields(record: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not as by default."""
    given = {field.name: getattr(record, field.name) for field in fields(record) if field.init}
    defaults = {field.name: field.default for field in fields(record)}
    return {name: _plain(value, name) for name, value in given.items() if not _same(value, defaults[name])}


def _same(value: Any, default: Any) -> bool:
    return not isinstance(value, torch.Tensor) and type(value) is type(default) and bool(value == default)


def _plain(value: Any, name: str) -> Any:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (str, Enum)):
        return str(value if isinstance(value, str) else value.name)
    if isinstance(value, torch.dtype):
        return {DTYPE: str(value).removeprefix("torch.")}
    if isinstance(value, Scheme):
        return {SCHEME: json.loads(json.dumps(scheme_fields(value)))}
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (list, tuple)):
        return [_plain(item, name) for item in value]
    if type(value).__name__ in granularity.NAMES and is_dataclass(value):
        return {
            CLASS: type(value).__name__,
            **{f.name: _plain(getattr(value, f.name), name) for f in fields(value)},
        }
    raise ValueError(f"{name}={value!r} cannot be written as JSON; give it by name, or use quantize_")


def _from_plain(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_from_plain(item) for item in value)
    if not isinstance(value, Mapping):
        return value
    if DTYPE in value and isinstance(found := getattr(torch, str(value[DTYPE]), None), torch.dtype):
        return found
    if SCHEME in value:
        check_scheme_fields(value[SCHEME], "scheme")
        return scheme_from(value[SCHEME])
    name = value.get(CLASS)
    if name in granularity.NAMES:
        kind = getattr(granularity, str(name))
        return kind(**{key: _from_plain(item) for key, item in value.items() if key != CLASS})
    raise ValueError(f"no value of a configuration: {shown(value)}")


__all__ = ["config_from", "config_values"]
