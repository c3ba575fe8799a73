"""Codes by arithmetic: the numbers of the tables, powers only where they are exact, memory that threads keep."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import reference
from fast.cpu import linear as cpu
from fast.cpu.elements import Element, single_table
from fast.cpu.planes import Decoding, multiplied, planes_of
from fast.cpu.scratch import KEPT, scratch
from reference import SCHEMES

ELEMENTS = tuple(dict.fromkeys(Element.of(scheme) for scheme in SCHEMES.values()))


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_all_but_codebooks_are_decoded(element):
    """Every code that is decoded is the table's number, bit for bit but for the sign of zero."""
    decoding = Decoding.of(element)
    if decoding is None:
        assert element.name.startswith("nf4")
        return
    codes = torch.arange(1 << element.bits, dtype=torch.uint8)
    packed = reference.pack(codes[None], element.name)
    planes = planes_of(element.bits)
    out = torch.empty((planes, 1, len(codes) // planes))
    decoding.write(packed, out)
    got = out.permute(1, 2, 0).reshape(-1) * decoding.power
    want = single_table(element)[: len(codes)]
    known = torch.ones(len(codes), dtype=torch.bool)
    if decoding.nan:
        known &= ~want.isnan()
        assert not decoding.decodes(packed)
        assert decoding.decodes(codes[known])
    assert torch.equal(got[known].nan_to_num(9e9), want[known].nan_to_num(9e9))


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_code_for_nan_makes_nan(code):
    w = reference.quantize(torch.randn(4, 64), "fp8_rowwise")
    w.codes[2, 5] = code
    got = cpu.linear_of_one_row(torch.randn(1, 64), w)
    assert got.isnan().tolist() == [[False, False, True, False]]


@pytest.mark.parametrize("scheme", ["fp8_rowwise", "mxfp4", "int4_g32", "int8_rowwise", "mxfp6_e3m2"])
@pytest.mark.parametrize("size", [2.0**-120, 2.0**-100, 1.0, 2.0**100, 2.0**115])
def test_inputs_of_any_size_stay_inside_the_bound(scheme, size):
    """Powers of two are not let overflow or underflow."""
    g = torch.Generator().manual_seed(1)
    w, x = (
        reference.quantize(torch.randn(8, 64, generator=g), scheme, packed=True),
        torch.randn(1, 64, generator=g),
    )
    x = x * size
    exact = x.double() @ reference.dequantize(w).double().t()
    error = (cpu.linear_of_one_row(x, w).double() - exact).abs()
    # Below 2**-126 every product may lose half of float32's last place, which the bound of known scales leaves out.
    lost = 64 * 2.0**-149 * w.scale.numel()
    assert (error <= reference.linear_error_bound(x, w) + (lost if size < 2.0**-90 else 0)).all()


def test_multiplied_only_where_it_is_exact():
    assert multiplied(torch.tensor([1.5, -(2.0**100)]), 256.0).tolist() == [384.0, -(2.0**108)]
    for bad, power in ((2.0**120, 2.0**14), (2.0**-149, 0.5), (float("nan"), 2.0)):
        assert multiplied(torch.tensor([1.0, bad]), power) is None


def test_scratch_is_of_one_thread():
    first = scratch("test", (4,), torch.float32)
    assert scratch("test", (2, 2), torch.float32).data_ptr() == first.data_ptr()
    assert scratch("test", (KEPT + 1,), torch.uint8).data_ptr() != first.data_ptr()
    others = in_a_thread(lambda: scratch("test", (4,), torch.float32).data_ptr())
    assert others != first.data_ptr()


def test_memory_made_in_inference_mode_is_written_outside_it():
    w, x = reference.quantize(torch.randn(4, 64), "int4_g32", packed=True), torch.randn(1, 64)

    def both():
        with torch.inference_mode():
            first = cpu.linear_of_one_row(x, w).clone()
        return torch.equal(first, cpu.linear_of_one_row(x, w))

    assert in_a_thread(both)


def in_a_thread(call):
    """What a call gives in a new thread, which keeps nothing yet."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()
