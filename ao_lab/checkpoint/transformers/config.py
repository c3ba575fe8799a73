"""`HfConfig`: what `from_pretrained(..., quantization_config=)` of transformers takes, and what config.json says of our layout.

transformers asks of such an object no more than these methods; the class has no base class there, so that the name is known
without transformers. `ao_lab.checkpoint.transformers.quantizer` does the work.

Configurations become plain values, for JSON, and back (`config_values`, `config_from`). What is read may come from anywhere:
classes are looked up among the registered ones (`ao_lab.config.base.CONFIGS`), and their constructors check the values.
Nothing else is imported or called.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from ao_lab import calibration as calibration  # registers configurations with static scales
from ao_lab.checkpoint.configuration import METHOD, OURS, file_of_weights
from ao_lab.checkpoint.io.strict_json import check_scheme_fields, shown
from ao_lab.config import granularity
from ao_lab.config.base import CONFIGS, Config, FqnToConfig, SchemeConfig, kind_of
from reference import Scheme
from reference.schemes.in_files import loaded_scheme, stored_fields

#: What a description in config.json may say.
STORED = ("quant_method", "version", "weights", "kv_cache_scheme")
ASKED = ("quant_method", "config", "modules_to_not_convert", "experts")


class HfConfig:
    """Quantize a transformers model weight by weight while `from_pretrained` loads it.

    `AutoModelForCausalLM.from_pretrained(DIR, quantization_config=ao_lab.HfConfig(ao_lab.Int8WeightOnlyConfig()))`

    config: a configuration of `quantize_`, an `FqnToConfig`, or the name of a scheme. The weights are bitwise those of loading
    the unquantized model and calling `quantize_`: linear layers (Conv1D too) and, with `experts`, batched experts; routers stay
    unquantized. modules_to_not_convert: layers to leave, by the rules of transformers (a prefix of the name up to a dot, a
    regular expression, or a suffix). Default: a head that is tied to the embedding, as for `quantize_` and `ao-lab quantize`;
    ["lm_head"]: the head in any case, as transformers' other quantizers do; []: none. `FqnToConfig` names layers itself and
    takes neither of the two.

    Raises TypeError for another kind of config, ValueError for one that needs data (static scales that are not given) or
    training: load the model first and call `quantize_`.
    """

    quant_method = METHOD

    def __init__(
        self,
        config: Config | FqnToConfig | str | None = None,
        modules_to_not_convert: Sequence[str] | None = None,
        experts: bool = True,
        *,
        weights: str | None = None,
        kv_cache_scheme: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = SchemeConfig(scheme=config) if isinstance(config, str) else config
        self.modules_to_not_convert = names_of(modules_to_not_convert)
        self.experts = experts
        #: The file of weights of a folder in our layout; None in those of earlier versions.
        self.weights = weights
        #: What is said of static scales of keys and values of such a folder (`ao_lab.kv_cache.static_scales`).
        self.kv_cache_scheme = kv_cache_scheme
        #: What `quantize_pretrained` asks for beyond this; it belongs to one call.
        self.job: Any = None
        if self.config is not None:
            check(self.config, self.modules_to_not_convert)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as config.json holds them: of a folder in our layout, or of what was asked for."""
        if self.config is None:
            said = {"weights": self.weights, "kv_cache_scheme": self.kv_cache_scheme}
            return {**OURS, **{name: value for name, value in said.items() if value is not None}}
        return {
            "quant_method": METHOD,
            "config": config_values(self.config),
            "modules_to_not_convert": self.modules_to_not_convert,
            "experts": self.experts,
        }

    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Any:
        """The object that `to_dict` described; ValueError or TypeError where it is none. kwargs are not used."""
        asked = "config" in config_dict
        known = ASKED if asked else STORED
        if unknown := [name for name in config_dict if name not in known]:
            raise ValueError(
                f"quantization_config has no field {shown(unknown[0])}; it has {', '.join(known)}"
            )
        if config_dict.get("quant_method", METHOD) != METHOD:
            raise ValueError(f"quant_method is {METHOD}, got {shown(config_dict['quant_method'])}")
        if asked:
            names, experts = config_dict.get("modules_to_not_convert"), config_dict.get("experts", True)
            result = cls(config_from(config_dict["config"]), names, experts)
        else:
            weights = file_of_weights(config_dict, "quantization_config")
            result = cls(weights=weights, kv_cache_scheme=config_dict.get("kv_cache_scheme"))
        return (result, kwargs) if return_unused_kwargs else result

    def to_diff_dict(self) -> dict[str, Any]:
        """`to_dict`: nothing is left out."""
        return self.to_dict()

    def to_json_string(self, use_diff: bool = True) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"

    def to_json_file(self, json_file_path: str | Path) -> None:
        """`to_json_string` in a file."""
        Path(json_file_path).write_text(self.to_json_string())

    def update(self, **kwargs: Any) -> dict[str, Any]:
        """Takes over nothing: all of it was checked when it was made. Returns what was given."""
        return kwargs

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        yield from self.to_dict().items()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HfConfig) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash(self.to_json_string())

    def __repr__(self) -> str:
        if self.config is None:
            return f"HfConfig(weights={self.weights!r})"
        names = "" if self.modules_to_not_convert is None else f", {self.modules_to_not_convert!r}"
        return f"HfConfig({self.config!r}{names}{'' if self.experts else ', experts=False'})"


def names_of(given: Sequence[str] | None) -> list[str] | None:
    """Names of layers as a list; TypeError for anything else, a single string too."""
    if given is None:
        return None
    if isinstance(given, str) or not all(isinstance(name, str) for name in given):
        raise TypeError(f"modules_to_not_convert is a list of names, got {given!r}")
    return list(given)


def check(config: Any, names: list[str] | None) -> None:
    """Whether weights can be quantized by a configuration alone, while they are read."""
    if not isinstance(config, (Config, FqnToConfig)):
        raise TypeError(
            f"HfConfig takes a configuration of ao_lab or the name of a scheme, got {kind_of(config)}"
        )
    if isinstance(config, FqnToConfig) and names is not None:
        raise ValueError("FqnToConfig names the layers itself; leave modules_to_not_convert out")
    inner = list(config.fqn_to_config.values()) if isinstance(config, FqnToConfig) else [config]
    for one in inner:
        if one is not None and (hasattr(one, "base_config") or one.prepares):
            raise ValueError(f"{type(one).__name__} trains; load the model first, then call ao_lab.quantize_")
        if one is not None and one.observer() is not None:
            raise ValueError(
                f"{type(one).__name__} finds its scales from data; give act_quant_scale, or load the model and call "
                "ao_lab.quantize_ with forward_loop"
            )
    config_values(config)


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
        return {SCHEME: json.loads(json.dumps(stored_fields(value)))}
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
        return loaded_scheme(value[SCHEME])
    name = value.get(CLASS)
    if name in granularity.NAMES:
        kind = getattr(granularity, str(name))
        return kind(**{key: _from_plain(item) for key, item in value.items() if key != CLASS})
    raise ValueError(f"no value of a configuration: {shown(value)}")


__all__ = ["HfConfig", "config_from", "config_values"]
