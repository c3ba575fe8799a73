"""Scales of rows of x: in the emulator bit for bit by each way of finishing a tile, compiled, and what is refused."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from ao_lab.testing.strategies import assert_same_bits
from fast.kernels.sm90_sparse24_gemm.variants import MOST_SHARED
from fast.kernels.sm90_w4a16_gemm import host, select
from fast.kernels.sm90_w4a16_gemm.variants import ELEMENTS, Variant, Weight, fitted, sources, with_scales
from fast.launch import nvrtc
from tests.emulator.device.mixed_stand_in import MixedStandIn
from tests.emulator.faults import assert_seen, at_night, every_second
from tests.fast.kernels.compiling.day_cases import by_day, named
from tests.fast.kernels.sm90_sparse24_gemm.examples import require_nvrtc
from tests.fast.kernels.sm90_sparse24_gemm.machine_code import disassembled, uses_in_flight
from tests.fast.kernels.sm90_sparse24_gemm.test_compile import complaints
from tests.fast.kernels.sm90_w4a16_gemm.test_compile import waits
from tests.fast.kernels.sm90_w4a16_gemm.test_emulated import given, integers, stored
from tests.fast.kernels.sm90_w4a16_gemm.test_select import arranged

BF16, F16 = torch.bfloat16, torch.float16
#: Variant; scheme; shape (M, N, K); dtype of x; that of a bias.
CASES = {
    "ahead": (Variant(16, 1, 1, 3), "int4_g32", (40, 256, 256), BF16, BF16),
    "no bias": (Variant(32, 1, 1, 3), "int8_rowwise", (33, 128, 256), F16, None),
    "pairs": (Variant(32, 2, 1, 4), "nvfp4", (70, 384, 256), BF16, torch.float32),
    "splits": (Variant(16, 1, 3, 3), "int4_g64", (20, 128, 640), BF16, F16),
    "pairs, splits": (Variant(32, 2, 2, 5), "int8_rowwise", (40, 384, 256), F16, None),
    "turns": (Variant(32, 1, 1, 4, turns=2), "int4_g32_asymmetric", (90, 256, 512), BF16, BF16),
    "small tiles": (Variant(48, 1, 1, 3, 16), "nf4", (60, 128, 384), BF16, torch.float32),
    "wide": (Variant(192, 1, 1, 4), "int4_g128", (200, 128, 256), BF16, None),
}


def scales(count, seed=0):
    """Of as many rows."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)) * 3 - 1


def finished(sums, x_scale, bias, dtype):
    """Sums in float32 times the scale, plus the bias, each rounded to float32, then to the dtype."""
    made = sums.float() * x_scale[:, None]
    return (made if bias is None else made + bias.float()).to(dtype)


@pytest.mark.parametrize("early", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", at_night(CASES, "no bias", "pairs", "pairs, splits", "wide"))
def test_sums_are_multiplied_before_the_bias_is_added(name, early):
    """Rows with one 1 copy elements of the weight."""
    require_nvrtc()
    variant, scheme, (m, n, k), dtype, biased = CASES[name]
    w, dense = stored(scheme, n, k)
    x, bias = given(m, n, k, dtype, biased)
    x_scale = scales(m)
    found = MixedStandIn(early=early, seed=1).multiplied(x, w, bias, variant, x_scale=x_scale)
    sums = x.double() @ dense.to(dtype).double().t()
    assert_same_bits(found, finished(sums, x_scale, bias, dtype))


@pytest.mark.nightly
@pytest.mark.parametrize("early", [False, True])
def test_scales_of_one_are_none(early):
    """By several tiles of a program."""
    require_nvrtc()
    x, w, right = integers(96, 256, 640)
    found = MixedStandIn(early=early).multiplied(
        x, w, None, Variant(80, 1, 1, 4, turns=2), x_scale=torch.ones(96)
    )
    assert_same_bits(found, right)


FAULTS = {
    "scales of another token": ("side + 8 * (threadIdx.x % 4) + 4 * at", "side + 8 * (threadIdx.x % 2) + 4 * at"),
    "scales of the first tile": ("const int at = token + thread + 128 * i;", "const int at = thread + 128 * i;"),
    "nobody leaves scales": ("scaled.leave(thread);", ""),
    "both groups leave them in one place": ("SIDE_BYTES = SPLITS > 1 || SCALED ? GROUPS * SIDE * 4 : 0", "SIDE_BYTES = 0"),
}  # fmt: skip


@pytest.mark.parametrize("fault", every_second(FAULTS))
def test_faults_are_seen(fault):
    """Sums of those that take turns lie behind the scales."""
    require_nvrtc()
    assert_seen(FAULTS[fault], is_right)


def is_right(early, change):
    w, dense = stored("int4_g128", 256, 512)
    x, _ = given(90, 256, 512, BF16, None)
    x_scale, stand_in = scales(90), MixedStandIn(early=early, change=change)
    found = stand_in.multiplied(x, w, None, Variant(32, 1, 1, 4, turns=2), x_scale=x_scale)
    return torch.equal(found, finished(x.double() @ dense.to(BF16).double().t(), x_scale, None, BF16))


TILES = [
    (256, 1, 1, 0, 1),
    (256, 2, 1, 0, 1),
    (128, 1, 4, 0, 1),
    (256, 1, 1, 192, 1),
    (64, 1, 1, 0, 2),
    (96, 1, 1, 0, 2),
]
DECODED = [Weight("int4"), Weight("int4", True, 2), Weight("int8"), Weight("e2m1", False, 4), Weight("nf4")]


@pytest.mark.parametrize(
    ("tile", "weight"),
    by_day(
        [(tile, weight) for tile in TILES for weight in DECODED],
        lambda case: named(turns=case[0][4], cut=case[0][3] > 0, splits=case[0][2] > 1, weight=case[1]),
    ),
)
def test_variants(tile, weight):
    """No spills, no serialized products, operands left alone."""
    require_nvrtc()
    tokens, pair, splits, small, turns = tile
    one = fitted(tokens, pair, splits, weight, small, turns, True)
    source, headers, options = sources(one, weight, "bfloat16", "bfloat16")
    cubin, log = nvrtc.compile_source(source, headers, (*options, "--ptxas-options=-v"))
    assert complaints(log, one.threads) == []
    code = disassembled(cubin)
    sizes = 2 if small else 1
    assert waits(code) == ((0, 2) if turns > 1 else (4 * sizes, sizes))
    assert uses_in_flight(code) == []


@pytest.mark.parametrize("element", ELEMENTS)
def test_shared_memory_suffices(element):
    """For as many stages, or one less."""
    weight = Weight(element, False, 2 if element in ("e2m1", "e4m3_mx") else 1)
    for tokens in (33, 64, 128, 300, 1024):
        for one in select.candidates(tokens, 4096, weight):
            scaled = with_scales(one, weight)
            assert scaled.shared(weight) <= MOST_SHARED
            assert one.stages - one.turns <= scaled.stages <= one.stages
            assert scaled.name == one._replace(stages=scaled.stages).name + "x"


@pytest.mark.parametrize(
    ("x_scale", "message"),
    [(torch.ones(63), "one in float32 for each row"), (torch.ones(64, dtype=BF16), "one in float32 for each row"),
     (torch.ones(64, device="meta"), "on the same device")],
)  # fmt: skip
def test_other_scales_are_refused(x_scale, message):
    x = torch.zeros(64, 256, dtype=BF16)
    with pytest.raises(ValueError, match=rf"sm90_w4a16_gemm: scales .* {message}"):
        host.sm90_w4a16_gemm(x, arranged(), x_scale=x_scale)


def test_calls_with_scales(monkeypatch):
    """What is launched has the scales' address last; a program's step names it."""
    launched = []
    monkeypatch.setattr(host, "launch_of", lambda *given: (lambda *values: launched.append(values), 60))
    monkeypatch.setattr(host, "tensor_map", lambda *given: b"")
    monkeypatch.setattr(host, "processors_of", lambda index: 132)
    monkeypatch.setattr(host, "current_device", lambda: -1)
    monkeypatch.setattr(host, "current_stream", lambda index: 7)
    monkeypatch.setattr(host, "refused", lambda *given: None)
    x, w, x_scale = torch.zeros(64, 256, dtype=BF16), arranged(), torch.ones(64)
    y = host.sm90_w4a16_gemm(x, w, x_scale=x_scale)
    assert y.shape == (64, 256)
    assert launched[0][-1] == x_scale.data_ptr()
    call = host.Product(x, w, None, x_scale=x_scale)
    assert call.variant.scaled
    ((function, names),) = call.launches()
    assert names == [*call.inputs, "y"] == ["x", "words", "scale", "zero", "bias", "x_scale", "y"]
    function(7, [16 * at for at in range(1, 8)])
    plain = host.Product(x, w, None)
    plain.launch_at(7, [16 * at for at in range(1, 7)])
    assert [launched[at][-1] for at in (1, 2)] == [16 * 6, 0]
    assert launched[1][3:8] == (32, 48, 64, 80, 7 * 16)
    assert launched[2][3:8] == (32, 48, 64, 80, 6 * 16)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_launch_of_a_call(monkeypatch, scaled):
    """What `exact_inputs` launches behind its own kernel: run on tensors, and by their addresses."""
    require_nvrtc()
    monkeypatch.setattr(host, "processors_of", lambda index: 132)
    monkeypatch.setattr(host, "refused", lambda *given: None)
    w, dense = stored("int4_g32", 128, 256)
    x, bias = given(40, 128, 256, BF16, BF16)
    x_scale = scales(40) if scaled else None
    device, y = MixedStandIn(early=False), torch.zeros(40, 128, dtype=BF16)
    pointers = [x, w.words, w.scale, w.zero, bias, *([x_scale] if scaled else []), y]
    for one in pointers:
        if one is not None:
            device.add(one)
    with device.installed():
        launch = host.ProductLaunch(host.product_of(x, w, bias, x_scale))
        signature = launch.run(pointers, -1)
        right = finished(
            x.double() @ dense.to(BF16).double().t(), scales(40) if scaled else torch.ones(40), bias, BF16
        )
        assert_same_bits(y, right)
        y.zero_()
        launch.compiled[signature].function(0, [None if one is None else one.data_ptr() for one in pointers])
    assert_same_bits(y, right)


def test_a_launch_enters_the_device_of_its_operands(monkeypatch):
    """Where another one is current: a kernel belongs to the context of its own."""
    entered, launched = [], []

    class Device(contextlib.nullcontext):
        def __init__(self, index):
            super().__init__()
            entered.append(index)

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(host, "current_stream", lambda index: 7)
    product = SimpleNamespace(index=1, launch_at=lambda *given: launched.append((given, list(entered))))
    assert host.ProductLaunch(product).run([torch.zeros(8)], 1) == (1,)
    assert [devices for _, devices in launched] == [[1]]


def test_a_launch_has_no_negative_views():
    launch = host.ProductLaunch(SimpleNamespace(index=0, launch_at=None))
    with pytest.raises(ValueError, match="resolve_neg"):
        launch.run([torch.zeros(8, dtype=torch.complex64).conj().imag], 0)
