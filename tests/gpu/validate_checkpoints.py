"""Checkpoints on a GPU: what is saved and what is loaded means there what it means on the host.

    PYTHONPATH=. python tests/gpu/validate_checkpoints.py [--device cpu]

* plain: models in bfloat16 whose configuration is for the layout, saved as compressed-tensors and loaded by transformers alone,
  give the same logits bit for bit where both compute F.linear of dequantized operands (kernel="dequantize").
* own: `HfConfig` while loading, and the own layout through transformers, give the codes and logits of `quantize_`.
* foreign: checkpoints of other libraries (tests/checkpoint/formats/data) dequantize on the GPU to the bits of the host.
* moves: half() and to() while an output and its graph are alive; lookups; DistributedDataParallel.

Rows go to $OUT/checkpoints.json where OUT is set. Exit status 1 where anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

import ao_lab
from ao_lab.testing.bits import assert_same_bits

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
Case = tuple[str, Callable[[], dict[str, Any]]]


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


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((a.double() - b.double()).norm() / b.double().norm())


def plain_cases(device: str) -> Iterator[Case]:
    """Saved as compressed-tensors, loaded by transformers without a quantizer of ours."""
    for name in MODELS:
        for told, config in PLAIN.items():
            yield f"plain {name} {told}", lambda name=name, config=config: plain(name, config, device)


def plain(name: str, config: Any, device: str) -> dict[str, Any]:
    """Bits with kernel="dequantize"; the distance of the kernels that "auto" takes."""
    wanted = config.for_layout("compressed-tensors")
    model = model_of(name, device)
    ao_lab.quantize_(model, wanted)
    fast = logits(model, device)
    for module in model.modules():
        if isinstance(getattr(module, "weight", None), ao_lab.QuantizedTensor):
            weight = module.weight.with_recipe(kernel="dequantize")
            module.weight = torch.nn.Parameter(weight, requires_grad=False)
    ours = logits(model, device)
    with tempfile.TemporaryDirectory() as folder:
        saved = ao_lab.save_pretrained(model, folder, layout="compressed-tensors")
        theirs = logits(loaded(folder, device), device)
    return {
        "equal": torch.equal(ours, theirs),
        "distance": distance(theirs, ours),
        "of the kernels": distance(fast, ours),
        "limits": list(saved.limits),
    }


def own_cases(device: str) -> Iterator[Case]:
    """HfConfig while loading; the own layout by transformers."""
    for name in MODELS:
        for told, config in OWN.items():
            yield f"own {name} {told}", lambda name=name, config=config: own(name, config, device)


def own(name: str, config: Any, device: str) -> dict[str, Any]:
    """The same codes, scales and logits, whichever way they come."""
    with tempfile.TemporaryDirectory() as dense, tempfile.TemporaryDirectory() as folder:
        model = model_of(name, device)
        model.save_pretrained(dense)
        # As transformers' quantizers do, HfConfig leaves the head.
        ao_lab.quantize_(
            model, config, lambda module, path: type(module).__name__ == "Linear" and path != "lm_head"
        )
        asked = loaded(dense, device, quantization_config=ao_lab.HfConfig(config))
        ao_lab.save_pretrained(model, folder, layout="ao_lab")
        again = loaded(folder, device)
        compared = sum(same_parts(model, other) for other in (asked, again))
        wanted = logits(model, device)
        equal = all(torch.equal(wanted, logits(other, device)) for other in (asked, again))
    return {"equal": equal, "values": compared}


def same_parts(model: Any, other: Any) -> int:
    """How many codes, scales and zero points were compared; AssertionError where one differs."""
    count = 0
    for path, weight in model.named_parameters():
        if isinstance(weight, ao_lab.QuantizedTensor):
            for part, value in weight.plain.parts.items():
                if value is not None:
                    assert_same_bits(value.cpu(), getattr(other.get_parameter(path).plain, part).cpu())
                    count += value.numel()
    if not count:
        raise AssertionError("no weight is quantized")
    return count


def foreign_cases(device: str) -> Iterator[Case]:
    """Layers that other libraries packed."""
    from tests.ao_lab.checkpoint.formats.folders.library_weights import case, cases

    for method in ("gptq", "awq", "bitsandbytes"):
        for name in cases(method):
            yield f"foreign {method} {name}", lambda m=method, n=name: foreign(case(m, n), device)


def foreign(found: Any, device: str) -> dict[str, Any]:
    """What the library dequantized, from the GPU's kernels; the layers that cannot be read say so."""
    from tests.ao_lab.checkpoint.formats.folders.library_weights import folder_of, read

    config, tensors, expected = found
    with tempfile.TemporaryDirectory() as folder:
        try:
            weight = read(folder_of(Path(folder) / "model", config, tensors))
        except ValueError as error:
            return {"equal": True, "refused": str(error)[:200]}
    dense = weight.to(device).dequantize().cpu().contiguous()
    x = torch.randn(1, dense.shape[1], generator=torch.Generator().manual_seed(0)).to(dense.dtype)
    product = torch.nn.functional.linear(x.to(device), weight.to(device)).cpu()
    exact = x.double() @ dense.double().t()
    return {
        "equal": torch.equal(dense.view(torch.int16), expected.contiguous().view(torch.int16)),
        "distance": distance(product, exact),
    }


def moves(device: str) -> Iterator[Case]:
    """A model changes dtype and device while what it computed is alive; lookups that dense tables refuse."""
    for told, config in (("int8", PLAIN["int8"]), ("int4", PLAIN["int4"]), ("fp8", PLAIN["fp8"])):
        yield f"moves {told}", lambda config=config: moved(config, device)
    yield "lookups", lambda: lookups(device)
    yield "parallel", lambda: parallel(device)


def moved(config: Any, device: str) -> dict[str, Any]:
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
    return {
        "equal": torch.equal(first, last) and x.grad is not None,
        "half": distance(half, first),
        "alive": len(alive),
    }


def lookups(device: str) -> dict[str, Any]:
    """Rows by index, as torch.embedding of the dequantized table."""
    table = torch.nn.Embedding(64, 32, device=device, dtype=torch.bfloat16)
    ao_lab.quantize_(table, ao_lab.SchemeConfig(scheme="int8_rowwise"), lambda module, path: True)
    rows = torch.tensor([0, 5, 63], device=device)
    return {"equal": torch.equal(table(rows), table.weight.dequantize()[rows])}


def parallel(device: str) -> dict[str, Any]:
    """A model with quantized weights inside DistributedDataParallel, one process: NCCL broadcasts them on a GPU."""
    model = model_of("LlamaForCausalLM", device)
    ao_lab.quantize_(
        model, PLAIN["int4"], lambda module, path: "mlp" in path and type(module).__name__ == "Linear"
    )
    before = logits(model, device)
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group(
            "gloo" if device == "cpu" else "nccl", init_method=f"file://{folder}/group", rank=0, world_size=1
        )
        try:
            wrapped = torch.nn.parallel.DistributedDataParallel(model)
            wrapped(TOKENS.to(device)).logits.float().sum().backward()
            gradients = sum(p.grad is not None for p in model.parameters())
            equal = torch.equal(before, logits(wrapped, device))
        finally:
            torch.distributed.destroy_process_group()
    return {"equal": equal and gradients > 0, "gradients": gradients}


def measured(case: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """One case; an exception is an outcome too."""
    start = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = case()
    except Exception as error:  # noqa: BLE001  the next case says something of its own
        made = {
            "equal": False,
            "error": f"{type(error).__name__}: {error}",
            "at": traceback.format_exc()[-1500:],
        }
    return {**made, "seconds": round(time.perf_counter() - start, 3)}


def main() -> int:
    """Every case; 1 where one differs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", help="a word of the cases' names")
    given = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    rows: dict[str, Any] = {}
    for make in (plain_cases, own_cases, foreign_cases, moves):
        for name, case in make(given.device):
            if given.only in name:
                row = rows[name] = measured(case)
                told = {key: value for key, value in row.items() if key not in ("at", "limits")}
                print(f"{'ok' if row['equal'] else 'DIFFERS':8} {name:52} {told}", flush=True)
    wrong = [name for name, row in rows.items() if not row["equal"]]
    print(f"{len(rows) - len(wrong)} passed, {len(wrong)} failed: {', '.join(wrong)}")
    if "OUT" in os.environ:
        what = {"torch": torch.__version__, "transformers": transformers.__version__, "device": given.device}
        (Path(os.environ["OUT"]) / "checkpoints.json").write_text(
            json.dumps({**what, "rows": rows}, indent=2) + "\n"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
