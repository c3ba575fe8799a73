"""What the hosts of kernels in CUDA C++ take and refuse, and what becomes of a variant that does not load."""

import struct
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch

import fast
from ao_lab.config.recipe import named
from fast.gemm.families import HOPPER
from fast.kernels.sm90_intn_small_m import host as intn
from fast.kernels.sm90_intn_small_m.host import Form as IntnForm
from fast.kernels.sm90_intn_small_m.host import Variant as IntnVariant
from fast.kernels.sm90_sparse24_w4a16_gemv import host as sparse
from fast.kernels.sm90_sparse24_w4a16_gemv.host import GATED, TWO
from fast.kernels.sm90_w4a16_gemm import host as gemm
from fast.kernels.sm90_w4a16_gemm.host import ELEMENTS, FEATURES, Weight
from fast.kernels.sm90_w4a16_gemv import host as gemv
from fast.kernels.sm90_w4a16_gemv.host import Variant
from fast.kernels.triton_sparse24_small_m import host as sparse_linear
from fast.launch import cuda
from fast.scale_factors import ArrangedWeight
from tests.gpu.sparsity.cases import as_tensors, exact_case
from tests.support.family_times import launch_for, rows_fused

BF16 = torch.bfloat16
INT4 = sparse.Form(128, False, False)


@pytest.fixture
def refusing(monkeypatch):
    """No variant loads."""

    def refuse(*_):
        raise RuntimeError("no kernel image")

    cuda.is_loadable.cache_clear()
    monkeypatch.setattr(cuda, "FAILURES", {})
    monkeypatch.setattr(cuda, "loaded", refuse)
    yield
    cuda.is_loadable.cache_clear()


# Preshuffled weights, few rows


@pytest.mark.parametrize(
    "change", [{}, {"capability": (8, 0)}, {"missing_compiler": "no NVRTC"}, {"interpreted": True}]
)
def test_devices(monkeypatch, change):
    values = {"capability": (9, 0), "missing_compiler": None, "interpreted": False} | change
    for name, value in values.items():
        monkeypatch.setattr(cuda, name, lambda *given, value=value: value)
    assert cuda.is_served(SimpleNamespace(is_cuda=True, get_device=lambda: 0)) == (not change)
    assert not cuda.is_served(torch.zeros(1))


def test_a_variant_that_does_not_load_is_left_out_with_a_warning(monkeypatch, refusing):
    w = ArrangedWeight(
        torch.empty(2, 4, 512, dtype=torch.int32), torch.empty(2, 128), None, (128, 256), "int4", 128
    )
    variant = Variant(8, 1, 4, 1, 4)
    with pytest.warns(
        UserWarning, match="sm90_w4a16_gemv is left out, another kernel multiplies: no kernel image"
    ):
        assert gemv.launch_for(w, 1, torch.bfloat16, torch.bfloat16, variant) is None
    # Once: the next call says nothing.
    assert gemv.launch_for(w, 1, torch.bfloat16, torch.bfloat16, variant) is None
    # Another variant is tried, and may load.
    monkeypatch.setattr(cuda, "loaded", lambda *given: 1)
    assert gemv.launch_for(w, 1, torch.bfloat16, torch.bfloat16, variant._replace(stages=3)) is not None


# Preshuffled weights, many rows


def arranged(n=256, k=256):
    return ArrangedWeight(
        torch.empty(n // 64, k // 64, 512, dtype=torch.int32), torch.empty(1, n), None, (n, k), "int4", 0
    )


def test_weights():
    """Two blocks of scales in a stage where groups have 32 columns."""
    assert gemm.weight_of(arranged()) == Weight("int4", False, 1)
    assert gemm.weight_of(replace(arranged(), group=32, zero=torch.empty(8, 128))) == Weight("int4", True, 2)
    assert [gemm.weight_of(replace(arranged(), group=group)).parts for group in (64, 128, 256)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("element", "group", "parts", "each"), [("e2m1", 32, 2, 1), ("e2m1", 16, 4, 2), ("e4m3_mx", 32, 2, 1)]
)
def test_weights_with_factors(element, group, parts, each):
    """Each factor has one byte, or two in blocks of 16 columns."""
    w = replace(arranged(), element=element, group=group)
    weight = gemm.weight_of(w)
    assert weight == Weight(element, False, parts)
    assert weight.stage == 2 * ELEMENTS[element] + FEATURES * parts * each


def test_a_kernel_that_does_not_load_is_left_out_with_a_warning(refusing, monkeypatch):
    """Once; then no variant of such a weight is tried any more on its device. Others are."""
    monkeypatch.setattr(gemm, "processors_of", lambda index: 132)
    w, tried = arranged(), []
    x, more = torch.zeros(200, 256, dtype=BF16), torch.zeros(33, 256, dtype=BF16)
    with pytest.warns(UserWarning, match="dense weights are multiplied: no kernel image"):
        assert gemm.sm90_w4a16_gemm(x, w) is None
    refused = cuda.loaded
    monkeypatch.setattr(cuda, "loaded", lambda *given: tried.append(given) or refused(*given))
    assert gemm.sm90_w4a16_gemm(x, w) is None
    assert gemm.sm90_w4a16_gemm(more, w) is None
    assert tried == []
    with pytest.warns(UserWarning, match="no kernel image"):
        assert gemm.sm90_w4a16_gemm(x, replace(w, element="e4m3")) is None


@pytest.mark.parametrize(
    ("x_scale", "message"),
    [(torch.ones(63), "one in float32 for each row"), (torch.ones(64, dtype=BF16), "one in float32 for each row"),
     (torch.ones(64, device="meta"), "on the same device")],
)  # fmt: skip
def test_other_scales_are_refused(x_scale, message):
    x = torch.zeros(64, 256, dtype=BF16)
    with pytest.raises(ValueError, match=rf"sm90_w4a16_gemm: scales .* {message}"):
        gemm.sm90_w4a16_gemm(x, arranged(), x_scale=x_scale)


# Packed integers


@pytest.mark.parametrize(
    ("scheme", "length", "form"),
    [
        ("int2_g32", 256, (2, 32, False)), ("int3_g64_asymmetric", 128, (3, 64, True)), ("int6_g128", 384, (6, 128, False)),
        ("int5_rowwise", 640, (5, 640, False)), ("int3_g256", 512, (3, 256, False)), ("int4_g32", 128, (4, 32, False)),
        ("int3_g32", 96, None), ("int8_g32", 256, None), ("mxfp6_e2m3", 256, None), ("nf4", 256, None),
        ("torchao.int4_g64_tinygemm", 256, None), ("int4_g64_asymmetric_bf16", 256, None), ("int2_tensorwise", 256, None),
        ("int3_g16", 256, None), ("int3_g96", 384, None), ("int7_g32", 256, None),
    ],
)  # fmt: skip
def test_forms(scheme, length, form):
    record = named(scheme)
    found = intn.form_of(record, (8, length), 1, True)
    assert found == (None if form is None else IntnForm(*form, True, False))
    assert intn.form_of(record, (8, length), 1, False) is None
    assert intn.form_of(record, (8, length), 0, True) is None
    assert intn.form_of(record, (2, 8, length), 1, True) is None


def test_launches_go_first_where_they_are(monkeypatch):
    """2, 3, 5 and 6 bits to 32 rows of inputs; int4 keeps its kernels; other dtypes have the others."""
    monkeypatch.setattr(cuda, "is_loadable", lambda *given: True)
    for bits in (2, 3, 4, 5, 6):
        w = fast.quantize(torch.randn(64, 256), named(f"int{bits}_g32"), packed=True)
        for count, dtype in product((1, 2, 32), (torch.bfloat16, torch.float16)):
            assert isinstance(launch_for(w, count, dtype, HOPPER), cuda.CudaLaunch) == (bits != 4)
        assert not isinstance(launch_for(w, 1, torch.float32, HOPPER), cuda.CudaLaunch)
        assert launch_for(w, 33, torch.bfloat16, HOPPER) is None
    assert intn.launch_for(w, 4, torch.bfloat16, IntnVariant(8, 1, 1, 3, 1, 1, 2)) is None


@pytest.mark.parametrize("scheme", ["int3_g32", "int6_rowwise"])
@pytest.mark.parametrize(("n", "most"), [(64, 32), (8176, 32), (8192, 96)])
def test_rows_that_are_fused(monkeypatch, scheme, n, most):
    """As many where scales change along K, too, and nothing is compiled to know that; more are for the dense weight, also where
    other devices have a kernel."""
    w = fast.quantize(torch.randn(n, 256), named(scheme), packed=True)
    assert rows_fused(w, torch.bfloat16) == (32 if "_g" in scheme else 128)
    monkeypatch.setattr(cuda, "is_loadable", lambda *given: pytest.fail("compiled"))
    assert [rows_fused(w, dtype, HOPPER) for dtype in (torch.bfloat16, torch.float16)] == [most, most]
    assert launch_for(w, most + 1, torch.bfloat16, HOPPER) is None
    monkeypatch.setattr(cuda, "is_loadable", lambda *given: True)
    assert isinstance(launch_for(w, most, torch.bfloat16, HOPPER), cuda.CudaLaunch)


# 2:4 weights


def test_zero_points_that_no_variant_copies():
    """Rows of four bytes at least, of one weight alone."""
    asymmetric = INT4._replace(zeros=True)
    assert sparse.fitted(asymmetric, 8, 256, 2, 1, 1024) is not None
    assert sparse.fitted(asymmetric, 8, 256, 1, 1, 256) is None
    assert sparse.fitted(asymmetric._replace(products=TWO), 8, 256, 2, 1, 1024) is None
    case = as_tensors(exact_case(1, 16, 256, 128))
    assert sparse_linear.linear_sparse_int4(*case, 128, zero=torch.zeros((16, 2), dtype=torch.int8)) is None


def test_other_devices_and_more_rows_are_left_to_the_other_kernel():
    case = as_tensors(exact_case(1, 16, 512, 128))
    assert sparse.launch_for(case.x, case.codes, case.scale, 128) is None


def test_operands_that_another_kernel_takes(monkeypatch):
    monkeypatch.setattr(sparse, "is_served", lambda x: True)
    monkeypatch.setattr(cuda, "is_loadable", lambda *_: True)

    def launched(count, k, group=128):
        case = as_tensors(exact_case(count, 16, k, group))
        return sparse.launch_for(case.x, case.codes, case.scale, group)

    assert launched(16, 512).problem == INT4
    assert launched(17, 512).variant.chunks == 2
    assert launched(17, 2048).variant[:2] == (24, 256)
    assert launched(65, 512) is None
    assert launched(1, 640) is None
    assert launched(0, 512) is None


def test_the_other_kernel_multiplies_where_a_variant_does_not_load(monkeypatch, refusing):
    case = as_tensors(exact_case(1, 16, 512, 128))
    monkeypatch.setattr(sparse, "is_served", lambda x: True)
    tiled = []
    monkeypatch.setattr(
        sparse_linear, "by_tiles",
        lambda call, *_: tiled.append(call.allocate("y", (1, 16), torch.bfloat16)),
    )  # fmt: skip
    with pytest.warns(UserWarning, match="no kernel image"):
        assert sparse_linear.linear_sparse_int4(*case, 128, family="sm90_sparse24_w4a16_gemv") is None
    # Once: the next call says nothing.
    assert sparse_linear.linear_sparse_int4(*case, 128, family="sm90_sparse24_w4a16_gemv") is None
    sparse_linear.linear_sparse_int4(*case, 128)
    assert len(tiled) == 1


def test_tiles_that_are_given_are_the_other_kernel_s(monkeypatch):
    def refuse(*_):
        raise AssertionError

    case = as_tensors(exact_case(1, 16, 512, 128))
    monkeypatch.setattr(sparse_linear, "launch_for", refuse)
    monkeypatch.setattr(
        sparse_linear, "by_tiles", lambda call, *_: call.allocate("y", (1, 16), torch.bfloat16)
    )
    tiling = sparse_linear.tiling_of(16, 512, 128, 1)
    assert sparse_linear.linear_sparse_int4(*case, 128, None, tiling).shape == (1, 16)


def test_a_launch_has_all_rows():
    one = sparse.Variant(8, 256, 16, 1, 7)
    assert sparse.launch_of(one, INT4, 1, (14336 + 1, 4096)).programs == 129
    chunks = sparse.launch_of(one._replace(chunks=3), INT4._replace(zeros=True), 20, (14336, 4096))
    assert chunks.programs == 3 * 128
    assert chunks.names[-1] == "zero"


def test_a_launch_has_the_tiles_of_both():
    form = sparse.Form(64, False, False, TWO)
    made = sparse.launch_of(sparse.Variant(8, 256, 16, 1, 7), form, 1, (100, 4096), 5)
    assert made.programs == 2  # seven tiles and one
    image, last = made.arguments(0)
    assert struct.unpack("=10Q6i", image) == (*[0] * 10, 1, 100, 4096, 0, 5, 0)
    assert last is None
    assert sparse.rows_of_tiles(100, 5) == 128


def two_weights(count, rows, *others, make=exact_case):
    """x, and parts of both weights."""
    first, second = (as_tensors(make(count, n, *others, seed=seed)) for seed, n in enumerate(rows))
    return first.x, first[1:4], second[1:4]


def test_operands_that_other_kernels_take(monkeypatch):
    x, first, second = two_weights(16, (32, 48), 512, 128)
    narrow = [*second[:2], second[2].bfloat16()]
    assert sparse.pair_launch_for(x, first, second, 128, TWO) is None, "a CPU"
    monkeypatch.setattr(sparse, "is_served", lambda x: True)
    monkeypatch.setattr(cuda, "is_loadable", lambda *_: True)
    assert sparse.MOST_ROWS == 16
    assert sparse.pair_launch_for(x, first, second, 128, TWO).numbers[1][-2] == 48
    assert sparse.pair_launch_for(x, first, first, 128, GATED).problem == sparse.Form(
        128, False, False, GATED
    )
    assert sparse.pair_launch_for(x, first, second, 128, GATED) is None
    assert sparse.pair_launch_for(x, first, narrow, 128, TWO) is None
    assert sparse.pair_launch_for(torch.cat([x, x]), first, second, 128, TWO) is None
    assert sparse.pair_launch_for(x[:0], first, second, 128, TWO) is None
    assert sparse.pair_launch_for(x, first, [one[:0] for one in second], 128, TWO) is None
    assert sparse.pair_launch_for(x, first, [one.to("meta") for one in second], 128, TWO) is None
    assert sparse.sm90_sparse24_w4a16_gemv_pair(x[:0], first, second, 128) is None
    assert sparse.sm90_sparse24_w4a16_gemv_swiglu(x, first, second, 128) is None
