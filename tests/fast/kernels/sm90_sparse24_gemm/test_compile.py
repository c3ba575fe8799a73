"""Variants compile for sm_90a without a GPU: no spills, no serialized wgmma, within registers and shared memory."""

import re

import pytest

from fast.kernels.sm90_sparse24_gemm.host import ARGUMENTS, LEAST_STORED, MAPS
from fast.kernels.sm90_sparse24_gemm.select import CLUSTERS, TILES, WIDE
from fast.kernels.sm90_sparse24_gemm.variants import ELEMENTS, KINDS, MOST_SHARED, PITCH, fitted, sources
from fast.launch import nvrtc
from tests.emulator.device.program import parsed
from tests.fast.kernels.compiling.day_cases import by_day, named
from tests.fast.kernels.sm90_sparse24_gemm.examples import require_nvrtc

E4M3, BF16, INT8 = (("float8_e4m3fn",) * 2, ("bfloat16",) * 2, ("int8",) * 2)
REGISTERS = re.compile(r"Used (\d+) registers")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
#: Each tile with a cluster of its own, so that all clusters occur, too.
VARIANTS = [(tile, CLUSTERS[at % 4 + (4 if at < 5 else 0)]) for at, tile in enumerate(TILES)]
VARIANTS[-1] = (TILES[-1], (2, 1))
VARIANTS += [(tile, (2, 1)) for tile in WIDE]
#: Tiles that the copy engine writes.
STORED = [tile for tile in TILES + WIDE if tile[0] >= LEAST_STORED]


def report(variant, kinds, out):
    """The assembler's report of a variant."""
    require_nvrtc()
    source, headers, options = sources(variant, ELEMENTS[kinds], out)
    cubin, log = nvrtc.compile_source(source, headers, (*options, "--ptxas-options=-v"))
    assert cubin.startswith(b"\x7fELF")
    return log


def complaints(log, threads):
    """What of a report makes a kernel slow or impossible."""
    spilled = [found.group() for found in SPILLS.finditer(log) if any(map(int, found.groups()))]
    registers = int(REGISTERS.search(log)[1])
    crowded = [] if registers * threads <= 65536 else [f"{registers} registers of {threads} threads"]
    return spilled + crowded + [line for line in log.splitlines() if "(C75" in line or "warning" in line]


# Two sets of sums of more than 128 tokens do not fit the registers: there is no such variant.
@pytest.mark.parametrize(
    ("tile", "cluster", "promote"),
    [(*one, promote) for one in VARIANTS for promote in (False, True) if not promote or one[0][0] <= 128],
)
def test_tiles_compile(tile, cluster, promote):
    tokens, groups, panels = tile
    one = fitted(tokens, groups, 1 if promote else panels, *cluster, 8, promote=promote)
    assert complaints(report(one, E4M3, "bfloat16"), one.threads) == []


@pytest.mark.parametrize(
    ("tile", "out"),
    by_day(
        [
            (tile, ("float16", "bfloat16")[(at + other) % 2])
            for other in (0, 1)
            for at, tile in enumerate(STORED)
        ],
        lambda case: named(tile=case[0], out=case[1]),
    ),
)
def test_stored_tiles_compile(tile, out):
    one = fitted(*tile, 2, 1, 16, stored=True)
    assert one.shared(16) <= MOST_SHARED
    assert one.stages >= 5
    assert one.tokens % one.chunk == 0
    assert complaints(report(one, BF16, out), one.threads) == []


@pytest.mark.parametrize("kinds", ELEMENTS)
def test_elements_compile(kinds):
    one = fitted(64, 2, 2, 1, 4, ELEMENTS[kinds].bits)
    assert complaints(report(one, kinds, "float16"), one.threads) == []


@pytest.mark.parametrize("out", KINDS)
def test_outputs_compile(out):
    one = fitted(16, 1, 2, 1, 2, 8)
    assert complaints(report(one, INT8, out), one.threads) == []


def test_reports_are_read():
    good = "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nUsed 168 registers"
    assert complaints(good, 384) == []
    assert complaints(good, 512) == ["168 registers of 512 threads"]
    bad = good.replace("0 bytes spill loads", "4 bytes spill loads") + "\nptxas info : (C7511) serialized"
    assert len(complaints(bad, 384)) == 2


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("tile", TILES + WIDE)
def test_shared_memory_suffices(tile, cluster, bits):
    """For at least three stages, and with splits for the sums that take the ring's place."""
    tokens, groups, panels = tile
    one = fitted(tokens, groups, panels, *cluster, bits)
    assert one.shared(bits) <= MOST_SHARED
    assert one.stages >= 3
    assert one.cluster <= 8
    if one.splits > 1 and tokens <= 128:
        assert groups * tokens * PITCH * 4 <= one.ring(bits)


def test_arguments_are_those_of_the_kernel():
    require_nvrtc()
    one = fitted(16, 1, 2, 1, 2, 8)
    source, headers, options = sources(one, ELEMENTS[E4M3], "bfloat16")
    ptx, _ = nvrtc.compile_source(source, headers, options, ptx=True)
    assert list(parsed(ptx.decode().rstrip("\0")).parameters.values()) == [MAPS, ARGUMENTS.size - MAPS]


def test_what_nvrtc_refuses_is_said():
    require_nvrtc()
    with pytest.raises(nvrtc.CompileError, match="no storage class"):
        nvrtc.compile_source("nonsense", {}, ())


def test_cubins_are_kept(tmp_path, monkeypatch):
    """By all that they depend on; what is no cubin is made again."""
    require_nvrtc()
    monkeypatch.setenv("AO_LAB_CACHE", str(tmp_path))
    text = 'extern "C" __global__ void f(int* x) { *x = %d; }'
    options = ("--gpu-architecture=sm_90a",)
    first = nvrtc.cached_cubin(text % 1, {}, options)
    (path,) = nvrtc.folder().iterdir()
    monkeypatch.setattr(nvrtc, "compile_source", lambda *given: pytest.fail("compiled again"))
    assert nvrtc.cached_cubin(text % 1, {}, options) == first
    monkeypatch.undo()
    monkeypatch.setenv("AO_LAB_CACHE", str(tmp_path))
    path.write_bytes(b"broken")
    assert nvrtc.cached_cubin(text % 1, {}, options) == first
    assert nvrtc.cached_cubin(text % 2, {}, options) != first
    nvrtc.cached_cubin(text % 1, {}, (*options, "--std=c++17"))
    assert len(list(nvrtc.folder().iterdir())) == 3


def test_a_machine_without_nvrtc_is_told_what_to_install(monkeypatch):
    nvrtc.library.cache_clear()
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(["no such library"]))
    with pytest.raises(RuntimeError, match="pip install nvidia-cuda-nvrtc"):
        nvrtc.library()
    nvrtc.library.cache_clear()
