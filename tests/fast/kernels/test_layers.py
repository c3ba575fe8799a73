"""The kernels of `fast.layers`, `rotary` and `column_sums`: their code for Hopper, and the bits of the last, those of
the others being compared by `test_swiglu`."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fast
from fast.kernels.layers import column_sums as sums_host
from fast.kernels.layers.attention import rotary_kernel
from fast.kernels.layers.column_sums import PROCESSORS, WARP, WARPS, column_sums_kernel, plan_of
from fast.kernels.layers.rms_norm import (
    EVICT,
    PIECE,
    _whole_rows,
    add_pieces_kernel,
    norm_gradient_kernel,
    norm_kernel,
)
from fast.kernels.layers.swiglu import ELEMENTS, place_of, swiglu_gradient_kernel, swiglu_kernel
from fast.kernels.layers.tiles import _block_length
from fast.kernels.quantize import host as quantizer
from fast.kernels.quantize import plan as plans
from fast.kernels.quantize.joined_rows import join_rows_kernel, split_rows_kernel
from fast.kernels.rowwise_colwise.turned import ACROSS, DOWN, turned_bytes_kernel
from fast.kernels.rowwise_colwise.turned import WARPS as TURNING
from fast.layers import column_sums as layer_sums
from fast.layers.column_sums import column_sums, covers
from reference import SCHEMES
from tests.emulator.interpreter_process import lines_of
from tests.fast.kernels.compiling.kernel_compiler import compiled, output_arguments

# The kernels of `fast.swiglu` without a GPU: all 65,536 gates in Triton's interpreter, and the code made for Hopper.

# Issue slots for a byte at the rate of a copy on an H200: 132 multiprocessors, 4 slots a clock of 32 lanes, 4.28 TB/s.
SLOTS_PER_BYTE = 7


def swiglu_code(name, dtype):
    """Machine code for rows of 4096."""
    shape = (16384, 4096)
    block = None if name is None else _block_length(SCHEMES[name], shape)
    place = place_of(16384, max(ELEMENTS, block or 1), block, 4096)
    arguments = {"gate": dtype, "up": dtype, "gate_stride": 4096, "up_stride": 4096, **place.arguments,
                 **output_arguments(name, dtype)}  # fmt: skip
    return compiled(swiglu_kernel, arguments, place.warps), place


def test_swiglu_bits_in_the_interpreter():
    """All gates of both dtypes with two kinds of up, with bad reciprocals; shapes, schemes, halves of a matrix; gradients."""
    (count,) = lines_of("producers", "swiglu")
    assert int(count) >= 37 + 49


@pytest.mark.parametrize(
    ("name", "dtype", "moved"), [(None, "bfloat16", 6), ("fp8_rowwise", "bfloat16", 5), (None, "float16", 6)]
)
def test_swiglu_code_for_hopper(name, dtype, moved):
    """Wide loads and stores, nothing in local memory, and no more instructions than memory leaves time for."""
    machine, place = swiglu_code(name, dtype)
    assert machine.local == 0
    assert machine.widths("LDG") == {"128"}
    assert machine.widths("STG") <= {"128", "32"}
    # A twentieth more is allowed: the clock is above its nominal rate.
    assert machine.slots() <= 1.05 * SLOTS_PER_BYTE * moved * place.elements_per_thread


# The kernels of `fast.layers.normalize` without a GPU: their bits in Triton's interpreter, and the code made for Hopper.


def normalize_norm_code(name, length, residual):
    """Machine code for bfloat16 rows of a length."""
    shape = (16384, length)
    place = _whole_rows(*shape, length if name is None else _block_length(SCHEMES[name], shape))
    dtype = "bfloat16"
    other = dtype if residual else None
    arguments = {"x": dtype, "residual": other, "weight": dtype, "new_residual": other, "sums": None, "eps": 1e-6,
                 **place.arguments, **output_arguments(name, dtype), "SUMS": 0,
                 "EVICT": "" if name is None else EVICT}  # fmt: skip
    return compiled(norm_kernel, arguments, place.warps), place


def test_norm_bits_in_the_interpreter():
    """Many tensors: dtypes, shapes, schemes, residuals, packed codes, non-finite rows."""
    (count,) = lines_of("producers", "normalize")
    assert int(count) > 100


@pytest.mark.parametrize(("name", "length", "residual"), [(None, 4096, False), ("fp8_rowwise", 14336, True)])
def test_norm_code_for_hopper(name, length, residual):
    """Wide loads and stores, nothing in local memory, two programs of the longest rows on a multiprocessor."""
    machine, place = normalize_norm_code(name, length, residual)
    assert machine.local == 0
    assert machine.widths("LDG") == {"128"}
    assert machine.widths("STG") <= {"128", "32"}
    assert machine.registers * place.warps * 32 * 2 <= 65536


def test_sums_are_not_contracted():
    """Every square is rounded before it is added."""
    machine, place = normalize_norm_code(None, 4096, False)
    squares = place.size // (32 * place.warps)
    assert machine.instructions["FMUL"] >= 3 * squares
    assert machine.ptx.count("fma.rn") == 0


BF16 = "bfloat16"


def norm_code(length, warps):
    """Machine code of the gradient for bfloat16 rows."""
    arguments = dict.fromkeys(("g", "x", "weight", "dx"), BF16)
    numbers = {"more": None, "sums": "float32", "eps": 1e-6, "rows": 16384, "length": length, "DTYPE": BF16}
    constants = {
        "MASKED": False,
        "WIDE": False,
        "SIZE": length,
        "PIECE": PIECE,
        "EARLY": True,
        "HAS_PTX": True,
    }
    return compiled(norm_gradient_kernel, {**arguments, **numbers, **constants}, warps)


@pytest.mark.parametrize(("length", "warps"), [(4096, 8), pytest.param(8192, 16, marks=pytest.mark.nightly)])
def test_rows_stay_in_registers(length, warps):
    """Wide loads and stores, nothing in local memory, no product added unrounded; two programs of 4096 on a multiprocessor."""
    machine = norm_code(length, warps)
    assert machine.local == 0
    assert machine.ptx.count("fma.rn") == 0
    assert machine.widths("LDG") == machine.widths("STG") == {"128"}
    assert machine.registers * 32 * warps <= 65536 * length // 8192


def test_sums_of_pieces():
    arguments = {"sums": "float32", "out": BF16, "parts": 1024, "length": 4096, "column_tiles": 256}
    constants = {"DTYPE": BF16, "WIDE": False, "PARTS": 512, "COLUMNS": 16, "HAS_PTX": False}
    assert compiled(add_pieces_kernel, arguments | constants, 4).local == 0


@pytest.mark.parametrize(
    ("part", "compared"),
    [("day", 5 * 2 + 3 + 2), pytest.param("", 5 * (2 + 3 + 2), marks=pytest.mark.nightly)],
)
def test_column_sums_in_the_interpreter(part, compared):
    """Integers, random numbers beside the model of the order, NaN and infinities; shapes, dtypes, plans."""
    assert len(lines_of("training", "column_sums", *part.split())) == 3 + compared + 1


def test_rows_are_joined_in_the_interpreter():
    assert len(lines_of("training", "joined")) == 2 * 3


@pytest.mark.parametrize("name", ["fp8_rowwise", pytest.param("int8_rowwise", marks=pytest.mark.nightly)])
def test_rows_are_joined_in_words(name):
    """Where a row of codes and its scale is no multiple of 16 bytes, words of four; nothing in local memory."""
    x = torch.empty((), dtype=torch.bfloat16).expand(106496, 128)
    of = quantizer.problem_of(x, SCHEMES[name], -1)
    for kernel, plan, ends in (
        (join_rows_kernel, plans.quantizing(of), ("x", "joined")),
        (split_rows_kernel, plans.dequantizing(of), ("joined", "y")),
    ):
        (step,) = plan.passes
        place, numbers = step.place, {"count": 106496, "LENGTH": 128, "PITCH": 132}
        numbers |= {"MASKED": place.masked, "WIDE": place.wide, "SIZE": place.size, "P": place.p}
        numbers |= {"SCHEME": step.rule, "OP": step.block_op}
        numbers |= {"stride": place.integers[-1]} if kernel is join_rows_kernel else {}
        pointers = {end: "uint8" if end == "joined" else BF16 for end in ends}
        machine = compiled(kernel, pointers | numbers, place.warps)
        assert machine.local == 0
        joined_is_read = ends[0] == "joined"
        assert machine.widths("STG" if joined_is_read else "LDG") == {"128"}
        assert machine.widths("LDG" if joined_is_read else "STG") == {"32"}


def test_bytes_are_turned_in_the_interpreter():
    assert len(lines_of("training", "turned")) == 6


def test_bytes_are_turned_in_wide_words():
    numbers = {"groups": 1024, "words": 3584, "WIDE": False, "DOWN": DOWN, "ACROSS": ACROSS}
    machine = compiled(turned_bytes_kernel, {"x": "uint8", "y": "uint8", **numbers}, TURNING)
    assert machine.local == 0
    assert machine.widths("LDG") == machine.widths("STG") == {"128"}


@pytest.mark.parametrize(("dtype", "columns"), [(BF16, 1024), ("float16", 256), ("float32", 512)])
def test_column_sums_read_wide_words(dtype, columns):
    """Nothing in local memory, WARPS warps fit a multiprocessor's registers, six loads before the first addition."""
    numbers = {"rows": 13008, "length": 4096, "chunk": 104, "tiles": 4, "WIDE": False, "COLUMNS": columns}
    machine = compiled(column_sums_kernel, {"g": dtype, "sums": "float32", **numbers}, columns // WARP)
    assert machine.local == 0
    assert machine.widths("LDG") == machine.widths("STG") == {"128"}
    assert machine.registers * 32 * WARPS <= 65536
    before, _, _ = machine.sass.partition("FADD")
    assert before.count("LDG.E.128") >= 6


@pytest.mark.parametrize("rows", [2048, 13008, 65536, 100_000])
@pytest.mark.parametrize("length", [256, 1024, 1040, 4096, 11008, 14336])
def test_chunks_cover_the_rows_and_fill_the_multiprocessors(rows, length):
    plan = plan_of(rows, length)
    assert (plan.parts - 1) * plan.chunk < rows <= plan.parts * plan.chunk
    assert (plan.tiles - 1) * plan.columns < length <= plan.tiles * plan.columns
    assert plan.parts <= 512
    warps = plan.parts * plan.tiles * plan.warps
    assert warps <= PROCESSORS * WARPS
    # Chunks of whole steps, or the limit of parts, may take a half.
    assert (
        warps
        >= min(PROCESSORS * WARPS, rows // 8 * plan.tiles * plan.warps, 512 * plan.tiles * plan.warps) / 2
    )


@pytest.mark.parametrize(
    ("shape", "large"),
    [((2048, 1024), True), ((2, 1024, 1024), True), ((2047, 1024), False), ((63, 1 << 16), False),
     ((1 << 14, 128), False), ((2048, 1032), False), ((0, 1024), False), ((4, 0), False)],
)  # fmt: skip
def test_small_matrices_and_odd_rows_are_left_to_torch(shape, large):
    assert covers(torch.empty(shape, device="meta")) is large


def test_column_sums_on_a_cpu_are_torchs(monkeypatch):
    monkeypatch.setattr(sums_host, "column_sums", lambda *_: pytest.fail("no GPU"))
    g = torch.randn(4, 600, 1024).bfloat16().requires_grad_()
    right = g.detach().float().view(-1, 1024).sum(0)
    for dtype in (None, torch.float32, torch.float64):
        made = column_sums(g, dtype)
        assert made.dtype == (dtype or g.dtype)
        assert torch.equal(made, right.to(made.dtype))
    (grad,) = torch.autograd.grad(column_sums(g).float().sum(), g)
    assert torch.equal(grad, torch.ones_like(g))
    assert torch.equal(column_sums(g[:0]), torch.zeros(1024, dtype=g.dtype))


def test_linear_layers_sum_the_gradients_of_their_biases_so(monkeypatch):
    monkeypatch.setattr(layer_sums, "summed", lambda g, dtype: torch.full(g.shape[-1:], 7, dtype=dtype))
    weight, bias = fast.quantize(torch.ones(16, 32), "int8_rowwise"), torch.zeros(16).requires_grad_()
    fast.linear(torch.ones(3, 32), weight, bias).sum().backward()
    assert torch.equal(bias.grad, torch.full((16,), 7.0))


@pytest.mark.parametrize("rows", [3, 3000])
def test_a_tracer_sees_an_operator(rows):
    """Of any size, since that may be another one in the next call."""
    with FakeTensorMode():
        g = torch.empty(rows, 1024, device="cuda", dtype=torch.bfloat16)
        program = make_fx(lambda g: column_sums(g, torch.float32))(g)
        made = column_sums(g, torch.float32)
    assert "ao_lab.column_sums" in program.code
    assert (made.shape, made.dtype, made.device.type) == ((1024,), torch.float32, "cuda")


@pytest.mark.parametrize(
    ("g", "dtype", "error", "text"),
    [
        (torch.ones(2, 2, dtype=torch.int32), None, TypeError, "got torch.int32 and torch.int32"),
        (torch.ones(2, 2), torch.int8, TypeError, "got torch.float32 and torch.int8"),
        (torch.ones(()), None, ValueError, "without axes"),
    ],
)
def test_errors_of_column_sums(g, dtype, error, text):
    with pytest.raises(error, match=text):
        column_sums(g, dtype)


def test_swiglu_keeps_up_with_memory():
    """As `test_swiglu` says; five tensors of 2 bytes are moved."""
    place = place_of(16384, 4096, None, 4096)
    tensors = dict.fromkeys(("g", "gate", "up", "dgate", "dup"), BF16)
    strides = {"gate_stride": 4096, "up_stride": 4096, "DTYPE": BF16, "HAS_PTX": True}
    machine = compiled(swiglu_gradient_kernel, {**tensors, **strides, **place.arguments}, place.warps)
    assert machine.local == 0
    assert machine.widths("LDG") == machine.widths("STG") == {"128"}
    assert machine.slots() <= 1.05 * SLOTS_PER_BYTE * 10 * place.elements_per_thread


def test_rotary_moves_wide_words():
    strides = {
        "batch_stride": 8192 * 4096,
        "head_stride": 128,
        "stride": 4096,
        "cosine_batch": 0,
        "sine_batch": 0,
    }
    sizes = {"cosine_stride": 128, "sine_stride": 128, "length": 8192, "heads": 32, "width": 128, "tiles": 1}
    constants = {"INVERSE": True, "DTYPE": BF16, "WIDE": False, "HEADS": 32, "HALF": 64, "HAS_PTX": True}
    tensors = dict.fromkeys(("x", "cosine", "sine", "y"), BF16)
    machine = compiled(rotary_kernel, tensors | strides | sizes | constants, 8)
    assert machine.local == 0
    assert machine.widths("LDG") == machine.widths("STG") == {"128"}
