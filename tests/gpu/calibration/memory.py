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
    "autoround": (ao_lab.AutoRound(),),
    "gptq and autoround": (ao_lab.Clip(), ao_lab.GPTQ(), ao_lab.AutoRound()),
}
#: Gigabytes beside the model, and in all.
BARS = {"resident": 16.0, "streamed": 12.0}
#: Layers of Llama-3.1-8B, and the bars of all of them in seconds.
LAYERS, SECONDS = 32, {"gptq": 90.0, "awq": 90.0, "autoround": 360.0}


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
    watch = Stopwatch(device)
    if model is None:
        model = quantize_pretrained(folder, config, device=device, progress=watch, **given)
    else:
        ao_lab.quantize_(model, config, progress=watch, **given)
    seconds = watch.now()
    peak = 0.0 if device == "cpu" else (torch.cuda.max_memory_allocated() - before) / 1e9
    row: Row = {"method": name, "how": how, "peak_gb": round(peak, 2), "seconds": round(seconds, 1)}
    whole = watch.of_layers(LAYERS)
    return model, row | {
        "block_s": round(watch.block, 2),
        f"{LAYERS}_layers_s": round(whole, 1),
        "bar_s": SECONDS.get(name, ""),
    }


class Stopwatch:
    """Seconds until each weight was placed, as `progress` is told of them; a block is over with its last weight."""

    def __init__(self, device: str) -> None:
        self.device, self.begin, self.ends = device, time.monotonic(), {}

    def now(self) -> float:
        """Since the call, the device's work done."""
        if self.device != "cpu":
            torch.cuda.synchronize()
        return time.monotonic() - self.begin

    def __call__(self, name: str, done: int, total: int) -> None:
        parts = name.split(".")
        if "layers" in parts:
            self.ends[parts[parts.index("layers") + 1]] = self.now()

    @property
    def block(self) -> float:
        """From the end of the first block to that of the last, a block: with what it takes to run data to it."""
        ends = sorted(self.ends.values())
        return (ends[-1] - ends[0]) / (len(ends) - 1)

    def of_layers(self, count: int) -> float:
        """A model of so many: all that is before the second block, and the others as long as it."""
        return min(self.ends.values()) + (count - 1) * self.block


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
                if asked.only in f"{name} {how}":
                    yield quantized(Path(folder), how, name, asked.device)[1]


SUBJECTS = (
    Subject("calibration_memory", "peak memory of calibration at 8B's shapes", checks, times, on_cpu=True),
)
