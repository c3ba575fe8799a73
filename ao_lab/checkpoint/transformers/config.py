"""`HfConfig`: what `from_pretrained(..., quantization_config=)` of transformers takes, and what config.json says of our layout.

transformers asks of such an object no more than these methods; the class has no base class there, so that the name is known
without transformers. `ao_lab.checkpoint.transformers.quantizer` does the work.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ao_lab.checkpoint.io.strict_json import shown
from ao_lab.checkpoint.native_layout import METHOD, OURS, file_of_weights
from ao_lab.checkpoint.transformers.config_values import config_from, config_values
from ao_lab.config.base import Config, SchemeConfig, kind_of
from ao_lab.config.fqn import FqnToConfig

#: What a description in config.json may say.
STORED = ("quant_method", "version", "weights")
ASKED = ("quant_method", "config", "modules_to_not_convert", "experts")


class HfConfig:
    """Quantize a model of transformers weight by weight while `from_pretrained` reads it.

    `AutoModelForCausalLM.from_pretrained(DIR, quantization_config=ao_lab.HfConfig(ao_lab.Int8WeightOnlyConfig()))`

    config: a configuration of `quantize_`, an `FqnToConfig`, or the name of a scheme. The weights are those of loading the
    dense model and calling `quantize_`, bit for bit: linear layers (Conv1D too) and, with `experts`, batched experts; routers
    stay dense. modules_to_not_convert: which layers stay, by the rules of transformers (a beginning of the name up to a dot, a
    regular expression, or an end); None: a head that is tied to the embedding, which `quantize_` and `ao-lab quantize` leave
    too; ["lm_head"]: the head in any case, as transformers' other quantizers do; []: none. `FqnToConfig` names layers itself,
    and goes without both.

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
    ) -> None:
        self.config = SchemeConfig(scheme=config) if isinstance(config, str) else config
        self.modules_to_not_convert = names_of(modules_to_not_convert)
        self.experts = experts
        #: The file of weights of a folder in our layout; None in those of earlier versions.
        self.weights = weights
        #: What `quantize_pretrained` asks for beyond this; it belongs to one call.
        self.job: Any = None
        if self.config is not None:
            check(self.config, self.modules_to_not_convert)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as config.json holds them: of a folder in our layout, or of what was asked for."""
        if self.config is None:
            return {**OURS, **({} if self.weights is None else {"weights": self.weights})}
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
            result = cls(weights=file_of_weights(config_dict, "quantization_config"))
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


__all__ = ["HfConfig"]
