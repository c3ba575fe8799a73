"""On a machine of two GPUs: layers, caches, training and optimizers on the one that is not current, as in a model that
`device_map` splits over GPUs of one process.

    PYTHONPATH=. python tests/gpu/models/two_devices.py [--devices cuda:0 cuda:1] [--out FOLDER]

Each case runs on both devices while the first is current; results on the second are those on the first, bit for bit. What
launches on the current device instead of its tensors' reads memory of another GPU: an error, or other values. Rows in
FOLDER/two_devices.csv (else $OUT); exit code 1 where something differs or fails. `--devices cpu cpu` tries the program.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import ao_lab
from tests.gpu.harness.lines import run_parts, say

CONFIGS = (
    "Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Float8DynamicActivationFloat8WeightConfig",
    "Int4WeightOnlyConfig", "MXDynamicActivationMXWeightConfig", "NF4WeightOnlyConfig", "NVFP4WeightOnlyConfig",
)  # fmt: skip
TOKENS = (1, 16, 300)
RECIPES = ("rowwise", "tensorwise", "blockwise", "mxfp8")
CACHES = ("bfloat16", "fp8", "int8", "int4")
ATTENTION = ("int8", "int8_block", "fp8")
Case = Callable[[torch.device], torch.Tensor]


def drawn(device: torch.device, *shape: int, seed: int = 0) -> torch.Tensor:
    """The same normal values on each device."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(device, torch.bfloat16)


def linear(device: torch.device) -> nn.Sequential:
    """One layer whose lengths all configurations take."""
    layer = nn.Linear(512, 1024, bias=False, dtype=torch.bfloat16)
    layer.weight.data = drawn(torch.device("cpu"), 1024, 512, seed=1) / 16
    return nn.Sequential(layer).to(device)


def inference(device: torch.device, *, config: str, tokens: int) -> torch.Tensor:
    """Outputs of a quantized layer."""
    model = linear(device)
    ao_lab.quantize_(model, getattr(ao_lab, config)())
    with torch.no_grad():
        y: torch.Tensor = model(drawn(device, tokens, 512))
    return y


def training(device: torch.device, *, recipe: str) -> torch.Tensor:
    """The weight after two steps with 8-bit states."""
    model = linear(device)
    ao_lab.convert_for_training_(model, recipe)
    optimizer = ao_lab.optim.AdamW8bit(model.parameters(), lr=1e-2)
    for step in range(2):
        model(drawn(device, 256, 512, seed=step)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return next(model.parameters()).detach()


def cache(device: torch.device, *, recipe: str) -> torch.Tensor:
    """Logits of a prompt and of two more tokens over a stored cache."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=512, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=128, max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).to(device).eval()
    ao_lab.use_kv_cache_(model, recipe)
    ids = torch.arange(1, 65).view(1, -1).to(device)
    told = model.generate(
        ids,
        max_new_tokens=3,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        disable_compile=True,
    )
    return torch.stack(told.logits)


def attention(device: torch.device, *, recipe: str) -> torch.Tensor:
    """Attention in 8 bits of a prompt."""
    from fast.attention.quantized import quantized_attention

    q, k, v = (drawn(device, 1, heads, 300, 128, seed=i) for i, heads in enumerate((4, 2, 2)))
    return quantized_attention(q, k, v, recipe, causal=True)


def cases() -> Iterator[tuple[str, Case]]:
    """Every case by its name."""
    for config in CONFIGS:
        for tokens in TOKENS:
            yield f"{config}, {tokens} tokens", partial(inference, config=config, tokens=tokens)
    for recipe in RECIPES:
        yield f"training by {recipe}, AdamW8bit", partial(training, recipe=recipe)
    for recipe in CACHES:
        yield f"KV cache, {recipe}", partial(cache, recipe=recipe)
    for recipe in ATTENTION:
        yield f"attention, {recipe}", partial(attention, recipe=recipe)


def compare(name: str, case: Case, first: torch.device, second: torch.device) -> None:
    """A row: how many values of a case differ."""
    wanted, found = case(first), case(second)
    count = int((found.to(first).view(torch.int16) != wanted.view(torch.int16)).sum()) if found.numel() else 0
    say(
        "bits",
        name,
        count,
        "differ",
        values=wanted.numel(),
        ok=found.device == second and bool(wanted.isfinite().all()),
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", nargs=2, default=["cuda:0", "cuda:1"])
    parser.add_argument("--out")
    asked = parser.parse_args()
    first, second = map(torch.device, asked.devices)
    parts = {name: partial(compare, name, case, first, second) for name, case in cases()}
    return run_parts(parts, parts, "two_devices.csv", asked.out)


if __name__ == "__main__":
    raise SystemExit(main())
