"""Small folders as NVIDIA's Model Optimizer exports them, by its published formulas; run as a script it writes one.

Read off nvidia-modelopt 0.47: torch/export/unified_export_hf.py (names of tensors), quant_utils.py (`to_quantized_weight`,
`process_layer_quant_config`), convert_hf_config.py (config.json), torch/quantization/qtensor/nvfp4_tensor.py and fp8_tensor.py
(scales, codes, `dequantize`). Compared with the library's own classes on random tensors: the same bits.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
#: The library has no -0.
VALUES = torch.cat([E2M1, -E2M1]) + 0.0


def nvfp4(weight, group=16):
    """(tensors, dense weight): codes in pairs, e4m3 scales of groups, one float32 scale over them."""
    rows, columns = weight.shape
    wide = weight.float()
    outer = wide.abs().amax() / (6.0 * 448.0)
    scale = wide.reshape(rows, -1, group).abs().amax(-1) / (6.0 * outer)
    scale = torch.where(scale == 0, 1.0, scale).clamp(2.0**-9, 448.0).to(torch.float8_e4m3fn)
    unit = (scale.float() * outer).unsqueeze(-1)
    scaled = (wide.reshape(rows, -1, group) / unit).reshape(rows, columns)
    # Nearest value, ties to the even code.
    place = (E2M1[1:] + E2M1[:-1]) / 2
    low, high = torch.bucketize(scaled.abs(), place), torch.bucketize(scaled.abs(), place, right=True)
    codes = torch.where(low % 2 == 0, low, high).to(torch.uint8) + (scaled < 0).to(torch.uint8) * 8
    packed = codes[:, 1::2] << 4 | codes[:, ::2]
    dense = (VALUES[codes.long()].reshape(rows, -1, group) * unit).reshape(rows, columns).to(weight.dtype)
    return {"weight": packed, "weight_scale": scale, "weight_scale_2": outer}, dense


def fp8(weight, block=None):
    """(tensors, dense weight): one scale for the weight ("tensor"), for each row, or for each block."""
    rows, columns = weight.shape
    wide = weight.float()
    if isinstance(block, tuple):
        r, c = block
        padded = torch.nn.functional.pad(wide, (0, -columns % c, 0, -rows % r))
        scale = padded.unflatten(1, (-1, c)).unflatten(0, (-1, r)).abs().amax((1, 3)) / 448.0
        full = scale.repeat_interleave(r, 0).repeat_interleave(c, 1)[:rows, :columns]
        scale = scale[:, None, :, None]
    else:
        scale = (wide.abs().amax(-1) if block == -1 else wide.abs().amax()) / 448.0
        full = scale[:, None] if block == -1 else scale
    codes = (wide / full).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.to(weight.dtype) * full.to(weight.dtype)


#: How a weight is made, the scales of its inputs, and group_size, by quant_algo.
ALGORITHMS = {
    "FP8": (fp8, {"input_scale": torch.tensor(0.0173)}),
    "FP8_PER_CHANNEL_PER_TOKEN": (lambda w: fp8(w, -1), {}),
    "FP8_PB_WO": (lambda w: fp8(w, (128, 128)), {}),
    "NVFP4": (nvfp4, {"input_scale": torch.tensor(0.0021)}),
    "W4A16_NVFP4": (nvfp4, {}),
}


def export(model, path, choose, *, style="config", cache=False, group=16):
    """Save a model, each linear layer by the quant_algo that `choose` names (None: dense); the dense weights by name.

    style: "config" puts the description into config.json, as releases since 0.29 do, "file" into hf_quant_config.json alone.
    """
    from tests.ao_lab.checkpoint.formats.folders.compressed_folders import edit_config

    tensors, dense, layers = dict(model.state_dict()), {}, {}
    for name, module in model.named_modules():
        algorithm = choose(name) if isinstance(module, torch.nn.Linear) else None
        if algorithm is None:
            continue
        make, inputs = ALGORITHMS[algorithm]
        size = {"group": group} if make is nvfp4 else {}
        parts, dense[f"{name}.weight"] = make(module.weight.detach(), **size)
        tensors.update(
            {f"{name}.{key}": value.clone().contiguous() for key, value in {**parts, **inputs}.items()}
        )
        layers[name] = {"quant_algo": algorithm, **({"group_size": group} if make is nvfp4 else {})}
        if cache and name.endswith(("k_proj", "v_proj")):
            tensors[f"{name}.{name[-6]}_scale"] = torch.tensor(0.5)
    model.save_pretrained(path)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    kinds = {json.dumps(layer) for layer in layers.values()}
    one = (
        json.loads(kinds.pop())
        if len(kinds) == 1
        else {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    )
    details = {
        **one,
        "kv_cache_quant_algo": "FP8" if cache else None,
        "exclude_modules": ["lm_head", "model.layers.9*"],
    }
    producer = {"name": "modelopt", "version": "0.47.0"}
    (path / "hf_quant_config.json").write_text(json.dumps({"producer": producer, "quantization": details}))
    if style == "config":
        one = {"weights": {"type": "float", "group_size": group}, "targets": ["Linear"]}
        groups = {"group_0": one} if "quantized_layers" not in details else {}
        kept = {key: details[key] for key in ("quant_algo", "quantized_layers") if key in details}
        described = {
            **kept,
            "config_groups": groups,
            "ignore": ["lm_head"],
            "producer": producer,
            "quant_method": "modelopt",
        }
        edit_config(path, lambda _: described)
    return dense


if __name__ == "__main__":
    from tests.ao_lab.checkpoint.formats.folders.compressed_folders import tiny_llama

    export(tiny_llama(), Path(sys.argv[1]), lambda name: None if name == "lm_head" else sys.argv[2])
