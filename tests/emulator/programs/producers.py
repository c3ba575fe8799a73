"""Normalization, SwiGLU, gradients, rotary embedding: kernels in Triton's interpreter, on CPU tensors, against the reference.

    TRITON_INTERPRET=1 python -m tests.emulator.interpreter_process producers normalize|swiglu

Prints how many tensors were the same; raises at the first that is not. The interpreter adds and rounds as a GPU does, but for
a * b + c, which it rounds twice: here it is made to round once.

The attention kernel of `decode` in Triton's interpreter, against torch's attention in float64.

    TRITON_INTERPRET=1 python -m tests.emulator.interpreter_process producers attention

Caches hold NaN where nothing may be read, and positions lie
on both sides of what a program takes at once. Numbers and angles are such that rotations are exact in bfloat16.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

import reference
from fast.kernels.layers import attention, rms_norm, swiglu
from fast.kernels.layers import rms_norm as normalize
from fast.kernels.layers.attention import attention_kernel
from reference import Quantized
from reference.layers import rotary as specified_rotary
from reference.layers.normalize import rms_norm_vjp
from reference.layers.swiglu import swiglu_vjp
from tests.emulator import quick_interpreter

DTYPES = ("bfloat16", "float16", "float32")
SCHEMES = ("fp8_rowwise", "mxfp8_e4m3", "mxfp4", "int8_rowwise", "int4_g32_asymmetric")
NORM_SHAPES = ((2, 5, 96), (5, 1536), (3, 3584), (1, 32), (33, 1), (1, 17000))
GATE_SHAPES = ((33, 384), (5, 4352), (2, 3, 64))
#: A piece of rows that ends early, rows filled up, sums in two launches.
GRADIENT_SHAPES = ((2, 96), (35, 64))


def fma(_self: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z rounded once: the product has 48 bits, the sum is wrong only where 64 bits end on a tie."""
    wide = [np.asarray(part.data).astype(np.longdouble) for part in (x, y, z)]
    return interpreter.TensorHandle((wide[0] * wide[1] + wide[2]).astype(np.float32), z.dtype.scalar)


def same(label: str, got: Any, wanted: Any) -> int:
    """1; ValueError where bits, shapes, dtypes or other fields differ."""
    if isinstance(wanted, Quantized):
        return min(
            same(f"{label} {f.name}", getattr(got, f.name), getattr(wanted, f.name)) for f in fields(wanted)
        )
    if not isinstance(wanted, torch.Tensor):
        equal = got == wanted
    else:
        equal = got.shape == wanted.shape and got.dtype == wanted.dtype
        equal = equal and torch.equal(
            got.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8)
        )
    if not equal:
        raise ValueError(f"{label}: {got} is not {wanted}")
    return 1


def normal(shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
    """Normal numbers, some of them large."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x.reshape(-1)[::77] *= 1e3
    return x.to(getattr(torch, dtype))


def extreme(dtype: str) -> torch.Tensor:
    """Rows with NaN, infinity, zeros, subnormals and squares that overflow or vanish."""
    x = normal((16, 256), dtype, 1)
    x[1, 3], x[2, 250], x[3] = float("nan"), -float("inf"), 0
    x[4], x[5], x[6, 7] = x[4] * 1e-30, x[5] * 1e30, 1e-40
    return x


def normalized() -> int:
    """`rms_norm` and `rms_norm_quantize`."""
    done = 0
    for dtype in DTYPES:
        inputs = [normal(shape, dtype, 2) for shape in NORM_SHAPES] + [extreme(dtype)]
        for x in inputs:
            weight, other = normal(x.shape[-1:], dtype, 3), normal(x.shape, dtype, 4)
            for residual, eps in ((None, 1e-6), (other, 0.0), (other, 2.0**-140)):
                got = normalize.rms_norm(x, weight, eps, residual)
                for part in zip(got, reference.rms_norm(x, weight, eps=eps, residual=residual), strict=True):
                    done += same(f"rms_norm {dtype} {tuple(x.shape)}", *part)
            for name in SCHEMES if dtype != "float16" else SCHEMES[:1]:
                done += _normalized_codes(x, weight, name, other)
    return done


def _normalized_codes(x: torch.Tensor, weight: torch.Tensor, name: str, residual: torch.Tensor) -> int:
    done, block = 0, reference.SCHEMES[name].scale.block
    if x.shape[-1] % max(block, 1) == 0:
        for packed in {False, SCHEMES.index(name) > 1}:
            got = normalize.rms_norm_quantize(x, weight, name, 1e-6, residual, packed)
            wanted = reference.rms_norm_quantize(x, weight, name, residual=residual, packed=packed)
            if got is not None:
                done += sum(same(f"{name} {tuple(x.shape)}", *part) for part in zip(got, wanted, strict=True))
    return done


def gated() -> int:
    """`swiglu` and `swiglu_quantize`: all gates, random pairs of patterns, shapes, halves of a matrix."""
    done = roughly_gated()
    for dtype in ("bfloat16", "float16"):
        gate = torch.arange(65536).to(torch.int16).view(getattr(torch, dtype)).reshape(256, 256)
        up = gate.reshape(-1)[torch.randperm(65536, generator=torch.Generator().manual_seed(0))].reshape(
            256, 256
        )
        for other in (torch.ones_like(gate), up):
            done += same(f"gates {dtype}", swiglu.swiglu(gate, other), reference.swiglu(gate, other))
        both = normal((33, 192), dtype, 1)
        halves = both[:, :96], both[:, 96:]
        done += same("halves", swiglu.swiglu(*halves), reference.swiglu(*(h.contiguous() for h in halves)))
        for shape in GATE_SHAPES:
            pair = normal(shape, dtype, 2), normal(shape, dtype, 3)
            for name in SCHEMES:
                got, wanted = (
                    swiglu.swiglu_quantize(*pair, name, False),
                    reference.swiglu_quantize(*pair, name),
                )
                done += same(f"{name} {dtype} {shape}", got, wanted)
    return done


@triton.jit
def rough_reciprocal(d, HAS_PTX: tl.constexpr):
    """1 / d, wrong by two units in the last place, up or down."""
    exact = tl.div_rn(tl.full(d.shape, 1.0, tl.float32), d).to(tl.int32, bitcast=True)
    return (exact + (tl.program_id(0) % 2 * 4 - 2)).to(tl.float32, bitcast=True)


def roughly_gated() -> int:
    """bfloat16's silu, whatever instruction approximates the reciprocal: programs err up and down by turns."""
    gate = torch.arange(65536).to(torch.int16).view(torch.bfloat16).reshape(-1, swiglu.ELEMENTS)
    gate = gate.repeat_interleave(2, 0)
    one, exact = torch.ones_like(gate), swiglu.approximate_reciprocal
    swiglu.approximate_reciprocal = rough_reciprocal
    got, wanted = swiglu.swiglu(gate, one).view(torch.int16), reference.swiglu(gate, one).view(torch.int16)
    swiglu.approximate_reciprocal = exact
    wrong = gate[got != wanted].tolist()
    if wrong not in ([], [5.9375]):
        raise ValueError(f"with a bad reciprocal silu is wrong at {wrong}")
    return 1


def differentiated() -> int:
    """`rotary`, `rms_norm_vjp` and `swiglu_vjp`: dtypes, shapes, rows that are not finite, all gates, halves of a matrix."""
    done, rms_norm.PARTS = roughly_differentiated(), 2
    for dtype in ("bfloat16", "float32"):
        for x in [*(normal(shape, dtype, 2) for shape in GRADIENT_SHAPES), extreme(dtype)[:7, :64]]:
            weight, g, other = (
                normal(x.shape[-1:], dtype, 3),
                normal(x.shape, dtype, 4),
                normal(x.shape, dtype, 5),
            )
            for more, eps in ((None, 1e-6), (other, 2.0**-140))[: 2 if dtype == "bfloat16" else 1]:
                got = rms_norm.rms_norm_vjp(g, x, weight, eps, more)
                wanted = rms_norm_vjp(g, x, weight, eps=eps, residual_grad=more)
                label = f"rms_norm_vjp {dtype} {tuple(x.shape)}"
                done += sum(same(label, *part) for part in zip(got, wanted, strict=True))
    return done + turned() + sum(_gates_differentiated(dtype) for dtype in ("bfloat16", "float16"))


def turned() -> int:
    """`rotary` both ways: dtypes, heads that fill no tile, a table for each batch."""
    done = 0
    for dtype in DTYPES:
        x = normal((2, 5, 3, 12), dtype, 1).transpose(1, 2)
        tables = [normal((2, 5, 12), dtype, seed) for seed in (2, 3)]
        for inverse, (c, s) in ((False, tables), (True, [t[0] for t in tables])):
            wanted = specified_rotary.rotary(x.contiguous(), c, s, inverse=inverse)
            done += same(f"rotary {dtype}", attention.rotary(x, c, s, inverse).contiguous(), wanted)
    return done


def _gates_differentiated(dtype: str) -> int:
    gate = torch.arange(65536).to(torch.int16).view(getattr(torch, dtype)).reshape(256, 256)
    orders = [torch.randperm(65536, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    one, (g, up) = torch.ones_like(gate), (gate.reshape(-1)[order].reshape(256, 256) for order in orders)
    both = normal((33, 192), dtype, 1)
    cases = [(one, gate, one), (g, gate, up), (normal((33, 96), dtype, 2), both[:, :96], both[:, 96:])]
    cases += [tuple(normal(shape, dtype, seed) for seed in range(3)) for shape in GATE_SHAPES]
    return sum(
        same(f"swiglu_vjp {dtype}", *part)
        for case in cases
        for part in zip(
            swiglu.swiglu_vjp(*case),
            swiglu_vjp(*(t.contiguous() for t in case)),
            strict=True,
        )
    )


def roughly_differentiated() -> int:
    """bfloat16's silu' with reciprocals that are wrong by two units, up and down by turns."""
    gate = torch.arange(65536).to(torch.int16).view(torch.bfloat16).reshape(-1, swiglu.ELEMENTS)
    gate = gate.repeat_interleave(2, 0)
    one, exact = torch.ones_like(gate), swiglu.approximate_reciprocal
    swiglu.approximate_reciprocal = rough_reciprocal
    got, wanted = swiglu.swiglu_vjp(one, gate, one)[0], swiglu_vjp(one, gate, one)[0]
    swiglu.approximate_reciprocal = exact
    return same("silu' with a bad reciprocal", got, wanted)


HEADS, KV_HEADS, WIDTH, LENGTH, STEP = 4, 2, 16, 40, 8
#: The interpreter cuts off where a GPU rounds; and what float32 loses in sums of scores below 16, exponentials and values.
RELATIVE, ABSOLUTE = 2.0**-7, 2.0**-16


def rotated(x, cosine, sine):
    """Heads (n, WIDTH) after rotation, float64."""
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


def expected(qkv, cosine, sine, last, keys, values):
    """All heads' attention in float64, and the rotated key."""
    heads = qkv.double().view(-1, WIDTH)
    cosine, sine = cosine.double(), sine.double()
    q = rotated(heads[:HEADS], cosine, sine).bfloat16().double()
    own = rotated(heads[HEADS : HEADS + KV_HEADS], cosine, sine).bfloat16()
    k = torch.cat((keys[0, :, :last], own[:, None]), 1).double()
    v = torch.cat((values[0, :, :last], qkv.view(-1, WIDTH)[HEADS + KV_HEADS :, None]), 1).double()
    k, v = (part.repeat_interleave(HEADS // KV_HEADS, 0) for part in (k, v))
    chances = ((q[:, None] * k).sum(-1) * WIDTH**-0.5).softmax(-1)
    return (chances[..., None] * v).sum(1), own


def compare_attention(last, rng):
    """One position; returns the largest error over what is allowed."""
    qkv = torch.from_numpy(rng.integers(-16, 17, (HEADS + 2 * KV_HEADS) * WIDTH) / 8).bfloat16()
    cosine, sine = torch.from_numpy(rng.integers(-2, 3, (2, WIDTH // 2)) / 2).repeat(1, 2).bfloat16()
    keys, values = (
        torch.from_numpy(rng.standard_normal((1, KV_HEADS, LENGTH, WIDTH))).bfloat16() for _ in range(2)
    )
    keys[:, :, last:], values[:, :, last:] = torch.nan, torch.nan
    before = keys.clone(), values.clone()
    want, own = expected(qkv, cosine, sine, last, keys, values)
    y = torch.empty(HEADS * WIDTH, dtype=torch.bfloat16)
    position = torch.tensor([last])
    attention_kernel[HEADS,](
        qkv, cosine, sine, position, keys, values, y, WIDTH**-0.5,
        HEADS=HEADS, KV_HEADS=KV_HEADS, WIDTH=WIDTH, LENGTH=LENGTH, STEP=STEP, USE_PDL=False,
    )  # fmt: skip
    here = torch.arange(LENGTH) == last
    for now, then in zip((keys, values), before, strict=True):
        assert torch.equal(now[:, :, ~here].view(torch.int16), then[:, :, ~here].view(torch.int16))
    assert torch.equal(values[0, :, last], qkv.view(-1, WIDTH)[HEADS + KV_HEADS :])
    assert torch.equal(keys[0, :, last], own)
    error = float(((y.double().view(HEADS, WIDTH) - want).abs() / (RELATIVE * want.abs() + ABSOLUTE)).max())
    assert error <= 1, f"position {last}: {error} of what is allowed"
    return error


def decode():
    """All positions of interest."""
    rng = np.random.default_rng(0)
    for last in (0, 1, STEP - 1, STEP, STEP + 1, 3 * STEP, LENGTH - 1):
        print(f"position {last}: {compare_attention(last, rng):.2f} of the allowed error")


def main(name: str) -> None:
    """Compare what has this name."""
    quick_interpreter.install()
    if name == "attention":
        decode()
        return
    interpreter.InterpreterBuilder.create_fma = fma
    programs = {"normalize": (normalized,), "swiglu": (gated, differentiated)}
    print(sum(program() for program in programs[name]))
