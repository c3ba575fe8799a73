"""Compiled loops over codes: the tables' numbers, the same bits on any number of threads, and what goes by tiles instead."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

import reference
from fast.cpu import dequantize as tiled
from fast.cpu import linear as cpu
from fast.cpu import threads
from fast.cpu.decoding import TABLE, Decoding
from fast.cpu.elements import Element, single_table
from fast.cpu.gemv import compiled, group_of
from fast.cpu.scratch import KEPT, scratch
from reference import SCHEMES

ELEMENTS = tuple(dict.fromkeys(Element.of(scheme) for scheme in SCHEMES.values()))
SOME = ("int3_g32", "int4_g128_asymmetric", "int8_rowwise", "mxfp6_e2m3", "nvfp4", "nf4")


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pair(scheme, shape, seed=0):
    return reference.quantize(normal(*shape, seed=seed), scheme, packed=True), normal(
        1, shape[1], seed=seed + 1
    )


def holds(got, x, w):
    exact = x.double() @ reference.dequantize(w).double().t()
    return bool(((got.double() - exact).abs() <= reference.linear_error_bound(x, w)).all())


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
@pytest.mark.parametrize("packed", [True, False])
def test_every_code_is_the_number_of_the_table(element, packed):
    decoding = Decoding.of(element)
    assert (decoding.kind == TABLE) == element.name.startswith(("nf4", "stretched"))
    in_group, _ = group_of(element.bits) if packed else (1, 1)
    codes = torch.arange(1 << element.bits, dtype=torch.uint8)[:, None].repeat(1, 8)
    stored = reference.pack(codes, element.name) if packed else codes
    table, y = single_table(element), torch.full((len(codes),), math.nan)
    x, one, nothing = torch.full((in_group, 8 // in_group), 0.125), torch.ones(1, 1), torch.empty(1, 0)
    operands = [part.numpy() for part in (stored, table, one, table, nothing)]
    kernel = compiled(decoding, packed, False, 1)
    kernel(*operands, False, False, 1, x.numpy(), nothing.view(-1).numpy(), 0, len(codes), y.numpy())
    assert torch.equal(y.nan_to_num(9e9), table[: len(codes)].nan_to_num(9e9))


@pytest.mark.parametrize("scheme", ["fp8_rowwise", "mxfp4", "int4_g32", "int8_rowwise", "mxfp6_e3m2"])
@pytest.mark.parametrize("size", [2.0**-120, 2.0**-100, 1.0, 2.0**100, 2.0**115])
def test_inputs_of_any_size_stay_inside_the_bound(scheme, size):
    w, x = pair(scheme, (8, 64), seed=1)
    assert holds(cpu.linear_of_one_row(x * size, w), x * size, w)


def test_sums_that_would_overflow_before_their_scale():
    """Codes times inputs leave float32, scaled numbers times inputs do not: the result is finite and right."""
    w = reference.quantize(normal(4, 64) * 2.0**-20, "int8_rowwise")
    x = torch.full((1, 64), 2.0**125)
    got = cpu.linear_of_one_row(x, w).double()
    exact = x.double() @ reference.dequantize(w).double().t()
    size = x.double() @ reference.dequantize(w).double().abs().t()
    assert got.isfinite().all()
    # 64 products and 63 sums, a rounding of 2**-24 each.
    assert ((got - exact).abs() <= 127 * 2.0**-24 * size).all()


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_code_for_nan_makes_nan(code):
    w, x = pair("fp8_rowwise", (4, 64))
    w.codes[2, 5] = code
    assert cpu.linear_of_one_row(x, w).isnan().tolist() == [[False, False, True, False]]


@pytest.mark.parametrize("scheme", SOME)
def test_any_number_of_threads_gives_the_same_bits(scheme, monkeypatch):
    w, x = pair(scheme, (37, 256))
    alone = cpu.linear_of_one_row(x, w)
    monkeypatch.setattr(threads, "WORTH", 1)
    used = set()
    for count in (2, 3, 64):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        assert torch.equal(cpu.linear_of_one_row(x, w), alone)
        threads.in_parts(lambda first, last: used.add((first, last)), 37, 37)
    assert (0, 37) not in used
    assert len({first for first, _ in used}) == 37


def test_an_error_in_a_thread_is_raised(monkeypatch):
    monkeypatch.setattr(threads, "WORTH", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    ended = threading.Event()

    def work(first, last):
        if first:
            ended.set()
            raise ArithmeticError("second half")

    with pytest.raises(ArithmeticError, match="second half"):
        threads.in_parts(work, 4, 4)
    assert ended.is_set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_negative_views_keep_their_sign(dtype):
    w, x = pair("int4_g128_asymmetric", (5, 128))
    x = x.to(dtype)
    assert torch.equal(cpu.linear_of_one_row(torch._neg_view(x), w), cpu.linear_of_one_row(-x, w))
    turned = replace(w, scale=torch._neg_view(w.scale))
    assert torch.equal(cpu.linear_of_one_row(x, turned), cpu.linear_of_one_row(-x, w))


@pytest.mark.parametrize("scheme", SOME)
def test_without_numba_tiles_are_multiplied(scheme, monkeypatch):
    w, x = pair(scheme, (7, 256), seed=4)
    monkeypatch.setattr(cpu, "numba_missing", lambda: "No module named 'numba'")
    monkeypatch.setattr(cpu, "_by_loop", None)
    for rows in (1, 2, 5):
        monkeypatch.setattr(tiled, "TILE", rows * 256)
        assert holds(cpu.linear_of_one_row(x, w), x, w)


@pytest.mark.parametrize(("length", "block"), [(66, -1), (64, 4)])
def test_what_the_loop_does_not_read_goes_by_tiles(length, block):
    """Rows that end within a group of three bytes; blocks of half such a group."""
    scheme = replace(SCHEMES["int3_g32"], name="", scale=replace(SCHEMES["int3_g32"].scale, block=block))
    w, x = pair(scheme, (5, length))
    assert cpu._by_loop(x, w) is None
    assert holds(cpu.linear_of_one_row(x, w), x, w)


def test_scratch_is_of_one_thread():
    first = scratch("test", (4,), torch.float32)
    assert scratch("test", (2, 2), torch.float32).data_ptr() == first.data_ptr()
    assert scratch("test", (KEPT + 1,), torch.uint8).data_ptr() != first.data_ptr()
    others = in_a_thread(lambda: scratch("test", (4,), torch.float32).data_ptr())
    assert others != first.data_ptr()


def test_memory_made_in_inference_mode_is_written_outside_it(monkeypatch):
    monkeypatch.setattr(cpu, "numba_missing", lambda: "No module named 'numba'")
    w, x = pair("int4_g32", (4, 64))

    def both():
        with torch.inference_mode():
            first = cpu.linear_of_one_row(x, w).clone()
        return torch.equal(first, cpu.linear_of_one_row(x, w))

    assert in_a_thread(both)


def in_a_thread(call):
    """What a call gives in a new thread, which keeps nothing yet."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()
