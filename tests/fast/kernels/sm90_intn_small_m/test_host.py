"""What `sm90_intn_small_m` takes, that its tiles fit, and that every variant that the rule gives compiles without spilling
much."""

from itertools import product

import pytest
import torch

import fast
from ao_lab.config.recipe import named
from fast.kernels.linear import select
from fast.kernels.sm90_intn_small_m import host
from fast.kernels.sm90_intn_small_m.select import TILES, choose, placed
from fast.kernels.sm90_intn_small_m.variants import (
    SHARED,
    SYSTEM,
    WIDTHS,
    Form,
    Variant,
    fitted,
    longest,
    sources,
)
from fast.launch import nvrtc
from fast.matmul.weights import rows_fused
from tests.fast.kernels.sm90_sparse24_gemm.examples import require_nvrtc

SHAPES = ((14336, 4096), (4096, 14336), (4096, 4096), (1024, 4096), (37, 128), (256, 384))
COUNTS = (1, 2, 3, 8, 9, 16, 32, 33, 64, 65, 128)


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
    found = host.form_of(record, (8, length), 1, True)
    assert found == (None if form is None else Form(*form, True, False))
    assert host.form_of(record, (8, length), 1, False) is None
    assert host.form_of(record, (8, length), 0, True) is None
    assert host.form_of(record, (2, 8, length), 1, True) is None


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", WIDTHS)
def test_tiles_fit_a_multiprocessor(bits, shape):
    for count, group, zero in product(COUNTS, (32, 64, 128), (False, True)):
        form = Form(bits, group, zero, True, False)
        one = choose(form, count, *shape)
        assert one is not None
        assert one.takes(form, shape[1])
        assert one.programs(count, shape[0]) * one.tokens * one.rows >= count * shape[0] * one.splits
        assert one.rows % one.splits == 0
        assert one.at_once * (one.shared(form, shape[1]) + SYSTEM) <= SHARED
        assert one.threads * one.at_once <= 2048


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", WIDTHS)
def test_every_tile_has_a_place(bits, shape):
    """In any shape, also those tiles that are not chosen there."""
    for _, tiles in TILES:
        for tile, group in product(tiles, (32, 64, 128)):
            form = Form(bits, group, False, True, False)
            one = placed(tile, form, 128, *shape)
            assert one is not None
            assert one.takes(form, shape[1])


def test_long_rows_of_zero_points_have_no_room():
    form = Form(6, 32, True, True, False)
    assert choose(form, 128, 4096, 1 << 20) is None
    assert fitted(form, Variant(8, 2, 1, 4, 1, 4, 9, 3), 4096).stages < 9
    assert longest(Form(3, 384, False, True, False), 3072, 4) == 1


def test_other_devices_keep_their_kernels():
    w = fast.quantize(torch.randn(64, 256), "int3_g32", packed=True)
    assert host.launch_for(w, 4, torch.bfloat16) is None
    assert isinstance(select.launch_for(w, 4, torch.bfloat16), select.CompiledLaunch)


def test_launches_go_first_where_they_are(monkeypatch):
    """2, 3, 5 and 6 bits to 32 rows of inputs; int4 keeps its kernels; other dtypes have the others."""
    monkeypatch.setattr(host, "is_served", lambda codes: True)
    monkeypatch.setattr(host, "is_loadable", lambda *given: True)
    for bits in (2, 3, 4, 5, 6):
        w = fast.quantize(torch.randn(64, 256), named(f"int{bits}_g32"), packed=True)
        for count, dtype in product((1, 2, 32), (torch.bfloat16, torch.float16)):
            assert isinstance(select.launch_for(w, count, dtype), select.BitsLaunch) == (bits != 4)
        assert not isinstance(select.launch_for(w, 1, torch.float32), select.BitsLaunch)
        assert select.launch_for(w, 33, torch.bfloat16) is None
    assert host.launch_for(w, 4, torch.bfloat16, Variant(8, 1, 1, 3, 1, 1, 2)) is None


@pytest.mark.parametrize("scheme", ["int3_g32", "int6_rowwise"])
@pytest.mark.parametrize(("n", "most"), [(64, 32), (8176, 32), (8192, 96)])
def test_rows_that_are_fused(monkeypatch, scheme, n, most):
    """As many where scales change along K, too, and nothing is compiled to know that; more are for the dense weight, also where
    other devices have a kernel."""
    w = fast.quantize(torch.randn(n, 256), named(scheme), packed=True)
    assert rows_fused(w, torch.bfloat16) == (select.MOST_BLOCK_ROWS if "_g" in scheme else select.MOST_ROWS)
    monkeypatch.setattr(host, "is_served", lambda codes: True)
    monkeypatch.setattr(host, "is_loadable", lambda *given: pytest.fail("compiled"))
    assert [rows_fused(w, dtype) for dtype in (torch.bfloat16, torch.float16)] == [most, most]
    assert select.launch_for(w, most + 1, torch.bfloat16) is None
    monkeypatch.setattr(host, "is_loadable", lambda *given: True)
    assert isinstance(select.launch_for(w, most, torch.bfloat16), select.BitsLaunch)


@pytest.mark.parametrize("half", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("count", [1, 8, 16, 32, pytest.param(64, marks=pytest.mark.nightly), 128])
def test_variants_compile(count, half):
    require_nvrtc()
    form = Form(3, 32, True, True, half)
    cubin, log = nvrtc.compile_source(
        *sources(choose(form, count, 4096, 4096), form), name="sm90_intn_small_m"
    )
    assert cubin.startswith(b"\x7fELF")
    assert "error" not in log
