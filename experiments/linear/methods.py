"""What is compared: layers as `ao_lab.quantize_` makes them of `nn.Linear` in bfloat16, and as torchao's does.

Every configuration is a public one with default schemes. A name says what the weight's elements are, their groups, and behind
"dynamic" the blocks of the inputs; where no group is named a scale is of a row, or of what the format says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

import ao_lab
from experiments.decode.methods import FLOAT8_DYNAMIC, INT8_DYNAMIC, torchao_config
from experiments.harness import revision

TORCH, OURS, TORCHAO = "torch", "ao_lab", revision.TORCHAO
EXPERTS = "experts"
Build = Callable[[], Any]


@dataclass(frozen=True)
class Method:
    """A layer. build: its configuration, None for the dense layer. compiled: whether torch.compile is needed for its speed."""

    name: str
    build: Build | None = None
    library: str = OURS
    compiled: bool = False

    def quantize(self, layer: Any) -> Any:
        """The linear layer, or batched experts, with its weight quantized, in place."""
        if self.build is None:
            return layer
        holder = nn.Sequential(layer)
        if self.library == TORCHAO:
            from torchao.quantization import quantize_

            quantize_(holder, self.build())
        else:
            ao_lab.quantize_(holder, self.build(), ao_lab.linear_and_experts)
        return holder[0]

    @property
    def missing(self) -> str | None:
        """Why it cannot be measured here; None where it can."""
        return revision.missing(TORCHAO) if self.library == TORCHAO else None


def integers(bits: int, group: int) -> Build:
    """Symmetric integers in groups."""
    return lambda: ao_lab.IntxWeightOnlyConfig(f"int{bits}", ao_lab.PerGroup(group))


def float8_dynamic(*granularity: Any) -> Build:
    """FP8 for weight and inputs; one granularity, or the inputs' and the weight's."""
    given = granularity[0] if len(granularity) == 1 else granularity
    return lambda: ao_lab.Float8DynamicActivationFloat8WeightConfig(granularity=given)


def int8_integers(bits: int, group: int) -> Build:
    """INT8 inputs with zero points, integers in groups for the weight."""
    return lambda: ao_lab.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=f"int{bits}", weight_granularity=ao_lab.PerGroup(group)
    )


def mx_dynamic(element: str) -> Build:
    """An MX format for both."""
    return lambda: ao_lab.MXDynamicActivationMXWeightConfig(activation_dtype=element, weight_dtype=element)


def theirs(name: str, build: Build, *, compiled: bool = True) -> Method:
    """One of torchao's."""
    return Method(f"{TORCHAO} {name}", build, TORCHAO, compiled)


#: Weights alone are quantized.
WEIGHTS = (
    Method("int4 g128", integers(4, 128)),
    Method("int4 g32", integers(4, 32)),
    Method("int4 g128, zero points", lambda: ao_lab.Int4WeightOnlyConfig(group_size=128)),
    Method("int8", lambda: ao_lab.Int8WeightOnlyConfig()),
    Method("int8 g128", lambda: ao_lab.Int8WeightOnlyConfig(group_size=128)),
    Method("fp8", lambda: ao_lab.Float8WeightOnlyConfig()),
    Method("mxfp8", lambda: ao_lab.MXWeightOnlyConfig("float8_e4m3fn")),
    Method("mxfp4", lambda: ao_lab.MXWeightOnlyConfig("float4_e2m1fn")),
    Method("nvfp4", lambda: ao_lab.NVFP4WeightOnlyConfig()),
    Method("nf4", lambda: ao_lab.NF4WeightOnlyConfig()),
    Method("int2 g32", integers(2, 32)),
    Method("int3 g32", integers(3, 32)),
    Method("int6 g32", integers(6, 32)),
)
#: Inputs are quantized too, in every call.
ACTIVATIONS = (
    Method("int8 dynamic", lambda: ao_lab.Int8DynamicActivationInt8WeightConfig()),
    Method(
        "int8 dynamic, zero points",
        lambda: ao_lab.Int8DynamicActivationInt8WeightConfig(act_mapping_type=ao_lab.MappingType.ASYMMETRIC),
    ),
    Method("fp8 dynamic, tensor", float8_dynamic(ao_lab.PerTensor())),
    Method("fp8 dynamic, rows", float8_dynamic(ao_lab.PerRow())),
    Method("fp8 dynamic, blocks", float8_dynamic(ao_lab.PerBlock((1, 128)), ao_lab.PerBlock((128, 128)))),
    Method("int8 dynamic, int4 g32 weight", int8_integers(4, 32)),
    Method("fp8 dynamic, int4 g128 weight", lambda: ao_lab.Float8DynamicActivationInt4WeightConfig()),
    Method("mxfp8 dynamic", mx_dynamic("float8_e4m3fn")),
    Method("mxfp4 dynamic", mx_dynamic("float4_e2m1fn")),
    Method("nvfp4 dynamic", lambda: ao_lab.NVFP4DynamicActivationNVFP4WeightConfig()),
)
BASE = Method("bfloat16", library=TORCH)
#: torchao's, each with ours of the same weights and inputs.
PEERS = {
    theirs(
        "int4wo",
        torchao_config("Int4WeightOnlyConfig", group_size=128, int4_packing_format="tile_packed_to_4d"),
        compiled=False,
    ): "int4 g128, zero points",
    theirs("int8wo", torchao_config("Int8WeightOnlyConfig")): "int8",
    theirs("int8dq", torchao_config(INT8_DYNAMIC)): "int8 dynamic",
    theirs("fp8wo", torchao_config("Float8WeightOnlyConfig")): "fp8",
    theirs("fp8dq, rows", torchao_config(FLOAT8_DYNAMIC, granularity="PerRow")): "fp8 dynamic, rows",
}
#: Of experts: weights alone, one of each kind.
OF_EXPERTS = ("int4 g128", "int4 g128, zero points", "int8", "fp8", "mxfp8", "mxfp4", "nvfp4")
OF_OURS = {method.name: method for method in (*WEIGHTS, *ACTIVATIONS)}
#: By part, which is a kind of table too: what is timed in turn, bfloat16 first.
PARTS: dict[str, tuple[Method, ...]] = {
    "weights": (BASE, *WEIGHTS),
    "activations": (BASE, *ACTIVATIONS),
    EXPERTS: (BASE, *(OF_OURS[name] for name in OF_EXPERTS)),
    TORCHAO: (BASE, *(one for peer, ours in PEERS.items() for one in (OF_OURS[ours], peer))),
}
