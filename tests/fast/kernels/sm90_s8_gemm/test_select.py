"""Which products the kernel takes, which tiles shapes get, how it is reached, and what becomes of one that does not load."""

from dataclasses import replace

import pytest
import torch

import fast
from ao_lab.testing.strategies import assert_same_bits
from fast.kernels.sm90_s8_gemm import host
from fast.kernels.sm90_s8_gemm.select import LEAST, PAIR, choose, programs_of
from fast.kernels.sm90_s8_gemm.variants import Variant, fitted
from fast.launch import cache
from tests.fast.kernels.sm90_s8_gemm.emulated import DenseStandIn
from tests.fast.kernels.sm90_s8_gemm.examples import expected, operands, quantized
from tests.fast.kernels.sm90_sparse24_gemm.examples import require_nvrtc

BF16 = torch.bfloat16


@pytest.fixture
def hopper(monkeypatch):
    """CPU tensors pass for those of a Hopper GPU."""
    device = type("Device", (), {"type": "cuda"})()
    monkeypatch.setattr(host, "device_of", lambda codes: device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(host, "missing_compiler", lambda: None)
    monkeypatch.setattr(host, "processors_of", lambda index: 132)
    monkeypatch.setattr(host, "FAILED", [])


@pytest.mark.parametrize(
    ("tokens", "features", "wanted"),
    [
        (255, 14336, None), (256, 14336, 256), (257, 14336, 128), (1024, 14336, 256), (8192, 14336, 256), (512, 14336, 256),
        (256, 4096, None), (512, 4096, 128), (1024, 4096, 256), (8192, 4096, 256), (300, 4096, 128),
        (512, 6144, 256), (1024, 6144, 128), (8192, 6144, 256), (512, 1024, None), (8192, 1024, 256), (8192, 8, 128),
        (2048, 8, None),
    ],
)  # fmt: skip
def test_choices(tokens, features, wanted):
    """At least seven tenths of the multiprocessors have a tile; narrow ones where they take fewer rounds by their time."""
    for stored in (True, False):
        made = choose(tokens, features, stored)
        assert made == (None if wanted is None else fitted(wanted, PAIR, stored))


def test_names():
    assert (fitted(256, 2, True).name, fitted(128, 1, False).name) == ("t256c2s4d2", "t128c1s6d2w")


def test_programs():
    """Whole clusters."""
    assert (programs_of(256, 257, 8), programs_of(256, 257, 264), programs_of(128, 257, 264, 1)) == (4, 8, 9)


def codes(m=1024, n=4096, k=64, **changed):
    """Without memory of their own."""
    x, w = quantized(operands(1, 1, 16))
    x = replace(x, codes=torch.zeros(1, dtype=torch.uint8).expand(m, k), scale=torch.ones(m, 1), shape=(m, k))
    w = replace(w, codes=torch.zeros(1, dtype=torch.uint8).expand(n, k), scale=torch.ones(n, 1), shape=(n, k))
    return replace(x, **changed), w


@pytest.mark.parametrize(
    ("sizes", "dtype", "reason"),
    [
        ((1024, 4096, 64), BF16, None), ((1024, 4096, 64), torch.float32, None), ((1024, 4104, 16), torch.float16, None),
        ((1024, 4096, 64), torch.float64, "results are"), ((1024, 4100, 64), BF16, "multiple of 16 and N of 8"),
        ((1024, 4096, 72), BF16, "multiple of 16 and N of 8"), ((0, 4096, 64), BF16, "sizes are"),
    ],
)  # fmt: skip
def test_what_is_refused(hopper, sizes, dtype, reason):
    found = host.refused(*codes(*sizes), dtype)
    assert found is None if reason is None else reason in found


def test_zero_points_and_other_devices_are_refused(hopper, monkeypatch):
    x, w = codes(zero=torch.zeros(1024, 1, dtype=torch.int8))
    assert "no zero points" in host.refused(x, w, BF16)
    for capability in ((8, 0), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, one=capability: one)
        assert "capability (9, 0)" in host.refused(*codes(), BF16)
    monkeypatch.undo()
    assert "got cpu" in host.refused(*codes(), BF16)


def test_floats_and_a_missing_compiler_are_refused(hopper, monkeypatch):
    x, w = codes()
    floats = replace(x, scheme=fast.quantize(torch.ones(1, 16), "fp8_rowwise").scheme)
    assert "elements are int8" in host.refused(floats, w, BF16)
    monkeypatch.setattr(host, "missing_compiler", lambda: "no NVRTC")
    assert host.refused(x, w, BF16) == "no NVRTC"
    assert host.linear_of_codes(x, w, None, BF16, None) is None


def test_few_rows_are_left_to_triton(hopper, monkeypatch):
    monkeypatch.setattr(host, "Product", lambda *given: pytest.fail("launched"))
    assert host.linear_of_codes(*codes(LEAST - 1, 14336), None, BF16, None) is None


def test_a_variant_that_does_not_load_is_left_out_once(hopper, monkeypatch):
    tried = []

    def broken(*given):
        tried.append(given)
        raise RuntimeError("no module")

    monkeypatch.setattr(host, "Product", broken)
    with pytest.warns(UserWarning, match="sm90_s8_gemm is left out, Triton's kernel multiplies: no module"):
        assert host.linear_of_codes(*codes(), None, BF16, None) is None
    assert host.linear_of_codes(*codes(), None, BF16, None) is None
    assert len(tried) == 1
    assert host.FAILED == ["it did not compile or load before: no module"]


def test_many_rows_are_reached_and_remembered(hopper, monkeypatch):
    """By the operands' order of `linear_of_codes`; the second call is the first one's."""
    require_nvrtc()
    monkeypatch.setattr(cache, "CALLS", {})
    monkeypatch.setattr(host, "choose", lambda *given: Variant(32, 2, 3, True))
    given = operands(40, 136, 144, BF16)
    x, w = quantized(given)
    key = ("linear_of_codes", 0, ())
    stand_in = DenseStandIn(early=True)
    for one in given:
        if one is not None:
            stand_in.add(one)
    with stand_in.installed():
        first = host.linear_of_codes(x, w, given[5], BF16, key)
        second = cache.find(key)(*given)
    for made in (first, second):
        assert_same_bits(made, expected(given, BF16))
    assert cache.CALLS[key][1] is x.scheme


def test_operands_at_odd_addresses_are_copied_and_negative_ones_refused():
    require_nvrtc()
    given = operands(40, 136, 144, torch.float32)
    stand_in = DenseStandIn(early=True)
    right = expected(given, BF16)
    moved = torch.zeros(given[0].numel() + 1, dtype=torch.uint8)[1:].view(given[0].shape)
    given[0], given[1] = moved.copy_(given[0]), given[1].expand(-1, 2).contiguous()[:, :1]
    clone = torch.Tensor.clone

    def seen(tensor, **options):
        return stand_in.add(clone(tensor, **options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", seen)
        assert_same_bits(stand_in.multiplied(Variant(32, 2, 3, True), "int8", BF16, *given), right)
    given[5] = torch._neg_view(given[5])
    with stand_in.installed():
        call = host.Product(Variant(32, 2, 3, True), "int8", BF16, given)
        assert call(*given) is None


def test_tensor_maps_are_kept(monkeypatch):
    """Of the addresses that came last."""
    require_nvrtc()
    monkeypatch.setattr("fast.launch.operands.MOST", 2)
    given, stand_in = operands(40, 136, 144), DenseStandIn(early=True)
    for one in given:
        if one is not None:
            stand_in.add(one)
    with stand_in.installed():
        call = host.Product(Variant(32, 2, 3, False), "int8", torch.float32, given)
        weights = [stand_in.add(given[3].clone()) for _ in range(3)]
        for w in [*weights, weights[2]]:
            call(*given[:3], w, *given[4:])
    assert [at[0] for at in call.maps] == [w.data_ptr() for w in weights[1:]]
