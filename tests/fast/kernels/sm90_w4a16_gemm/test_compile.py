"""Variants compile for sm_90a without a GPU: no spills, no serialized wgmma, within shared memory, and operands in registers
are left alone until their products are waited for."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fast.kernels.sm90_sparse24_gemm.variants import MOST_SHARED, PITCH
from fast.kernels.sm90_w4a16_gemm import select
from fast.kernels.sm90_w4a16_gemm.host import ARGUMENTS, MAPS
from fast.kernels.sm90_w4a16_gemm.variants import ELEMENTS, GROUPS, Weight, fitted, sources
from fast.launch import nvrtc
from tests.emulator.device.program import parsed
from tests.fast.kernels.compiling.day_cases import by_day, named
from tests.fast.kernels.sm90_sparse24_gemm.examples import require_nvrtc
from tests.fast.kernels.sm90_sparse24_gemm.machine_code import disassembled, read, uses_in_flight
from tests.fast.kernels.sm90_sparse24_gemm.test_compile import complaints

THREADS = fitted(256, 1, 1, Weight("int4")).threads
INTEGERS = [
    Weight(element, zero, parts) for element in ("int4", "int8") for zero in (False, True) for parts in (1, 2)
]
FACTORS = [Weight("e2m1", False, 2), Weight("e2m1", False, 4), Weight("e4m3_mx", False, 2)]
WEIGHTS = [*INTEGERS, Weight("e4m3"), Weight("e4m3", False, 2), *FACTORS, Weight("nf4")]
#: Each tile and cluster occurs; the last ones have small tiles, too.
TILES = [(256, 2, 1), (192, 1, 1), (128, 2, 2), (256, 1, 2), (128, 1, 4)]
CUT = [(256, 192), (256, 128), (256, 64), (192, 128), (192, 64), (128, 64)]
TESTED = [
    (tile, weight) for at, weight in enumerate(WEIGHTS) for tile in (TILES[0], TILES[1 + at % 4], CUT[at % 6])
]


def features(case):
    """What kernels differ in by their source: elements, zero points, groups; clusters and small tiles."""
    tile, weight = case
    clusters = named(pair=tile[1] == 2, splits=tile[1:] if len(tile) > 2 else (), small=len(tile) == 2)
    return [*clusters, *named(element=weight.element, zero=weight.zero, groups=weight.parts > 1)]


def compiled(tile, weight, x="bfloat16"):
    """(cubin, the assembler's report, source) of a variant."""
    require_nvrtc()
    one = fitted(tile[0], 1, 1, weight, tile[1]) if tile in CUT else fitted(*tile, weight)
    source, headers, options = sources(one, weight, x, x)
    return *nvrtc.compile_source(source, headers, (*options, "--ptxas-options=-v")), (
        source,
        headers,
        options,
    )


def waits(code):
    """How many there are for products: that leave four, two batches of two, and that leave none."""
    found = [line.text for line in code.lines if "WARPGROUP.DEPBAR" in line.text]
    return sum(text.endswith("0x2") for text in found), sum(text.endswith("0x0") for text in found)


@pytest.mark.parametrize(("tile", "weight"), by_day(TESTED, features))
def test_variants(tile, weight):
    cubin, log, _ = compiled(tile, weight)
    assert complaints(log, THREADS) == []
    code = disassembled(cubin)
    # Two stages of four products, a wait for each two that leaves four, and one for all at the end: no others make them serial.
    sizes = 2 if tile in CUT else 1
    assert sum("HGMMA" in line.text for line in code.lines) == 8 * sizes
    assert waits(code) == (4 * sizes, sizes)
    assert uses_in_flight(code) == []


def tiles_in_turn(weight):
    """Those that are taken with turns."""
    return [tokens for tokens in select.FEW if select.turns_of(tokens, tokens, 1, weight) > 1]


@pytest.mark.parametrize(
    ("weight", "tokens", "x"),
    by_day(
        [(weight, tokens, "bfloat16") for weight in WEIGHTS for tokens in tiles_in_turn(weight)]
        + [(weight, tiles_in_turn(weight)[-1], "float16") for weight in WEIGHTS],
        lambda case: named(element=case[0].element, tokens=case[1], x=case[2]),
    ),
)
def test_turns(weight, tokens, x):
    """A stage of four products and a wait for all of them, one at the end; 112 registers are enough."""
    require_nvrtc()
    one = fitted(tokens, 1, 1, weight, turns=2)
    source, headers, options = sources(one, weight, x, x)
    cubin, log = nvrtc.compile_source(source, headers, (*options, "--ptxas-options=-v"))
    assert complaints(log, one.threads) == []
    code = disassembled(cubin)
    assert sum("HGMMA" in line.text for line in code.lines) == 4
    assert waits(code) == (0, 2)
    assert uses_in_flight(code) == []


@pytest.mark.parametrize(
    ("tile", "weight"),
    by_day(
        [
            (tile, weight)
            for weight in (WEIGHTS[1], *FACTORS, WEIGHTS[-1])
            for tile in (CUT[0], *TILES[1::-1])
        ],
        lambda case: named(factors=case[1] in FACTORS),
    ),
)
def test_float16(tile, weight):
    cubin, log, _ = compiled(tile, weight, "float16")
    assert complaints(log, THREADS) == []
    assert uses_in_flight(disassembled(cubin)) == []


def assemblers():
    """Others than NVRTC's that are installed: Triton's, and that of a toolkit."""
    triton = Path(pytest.importorskip("triton").__file__).parent / "backends/nvidia/bin/ptxas"
    return [str(one) for one in (triton, shutil.which("ptxas")) if one and Path(one).exists()]


@pytest.mark.parametrize(
    ("tile", "weight"),
    by_day([*TESTED[:4], *TESTED[-6:]], lambda case: named(cut=case[0] in CUT)),
)
def test_older_assemblers(tile, weight, tmp_path):
    """They serialize products whose operands they see written between those of a group."""
    *_, (source, headers, options) = compiled(tile, weight)
    ptx = nvrtc.compile_source(source, headers, options, ptx=True)[0].decode().rstrip("\0")
    text, cubin = tmp_path / "a.ptx", tmp_path / "a.cubin"
    text.write_text(re.sub(r"\.version .*", ".version 8.7", ptx))
    for one in assemblers():
        command = [one, "-arch=sm_90a", "-v", str(text), "-o", str(cubin)]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        code = disassembled(cubin.read_bytes())
        assert complaints(log, THREADS) == []
        sizes = 2 if tile in CUT else 1
        assert waits(code) == (4 * sizes, sizes)
        assert uses_in_flight(code) == []


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("cluster", select.CLUSTERS)
@pytest.mark.parametrize("tokens", [*select.FEW[:2], *select.TILES])
def test_shared_memory_suffices(tokens, cluster, weight):
    """For at least four stages, and with splits for the sums that take the ring's place."""
    one = fitted(tokens, *cluster, weight)
    assert one.shared(weight) <= MOST_SHARED
    assert one.stages >= 4
    if one.splits > 1:
        assert GROUPS * tokens * PITCH * 4 <= one.ring(weight)
    if tokens in select.FEW and one.cluster == 1:
        turned = fitted(tokens, 1, 1, weight, turns=2)
        assert turned.shared(weight) <= MOST_SHARED
        assert turned.stages in range(4, 13, 2)


def test_every_element_is_compiled():
    assert {one.element for one in WEIGHTS} == set(ELEMENTS)


def test_arguments_are_those_of_the_kernel():
    *_, (source, headers, options) = compiled(TILES[0], WEIGHTS[0])
    ptx, _ = nvrtc.compile_source(source, headers, options, ptx=True)
    assert list(parsed(ptx.decode().rstrip("\0")).parameters.values()) == [MAPS, ARGUMENTS.size - MAPS]


LOOP = """
.L_x_1:
        /*0010*/                   F2FP.BF16.F32.PACK_AB R{written}, R5, R4 ;
        /*0020*/                   WARPGROUP.ARRIVE ;
        /*0030*/                   HGMMA.64x256x16.F32.BF16 R24, R152, gdesc[UR16], R24, gsb0 ;
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x{left} ;
        /*0050*/              @!P0 BRA `(.L_x_1) ;
        /*0060*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0070*/                   EXIT ;
"""


@pytest.mark.parametrize(("written", "left", "count"), [(153, 1, 1), (155, 1, 1), (156, 1, 0), (153, 0, 0)])
def test_operands_in_flight_are_seen(written, left, count):
    """One set of registers, written while the product before may read them."""
    assert len(uses_in_flight(read(LOOP.format(written=written, left=left)))) == count
