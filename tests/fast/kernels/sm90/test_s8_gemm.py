"""`sm90_s8_gemm` in the emulator, against the reference bit for bit: swizzles, barriers, scales, what is written where; planted
faults; what is taken, how it is reached, and what becomes of a variant that does not load."""

from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch

import reference
from ao_lab.testing.strategies import assert_same_bits
from fast import dispatch
from fast.kernels.sm90_s8_gemm import host
from fast.kernels.sm90_s8_gemm.host import C, Variant, fitted
from fast.launch import cuda
from reference import SCHEMES, Quantized
from tests.emulator.device.stand_in import StandIn
from tests.emulator.faults import Planted, assert_seen, every_second
from tests.fast.kernels.sm90.products import require_nvrtc, s8_gemm

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def operands(m, n, k, bias=None, *, seed=0):
    """Codes of x of all sizes, scale, no zero point, codes of the weight, scale, bias."""
    g = torch.Generator().manual_seed(seed)
    x, w = (torch.randint(0, 256, (rows, k), generator=g).to(torch.uint8) for rows in (m, n))
    scales = torch.rand(m, 1, generator=g) + 0.1, torch.rand(n, 1, generator=g) - 0.5
    added = None if bias is None else (1e4 * torch.randn(n, generator=g)).to(bias)
    return [x, scales[0], None, w, scales[1], added]


def quantized(given):
    """x and the weight."""
    x, x_scale, zero, w, scale, _ = given
    rowwise = "int8_rowwise" if zero is None else "int8_rowwise_asymmetric"
    first, second = (
        Quantized(
            codes=codes, scale=own, outer=None, zero=point, shape=tuple(codes.shape), axis=1,
            scheme=SCHEMES[name if own.dim() else "int8_tensorwise"],
        )
        for codes, own, point, name in ((x, x_scale, zero, rowwise), (w, scale, None, "int8_rowwise"))
    )  # fmt: skip
    return first, second


def expected(given, dtype):
    """One block of the blocked tier: exact sums, each step rounded to float32, one rounding."""
    x, w = quantized(given)
    name = str(dtype).removeprefix("torch.")
    return reference.linear(x, w, given[5], accumulation="blocked", block=w.shape[1], out_dtype=name)


def product(variant, element, dtype, given, **device):
    """Of codes, which need not be those of a scheme."""
    x, w = (SimpleNamespace(codes=codes, scale=scale, zero=None) for codes, scale in (given[:2], given[3:5]))
    return s8_gemm(variant, element, dtype, x, w, given[5], **device)


#: Variant, shape (M, N, K), dtypes of output and bias.
CASES = {
    "as it is served": (fitted(256, 2, True), (300, 264, 272), BF16, FP32),
    "narrow": (fitted(128, 2, True), (130, 136, 400), FP16, None),
    "float32": (fitted(128, 2, False), (140, 264, 272), FP32, FP16),
    "wide float32": (fitted(256, 2, False), (257, 136, 144), FP32, None),
    "without a neighbour": (fitted(32, 1, True), (70, 136, 1040), BF16, BF16),
    "more stages than steps": (fitted(32, 2, True), (70, 264, 128), FP16, FP16),
    "without skew": (Variant(64, 2, 3, True, 0), (70, 264, 400), BF16, FP32),
    "one stage behind": (Variant(64, 2, 2, True, 1), (70, 264, 400), BF16, FP32),
    "one step of 16": (fitted(32, 2, True), (33, 8, 16), BF16, FP32),
}


@pytest.mark.parametrize("early", [True, pytest.param(False, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", CASES)
def test_variants_give_the_bits_of_the_reference(name, early):
    require_nvrtc()
    variant, shape, dtype, bias = CASES[name]
    given = operands(*shape, bias)
    made = product(variant, "int8", dtype, given, early=early, seed=1)
    assert_same_bits(made, expected(given, dtype))


@pytest.mark.parametrize("one", ["x", "weight", "both"])
def test_one_scale(one):
    require_nvrtc()
    given = operands(40, 136, 144, FP32)
    for name, at in (("x", 1), ("weight", 4)):
        if one in (name, "both"):
            given[at] = given[at][0, 0].clone()
    made = product(fitted(32, 2, True), "int8", BF16, given, early=True)
    assert_same_bits(made, expected(given, BF16))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_what_is_not_finite(dtype):
    """Infinities stay, overflow makes them, and every NaN is the quiet one without payload, as Triton's kernel gives it."""
    require_nvrtc()
    given = operands(40, 136, 144, FP32)
    given[1][3], given[1][5], given[1][7] = float("inf"), float("nan"), 1e36
    given[4][9], given[4][11], given[5][13] = 0.0, float("-inf"), float("nan")
    given[5][15] = torch.tensor(-1, dtype=torch.int32).view(FP32)
    made = product(fitted(32, 2, dtype != FP32), "int8", dtype, given, early=True)
    assert made.isnan().any()
    assert made.isinf().any()
    assert_same_bits(made, canonical(expected(given, dtype)))


def canonical(y):
    return torch.where(y.isnan(), torch.tensor(float("nan"), dtype=y.dtype), y)


def test_sums_of_floats():
    """Small numbers, whose sums are exact in any order; not served."""
    require_nvrtc()
    given = operands(40, 136, 144, FP32)
    numbers = [np.random.default_rng(at).integers(-4, 5, given[at].shape) for at in (0, 3)]
    for at, part in zip((0, 3), numbers, strict=True):
        given[at] = torch.from_numpy(part.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    made = product(fitted(32, 2, True), "float8_e4m3fn", BF16, given, early=True)
    sums = torch.from_numpy(numbers[0] @ numbers[1].T)
    assert_same_bits(made, (sums.float() * given[1] * given[4].t() + given[5]).to(BF16))


def cancelled(given):
    """With biases that leave nothing of one of the first two tokens, unless roundings are others."""
    products = expected([*given[:5], None], FP32)
    feature = torch.arange(products.shape[1])
    return [*given[:5], -products[feature % 16 // 8, feature]]


#: A fault of the kernel that no test of one variant on a quiet GPU need find: what is changed.
FAULTS = {
    "a stage is handed back while it is read": ("if (step > 0) release(before);", "release(at.stage);"),
    "nobody waits for the copies": ("      wait_for(ring.full + 8 * at.stage, at.parity);\n", ""),
    "codes of another instruction": ("a + 2 * i, b + 2 * i", "a + 2 * i, b"),
    "features of the other warpgroup": ("+ group * 64 * ROW, ROW", ", ROW"),
    "sums are taken before they are there": ("    finish<0>(sum);\n", ""),
    "scales of other tokens": ("side + 8 * (threadIdx.x % 4) + 4 * at", "side + 8 * (threadIdx.x % 4)"),
    "scales are not left": ("    factors.leave(thread);\n", ""),
    "scales of other features": ("thread % 32 / 4 + 8 * i;\n      scale", "thread % 32 / 4;\n      scale"),
    "x's scale comes last": ("float(low), of_tokens.x), scale[half])", "float(low), scale[half]), of_tokens.x)"),
    "a product and a sum are rounded once": (
        "__fadd_rn(__fmul_rn(__fmul_rn(float(high), of_tokens.y), scale[half]), bias.own[half])",
        "__fmaf_rn(__fmul_rn(float(high), of_tokens.y), scale[half], bias.own[half])",
    ),
    "a buffer is filled before it was read": ("    if (thread == 0) wait_written<1>();\n", ""),
    "the last tile is not waited for": ("  if (thread == 0) wait_written<0>();\n", ""),
    "nobody lets the second warpgroup begin": ("step == SKEW) skew_arrive()", "step == SKEW) {}"),
    "parts of the tokens alone": ("constexpr unsigned short ALL = PAIR > 1 ?", "constexpr unsigned short ALL = PAIR > 9 ?"),
}  # fmt: skip


@pytest.mark.parametrize("fault", every_second(FAULTS))
def test_the_emulator_sees_faults(fault):
    require_nvrtc()
    assert_seen(FAULTS[fault], is_right)


def is_right(early, change):
    given = cancelled(operands(40, 264, 528))
    made = product(Variant(32, 2, 3, True), "int8", BF16, given, early=early, change=change)
    return torch.equal(made, expected(given, BF16))


def test_the_emulator_sees_a_payload_of_nan():
    require_nvrtc()
    given, once = operands(40, 136, 144, FP32), Planted("#define CANONICAL 1 ", "#define CANONICAL 0 ")
    given[5][13] = float("nan")
    made = product(fitted(32, 2, True), "int8", BF16, given, early=True, change=once)
    assert not torch.equal(made.view(torch.int16), canonical(expected(given, BF16)).view(torch.int16))


# How it is reached


@pytest.fixture
def hopper(monkeypatch):
    """CPU tensors pass for those of a Hopper GPU."""
    monkeypatch.setattr(host, "processors_of", lambda index: 132)
    monkeypatch.setattr(cuda, "FAILURES", {})


def codes(m=1024, n=4096, k=64, **changed):
    """Without memory of their own."""
    x, w = quantized(operands(1, 1, 16))
    x = replace(x, codes=torch.zeros(1, dtype=torch.uint8).expand(m, k), scale=torch.ones(m, 1), shape=(m, k))
    w = replace(w, codes=torch.zeros(1, dtype=torch.uint8).expand(n, k), scale=torch.ones(n, 1), shape=(n, k))
    return replace(x, **changed), w


def test_few_rows_are_left_to_triton(hopper, monkeypatch):
    monkeypatch.setattr(host, "call_of", lambda *given: pytest.fail("launched"))
    assert host.linear_of_codes(*codes(C.least - 1, 14336), None, BF16, None) is None


def test_a_variant_that_does_not_load_is_left_out_once(hopper, monkeypatch):
    tried = []

    def broken(*given):
        tried.append(given)
        raise RuntimeError("no module")

    cuda.is_loadable.cache_clear()
    monkeypatch.setattr(cuda, "loaded", broken)
    with pytest.warns(UserWarning, match="sm90_s8_gemm is left out, Triton's kernel multiplies: no module"):
        assert host.linear_of_codes(*codes(), None, BF16, None) is None
    assert host.linear_of_codes(*codes(), None, BF16, None) is None
    assert len(tried) == 1
    cuda.is_loadable.cache_clear()


def test_many_rows_are_reached_and_remembered(hopper, monkeypatch):
    """By the operands' order of `linear_of_codes`; the second call is the first one's."""
    require_nvrtc()
    monkeypatch.setattr(dispatch, "CALLS", {})
    monkeypatch.setattr(host, "choose", lambda *given: Variant(32, 2, 3, True))
    given, stand_in = operands(40, 136, 144, BF16), StandIn(early=True)
    x, w = quantized(given)
    key = ("linear_of_codes", 0, ())

    def both():
        first = host.linear_of_codes(x, w, given[5], BF16, key)
        return first, dispatch.find(key)(*given)

    for made in stand_in.made(both, *given):
        assert_same_bits(made, expected(given, BF16))
    assert dispatch.CALLS[key][1] is x.scheme


def test_operands_at_odd_addresses_are_copied(hopper):
    require_nvrtc()
    given, stand_in = operands(40, 136, 144, FP32), StandIn(early=True)
    right = expected(given, BF16)
    moved = torch.zeros(given[0].numel() + 1, dtype=torch.uint8)[1:].view(given[0].shape)
    given[0], given[1] = moved.copy_(given[0]), given[1].expand(-1, 2).contiguous()[:, :1]
    call = lambda: host.call_of(Variant(32, 2, 3, True), host.problem_of(BF16), *quantized(given), given[5])  # noqa: E731
    copied = [torch.Tensor.clone, torch.Tensor.contiguous]
    with pytest.MonkeyPatch.context() as patch:
        for one in copied:
            seen = lambda tensor, one=one, **options: stand_in.add(one(tensor, **options))  # noqa: E731
            patch.setattr(torch.Tensor, one.__name__, seen)
        assert_same_bits(stand_in.made(lambda: call().result("y"), *given), right)
