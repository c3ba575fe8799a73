"""Kernels of training on a GPU beside the reference, bit for bit: gradients of RMSNorm, SwiGLU and rotary embedding;
operands that a Hadamard transform or stochastic rounding makes, as values and as codes; both axes of one read, again and
again for races."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import reference
from fast.kernels import both_axes
from fast.kernels import hadamard as hadamard_host
from fast.layers.attention import rotary
from fast.layers.normalize import rms_norm_vjp
from fast.layers.swiglu import swiglu_vjp
from fast.quantize.rowwise_colwise import both_values, values_and_codes
from reference import SCHEMES
from reference.layers import normalize as specified_normalize
from reference.layers import rotary as specified_rotary
from reference.layers import swiglu as specified_swiglu
from reference.layers.hadamard import hadamard
from reference.schemes.schemes import Scheme
from reference.training.recipe import RECIPES
from tests.emulator.programs.training import SEED, STREAM, along
from tests.gpu.harness.subject import Asked, Check, Subject, same_bits

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (*HALVES, torch.float32)
Tensors = dict[str, Any]


def apart(label: str, found: Tensors, wanted: Tensors) -> Iterator[str]:
    """A line for each tensor with other bits."""
    yield from (
        f"{label}: {name} differs" for name, right in wanted.items() if not same_bits(found[name], right)
    )


def numbered(tensors: Any) -> Tensors:
    """By their places."""
    return {str(at): one for at, one in enumerate(tensors)}


# Gradients of layers.

#: In registers with and without filling, one element, pieces that end early, sums in two launches, rows that no kernel takes.
NORM_SHAPES = ((64, 256), (35, 4096), (5, 14336), (3, 16384), (33, 5120), (2, 5, 160), (33, 1), (7, 3), (9000, 128),
               (256,), (2, 20000))  # fmt: skip
HEAD_SHAPES = (
    (2, 32, 64, 128), (2, 8, 64, 128), (1, 3, 7, 10), (2, 5, 9, 80), (1, 1, 3, 2), (1, 130, 5, 256),
)  # fmt: skip


def wrong_norms(device: str, dtype: torch.dtype) -> Iterator[str]:
    """`rms_norm_vjp`: numbers whose magnitudes differ, so that another order of the sums shows."""
    for shape in NORM_SHAPES:
        x, g, more = (torch.randn(shape).mul(torch.randn(shape).exp()).to(dtype) for _ in range(3))
        w = torch.randn(shape[-1:]).to(dtype)
        for other in (None, more):
            there = None if other is None else other.to(device)
            got = rms_norm_vjp(g.to(device), x.to(device), w.to(device), eps=1e-5, residual_grad=there)
            wanted = specified_normalize.rms_norm_vjp(g, x, w, eps=1e-5, residual_grad=other)
            yield from apart(f"{shape} residual {other is not None}", numbered(got), numbered(wanted))


def wrong_gates(device: str, dtype: torch.dtype) -> Iterator[str]:
    """`swiglu_vjp`: every gate, beside ones and beside random patterns; halves of a matrix."""
    gate = torch.arange(65536).to(torch.int16).view(dtype).reshape(256, 256)
    for turn in range(6):
        order = [torch.randperm(65536) for _ in range(2)]
        g, up = (gate.flatten()[o].reshape(256, 256) if turn else torch.ones_like(gate) for o in order)
        got = swiglu_vjp(*(t.to(device) for t in (g, gate, up)))
        yield from apart(
            f"patterns {turn}", numbered(got), numbered(specified_swiglu.swiglu_vjp(g, gate, up))
        )
    both, g = torch.randn(65, 2 * 14336).to(dtype), torch.randn(65, 14336).to(dtype)
    wanted = specified_swiglu.swiglu_vjp(g, *(half.contiguous() for half in both.chunk(2, -1)))
    yield from apart(
        "halves", numbered(swiglu_vjp(g.to(device), *both.to(device).chunk(2, -1))), numbered(wanted)
    )


def wrong_heads(device: str, dtype: torch.dtype) -> Iterator[str]:
    """`rotary`: views of (B, T, H, D) and heads in rows of their own, both ways, not-finite elements."""
    for batch, count, length, width in HEAD_SHAPES:
        x = torch.randn(batch, length, count, width).to(dtype)
        x[0, 0, 0, :2] = torch.tensor([float("nan"), -0.0])
        c, s = (torch.randn(length, width).to(dtype) for _ in range(2))
        for view in (x.transpose(1, 2), x.transpose(1, 2).contiguous()):
            there = view.to(device) if view.is_contiguous() else x.to(device).transpose(1, 2)
            for inverse in (False, True):
                wanted = specified_rotary.rotary(view.contiguous(), c, s, inverse=inverse)
                got = rotary(there, c.to(device), s.to(device), inverse=inverse)
                yield from apart(f"{tuple(view.shape)} {inverse}", {"rows": got}, {"rows": wanted})


def layer_checks(asked: Asked) -> Iterator[Check]:
    """By function and dtype."""
    torch.manual_seed(0)
    for dtype in DTYPES:
        yield f"rms_norm_vjp {dtype}", partial(wrong_norms, asked.device, dtype)
        yield f"rotary {dtype}", partial(wrong_heads, asked.device, dtype)
    for dtype in HALVES:
        yield f"swiglu_vjp {dtype}", partial(wrong_gates, asked.device, dtype)


# Blocks mixed and rounded by words that are drawn in place.

#: Recipe, operand's product and side, axis of the matrix that it runs along.
OPERANDS = (
    ("mxfp4", "input_grad", "a", 1), ("mxfp4", "weight_grad", "a", 0), ("nvfp4", "input_grad", "a", 1),
    ("nvfp4", "weight_grad", "a", 0), ("nvfp4", "weight_grad", "b", 0),
)  # fmt: skip


def matrix(kind: int) -> torch.Tensor:
    """Numbers of many sizes, of all, and with NaN, infinities and subnormals."""
    generator = torch.Generator().manual_seed(kind)
    x, spread = (torch.randn(64, 1024, generator=generator) for _ in range(2))
    x = x * torch.exp(spread * (30 if kind == 1 else 3))
    x[0], x[:, 3] = 0, 0
    if kind == 2:
        x[5, 7], x[40, 9], x[9], x[60] = float("nan"), float("inf"), 1e-40, 3e38
    return x.bfloat16()


def wrong_operand(scheme: Scheme, length: int, axis: int) -> Iterator[str]:
    """Codes, scales and values of the reference."""
    for kind in range(3):
        x, rule, words = matrix(kind), hadamard_host.Rule(scheme, length, axis), None
        mixed = hadamard(along(x, axis), length) if length else along(x, axis)
        if scheme.rounding == "stochastic":
            words = torch.from_numpy(reference.random_bits(tuple(mixed.shape), seed=SEED, stream=STREAM))
        q = reference.quantize(mixed, scheme, random_bits=words)
        made = hadamard_host.quantized(x.cuda(), rule, SEED, STREAM)
        found = {
            "codes": made.codes,
            "scales": made.scale,
            "values": hadamard_host.quantized_values(x.cuda(), rule, SEED, STREAM),
        }
        wanted = {"codes": q.codes, "scales": q.scale, "values": reference.dequantize(q, "bfloat16")}
        wanted = {name: along(one, axis) for name, one in wanted.items()}
        outer = {} if q.outer is None else {"outer": q.outer}
        yield from apart(f"case {kind}", {**found, "outer": made.outer}, {**wanted, **outer})


def wrong_transform() -> Iterator[str]:
    """The transform alone, along both axes."""
    for axis, length in ((0, 32), (1, 32), (0, 16), (1, 128)):
        x = matrix(2)
        found = hadamard_host.mixed(x.cuda(), hadamard_host.Rule(None, length, axis))
        yield from apart(
            f"{length} along {axis}",
            {"mixed": found},
            {"mixed": along(hadamard(along(x, axis), length), axis)},
        )


# Both axes of one read.

BOTH = ("mxfp8_e4m3_rceil", "mxfp8_e5m2", "mxfp6_e2m3_rceil", "mxfp6_e3m2_rceil", "mxfp4_rceil")
#: A program alone, programs that are not filled, and many: a matrix in copies beside and below each other; calls of each.
BOTH_SHAPES, REPETITIONS = (((32, 32), 1), ((96, 160), 1), ((64, 1024), 1), ((1024, 1024), 4)), 50


def hard_matrices(shape: tuple[int, int], dtype: torch.dtype) -> Iterator[torch.Tensor]:
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


def by_one_read(x: torch.Tensor, scheme: Scheme) -> Tensors:
    """All outputs of both calls."""
    assert both_axes.covers(x, scheme)
    (rows, columns), (values, q) = both_values(x, scheme), values_and_codes(x, scheme)
    return {"rows": rows, "columns": columns, "values": values, "codes": q.codes, "scales": q.scale}


def wrong_both(name: str, dtype: torch.dtype) -> Iterator[str]:
    """What differs from the reference, or from one call to the next. Copies have results that are copies."""
    scheme = SCHEMES[name]
    for shape, copies in BOTH_SHAPES:
        for number, x in enumerate(hard_matrices(shape, dtype)):
            rows, columns = (reference.fake_quantize(x, scheme, axis=axis) for axis in (1, 0))
            q, label = reference.quantize(x, scheme, axis=0), f"{shape} x {copies}, case {number}"
            wanted = {"rows": rows, "columns": columns, "values": rows, "codes": q.codes, "scales": q.scale}
            wanted = {
                part: torch.as_tensor(one).cuda().repeat(copies, copies) for part, one in wanted.items()
            }
            on_gpu = x.cuda().repeat(copies, copies)
            found = by_one_read(on_gpu, scheme)
            yield from apart(label, found, wanted)
            for _ in range(REPETITIONS):
                yield from apart(f"{label}, again", by_one_read(on_gpu, scheme), found)


def operand_checks(asked: Asked) -> Iterator[Check]:
    """The transform, operands, both axes."""
    yield "transform", wrong_transform
    for name, product, side, axis in OPERANDS:
        operand = getattr(getattr(RECIPES[name], product), side)
        yield f"{name} {product} {side}", partial(wrong_operand, operand.scheme, operand.hadamard, axis)
    for name in BOTH:
        for dtype in HALVES:
            yield f"both axes {name} {dtype}", partial(wrong_both, name, dtype)


SUBJECTS = (
    Subject(
        "layer_gradients", "gradients of RMSNorm, SwiGLU and rotary embedding", layer_checks, on_cpu=True
    ),
    Subject(
        "training_operands",
        "operands of training that are mixed, rounded by words, or read once for both axes",
        operand_checks,
    ),
)
