"""Bits of `linear_small` on a GPU: exact on integers for every tile that is timed, within the bound on others, twenty times."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

import torch

from ao_lab.config.recipe import named
from fast.kernels.linear_small import host
from fast.kernels.linear_small.layout import restored_codes
from fast.kernels.linear_small.tilings import Tiling
from tests.gpu.linear.small import weights
from tests.support.linear_cases import distance_allowed, inputs, weight

REPEATS = 20
BF16 = "bfloat16"
#: Scheme, N and K, rows of X, dtype: lengths that are no whole tiles, both dtypes, all elements.
ODD = (
    ("int4_g128", (100, 384), 3, BF16), ("int4_g32", (70, 160), 17, "float16"), ("int4_g64", (200, 320), 33, BF16),
    ("int4_g128_asymmetric", (129, 640), 1, "float16"), ("int4_g32_asymmetric", (1000, 96), 9, BF16),
    ("int8_rowwise", (77, 992), 5, BF16), ("int8_rowwise_asymmetric", (300, 1024), 65, "float16"),
    ("int8_g128", (64, 256), 128, BF16), ("fp8_rowwise", (333, 544), 2, BF16), ("fp8_tensorwise", (96, 128), 100, "float16"),
    ("mxfp4", (100, 384), 3, BF16), ("mxfp4", (200, 320), 17, "float16"), ("nvfp4", (333, 544), 33, BF16),
    ("nvfp4", (70, 160), 1, "float16"), ("mxfp8_e4m3", (129, 640), 65, BF16), ("mxfp8_e4m3", (77, 992), 5, "float16"),
    ("nf4", (100, 448), 3, BF16), ("nf4", (333, 576), 33, "float16"), ("nf4", (200, 640), 65, BF16),
)  # fmt: skip
#: Whole layers, with every candidate.
WHOLE = (
    ("int4_g128", (14336, 4096)), ("int4_g32", (4096, 4096)), ("int4_g128_asymmetric", (1024, 4096)),
    ("int8_rowwise", (4096, 4096)), ("fp8_rowwise", (1024, 4096)), ("int4_g128", (4096, 14336)),
    ("mxfp4", (14336, 4096)), ("nvfp4", (4096, 4096)), ("mxfp8_e4m3", (4096, 4096)), ("nvfp4", (4096, 14336)),
    ("nf4", (14336, 4096)), ("nf4", (4096, 4096)),
)  # fmt: skip
COUNTS = (1, 16, 32, 64, 128)
Task = tuple[Any, ...]


def odd_tasks(names: Container[str]) -> list[Task]:
    """Calls of some schemes, as `weights.compiled` takes them."""
    return [
        (name, shape, count, tiling, dtype, True)
        for name, shape, count, dtype in ODD
        if name in names
        for tiling in weights.tilings(name, shape, count)[::4]
    ]


def whole_tasks(most: int, names: Container[str]) -> list[Task]:
    """The same of layers; most: candidates of each number of rows."""
    return [
        (name, shape, count, tiling, BF16, False)
        for name, shape in WHOLE
        if name in names
        for count in COUNTS
        for tiling in weights.tilings(name, shape, count, most)
    ]


def multiplied(x: torch.Tensor, w: host.ArrangedWeight, bias: Any, tiling: Tiling) -> torch.Tensor:
    """The product, in memory that held NaN."""
    poison = torch.full((len(x), w.shape[0]), float("nan"), dtype=x.dtype, device=x.device)
    parts = torch.full((tiling.splits, *poison.shape), float("nan"), device=x.device)
    del poison, parts
    y = host.linear_small(x, w, bias, tiling=tiling)
    assert y is not None, "the kernel does not take this"
    return y


def wrong_of(tasks: list[Task]) -> Iterator[str]:
    """What differs, of calls of one weight."""
    name, shape = tasks[0][:2]
    stored, dense = weights.drawn(name, shape)
    w = host.arrange(stored)
    assert w is not None, "the weight is not taken"
    if not torch.equal(restored_codes(w), stored.codes):
        yield f"{name} {shape}: codes do not come back"
    for _, _, count, tiling, dtype, biased in tasks:
        x = torch.randint(-1, 2, (count, shape[1]), device=weights.DEVICE).to(getattr(torch, dtype))
        bias = (torch.arange(shape[0], device=weights.DEVICE) % 7 - 3).to(x.dtype) if biased else None
        truth = x.double() @ dense.t() + (0.0 if bias is None else bias.double())
        wanted = truth.float().to(x.dtype)
        bad = sum(not torch.equal(multiplied(x, w, bias, tiling), wanted) for _ in range(REPEATS))
        if bad:
            different = int((multiplied(x, w, bias, tiling) != wanted).sum())
            yield f"{name} {shape} {count} rows {dtype} {tiling}: {bad} of {REPEATS} differ, {different} elements"


def outside_of(tasks: list[Task]) -> Iterator[str]:
    """Random numbers: outside of the bound, or other bits another time."""
    name, shape, count, _, dtype, _ = tasks[0]
    stored = weight(named(name), *shape)
    x = inputs(count, shape[1], getattr(torch, dtype))
    truth, allowed = distance_allowed(x, stored, None)
    on_device = host.arrange(_moved(stored))
    assert on_device is not None
    for tiling in {task[3] for task in tasks}:
        got = multiplied(x.to(weights.DEVICE), on_device, None, tiling)
        far = int((~((got.cpu().double() - truth).abs() <= allowed)).sum())
        if far:
            yield f"{name} {shape} {count} rows {dtype} {tiling}: {far} of {got.numel()} outside the bound"
        others = sum(
            not torch.equal(multiplied(x.to(weights.DEVICE), on_device, None, tiling), got)
            for _ in range(REPEATS)
        )
        if others:
            yield f"{name} {shape} {count} rows {dtype} {tiling}: {others} of {REPEATS} have other bits"


def _moved(w: Any) -> Any:
    from dataclasses import replace

    parts = {part: getattr(w, part) for part in ("codes", "scale", "zero", "outer")}
    return replace(
        w, **{name: None if part is None else part.to(weights.DEVICE) for name, part in parts.items()}
    )
