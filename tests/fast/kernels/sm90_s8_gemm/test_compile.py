"""Variants compile for sm_90a without a GPU: no spills, no serialized wgmma, registers of products are left alone."""

import pytest

from fast.kernels.sm90_s8_gemm.host import ARGUMENTS, MAPS
from fast.kernels.sm90_s8_gemm.select import PAIR, TILES
from fast.kernels.sm90_s8_gemm.variants import MOST_SHARED, THREADS, fitted, sources
from fast.launch import nvrtc
from tests.emulator.device.program import parsed
from tests.fast.kernels.sm90_sparse24_gemm.examples import require_nvrtc
from tests.fast.kernels.sm90_sparse24_gemm.machine_code import disassembled, uses_in_flight
from tests.fast.kernels.sm90_sparse24_gemm.test_compile import complaints

OUTPUTS = ("float32", "bfloat16", "float16")


def served(tokens, out, element="int8"):
    """Source, headers and options of a variant that shapes get."""
    require_nvrtc()
    return sources(fitted(tokens, PAIR, out != "float32"), element, out)


@pytest.mark.parametrize("out", OUTPUTS)
@pytest.mark.parametrize("tokens", TILES)
def test_variants_compile(tokens, out):
    source, headers, options = served(tokens, out)
    cubin, log = nvrtc.compile_source(source, headers, (*options, "--ptxas-options=-v"))
    assert complaints(log, THREADS) == []
    code = disassembled(cubin)
    assert sum("IGMMA" in line.text for line in code.lines) == 4
    assert uses_in_flight(code) == []


def test_floats_compile():
    source, headers, options = served(256, "bfloat16", "float8_e4m3fn")
    _, log = nvrtc.compile_source(source, headers, (*options, "--ptxas-options=-v"))
    assert complaints(log, THREADS) == []


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("tokens", TILES)
def test_shared_memory_suffices(tokens, stored):
    one = fitted(tokens, PAIR, stored)
    assert one.shared <= MOST_SHARED
    assert one.stages >= 4
    assert one.skew < one.stages
    assert one.tokens % one.chunk == 0


def test_arguments_are_those_of_the_kernel():
    source, headers, options = served(256, "bfloat16")
    ptx, _ = nvrtc.compile_source(source, headers, options, ptx=True)
    assert list(parsed(ptx.decode().rstrip("\0")).parameters.values()) == [MAPS, ARGUMENTS.size - MAPS]
