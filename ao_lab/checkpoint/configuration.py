"""config.json of a folder of quantized weights: what it says of the model, of the quantization, and of the files.

Of our own layout it says quant_method "ao_lab", and "transformers_weights", the field that names the file of weights, holds a
sentence, which transformers refuses and shows; after `import ao_lab` our quantizer puts the file's name there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ao_lab.checkpoint.io.shards import COMMON, OWN, OWN_INDEX, OWN_SINGLE
from ao_lab.checkpoint.io.strict_json import shown
from ao_lab.checkpoint.model_builder import CONFIG, NAMED_WEIGHTS, QUANTIZATION, read_config
from ao_lab.transforms.layers import is_untied

METHOD = "ao_lab"
#: What config.json says of the quantization, beside "weights", the name of the file or the index.
OURS = {"quant_method": METHOD, "version": 1}
#: What transformers shows where ao_lab has not been imported.
REFUSAL = (
    "these weights are quantized in the layout of ao_lab; run `import ao_lab` before from_pretrained, or load them with "
    "ao_lab.load_pretrained"
)


def stem_of(quantization: Mapping[str, Any]) -> str:
    """How the files of weights are called under a description of the quantization."""
    return OWN if quantization.get("quant_method") == METHOD else COMMON


def whole_configuration(
    config: Mapping[str, Any], quantization: Mapping[str, Any], files: int
) -> dict[str, Any]:
    """config.json of a model with this configuration, its weights quantized so and in so many files."""
    result = {name: value for name, value in config.items() if name not in (NAMED_WEIGHTS, QUANTIZATION)}
    if stem_of(quantization) == COMMON:
        return {**result, QUANTIZATION: dict(quantization)}
    # Other programs than transformers have no use for the sentence.
    refusal = {NAMED_WEIGHTS: REFUSAL} if "model_type" in result else {}
    weights = OWN_SINGLE if files == 1 else OWN_INDEX
    return {**result, **refusal, QUANTIZATION: {**quantization, "weights": weights}}


def configuration_of(model: nn.Module) -> dict[str, Any]:
    """The configuration of a transformers model, as its save_pretrained would write it; {} for others.

    That is what differs from the class's defaults, without the folder that the model was loaded from, which is nobody else's.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return {}
    result: dict[str, Any] = getattr(config, "to_diff_dict", config.to_dict)()
    # The second is the title in a GGUF file that transformers read: a name that nobody can load.
    for name in ("_name_or_path", "_model_name_or_path"):
        result.pop(name, None)
    result["architectures"] = [type(model).__name__]
    result["dtype"] = str(model.dtype).removeprefix("torch.")
    return {**result, "tie_word_embeddings": False} if is_untied(model) else result


def file_of_weights(quantization: Mapping[str, Any], where: str) -> str | None:
    """The file that a description names; None in folders of earlier versions, which have model.safetensors.

    ValueError for another version of the layout, and for another file.
    """
    if quantization.get("version") != OURS["version"]:
        raise ValueError(
            f"{where}: version is {OURS['version']}, got {shown(quantization.get('version'))}; install another ao_lab"
        )
    name = quantization.get("weights")
    if name not in (None, OWN_SINGLE, OWN_INDEX):
        raise ValueError(
            f"{where}: weights is {OWN_SINGLE} or {OWN_INDEX}, got {shown(name)}; fetch it again"
        )
    return name


def saved_dtype(folder: Path) -> str | None:
    """The dtype in which config.json says that a model was; None where it says none."""
    if not (folder / CONFIG).is_file():
        return None
    fields = read_config(folder)
    name = fields.get("dtype", fields.get("torch_dtype"))
    return name if isinstance(name, str) else None


__all__ = [
    "METHOD",
    "OURS",
    "REFUSAL",
    "configuration_of",
    "file_of_weights",
    "saved_dtype",
    "stem_of",
    "whole_configuration",
]
