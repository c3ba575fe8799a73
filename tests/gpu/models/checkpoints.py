"""Checkpoints on a GPU: what is saved and what is loaded means there what it means on the host.

* plain: models in bfloat16 whose configuration is for the layout, saved as compressed-tensors and loaded by transformers alone,
  give the same logits bit for bit where both compute F.linear of dequantized operands (kernel="dequantize").
* own: `HfConfig` while loading, and the own layout through transformers, give the codes and logits of `quantize_`.
* foreign: checkpoints of other libraries (tests/ao_lab/checkpoint/formats/data) dequantize on the GPU to the bits of the host.
* moves: half() and to() while an output and its graph are alive; lookups; DistributedDataParallel.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

import ao_lab
from tests.gpu.harness.subject import Asked, Check, Subject, differs, same_bits

TOKENS = torch.arange(24).reshape(2, 12) * 7 % 256
BASE = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
MODELS = {
    "LlamaForCausalLM": BASE,
    "Qwen3ForCausalLM": {**BASE, "head_dim": 32},
    "MistralForCausalLM": {**BASE, "tie_word_embeddings": True},
}
PLAIN = {
    "int8": ao_lab.Int8WeightOnlyConfig(),
    "int8 x int8": ao_lab.Int8DynamicActivationInt8WeightConfig(),
    "int4": ao_lab.Int4WeightOnlyConfig(group_size=32),
    "fp8": ao_lab.Float8WeightOnlyConfig(),
    "fp8 x fp8": ao_lab.Float8DynamicActivationFloat8WeightConfig(granularity=ao_lab.PerRow()),
    "mxfp4 x mxfp4": ao_lab.MXDynamicActivationMXWeightConfig(
        activation_dtype="float4_e2m1fn", weight_dtype="float4_e2m1fn"
    ),
    "mxfp8": ao_lab.MXWeightOnlyConfig(),
    "nvfp4": ao_lab.NVFP4WeightOnlyConfig(),
}
OWN = {
    **PLAIN,
    "nf4": ao_lab.NF4WeightOnlyConfig(),
    "int4 zero points": ao_lab.Int4WeightOnlyConfig(group_size=64),
}


#: How far a product of a single row may be off, of its size: one rounding to 16 bits and those of its inputs.
FAR = 1e-2


def model_of(name: str, device: str) -> Any:
    """A small random model in bfloat16."""
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    # Not to(bfloat16), which would round the buffers of rotary embeddings, as from_pretrained does not.
    made = kind._from_config(kind.config_class(**MODELS[name]), dtype=torch.bfloat16)
    return made.eval().to(device)


def logits(model: Any, device: str) -> torch.Tensor:
    """Of fixed tokens."""
    with torch.no_grad():
        return model(TOKENS.to(device)).logits


def loaded(folder: str, device: str, **how: Any) -> Any:
    """By transformers, in the dtype of the folder."""
    # device_map needs accelerate, which a host without a GPU need not have.
    where = {"device_map": device} if device != "cpu" else {}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **where, **how).eval()


def wrong_plain(name: str, config: Any, device: str) -> Iterator[str]:
    """Bits with kernel="dequantize"."""
    wanted = config.for_layout("compressed-tensors")
    model = model_of(name, device)
    ao_lab.quantize_(model, wanted)
    for module in model.modules():
        if isinstance(getattr(module, "weight", None), ao_lab.QuantizedTensor):
            weight = module.weight.with_recipe(kernel="dequantize")
            module.weight = torch.nn.Parameter(weight, requires_grad=False)
    ours = logits(model, device)
    with tempfile.TemporaryDirectory() as folder:
        ao_lab.save_pretrained(model, folder, layout="compressed-tensors")
        yield from differs("logits", logits(loaded(folder, device), device), ours)


def wrong_own(name: str, config: Any, device: str) -> Iterator[str]:
    """The same codes, scales and logits, whichever way they come."""
    with tempfile.TemporaryDirectory() as dense, tempfile.TemporaryDirectory() as folder:
        model = model_of(name, device)
        model.save_pretrained(dense)
        ao_lab.quantize_(model, config)
        asked = loaded(dense, device, quantization_config=ao_lab.HfConfig(config))
        ao_lab.save_pretrained(model, folder, layout="ao_lab")
        wanted = logits(model, device)
        for way, other in (("HfConfig", asked), ("own layout", loaded(folder, device))):
            yield from (f"{way}: {line}" for line in wrong_parts(model, other))
            yield from differs(f"{way}: logits", logits(other, device), wanted)


def is_linear(module: Any) -> bool:
    """Whether it is a linear layer of torch."""
    return type(module).__name__ == "Linear"


def wrong_parts(model: Any, other: Any) -> Iterator[str]:
    """Codes, scales and zero points that differ, and weights that one model alone has quantized."""
    weights, others = (
        {path: one for path, one in each.named_parameters() if isinstance(one, ao_lab.QuantizedTensor)}
        for each in (model, other)
    )
    if not weights:
        yield "no weight is quantized"
    if apart := sorted({*weights} ^ {*others}):
        yield f"quantized in one of both: {', '.join(apart)}"
        return
    for path, weight in weights.items():
        for part, value in weight.plain.parts.items():
            if value is not None and not same_bits(value, getattr(others[path].plain, part)):
                yield f"{part} of {path} differ"


def wrong_foreign(method: str, name: str, device: str) -> Iterator[str]:
    """What the library dequantized, from the GPU's kernels; the layers that cannot be read say so."""
    from tests.ao_lab.checkpoint.formats.folders.library_weights import case, folder_of, read

    config, tensors, expected = case(method, name)
    with tempfile.TemporaryDirectory() as folder:
        try:
            weight = read(folder_of(Path(folder) / "model", config, tensors))
        except ValueError:
            return
    dense = weight.to(device).dequantize().cpu()
    yield from differs(
        "dense equivalent", dense.contiguous().view(torch.int16), expected.contiguous().view(torch.int16)
    )
    x = torch.randn(1, dense.shape[1], generator=torch.Generator().manual_seed(0)).to(dense.dtype)
    product = torch.nn.functional.linear(x.to(device), weight.to(device)).cpu().double()
    exact = x.double() @ dense.double().t()
    if not (far := float((product - exact).norm() / exact.norm())) < FAR:
        yield f"a product is {far:.1e} of its size off"


def wrong_moves(config: Any, device: str) -> Iterator[str]:
    """half() and back, to the host and back, beside live outputs and a live view of a weight."""
    torch.manual_seed(0)
    # No model with buffers: half() rounds those of rotary embeddings, and nothing gives them back.
    layers = torch.nn.Linear(128, 256), torch.nn.SiLU(), torch.nn.Linear(256, 128)
    model = torch.nn.Sequential(*layers).to(device, torch.bfloat16)
    for layer in (model[0], model[2]):
        torch.nn.init.zeros_(layer.bias)  # exact in every dtype
    ao_lab.quantize_(model, config)
    x = (
        torch.randn(8, 128, generator=torch.Generator().manual_seed(1))
        .to(device, torch.bfloat16)
        .requires_grad_()
    )
    first = model(x)
    alive = [first, model[0].weight.t(), model[0].weight.detach()]
    model.half()
    half = model(x.half())
    model.to("cpu").to(device).to(torch.bfloat16)
    last = model(x)
    first.float().sum().backward()
    yield from differs(f"outputs beside {len(alive)} live ones", last, first)
    if x.grad is None or not half.isfinite().all():
        yield "there is no gradient, or half() is not finite"


def wrong_lookups(device: str) -> Iterator[str]:
    """Rows by index, as torch.embedding of the dequantized table."""
    table = torch.nn.Embedding(64, 32, device=device, dtype=torch.bfloat16)
    ao_lab.quantize_(table, ao_lab.SchemeConfig(scheme="int8_rowwise"), lambda module, path: True)
    rows = torch.tensor([0, 5, 63], device=device)
    yield from differs("rows", table(rows), table.weight.dequantize()[rows])


def wrong_parallel(device: str) -> Iterator[str]:
    """A model with quantized weights inside DistributedDataParallel, one process: NCCL broadcasts them on a GPU."""
    model = model_of("LlamaForCausalLM", device)
    ao_lab.quantize_(model, PLAIN["int4"], lambda module, path: "mlp" in path and is_linear(module))
    before = logits(model, device)
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group(
            "gloo" if device == "cpu" else "nccl", init_method=f"file://{folder}/group", rank=0, world_size=1
        )
        try:
            wrapped = torch.nn.parallel.DistributedDataParallel(model)
            wrapped(TOKENS.to(device)).logits.float().sum().backward()
            if all(p.grad is None for p in model.parameters()):
                yield "there are no gradients"
            yield from differs("logits", logits(wrapped, device), before)
        finally:
            torch.distributed.destroy_process_group()


def checks(asked: Asked) -> Iterator[Check]:
    """All models and configurations."""
    from tests.ao_lab.checkpoint.formats.folders.library_weights import cases

    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    device = "cuda:0" if asked.device == "cuda" else asked.device
    for name in MODELS:
        for told, config in PLAIN.items():
            yield f"plain {name} {told}", partial(wrong_plain, name, config, device)
    for name in MODELS:
        for told, config in OWN.items():
            yield f"own {name} {told}", partial(wrong_own, name, config, device)
    for method in ("gptq", "awq", "bitsandbytes"):
        for name in cases(method):
            yield f"foreign {method} {name}", partial(wrong_foreign, method, name, device)
    for told in ("int8", "int4", "fp8"):
        yield f"moves {told}", partial(wrong_moves, PLAIN[told], device)
    yield "lookups", partial(wrong_lookups, device)
    yield "parallel", partial(wrong_parallel, device)


SUBJECTS = (Subject("checkpoints", "models that are saved, loaded and moved", checks, on_cpu=True),)
