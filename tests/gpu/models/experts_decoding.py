"""transformers' `generate` with quantized experts decodes by the products of their weights; milliseconds of a token.

Two layers of Mixtral-8x7B and of Qwen3-30B-A3B (128 experts), random weights, all experts quantized. transformers switches to
"batched_mm" for decoding; logits of each token, not compiled, are compared with those of the bfloat16 model that holds the
dequantized weights, over their size, and must be the same bits in a second call. Then a token's time, compiled as transformers
does by itself, beside bfloat16's.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import transformers

from ao_lab import QuantizedTensor, SchemeConfig, quantize_
from experiments.models.llama import COMPILED_LIMIT, Wrong, relative_change
from tests.gpu.harness.subject import Asked, Check, Row, Subject

SCHEMES = ("int4_g128", "fp8_rowwise", "int8_rowwise", "nf4", "mxfp4", "nvfp4")
BATCHES, CALLS, PROMPT, NEW = (1, 4, 64), 6, 16, 32
MIXTRAL = {"num_local_experts": 8, "hidden_size": 4096, "intermediate_size": 14336, "num_experts_per_tok": 2}
QWEN = {
    "num_experts": 128, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts_per_tok": 8, "norm_topk_prob": True,
}  # fmt: skip
SHARED = {"num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000}
MODELS = {
    "mixtral-8x7b": lambda: transformers.MixtralConfig(**SHARED, **MIXTRAL),
    "qwen3-30b-a3b": lambda: transformers.Qwen3MoeConfig(**SHARED, **QWEN, head_dim=128),
}


def model_of(name: str, device: str) -> Any:
    """Random weights in bfloat16."""
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = transformers.AutoModelForCausalLM.from_config(MODELS[name](), dtype=torch.bfloat16)
    model.generation_config.pad_token_id = 0
    return model.eval().requires_grad_(False)


def experts_of(model: Any) -> Iterator[tuple[Any, str, torch.Tensor]]:
    """Modules of experts and their weights."""
    for path, module in model.named_modules():
        if path.endswith("experts"):
            yield from ((module, name, weight) for name, weight in module.named_parameters())


def quantized(model: Any, scheme: str) -> Any:
    """A copy with quantized experts."""
    made = copy.deepcopy(model)
    quantize_(made, SchemeConfig(scheme=scheme), lambda module, path: path.endswith("experts"))
    found = [type(weight.data) for _, _, weight in experts_of(made)]
    if not all(issubclass(kind, QuantizedTensor) for kind in found):
        raise Wrong(f"experts that are not quantized: {found}")
    return made


def dequantized(model: Any, stored: Any) -> Any:
    """A copy of the bfloat16 model with the values of `stored`."""
    made = copy.deepcopy(model)
    for (_, _, dense), (_, _, weight) in zip(experts_of(made), experts_of(stored), strict=True):
        dense.data.copy_(weight.dequantize())
    return made


def generate(model: Any, batch: int, compiled: bool, times: list[float] | None = None) -> torch.Tensor:
    """Logits (new, batch, vocabulary) of tokens that are the same for every model: what is drawn is masked."""
    device = model.device
    forced = (torch.arange(NEW * batch, device=device).reshape(NEW, batch) * 31 + 7) % 32000

    def draw(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if times is not None:
            times.append(time.perf_counter())
        at = tokens.shape[1] - PROMPT
        return torch.full_like(scores, -1e9).scatter_(1, forced[at, :, None], 0.0)

    prompt = torch.arange(batch * PROMPT, device=device).reshape(batch, PROMPT) % 977 + 3
    found = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
        cache_implementation="static", disable_compile=not compiled, return_dict_in_generate=True, output_logits=True,
        logits_processor=transformers.LogitsProcessorList([draw]), eos_token_id=None,
    )  # fmt: skip
    return torch.stack(found.logits).float()


@torch.no_grad()
def wrong_of(name: str, scheme: str, asked: Asked) -> Iterator[str]:
    """How far the logits of a call are from those of the dense weights; Wrong beyond the limit, or where a call differs."""
    base = model_of(name, asked.device)
    model = quantized(base, scheme)
    dense = dequantized(base, model)
    for batch in asked.rows or BATCHES:
        got, wanted = generate(model, batch, compiled=False), generate(dense, batch, compiled=False)
        if not torch.equal(got, generate(model, batch, compiled=False)):
            yield f"batch {batch}: two calls gave different logits"
        relative_change(got, wanted, COMPILED_LIMIT, "from those of its weights in bfloat16")


def checks(asked: Asked) -> Iterator[Check]:
    """By model and scheme."""
    for name in MODELS:
        for scheme in asked.schemes or SCHEMES:
            yield f"{name} {scheme}", partial(wrong_of, name, scheme, asked)


def token_ms(model: Any, batch: int, calls: int = CALLS) -> float:
    """Median milliseconds between two tokens, compiled, after two calls that are not timed."""
    found: list[float] = []
    for call in range(calls + 2):
        times: list[float] = []
        generate(model, batch, True, times)
        if call >= 2:
            found += [after - before for before, after in pairwise(times)][NEW // 4 :]
    return statistics.median(found) * 1e3


@torch.no_grad()
def times(asked: Asked) -> Iterator[Row]:
    """Milliseconds of a token, bfloat16's first."""
    for name in MODELS:
        base = model_of(name, asked.device)
        for scheme in (None, *(asked.schemes or SCHEMES)):
            model = base if scheme is None else quantized(base, scheme)
            for batch in asked.rows or BATCHES:
                torch.compiler.reset()
                yield {
                    "model": name,
                    "scheme": scheme or "bfloat16",
                    "rows": batch,
                    "ms": token_ms(copy.deepcopy(model), batch),
                }


SUBJECTS = (Subject("experts_decoding", "generate() with quantized experts", checks, times),)
