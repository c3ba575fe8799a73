"""Tiles of families compile for sm_90a without a GPU, whatever is chosen (`tests/fast/gemm/test_families.py` has that): no
spills, no serialized products, registers of products left alone, within registers and shared memory; NVRTC and its cubins."""

import re
import shutil
import subprocess
from itertools import product
from pathlib import Path

import pytest
import torch

from fast.kernels.sm90_intn_small_m import host as intn
from fast.kernels.sm90_intn_small_m import host as intn_host
from fast.kernels.sm90_s8_gemm import host as s8
from fast.kernels.sm90_sparse24_gemm import host as sparse24
from fast.kernels.sm90_sparse24_gemm.host import LEAST_STORED
from fast.kernels.sm90_sparse24_gemm.host import C as SPARSE24
from fast.kernels.sm90_sparse24_w4a16_gemv import host as sparse24_gemv
from fast.kernels.sm90_sparse24_w4a16_gemv import host as sparse24_gemv_host
from fast.kernels.sm90_w4a16_gemm import experts
from fast.kernels.sm90_w4a16_gemm import host as gemm
from fast.kernels.sm90_w4a16_gemm import host as gemm_host
from fast.kernels.sm90_w4a16_gemm.host import Weight
from fast.kernels.sm90_w4a16_gemv import host as gemv
from fast.kernels.sm90_w4a16_gemv import host as gemv_host
from fast.kernels.sm90_w4a16_gemv import several as gemv_several
from fast.launch import cuda, nvrtc
from tests.emulator.device.program import parsed
from tests.emulator.device.stand_in import StandIn
from tests.fast.kernels.compiling.kernel_samples import by_day, named
from tests.fast.kernels.sm90.machine_code import compiled, complaints, disassembled, read, uses_in_flight
from tests.fast.kernels.sm90.products import require_nvrtc


def test_reports_are_read():
    good = "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nUsed 168 registers"
    assert complaints(good, 384) == []
    assert complaints(good, 512) == ["168 registers of 512 threads"]
    bad = good.replace("0 bytes spill loads", "4 bytes spill loads") + "\nptxas info : (C7511) serialized"
    assert len(complaints(bad, 384)) == 2


# Every family


E4M3, BF16, INT8 = (("float8_e4m3fn",) * 2, ("bfloat16",) * 2, ("int8",) * 2)
SHAPES = ((14336, 4096), (4096, 14336))
TILES, WIDE, CLUSTERS = (
    [tuple(one) for one in of] for of in (SPARSE24.tiles, SPARSE24.wide, SPARSE24.clusters)
)
#: Each tile with a cluster of its own, so that all clusters occur, too.
CLUSTERED = [(tile, CLUSTERS[at % 4 + (4 if at < 5 else 0)]) for at, tile in enumerate(TILES)]
CLUSTERED[-1] = (TILES[-1], (2, 1))
CLUSTERED += [(tile, (2, 1)) for tile in WIDE]
#: Tiles that the copy engine writes.
STORED = [tile for tile in TILES + WIDE if tile[0] >= LEAST_STORED]


def sparse24_cases():
    """Tiles and clusters, promoted or not; elements; outputs; tiles that the copy engine writes."""
    of = lambda one, kinds, out: (sparse24.KERNEL, one, sparse24.Problem(sparse24.ELEMENTS[kinds], out))  # noqa: E731
    for (tokens, groups, panels), cluster in CLUSTERED:
        yield of(sparse24.fitted(tokens, groups, panels, *cluster, 8), E4M3, "bfloat16")
        # Two sets of sums of more than 128 tokens do not fit the registers: there is no such variant.
        if tokens <= 128:
            yield of(sparse24.fitted(tokens, groups, 1, *cluster, 8, promote=True), E4M3, "bfloat16")
    for kinds, elements in sparse24.ELEMENTS.items():
        yield of(sparse24.fitted(64, 2, 2, 1, 4, elements.bits), kinds, "float16")
    for out in cuda.KINDS:
        yield of(sparse24.fitted(16, 1, 2, 1, 2, 8), INT8, out)
    outs = ("float16", "bfloat16")
    stored = [(tile, outs[(at + other) % 2]) for other in (0, 1) for at, tile in enumerate(STORED)]
    for one in by_day(stored, lambda case: named(tile=case[0], out=case[1])):
        tile, out = one.values
        yield pytest.param(*of(sparse24.fitted(*tile, 2, 1, 16, stored=True), BF16, out), marks=one.marks)


def gemv_cases():
    """Straight from memory; of several weights, which spill no more than one."""
    one, form = gemv.Variant(8, 1, 3, 1, 6, 2, True), gemv.Form("int4", 128, True, False, "bfloat16")
    yield gemv.KERNEL, one, form._replace(weights=2, gated=True)
    yield gemv.KERNEL, one._replace(splits=2), form._replace(weights=3)
    for element in gemv.DIRECT:
        form = gemv.Form(element, 32 if element == "e4m3_mx" else 0, False, False, "bfloat16")
        for one in (gemv.Direct(8, 7, 4, 4), gemv.Direct(16, 2, 14, 4)):
            assert one.shared(form, one.tokens, 4096 // gemv.STEP) <= cuda.MOST_SHARED
            yield gemv.KERNEL, one, form


def sparse24_gemv_cases():
    """The rule's, of narrow scales, of three tiles of rows, and of two weights."""
    choose = sparse24_gemv.choose
    narrow = sparse24_gemv.Form(32, True, True)
    yield from ((sparse24_gemv.KERNEL, choose(narrow, count, *SHAPES[0]), narrow) for count in (1, 16, 17))
    for scheme in ((64, False, False), (32, True, True)):
        for form in (
            sparse24_gemv.Form(*scheme, products) for products in (sparse24_gemv.TWO, sparse24_gemv.GATED)
        ):
            for one in dict.fromkeys(choose(form, count, 28672, 4096) for count in (1, 16)):
                yield sparse24_gemv.KERNEL, one, form


S8_TILES = [tile["tokens"] for tile in s8.C.tiles]


def s8_cases():
    """What shapes get; floats, too."""
    for tokens, out in product(S8_TILES, ("float32", "bfloat16", "float16")):
        yield s8.KERNEL, s8.fitted(tokens, s8.C.pair, out != "float32"), s8.Problem("int8", out)
    yield s8.KERNEL, s8.fitted(256, s8.C.pair, True), s8.Problem("float8_e4m3fn", "bfloat16")


@pytest.mark.parametrize(
    ("kernel", "variant", "problem"),
    [*sparse24_cases(), *s8_cases(), *gemv_cases(), *sparse24_gemv_cases()],
)
def test_tiles_compile(kernel, variant, problem):
    cubin, log = compiled(kernel, variant, problem)
    assert cubin.startswith(b"\x7fELF")
    # These spill a little where programs share a multiprocessor.
    spills = kernel is gemv.KERNEL and problem.weights == 1
    assert spills or complaints(log, variant.threads * getattr(variant, "at_once", 1)) == []
    if kernel is s8.KERNEL and problem.element == "int8":
        code = disassembled(cubin)
        assert sum("IGMMA" in line.text for line in code.lines) == 4
        assert uses_in_flight(code) == []


def w4a16(rows=64):
    return StandInWeight((128, 256), torch.empty(2, 4, 512, dtype=torch.int32), torch.empty(2, 128))


class StandInWeight:
    """What launches look at of a weight in int4."""

    element, group, zero = "int4", 128, None

    def __init__(self, shape, words, scale):
        self.shape, self.words, self.scale = shape, words, scale


def launches():
    """A launch of every struct of arguments, by kernel."""
    form = gemv.Form("int4", 128, False, False, "bfloat16")
    yield gemv_host.launch_of(gemv.Variant(8, 1, 2, 1, 2), form, 1, (128, 256))
    for weights in (2, 3):
        of_several = form._replace(weights=weights, gated=weights == 2)
        yield gemv_several.launch_of(gemv.Variant(8, 1, 2, 1, 2), of_several, 1, (128,) * weights, 256)
    plain = intn.Form(3, 32, False, True, False)
    yield intn_host.launch_of(intn.Variant(8, 1, 1, 2, 1, 1, 2), plain, 1, (32, 256))
    sparse = sparse24_gemv.Form(128, False, False)
    one = sparse24_gemv.Variant(8, 512, 1, 1, 2)
    for other in (sparse, sparse._replace(zeros=True), sparse._replace(products=sparse24_gemv.TWO)):
        yield sparse24_gemv_host.launch_of(one, other, 1, (16, 512), 16 * (other.products > 0))
    for scaled in (False, True):
        yield gemm_host.launch_of(w4a16(), 64, torch.bfloat16, -1, gemm.Variant(16, 1, 1, 3), scaled=scaled)
    stacked = StandInWeight((128, 256), torch.empty(2, 2, 4, 512, dtype=torch.int32), torch.empty(2, 2, 128))
    yield experts.launch_of(
        torch.zeros(8, 256, dtype=torch.bfloat16), stacked, gemm.Variant(16, 1, 1, 3, grouped=True)
    )


@pytest.mark.parametrize("at", range(10))
def test_arguments_are_those_of_the_kernel(at):
    require_nvrtc()
    with StandIn().installed():
        one = list(launches())[at]
    ptx, _ = one.kernel.compiled(one.variant, one.problem, ptx=True)
    sizes = list(parsed(ptx.decode().rstrip("\0")).parameters.values())
    image, _ = one.arguments(0)
    assert sizes == ([cuda.MAPS, len(image) - cuda.MAPS] if one.maps is not None else [len(image)])


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("tile", TILES + WIDE)
def test_shared_memory_suffices_for_sparse_products(tile, cluster, bits):
    """For at least three stages, and with splits for the sums that take the ring's place."""
    tokens, groups, panels = tile
    one = sparse24.fitted(tokens, groups, panels, *cluster, bits)
    assert one.shared(bits) <= cuda.MOST_SHARED
    assert one.stages >= 3
    assert one.cluster <= 8
    if one.splits > 1 and tokens <= 128:
        assert groups * tokens * sparse24.PITCH * 4 <= one.ring(bits)
    if tile in STORED:
        stored = sparse24.fitted(*tile, 2, 1, 16, stored=True)
        assert stored.shared(16) <= cuda.MOST_SHARED
        assert stored.stages >= 5
        assert stored.tokens % stored.chunk == 0


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("tokens", S8_TILES)
def test_shared_memory_suffices_for_codes(tokens, stored):
    one = s8.fitted(tokens, s8.C.pair, stored)
    assert one.shared <= cuda.MOST_SHARED
    assert one.stages >= 4
    assert one.skew < one.stages
    assert one.tokens % one.chunk == 0


# Products whose first operand is in registers


INTEGERS = [
    Weight(element, zero, parts) for element in ("int4", "int8") for zero in (False, True) for parts in (1, 2)
]
FACTORS = [Weight("e2m1", False, 2), Weight("e2m1", False, 4), Weight("e4m3_mx", False, 2)]
WEIGHTS = [*INTEGERS, Weight("e4m3"), Weight("e4m3", False, 2), *FACTORS, Weight("nf4")]
#: Each tile and cluster occurs; the last ones have small tiles, too.
GEMM_TILES = [(256, 2, 1), (192, 1, 1), (128, 2, 2), (256, 1, 2), (128, 1, 4)]
CUT = [(256, 192), (256, 128), (256, 64), (192, 128), (192, 64), (128, 64)]
TESTED = [
    (tile, weight)
    for at, weight in enumerate(WEIGHTS)
    for tile in (GEMM_TILES[0], GEMM_TILES[1 + at % 4], CUT[at % 6])
]
#: Tokens, pair, splits, small, slices of K of rows that have scales.
SCALED_TILES = [
    (256, 1, 1, 0, 1),
    (256, 2, 1, 0, 1),
    (128, 1, 4, 0, 1),
    (256, 1, 1, 192, 1),
    (64, 1, 1, 0, 2),
    (96, 1, 1, 0, 2),
]
SCALED_WEIGHTS = [
    Weight("int4"),
    Weight("int4", True, 2),
    Weight("int8"),
    Weight("e2m1", False, 4),
    Weight("nf4"),
]


def variant_of(tile, weight):
    """With small tiles or clusters."""
    return gemm.fitted(tile[0], 1, 1, weight, tile[1]) if tile in CUT else gemm.fitted(*tile, weight)


def features(case):
    """What kernels differ in by their source: elements, zero points, groups; clusters and small tiles."""
    tile, weight = case
    clusters = named(pair=tile[1] == 2, splits=tile[1:] if len(tile) > 2 else (), small=len(tile) == 2)
    return [*clusters, *named(element=weight.element, zero=weight.zero, groups=weight.parts > 1)]


def tiles_of_slices(weight):
    """Those that are taken with slices of K."""
    return [tokens for tokens in gemm.C.small_m_tiles if gemm.k_slices_of(tokens, tokens, 1, weight) > 1]


def gemm_cases():
    """Variants, what they decode, and the dtype of x: each by what kernels differ in, the others by night."""
    plain = by_day(TESTED, features)
    yield from ((variant_of(*one.values), one.values[1], "bfloat16", one.marks) for one in plain)
    sliced = by_day(
        [(weight, tokens, "bfloat16") for weight in WEIGHTS for tokens in tiles_of_slices(weight)]
        + [(weight, tiles_of_slices(weight)[-1], "float16") for weight in WEIGHTS],
        lambda case: named(element=case[0].element, tokens=case[1], x=case[2]),
    )
    for one in sliced:
        weight, tokens, x = one.values
        yield gemm.fitted(tokens, 1, 1, weight, k_slices=2), weight, x, one.marks
    half = by_day(
        [
            (tile, weight)
            for weight in (WEIGHTS[1], *FACTORS, WEIGHTS[-1])
            for tile in (CUT[0], *GEMM_TILES[1::-1])
        ],
        lambda case: named(factors=case[1] in FACTORS),
    )
    yield from ((variant_of(*one.values), one.values[1], "float16", one.marks) for one in half)
    scaled = by_day(
        list(product(SCALED_TILES, SCALED_WEIGHTS)),
        lambda case: named(k_slices=case[0][4], cut=case[0][3] > 0, splits=case[0][2] > 1, weight=case[1]),
    )
    for one in scaled:
        (tokens, pair, splits, small, k_slices), weight = one.values
        yield gemm.fitted(tokens, pair, splits, weight, small, k_slices, True), weight, "bfloat16", one.marks
    grouped = by_day(
        [
            (one, weight)
            for at, weight in enumerate([*INTEGERS[::3], Weight("e4m3"), Weight("e2m1", False, 4)])
            for one in list(experts.candidates(weight))[at % 3 :: 3]
        ],
        lambda case: named(element=case[1].element, cut=case[0].small > 0, k_slices=case[0].k_slices),
    )
    yield from ((*one.values, "bfloat16", one.marks) for one in grouped)


def waits(code):
    """How many there are for products: that leave four, two batches of two, and that leave none."""
    found = [line.text for line in code.lines if "WARPGROUP.DEPBAR" in line.text]
    return sum(text.endswith("0x2") for text in found), sum(text.endswith("0x0") for text in found)


def assert_overlapped(code, one):
    """Two stages of four products, a wait for each two that leaves four, one for all at the end: no others make them serial.
    In slices of K a stage of four and a wait for all of them, one at the end."""
    sizes = 2 if one.small else 1
    assert sum("HGMMA" in line.text for line in code.lines) == (4 if one.k_slices > 1 else 8 * sizes)
    assert waits(code) == ((0, 2) if one.k_slices > 1 else (4 * sizes, sizes))
    assert uses_in_flight(code) == []


@pytest.mark.parametrize(
    ("one", "weight", "x"), [pytest.param(*case, marks=marks) for *case, marks in gemm_cases()]
)
def test_products_overlap_decoding(one, weight, x):
    """No spills, no serialized products, and operands in registers are left alone until their products are waited for."""
    cubin, log = compiled(gemm.KERNEL, one, gemm.Problem(weight, x))
    assert complaints(log, one.threads) == []
    assert_overlapped(disassembled(cubin), one)


def assemblers():
    """Others than NVRTC's that are installed: Triton's, and that of a toolkit."""
    triton = Path(pytest.importorskip("triton").__file__).parent / "backends/nvidia/bin/ptxas"
    return [str(one) for one in (triton, shutil.which("ptxas")) if one and Path(one).exists()]


@pytest.mark.parametrize(
    ("tile", "weight"), by_day([*TESTED[:4], *TESTED[-6:]], lambda case: named(cut=case[0] in CUT))
)
def test_older_assemblers(tile, weight, tmp_path):
    """They serialize products whose operands they see written between those of a group."""
    require_nvrtc()
    one = variant_of(tile, weight)
    ptx = gemm.KERNEL.compiled(one, gemm.Problem(weight, "bfloat16"), ptx=True)[0].decode().rstrip("\0")
    text, cubin = tmp_path / "a.ptx", tmp_path / "a.cubin"
    text.write_text(re.sub(r"\.version .*", ".version 8.7", ptx))
    for assembler in assemblers():
        command = [assembler, "-arch=sm_90a", "-v", str(text), "-o", str(cubin)]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        assert complaints(log, one.threads) == []
        assert_overlapped(disassembled(cubin.read_bytes()), one)


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("cluster", gemm.C.clusters)
@pytest.mark.parametrize("tokens", [*gemm.C.small_m_tiles[:2], *gemm.C.tiles])
def test_shared_memory_suffices(tokens, cluster, weight):
    """For at least four stages, and with splits for the sums that take the ring's place."""
    one = gemm.fitted(tokens, *cluster, weight)
    assert one.shared(weight) <= cuda.MOST_SHARED
    assert one.stages >= 4
    if one.splits > 1:
        assert gemm.GROUPS * tokens * sparse24.PITCH * 4 <= one.ring(weight)
    if tokens in gemm.C.small_m_tiles and one.cluster == 1:
        sliced = gemm.fitted(tokens, 1, 1, weight, k_slices=2)
        assert sliced.shared(weight) <= cuda.MOST_SHARED
        assert sliced.stages in range(4, 13, 2)


@pytest.mark.parametrize("element", gemm.ELEMENTS)
def test_shared_memory_suffices_for_scales_of_rows(element):
    """For as many stages, or one less."""
    weight = Weight(element, False, 2 if element in ("e2m1", "e4m3_mx") else 1)
    for tokens in (33, 64, 128, 300, 1024):
        for one in gemm.candidates(tokens, 4096, weight):
            scaled = gemm.with_scales(one, weight)
            assert scaled.shared(weight) <= cuda.MOST_SHARED
            assert one.stages - one.k_slices <= scaled.stages <= one.stages
            assert scaled.name == one._replace(stages=scaled.stages).name + "x"


def test_every_element_is_compiled():
    assert {one.element for one in WEIGHTS} == set(gemm.ELEMENTS)


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


# What programs do before the kernel in front of them has ended


def ptx_of(variant):
    require_nvrtc()
    made, _ = sparse24_gemv.KERNEL.compiled(variant, sparse24_gemv.Form(128, False, False), ptx=True)
    return made.decode()


@pytest.mark.parametrize("splits", [1, 2])
def test_nothing_is_read_before_the_kernel_in_front_has_ended(splits):
    """Only asked for, into the cache, and that where a variant is early."""
    for early in (True, False):
        ptx = ptx_of(sparse24_gemv.Variant(8, 256, 4, splits, 2, 1, early))
        before, after = ptx.split("griddepcontrol.wait")
        assert ("cp.async.bulk.prefetch.L2" in before) == early
        assert not re.search(r"ld\.global|cp\.async\.c[ag]", before)
        assert re.search(r"ld\.global", after)
        assert re.search(r"cp\.async\.cg", after)


def test_programs_send_their_sums_when_all_of_a_cluster_run():
    """Each has arrived by then: a program that has not begun has no shared memory."""
    before, after = ptx_of(sparse24_gemv.Variant(8, 256, 4, 2, 2)).split("st.shared::cluster", 1)
    assert before.count("barrier.cluster.arrive") == before.count("barrier.cluster.wait") == 1
    assert "barrier.cluster.arrive" in before.split("griddepcontrol.wait")[0]
    # Nobody reads what the others send before all have sent it.
    assert after.count("barrier.cluster.arrive") == after.count("barrier.cluster.wait") == 1


# NVRTC


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
    cubin = lambda number, *more: nvrtc.cached_cubin(text % number, {}, (*options, *more), "f")  # noqa: E731
    first = cubin(1)
    (path,) = nvrtc.folder().iterdir()
    monkeypatch.setattr(nvrtc, "compile_source", lambda *given: pytest.fail("compiled again"))
    assert cubin(1) == first
    monkeypatch.undo()
    monkeypatch.setenv("AO_LAB_CACHE", str(tmp_path))
    path.write_bytes(b"broken")
    assert cubin(1) == first
    assert cubin(2) != first
    cubin(1, "--std=c++17")
    assert len(list(nvrtc.folder().iterdir())) == 3


def test_a_machine_without_nvrtc_is_told_what_to_install(monkeypatch):
    nvrtc.library.cache_clear()
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(["no such library"]))
    with pytest.raises(RuntimeError, match="pip install nvidia-cuda-nvrtc"):
        nvrtc.library()
    nvrtc.library.cache_clear()
