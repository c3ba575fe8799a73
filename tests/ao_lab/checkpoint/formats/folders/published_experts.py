"""Small folders as others publish mixtures of experts: gpt-oss in MXFP4, DeepSeek in FP8 with blocks of 128 x 128."""

import json

import torch
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion

from tests.support.models.expert_models import model_of

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
#: Layers that DeepSeek leaves as they are.
DENSE = ("lm_head", "embed_tokens", "norm", "layernorm", "mlp.gate.")


def write(folder, model, tensors, quantization):
    """config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {**model.config.to_dict(), "architectures": [type(model).__name__], "dtype": "bfloat16"}
    (folder / "config.json").write_text(
        json.dumps({**fields, "quantization_config": quantization}, default=str)
    )
    save_file(
        {name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )


def mxfp4_parts(weight):
    """Blocks and scales of experts (experts, in, out), as gpt-oss stores them: random codes would do as well."""
    w = weight.float().transpose(1, 2)
    groups = w.reshape(*w.shape[:-1], -1, 32)
    power = torch.floor(torch.log2(groups.abs().amax(-1))).clamp(min=-100) - 2
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = (groups / torch.exp2(power)[..., None]).unsqueeze(-1).sub(values).abs().argmin(-1).to(torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), (power + 127).to(torch.uint8)


def gpt_oss(folder):
    """gpt-oss: the experts in MXFP4, all else in bfloat16."""
    model = model_of("gpt_oss")
    tensors = dict(model.state_dict())
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = mxfp4_parts(tensors.pop(name))
    write(
        folder,
        model,
        tensors,
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
    )
    return model


def fp8_parts(weight, powers=False, block=128):
    """Codes and scales of a matrix, short last blocks included."""
    rows, columns = weight.shape
    grid = (-(-rows // block), -(-columns // block))
    padded = torch.zeros(grid[0] * block, grid[1] * block)
    padded[:rows, :columns] = weight.float()
    tiles = padded.reshape(grid[0], block, grid[1], block)
    scale = tiles.abs().amax((1, 3)).clamp(min=1e-4) / 448
    scale = torch.exp2(torch.ceil(torch.log2(scale))) if powers else scale
    codes = (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.reshape(padded.shape)[:rows, :columns].contiguous(), scale


def deepseek(folder, quantization=FP8, scales=torch.float32, name="deepseek_v3"):
    """DeepSeek-V3: linear layers and every expert's projections under the published names."""
    model = model_of(name)
    tensors = dict(revert_weight_conversion(model, model.state_dict()))
    for key in [key for key in tensors if key.endswith(".weight") and not any(part in key for part in DENSE)]:
        tensors[key], scale = fp8_parts(tensors[key], scales == torch.float8_e8m0fnu)
        tensors[f"{key}_scale_inv"] = scale.to(scales)
    write(folder, model, tensors, quantization)
    return model
