"""Modules that were renamed, so that pickles and `torch.save` files of before still load.

A pickle names the module in which each class stood. Modules that are gone lead to those that hold their classes now; those
whose name is a package now are handled by the package itself (`ao_lab.tensor`, `ao_lab.qat`, `ao_lab.calibration`).
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Where the names of a module are now; those of several modules are put together.
RENAMED: dict[str, str | tuple[str, ...]] = {
    "checkpoint.conversion": "checkpoint.experts.conversion",
    "checkpoint.experts": "checkpoint.experts.export",
    "checkpoint.formats.compressed_tensors_groups": "checkpoint.formats.compressed_tensors.groups",
    "checkpoint.formats.compressed_tensors_weights": "checkpoint.formats.compressed_tensors.weights",
    "checkpoint.hf_classes": "checkpoint.model_classes",
    "checkpoint.hf_config": "checkpoint.transformers.config",
    "checkpoint.hf_hook": "install.transformers_hook",
    "checkpoint.hf_job": "checkpoint.transformers.job",
    "checkpoint.hf_quantizer": "checkpoint.transformers.quantizer",
    "checkpoint.hf_stored": "checkpoint.transformers.stored",
    "checkpoint.patterns": "checkpoint.io.patterns",
    "checkpoint.plain_reader": "checkpoint.export.plain_reader",
    "checkpoint.token_inputs": "checkpoint.export.input_rank",
    "checkpoint.vllm_rules": "checkpoint.export.vllm_rules",
    "checkpoint_files": "checkpoint.io.shards",
    "checkpoint_models": "checkpoint.model_builder",
    "checkpoint_records": "checkpoint.records",
    "checkpoints": "checkpoint.api",
    "chunked": "tensor.chunked",
    "cli_layout": "cli.layout",
    "cli_output": "cli.terminal.output",
    "cli_quantize": "cli.quantize",
    "cli_stop": "cli.terminal.interrupt",
    "compiled_products": "compile.fused_linears",
    "configs": "config.base",
    "configs_float": ("config.float8", "config.mx", "config.low_bit"),
    "configs_integer": "config.integer",
    "configs_low_bit": "config.low_bit",
    "configs_static": "calibration.static",
    "doctor": "cli.doctor.checks",
    "evaluation": "eval.perplexity",
    "exports": "checkpoint.export.compressed_tensors",
    "fqn": "config.fqn",
    "granularity": "config.granularity",
    "installation": "install.extras",
    "model_card": "checkpoint.model_card",
    "native": "interop.torch_dtypes",
    "observers": "calibration.observers",
    "plan": "quantization.plan",
    "products": "gemm.select",
    "progress": "cli.terminal.progress",
    "qat_function": "qat.autograd",
    "qat_layers": "qat.layers",
    "qat_lora": "qat.lora.layer",
    "qat_lora_function": "qat.lora.autograd",
    "qat_rule": "qat.forward",
    "recipes": "config.recipe",
    "report": "quantization.report",
    "safetensors_header": "checkpoint.io.safetensors_header",
    "samples": "testing.samples",
    "sizes": "checkpoint.size",
    "streaming": "checkpoint.streaming.api",
    "tensor_bundle": "tensor.flat_concat",
    "tensor_meta": "tensor.metadata",
    "texts": "eval.texts",
    "torchao_tensors": "checkpoint.formats.torchao.tensors",
}


class Renamed:
    """Finds renamed modules after everything else has failed to.

    It has not the abstract bases of importlib.abc: that module takes longer to import than all of ao_lab.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A specification that leads to the module that holds the classes now."""
        package, _, name = fullname.partition(".")
        loader: Any = self
        return ModuleSpec(fullname, loader) if package == "ao_lab" and name in RENAMED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty module, so that the one that holds the classes keeps its own name."""
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Fill it with the names of the module that holds the classes now."""
        homes = RENAMED[module.__name__.partition(".")[2]]
        for home in (homes,) if isinstance(homes, str) else homes:
            names = vars(importlib.import_module(f"ao_lab.{home}"))
            vars(module).update({name: value for name, value in names.items() if not name.startswith("__")})


def install() -> None:
    """Take part in imports, once, behind every other finder."""
    if not any(isinstance(finder, Renamed) for finder in sys.meta_path):
        finder: Any = Renamed()
        sys.meta_path.append(finder)


__all__ = ["RENAMED", "Renamed", "install"]
