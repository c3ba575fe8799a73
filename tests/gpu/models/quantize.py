"""`quantize_` of the 8B shapes of Llama 3.1: seconds, peak memory over that of the bfloat16 model, the bits of some weights.

Random weights, one configuration after the other. Each is measured once, after a first call on one layer has compiled its
kernels. Weights are compared with what the reference makes of them on the host. Bars: 30 seconds, 1.1 times the model. On a CPU
one layer of a 32nd of the widths.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

import ao_lab
from tests.gpu.harness.subject import Asked, Check, Subject, same_bits

CONFIGS = {
    "int8 weight-only": ao_lab.Int8WeightOnlyConfig(),
    "int4 g64 weight-only": ao_lab.Int4WeightOnlyConfig(group_size=64),
    "fp8 weight-only": ao_lab.Float8WeightOnlyConfig(),
    "fp8 dynamic": ao_lab.Float8DynamicActivationFloat8WeightConfig(granularity=ao_lab.PerRow()),
    "fp8 128x128": ao_lab.SchemeConfig(scheme="fp8_128x128"),
    "mxfp8": ao_lab.MXWeightOnlyConfig(),
    "nvfp4": ao_lab.NVFP4WeightOnlyConfig(),
    "nf4": ao_lab.NF4WeightOnlyConfig(),
}
SECONDS, RATIO = 30.0, 1.1
HIDDEN, INNER, KEYS, WORDS = 4096, 14336, 1024, 128256


def shapes(layers: int, divide: int) -> list[tuple[int, int]]:
    """(out, in) of every linear layer, the head last."""
    hidden, inner, keys = HIDDEN // divide, INNER // divide, KEYS // divide
    layer = [(hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden)]
    layer += [(inner, hidden), (inner, hidden), (hidden, inner)]
    return [*layer * layers, (WORDS // divide, hidden)]


def model_of(sizes: list[tuple[int, int]], device: str) -> nn.Sequential:
    """Linear layers of these sizes, and the table of the last."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(n, m, bias=False) for m, n in sizes), nn.Embedding(*sizes[-1]))
    model.to(torch.bfloat16).to_empty(device=device)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.02)
    return model


def wrong_of(config: ao_lab.SchemeConfig, sizes: list[tuple[int, int]], device: str) -> Iterator[str]:
    """Bars that are missed, and weights whose parts differ."""
    cuda = device.startswith("cuda")
    ao_lab.quantize_(model_of(sizes[:7], device), config)
    model = model_of(sizes, device)
    picked = {i: model[i].weight.detach().cpu() for i in (0, 1, 6)}
    before = sum(p.numel() * p.element_size() for p in model.parameters())
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    ao_lab.quantize_(model, config)
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    ratio = (torch.cuda.max_memory_allocated() if cuda else 0) / before
    print(f"{seconds:.2f} s, peak {ratio:.3f} of the model", flush=True)
    if seconds > SECONDS or ratio > RATIO:
        yield f"{seconds:.1f} s of {SECONDS}, {ratio:.3f} of {RATIO} times the model's bytes"
    for i, dense in picked.items():
        expected = ao_lab.quantized(dense, config.recipe())
        for name, part in model[i].weight.plain.parts.items():
            if part is not None and not same_bits(part, getattr(expected, name)):
                yield f"{name} of layer {i} differs"


def checks(asked: Asked) -> Iterator[Check]:
    """By configuration."""
    sizes = shapes(1, 32) if asked.device == "cpu" else shapes(32, 1)
    for name, config in CONFIGS.items():
        yield name, partial(wrong_of, config, sizes, asked.device)


SUBJECTS = (Subject("quantize", "quantize_ of the 8B shapes of Llama 3.1", checks, on_cpu=True),)
