"""`save_mlx`: a quantized language model as a folder that mlx-lm loads.

Affine integers of 2, 4 and 8 bits in groups of 32, 64 or 128: 32-bit words with the first code lowest, a scale and a bias for
each group, value = scale * q + bias with the codes counted from 0; so bias = -zero point * scale. MXFP4 and MXFP8 (E4M3) have
the same bytes there as here, and no bias.

Source: `mlx.core.quantize` and `mlx_lm.utils.load_model`, 0.32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ao_lab.checkpoint.configuration import configuration_of
from ao_lab.checkpoint.io.files import refuse_file, save_file, staged
from ao_lab.checkpoint.model_builder import CONFIG, QUANTIZATION
from ao_lab.checkpoint.save_checks import check_finished, check_quantized
from ao_lab.clients.integers import block_size, by_block, check_integers, nibbles, scales_of, signed_codes
from ao_lab.tensor.quantized_tensor import QuantizedTensor, SparseQuantizedTensor
from ao_lab.transforms.layers import check_model, is_untied
from ao_lab.transforms.low_rank import refuse_residuals
from reference import Quantized
from reference.quantize.quantize import unpacked

GROUPS = (128, 64, 32)
WAY_OUT = (
    "mlx holds integers of 2, 4 and 8 bits in groups of 32, 64 or 128, mxfp4 and mxfp8_e4m3, as weights alone"
)
#: Modes of formats with e8m0 scales, by the element.
MODES = {"float4_e2m1fn": "mxfp4", "float8_e4m3fn": "mxfp8"}


class MlxFolder(NamedTuple):
    """What `save_mlx` wrote: the folder, bytes of its weights, and how many layers have each mode and width."""

    path: Path
    bytes: int
    layers: dict[str, int]


def save_mlx(model: nn.Module, folder: str | Path) -> MlxFolder:
    """Save model.safetensors and config.json of a transformers model for mlx-lm; tokenizer files are not touched.

    model: linear layers (N, K) unquantized or quantized: integers of 1 to 8 bits with or without zero points, in blocks along K
    of a multiple of 32, or MXFP4 and MXFP8 E4M3. Scales and biases are float32. MX values are bitwise equal; integers are
    within two float32 roundings of `dequantize`, since mlx adds a bias instead of subtracting a zero point.

    TypeError for anything but a module; ValueError, before anything is written, for other weights, for a model in training and
    one without quantized weights, with what would work.
    """
    check_model(model)
    config = configuration_of(model)
    if not config:
        raise ValueError("save_mlx takes a model of transformers, whose configuration mlx-lm reads")
    refuse_file(Path(folder))
    check_finished(model)
    check_quantized(model, "mlx_lm.convert writes")
    refuse_residuals(model, "the format of mlx-lm")
    linear = {f"{name}.weight" for name, one in model.named_modules() if isinstance(one, nn.Linear)}
    tensors, modes = {}, {}
    tied = config.get("tie_word_embeddings") and not is_untied(model)
    for name, value in model.state_dict(keep_vars=True).items():
        if tied and name == "lm_head.weight":
            continue
        if not isinstance(value, QuantizedTensor):
            tensors[name] = value.detach().cpu().contiguous()
            continue
        path = name.removesuffix(".weight")
        try:
            if name not in linear:
                raise ValueError(f"quantized weights are written of nn.Linear alone; {WAY_OUT}")
            modes[path], parts = _written(value.detach())  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        tensors |= {f"{path}.{key}": part for key, part in parts.items()}
    return _save(Path(folder), config, tensors, modes)


def _save(
    folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], modes: dict[str, dict[str, Any]]
) -> MlxFolder:
    fields = {key: value for key, value in config.items() if key != QUANTIZATION}
    if modes:
        first = next(iter(modes.values()))
        fields["quantization"] = {**first, **{path: mode for path, mode in modes.items() if mode != first}}
    folder.mkdir(parents=True, exist_ok=True)
    with staged(folder) as place:
        save_file(tensors, place / "model.safetensors", metadata={"format": "mlx"})
        (place / CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    names = [f"{mode['mode']} {mode['bits']} bits g{mode['group_size']}" for mode in modes.values()]
    size = (folder / "model.safetensors").stat().st_size
    return MlxFolder(folder, size, {name: names.count(name) for name in sorted(set(names))})


def _written(weight: QuantizedTensor) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The mode of a weight, and its tensors."""
    recipe, weight = weight.recipe, weight.plain
    if isinstance(weight, SparseQuantizedTensor) or weight.meta.transposed or weight.block_axis != -1:
        raise ValueError(f"{weight!r}: only plain matrices with blocks along K are written; {WAY_OUT}")
    if recipe.activation is not None or recipe.rotation:
        raise ValueError(f"{recipe} quantizes or rotates inputs; {WAY_OUT}")
    q = unpacked(weight.cpu().quantized)  # type: ignore[attr-defined]
    mode = MODES.get(q.scheme.element)
    if mode is not None and (q.scheme.scale.storage, q.scheme.scale.block) == ("float8_e8m0fnu", 32):
        bits = q.scheme.format.bits
        codes = nibbles(q.codes) if bits == 4 else q.codes
        return {"group_size": 32, "bits": bits, "mode": mode}, {
            "weight": _words(codes),
            "scales": q.scale.contiguous(),
        }
    return _affine(q)


def _affine(q: Quantized) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    check_integers(q, WAY_OUT)
    size, width = block_size(q, GROUPS, "mlx"), q.scheme.format.bits
    bits = 2 if width <= 2 else 4 if width <= 4 else 8
    middle = 1 << (bits - 1)
    codes, scale = signed_codes(q) + middle, scales_of(q, size)
    steps = torch.zeros_like(scale) if q.zero is None else by_block(q, q.zero.to(torch.int16), size).float()
    packed = codes.to(torch.uint8)
    if bits == 2:
        packed = packed[:, 0::2] | (packed[:, 1::2] << 2)
    packed = packed if bits == 8 else nibbles(packed)
    return {"group_size": size, "bits": bits, "mode": "affine"}, {
        "weight": _words(packed), "scales": scale, "biases": -(steps + middle) * scale,
    }  # fmt: skip


def _words(data: torch.Tensor) -> torch.Tensor:
    """Bytes of rows as 32-bit words, the first lowest."""
    return data.contiguous().view(torch.uint32)


__all__ = ["MlxFolder", "save_mlx"]
