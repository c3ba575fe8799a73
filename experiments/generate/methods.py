"""What generates: bfloat16 and our configurations, both after `ao_lab.prepare_for_generate_` too, and torchao's.

That call spares the host's time of any model. Names are those of experiment `linear`. Nothing is switched on but what a method
names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

import ao_lab
from experiments.decode.configs import FLOAT8_DYNAMIC, torchao_config
from experiments.harness import libraries
from experiments.linear.methods import Build, float8_dynamic, integers

TRANSFORMERS, TORCHAO = "transformers", libraries.TORCHAO


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to store the weights of a model's linear layers, the output layer too.

    build: its configuration, None for bfloat16. library: whose `quantize_`. frozen: None, or that of `prepare_for_generate_`,
    which has something to do where the model is compiled alone. deep: whether it is measured of all 32 layers, too. dynamic:
    whether inputs are rounded too. peer: the name of torchao's method of its recipe.
    """

    name: str
    build: Build | None = None
    library: str = "ao_lab"
    frozen: bool | None = None
    deep: bool = False
    dynamic: bool = False
    peer: str = ""

    def apply(self, model: nn.Module) -> None:
        """Quantize and prepare a model in place."""
        if self.build is not None:
            self._quantize(model, self.build())
        if self.frozen is not None:
            ao_lab.prepare_for_generate_(model, frozen=self.frozen)

    def _quantize(self, model: nn.Module, config: Any) -> None:
        if self.library != TORCHAO:
            ao_lab.quantize_(model, config)
            return
        from torchao.quantization import quantize_

        quantize_(model, config)

    @property
    def missing(self) -> str | None:
        """Why it cannot be measured here; None where it can."""
        found = libraries.missing(TRANSFORMERS)
        return found or (libraries.missing(TORCHAO) if self.library == TORCHAO else None)


AO_INT4, AO_INT8, AO_FP8 = AO = "torchao int4wo", "torchao int8wo", "torchao fp8dq, rows"
INT4, INT4_ZERO = integers(4, 128), lambda: ao_lab.Int4WeightOnlyConfig(group_size=128)
BASE = Method(name="bfloat16", deep=True)
METHODS = (
    BASE,
    Method(name="int4 g128", build=INT4, deep=True, peer=AO_INT4),
    Method(name="int4 g128, prepared", build=INT4, frozen=False, deep=True),
    Method(name="int4 g128, prepared and frozen", build=INT4, frozen=True, deep=True),
    Method(name="bfloat16, prepared", frozen=False, deep=True),
    Method(name="bfloat16, prepared and frozen", frozen=True, deep=True),
    Method(name="int8", build=lambda: ao_lab.Int8WeightOnlyConfig(), deep=True, peer=AO_INT8),
    Method(name="fp8 dynamic, rows", build=float8_dynamic(ao_lab.PerRow()), dynamic=True, peer=AO_FP8),
    Method(name="int4 g128, zero points", build=INT4_ZERO, peer=AO_INT4),
    Method(name="mxfp4", build=lambda: ao_lab.MXWeightOnlyConfig("float4_e2m1fn")),
    Method(
        name=AO_INT4,
        build=torchao_config("Int4WeightOnlyConfig", group_size=128, int4_packing_format="tile_packed_to_4d"),
        library=TORCHAO,
    ),
    Method(name=AO_INT8, build=torchao_config("Int8WeightOnlyConfig"), library=TORCHAO),
    Method(
        name=AO_FP8,
        build=torchao_config(FLOAT8_DYNAMIC, granularity="PerRow"),
        library=TORCHAO,
        dynamic=True,
    ),
)

__all__ = ["AO", "BASE", "METHODS", "TORCHAO", "TRANSFORMERS", "Method"]
