"""Folders that plain transformers dequantizes while it loads them: `dequantize` in the quantization_config of config.json.

`CompressedTensorsConfig` of transformers 5.23 takes this argument from the folder too, so that `from_pretrained(folder)` makes
dense weights of codes, zero points and scales as they are stored. Where it keeps codes until the first forward pass instead,
compressed-tensors 0.20 allocates packed zero points unpacked, which no file fits (llm-compressor's neither), and rounds float32
scales to the model's dtype. The tensors are the same in both; programs that keep codes, as vLLM does, do not look at the field.

It dequantizes all layers but experts by one group of `config_groups`, and quantizes no inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ao_lab.checkpoint.export.plain_reader import WAY_OUT, ZERO, Reading

FIELD = "dequantize"
TOLD = (
    "dequantize: config.json has transformers 5.23 make dense weights while it loads, because it would not load packed zero "
    "points, or would round float32 scales; CompressedTensorsConfig(dequantize=False) undoes that"
)


def with_dequantizing(
    config: Mapping[str, Any], readings: Mapping[str, Reading], experts: str
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The configuration of a folder, with the field where layers (but experts) want it, and what is to be known of that.

    `experts`: the target of a group for experts alone.
    ValueError that names a layer with packed zero points where the field would make another model of the others.
    """
    wanting = {name: reading for name, reading in readings.items() if reading.dequantize}
    if not wanting:
        return dict(config), ()
    reason = _obstacle([g for g in config["config_groups"].values() if g["targets"] != [experts]])
    if reason is None:
        return {**config, FIELD: True}, (TOLD,)
    zeros = [name for name, reading in wanting.items() if ZERO in reading.tensors]
    if zeros:
        raise ValueError(
            f"{', '.join(zeros[:3])}{' and others' if len(zeros) > 3 else ''}: transformers 5.23 reads packed zero points only "
            f"where it dequantizes the whole model while it loads, and {reason}; {WAY_OUT}"
        )
    return dict(config), ()


def _obstacle(groups: Sequence[Mapping[str, Any]]) -> str | None:
    """Why the layers of these groups would be others, dequantized while they are loaded; None where they are the same."""
    if any(group["input_activations"] is not None for group in groups):
        return "inputs of some layers would not be quantized then"
    kinds = [(group["weights"], group["format"]) for group in groups]
    if any(kind != kinds[0] for kind in kinds):
        return "all layers are read in the scheme of the first then, while this model has several"
    return None


__all__ = ["with_dequantizing"]
