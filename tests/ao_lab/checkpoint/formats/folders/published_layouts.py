"""How AutoGPTQ, AutoAWQ and bitsandbytes pack weights, written down again from their descriptions, one code at a time.

Codes and zero points are unsigned NumPy integers (outputs, inputs) and (outputs, groups); scales are float16 tensors (outputs,
groups). The functions return the tensors of one layer by name, as the modules `ao_lab.checkpoint.formats` describe them.
"""

import json

import numpy as np
import torch
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion

from tests.support.models.expert_models import model_of

WORD = 32
#: AutoAWQ's order: nibble i of a word holds output ORDER[i] of its eight.
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(codes, bits):
    """int32 (rows, words) of codes (rows, n): each row is one number, its first code lowest, in words of 32 bits."""
    count = -(-codes.shape[1] * bits // WORD)
    made = np.zeros((len(codes), count), np.uint32)
    for row, values in enumerate(codes.tolist()):
        number = sum(code << (bits * place) for place, code in enumerate(values))
        made[row] = [number >> (WORD * word) & 0xFFFFFFFF for word in range(count)]
    return torch.from_numpy(made.view(np.int32))


def gptq_layer(codes, zeros, scales, bits, *, version=2, index=None):
    """qweight, qzeros, scales and g_idx; version 1 keeps zero points less one (none may be 0)."""
    group = -(-codes.shape[1] // zeros.shape[1])
    index = np.arange(codes.shape[1]) // group if index is None else index
    return {
        "qweight": words(codes, bits).t().contiguous(),
        "qzeros": words(zeros.T - (version == 1), bits),
        "scales": scales.t().contiguous(),
        "g_idx": torch.from_numpy(np.asarray(index, np.int32)),
    }


def interleaved(codes):
    """Codes (rows, 8 n) in the order of AutoAWQ's words."""
    return codes.reshape(len(codes), -1, 8)[..., list(ORDER)].reshape(codes.shape)


def awq_layer(codes, zeros, scales):
    """qweight, qzeros and scales of version gemm."""
    return {
        "qweight": words(interleaved(codes.T), 4),
        "qzeros": words(interleaved(zeros.T), 4),
        "scales": scales.t().contiguous(),
    }


def bitsandbytes_weight(codes, absmax, table, *, kind="nf4", size=64, dtype="bfloat16", nested=None):
    """The tensors of a weight by the ends of their names; nested: (codebook, maxima, block, offset) of absmax as codes."""
    flat = codes.reshape(-1)
    flat = np.concatenate([flat, np.zeros(len(flat) % 2, flat.dtype)])
    state = {"quant_type": kind, "blocksize": size, "dtype": dtype, "shape": list(codes.shape)}
    made = {
        "": torch.from_numpy((flat[0::2] * 16 + flat[1::2]).astype(np.uint8)[:, None]),
        ".absmax": absmax,
        ".quant_map": table,
    }
    if nested is not None:
        made |= {".nested_quant_map": nested[0], ".nested_absmax": nested[1]}
        state |= {"nested_blocksize": nested[2], "nested_offset": nested[3], "nested_dtype": "float32"}
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return {**made, f".quant_state.bitsandbytes__{kind}": text}


# Small folders as others publish mixtures of experts: gpt-oss in MXFP4, DeepSeek in FP8 with blocks of 128 x 128.


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
