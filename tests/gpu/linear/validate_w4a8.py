"""On a GPU: layers of preshuffled weights whose inputs are quantized on the way, compared and timed beside bfloat16.

    PYTHONPATH=. python tests/gpu/linear/validate_w4a8.py [--seconds 300] [--rows 1 16 64 128] [--shapes 0]

1. Inputs: what the kernel in front writes is what `fast.quantize` and `fast.fake_quantize` give, to the bit.
2. Products: sums that are exact in float32 to the bit, random ones within `reference.linear_error_bound`; with a bias, as eager
   layers (the first call and the prepared one), as CUDA graphs and compiled.
3. Times, quantization included, as CUDA graphs in turn over more weights than the second-level cache holds, and microseconds
   of the host for an eager layer. "only": the same weight with inputs as they are.

Prints a line a row, writes $OUT/w4a8.json; exits with 1 on any difference.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import ao_lab
import fast
import reference
from ao_lab import Recipe
from ao_lab.config.recipe import named
from ao_lab.tensor.quantized_tensor import from_quantized
from fast.kernels.exact_inputs import host
from fast.kernels.linear_small.host import INPUTS
from fast.matmul.preshuffled.dynamic import CODES, kind_of
from reference import Quantized, Scheme
from tests.gpu.harness.graph_times import captured, in_turn
from tests.support.linear_cases import exact_weight, weight

SHAPES = ((14336, 4096), (4096, 14336), (4096, 4096))
ROWS = (1, 16, 64, 128)
#: Schemes of inputs and weight that are timed, and what else is compared.
TIMED = {
    "int8 x int4 g32": ("int8_rowwise_asymmetric", "int4_g32"), "int8 x int4 g128": ("int8_rowwise", "int4_g128"),
    "fp8 x int4 g128": ("fp8_rowwise", "int4_g128"), "mxfp8 x mxfp8": ("mxfp8_e4m3_rceil", "mxfp8_e4m3_rceil"),
}  # fmt: skip
COMPARED = (
    *TIMED.values(), ("int8_rowwise", "int8_g128"), ("mxfp4_rceil", "int4_g32_asymmetric"),
    ("torchao.int8_rowwise_asymmetric", "int4_g64"), ("fp8_rowwise_e5m2", "int8_rowwise"), ("mxint8", "int4_g128"),
    ("compressed_tensors.fp8_token", "fp8_1x128"),
)  # fmt: skip
#: A layer whose products are compared.
SMALL = (384, 1024)
#: Bytes that weights in turn have together at least, rounds, and calls of an eager layer.
COLD, ROUNDS, CALLS = 200e6, 9, 300
NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


def rows_of(count: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Random rows of many sizes; zeros, the ends of the range, an infinity and NaN among them where there are enough."""
    generator = torch.Generator("cuda").manual_seed(count)
    x = torch.randn(count, length, device="cuda", generator=generator)
    x = (x * 2.0 ** (torch.arange(count, device="cuda") % 13 - 6)[:, None]).to(dtype)
    if count >= 16:
        info = torch.finfo(dtype)
        x[1], x[2], x[3, 5], x[4] = 0.0, -0.0, info.max, info.smallest_normal
        x[5, 1:], x[6, 7], x[7, 9] = 0.0, float("inf"), float("nan")
        x[8] = x[8].abs()
    return x


def inputs_differ(scheme: Scheme, x: torch.Tensor) -> int:
    """How many elements and scales of the kernel in front are not those of `fast.quantize`."""
    made = host.exact_inputs(x, scheme, str(kind_of(scheme)))
    if made is None:
        return x.numel()
    if kind_of(scheme) != CODES:
        return different(made[0], fast.fake_quantize(x, scheme))
    q = fast.quantize(x, scheme)
    values = torch.tensor(scheme.format.values, device="cuda")[q.codes.long()]
    values = values if q.zero is None else values - q.zero.float()
    scale = (
        q.scale[:, 0].float()
        if scheme.scale.storage == "float32"
        else q.scale.view(torch.bfloat16)[:, 0].float()
    )
    real = ~scale.isnan()
    return different(made[1], scale) + different(made[0][real].float() + 0.0, values[real] + 0.0)


def different(a: Any, b: torch.Tensor) -> int:
    """How many are neither equal nor both NaN."""
    return int(((a != b) & ~(a.isnan() & b.isnan())).sum())


def stored(made: Quantized, recipe: Recipe, dtype: torch.dtype) -> Any:
    """A preshuffled weight on the GPU."""
    parts = {part: getattr(made, part) for part in ("codes", "scale", "zero")}
    moved = replace(made, **{name: None if one is None else one.cuda() for name, one in parts.items()})
    return from_quantized(moved, recipe, dtype).to_layout("preshuffled").requires_grad_(False)


def exact_rows(count: int, length: int, scheme: Scheme, dtype: torch.dtype) -> torch.Tensor:
    """Small integers times a power of two, and the largest in each block, so that nothing is rounded."""
    top = scheme.scale.target
    top = top if kind_of(scheme) == CODES else 2.0 ** int(torch.tensor(top).log2().floor())
    x = torch.randint(-2, 3, (count, length), generator=torch.Generator().manual_seed(count)).float()
    x *= 2.0 ** max(int(torch.tensor(top).log2().floor()) - 8, 0)
    x[:, ::32] = top
    if scheme.zero is not None:
        x[:, ::32], x[:, 1::32] = top // 2 + 1, -(top // 2)
    return x.to(dtype).cuda()


@torch.no_grad()
def products_differ(inputs: str, name: str, dtype: torch.dtype, count: int) -> list[str]:
    """What is wrong with products of a small layer."""
    scheme, wrong, (n, length) = named(inputs), [], SMALL
    recipe = Recipe(weight=named(name), activation=scheme)
    w, bias = exact_weight(named(name), n, length), 64 * (torch.arange(n, device="cuda") % 7 - 3).to(dtype)
    t, x = stored(w, recipe, dtype), exact_rows(count, length, scheme, dtype)
    values = reference.dequantize(reference.quantize(x.cpu(), scheme)).double()
    sums = values @ fast.dequantize(w).double().t() + bias.cpu().double()
    if torch.equal(sums.float().double(), sums):
        wanted = sums.float().to(dtype).cuda()
        calls = {"eager": lambda: linear(x, t, bias), "prepared": lambda: linear(x, t, bias)}
        for how, call in calls.items():
            if not torch.equal(call(), wanted):
                wrong.append(f"{how}: {different(call(), wanted)} of {wanted.numel()} differ")
        torch.compiler.reset()
        compiled = torch.compile(lambda x, t, bias: linear(x, t, bias), backend="aot_eager")
        if count == 16 and not torch.equal(compiled(x, t, bias), wanted):
            wrong.append("compiled differs")
    else:
        wrong.append("the sums of this case are not exact")
    w = weight(named(name), n, length)
    t, x = stored(w, recipe, dtype), rows_of(count, length, dtype)
    x = torch.where(x.isfinite() & (x.abs() < 1e4), x, 1.0).to(dtype)
    values = reference.dequantize(reference.quantize(x.cpu(), scheme))
    bound = reference.linear_error_bound(values, w, bias.cpu(), out_dtype=NAMES[dtype])
    exact = values.double() @ fast.dequantize(w).double().t() + bias.cpu().double()
    made = linear(x, t, bias)
    outside = int((~((made.cpu().double() - exact).abs() <= bound)).sum())
    if outside:
        wrong.append(f"{outside} outside of the bound")
    if not torch.equal(linear(x, t, bias), made):
        wrong.append("two calls have other bits")
    return wrong


def compared(wrong: list[str], end: float) -> None:
    """Inputs, then products."""
    for inputs in dict.fromkeys(inputs for inputs, _ in COMPARED):
        found = sum(
            inputs_differ(named(inputs), rows_of(count, length, dtype))
            for count, length in ((1, 4096), (33, 14336), (128, 4096), (17, 28672), (16, 384))
            for dtype in INPUTS
        )
        print(f"inputs {inputs}: {found} differ", flush=True)
        wrong += [f"inputs {inputs}: {found} differ"] if found else []
    for inputs, name in COMPARED:
        for count in (1, 16, 128):
            if time.monotonic() > end:
                wrong.append(f"not compared: {inputs} x {name}, {count} rows")
                continue
            dtype = INPUTS[count == 16]
            found = products_differ(inputs, name, dtype, count)
            wrong += [f"{inputs} x {name}, {count} rows of {dtype}: {each}" for each in found]
        print(f"products {inputs} x {name}: {len(wrong)} wrong so far", flush=True)


def layers_of(shape: tuple[int, int]) -> dict[str, list[Any]]:
    """Weights by what multiplies them, as many in turn as are more than the cache holds."""
    made: dict[str, list[Any]] = {
        "bf16": [torch.randn(shape, device="cuda").to(torch.bfloat16) for _ in range(3)]
    }
    for label, (inputs, name) in TIMED.items():
        first = fast.quantize(made["bf16"][0], name, packed=named(name).format.bits < 8)
        for kind, activation in ((label, named(inputs)), (f"only {named(name).name}", None)):
            t = from_quantized(first, Recipe(weight=named(name), activation=activation), torch.bfloat16)
            t = t.to_layout("preshuffled").requires_grad_(False)
            size = sum(part.nbytes for part in t.parts.values() if part is not None)
            made[kind] = [t.clone() for _ in range(int(COLD / size) + 2)]
    return made


def host_time(call: Callable[[], Any]) -> float:
    """Microseconds of the host for an eager call, the quickest of some."""
    took = []
    for _ in range(CALLS):
        started = time.perf_counter()
        call()
        took.append(time.perf_counter() - started)
    torch.cuda.synchronize()
    return min(took) * 1e6


@torch.no_grad()
def timed(made: dict[str, list[Any]], rows: int, length: int) -> tuple[dict[str, float], dict[str, float]]:
    """Microseconds as graphs, and of the host."""
    x = torch.randn(rows, length, device="cuda").to(torch.bfloat16)
    calls = {name: [lambda w=w: linear(x, w) for w in weights] for name, weights in made.items()}
    graphs = {name: captured(each) for name, each in calls.items()}
    return in_turn(graphs, ROUNDS), {name: host_time(each[0]) for name, each in calls.items()}


def check_configurations(wrong: list[str]) -> None:
    """`quantize_` chooses the layout, and `explain` says what multiplies."""
    configurations = (
        ao_lab.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4),
        ao_lab.Float8DynamicActivationInt4WeightConfig(), ao_lab.MXDynamicActivationMXWeightConfig(),
    )  # fmt: skip
    for config in configurations:
        net = nn.Sequential(nn.Linear(512, 256, device="cuda", dtype=torch.bfloat16))
        ao_lab.quantize_(net, config)
        if "fused, up to 128 rows" not in str(ao_lab.explain(net)):
            wrong.append(f"{config}: {ao_lab.explain(net)}")


def main(arguments: list[str] | None = None) -> int:
    """Compare and time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--shapes", type=int, nargs="*", default=[0])
    options = parser.parse_args(arguments)
    begun, wrong, found = time.monotonic(), [], []
    check_configurations(wrong)
    for shape in [SHAPES[at] for at in options.shapes]:
        made = layers_of(shape)
        for rows in options.rows:
            times, of_host = timed(made, rows, shape[1])
            found.append({"shape": shape, "rows": rows, "times": times, "host": of_host})
            told = "  ".join(f"{name} {us:.2f} (host {of_host[name]:.1f})" for name, us in times.items())
            print(f"{shape} {rows:4} rows: {told}", flush=True)
        del made
    compared(wrong, begun + options.seconds)
    print("\n".join([*wrong, f"{len(wrong)} wrong, {time.monotonic() - begun:.0f} s"]), flush=True)
    if "OUT" in os.environ:
        about = {"device": torch.cuda.get_device_name(), "wrong": wrong, "rows": found}
        Path(os.environ["OUT"], "w4a8.json").write_text(json.dumps(about, indent=1))
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
