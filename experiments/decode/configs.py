"""What is decoded: bfloat16 in its forms, our configurations, and torchao's, each under the name that published tables use.

A peer runs as its users are told to: torchao's own configuration, its recommended settings of the compiler. Those (and plain
bfloat16) multiply one row by reductions that the compiler writes and tunes, so they need coordinate descent; a product of one
row by a kernel of ours does not, and compiles in a fraction of the time. What tuning finds differs from run to run by a tenth
of the speed, so bfloat16 is tuned twice, the second time from nothing and with dependent launches, as ours are compiled (what
the compiler writes may begin while the kernel in front of it ends). Bars are held against the fastest of its forms. torchao
recommends no such launches, so its rows have none.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

BASELINE, OURS, TORCHAO = "baseline", "ours", "torchao"
BFLOAT16 = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class Config:
    """One way to hold and multiply the weights."""

    #: Who made it, and what it is called; together they name a row.
    setting: str
    method: str
    #: The configuration for `quantize_`; None for plain bfloat16.
    make: Callable[[], Any] | None = None
    #: Whether the compiler may tune what it writes (torchao's recommended settings).
    tuned: bool = False
    #: Whether the step is compiled as one program, not layer by layer.
    whole: bool = False
    #: Whether what the compiler writes may begin while the kernel before it ends (programmatic dependent launch), as
    #: `ao_lab.compile_options` has it and torchao's recommended settings do not.
    dependent: bool = False
    #: Whether nothing that was compiled or tuned before may be taken.
    afresh: bool = False
    #: Whether it is measured without being asked for.
    always: bool = True

    def quantize(self, model: nn.Module) -> None:
        """Quantize the model's linear layers in place."""
        if self.make is None:
            return
        if self.setting == OURS:
            from ao_lab import quantize_
        else:
            from torchao.quantization import quantize_
        quantize_(model, self.make())


def ours(name: str, **options: Any) -> Callable[[], Any]:
    """A configuration of ao_lab, made when it is asked for."""

    def make() -> Any:
        import ao_lab

        return getattr(ao_lab, name)(**options)

    return make


def torchaos(name: str, home: str = "torchao.quantization", **options: Any) -> Callable[[], Any]:
    """A configuration of torchao; a granularity is named by its class."""

    def make() -> Any:
        from importlib import import_module

        if "granularity" in options:
            made = getattr(import_module("torchao.quantization"), options["granularity"])()
            return getattr(import_module(home), name)(**{**options, "granularity": made})
        return getattr(import_module(home), name)(**options)

    return make


def granular(name: str, granularity: str) -> Callable[[], Any]:
    """A configuration of ao_lab with a granularity."""

    def make() -> Any:
        import ao_lab

        return getattr(ao_lab, name)(granularity=getattr(ao_lab, granularity)())

    return make


INT8_DYNAMIC = "Int8DynamicActivationInt8WeightConfig"
FLOAT8_DYNAMIC = "Float8DynamicActivationFloat8WeightConfig"
#: The published setting, scale and zero point in bfloat16; and the house's, with zero points of a byte.
TINYGEMM, INT4 = "torchao.int4_g64_tinygemm", "int4_g64_asymmetric_bf16"

LIBRARY, DEPENDENT = f"{BFLOAT16}, library products", f"{BFLOAT16}, dependent launches"
#: Published configurations whose speedups are bars.
RACED = ("int8wo", "float8wo", "int4wo-64")
BASE = Config(setting=BASELINE, method=BFLOAT16, tuned=True)
OUR_CONFIGS = {
    "int8wo": ours("Int8WeightOnlyConfig"),
    "float8wo": ours("Float8WeightOnlyConfig"),
    "int4wo-64": ours("Int4WeightOnlyConfig", group_size=64, scheme=TINYGEMM),
    "int4wo-64, integer zeros": ours("Int4WeightOnlyConfig", group_size=64, scheme=INT4),
    "float8dq per-tensor": granular(FLOAT8_DYNAMIC, "PerTensor"),
    "float8dq per-row": granular(FLOAT8_DYNAMIC, "PerRow"),
    "int8dq": ours(INT8_DYNAMIC),
    "mxfp8wo": ours("MXWeightOnlyConfig", weight_dtype="float8_e4m3fn"),
    "mxfp4wo": ours("MXWeightOnlyConfig", weight_dtype="float4_e2m1fn"),
    "nvfp4wo": ours("NVFP4WeightOnlyConfig"),
}
TORCHAO_CONFIGS = {
    "int8wo": torchaos("Int8WeightOnlyConfig"),
    "int4wo-64": torchaos("Int4WeightOnlyConfig", group_size=64, int4_packing_format="tile_packed_to_4d"),
    "float8wo": torchaos("Float8WeightOnlyConfig"),
    "float8dq per-tensor": torchaos(FLOAT8_DYNAMIC, granularity="PerTensor"),
    "float8dq per-row": torchaos(FLOAT8_DYNAMIC, granularity="PerRow"),
    "int8dq": torchaos(INT8_DYNAMIC),
    "nvfp4wo": torchaos("NVFP4WeightOnlyConfig", "torchao.prototype.mx_formats"),
}
CONFIGS = (
    BASE,
    Config(setting=BASELINE, method=LIBRARY),
    Config(setting=BASELINE, method=DEPENDENT, tuned=True, dependent=True, afresh=True),
    *(Config(setting=OURS, method=name, make=make, dependent=True) for name, make in OUR_CONFIGS.items()),
    *(Config(setting=TORCHAO, method=name, make=TORCHAO_CONFIGS[name], tuned=True) for name in RACED),
    # What no bar is held against comes last: a run may be over before.
    *(
        Config(setting=TORCHAO, method=name, make=make, tuned=True)
        for name, make in TORCHAO_CONFIGS.items()
        if name not in RACED
    ),
    # A check that the baseline loses nothing, which compiles for minutes: as one program.
    Config(setting=BASELINE, method=f"{BFLOAT16}, compiled whole", tuned=True, whole=True, always=False),
)


def chosen(only: tuple[str, ...]) -> list[Config]:
    """All configurations that are always measured, or those whose setting or method is named; ValueError for other names."""
    names = {name for config in CONFIGS for name in (config.setting, config.method)}
    if unknown := sorted(set(only) - names):
        raise ValueError(f"unknown configuration {', '.join(unknown)}; there are {', '.join(sorted(names))}")
    if not only:
        return [config for config in CONFIGS if config.always]
    return [config for config in CONFIGS if config.setting in only or config.method in only]


def missing(config: Config) -> str | None:
    """Why a configuration cannot be asked for here; None where it can."""
    if config.setting != TORCHAO or version_of(TORCHAO) != "none":
        return None
    return "missing: torchao is not installed"


def version_of(library: str) -> str:
    """The version of a library, or none."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "none"
