"""Makes `data/*.safetensors`: small layers packed by the libraries themselves, and what these dequantize them to.

    python tests/ao_lab/checkpoint/formats/folders/make_library_weights.py PATH [PATH ...]

PATH are folders of which each holds an unpacked release: auto_gptq 0.7.1 (wheel), gptqmodel 7.7.0 and autoawq 0.2.9 (source),
bitsandbytes 0.50.2 (wheel). Only their packing modules run, on a CPU: the packages' own __init__ is passed over, and libraries
that these modules import but do not compute with (ABSENT) are stood in for. Tensors are named CASE|NAME; the dense weight that
the library makes is CASE|expected; the file's metadata hold quantization_config of each case as JSON, and VERSIONS.
"""

import importlib
import importlib.abc
import importlib.machinery
import json
import sys
import types
from pathlib import Path
from unittest.mock import MagicMock

import torch
from safetensors.torch import save_file

ABSENT = (
    "accelerate", "pcre", "logbar", "device_smi", "threadpoolctl", "tokenicer", "defuser", "datasets", "dill",
)  # fmt: skip
VERSIONS = {
    "gptq": "auto_gptq 0.7.1, gptqmodel 7.7.0",
    "awq": "autoawq 0.2.9",
    "bitsandbytes": "bitsandbytes 0.50.2",
}
INPUTS, OUTPUTS, GROUP = 64, 32, 32
BITS = (2, 3, 4, 8)


class Absent(types.ModuleType):
    """A module whose every name is a mock."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what is in ABSENT."""

    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Absent(spec.name)

    def exec_module(self, module):
        pass


def bare(name, paths, **names):
    """A package whose __init__ does not run."""
    found = [path / name.replace(".", "/") for path in paths]
    made = types.ModuleType(name)
    made.__path__ = [str(path) for path in found if path.is_dir()]
    made.__dict__.update(names)
    sys.modules[name] = made


def library(name):
    return importlib.import_module(name)


def grid(bits, inputs=INPUTS, group=GROUP, symmetric=False, seed=0):
    """A layer whose weight lies on a grid of unsigned codes, with its scales and zero points (outputs, groups)."""
    torch.manual_seed(seed)
    groups = -(-inputs // group)
    codes = torch.randint(0, 1 << bits, (OUTPUTS, inputs))
    # AutoGPTQ writes zero points of 0 wrongly, so they begin at 1; `zeros_too` of GPTQModel has them.
    zeros = torch.randint(1, 1 << bits, (OUTPUTS, groups)).float()
    zeros = torch.full_like(zeros, 1 << (bits - 1)) if symmetric else zeros
    scales = (torch.rand(OUTPUTS, groups) * 0.01 + 0.001).half().float()
    return codes, zeros, scales, torch.arange(inputs) // group


def dense(codes, zeros, scales, index):
    layer = torch.nn.Linear(codes.shape[1], OUTPUTS, bias=False)
    layer.weight.data = scales[:, index] * (codes - zeros[:, index])
    return layer


def autogptq_cases():
    linear = library("auto_gptq.nn_modules.qlinear.qlinear_cuda_old").QuantLinear
    for bits in BITS:
        for symmetric in (True, False):
            codes, zeros, scales, index = grid(bits, symmetric=symmetric, seed=bits)
            made = linear(bits, GROUP, INPUTS, OUTPUTS, False, weight_dtype=torch.float16)
            made.pack(dense(codes, zeros, scales, index), scales, zeros, index.to(torch.int32))
            made.scales = made.scales.half()
            config = {"bits": bits, "group_size": GROUP, "sym": symmetric, "desc_act": False}
            expected = made(torch.eye(INPUTS, dtype=torch.float16)).t()
            yield (
                f"autogptq_{bits}_{'symmetric' if symmetric else 'asymmetric'}",
                config,
                made.state_dict(),
                expected,
            )


def gptqmodel_case(name, bits, inputs=INPUTS, group=GROUP, symmetric=False, version=2, order=None):
    module = library("gptqmodel.nn_modules.qlinear.torch")
    convert = library("gptqmodel.utils.model")
    settings = library("gptqmodel.quantization").QuantizeConfig(bits=bits)
    length = inputs if group == -1 else group
    codes, zeros, scales, index = grid(bits, inputs, length, symmetric, seed=100 + bits)
    zeros[0, 0] = zeros[0, 0] if symmetric else 0
    index = index if order is None else index[order(inputs)]
    made = module.TorchLinear(
        bits=bits, group_size=group, sym=symmetric, desc_act=order is not None, in_features=inputs,
        out_features=OUTPUTS, bias=False,
    )  # fmt: skip
    made.pack_original(dense(codes, zeros, scales, index), scales, zeros, index.to(torch.int32))
    if version == 1:
        convert.convert_gptq_v2_to_v1_format_module(made, settings)
    state = {key: part.clone() for key, part in made.state_dict().items()}
    if version == 1:
        convert.convert_gptq_v1_to_v2_format_module(made, bits=bits, pack_dtype=torch.int32)
    config = {
        "bits": bits, "group_size": group, "sym": symmetric, "desc_act": order is not None,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2", "meta": {"quantizer": ["gptqmodel:7.7.0"]},
    }  # fmt: skip
    made._init_wf_unsqueeze_buffers()
    return name, config, state, made.eval().dequantize_weight().t()


def gptqmodel_cases():
    for bits in BITS:
        for version in (1, 2):
            yield gptqmodel_case(f"gptqmodel_{bits}_v{version}", bits, version=version)
    yield gptqmodel_case("gptqmodel_4_whole", 4, group=-1, symmetric=True, version=1)
    yield gptqmodel_case("gptqmodel_4_short", 4, inputs=80)
    yield gptqmodel_case("gptqmodel_4_scattered", 4, order=lambda n: torch.randperm(n))
    yield gptqmodel_case("gptqmodel_4_runs", 4, order=lambda n: torch.arange(n).roll(16))


def awq_cases():
    kinds = {"gemm": library("awq.modules.linear.gemm"), "gemv": library("awq.modules.linear.gemv")}
    unpack = library("awq.utils.packing_utils").dequantize_gemm
    for group in (GROUP, -1):
        length = INPUTS if group == -1 else group
        codes, zeros, scales, index = grid(4, INPUTS, length, seed=7)
        layer = dense(codes, zeros, scales, index)
        gemm = kinds["gemm"].WQLinear_GEMM.from_linear(layer, 4, length, scales=scales.t(), zeros=zeros.t())
        expected = unpack(gemm.qweight, gemm.qzeros, gemm.scales, 4, length).t()
        state = {key: part.contiguous() for key, part in gemm.state_dict().items()}
        config = {"bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
        yield f"gemm_{group}".replace("-1", "whole"), config, state, expected
        if group != -1:
            gemv = kinds["gemv"].WQLinear_GEMV.from_linear(layer, 4, length, scales=scales, zeros=zeros)
            # AutoAWQ has no dequantization of gemv without a GPU; its weight is the one that gemm was made of too.
            yield f"gemv_{group}", {**config, "version": "gemv"}, gemv.state_dict(), expected


def bitsandbytes_cases():
    functional, modules = library("bitsandbytes.functional"), library("bitsandbytes.nn")
    shapes = {"rows": (16, 128), "flat": (10, 80), "many": (24, 384)}
    for kind, size, nested, dtype, storage, shape in (
        ("nf4", 64, False, torch.bfloat16, torch.uint8, "rows"),
        ("nf4", 64, True, torch.float32, torch.uint8, "rows"),
        ("nf4", 32, True, torch.float16, torch.uint8, "many"),
        ("nf4", 128, True, torch.bfloat16, torch.bfloat16, "rows"),
        ("nf4", 64, True, torch.bfloat16, torch.uint8, "flat"),
        ("fp4", 64, False, torch.bfloat16, torch.uint8, "rows"),
    ):
        torch.manual_seed(3)
        weight = torch.randn(shapes[shape], dtype=torch.float32).mul_(0.02).to(dtype)
        codes, state = functional.quantize_4bit(
            weight, blocksize=size, quant_type=kind, compress_statistics=nested, quant_storage=storage
        )
        made = modules.Params4bit(
            codes, quant_state=state, quant_type=kind, requires_grad=False, bnb_quantized=True
        )
        tensors = {"weight": made.data, **{f"weight.{k}": v for k, v in state.as_dict(packed=True).items()}}
        name = (
            f"{kind}_{size}_{'nested' if nested else 'plain'}_{shape}_{str(storage).removeprefix('torch.')}"
        )
        config = {"load_in_4bit": True, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested}
        yield name, config, tensors, functional.dequantize_4bit(codes, state)


def grids():
    """Weights, and the scales, zero points and values that the libraries' plain rounding gives them (`reference.quantize`)."""
    torch.manual_seed(5)
    weight = torch.randn(16, 64) * 0.05
    blocks = weight.reshape(-1, GROUP)
    made = {"gptq|weight": weight}
    grid = library("auto_gptq.quantization.quantizer")
    for name, symmetric in (("symmetric", True), ("asymmetric", False)):
        found = grid.Quantizer()
        found.configure(4, perchannel=True, sym=symmetric)
        found.find_params(blocks, weight=True)
        made |= {f"gptq_{name}|scale": found.scale, f"gptq_{name}|zero": found.zero}
    half = weight.half()
    settings = types.SimpleNamespace(group_size=GROUP, zero_point=True, w_bit=4)
    rounded = library("awq.quantize.quantizer").AwqQuantizer.pseudo_quantize_tensor
    values, scales, zeros = rounded(settings, half)
    made |= {"awq|weight": half, "awq|values": values, "awq|scale": scales, "awq|zero": zeros}
    functional = library("bitsandbytes.functional")
    codes, state = functional.quantize_4bit(
        weight.bfloat16(), blocksize=64, quant_type="nf4", compress_statistics=False
    )
    return {**made, "nf4|weight": weight.bfloat16(), "nf4|codes": codes, "nf4|scale": state.absmax}


def write(folder, method, cases):
    tensors, configs = {}, {}
    for name, config, state, expected in cases:
        configs[name] = {"quant_method": method, **config}
        tensors |= {
            f"{name}|{key}": part.contiguous() for key, part in state.items() if not key.startswith("wf_")
        }
        tensors[f"{name}|expected"] = expected.contiguous()
    save_file(
        tensors,
        folder / f"{method}.safetensors",
        {"cases": json.dumps(configs), "versions": VERSIONS[method]},
    )


def main(paths):
    sys.path[:0] = map(str, paths)
    sys.meta_path.append(Finder())
    for name in ("auto_gptq", "auto_gptq.nn_modules", "auto_gptq.nn_modules.qlinear", "auto_gptq.quantization",
                 "awq", "awq.utils", "awq.modules", "awq.quantize", "awq.models", "gptqmodel.models"):  # fmt: skip
        bare(name, paths)
    bare("gptqmodel", paths, DEBUG_ON=False, DEVICE_THREAD_POOL=MagicMock())
    folder = Path(__file__).parents[1] / "data"
    write(folder, "gptq", [*autogptq_cases(), *gptqmodel_cases()])
    write(folder, "awq", awq_cases())
    write(folder, "bitsandbytes", bitsandbytes_cases())
    save_file(grids(), folder / "grids.safetensors", {"versions": "; ".join(VERSIONS.values())})


if __name__ == "__main__":
    main([Path(path) for path in sys.argv[1:]])
