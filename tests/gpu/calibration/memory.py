"""Peak memory of calibration at shapes of Llama-3.1-8B: blocks resident, and one at a time from files, with the same bits.

Two blocks suffice for a peak: a block's statistics go before the next one's come. Data are 128 sequences of 2048 tokens, four
sequences a batch.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import ao_lab
from ao_lab.checkpoint.streaming import dense_of_files, quantize_pretrained
from tests.gpu.harness.subject import Asked, Check, Row, Subject, same_bits

METHODS: dict[str, tuple[Any, ...]] = {
    "gptq": (ao_lab.Clip(), ao_lab.GPTQ()),
    "awq": (ao_lab.AWQ(), ao_lab.Clip(), ao_lab.GPTQ()),
    "rotate": (ao_lab.Rotate(), ao_lab.GPTQ()),
}
#: Gigabytes beside the model, and in all.
BARS = {"resident": 16.0, "streamed": 12.0}


def saved(folder: Path, device: str) -> None:
    """A model of two blocks with random weights: of 8B's shapes on a GPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    large = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    shape: dict[str, Any] = small if device == "cpu" else large
    config = LlamaConfig(vocab_size=1000 if device == "cpu" else 128256, num_hidden_layers=2, **shape)
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)


def batches(device: str) -> list[dict[str, torch.Tensor]]:
    """Tokens at random."""
    count, length = (16, 32) if device == "cpu" else (128, 2048)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 1000, (count, length), generator=generator).to(device)
    return [{"input_ids": one} for one in ids.split(4)]


def quantized(folder: Path, how: str, name: str, device: str) -> tuple[Any, Row]:
    """The model, and what it took."""
    config, data = ao_lab.SchemeConfig(scheme="int4_g128"), batches(device)
    given = {"calibration": data, "methods": METHODS[name]}
    model = None if how == "streamed" else dense_of_files(folder).to(device)
    gc.collect()
    before = 0
    if device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if how == "resident" else 0
    begin = time.monotonic()
    if model is None:
        model = quantize_pretrained(folder, config, device=device, **given)
    else:
        ao_lab.quantize_(model, config, **given)
    seconds = time.monotonic() - begin
    peak = 0.0 if device == "cpu" else (torch.cuda.max_memory_allocated() - before) / 1e9
    return model, {"method": name, "how": how, "peak_gb": round(peak, 2), "seconds": round(seconds, 1)}


def wrong(name: str, device: str) -> Iterator[str]:
    """Other bits, or a peak above the bar."""
    with tempfile.TemporaryDirectory() as folder:
        saved(Path(folder), device)
        results = {}
        for how, bar in BARS.items():
            model, row = quantized(Path(folder), how, name, device)
            print(row, flush=True)
            if row["peak_gb"] > bar:
                yield f"{how}: {row['peak_gb']} GB, the bar is {bar}"
            results[how] = {n: p.detach().cpu() for n, p in model.named_parameters()}
            del model
        for full, value in results["resident"].items():
            other = results["streamed"][full]
            parts = [(value, other)]
            if isinstance(value, ao_lab.QuantizedTensor):
                parts = [(value.dequantize(), other.dequantize())]
            if not all(same_bits(one, two) for one, two in parts):
                yield f"{full}: other bits than those of a resident model"


def checks(asked: Asked) -> Iterator[Check]:
    """Every set of methods."""
    for name in METHODS:
        yield name, partial(wrong, name, asked.device)


def times(asked: Asked) -> Iterator[Row]:
    """Peaks and seconds."""
    with tempfile.TemporaryDirectory() as folder:
        saved(Path(folder), asked.device)
        for name in METHODS:
            for how in BARS:
                yield quantized(Path(folder), how, name, asked.device)[1]


SUBJECTS = (
    Subject("calibration_memory", "peak memory of calibration at 8B's shapes", checks, times, on_cpu=True),
)
