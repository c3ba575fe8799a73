"""What `fp8_skinny` takes, which variant a product gets, and what becomes of one that does not load."""

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fast.kernels.fp8_skinny import host, launch
from fast.kernels.fp8_skinny.select import choose
from fast.kernels.fp8_skinny.variants import Variant, sources
from fast.kernels.hopper import nvrtc
from fast.matmul.codes_ops import LINEAR_OF_CODES
from fast.matmul.dynamic.ops import LINEAR_DYNAMIC
from reference import SCHEMES
from tests.fast.kernels.sparse_mm.examples import require_nvrtc

SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (14336, 4096))
SPILLS = re.compile(r"(\d+) bytes spill stores")


@pytest.mark.parametrize("count", [1, 8, 9, 16])
def test_programs_are_one_wave_and_fit(count):
    for n, k in SHAPES:
        one = choose(count, n, k)
        if one is None:
            # Sixteen long rows of codes and their sums are more than shared memory.
            assert (count, k) == (16, 14336)
            continue
        assert 120 <= one.programs(n) <= 132
        assert one.programs(n) * one.slabs * 16 == n
        assert one.shared(count, k) <= 232448
        assert one.threads <= 1024
        assert count <= one.tokens


@pytest.mark.parametrize("shape", [(1024, 4096), (128256, 4096), (4096, 4128), (2112, 128), (4008, 4096)])
def test_shapes_that_another_kernel_takes(shape):
    """Less or more than a wave, columns that are no whole pieces, rows that are no whole slabs."""
    assert choose(1, *shape) is None


@pytest.mark.parametrize("one", [choose(1, *shape, True) for shape in SHAPES] + [choose(8, *SHAPES[0])])
def test_variants_compile_without_spills(one):
    require_nvrtc()
    source, headers, options = sources(one)
    log = nvrtc.compile_source(source, headers, (*options, "--ptxas-options=-v"))[1]
    assert int(SPILLS.search(log)[1]) == 0


@pytest.mark.parametrize("ahead", [False, True])
def test_nothing_is_read_before_the_kernel_in_front_has_ended(ahead):
    """Only asked for, into the cache, and that where a variant is ahead."""
    require_nvrtc()
    ptx = nvrtc.compile_source(*sources(Variant(8, 2, 4, 2, ahead)), ptx=True)[0].decode()
    before, after = ptx.split("griddepcontrol.wait")
    assert ("prefetch.global.L2" in before) == ahead
    assert "ld.global" not in before
    assert "ld.global.nc" in after


def test_what_it_takes(monkeypatch):
    monkeypatch.setattr(host, "has_compiler", lambda: True)
    monkeypatch.setattr(host, "gains", lambda *_: True)
    assert host.takes(1, (4096, 4096), torch.bfloat16)
    assert host.takes(16, (4096, 4096), torch.uint8)
    assert not host.takes(8, (4096, 4096), torch.bfloat16)
    assert not host.takes(17, (4096, 4096), torch.uint8)
    assert not host.takes(0, (4096, 4096), torch.bfloat16)
    assert not host.takes(1, (4096, 4096), torch.float16)
    assert not host.takes(1, (1024, 4096), torch.bfloat16)
    monkeypatch.setattr(host, "is_loadable", lambda *_: True)
    x = torch.zeros(1, 4096).bfloat16()
    for newest in ((9, 0), (10, 0)):
        monkeypatch.setattr(host, "capability", lambda device, newest=newest: newest)
        assert (host.launch_for(x, 4096, 0) is not None) == (newest == (9, 0))


@pytest.mark.parametrize("other", ["fp8_tensorwise", "fp8_rowwise_e5m2", "int8_rowwise"])
def test_schemes_that_it_takes(other):
    own, key = SCHEMES[host.SCHEME].key, SCHEMES[other].key
    assert host.takes_schemes(own, own)
    assert not host.takes_schemes(own, key)
    assert not host.takes_schemes(key, own)


def test_a_call_has_the_operands_of_its_functions_in_their_order(monkeypatch):
    """What is repeated is given them by place."""
    seen = []

    class Told:
        def __init__(self, inputs, words):
            seen.append(list(inputs))

        def __getattr__(self, name):
            return lambda *_: None

    monkeypatch.setattr(host, "Call", Told)
    monkeypatch.setattr(host, "launch_for", lambda *_: True)
    with FakeTensorMode():
        x, codes, scale = (torch.empty(size, device="cuda") for size in ((1, 256), (16, 256), (16,)))
        host.fp8_skinny(x, codes, scale)
        host.fp8_skinny(x, codes, scale, x_scale=torch.empty(1, device="cuda"))
    assert seen == [["x", "codes", "scale", "bias"], ["x", "x_scale", "x_zero", "codes", "scale", "bias"]]
    assert [len(one.operands) for one in (LINEAR_DYNAMIC, LINEAR_OF_CODES)] == [len(one) for one in seen]


def test_cpu_tensors_are_left_to_others():
    x, codes = torch.zeros(1, 4096).bfloat16(), torch.zeros(4096, 4096, dtype=torch.uint8)
    assert host.fp8_skinny(x, codes, torch.ones(4096)) is None


def test_a_variant_that_does_not_load_is_left_out_with_a_warning(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(launch, "cached_cubin", refuse)
    launch.is_loadable.cache_clear()
    with pytest.warns(UserWarning, match="no kernel image"):
        assert not launch.is_loadable(Variant(8, 2, 14, 2), 0)
    assert not launch.is_loadable(Variant(8, 2, 14, 2), 0)
    launch.is_loadable.cache_clear()


def test_a_launch_has_all_rows():
    made = launch.Fp8SkinnyLaunch(Variant(8, 7, 4, 2), 1, (14336, 4096))
    assert made.programs == 128
    assert launch.ARGUMENTS.size == 8 * len(launch.POINTERS) + 16
