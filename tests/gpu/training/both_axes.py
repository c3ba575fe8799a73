"""On a GPU: both axes of one read, bit for bit beside the reference, again and again for races; times beside two reads and a
copy. `validate_mixed` calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import fast
import reference
from fast.kernels import both_axes
from fast.quantize.rowwise_colwise import both_values, values_and_codes
from reference import SCHEMES
from tests.gpu.training.grouped_speed import milliseconds

NAMES = ("mxfp8_e4m3_rceil", "mxfp8_e5m2", "mxfp6_e2m3_rceil", "mxfp6_e3m2_rceil", "mxfp4_rceil")
#: A program alone, programs that are not filled, and many.
SHAPES = ((32, 32), (96, 160), (64, 1024), (4096, 4096))
DTYPES = (torch.bfloat16, torch.float16)
REPETITIONS = 50
VIEWS = {1: torch.uint8, 2: torch.int16}
#: Shapes of a step's inputs and of its output's gradient, and bytes of an element that each function moves.
TIMED = ((16384, 4096), (16384, 14336))
MOVED = {"both values": 6, "values and codes": 5}


def matrices(shape: tuple[int, int], dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Normal numbers of many sizes; the same with NaN, infinities, zeros and subnormals; any patterns at all."""
    generator = torch.Generator().manual_seed(sum(shape))
    x, spread = (torch.randn(shape, generator=generator) for _ in range(2))
    x = x * torch.exp(spread * 3)
    yield x.to(dtype)
    x[0], x[:, 3], x[9], x[20] = 0, -0.0, 1e-40 if dtype == torch.bfloat16 else 1e-7, 3e38
    x[5, 7], x[17, 9], x[25, 30] = float("nan"), float("inf"), -float("inf")
    yield x.to(dtype)
    yield torch.randint(-(2**15), 2**15, shape, generator=generator).to(torch.int16).view(dtype)
    # Patterns of neighbouring exponents, so that few blocks have NaN.
    top = torch.randint(1, 2**15 - 2**10, (shape[0] // 32, 1, shape[1] // 32, 1), generator=generator)
    below = torch.randint(0, 2**10, (shape[0] // 32, 32, shape[1] // 32, 32), generator=generator)
    bits = (top - below).clamp(min=0).reshape(shape) | (torch.randint(0, 2, shape, generator=generator) << 15)
    yield bits.to(torch.int16).view(dtype)


def results(x: torch.Tensor, scheme: Any) -> dict[str, torch.Tensor]:
    """All outputs of both calls."""
    assert both_axes.covers(x, scheme)
    (rows, columns), (values, q) = both_values(x, scheme), values_and_codes(x, scheme)
    return {"rows": rows, "columns": columns, "values": values, "codes": q.codes, "scales": q.scale}


def wanted(x: torch.Tensor, scheme: Any) -> dict[str, torch.Tensor]:
    """What the reference says of a matrix on the CPU."""
    rows, columns = (reference.fake_quantize(x, scheme, axis=axis) for axis in (1, 0))
    q = reference.quantize(x, scheme, axis=0)
    return {"rows": rows, "columns": columns, "values": rows, "codes": q.codes, "scales": q.scale}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether bits are the same."""
    view = VIEWS[a.element_size()]
    return a.shape == b.shape and torch.equal(a.view(view), b.view(view))


def check(name: str, dtype: torch.dtype) -> list[str]:
    """What differs from the reference, or from one call to the next."""
    wrong, scheme = [], SCHEMES[name]
    for shape in SHAPES:
        for number, x in enumerate(matrices(shape, dtype)):
            on_gpu = x.cuda()
            found, truth = results(on_gpu, scheme), wanted(x, scheme)
            case = f"{name} {dtype} {shape}, case {number}"
            wrong += [f"{case}: {part}" for part in truth if not same(found[part].cpu(), truth[part])]
            for _ in range(REPETITIONS):
                again = results(on_gpu, scheme)
                wrong += [f"{case}, again: {part}" for part in found if not same(again[part], found[part])]
    return wrong


def speed() -> None:
    """Each call, the two that it replaces, and a copy of as many bytes."""
    for shape in TIMED:
        x = torch.randn(shape, device="cuda").bfloat16()
        for name in NAMES:
            for label, (one, two) in calls_of(x, SCHEMES[name]).items():
                source = torch.empty(x.numel() * MOVED[label] // 8, device="cuda", dtype=torch.int32)
                target = torch.empty_like(source)
                copy = partial(target.copy_, source)
                times = milliseconds({"one read": one, "two": two, "copy": copy})
                line = "  ".join(f"{key} {1000 * time:7.1f} us" for key, time in times.items())
                print(f"{shape} {name:18} {label:16} {line}", flush=True)


def calls_of(x: torch.Tensor, scheme: Any) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """By one read, and by two."""
    rows = partial(fast.fake_quantize, x, scheme)
    return {
        "both values": (
            lambda: both_values(x, scheme),
            lambda: (rows(), fast.fake_quantize(x, scheme, axis=0)),
        ),
        "values and codes": (
            lambda: values_and_codes(x, scheme),
            lambda: (rows(), fast.quantize(x, scheme, axis=0)),
        ),
    }
