"""Calibration of one layer on a GPU: `fast.gptq`, searched scales, held-out damping, second moments and steps of SignRound, and
times of the first.

The kernel that goes through a block of columns has the bits of torch operations that take the same steps. Against the reference
sums have another order, so a target may lie on the other side of the middle of two values. Of each row the first column in the
order of the sweep whose code differs is looked at: there the reference's own target moved by 1e-9 of itself has
to have both codes; such ties are counted. What follows in that row is another path.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

import fast
import reference
from ao_lab.calibration.judge import token_errors
from fast.calibration.damping import held_out_errors_on_device
from fast.calibration.gptq import ColumnRule, Sweep, device_order
from fast.calibration.hessian import factor_on_device
from fast.calibration.signround import signround_keep, signround_unchecked
from reference import SCHEMES, Quantized
from reference.calibration.damping import held_out_errors
from reference.calibration.gptq import column_order
from reference.calibration.signround import SignRoundState
from reference.quantize.blocks import Blocks
from tests.gpu.harness.subject import Asked, Check, Row, Subject, differs, same_bits

SCHEMES_CHECKED = (
    "int4_g128", "int3_g64_asymmetric", "int2_g32", "int8_rowwise", "int8_tensorwise", "mxfp4", "mxfp8_e4m3", "mxint8", "nvfp4",
    "mxfp6_e2m3", "fp8_rowwise", "fp8_128x128", "nf4", "stretched2_g32", "te.nvfp4", "compressed_tensors.nvfp4",
    "compressed_tensors.int4_g128", "torchao.int4_g32_tinygemm", "torchao.fp8_rowwise_training", "torchao.mxfp4_rceil",
)  # fmt: skip
#: Of which a step of SignRound is compared: integers, groups by zero points, floats under one and two levels, whole rows.
ROUNDED = ("int4_g128", "int3_g64_asymmetric", "mxfp4", "nvfp4", "int8_rowwise")
ORDERS = ("stored", "activation", "groups")
#: How far a target may lie from the middle of two values, as a share of itself.
NEAR = 1e-9
#: Rows that may hold a tie, as a share: sums differ in the last of 53 bits, and codes have a few.
TIES = 0.01
#: Layers of Llama-3.1-8B.
SHAPES = ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336))


def layer(
    n: int, k: int, device: str = "cpu", tokens: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights in bfloat16, and the second moment of inputs that depend on each other."""
    generator = torch.Generator(device).manual_seed(n + k)
    x = torch.randn((tokens or 4 * k, k), device=device, generator=generator)
    x = x + x.roll(1, 1) * 0.5 + torch.randn((len(x), 1), device=device, generator=generator)
    x *= torch.randn(k, device=device, generator=generator).mul_(0.5).exp_()
    w = torch.randn((n, k), device=device, generator=generator).bfloat16()
    return w, fast.second_moment(x.bfloat16()).value


def checks(asked: Asked) -> Iterator[Check]:
    """Small layers, which the reference takes too."""
    for name in asked.schemes or SCHEMES_CHECKED:
        if asked.device != "cpu":
            yield f"kernel {name}", partial(wrong_kernel, name, asked.device)
        yield f"gptq {name}", partial(wrong_codes, name, asked.device)
        yield f"search {name}", partial(wrong_search, name, asked.device)
    for name in asked.schemes or ROUNDED:
        yield f"signround {name}", partial(wrong_step, name, asked.device)
    yield "errors of tokens", partial(wrong_token_errors, asked.device)
    yield "second moments", partial(wrong_moments, asked.device)
    yield "held-out errors", partial(wrong_errors, asked.device)


def wrong_kernel(name: str, device: str) -> Iterator[str]:
    """Bits of the kernel, of whole and short blocks, and of some rows of a matrix."""
    scheme = SCHEMES[name]
    for n, k, rows in ((130, 320, None), (2500, 256, None), (64, 256, torch.arange(1, 64, 3))):
        w, h = layer(n, k if scheme.scale.block != 128 else 384, device)
        scales = fast.choose_scales(w, name)
        blocks = Blocks.of(tuple(w.shape), scheme.scale, -1)
        order = device_order(h, "activation", blocks)
        upper = factor_on_device(h, 0.01, order).factor
        rule = ColumnRule.of(scheme, scales, blocks, w)
        if not rule.kernel:
            yield f"{n} x {k}: the kernel does not take this"
            continue
        sweep = Sweep.of(w.double(), upper, order, None if rows is None else rows.to(device))
        made, wanted = sweep.run(rule), sweep.run(replace(rule, kernel=False))
        for part in ("targets", "change", "loss"):
            if not same_bits(getattr(made, part), getattr(wanted, part)):
                yield f"{n} x {k}: {part} differ"


def wrong_codes(name: str, device: str) -> Iterator[str]:
    """Scales as given, codes of the reference but for ties, in every order."""
    w, h = layer(128, 256)
    scales = reference.choose_scales(w.float().numpy(), name)
    for order in ORDERS:
        arrays = w.float().numpy(), h.numpy()
        wanted = reference.gptq(*arrays, name, scales=scales, order=order)
        given = fast.choose_scales(w.float().to(device), name)
        made = fast.gptq(w.float().to(device), h.to(device), name, scales=given, order=order)
        yield from differs(f"{order}: scale", made.quantized.scale.cpu(), torch.as_tensor(scales.scale))
        codes = made.quantized.codes.cpu().numpy()
        yield from explained(codes, wanted.quantized, *arrays, order)


def explained(codes: Any, wanted: Quantized, w: Any, h: Any, order: str) -> Iterator[str]:
    """Differences that are no ties, or too many of these."""
    scheme = wanted.scheme
    columns = column_order(np.diag(h), order, Blocks.of(w.shape, scheme.scale, -1))
    rows = np.flatnonzero((codes != wanted.codes).any(axis=1))
    if len(rows) > max(TIES * len(w), 1):
        yield f"{order}: {len(rows)} of {len(w)} rows differ"
    if not len(rows):
        return
    upper = reference.triangular_factor(h, order=columns).factor
    change = (w.astype(np.float64) - reference.dequantize(wanted))[:, columns]
    target = w.astype(np.float64)[:, columns] + change @ (np.triu(upper, 1) / np.diag(upper))
    target = target[:, np.argsort(columns)]
    sides = [
        reference.quantize((target * (1 + side)).astype(np.float32), scheme, scales=wanted.scales).codes
        for side in (-NEAR, NEAR)
    ]
    for row in rows:
        first = next(j for j in columns if codes[row, j] != wanted.codes[row, j])
        if sides[0][row, first] == sides[1][row, first]:
            yield f"{order}: row {row}, column {first} has another code, and its target is no tie"


def wrong_search(name: str, device: str) -> Iterator[str]:
    """Scales whose weighted error is that of the reference's."""
    w, h = layer(128, 256)
    weights = h.diagonal().clone()
    wanted = reference.search_scales(w.float().numpy(), name, weights=weights.numpy())
    made = fast.search_scales(w.float().to(device), name, weights=weights.to(device))
    other = made.scale.cpu() != torch.as_tensor(wanted.scale)
    errors = [
        ((fast.fake_quantize(w.float(), name, scales=scales) - w.float()).double() ** 2 * weights).sum()
        for scales in (replace(made, **on_cpu(made)), replace(wanted, **as_tensors(wanted)))
    ]
    if float(other.double().mean()) > TIES or abs(float(errors[0] / errors[1]) - 1) > NEAR:
        yield f"{int(other.sum())} of {other.numel()} scales differ, errors {errors[0]} and {errors[1]}"


def wrong_step(name: str, device: str) -> Iterator[str]:
    """Two steps of SignRound with the bits of the reference, of learned and of given scales, and what is kept of them."""
    w, _ = layer(96, 384)
    g = torch.randn(w.shape, generator=torch.Generator().manual_seed(1)).to(w.dtype)
    start = fast.signround_start(w, name)
    given = fast.signround_codes(w, *start, name)
    for label, state, scales in (
        ("learned", start, None),
        ("given", fast.signround_start(w, name, given), given.scales),
    ):
        found: Any = SignRoundState(*(None if part is None else part.to(device) for part in state))
        kept = SignRoundState(*(None if part is None else part.clone() for part in found))
        moved = None if scales is None else replace(scales, **on_device(scales, device))
        for step in range(2):
            values, vjp = fast.signround_quantize(w, *state, name, scales=scales)
            state = fast.signround_step(state, vjp(g), 0.1)
            looped = signround_unchecked(w.to(device), *found, name, scales=moved)
            yield from differs(f"{label}, values of step {step}", looped.values.cpu(), values)
            found = looped.step(g.to(device), 0.1)
            signround_keep(torch.tensor(step == 1, device=device), found, kept)
            for part, made, wanted in zip(found._fields, kept if step else found, state, strict=True):
                if wanted is not None:
                    yield from differs(f"{label}, {part} of step {step}", made.cpu(), wanted)


def wrong_token_errors(device: str) -> Iterator[str]:
    """Errors within the roundings of their sums; gradients with the bits of their rule (torch multiplies by 1 / channels)."""
    for channels in (96, 4096, 5120):
        y = torch.randn((3, 40, channels), device=device).bfloat16().requires_grad_()
        wanted, g = torch.randn_like(y.detach()), torch.rand((3, 40), device=device)
        found, plain = token_errors(y, wanted), (y.float() - wanted.float()).square().mean(-1)
        if bool(((found - plain).abs() > channels * 2.0**-23 * plain).any()):
            yield f"{channels} channels: errors are off by more than the roundings of their sums"
        share = (g / torch.full_like(g, channels))[..., None]
        wanted_gradient = (share * (2 * (y.detach().float() - wanted.float()))).to(y.dtype)
        yield from differs(
            f"{channels} channels, gradient", torch.autograd.grad(found, y, g)[0], wanted_gradient
        )


def on_cpu(scales: Any) -> dict[str, Any]:
    return on_device(scales, "cpu")


def on_device(scales: Any, device: str) -> dict[str, Any]:
    return {
        part: None if (one := getattr(scales, part)) is None else one.to(device)
        for part in ("scale", "outer", "zero")
    }


def as_tensors(scales: Any) -> dict[str, Any]:
    return {
        part: None if (one := getattr(scales, part)) is None else torch.as_tensor(one)
        for part in ("scale", "outer", "zero")
    }


def wrong_moments(device: str) -> Iterator[str]:
    """16-bit inputs by tensor cores: within their bound of float64 sums; float32 inputs within a few last bits."""
    generator = torch.Generator().manual_seed(0)
    for dtype, bound in (
        (torch.bfloat16, 4096 * 2.0**-24),
        (torch.float16, 4096 * 2.0**-24),
        (torch.float32, 2.0**-40),
    ):
        x = torch.randn((9000, 96), generator=generator).to(dtype)
        mask = torch.rand(9000, generator=generator) > 0.3
        wanted, made = fast.second_moment(x, mask), fast.second_moment(x.to(device), mask.to(device))
        size = fast.second_moment(x.abs(), mask).value
        if made.count != wanted.count or bool(((made.value.cpu() - wanted.value).abs() > bound * size).any()):
            yield f"{dtype}: off by more than {bound:.1e} of the sum of magnitudes"


def wrong_errors(device: str) -> Iterator[str]:
    """Held-out errors of each damping."""
    (w, h), (_, val) = layer(96, 192), layer(95, 192)
    scales = reference.choose_scales(w.float().numpy(), "mxfp4")
    wanted = held_out_errors(w.float().numpy(), h.numpy(), val.numpy(), "mxfp4", scales=scales, rows=32)
    given = fast.choose_scales(w.float().to(device), "mxfp4")
    matrices = h.to(device), val.to(device)
    made = held_out_errors_on_device(w.float().to(device), *matrices, "mxfp4", scales=given, rows=32)
    if not np.allclose(made.numpy(), wanted, rtol=1e-3):
        yield f"{made.tolist()}, not {wanted.tolist()}"


def times(asked: Asked) -> Iterator[Row]:
    """Seconds and memory of each step, at the sizes of layers of Llama-3.1-8B; the second call of each."""
    for n, k in asked.shapes or SHAPES:
        x = torch.randn((16384, k), device="cuda").bfloat16()
        w, h = layer(n, k, "cuda", 2 * k)
        weights = h.diagonal().clone()
        for name in asked.schemes or ("int4_g128", "int3_g128_asymmetric", "mxfp4", "nvfp4"):
            scales = fast.search_scales(w, name, weights=weights)
            calls = {
                "search": partial(fast.search_scales, w, name, weights=weights),
                "gptq": partial(fast.gptq, w, h, name, scales=scales, order="activation"),
                "damping, 512 rows": partial(fast.held_out_damping, w, h, h, name, scales=scales, rows=512),
                "moment of 16,384": partial(fast.second_moment, x),
                "factor": partial(fast.triangular_factor, h),
            }
            for label, call in calls.items():
                yield {"shape": (n, k), "scheme": name, "step": label, **timed(call)}


def timed(call: Any) -> dict[str, float]:
    """Seconds of the second call, and the most memory beside what was there."""
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, start = torch.cuda.memory_allocated(), time.perf_counter()
        call()
        torch.cuda.synchronize()
        took = time.perf_counter() - start
    return {"seconds": took, "gigabytes": (torch.cuda.max_memory_allocated() - before) / 1e9}


SUBJECTS = (
    Subject("gptq", "GPTQ, searched scales, damping and moments of a layer", checks, times, on_cpu=True),
)
