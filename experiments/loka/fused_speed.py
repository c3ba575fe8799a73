"""Parts "norm speed" and "epilogue speed" of `loka`, on a GPU alone: FP8 in one pass with what is before and behind a matmul.

"norm speed": a norm of 36032 tokens and the matmul behind it, in the shapes of HSTU's two linear layers. In bfloat16 both are
compiled; in FP8 the norm writes codes with a scale a row (`fast.rms_norm_quantize`, `fast.layer_norm_quantize`, or what
torch.compile makes of the formula) and the weight is stored so. "epilogue speed": an FP8 matmul whose epilogue normalises
blocks of 256 columns, applies hard swish and quantizes (`fast.linear_block_norm`), beside the plain matmul and beside what
torch.compile makes of the rest.

All methods of a case are timed in turn, from CUDA graphs over operands that the L2 cache cannot hold together, each after calls
of its own. What a method computes is compared with float32 of the same operands first: a wrong one has no time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import fast
from ao_lab.measure.turns import Plan, Span, Watch, cache_bytes, input_sets, prepare, summary, watch_of
from experiments.harness.bench import repeated, steady
from experiments.harness.cuda_graph import launched
from experiments.harness.measuring import Deadline, Stages, Values, Wrong, kernel
from reference import SCHEMES, Quantized
from reference.layers.block_norm import BLOCK

NORM, EPILOGUE = "norm speed", "epilogue speed"
TIME, ERROR = "time", "error against float32"
ROWWISE, EPS = "fp8_rowwise", 1e-6
#: What the epilogue writes: a scale for so many columns of a row.
BLOCKS = "fp8_1x128"
GROUP = SCHEMES[BLOCKS].scale.block
#: What an error may be: each of two operands, and of codes the result, is within 1/16 of itself in e4m3.
MOST_ERROR = 3 / 16
PLANS = {"cuda": Plan(rounds=12, warmup=1, span=4e-3, seconds=3.0), "cpu": Plan(rounds=1, warmup=0, fewest=1)}
#: Seconds of a method's own calls before each of its times; operands of a case in turn at most.
SETTLE, SETS = 0.04, 8
#: Rows that are compared.
COMPARED = 256

Operands = tuple[Any, ...]
Method = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """Rows, inputs, outputs; operands(case, device) of one set; exact(*operands): float32 of the first rows; methods by name,
    the first is what the others are compared with."""

    m: int
    k: int
    n: int
    operands: Callable[[Case, str], Operands]
    exact: Callable[..., Tensor]
    methods: Mapping[str, Method]
    kind: str = ""

    @property
    def name(self) -> str:
        """As a setting of rows."""
        return f"{self.kind}{self.m} x {self.k} x {self.n}"


def scaled_mm(x: Quantized, w: Quantized) -> Tensor:
    """torch's product of e4m3 codes with a scale a row, in bfloat16."""
    left, right = (one.codes.view(torch.float8_e4m3fn) for one in (x, w))
    found: Tensor = torch._scaled_mm(
        left, right.t(), x.scale, w.scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return found


def own_matmul(x: Quantized, w: Quantized) -> Tensor:
    """The same by ao_lab's kernels."""
    return fast.linear_of_codes(x, w, dtype=torch.bfloat16, fast_sums=True)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """By torch.compile, for each shape anew; on a CPU as it is."""
    fast_form = torch.compile(function, dynamic=False)
    return lambda x, *more: (fast_form if x.is_cuda else function)(x, *more)


# A norm before a matmul: operands are x (M, K), gain (K,), w (N, K) in bfloat16, and w quantized.


def norm_operands(case: Case, device: str) -> Operands:
    """Random ones."""
    x, w = (
        torch.randn((rows, case.k), device=device, dtype=torch.bfloat16) * scale
        for rows, scale in ((case.m, 1.0), (case.n, case.k**-0.5))
    )
    gain = 1 + 0.1 * torch.randn(case.k, device=device)
    return x, gain.to(torch.bfloat16), w, fast.quantize(w, ROWWISE)


def rms(x: Tensor, gain: Tensor) -> Tensor:
    """torch's RMSNorm."""
    return functional.rms_norm(x, gain.shape, gain, EPS)


def layer_norm(x: Tensor, gain: Tensor) -> Tensor:
    """torch's LayerNorm without a bias."""
    return functional.layer_norm(x, gain.shape, gain, None, EPS)


def norm_exact(norm: Method) -> Method:
    """The norm and the matmul of the first rows in float32."""
    return lambda x, gain, w, q: norm(x[:COMPARED].float(), gain.float()) @ w.float().t()


def in_bfloat16(norm: Method) -> Method:
    """Norm and matmul, compiled."""
    run = compiled(lambda x, gain, w: functional.linear(norm(x, gain), w))
    return lambda x, gain, w, q: run(x, gain, w)


def by_compiler(norm: Method) -> Method:
    """The norm, the scales of rows and the codes as torch.compile fuses them, then torch's matmul."""

    def formula(x: Tensor, gain: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        y = norm(x, gain).float()
        scales = y.abs().amax(-1, keepdim=True) / 448
        left = (y / scales).to(torch.float8_e4m3fn)
        right = codes.view(torch.float8_e4m3fn).t()
        found: Tensor = torch._scaled_mm(
            left, right, scales, scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True
        )
        return found

    run = compiled(formula)
    return lambda x, gain, w, q: run(x, gain, q.codes, q.scale)


def one_kernel(product: Callable[[Quantized, Quantized], Tensor]) -> Method:
    """The norm writes codes."""
    return lambda x, gain, w, q: product(fast.rms_norm_quantize(x, gain, ROWWISE, eps=EPS)[0], q)


def layer_in_one_kernel(product: Callable[[Quantized, Quantized], Tensor]) -> Method:
    """LayerNorm writes codes."""
    return lambda x, gain, w, q: product(fast.layer_norm_quantize(x, gain, ROWWISE, eps=EPS), q)


def cast_apart(x: Tensor, gain: Tensor, w: Tensor, q: Quantized) -> Tensor:
    """The norm writes bfloat16, a cast reads it."""
    return scaled_mm(fast.quantize(fast.rms_norm(x, gain, eps=EPS)[0], ROWWISE), q)


COMPILED = "fp8, norm and codes by torch.compile"
RMS_METHODS: dict[str, Method] = {
    "bfloat16": in_bfloat16(rms),
    "fp8, rms_norm_quantize": one_kernel(scaled_mm),
    "fp8, rms_norm_quantize, ao_lab's matmul": one_kernel(own_matmul),
    COMPILED: by_compiler(rms),
    "fp8, norm and cast apart": cast_apart,
}
LAYER_METHODS: dict[str, Method] = {
    "bfloat16": in_bfloat16(layer_norm),
    "fp8, layer_norm_quantize": layer_in_one_kernel(scaled_mm),
    COMPILED: by_compiler(layer_norm),
}

# Block norm behind a matmul: operands are x (M, K) and w (N, K) quantized, and gain (N,) in float32.


def epilogue_operands(case: Case, device: str) -> Operands:
    """Random ones."""
    x, w = (
        fast.quantize(torch.randn((rows, case.k), device=device, dtype=torch.bfloat16), ROWWISE)
        for rows in (case.m, case.n)
    )
    return x, w, 1 + 0.1 * torch.rand(case.n, device=device)


def block_norm(y: Tensor, gain: Tensor) -> Tensor:
    """Block norm and hard swish in float32."""
    blocks = functional.rms_norm(y.float().unflatten(1, (-1, BLOCK)), (BLOCK,), None, EPS)
    return functional.hardswish(blocks.flatten(1) * gain)


def codes_behind(y: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """Block norm and hard swish, then codes with scales of 128 columns."""
    v = block_norm(y, gain).unflatten(1, (-1, GROUP))
    scale = v.abs().amax(-1, keepdim=True).clamp_min(2.0**-126) / 448
    return (v / scale).to(torch.float8_e4m3fn).flatten(1), scale[..., 0]


def epilogue_exact(x: Quantized, w: Quantized, gain: Tensor) -> Tensor:
    """Of the operands' values, the first rows in float32."""
    a, b = (one.codes.view(torch.float8_e4m3fn).float() * one.scale for one in (rows_of(x), w))
    return block_norm(a @ b.t(), gain)


def rows_of(q: Quantized) -> Quantized:
    """The first rows of an operand."""
    shape = (min(COMPARED, q.shape[0]), q.shape[1])
    return Quantized(q.codes[:COMPARED], q.scale[:COMPARED], None, None, shape, 1, q.scheme)


def in_epilogue(scheme: str | None) -> Method:
    """The kernel, which writes bfloat16 or codes."""
    return lambda x, w, gain: fast.linear_block_norm(
        x, w, gain, eps=EPS, activation="hard_swish", scheme=scheme
    )


def fused_behind(function: Callable[..., Any]) -> Method:
    """torch's matmul, then a function as torch.compile fuses it."""
    run = compiled(function)
    return lambda x, w, gain: run(scaled_mm(x, w), gain)


PLAIN = "torch's matmul alone"
EPILOGUE_METHODS: dict[str, Method] = {
    PLAIN: lambda x, w, gain: scaled_mm(x, w),
    "ao_lab's matmul alone": lambda x, w, gain: own_matmul(x, w),
    "block norm in the epilogue": in_epilogue(None),
    "block norm and codes in the epilogue": in_epilogue(BLOCKS),
    "torch's matmul, then block norm": fused_behind(lambda y, gain: block_norm(y, gain).to(y.dtype)),
    "torch's matmul, then block norm and codes": fused_behind(codes_behind),
}
#: What computes no norm.
ALONE = (PLAIN, "ao_lab's matmul alone")

NORM_SHAPES = ((36032, 512, 2048), (36032, 1536, 512))
EPILOGUE_SHAPES = ((6144, 18432, 8192), (6144, 4608, 4096), (8192, 3456, 1024))
CASES: dict[str, tuple[Case, ...]] = {
    NORM: tuple(
        Case(*shape, norm_operands, norm_exact(norm), methods, kind)
        for kind, norm, methods in (
            ("RMSNorm, ", rms, RMS_METHODS),
            ("LayerNorm, ", layer_norm, LAYER_METHODS),
        )
        for shape in NORM_SHAPES
    ),
    EPILOGUE: tuple(
        Case(*shape, epilogue_operands, epilogue_exact, EPILOGUE_METHODS) for shape in EPILOGUE_SHAPES
    ),
}


def measure(case: Case, device: str, deadline: Deadline) -> dict[str, Values]:
    """Values of every method of a case, timed in turn; of one that fails or comes too late its status."""
    watch, plan, results = watch_of(device), PLANS[device], dict[str, Values]()
    spans: dict[str, Span] = {}
    stages = Stages(case.name, deadline, told=device == "cuda")
    torch.manual_seed(0)
    size = 2 * (case.m + case.n) * case.k
    count = input_sets(size, cache_bytes(), SETS) if device == "cuda" else 1
    sets = [case.operands(case, device) for _ in range(count)]
    for name in case.methods:
        results[name] = stages.method(partial(begin, case, name, sets, watch, plan, spans))
        stages.done(f"{name}, compiled and compared")
    times = steady(watch, spans, plan, SETTLE if device == "cuda" else 0.0) if spans else {}
    stages.done("timed")
    for at, name in enumerate(spans):
        more = repeated(times, name) if at == 0 else {}
        results[name] = {**results[name], **summary(times[name]).values("us"), **more}
    return results


def begin(
    case: Case, name: str, sets: list[Operands], watch: Watch, plan: Plan, spans: dict[str, Span]
) -> Values:
    """Compile, compare and capture one method; its error and its kernels."""
    method = case.methods[name]
    values: Values = {}
    if name not in ALONE:
        error = relative_error(method(*sets[0]), case.exact(*sets[0]))
        if not error < MOST_ERROR:
            raise Wrong(f"the error against float32 is {error:.3g}")
        values[ERROR] = (error, "")
    values |= kernel(launched(partial(method, *sets[0])))
    spans[name] = prepare(watch, [partial(method, *one) for one in sets], plan)
    return values


def relative_error(found: Any, exact: Tensor) -> float:
    """Of the first rows, by norms; codes count for what they stand for."""
    y = found
    if isinstance(found, Quantized):
        y = (found.codes, found.scale)
    if isinstance(y, tuple):
        codes, scale = (one[:COMPARED] for one in y)
        values = codes.view(torch.float8_e4m3fn).float().unflatten(1, (scale.shape[1], -1))
        y = (values * scale[..., None]).flatten(1)
    gap = (y[:COMPARED].float() - exact).norm() / exact.norm()
    return float(gap) if math.isfinite(float(gap)) else math.inf


__all__ = ["ALONE", "CASES", "COMPILED", "EPILOGUE", "ERROR", "NORM", "PLAIN", "TIME", "Case", "measure"]
