"""Microseconds that a call of one linear layer of one row takes the host, and parts of such a call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import ao_lab
import fast
from fast.matmul.linear import linear_of_codes

#: Short rows, so that the GPU is not what is waited for; calls between two waits, fewer than a queue of launches holds.
ROWS, LENGTH, CHUNK, CHUNKS = 1024, 4096, 250, 8


def microseconds(call: Callable[[], Any], device: str) -> float:
    """The median of several chunks, each of which begins when the device is idle and ends when all is launched."""
    times, chunk = [], CHUNK if device == "cuda" else 10
    for at in range(CHUNKS + 1):
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(chunk):
            call()
        if at:
            times.append((time.perf_counter() - started) / chunk * 1e6)
    return statistics.median(times)


def layer_calls(device: str, divide: int) -> dict[str, float]:
    """By what is called; each is printed."""
    shape, made = (LENGTH // min(divide, 8), ROWS // min(divide, 8)), {}
    x = torch.randn(1, 1, shape[0], device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, call in calls(x, shape).items():
            made[name] = microseconds(call, device)
            print(f"  one call, {name:50} {made[name]:8.2f} us", flush=True)
    return made


def calls(x: torch.Tensor, shape: tuple[int, int]) -> dict[str, Callable[[], Any]]:
    """What is timed, by name. Where nothing was prepared (on a CPU), there are no launches alone."""
    functional, row = torch.nn.functional.linear, x[0]
    dense = layer(x, shape, None)
    int4 = layer(x, shape, ao_lab.Int4WeightOnlyConfig(group_size=128))
    fp8 = layer(x, shape, ao_lab.Float8DynamicActivationFloat8WeightConfig(granularity=ao_lab.PerRow()))
    stored, codes = int4.weight.quantized, fp8.weight.quantized
    scheme = fp8.weight.recipe.activation
    quantized = fast.quantize(row, scheme, axis=-1)
    return {
        "dense, nn.Linear": lambda: dense(x),
        "dense, F.linear": lambda: functional(x, dense.weight),
        "int4, nn.Linear": lambda: int4(x),
        "int4, F.linear": lambda: functional(x, int4.weight),
        "int4, fast.linear (looked up)": lambda: fast.linear(row, stored),
        **launches("int4", int4, x),
        "fp8 dynamic, nn.Linear": lambda: fp8(x),
        "fp8 dynamic, fast.quantize of the inputs": lambda: fast.quantize(row, scheme, axis=-1),
        "fp8 dynamic, the product of codes": lambda: linear_of_codes(quantized, codes, dtype=row.dtype),
        **launches("fp8 dynamic", fp8, x),
        "torch.empty_like of the inputs": lambda: torch.empty_like(x),
    }


def layer(x: torch.Tensor, shape: tuple[int, int], config: Any) -> Any:
    """A layer that has been called twice."""
    net = nn.Sequential(nn.Linear(*shape, bias=False, device=x.device, dtype=x.dtype)).requires_grad_(False)
    if config is not None:
        ao_lab.quantize_(net, config)
    with torch.no_grad():
        net(x), net(x)
    return net[0]


def launches(name: str, one: Any, x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """The program that a weight keeps for inputs like x, and its launches alone, on addresses that stay."""
    known = vars(one.weight).get("_settled", {}).get("programs")
    program = None if known is None else known.programs.get((x.shape, x.dtype))
    if program is None:
        return {}
    buffers = [torch.empty_strided(*size[:2], dtype=size[2], device=x.device) for size in program.sizes]
    addresses = [
        x.data_ptr(), None, *[place() for place in program.fixed], *[one.data_ptr() for one in buffers], None
    ]  # fmt: skip
    stream = torch.cuda.current_stream().cuda_stream
    given = [(launch, select(addresses)) for launch, select in program.launches]

    def launch_all() -> list[torch.Tensor]:
        for launch, chosen in given:
            launch(stream, chosen)
        return buffers

    return {
        f"{name}, the program": lambda: program.run(x, None),
        f"{name}, the launches alone ({len(given)})": launch_all,
    }


__all__ = ["layer_calls"]
