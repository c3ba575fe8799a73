"""Calibration at shapes of Llama-3.1-8B: the same bits with blocks resident and from files one at a time, and peak memory.

Two blocks suffice for a peak: a block's statistics go before the next one's come. Seconds and peaks as rows are
`ao-lab reproduce calibration --scale full --only "8B shapes"`, whose models and data these are.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ao_lab
from ao_lab.checkpoint.streaming import dense_of_files
from experiments.calibration.shapes import IN_ALL, LLAMA_8B, MEMORY, TINY, Arm, quantized, random_model
from tests.gpu.harness.subject import Asked, Check, Subject, same_bits

METHODS: dict[str, tuple[Any, ...]] = {
    "gptq": (ao_lab.Clip(), ao_lab.GPTQ()),
    "awq": (ao_lab.AWQ(), ao_lab.Clip(), ao_lab.GPTQ()),
    "rotate": (ao_lab.Rotate(), ao_lab.GPTQ()),
    "autoround": (ao_lab.AutoRound(),),
    "gptq and autoround": (ao_lab.Clip(), ao_lab.GPTQ(), ao_lab.AutoRound()),
}
#: Gigabytes beside the model, and in all.
BARS = {MEMORY: 16.0, IN_ALL: 12.0}
BLOCKS = 2


def wrong(name: str, device: str) -> Iterator[str]:
    """Other bits, or a peak above the bar."""
    shapes = TINY if device == "cpu" else LLAMA_8B
    with tempfile.TemporaryDirectory() as folder:
        random_model(shapes, BLOCKS, device).save_pretrained(folder)
        results: list[dict[str, Any]] = []
        for files in (False, True):
            arm = Arm("int4_g128", METHODS[name], first=BLOCKS, files=files)
            given = Path(folder) if files else dense_of_files(Path(folder)).to(device)
            values, model = quantized(given, arm, shapes, device)
            print(name, "from files" if files else "resident", values, flush=True)
            for metric, bar in BARS.items():
                if metric in values and values[metric][0] > bar * 1e9:
                    yield f"{metric}: {values[metric][0] / 1e9:.2f} GB, the bar is {bar}"
            results.append({n: p.detach().cpu() for n, p in model.named_parameters()})
            del model, given
        yield from other_bits(*results)


def other_bits(resident: dict[str, Any], from_files: dict[str, Any]) -> Iterator[str]:
    """Parameters that differ."""
    for full, value in resident.items():
        parts = [value, from_files[full]]
        if isinstance(value, ao_lab.QuantizedTensor):
            parts = [one.dequantize() for one in parts]
        if not same_bits(*parts):
            yield f"{full}: other bits than those of a resident model"


def checks(asked: Asked) -> Iterator[Check]:
    """Every set of methods."""
    for name in METHODS:
        yield name, partial(wrong, name, asked.device)


SUBJECTS = (Subject("calibration_memory", "peak memory of calibration at 8B's shapes", checks, on_cpu=True),)
