"""Makes the folders of tests/checkpoint/formats/data/modelopt with nvidia-modelopt 0.47 itself, which tests do not install.

    python -m tests.ao_lab.checkpoint.formats.folders.modelopt_library     (beside nvidia-modelopt==0.47.0 and transformers
    5.23; on a CPU)

Each is what `export_hf_checkpoint` writes of a small Llama, and in expected/ what the library's tensor classes dequantize.
"""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.ao_lab.checkpoint.formats.folders.compressed_folders import tiny_llama

DATA = Path(__file__).parents[1] / "data" / "modelopt"


def dequantized(tensors, name):
    """A weight by the library's own class."""
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor

    codes, scale = tensors[name], tensors[f"{name}_scale"]
    if f"{name}_scale_2" not in tensors:
        return FP8QTensor(codes.shape, torch.bfloat16, codes).dequantize(torch.bfloat16, scale=scale)
    shape = torch.Size([codes.shape[0], codes.shape[1] * 2])
    made = NVFP4QTensor(shape, torch.bfloat16, codes)
    outer = tensors[f"{name}_scale_2"]
    return made.dequantize(torch.bfloat16, scale=scale, double_scale=outer, block_sizes={-1: 16})


def write(kind, config):
    """One folder."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    path = DATA / kind
    shutil.rmtree(path, ignore_errors=True)
    model = tiny_llama(hidden=64)
    model.config.architectures = ["LlamaForCausalLM"]
    tokens = torch.arange(12).reshape(2, 6)
    model = mtq.quantize(model, getattr(mtq, config), lambda model: model(tokens))
    with torch.inference_mode():
        export_hf_checkpoint(model, export_dir=str(path))
    tensors = load_file(path / "model.safetensors")
    names = [name.removesuffix("_scale") for name in tensors if name.endswith("weight_scale")]
    (path / "expected").mkdir()
    save_file(
        {name: dequantized(tensors, name).contiguous() for name in names},
        path / "expected" / "dense.safetensors",
    )


if __name__ == "__main__":
    write("fp8", "FP8_DEFAULT_CFG")
    write("nvfp4", "NVFP4_DEFAULT_CFG")
