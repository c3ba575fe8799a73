"""Calibration at shapes of Llama-3.1-8B: the same bits with blocks resident and from files one at a time, whoever else uses the
GPU, and peak memory.

Two blocks suffice for a peak: a block's statistics go before the next one's come. Seconds and peaks as rows are
`ao-lab reproduce calibration --scale full --only "8B shapes"`, whose models and data these are.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import ao_lab
from ao_lab.calibration.autoround import one_order, without_cudnn
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


#: Passes of one input: cuDNN's gradients of queries differ in one of eight, those of flash by default in all.
PASSES = 100


def attention(device: str, masked: bool) -> list[torch.Tensor]:
    """Output and gradients of attention as AutoRound learns through it, the same inputs in every call; masked: by a mask of
    its own, which another kernel takes than a causal one."""
    generator, tokens = torch.Generator(device).manual_seed(0), 64 if device == "cpu" else 2048
    q, k, v, g = torch.randn(
        4, 4, 32, tokens, 128, generator=generator, device=device, dtype=torch.bfloat16
    ).unbind()
    mask = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril() if masked else None
    leaves = [x.requires_grad_(True) for x in (q, k, v)]
    with without_cudnn():
        y = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not masked)
    with one_order(y):
        return [y.detach(), *torch.autograd.grad(y, leaves, g)]


def unrepeated(device: str, masked: bool) -> Iterator[str]:
    """Results of attention that are not the same in every pass."""
    first = attention(device, masked)
    for number in range(1 if device == "cpu" else PASSES):
        again = attention(device, masked)
        for name, one, two in zip(("y", "dq", "dk", "dv"), first, again, strict=True):
            if not torch.equal(one, two):
                yield f"{name}: other bits in pass {number}"


def checks(asked: Asked) -> Iterator[Check]:
    """Attention's gradients, and every set of methods."""
    for masked in (False, True):
        yield f"gradients of attention{', masked' * masked}", partial(unrepeated, asked.device, masked)
    for name in METHODS:
        yield name, partial(wrong, name, asked.device)


SUBJECTS = (Subject("calibration_memory", "peak memory of calibration at 8B's shapes", checks, on_cpu=True),)
