"""What other people's loops do with a model whose layers are quantized, and the one answer that each of them has.

`KINDS` are layers, one for each structure of storage and inputs; `LOOPS` is what libraries do: a function of a model, which
returns it changed. An answer is "right" - the weights are those of the dequantized model that went through the same loop, up to
one rounding to the layer's scheme - or the words of an error.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ao_lab
from ao_lab import QuantizedTensor

IDS = torch.arange(12).reshape(2, 6)
#: How far a weight may be from that of the dense model, of its norm: one rounding.
KINDS: dict[str, tuple[Callable[[], Any], float]] = {
    "int8 weight-only": (ao_lab.Int8WeightOnlyConfig, 0.01),
    "int4 weight-only": (lambda: ao_lab.Int4WeightOnlyConfig(group_size=32), 0.1),
    "int8 dynamic": (ao_lab.Int8DynamicActivationInt8WeightConfig, 0.01),
    "fp8 dynamic": (ao_lab.Float8DynamicActivationFloat8WeightConfig, 0.04),
    "mxfp8": (lambda: ao_lab.SchemeConfig(scheme="mxfp8_e4m3"), 0.04),
    "nvfp4": (ao_lab.NVFP4WeightOnlyConfig, 0.12),
    "nf4": (lambda: ao_lab.SchemeConfig(scheme="nf4"), 0.1),
    "2:4": (lambda: ao_lab.Int4WeightOnlyConfig(group_size=32, sparsity="2:4"), 0.1),
}
#: Those of the day: rows, one scale for all with dynamic inputs, 2:4 storage; of `Trainer`'s loops the first alone.
DAY = ("int8 weight-only", "fp8 dynamic", "2:4")

SEVERAL = "is several tensors, without one storage .* ao_lab.save_pretrained"
NOT_SPARSE = "takes dense numbers that are 2:4: .* stays separate from the weight"
#: (loop, kind or any): the words of the error where the answer is not "right".
ANSWERS: dict[tuple[str, str], str] = {
    ("disk_offload", ""): "is not offloaded to disk as one: .* accelerate.cpu_offload",
    ("save_state", ""): SEVERAL,
    ("safetensors.save_file", ""): SEVERAL,
    ("safetensors.save_model", ""): SEVERAL,
    ("sum in place", "2:4"): NOT_SPARSE,
    ("merge lora", "2:4"): NOT_SPARSE,
    ("merge dora", "2:4"): NOT_SPARSE,
    ("start pissa", "2:4"): NOT_SPARSE,
    ("trainable_token_indices", "2:4"): NOT_SPARSE,
}


def model(kind: str) -> nn.Module:
    """A small Llama with quantized layers in its block; head and table are dense."""
    import transformers

    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **size)).eval()
    if kind == "2:4":
        ao_lab.sparsify_(made, ao_lab.SparsityConfig("2:4"), in_block)
    ao_lab.quantize_(made, KINDS[kind][0](), in_block)
    return made


def with_tables(kind: str) -> nn.Module:
    """The same with its head and its table quantized too; of 2:4 models they stay dense."""
    made = model(kind)
    if kind != "2:4":
        ao_lab.quantize_(
            made, KINDS[kind][0](), lambda module, name: isinstance(module, nn.Embedding) or "head" in name
        )
    return made


def in_block(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and "layers" in name


def twin(made: nn.Module) -> nn.Module:
    """The dense model of the dequantized weights."""
    dense = copy.deepcopy(made)
    for module in dense.modules():
        for name, value in module._parameters.items():
            if isinstance(value, QuantizedTensor):
                module._parameters[name] = nn.Parameter(value.dequantize(), requires_grad=False)
    return dense


def numbers(made: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters as dense tensors."""
    pairs = made.named_parameters(remove_duplicate=False)
    return {name: (p.dequantize() if isinstance(p, QuantizedTensor) else p).detach() for name, p in pairs}


def logits(made: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = made(IDS).logits
    return result


def adapted(made: nn.Module, start: Any = False, **fields: Any) -> Any:
    """LoRA on two layers; `start` False: both factors random, so that it changes what is computed."""
    import peft

    torch.manual_seed(1)
    fields = {"r": 4, "target_modules": ["q_proj", "up_proj"], "init_lora_weights": start, **fields}
    return peft.get_peft_model(made, peft.LoraConfig(**fields))


def sum_in_place(made: Any, folder: Path) -> Any:
    made.model.layers[0].mlp.up_proj.weight.data += 0.1 * torch.randn(
        128, 64, generator=torch.Generator().manual_seed(1)
    )
    return made


def product_in_place(made: Any, folder: Path) -> Any:
    made.model.layers[0].mlp.up_proj.weight.data *= 0.3
    return made


def merge(made: Any, folder: Path, **fields: Any) -> Any:
    return adapted(made, **fields).merge_and_unload()


def merge_and_back(made: Any, folder: Path) -> Any:
    """The weights are those of before, up to both roundings."""
    with_adapters = adapted(made)
    with_adapters.merge_adapter()
    with_adapters.unmerge_adapter()
    return with_adapters.unload()


def train_a_head(made: Any, folder: Path) -> Any:
    """The copy that trains is dense, and takes the place of the head."""
    with_adapters = adapted(made, modules_to_save=["lm_head"], target_modules=["o_proj"])
    head = with_adapters.base_model.model.lm_head.modules_to_save["default"]
    assert type(head.weight) is nn.Parameter
    torch.optim.AdamW(with_adapters.parameters(), lr=1e-3)
    logits(with_adapters)
    return with_adapters.unload()


def train_tokens(made: Any, folder: Path) -> Any:
    with_adapters = adapted(made, trainable_token_indices={"embed_tokens": [1, 5]}, target_modules=["o_proj"])
    deltas = with_adapters.base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta
    assert type(deltas["default"]) is nn.Parameter
    with torch.no_grad():
        deltas["default"].add_(0.01)
    logits(with_adapters)
    return with_adapters.merge_and_unload()


def offload(made: Any, folder: Path) -> Any:
    import accelerate
    from accelerate.hooks import remove_hook_from_submodules

    before = logits(made)
    accelerate.cpu_offload(made, execution_device="cpu")
    assert torch.equal(logits(made), before)
    assert torch.equal(logits(made), before)
    state = {
        name: hook.weights_map for name, m in made.named_modules() if (hook := getattr(m, "_hf_hook", None))
    }
    assert state
    remove_hook_from_submodules(made)
    return made


def offload_to_disk(made: Any, folder: Path) -> Any:
    import accelerate

    accelerate.disk_offload(made, folder, execution_device="cpu")
    return made


def sizes(made: Any, folder: Path) -> Any:
    """Bytes as they are stored, for both libraries."""
    import accelerate

    stored = sum(t.nbytes for t in [*made.parameters(), *made.buffers()])
    assert made.get_memory_footprint() == stored
    assert accelerate.utils.compute_module_sizes(made)[""] == stored
    assert set(accelerate.infer_auto_device_map(made, {"cpu": int(1.6 * stored)}).values()) == {"cpu"}
    return made


def save_state(made: Any, folder: Path, **fields: Any) -> Any:
    import accelerate

    loop = accelerate.Accelerator(cpu=True)
    loop.prepare(made)
    loop.save_state(str(folder), **fields)
    with torch.no_grad():
        made.model.norm.weight.add_(1)
    loop.load_state(str(folder))
    return made


def save_file(made: Any, folder: Path) -> Any:
    from safetensors.torch import save_file

    save_file(made.state_dict(), str(folder / "model.safetensors"))
    return made


def save_model(made: Any, folder: Path) -> Any:
    from safetensors.torch import save_model

    save_model(made, str(folder / "model.safetensors"))
    return made


def resize(made: Any, folder: Path, count: int, **fields: Any) -> Any:
    torch.manual_seed(1)
    made.resize_token_embeddings(count, **fields)
    kinds = {type(made.lm_head.weight), type(made.model.embed_tokens.weight)}
    assert len(kinds) == 1
    made.tie_weights()
    return made


def resume(made: Any, folder: Path) -> Any:
    """The second run starts from the first one's checkpoint, and ends where that ended."""
    first, second = copy.deepcopy(made), made
    trainer(first, folder).train()
    trainer(second, folder).train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    assert all(
        torch.equal(a, b) for a, b in zip(numbers(first).values(), numbers(second).values(), strict=True)
    )
    return made


def best(made: Any, folder: Path) -> Any:
    """The first checkpoint is the best by the wrong measure, and is in the model at the end."""
    wanted = copy.deepcopy(made)
    trainer(wanted, folder / "one", max_steps=1).train()
    measure = {
        "metric_for_best_model": "loss",
        "greater_is_better": True,
        "eval_strategy": "steps",
        "eval_steps": 1,
    }
    loop = trainer(made, folder / "two", load_best_model_at_end=True, lr_scheduler_type="constant", **measure)
    loop.train()
    assert str(loop.state.best_model_checkpoint).endswith("checkpoint-1")
    assert all(map(torch.allclose, numbers(made).values(), numbers(wanted).values()))
    return made


def trainer(made: Any, folder: Path, **fields: Any) -> Any:
    """Two steps, of which each is saved."""
    import transformers

    rows = [{"input_ids": row, "labels": row} for row in IDS.repeat(2, 1)]
    given: dict[str, Any] = {"max_steps": 2, "save_steps": 1, "lr_scheduler_type": "constant", **fields}
    args = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=2, use_cpu=True, report_to=[], disable_tqdm=True, logging_strategy="no",
        learning_rate=1e-3, **given,
    )  # fmt: skip
    with warnings.catch_warnings():
        # Said of models without adapters, which these loops train nonetheless.
        warnings.filterwarnings("ignore", "Trainer: .* quantized and frozen", UserWarning)
        loop = transformers.Trainer(model=made, args=args, train_dataset=rows, eval_dataset=rows)
    loop.remove_callback(transformers.PrinterCallback)
    return loop


#: By name: the loop, and what makes the model.
LOOPS: dict[str, tuple[Callable[..., Any], Callable[[str], nn.Module]]] = {
    "sum in place": (sum_in_place, model),
    "product in place": (product_in_place, model),
    "merge lora": (merge, model),
    "merge dora": (lambda made, folder: merge(made, folder, use_dora=True), model),
    "start pissa": (lambda made, folder: merge(made, folder, start="pissa"), model),
    "modules_to_save": (train_a_head, with_tables),
    "trainable_token_indices": (train_tokens, with_tables),
    "cpu_offload": (offload, with_tables),
    "disk_offload": (offload_to_disk, model),
    "sizes": (sizes, with_tables),
    "save_state": (save_state, model),
    "save_state by torch": (lambda made, folder: save_state(made, folder, safe_serialization=False), model),
    "safetensors.save_file": (save_file, model),
    "safetensors.save_model": (save_model, model),
    "more tokens": (lambda made, folder: resize(made, folder, 80), with_tables),
    "more tokens, none of their mean": (
        lambda made, folder: resize(made, folder, 72, mean_resizing=False),
        with_tables,
    ),
    "fewer tokens": (lambda made, folder: resize(made, folder, 48), with_tables),
    "Trainer resumes": (resume, model),
    "Trainer loads the best": (best, model),
}
#: Loops whose dense twin is not what is compared with: they compare themselves.
ALONE = ("sizes", "Trainer resumes", "Trainer loads the best", "save_state by torch", "cpu_offload")


def tried(loop: str, kind: str, folder: Path) -> str:
    """What a loop does with a kind of layer: "right", the text of its error, or how far which weight is off."""
    run, make = LOOPS[loop]
    made = make(kind)
    dense = made if loop in ALONE else twin(made)
    before = numbers(made)
    try:
        after = run(made, folder)
    except (ValueError, TypeError) as error:
        kept = {
            name.replace(".base_layer", "").replace(".original_module", ""): t
            for name, t in numbers(made).items()
        }
        assert all(torch.equal(value, kept[name]) for name, value in before.items() if "embed" not in name)
        return str(error)
    wanted = numbers(after) if loop in ALONE else numbers(run(dense, folder))
    for name, value in numbers(after).items():
        off = float((value - wanted[name]).norm() / wanted[name].norm())
        if value.shape != wanted[name].shape or off > KINDS[kind][1]:
            return f"{name} of shape {tuple(value.shape)} is off by {off:.3f}"
    return "right"
