"""ao_lab: a laboratory for low-precision deep learning.

Every number format and every algorithm has a bit-exact specification in `reference`, for NumPy, JAX and torch alike. This
package is what users import: the names of the specification, `quantize_` with its configurations and saved models for torch,
`ao_lab.jax` with kernels for JAX arrays on GPUs, `ao_lab.testing` with Hypothesis strategies for the inputs that break
kernels, and the command line `ao-lab`.

Nothing is imported before it is used: `import ao_lab` takes milliseconds and needs neither torch nor JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ao_lab import neighbours as _neighbours
from ao_lab.checkpoint import hf_hook

# Said here, once and at once: a user's file in the place of one of our packages would fail strangely later.
_neighbours.check(*_neighbours.PACKAGES)

if TYPE_CHECKING:
    from ao_lab import jax as jax
    from ao_lab import testing as testing
    from ao_lab.calibration import calibrate as calibrate
    from ao_lab.checkpoint.hf_config import HfConfig as HfConfig
    from ao_lab.checkpoints import Saved as Saved
    from ao_lab.checkpoints import load_pretrained as load_pretrained
    from ao_lab.checkpoints import save_pretrained as save_pretrained
    from ao_lab.compiled_products import compile_options as compile_options
    from ao_lab.configs import SchemeConfig as SchemeConfig
    from ao_lab.configs_float import (
        Float8DynamicActivationFloat8WeightConfig as Float8DynamicActivationFloat8WeightConfig,
    )
    from ao_lab.configs_float import (
        Float8DynamicActivationInt4WeightConfig as Float8DynamicActivationInt4WeightConfig,
    )
    from ao_lab.configs_float import Float8WeightOnlyConfig as Float8WeightOnlyConfig
    from ao_lab.configs_float import MXDynamicActivationMXWeightConfig as MXDynamicActivationMXWeightConfig
    from ao_lab.configs_float import MXWeightOnlyConfig as MXWeightOnlyConfig
    from ao_lab.configs_float import NF4WeightOnlyConfig as NF4WeightOnlyConfig
    from ao_lab.configs_float import (
        NVFP4DynamicActivationNVFP4WeightConfig as NVFP4DynamicActivationNVFP4WeightConfig,
    )
    from ao_lab.configs_float import NVFP4WeightOnlyConfig as NVFP4WeightOnlyConfig
    from ao_lab.configs_integer import Int4WeightOnlyConfig as Int4WeightOnlyConfig
    from ao_lab.configs_integer import (
        Int8DynamicActivationInt8WeightConfig as Int8DynamicActivationInt8WeightConfig,
    )
    from ao_lab.configs_integer import (
        Int8DynamicActivationIntxWeightConfig as Int8DynamicActivationIntxWeightConfig,
    )
    from ao_lab.configs_integer import Int8WeightOnlyConfig as Int8WeightOnlyConfig
    from ao_lab.configs_integer import IntxWeightOnlyConfig as IntxWeightOnlyConfig
    from ao_lab.configs_low_bit import LowBitWeightOnlyConfig as LowBitWeightOnlyConfig
    from ao_lab.configs_static import (
        Float8StaticActivationFloat8WeightConfig as Float8StaticActivationFloat8WeightConfig,
    )
    from ao_lab.configs_static import (
        Int8StaticActivationInt8WeightConfig as Int8StaticActivationInt8WeightConfig,
    )
    from ao_lab.fqn import FqnToConfig as FqnToConfig
    from ao_lab.granularity import MappingType as MappingType
    from ao_lab.granularity import PerAxis as PerAxis
    from ao_lab.granularity import PerBlock as PerBlock
    from ao_lab.granularity import PerGroup as PerGroup
    from ao_lab.granularity import PerRow as PerRow
    from ao_lab.granularity import PerTensor as PerTensor
    from ao_lab.granularity import PerToken as PerToken
    from ao_lab.layers import linear_and_experts as linear_and_experts
    from ao_lab.model_card import write_card as write_card
    from ao_lab.native import NativeParts as NativeParts
    from ao_lab.native import from_native as from_native
    from ao_lab.native import native_dtype as native_dtype
    from ao_lab.native import to_native as to_native
    from ao_lab.observers import AbsMax as AbsMax
    from ao_lab.observers import MinMax as MinMax
    from ao_lab.observers import MovingAverage as MovingAverage
    from ao_lab.observers import Percentile as Percentile
    from ao_lab.qat import FakeQuantizeConfig as FakeQuantizeConfig
    from ao_lab.qat import Float8FakeQuantizeConfig as Float8FakeQuantizeConfig
    from ao_lab.qat import FromIntXQuantizationAwareTrainingConfig as FromIntXQuantizationAwareTrainingConfig
    from ao_lab.qat import IntxFakeQuantizeConfig as IntxFakeQuantizeConfig
    from ao_lab.qat import IntXQuantizationAwareTrainingConfig as IntXQuantizationAwareTrainingConfig
    from ao_lab.qat import QATConfig as QATConfig
    from ao_lab.qat import advance_qat as advance_qat
    from ao_lab.qat_lora import LoRA as LoRA
    from ao_lab.qat_lora import lora_state_dict as lora_state_dict
    from ao_lab.qat_presets import llama32_configs as llama32_configs
    from ao_lab.qat_presets import llama32_qat as llama32_qat
    from ao_lab.quantize_model import quantize_ as quantize_
    from ao_lab.recipes import Recipe as Recipe
    from ao_lab.report import Layer as Layer
    from ao_lab.report import Report as Report
    from ao_lab.report import explain as explain
    from ao_lab.sizes import LayerSize as LayerSize
    from ao_lab.sizes import ModelSize as ModelSize
    from ao_lab.sizes import Size as Size
    from ao_lab.sizes import model_size as model_size
    from ao_lab.sizes import weight_size as weight_size
    from ao_lab.streaming import quantize_pretrained as quantize_pretrained
    from ao_lab.tensor import QuantizedTensor as QuantizedTensor
    from ao_lab.tensor import quantized as quantized
    from ao_lab.torchao_defaults import as_torchao as as_torchao
    from reference import FORMATS as FORMATS
    from reference import SCHEMES as SCHEMES
    from reference import choose_scales as choose_scales
    from reference import compress as compress
    from reference import decode as decode
    from reference import decompress as decompress
    from reference import dequantize as dequantize
    from reference import encode as encode
    from reference import fake_quantize as fake_quantize
    from reference import fake_quantize_vjp as fake_quantize_vjp
    from reference import matmul as matmul
    from reference import matmul_error_bound as matmul_error_bound
    from reference import pack as pack
    from reference import prune as prune
    from reference import quantize as quantize
    from reference import quantize_both as quantize_both
    from reference import rms_norm as rms_norm
    from reference import rms_norm_quantize as rms_norm_quantize
    from reference import swiglu as swiglu
    from reference import swiglu_quantize as swiglu_quantize
    from reference import tile_scales as tile_scales
    from reference import unpack as unpack
    from reference import untile_scales as untile_scales

__version__ = "0.1.0"

#: What is public: submodules with the library that each needs, names of the specification, and names of other modules, which
#: import torch. Type checkers read the imports above instead; a test holds the two together.
SUBMODULES = {"jax": "jax", "testing": "hypothesis"}
SPECIFIED = (
    "FORMATS",
    "SCHEMES",
    "choose_scales",
    "compress",
    "decode",
    "decompress",
    "dequantize",
    "encode",
    "fake_quantize",
    "fake_quantize_vjp",
    "matmul",
    "matmul_error_bound",
    "pack",
    "prune",
    "quantize",
    "quantize_both",
    "rms_norm",
    "rms_norm_quantize",
    "swiglu",
    "swiglu_quantize",
    "tile_scales",
    "unpack",
    "untile_scales",
)
NAMES = {
    "calibration": ("calibrate",),
    "checkpoint.hf_config": ("HfConfig",),
    "checkpoints": ("Saved", "load_pretrained", "save_pretrained"),
    "compiled_products": ("compile_options",),
    "configs": ("SchemeConfig",),
    "configs_float": (
        "Float8DynamicActivationFloat8WeightConfig",
        "Float8DynamicActivationInt4WeightConfig",
        "Float8WeightOnlyConfig",
        "MXDynamicActivationMXWeightConfig",
        "MXWeightOnlyConfig",
        "NF4WeightOnlyConfig",
        "NVFP4DynamicActivationNVFP4WeightConfig",
        "NVFP4WeightOnlyConfig",
    ),
    "configs_integer": (
        "Int4WeightOnlyConfig",
        "Int8DynamicActivationInt8WeightConfig",
        "Int8DynamicActivationIntxWeightConfig",
        "Int8WeightOnlyConfig",
        "IntxWeightOnlyConfig",
    ),
    "configs_low_bit": ("LowBitWeightOnlyConfig",),
    "configs_static": (
        "Float8StaticActivationFloat8WeightConfig",
        "Int8StaticActivationInt8WeightConfig",
    ),
    "fqn": ("FqnToConfig",),
    "granularity": (
        "MappingType",
        "PerAxis",
        "PerBlock",
        "PerGroup",
        "PerRow",
        "PerTensor",
        "PerToken",
    ),
    "layers": ("linear_and_experts",),
    "model_card": ("write_card",),
    "native": ("NativeParts", "from_native", "native_dtype", "to_native"),
    "observers": ("AbsMax", "MinMax", "MovingAverage", "Percentile"),
    "qat": (
        "FakeQuantizeConfig",
        "Float8FakeQuantizeConfig",
        "FromIntXQuantizationAwareTrainingConfig",
        "IntXQuantizationAwareTrainingConfig",
        "IntxFakeQuantizeConfig",
        "QATConfig",
        "advance_qat",
    ),
    "qat_lora": ("LoRA", "lora_state_dict"),
    "qat_presets": ("llama32_configs", "llama32_qat"),
    "quantize_model": ("quantize_",),
    "recipes": ("Recipe",),
    "report": (
        "Layer",
        "Report",
        "explain",
    ),
    "sizes": ("LayerSize", "ModelSize", "Size", "model_size", "weight_size"),
    "streaming": ("quantize_pretrained",),
    "tensor": (
        "QuantizedTensor",
        "quantized",
    ),
    "torchao_defaults": ("as_torchao",),
}
HOMES = {name: module for module, names in NAMES.items() for name in names}
#: What `from ao_lab import *` brings: no submodules, which need libraries of extras, and `jax` would hide the library itself.
__all__ = sorted([*SPECIFIED, *HOMES, "__version__"])


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name in SUBMODULES:
        from ao_lab.installation import needed

        needed(SUBMODULES[name])  # says how to install it where it is missing
        return importlib.import_module(f"ao_lab.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'ao_lab' has no attribute {name!r}")
    if name in HOMES:
        value = getattr(importlib.import_module(f"ao_lab.{HOMES[name]}"), name)
        globals()[name] = value
        return value
    from ao_lab.dispatch import dispatched

    value = getattr(importlib.import_module("reference"), name)
    value = dispatched(name) if callable(value) else value
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, imported or not."""
    return sorted([*__all__, *SUBMODULES])


# Last: where transformers has been imported before, this imports modules that ask for the names above.
hf_hook.install()
