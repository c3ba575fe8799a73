"""Results of `sm90_w4a16_gemv` on a GPU: exact on integers, every code by one column, within the bound, the same again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch

from ao_lab.config.recipe import named
from fast.kernels.linear_small import host
from fast.kernels.sm90_w4a16_gemv.host import sm90_w4a16_gemv
from fast.kernels.sm90_w4a16_gemv.select import choose
from fast.matmul.preshuffled import layout
from fast.scale_factors import SECOND, TERMS
from reference import Quantized
from tests.gpu.harness.poison import poisoned
from tests.gpu.linear.skinny.candidates import dtypes, form_named, variants
from tests.gpu.linear.small import weights
from tests.support.linear_cases import inputs, outside, weight

REPEATS = 20
#: Of weights without layers: rows of one column each cover this many columns.
SMALL, COLUMNS = (256, 1024), 64


def wrong_bits(scheme: str, shape: tuple[int, int], count: int, dtype: torch.dtype) -> Iterator[str]:
    """Variants whose sums of integers are not exact, or not the same in a call of many."""
    w, values = weights.drawn(scheme, shape)
    arranged = host.arrange(w)
    x = torch.randint(-2, 3, (count, shape[1]), device="cuda").to(dtype)
    bias = (torch.arange(shape[0], device="cuda") % 7 - 3).to(dtype)
    expected = (x.double() @ values.t() + bias.double()).float().to(dtype)
    for variant in variants(form_named(scheme, dtype), count, shape):
        with poisoned(0xA5):
            got = sm90_w4a16_gemv(x, arranged, bias, variant=variant)
            torch.cuda.synchronize()
        if got is None or not torch.equal(got, expected):
            off = -1 if got is None else int((got != expected).sum())
            yield f"{scheme} {shape} {count} rows {dtype} {variant}: {off} of {expected.numel()} differ"
            continue
        again = [sm90_w4a16_gemv(x, arranged, bias, variant=variant) for _ in range(REPEATS)]
        if not all(torch.equal(one, got) for one in again):
            yield f"{scheme} {shape} {count} rows {variant}: other bits in another call"


def wrong_codes(scheme: str, dtype: torch.dtype) -> Iterator[str]:
    """Variants of 16 rows of one column each whose results are not the elements times their scales; random codes."""
    if scheme == "nf4":
        arranged = weights.filled_weight(scheme, SMALL)
        values = level_values(arranged, dtype)
    else:
        w, exact = weights.drawn(scheme, SMALL, seed=1)
        arranged, values = host.arrange(w), exact.float()
    for variant in variants(form_named(scheme, dtype), 16, SMALL):
        got = [
            sm90_w4a16_gemv(rows, arranged, variant=variant, dtype=torch.float32)
            for rows in torch.eye(COLUMNS, SMALL[1], device="cuda", dtype=dtype).split(16)
        ]
        off = -1 if None in got else int((torch.cat(got).t() != values[:, :COLUMNS]).sum())
        if off:
            yield f"{scheme} {dtype} {variant}: {off} codes are others"


def level_values(w: host.ArrangedWeight, dtype: torch.dtype) -> torch.Tensor:
    """What NF4's words stand for in products of a dtype: both terms added in float32, times the scale."""
    stored = layout.all_rows(w.words, "nf4").long()
    codes = torch.stack([stored & 15, stored >> 4], -1).flatten(1)
    terms = torch.tensor(TERMS[str(dtype).removeprefix("torch.")], device="cuda", dtype=torch.int32)
    hi, mid = terms.to(torch.int16).view(dtype).double().unbind(-1)
    scale = w.scale[: w.columns // 64].view(torch.float32).t().repeat_interleave(64, 1)
    return (hi + SECOND * mid).float()[codes] * scale


def beyond_bound(scheme: str) -> Iterator[str]:
    """Results of random values beyond `reference.linear_error_bound`."""
    w, x = weight(named(scheme), *SMALL), inputs(3, SMALL[1], torch.bfloat16)
    moved = host.arrange(to_gpu(w))
    form = form_named(scheme, torch.bfloat16)
    got = sm90_w4a16_gemv(x.cuda(), moved, variant=choose(form, 3, *SMALL))
    beyond = -1 if got is None else outside(got.cpu(), x, w, None)
    if beyond:
        yield f"{scheme}: {beyond} beyond the bound"


def to_gpu(w: Quantized) -> Quantized:
    """The weight's parts there."""
    parts = {part: getattr(w, part) for part in ("codes", "scale", "outer", "zero")}
    return replace(w, **{name: None if part is None else part.cuda() for name, part in parts.items()})


def tasks(schemes: list[str], layers: list[str]) -> list[tuple[str, tuple[int, int], int, torch.dtype]]:
    """Arguments of `wrong_bits`: small weights of all schemes, whole layers of some."""
    few = [
        (scheme, SMALL, count, dtype)
        for scheme in schemes
        for count in (1, 5, 16)
        for dtype in dtypes(scheme)
    ]
    shapes = ((14336, 4096), (4096, 14336))
    return few + [(*one, torch.bfloat16) for one in product(layers, shapes, (1, 16))]
