"""What torch's grouped products are given, on a CPU: one written as its documentation says, and torch's own in bfloat16."""

import itertools

import pytest
import torch

from ao_lab.training.grouped import products
from ao_lab.training.grouped.autograd import (
    columns_operand,
    grouped_linear,
    layout_of,
    rows_operand,
    weight_operand,
)
from reference.training.recipe import RECIPES
from tests.support.grouped_cases import OFFSETS, E, K, N, T, offsets_of, poison, tensors

E4M3 = torch.float8_e4m3fn


def scaled_grouped_mm(a, b, scale_a, scale_b, *, offs, out_dtype, use_fast_accum):
    """`torch._scaled_grouped_mm` on sm_90: layouts, dtypes and scales as it asks for them; unwritten memory is NaN."""
    assert (a.dtype, b.dtype, out_dtype, offs.dtype) == (E4M3, E4M3, torch.bfloat16, torch.int32)
    assert a.is_contiguous()
    assert b.transpose(-2, -1).is_contiguous()
    assert all(scale.dtype == torch.float32 and scale.is_contiguous() for scale in (scale_a, scale_b))
    assert not any(length % 16 for length in (a.shape[1], *b.shape[-2:]))
    a, b, ranges = a.float(), b.float(), list(itertools.pairwise((0, *offs.tolist())))
    if b.dim() == 3:
        assert (scale_a.shape, scale_b.shape) == (a.shape[:1], (b.shape[0], b.shape[2]))
        y = torch.full((a.shape[0], b.shape[2]), float("nan"))
        for e, (start, end) in enumerate(ranges):
            y[start:end] = (a[start:end] * scale_a[start:end, None]) @ (b[e] * scale_b[e])
        return y.to(out_dtype)
    assert not a.shape[0] % 16
    assert not any((end - start) % 16 for start, end in ranges)
    assert (scale_a.shape, scale_b.shape) == ((len(ranges) * a.shape[0],), (len(ranges) * b.shape[1],))
    y = torch.full((len(ranges), a.shape[0], b.shape[1]), float("nan"))
    for e, (start, end) in enumerate(ranges):
        left, right = scale_a.view(len(ranges), -1)[e, :, None], scale_b.view(len(ranges), -1)[e]
        if end > start:
            y[e] = (a[:, start:end] * left) @ (b[start:end] * right)
    return y.to(out_dtype)


def chosen(monkeypatch, on_hopper):
    """The functions of a GPU: scaled products where operands allow them, or bfloat16 alone."""
    names = []

    def select(ends, kernel, scaled):
        names.append(
            "emulate"
            if kernel == "emulate"
            else "scaled_grouped_mm"
            if scaled and on_hopper
            else "grouped_mm"
        )
        return names[-1]

    monkeypatch.setattr(products, "_select", select)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", scaled_grouped_mm)
    return names


def step(name, offsets):
    x, w, g = tensors()
    leaves = [t.requires_grad_() for t in (poison(x, offsets), w)]
    y = grouped_linear(*leaves, offsets, RECIPES[name])
    y.backward(poison(g, offsets))
    return y.detach(), *(leaf.grad for leaf in leaves)


SCALED = {
    "rowwise": ["scaled_grouped_mm"] * 3,
    "rowwise_with_gw_hp": ["scaled_grouped_mm"] * 2 + ["grouped_mm"],
    "tensorwise": ["scaled_grouped_mm", "grouped_mm", "grouped_mm"],
}


@pytest.mark.parametrize(
    "name", ["rowwise", "rowwise_with_gw_hp", "tensorwise", "blockwise", "mxfp8", "mxfp6", "bf16"]
)
@pytest.mark.parametrize("case", OFFSETS)
def test_products_of_a_gpu_are_those_of_a_cpu(monkeypatch, name, case):
    """Up to the rounding of operands and results to bfloat16, with zeros where nothing was written."""
    offsets = offsets_of(case)
    emulated = step(name, offsets)
    names = chosen(monkeypatch, on_hopper=True)
    made = step(name, offsets)
    assert names == SCALED.get(name, ["grouped_mm"] * 3)
    for found, truth in zip(made, emulated, strict=True):
        torch.testing.assert_close(found, truth, rtol=2e-2, atol=2e-2 * float(truth.abs().max()))
        assert bool((found[truth == 0] == 0).all())


def test_other_lengths_and_dtypes_are_not_scaled(monkeypatch):
    """Lengths that are no multiple of 16 go in bfloat16; results have the dtype of the inputs."""
    chosen(monkeypatch, on_hopper=True)
    offsets, recipe = offsets_of("uneven"), RECIPES["rowwise"]
    layout = layout_of(offsets, T, 16)
    x, w, g = tensors()
    rows, weight = rows_operand(x, recipe.output.a, layout), weight_operand(w, recipe.output.b)
    columns = columns_operand(x, recipe.weight_grad.b, layout)
    assert products.select_rows(rows, weight, offsets) == "scaled_grouped_mm"
    assert (
        products.select_rows(rows, weight_operand(w[:, :24].contiguous(), recipe.output.b), offsets)
        == "grouped_mm"
    )
    assert products.select_columns(columns, columns, offsets) == "scaled_grouped_mm"
    short = columns_operand(g[:, :24].contiguous(), recipe.weight_grad.a, layout)
    assert products.select_columns(short, columns, offsets) == "grouped_mm"
    e5m2 = columns_operand(g, RECIPES["tensorwise"].weight_grad.a, layout)
    assert products.select_columns(e5m2, columns, offsets) == "grouped_mm"
    x, w, _ = tensors(torch.float32)
    assert grouped_linear(x, w, offsets, recipe).dtype == torch.float32


def test_accumulation_and_emulation(monkeypatch):
    """Fast sums where the product says so; emulation where it is asked for."""
    names, fast = chosen(monkeypatch, on_hopper=True), []
    real = torch._scaled_grouped_mm
    monkeypatch.setattr(
        torch, "_scaled_grouped_mm", lambda *a, **k: fast.append(k["use_fast_accum"]) or real(*a, **k)
    )
    step("rowwise", offsets_of("uneven"))
    assert fast == [
        product.accumulation == "fast"
        for product in (
            RECIPES["rowwise"].output,
            RECIPES["rowwise"].input_grad,
            RECIPES["rowwise"].weight_grad,
        )
    ]
    x, w, _ = tensors()
    grouped_linear(x, w, offsets_of("uneven"), RECIPES["rowwise"], "emulate")
    assert names[-1] == "emulate"


def test_shapes_under_a_tracer():
    """The operator's fake results are those of the functions."""
    offsets = offsets_of("uneven")
    with torch._subclasses.FakeTensorMode():
        a, b, ends = torch.empty(T, K), torch.empty(E, N, K), torch.empty(E, dtype=torch.int32)
        for name, dtype in (("emulate", torch.float32), ("grouped_mm", torch.bfloat16)):
            made = products.run(name, products.Operands(a, b), ends, True)
            assert (made.shape, made.dtype) == ((T, N), dtype)
            made = products.run(name, products.Operands(a.t(), a.t()), ends, True)
            assert (made.shape, made.dtype) == ((E, K, K), dtype)
    real = products.run(
        "grouped_mm", products.Operands(*(t.bfloat16() for t in tensors()[:2])), offsets, True
    )
    assert (real.shape, real.dtype) == ((T, N), torch.bfloat16)
