"""torchtitan (0.3.0): its linear layers train by a recipe.

A run is a function that returns a configuration; the converter goes into the registry of models, before one for LoRA:

    from torchtitan.models.llama3 import model_registry
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    def low_precision():
        config = llama3_debugmodel()
        converter = LowPrecisionLinearConverter.Config(recipe_name="rowwise", filter_fqns=["lm_head"])
        config.model_spec = model_registry("debugmodel", converters=[converter])
        return config

    torchrun --nproc_per_node 1 -m torchtitan.train --module MODULE --config low_precision

torchtitan is an extra: `pip install 'ao_lab[titan]'`; it needs torch 2.13.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from ao_lab.install.extras import explained
from ao_lab.training.fsdp import GatheredLinear, gather_recipe, swap
from ao_lab.training.layers import LowPrecisionLinear, Settings, steps
from ao_lab.training.shard import CastOnGather
from reference.training.recipe import Recipe, recipe_of

try:
    from torchtitan.components.quantization import QuantizationConverter
    from torchtitan.models.common.linear import Linear
    from torchtitan.tools.logging import logger
except ModuleNotFoundError as error:
    raise explained(error) from None


class TitanLinear(LowPrecisionLinear, Linear):  # type: ignore[misc]
    """torchtitan's linear layer, trained by a recipe."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):  # type: ignore[misc]
        """torchtitan's fields, and the recipe: its record would not be plain data, which configurations are written as."""

        recipe_name: str = "rowwise"
        pad: bool = False
        kernel: str = "auto"

    def __init__(self, config: Config) -> None:
        Linear.__init__(self, config)
        self.low_precision = Settings(self.recipe(config.recipe_name), config.pad, config.kernel)

    @staticmethod
    def recipe(name: str) -> Recipe:
        """The record of a name."""
        return recipe_of(name)


class TitanGatheredLinear(GatheredLinear, TitanLinear):
    """The same; FSDP2 gathers its weight as codes."""

    @dataclass(kw_only=True, slots=True)
    class Config(TitanLinear.Config):
        """As above."""

    def __init__(self, config: Config) -> None:
        TitanLinear.__init__(self, config)
        swap(self.weight, CastOnGather(self.weight.detach(), self.scheme))

    @staticmethod
    def recipe(name: str) -> Recipe:
        """The record of a name, where weights arrive as codes."""
        return gather_recipe(recipe_of(name))


class LowPrecisionLinearConverter(QuantizationConverter):  # type: ignore[misc]
    """Lets linear layers of a model's configuration train by a recipe.

    Layers whose lengths the recipe cannot take stay as they are, and so do subclasses of torchtitan's Linear; the log lists
    them. Raises ValueError for an unknown recipe, for a name in filter_fqns that no layer has, and where nothing is converted.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):  # type: ignore[misc]
        """recipe_name: a name of `RECIPES`. filter_fqns: parts of names of layers that stay. pad, kernel and
        fsdp_float8_all_gather as in `ao_lab.convert_for_training_`."""

        recipe_name: str = "rowwise"
        filter_fqns: list[str] = field(default_factory=list)
        pad: bool = False
        kernel: str = "auto"
        fsdp_float8_all_gather: bool = False

    def __init__(self, config: Config) -> None:
        self.config = config
        self.kind = TitanGatheredLinear if config.fsdp_float8_all_gather else TitanLinear
        self.recipe = self.kind.recipe(config.recipe_name)

    def convert(self, model_config: Any) -> Any:
        """The model's configuration with layers exchanged, in place."""
        found = list(model_config.traverse(Linear.Config))
        self._check_filters([name for name, *_ in found])
        left: dict[str, str] = {}
        for name, linear, parent, attribute in found:
            reason = self._left(name, linear)
            if reason is not None:
                left[name] = reason
                continue
            made = self._converted(linear)
            if parent is None:
                model_config = made
            elif isinstance(parent, list):
                parent[attribute] = made
            else:
                setattr(parent, attribute, made)
        if len(left) == len(found):
            raise ValueError(f"recipe {self.recipe.name!r} takes no layer of the model: {left}")
        logger.info(
            f"{len(found) - len(left)} of {len(found)} linear layers train by {self.recipe.name}; left: {left}"
        )
        return model_config

    def _check_filters(self, names: list[str]) -> None:
        unknown = [part for part in self.config.filter_fqns if not any(part in name for name in names)]
        if unknown:
            raise ValueError(f"filter_fqns: no linear layer has {unknown} in its name; there are {names}")

    def _left(self, name: str, linear: Any) -> str | None:
        """Why a layer stays as it is; None where it is converted."""
        if any(part in name for part in self.config.filter_fqns):
            return "in filter_fqns"
        if type(linear) is not Linear.Config:
            return f"a {type(linear).__qualname__} may compute otherwise"
        _, n, k = steps(self.recipe)
        lengths = ((linear.in_features, k), (linear.out_features, n))
        if not self.config.pad and any(length % step for length, step in lengths):
            return f"{linear.in_features} inputs and {linear.out_features} outputs are no multiples of {k} and {n}"
        return None

    def _converted(self, linear: Any) -> Any:
        kept = {one.name: getattr(linear, one.name) for one in fields(linear) if one.init}
        config = self.config
        return self.kind.Config(**kept, recipe_name=config.recipe_name, pad=config.pad, kernel=config.kernel)


__all__ = ["LowPrecisionLinearConverter", "TitanGatheredLinear", "TitanLinear"]
