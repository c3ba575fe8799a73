"""Microseconds that a call takes the host for each quantized weight; runs without a GPU.

    PYTHONPATH=. python tests/gpu/host_time.py [dense int8wo int4wo int8dq bfloat16 rowwise tensorwise]

100 linear layers of 64 x 64, one row of bfloat16, the least of 150 calls. "compiled": by `torch.compile` with a compiler whose
programs compute nothing, so that what is left are guards and what torch does with inputs; then without the guards that
`ao_lab.prepare_for_generate_` leaves out, of parts and of all modules. "eager": up to the product, which is
put aside; of dense layers with the product (1 x 1, so that it is nothing), as it cannot be taken out. "launched": of CPU
tensors that pass for a GPU's, all but what the driver does; looked up as the first call is, then prepared as all others are.
"cold": the first figure of "compiled" and the last of "launched" where 64 MB are read before each call, the median: a model's
host forgets as much between two tokens.

Recipes of training ("bfloat16": none): 14 layers, 256 rows, forward and backward by themselves, "eager" and "compiled" by
torch.compile's own compiler. CPU tensors pass for a GPU's, Triton's launches and the sums of `torch._scaled_mm` are put aside,
and operators call what they call on GPUs; products of "bfloat16" run, as they are the floor that the others are compared with.
"casts": microseconds of each operator of a step, of what it calls in Python, and of that one's launches and buffers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
from ao_lab.training import products, reuse
from fast import dispatch
from fast.launch import launcher
from fast.launch.launcher import CompiledLaunch
from fast.quantize.quantize import quantize_op
from fast.quantize.rowwise_colwise import quantize_both_op
from reference.training.recipe import RECIPES
from tests.ao_lab.gemm.capability import ASKED_BY

CONFIGS: dict[str, Callable[[], Any] | None] = {
    "dense": None,
    "int8wo": lambda: ao_lab.Int8WeightOnlyConfig(),
    "int4wo": lambda: ao_lab.Int4WeightOnlyConfig(group_size=64),
    "int8dq": lambda: ao_lab.Int8DynamicActivationInt8WeightConfig(),
}
LAYERS, WIDTH, CALLS = 100, 64, 150
#: Recipes of training, layers and rows of a step; a step's casts by operator.
TRAINED, TRAINED_LAYERS, ROWS = ("bfloat16", "rowwise", "tensorwise"), 14, 256
OPERATORS = {"quantize": quantize_op, "quantize_both": quantize_both_op}
CASTS = ("quantize w", "quantize w.T", "quantize_both x")
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


def put_aside(self: CompiledLaunch, pointers: Sequence[torch.Tensor | None], device: int) -> Any:
    """`CompiledLaunch.run` without what the driver does."""
    signature = (device, *(None if p is None else p.dtype for p in pointers))
    self.compiled.setdefault(signature, SimpleNamespace(function=lambda stream, addresses: None))
    return signature


#: What lets CPU tensors pass for a GPU's.
ON_GPU = (
    (CompiledLaunch, "run", put_aside), (dispatch, "has_kernels", lambda x: True), (launcher, "current_device", lambda: -1),
    (launcher, "current_stream", lambda index: 0),
)  # fmt: skip


def launched(name: str) -> tuple[float, float, float]:
    """Of a call on a GPU without what the driver does: before `matmul_ops` had programs, and with them."""

    changes = (
        *ON_GPU, (QuantizedTensor, "is_cuda", True), (dispatch, "CALLS", {}),
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


# Training


def no_sums(
    a: torch.Tensor, b: torch.Tensor, *given: Any, out_dtype: Any = None, out: Any = None, **others: Any
) -> torch.Tensor:
    """`torch._scaled_mm` without its sums."""
    dtype = given[4] if len(given) > 4 else out_dtype
    return torch.empty((a.shape[0], b.shape[1]), dtype=dtype) if out is None else out


@contextmanager
def passing_for_gpu() -> Iterator[None]:
    """Training steps of CPU tensors run as those of a GPU's would, without launches and sums, while this lasts."""
    quick, torchs = (
        torch.library.Library("ao_lab", "IMPL", "CPU"),
        torch.library.Library("aten", "IMPL", "CPU"),
    )
    chosen = [(module, "select_product", lambda *_: "scaled_mm") for module in (products, reuse)]
    changes = (*ON_GPU, *chosen, (reuse, "has_kernels", lambda x: True), (dispatch, "CALLS", {}))
    with ExitStack() as stack, warnings.catch_warnings(action="ignore"):
        for owner, attribute, value in changes:
            stack.enter_context(mock.patch.object(owner, attribute, value))  # type: ignore[arg-type]
        for one in (quick, torchs):
            stack.callback(one._destroy)
        for name, implementation in OPERATORS.items():
            quick.impl(name, implementation)
        for name in ("_scaled_mm", "_scaled_mm.out"):
            torchs.impl(name, no_sums)
        reuse.forget()
        yield
        reuse.forget()


def step_times(recipe: str, compile_it: bool) -> tuple[float, float]:
    """Microseconds a layer of the quickest forward and of the quickest backward."""
    layers = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(TRAINED_LAYERS))
    net, times = nn.Sequential(*layers).bfloat16(), []
    if recipe != "bfloat16":
        ao_lab.convert_for_training_(net, recipe)
    torch.compiler.reset()
    call = torch.compile(net) if compile_it else net
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(CALLS + 10):
        started = time.perf_counter()
        y = call(x)
        forward, g = time.perf_counter() - started, torch.ones_like(y)
        started = time.perf_counter()
        y.backward(g)
        times.append((forward, time.perf_counter() - started))
        net.zero_grad()
        x.grad = None
    return tuple(min(column) / TRAINED_LAYERS * 1e6 for column in zip(*times[10:], strict=True))  # type: ignore[return-value]


def cast_times(label: str, recipe: str) -> list[float]:
    """Microseconds of a cast of a step: its operator, what that calls in Python, and launches and buffers alone."""
    x = torch.randn(ROWS if label.endswith("x") else WIDTH, WIDTH, dtype=torch.bfloat16)
    name, scheme = label.split()[0], RECIPES[recipe].output.a.scheme
    rest = (False, [], False) if name == "quantize_both" else (-1, False, None, None, None, None)
    given = (x.t() if label.endswith(".T") else x, scheme.key if scheme else "", *rest)
    operator, implementation = getattr(torch.ops.ao_lab, name).default, OPERATORS[name]
    dispatch.CALLS.clear()
    implementation(*given)
    ((call, _),) = dispatch.CALLS.values()
    sizes = call._sizes  # type: ignore[attr-defined]
    parts = lambda: operator(*given), lambda: implementation(*given), lambda: call._run((x,), sizes)  # type: ignore[attr-defined]
    return [quickest(one) for one in parts]


def quickest(call: Callable[[], Any], calls: int = 300) -> float:
    """Microseconds of a call, of the quickest of 40 times so many."""
    least_time = float("inf")
    with torch.no_grad():
        for _ in range(40):
            started = time.perf_counter()
            for _ in range(calls):
                call()
            least_time = min(least_time, time.perf_counter() - started)
    return least_time / calls * 1e6


def trained(recipe: str) -> str:
    """A line of a recipe's steps, and one of its casts."""
    with passing_for_gpu():
        steps = {kind: step_times(recipe, kind == "compiled") for kind in ("eager", "compiled")}
        casts = {label: cast_times(label, recipe) for label in CASTS if recipe != "bfloat16"}
    text = ", ".join(
        f"{kind} {forward:6.1f} {backward:6.1f} us" for kind, (forward, backward) in steps.items()
    )
    parts = (f"{label} {' '.join(f'{one:5.1f}' for one in times)} us" for label, times in casts.items())
    return text + "".join(f"\n    casts: {part}" for part in parts)


def main() -> int:
    """Both, of the configurations that are named, or of all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", choices=[*CONFIGS, *TRAINED, []], metavar="NAME",
        help=f"of {', '.join((*CONFIGS, *TRAINED))}; all",
    )  # fmt: skip
    for name in parser.parse_args().names or (*CONFIGS, *TRAINED):
        if name in TRAINED:
            sys.stdout.write(f"torch {torch.__version__} {name:10} {trained(name)}\n")
            sys.stdout.flush()
            continue
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
