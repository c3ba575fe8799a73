"""What is decoded: bfloat16 in its forms, our configurations, and torchao's, each under the name that published tables use.

A baseline runs as its documentation recommends: torchao's own configuration and compiler settings. Those (and plain bfloat16)
multiply one row by reductions that the compiler writes and tunes, so they need coordinate descent; a product of one row by a
kernel of ours does not, and compiles in a fraction of the time. What tuning finds differs from run to run by a tenth of the
speed, so bfloat16 is tuned twice, the second time from an empty cache and with programmatic dependent launches, as ours are
compiled (what the compiler writes may start while the kernel before it ends). Targets are relative to the fastest of its
forms. torchao recommends no such launches, so its rows have none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor, nn

import ao_lab
from experiments.harness import revision
from experiments.harness.revision import TORCHAO
from reference.arrays.namespace import and_nearest

PLAIN_TENSORS = (Tensor, nn.Parameter)


def stored_bytes(tensor: Any) -> int:
    """Bytes of a tensor, or of everything inside a subclass."""
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(stored_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return tensor.nbytes


BASELINE, OURS = "baseline", "ours"
BFLOAT16 = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class Config:
    """One way to store and multiply the weights.

    setting, method: its library and name; together they name a row. build: the configuration for `quantize_`; None for plain
    bfloat16. tuned: whether the compiler tunes what it writes (torchao's recommended settings). whole: whether the step is
    compiled as one program, not layer by layer. dependent: whether the compiler's kernels use programmatic dependent launch,
    as `ao_lab.compile_options` has it and torchao's recommended settings do not. fresh_cache: whether nothing that was
    compiled or tuned before is reused. always: whether it is measured without being named.
    """

    setting: str
    method: str
    build: Callable[[], Any] | None = None
    tuned: bool = False
    whole: bool = False
    dependent: bool = False
    fresh_cache: bool = False
    always: bool = True

    def quantize(self, model: nn.Module, filter_fn: Callable[..., bool] | None = None) -> None:
        """Quantize the model's linear layers in place, those that filter_fn(module, name) takes."""
        if self.build is None:
            return
        if self.setting == OURS:
            ao_lab.quantize_(model, self.build(), filter_fn)
            return
        from torchao.quantization import quantize_

        quantize_(model, self.build(), filter_fn)


def torchao_config(
    name: str, module: str = "torchao.quantization", granularity: str = "", **options: Any
) -> Callable[[], Any]:
    """A configuration class of torchao by name, constructed when it is called; a granularity is named by its class.

    By name, as torchao need not be installed.
    """

    def build() -> Any:
        """The configuration; torchao is imported only here."""
        arguments = dict(options)
        if granularity:
            arguments["granularity"] = getattr(import_module("torchao.quantization"), granularity)()
        return getattr(import_module(module), name)(**arguments)

    return build


INT8_DYNAMIC = "Int8DynamicActivationInt8WeightConfig"
FLOAT8_DYNAMIC = "Float8DynamicActivationFloat8WeightConfig"
#: The published setting, scale and zero point in bfloat16; and our default with zero points of one byte.
TINYGEMM, INT4 = "torchao.int4_g64_tinygemm", "int4_g64_asymmetric_bf16"

LIBRARY, DEPENDENT = f"{BFLOAT16}, library products", f"{BFLOAT16}, dependent launches"
#: Published configurations whose speedups are targets.
WITH_SPEED_TARGET = ("int8wo", "float8wo", "int4wo-64")
BASE = Config(setting=BASELINE, method=BFLOAT16, tuned=True)
OUR_CONFIGS: dict[str, Callable[[], Any]] = {
    "int8wo": lambda: ao_lab.Int8WeightOnlyConfig(),
    "float8wo": lambda: ao_lab.Float8WeightOnlyConfig(),
    "int4wo-64": lambda: ao_lab.Int4WeightOnlyConfig(group_size=64, scheme=TINYGEMM),
    "int4wo-64, integer zeros": lambda: ao_lab.Int4WeightOnlyConfig(group_size=64, scheme=INT4),
    "float8dq per-tensor": lambda: ao_lab.Float8DynamicActivationFloat8WeightConfig(
        granularity=ao_lab.PerTensor()
    ),
    "float8dq per-row": lambda: ao_lab.Float8DynamicActivationFloat8WeightConfig(granularity=ao_lab.PerRow()),
    "int8dq": lambda: ao_lab.Int8DynamicActivationInt8WeightConfig(),
    "mxfp8wo": lambda: ao_lab.MXWeightOnlyConfig(weight_dtype="float8_e4m3fn"),
    "mxfp4wo": lambda: ao_lab.MXWeightOnlyConfig(weight_dtype="float4_e2m1fn"),
    "nvfp4wo": lambda: ao_lab.NVFP4WeightOnlyConfig(),
}
TORCHAO_CONFIGS = {
    "int8wo": torchao_config("Int8WeightOnlyConfig"),
    "int4wo-64": torchao_config(
        "Int4WeightOnlyConfig", group_size=64, int4_packing_format="tile_packed_to_4d"
    ),
    "float8wo": torchao_config("Float8WeightOnlyConfig"),
    "float8dq per-tensor": torchao_config(FLOAT8_DYNAMIC, granularity="PerTensor"),
    "float8dq per-row": torchao_config(FLOAT8_DYNAMIC, granularity="PerRow"),
    "int8dq": torchao_config(INT8_DYNAMIC),
    "nvfp4wo": torchao_config("NVFP4WeightOnlyConfig", "torchao.prototype.mx_formats"),
}
CONFIGS = (
    BASE,
    Config(setting=BASELINE, method=LIBRARY),
    Config(setting=BASELINE, method=DEPENDENT, tuned=True, dependent=True, fresh_cache=True),
    *(Config(setting=OURS, method=name, build=build, dependent=True) for name, build in OUR_CONFIGS.items()),
    *(
        Config(setting=TORCHAO, method=name, build=TORCHAO_CONFIGS[name], tuned=True)
        for name in WITH_SPEED_TARGET
    ),
    # Configurations without a target come last: the time of a run may end before them.
    *(
        Config(setting=TORCHAO, method=name, build=build, tuned=True)
        for name, build in TORCHAO_CONFIGS.items()
        if name not in WITH_SPEED_TARGET
    ),
    # A check that the baseline loses nothing, which compiles for minutes: as one program.
    Config(setting=BASELINE, method=f"{BFLOAT16}, compiled whole", tuned=True, whole=True, always=False),
)


def chosen(only: tuple[str, ...]) -> list[Config]:
    """All configurations that are always measured, or those whose setting or method is named; ValueError for other names."""
    names = {name for config in CONFIGS for name in (config.setting, config.method)}
    if unknown := sorted(set(only) - names):
        raise ValueError(
            f"unknown configuration {', '.join(unknown)}{and_nearest(unknown[0], names)}; there are {', '.join(sorted(names))}"
        )
    if not only:
        return [config for config in CONFIGS if config.always]
    return [config for config in CONFIGS if config.setting in only or config.method in only]


def missing(config: Config) -> str | None:
    """Why a configuration cannot be measured here; None where it can."""
    return revision.missing(TORCHAO) if config.setting == TORCHAO else None
