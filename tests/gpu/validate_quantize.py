"""`quantize_` of the 8B shapes of Llama 3.1: seconds, peak memory over that of the bfloat16 model, the bits of some weights.

    PYTHONPATH=. python tests/gpu/validate_quantize.py [--device cpu --layers 1 --divide 16]

Random weights, one configuration after the other. Each is measured once, after a first call on one layer has compiled its
kernels. Weights are compared with what the reference makes of them on the host. Bars: 30 seconds, 1.1 times the model. The
table goes to the terminal; if OUT is set, the rows go to $OUT/quantize.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import ao_lab
from ao_lab.testing.bits import assert_same_bits

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


def measured(
    config: ao_lab.SchemeConfig, sizes: list[tuple[int, int]], device: str
) -> dict[str, float | int]:
    """Seconds, bytes and how many weights were compared."""
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
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    reserved = torch.cuda.max_memory_reserved() if cuda else 0
    for i, dense in picked.items():
        expected = ao_lab.quantized(dense, config.recipe())
        for name, part in model[i].weight.plain.parts.items():
            if part is not None:
                assert_same_bits(part.cpu(), getattr(expected, name))
    return {"seconds": seconds, "model": before, "peak": peak, "reserved": reserved, "compared": len(picked)}


def main() -> int:
    """Measure every configuration; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--divide", type=int, default=1, help="divide all sizes by this")
    given = parser.parse_args()
    rows, good = {}, True
    for name, config in CONFIGS.items():
        row = rows[name] = measured(config, shapes(given.layers, given.divide), given.device)
        ratio = row["peak"] / row["model"]
        good &= row["seconds"] < SECONDS and ratio < RATIO
        print(
            f"{name:22} {row['seconds']:7.2f} s, peak {ratio:.3f}, reserved {row['reserved'] / row['model']:.3f}",
            flush=True,
        )
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "quantize.json").write_text(json.dumps(rows, indent=2) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
