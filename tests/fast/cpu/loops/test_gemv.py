"""Compiled loops over codes: the tables' numbers, the same bits on any number of threads, and what goes by tiles instead."""

import math
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import reference
from fast import user_cache
from fast.cpu import dequantize as tiled
from fast.cpu import linear as cpu
from fast.cpu import threads
from fast.cpu.elements import TABLE, Decoding, Element, single_table
from fast.cpu.loops import gemv
from fast.cpu.loops.gemv import Row, compiled
from fast.cpu.loops.row_sums import E4M3, E8M0, NUMBERS
from fast.cpu.threads import KEPT, scratch
from reference import SCHEMES
from reference.formats.formats import FORMATS

ROOT = Path(__file__).resolve().parents[4]
ELEMENTS = tuple(dict.fromkeys(Element.of(scheme) for scheme in SCHEMES.values()))
SOME = ("int3_g32", "int4_g128_asymmetric", "int8_rowwise", "mxfp6_e2m3", "nvfp4", "nf4")


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pair(scheme, shape, seed=0):
    return reference.quantize(normal(*shape, seed=seed), scheme, packed=True), normal(
        1, shape[1], seed=seed + 1
    )


def holds(got, x, w):
    exact = x.double() @ reference.dequantize(w).double().t()
    return bool(((got.double() - exact).abs() <= reference.linear_error_bound(x, w)).all())


# Codes in bytes of their own are read alike whatever their width: by day one element of every decoding.
IN_BYTES = {Decoding.of(element).kind: element for element in ELEMENTS}.values()


@pytest.mark.parametrize(
    ("element", "packed"),
    [
        *((element, True) for element in ELEMENTS),
        *(
            pytest.param(element, False, marks=[pytest.mark.nightly] * (element not in IN_BYTES))
            for element in ELEMENTS
        ),
    ],
    ids=str,
)
def test_every_code_is_the_number_of_the_table(element, packed):
    decoding = Decoding.of(element)
    assert (decoding.kind == TABLE) == element.name.startswith(("nf4", "stretched"))
    codes = torch.arange(1 << element.bits, dtype=torch.uint8)[:, None].repeat(1, 8)
    stored = reference.pack(codes, element.name) if packed else codes
    table, y = single_table(element), torch.full((len(codes),), math.nan)
    x, one, nothing = torch.full((8,), 0.125), torch.ones(1, 1), torch.empty(1, 0)
    operands = [part.numpy() for part in (stored, table, one, table, nothing)]
    kernel = compiled(Row.of(decoding, packed, NUMBERS, 0, False))
    kernel(*operands, False, False, 8, x.numpy(), 0, len(codes), y.numpy())
    assert torch.equal(y.nan_to_num(9e9), table[: len(codes)].nan_to_num(9e9))


@pytest.mark.parametrize(("kind", "storage"), [(E4M3, "float8_e4m3fn"), (E8M0, "float8_e8m0fnu")])
def test_every_code_of_a_scale_is_the_number_of_the_table(kind, storage):
    """Rows of 17 blocks, the last by the table; two blocks of a step, and steps of a block."""
    values = torch.from_numpy(FORMATS[storage].values[:256].copy())
    finite = int(values[:128].isnan().float().argmax()) if kind == E4M3 else 255
    scale = torch.arange(finite, dtype=torch.uint8)[:, None].repeat(1, 17).contiguous()
    decoding, table = Decoding.of(Element.of(SCHEMES["int8_rowwise"])), torch.zeros(256)
    for size in (8, 32):
        codes = torch.zeros(finite, 17 * size, dtype=torch.uint8)
        y, x = torch.empty(2, finite), torch.ones(17 * size)
        for place, at in enumerate((0, 16 * size)):
            codes.zero_()[:, at] = 1
            operands = [part.numpy() for part in (codes, table, scale, values * 1.5, torch.empty(1, 0))]
            kernel = compiled(Row.of(decoding, False, kind, size, False))
            kernel(*operands, False, False, size, x.numpy(), 0, finite, y[place].numpy())
        assert torch.equal(y[0], values[:finite] * (1.5 if kind == E4M3 else 1))
        assert torch.equal(y[1], values[:finite] * 1.5)


@pytest.mark.parametrize("scheme", ["fp8_rowwise", "mxfp4", "int4_g32", "int8_rowwise", "mxfp6_e3m2"])
@pytest.mark.parametrize("size", [2.0**-120, 2.0**-100, 1.0, 2.0**100, 2.0**115])
def test_inputs_of_any_size_stay_inside_the_bound(scheme, size):
    w, x = pair(scheme, (8, 64), seed=1)
    assert holds(cpu.linear_of_one_row(x * size, w), x * size, w)


def test_sums_that_would_overflow_before_their_scale():
    """Codes times inputs leave float32, scaled numbers times inputs do not: the result is finite and right."""
    w = reference.quantize(normal(4, 64) * 2.0**-20, "int8_rowwise")
    x = torch.full((1, 64), 2.0**125)
    got = cpu.linear_of_one_row(x, w).double()
    exact = x.double() @ reference.dequantize(w).double().t()
    size = x.double() @ reference.dequantize(w).double().abs().t()
    assert got.isfinite().all()
    # 64 products and 63 sums, a rounding of 2**-24 each.
    assert ((got - exact).abs() <= 127 * 2.0**-24 * size).all()


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize(("length", "at"), [(64, 5), (72, 0), (72, 71)])
def test_a_code_for_nan_makes_nan(code, length, at):
    """Of its row alone, also where a row ends within a step."""
    w, x = pair("fp8_rowwise", (4, length))
    w.codes[2, at] = code
    assert cpu.linear_of_one_row(x, w).isnan().tolist() == [[False, False, True, False]]


@pytest.mark.parametrize("scheme", SOME)
def test_any_number_of_threads_gives_the_same_bits(scheme, monkeypatch):
    w, x = pair(scheme, (37, 256))
    alone = cpu.linear_of_one_row(x, w)
    monkeypatch.setattr(threads, "WORTH", 1)
    used = set()
    for count in (2, 3, 64):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        assert torch.equal(cpu.linear_of_one_row(x, w), alone)
        threads.in_parts(lambda first, last: used.add((first, last)), 37, 37)
    assert (0, 37) not in used
    assert len({first for first, _ in used}) == 37


def test_an_error_in_a_thread_is_raised(monkeypatch):
    monkeypatch.setattr(threads, "WORTH", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    ended = threading.Event()

    def work(first, last):
        if first:
            ended.set()
            raise ArithmeticError("second half")

    with pytest.raises(ArithmeticError, match="second half"):
        threads.in_parts(work, 4, 4)
    assert ended.is_set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_negative_views_keep_their_sign(dtype):
    w, x = pair("int4_g128_asymmetric", (5, 128))
    x = x.to(dtype)
    assert torch.equal(cpu.linear_of_one_row(torch._neg_view(x), w), cpu.linear_of_one_row(-x, w))
    turned = replace(w, scale=torch._neg_view(w.scale))
    assert torch.equal(cpu.linear_of_one_row(x, turned), cpu.linear_of_one_row(-x, w))


@pytest.mark.parametrize("scheme", SOME)
def test_without_numba_tiles_are_multiplied(scheme, monkeypatch):
    w, x = pair(scheme, (7, 256), seed=4)
    monkeypatch.setattr(cpu, "numba_missing", lambda: "No module named 'numba'")
    monkeypatch.setattr(cpu, "_by_loop", None)
    for rows in (1, 2, 5):
        monkeypatch.setattr(tiled, "TILE", rows * 256)
        assert holds(cpu.linear_of_one_row(x, w), x, w)


@pytest.mark.parametrize(("length", "block"), [(66, -1), (64, 4)])
def test_what_the_loop_does_not_read_goes_by_tiles(length, block):
    """Rows that end within a group of three bytes; blocks of half such a group."""
    scheme = replace(
        SCHEMES["int3_g32"], name="int3_of_a_test", scale=replace(SCHEMES["int3_g32"].scale, block=block)
    )
    w, x = pair(scheme, (5, length))
    assert cpu._by_loop(x, w) is None
    assert holds(cpu.linear_of_one_row(x, w), x, w)


def test_scratch_is_of_one_thread():
    first = scratch("test", (4,), torch.float32)
    assert scratch("test", (2, 2), torch.float32).data_ptr() == first.data_ptr()
    assert scratch("test", (KEPT + 1,), torch.uint8).data_ptr() != first.data_ptr()
    others = in_a_thread(lambda: scratch("test", (4,), torch.float32).data_ptr())
    assert others != first.data_ptr()


def test_memory_made_in_inference_mode_is_written_outside_it(monkeypatch):
    monkeypatch.setattr(cpu, "numba_missing", lambda: "No module named 'numba'")
    w, x = pair("int4_g32", (4, 64))

    def both():
        with torch.inference_mode():
            first = cpu.linear_of_one_row(x, w).clone()
        return torch.equal(first, cpu.linear_of_one_row(x, w))

    assert in_a_thread(both)


def in_a_thread(call):
    """What a call gives in a new thread, which keeps nothing yet."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def test_parts_of_different_weights_are_refused():
    """Compiled loops look at no lengths: what they would read beyond is refused before."""
    w, x = pair("int8_g32_asymmetric", (4, 64))
    for part in ("codes", "scale", "zero"):
        for cut in (getattr(w, part)[:2], getattr(w, part)[:1]):
            with pytest.raises(ValueError, match=r"shape|rows"):
                cpu.linear_of_one_row(x, replace(w, **{part: cut}))


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "int8_rowwise"])
def test_blocks_along_the_other_axis_are_refused(name):
    w = reference.quantize(normal(64, 64), name, axis=0)
    with pytest.raises(ValueError, match="axis 0"):
        cpu.linear_of_one_row(normal(1, 64), w)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool])
def test_inputs_of_other_dtypes_are_refused(dtype):
    w, _ = pair("int8_rowwise", (4, 64))
    with pytest.raises(ValueError, match="in float32, bfloat16 or float16"):
        cpu.linear_of_one_row(torch.ones(1, 64, dtype=dtype), w)


def test_a_bias_of_another_shape_is_refused():
    w, x = pair("int8_rowwise", (4, 64))
    with pytest.raises(ValueError, match="one number for each output"):
        cpu.linear_of_one_row(x, w, torch.ones(4, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("by_loop", [True, False])
def test_the_default_dtype_does_not_matter(dtype, by_loop, monkeypatch):
    w, x = pair("int4_g128_asymmetric", (4, 128))
    if not by_loop:
        monkeypatch.setattr(cpu, "numba_missing", lambda: "No module named 'numba'")
    want = cpu.linear_of_one_row(x, w)
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(cpu.linear_of_one_row(x, w), want)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("scheme", ["int4_g32_asymmetric", "int8_g32_asymmetric", "int8_rowwise_asymmetric"])
def test_zero_points_beside_large_inputs(scheme):
    """Sums of inputs overflow, products with the weight do not; infinite inputs keep the signs that a dense layer gives."""
    nothing = reference.quantize(torch.zeros(4, 64), scheme, packed=True)
    assert cpu.linear_of_one_row(torch.full((1, 64), 2.0**127), nothing).eq(0).all()
    w, x = pair(scheme, (6, 64))
    x[0, 5] = math.inf
    assert torch.equal(cpu.linear_of_one_row(x, w), x @ reference.dequantize(w).t())


@pytest.mark.parametrize(
    ("scheme", "scale"), [("stretched2_rowwise", 3e38), ("int8_g32_asymmetric", 2.0**126)]
)
def test_values_that_saturate_are_those_of_dequantize(scheme, scale):
    w, x = pair(scheme, (3, 256))
    w.scale.fill_(scale)
    if w.zero is not None:
        w.zero.fill_(-100)
        w.codes.fill_(256 - 100)
    assert torch.equal(cpu.linear_of_one_row(x * 0, w), torch.zeros(1, 3))
    x = x * 2.0**-20
    assert torch.equal(cpu.linear_of_one_row(x, w), x @ reference.dequantize(w).t())


def test_scales_that_require_gradients_by_tiles(monkeypatch):
    w, x = pair("int8_g32_asymmetric", (3, 64))
    monkeypatch.setattr(cpu, "numba_missing", lambda: "No module named 'numba'")
    learned = replace(w, scale=w.scale.clone().requires_grad_())
    assert torch.equal(cpu.linear_of_one_row(x, learned), cpu.linear_of_one_row(x, w))


def test_ranges_without_a_thread_run_here(monkeypatch):
    """As at the end of the interpreter, and where the system has no more threads."""

    class Closed:
        def submit(self, *_):
            raise RuntimeError("cannot schedule new futures after shutdown")

    monkeypatch.setattr(threads, "WORTH", 1)
    monkeypatch.setattr(threads, "_openmp", lambda: None)
    monkeypatch.setattr(threads, "_pool", lambda count: Closed())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    seen = []
    threads.in_parts(lambda first, last: seen.append((first, last)), 7, 7)
    assert seen == [(at, at + 1) for at in range(7)]


def test_files_of_kernels_have_names_of_their_own():
    """Numba locks no index: two kernels in one could be read as each other."""
    kernels = [compiled(Row(Decoding.of(Element.of(SCHEMES[name])), True, NUMBERS)) for name in SOME[:4]]
    assert len({kernel.py_func.__qualname__ for kernel in kernels}) == 4
    assert all(len(kernel.signatures) == 1 for kernel in kernels)


@pytest.mark.parametrize("error", [OSError("disk full"), EOFError(), RuntimeError("no locator")])
def test_without_files_kernels_are_compiled_all_the_same(error, monkeypatch):
    calls = []

    def njit(signature, cache=False, **options):
        calls.append(cache)
        if cache:
            raise error
        return lambda kernel: kernel

    monkeypatch.setattr(gemv, "njit", njit)
    gemv.compiled.__wrapped__(Row(Decoding(8, TABLE), True, NUMBERS))
    assert calls == [True, False]


@pytest.mark.skipif(sys.platform == "win32", reason="owners and modes are POSIX's")
@pytest.mark.parametrize("where", ["folder", "file"])
def test_files_that_others_can_write_are_not_unpickled(where, monkeypatch, tmp_path):
    """NUMBA_CACHE_DIR=/tmp/numba, say, where another user was first."""
    monkeypatch.setattr(gemv.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(user_cache, "_warned", set())
    calls = []
    monkeypatch.setattr(gemv, "njit", lambda *_, cache, **options: calls.append(cache) or (lambda f: f))
    kernel = gemv.compiled.__wrapped__(Row(Decoding(8, TABLE), True, NUMBERS))
    (folder,) = tmp_path.iterdir()
    planted = folder / f"gemv.{kernel.__qualname__}-1.py311.nbi"
    planted.touch()
    (folder if where == "folder" else planted).chmod(0o777)
    with pytest.warns(UserWarning, match="can be written by other users.*each process compiles its own"):
        gemv.compiled.__wrapped__(Row(Decoding(8, TABLE), True, NUMBERS))
    gemv.compiled.__wrapped__(Row(Decoding(8, TABLE), True, NUMBERS))  # nothing is said again
    assert calls == [True, False, False]


def test_a_broken_numba_is_a_missing_one(monkeypatch):
    monkeypatch.delattr("fast.cpu.loops.gemv")
    monkeypatch.setitem(sys.modules, "fast.cpu.loops.gemv", None)
    assert "gemv" in cpu.numba_missing.__wrapped__()


def test_numba_without_its_compiler_is_a_missing_one(monkeypatch):
    monkeypatch.setattr(gemv.config, "DISABLE_JIT", 1)
    assert "NUMBA_DISABLE_JIT" in cpu.numba_missing.__wrapped__()


@pytest.mark.nightly
def test_processors_without_wide_vectors_have_the_numbers_too():
    """Neither AVX-512 nor conversions of float16: what LLVM makes of the general steps."""
    environment = os.environ | {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    named = "number_of_the_table or inside_the_bound or a_code_for_nan"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", named, __file__]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:]


def test_a_fork_while_another_thread_compiles():
    """The child computes; it would wait for ever for a compiler's lock whose owner it does not have."""
    done = subprocess.run(
        [sys.executable, "-c", FORKED], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.stdout.split() == ["right", "0"], done.stderr


FORKED = """
import os, threading, time, warnings
import torch, reference
from fast.cpu.loops import gemv
from fast.cpu.linear import linear_of_one_row
warnings.simplefilter("ignore")
def compiled(bits):
    row = gemv.Row(gemv.Decoding(bits, 2), True, 0)
    return gemv.njit(gemv._signature(row))(gemv._kernel(row))
x = torch.ones(1, 64)
w = reference.quantize(torch.ones(4, 64), "int8_rowwise")
want = linear_of_one_row(x, w)
compiling = threading.Thread(target=lambda: [compiled(bits) for bits in (3, 5, 6)])
compiling.start()
time.sleep(0.3)
child = os.fork()
if child == 0:
    compiled(7)
    print("right" if torch.equal(linear_of_one_row(x, w), want) else "wrong", flush=True)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
compiling.join()
"""
