"""What `sm90_sparse24_w4a16_gemv` takes, which variant a product gets, and what becomes of one that does not load."""

import re
from itertools import product

import pytest
import torch

from fast.kernels.sm90_sparse24_w4a16_gemv import host, launch
from fast.kernels.sm90_sparse24_w4a16_gemv.select import MOST_CHUNKED, choose
from fast.kernels.sm90_sparse24_w4a16_gemv.variants import TWO, Form, Variant, fitted, sources
from fast.kernels.sparse_linear import host as sparse_linear
from fast.launch import nvrtc
from tests.fast.kernels.sm90_sparse24_gemm.examples import require_nvrtc
from tests.gpu.sparsity.int4_cases import as_tensors, exact_case

SHAPES = ((14336, 4096), (4096, 14336), (4096, 4096), (1024, 4096), (128256, 4096), (100, 256), (4096, 11008))
INT4 = Form(128, False, False)
SPILLS = re.compile(r"(\d+) bytes spill stores")


@pytest.mark.parametrize("count", [1, 8, 16])
@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_programs_fit_a_multiprocessor(count, group):
    for shape, narrow in product(SHAPES, (False, True)):
        form = Form(group, narrow, False)
        one = choose(form, count, *shape)
        # A row's scales are four bytes at least: one bfloat16 for 256 columns takes stages of 512, which are too many
        # registers for 16 rows.
        if one is None:
            assert (group, narrow) == (256, True)
            continue
        assert one.programs(shape[0]) * one.tiles * 16 // one.splits >= shape[0]
        assert one.phases * one.splits * one.columns >= shape[1]
        assert one.at_once * (one.shared(form) + 1024) <= 233472
        assert one.threads * one.at_once <= 2048
        assert one.tokens >= count


@pytest.mark.parametrize(
    ("shape", "count", "chosen"),
    [
        ((14336, 4096), 1, (8, 512, 4, 2, 7, 2, True, 2)),
        ((14336, 4096), 16, (16, 512, 4, 2, 7, 2, True, 2)),
        ((28672, 4096), 1, (8, 512, 4, 2, 14, 2, True, 2)),
        ((28672, 4096), 16, (16, 512, 8, 1, 14, 1, True, 2)),
        ((6144, 4096), 8, (8, 512, 4, 2, 3, 2, True, 2)),
        ((6144, 4096), 16, (16, 512, 4, 2, 3, 2, True, 2)),
        ((4096, 14336), 4, (8, 512, 7, 4, 9, 1, True, 2)),
        ((4096, 14336), 16, (16, 512, 7, 4, 9, 1, True, 2)),
        ((4096, 4096), 2, (8, 512, 4, 2, 4, 1, True, 2)),
        ((4096, 4096), 16, (16, 512, 4, 2, 4, 1, True, 2)),
        ((1024, 4096), 8, (8, 512, 8, 1, 1, 2, True, 1)),
        ((1024, 4096), 16, (16, 512, 4, 2, 1, 1, True, 1)),
        ((128256, 4096), 1, (8, 512, 8, 1, 2, 2, True, 2)),
        ((151936, 1024), 1, (8, 512, 2, 1, 2, 2, True, 2)),
        ((14336, 4096), 17, (24, 256, 8, 2, 7, 1, True, 2)),
        ((4096, 14336), 24, (24, 256, 7, 8, 10, 1, True, 2)),
        ((4096, 4096), 20, (24, 256, 8, 2, 4, 1, True, 2)),
        ((14336, 4096), 32, (16, 512, 8, 1, 14, 1, True, 2, 2)),
        ((4096, 14336), 48, (16, 512, 7, 4, 13, 1, True, 2, 3)),
    ],
)
def test_layers_of_a_model_have_what_was_measured_to_be_fastest(shape, count, chosen):
    assert choose(INT4, count, *shape) == Variant(*chosen)


def test_what_no_variant_divides():
    assert choose(INT4, 1, 64, 384) is None
    assert choose(INT4, 16, 8192, 28672) is None
    assert fitted(Form(256, True, False), 8, 256, 1, 1, 256) is None
    assert fitted(INT4, 8, 256, 1, 20, 4096) is None
    assert fitted(INT4, 8, 256, 1, 1, 8192) is None


@pytest.mark.parametrize(
    ("group", "narrow", "half"),
    [(128, False, False), (32, True, True), (64, False, True), (256, False, False)],
)
def test_chosen_variants_compile_without_spills(group, narrow, half):
    require_nvrtc()
    form = Form(group, narrow, half)
    chosen = {choose(form, count, *shape) for count in (1, 16) for shape in SHAPES[:2]}
    for one in (*chosen, choose(form, 17, *SHAPES[0])):
        source, headers, options = sources(one, form)
        log = nvrtc.compile_source(source, headers, (*options, "--ptxas-options=-v"))[1]
        assert int(SPILLS.search(log)[1]) == 0, one


@pytest.mark.parametrize("splits", [1, 2])
def test_nothing_is_read_before_the_kernel_in_front_has_ended(splits):
    """Only asked for, into the cache, and that where a variant is early."""
    require_nvrtc()
    for early in (True, False):
        source, headers, options = sources(Variant(8, 256, 4, splits, 2, 1, early), INT4)
        ptx = nvrtc.compile_source(source, headers, options, ptx=True)[0].decode()
        before, after = ptx.split("griddepcontrol.wait")
        assert ("cp.async.bulk.prefetch.L2" in before) == early
        assert not re.search(r"ld\.global|cp\.async\.c[ag]", before)
        assert re.search(r"ld\.global", after)
        assert re.search(r"cp\.async\.cg", after)


def test_zero_points_that_no_variant_copies():
    """Rows of four bytes at least, of one weight alone."""
    asymmetric = INT4._replace(zeros=True)
    assert fitted(asymmetric, 8, 256, 2, 1, 1024) is not None
    assert fitted(asymmetric, 8, 256, 1, 1, 256) is None
    assert fitted(asymmetric._replace(products=TWO), 8, 256, 2, 1, 1024) is None
    case = as_tensors(exact_case(1, 16, 256, 128))
    assert sparse_linear.linear_sparse_int4(*case, 128, zero=torch.zeros((16, 2), dtype=torch.int8)) is None


def test_programs_send_their_sums_when_all_of_a_cluster_run():
    """Each has arrived by then: a program that has not begun has no shared memory."""
    require_nvrtc()
    source, headers, options = sources(Variant(8, 256, 4, 2, 2), INT4)
    ptx = nvrtc.compile_source(source, headers, options, ptx=True)[0].decode()
    before, after = ptx.split("st.shared::cluster", 1)
    assert before.count("barrier.cluster.arrive") == before.count("barrier.cluster.wait") == 1
    assert "barrier.cluster.arrive" in before.split("griddepcontrol.wait")[0]
    # Nobody reads what the others send before all have sent it.
    assert after.count("barrier.cluster.arrive") == after.count("barrier.cluster.wait") == 1


def test_other_devices_and_more_rows_are_left_to_the_other_kernel():
    case = as_tensors(exact_case(1, 16, 512, 128))
    assert host.launch_for(case.x, case.codes, case.scale, 128) is None


def test_operands_that_another_kernel_takes(monkeypatch):
    monkeypatch.setattr(host, "is_served", lambda x: True)
    monkeypatch.setattr(host, "is_loadable", lambda *_: True)

    def launched(count, k, group=128):
        case = as_tensors(exact_case(count, 16, k, group))
        return host.launch_for(case.x, case.codes, case.scale, group)

    assert launched(16, 512).form == INT4
    assert launched(17, 512).variant.chunks == 2
    assert launched(17, 2048).variant[:2] == (24, 256)
    assert launched(MOST_CHUNKED + 1, 512) is None
    assert launched(1, 640) is None
    assert launched(0, 512) is None


def test_a_variant_that_does_not_load_is_left_out_with_a_warning(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("no kernel image")

    case = as_tensors(exact_case(1, 16, 512, 128))
    monkeypatch.setattr(host, "is_served", lambda x: True)
    monkeypatch.setattr(launch, "cached_cubin", refuse)
    tiled = []
    monkeypatch.setattr(
        sparse_linear, "by_tiles",
        lambda call, *_: tiled.append(call.allocate("y", (1, 16), torch.bfloat16)),
    )  # fmt: skip
    launch.is_loadable.cache_clear()
    with pytest.warns(UserWarning, match="no kernel image"):
        sparse_linear.linear_sparse_int4(*case, 128)
    # Once: the next call says nothing. Both are the other kernel's.
    sparse_linear.linear_sparse_int4(*case, 128)
    assert len(tiled) == 2
    launch.is_loadable.cache_clear()


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
    one = Variant(8, 256, 16, 1, 7)
    made = launch.SparseSkinnyLaunch(one, INT4, 1, (14336 + 1, 4096))
    assert made.programs == 129
    assert launch.ARGUMENTS.size == 8 * len(launch.POINTERS) + 16
    chunks = launch.SparseSkinnyLaunch(one._replace(chunks=3), INT4._replace(zeros=True), 20, (14336, 4096))
    assert chunks.programs == 3 * 128
    assert (chunks.names[-1], chunks.layout.size) == ("zero", launch.ARGUMENTS.size + 8)
