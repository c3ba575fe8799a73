"""Microseconds that a call takes the host for each quantized weight; runs without a GPU.

    PYTHONPATH=. python tests/gpu/host_time.py [dense int8wo int4wo int8dq]

100 linear layers of 64 x 64, one row of bfloat16, the least of 150 calls. "compiled": by `torch.compile` with a compiler whose
programs compute nothing, so that what is left are guards and what torch does with inputs; then without the guards that
`ao_lab.prepare_for_generate_` leaves out, of parts and of all modules. "eager": up to the product, which is
put aside; of dense layers with the product (1 x 1, so that it is nothing), as it cannot be taken out. "launched": of CPU
tensors that pass for a GPU's, all but what the driver does; looked up as the first call is, then prepared as all others are.
"cold": the first figure of "compiled" and the last of "launched" where 64 MB are read before each call, the median: a model's
host forgets as much between two tokens.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import ao_lab
from ao_lab.compile.generation import guard_options
from ao_lab.tensor import matmul_ops
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from fast import dispatch
from fast.launch import launcher
from fast.launch.launcher import CompiledLaunch
from tests.ao_lab.gemm.capability import ASKED_BY

CONFIGS: dict[str, Callable[[], Any] | None] = {
    "dense": None,
    "int8wo": lambda: ao_lab.Int8WeightOnlyConfig(),
    "int4wo": lambda: ao_lab.Int4WeightOnlyConfig(group_size=64),
    "int8dq": lambda: ao_lab.Int8DynamicActivationInt8WeightConfig(),
}
LAYERS, WIDTH, CALLS = 100, 64, 150
MEMORY = torch.zeros(16 << 20)


def network(name: str, width: int) -> nn.Module:
    """The layers."""
    layers = (nn.Linear(width, width, bias=False) for _ in range(LAYERS))
    net = nn.Sequential(*layers).bfloat16().requires_grad_(False)
    make = CONFIGS[name]
    if make is not None:
        ao_lab.quantize_(net, make())
    return net


def nothing(program: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """A compiler whose program answers what it answered first."""
    known: list[Any] = []

    def answer(*args: torch.Tensor) -> list[Any]:
        known[:] = known or program.forward(*args)
        return list(known)

    return make_boxed_func(answer)  # type: ignore[no-any-return]


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Microseconds a layer of the quickest call, and of the median one after other memory was read."""
    warm, cold = (seconds(call, between) for between in (lambda: None, MEMORY.sum))
    return min(warm[5:]) / LAYERS * 1e6, statistics.median(cold[5:]) / LAYERS * 1e6


def seconds(call: Callable[[], Any], between: Callable[[], Any]) -> list[float]:
    """Of calls, with something else before each."""
    times = []
    with torch.no_grad():
        for _ in range(CALLS + 5):
            between()
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
    return times


def least(call: Callable[[], Any]) -> float:
    """Microseconds a layer of the quickest call."""
    return timed(call)[0]


def compiled(name: str, frozen: bool | None = None) -> tuple[float, float]:
    """Of a compiled call; frozen: with `guard_options`."""
    torch.compiler.reset()
    x = torch.ones(1, WIDTH, dtype=torch.bfloat16)
    options = None if frozen is None else guard_options(frozen)
    backend = aot_autograd(fw_compiler=nothing)
    call = torch.compile(network(name, WIDTH), fullgraph=True, backend=backend, options=options)
    return timed(lambda: call(x))


def eager(name: str) -> float:
    """Of a call that is not compiled."""
    width = 1 if CONFIGS[name] is None else WIDTH
    x, net = torch.ones(1, width, dtype=torch.bfloat16), network(name, width)
    product = matmul_ops.select_product
    matmul_ops.select_product = lambda *_: lambda *_: x  # type: ignore[assignment]
    try:
        return least(lambda: net(x))
    finally:
        matmul_ops.select_product = product


def launched(name: str) -> tuple[float, float, float]:
    """Of a call on a GPU without what the driver does: before `matmul_ops` had programs, and with them."""

    def run(self: CompiledLaunch, pointers: Sequence[torch.Tensor | None], device: int) -> Any:
        signature = (device, *(None if p is None else p.dtype for p in pointers))
        self.compiled.setdefault(signature, SimpleNamespace(function=lambda stream, addresses: None))
        return signature

    changes = (
        (CompiledLaunch, "run", run), (dispatch, "has_kernels", lambda x: True), (launcher, "current_device", lambda: -1),
        (launcher, "current_stream", lambda index: 0), (QuantizedTensor, "is_cuda", True), (dispatch, "CALLS", {}),
        *((module, "capability", lambda index: (9, 0)) for module in ASKED_BY),
    )  # fmt: skip
    x, times = torch.ones(1, 1, WIDTH, dtype=torch.bfloat16), []
    for on_gpu in (False, True):
        with ExitStack() as stack:
            for owner, attribute, value in changes:
                stack.enter_context(mock.patch.object(owner, attribute, value))
            stack.enter_context(mock.patch.object(matmul_ops, "on_gpu", return_value=on_gpu))
            net = network(name, WIDTH)
            times.append(timed(lambda: net(x)))  # noqa: B023
    return times[0][0], *times[1]


def main() -> int:
    """Both, of the configurations that are named, or of all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", choices=[*CONFIGS, []], metavar="NAME", help=f"of {', '.join(CONFIGS)}; all"
    )
    for name in parser.parse_args().names or CONFIGS:
        (first, cold), *others = (compiled(name, frozen) for frozen in (None, False, True))
        guards = " ".join(f"{one:6.2f}" for one in (first, *(warm for warm, _ in others)))
        times = f"compiled {guards} us (cold {cold:6.2f}), eager {eager(name):6.2f} us"
        if CONFIGS[name] is not None:
            times += ", launched {:6.2f} {:6.2f} us (cold {:6.2f})".format(*launched(name))
        sys.stdout.write(f"torch {torch.__version__} {name:7} {times}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
