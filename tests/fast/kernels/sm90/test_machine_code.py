"""No register of a product is named by another instruction before the product is waited for: metadata neither."""

import pytest

from fast.kernels.sm90_sparse24_gemm.host import ELEMENTS, KERNEL, C, Problem, fitted
from fast.launch import nvrtc
from tests.emulator.faults import Planted
from tests.fast.kernels.compiling.kernel_samples import by_day, named
from tests.fast.kernels.sm90 import machine_code
from tests.fast.kernels.sm90.machine_code import disassembled, read, uses_in_flight
from tests.fast.kernels.sm90.products import require_nvrtc

TILES, WIDE = ([tuple(one) for one in of] for of in (C.tiles, C.wide))

E4M3, BF16, INT8 = (("float8_e4m3fn",) * 2, ("bfloat16",) * 2, ("int8",) * 2)
LOOP = """
        /*0000*/                   LDS.64 R88, [R90] ;
.L_x_1:
        /*0010*/                   {load} ;
        /*0020*/                   WARPGROUP.ARRIVE ;
        /*0030*/                   QGMMA.SP.64x128x64.F32.E4M3.E4M3 R24, gdesc[UR8], R24, R88 ;
        /*0040*/                   QGMMA.SP.64x128x64.F32.E4M3.E4M3 R24, gdesc[UR8], R24, R89, gsb0 ;
        /*0050*/                   WARPGROUP.DEPBAR.LE gsb0, 0x{left} ;
        /*0060*/              @!P0 BRA `(.L_x_1) ;
        /*0070*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0080*/                   STS [R90], R24 ;
        /*0090*/                   EXIT ;
"""


def code_of(variant, kinds, change=lambda text: text):
    """The machine code of a variant."""
    require_nvrtc()
    source, headers, options = KERNEL.sources(variant, Problem(ELEMENTS[kinds], "bfloat16"))
    return disassembled(nvrtc.compile_source(change(source), headers, options)[0])


@pytest.mark.parametrize(
    ("tile", "kinds", "serial"),
    by_day(
        [(tile, kinds, False) for tile in TILES + WIDE for kinds in (E4M3, BF16, INT8)]
        + [(TILES[-2], BF16, True)],
        lambda case: named(groups=case[0][1:], wide=case[0] in WIDE, kinds=case[1], serial=case[2]),
    ),
)
def test_registers_of_products_are_left_alone(tile, kinds, serial):
    pair, splits = (2, 1) if tile[0] > 128 else (1, 4)
    one = fitted(*tile, pair, splits, ELEMENTS[kinds].bits)._replace(serial=serial)
    code = code_of(one, kinds)
    assert sum("GMMA.SP" in line.text for line in code.lines) >= 2 * one.panels
    assert uses_in_flight(code) == []


@pytest.mark.parametrize("tile", [TILES[-2], TILES[-1], WIDE[1]])
def test_registers_of_stored_products_are_left_alone(tile):
    assert uses_in_flight(code_of(fitted(*tile, 2, 1, 16, stored=True), BF16)) == []


@pytest.mark.parametrize("tile", [TILES[0], TILES[-2]])
def test_promoted_sums_are_left_alone(tile):
    assert uses_in_flight(code_of(fitted(*tile[:2], 1, 2, 1, 8, promote=True), E4M3)) == []


def test_one_set_of_metadata_registers_is_seen():
    """The fault that gave wrong results on a GPU, and that a kernel with two sets of registers for metadata does not have."""
    once = Planted("TWO = LATER && !PROMOTE", "TWO = false")
    found = uses_in_flight(code_of(fitted(128, 2, 1, 1, 4, 8), E4M3, once))
    assert found
    assert all("LDS.64" in text for text in found)


@pytest.mark.parametrize(
    ("load", "left", "wrong"),
    [
        ("LDS.64 R88, [R90]", 1, ["LDS.64 R88, [R90]"]),
        ("LDS.64 R88, [R90]", 0, []),
        ("LDS.64 R92, [R90]", 1, []),
        ("LDS.128 R20, [R90]", 1, []),
        ("LDS.128 R21, [R90]", 1, ["LDS.128 R21, [R90]"]),
        ("STS.128 [R22], R92", 1, []),
        ("STS.128 [R92], R86", 1, ["STS.128 [R92], R86"]),
        ("LDG.E.128 R92, [R22]", 1, []),
        ("FADD R4, R4, R87", 1, ["FADD R4, R4, R87"]),
    ],
)
def test_uses_are_found(load, left, wrong):
    code = read(LOOP.replace("{load}", load).replace("{left}", str(left)))
    assert len(code.lines) == 10
    assert uses_in_flight(code) == wrong


def test_registers_of_wide_instructions():
    assert machine_code.named("LDS.64 R88, [R90+0x10]") == {88, 89, 90}
    assert machine_code.named("CS2R R24, SRZ") == {24, 25}
    assert machine_code.named("IMAD.U32 R4, RZ, RZ, UR5") == {4}
    assert machine_code.named("SYNCS.ARRIVE.TRANS64.RED.A1T0 RZ, [R4+URZ], RZ") == {4}


@pytest.mark.parametrize(("given", "wrong"), [("0x18", []), ("0x20", ["2 x 240 and 32 registers of 504"])])
def test_registers_that_never_come(given, wrong):
    text = f"""
        /*0000*/                   USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0 ;
        /*0010*/                   USETMAXREG.DEALLOC.CTAPOOL {given} ;
        /*0020*/                   EXIT ;
"""
    assert machine_code.waits_for_registers(read(text), "Used 168 registers", 384) == wrong
