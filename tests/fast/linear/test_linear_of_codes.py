"""`linear_of_codes`: one row of codes times a weight of codes; its operator; which weights its kernel takes; and the kernel
lane by lane, where every code meets its input, its scale and its zero point (see `tests.emulator.gluon_lanes`)."""

import platform
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

import fast
import reference
from ao_lab.testing.strategies import assert_same_bits
from fast import linear_of_codes
from fast.gemm.choose import takes_codes
from fast.matmul.weights import LONGEST_INT8
from reference import SCHEMES
from reference.matmul.linear import transposed

if platform.system() == "Linux":
    from fast.kernels.triton_gemv import gemv_w8a16
    from fast.kernels.triton_gemv.select import w8a8_launch_for
    from tests.emulator.gluon_lanes import Pointer, body, host
    from tests.fast.kernels.compiling.recorded_launches import Flat, Recorded

linux = pytest.mark.skipif(platform.system() != "Linux", reason="triton has no packages for this system")
PAIRS = (
    ("int8_rowwise", "int8_rowwise"), ("int8_rowwise_asymmetric", "int8_tensorwise"), ("int8_tensorwise", "int8_rowwise"),
    ("fp8_rowwise", "fp8_rowwise"), ("fp8_tensorwise", "fp8_tensorwise_e5m2"), ("fp8_rowwise_e5m2", "fp8_rowwise"),
)  # fmt: skip


def operands(inputs, weight, rows=48, length=128, seed=0, count=1):
    """Codes of random numbers, and a bias."""
    x, dense, bias = (
        torch.randn(size, generator=torch.Generator().manual_seed(seed + i))
        for i, size in enumerate(((count, length), (rows, length), (rows,)))
    )
    return fast.quantize(x, inputs), fast.quantize(dense, weight), bias


def specified(x, w, bias, dtype):
    """One block of the blocked tier."""
    name, block = str(dtype).removeprefix("torch."), w.shape[1]
    return reference.matmul(x, transposed(w), accumulation="blocked", block=block, out_dtype=name, bias=bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("inputs", "weight"), PAIRS)
def test_it_is_one_block_of_the_reference(inputs, weight, dtype):
    for count in (1, 5, 0):
        x, w, bias = operands(inputs, weight, count=count)
        for added in (None, bias):
            made = linear_of_codes(x, w, added, dtype=dtype, fast_sums=count == 5)
            assert (made.shape, made.dtype) == ((count, 48), dtype)
            assert_same_bits(made, specified(x, w, added, dtype))


@pytest.mark.parametrize(("inputs", "weight"), PAIRS)
def test_the_operator(inputs, weight):
    """Fake tensors, meta tensors and compiled programs know its result's shape and dtype."""
    x, w, bias = operands(inputs, weight)
    given = (x.codes, x.scale, x.zero, w.codes, w.scale, bias, inputs, weight, torch.bfloat16)
    wanted = linear_of_codes(x, w, bias, dtype=torch.bfloat16)
    assert set(torch.library.opcheck(torch.ops.ao_lab.linear_of_codes, given).values()) == {"SUCCESS"}
    assert torch.equal(torch.ops.ao_lab.linear_of_codes(*given), wanted)
    assert torch.equal(torch.ops.ao_lab.linear_of_codes(*given, fast_sums=True), wanted)
    compiled = torch.compile(
        lambda codes: linear_of_codes(replace(x, codes=codes), w, bias, dtype=torch.bfloat16),
        fullgraph=True,
        backend="aot_eager",
    )
    assert torch.equal(compiled(x.codes), wanted)
    x, w = (
        replace(
            q,
            **{
                part: t.to("meta")
                for part in ("codes", "scale", "zero")
                if (t := getattr(q, part)) is not None
            },
        )
        for q in (x, w)
    )
    there = linear_of_codes(x, w, dtype=torch.float16)
    assert (there.shape, there.dtype, there.is_meta) == ((1, 48), torch.float16, True)


X, W, _ = operands("int8_rowwise", "int8_rowwise")
LONG = replace(
    SCHEMES["int8_rowwise"],
    name="bf16 scales",
    scale=replace(SCHEMES["int8_rowwise"].scale, storage="bfloat16"),
)


@pytest.mark.parametrize(
    ("x", "w", "dtype", "text"),
    [
        (fast.quantize(torch.ones(2, 3, 128), "int8_rowwise"), W, torch.float32, r"rows \(M, K\), got \(2, 3, 128\)"),
        (fast.quantize(torch.ones(1, 128), "fp8_rowwise"), W, torch.float32, "got float8_e4m3fn and int8"),
        (X, fast.quantize(torch.ones(48, 128), "int8_rowwise_asymmetric"), torch.float32, "no zero point of the weight"),
        (X, fast.quantize(torch.ones(48, 128), "int8_g32"), torch.float32, "one float32 scale"),
        (X, fast.quantize(torch.ones(48, 128), LONG), torch.float32, "one float32 scale"),
        (fast.quantize(torch.ones(1, 128), "int8_rowwise", axis=0), W, torch.float32, "along axis 0"),
        (fast.quantize(torch.ones(1, 128), "torchao.fp8_rowwise_training"),
         fast.quantize(torch.ones(48, 128), "fp8_rowwise"), torch.float32, "one float32 scale"),
        (X, fast.quantize(torch.ones(48, 64), "int8_rowwise"), torch.float32, "last axes"),
        (X, W, torch.float64, "dtype"),
    ],
)  # fmt: skip
def test_errors(x, w, dtype, text):
    with pytest.raises(ValueError, match=text):
        linear_of_codes(x, w, dtype=dtype)


@pytest.mark.parametrize(
    ("x", "w", "text"),
    [
        (torch.ones(1, 128), W, "Quantized inputs, got Tensor"),
        (X, torch.ones(48, 128), "Quantized weight, got Tensor"),
        (reference.quantize(np.ones((1, 128), np.float32), "int8_rowwise"), W, "got ndarray"),
        (X, replace(W, codes=W.codes.to(torch.int32)), "codes as uint8 or uint16, got int32"),
    ],
)
def test_errors_of_types(x, w, text):
    with pytest.raises(TypeError, match=text):
        linear_of_codes(x, w, dtype=torch.float32)


def test_sums_that_may_overflow_are_refused():
    """The longest sum holds the largest products; one element more is refused."""
    for more in (0, 1):
        shape = (1, LONGEST_INT8 + more)
        codes = torch.full(shape, 128, dtype=torch.uint8)
        x, w = (replace(q, codes=codes, shape=shape) for q in (X, replace(W, scale=W.scale[:1])))
        x = replace(
            x, scheme=SCHEMES["int8_rowwise_asymmetric"], zero=torch.full((1, 1), 127, dtype=torch.int8)
        )
        if more:
            with pytest.raises(ValueError, match="65537 products, longer than 65536"):
                linear_of_codes(x, w, dtype=torch.float32)
        else:
            made = linear_of_codes(x, w, dtype=torch.float32)
            assert made == torch.tensor(255.0 * 128 * LONGEST_INT8) * x.scale * w.scale


@linux
@pytest.mark.parametrize(
    ("shape", "dtype", "taken"),
    [
        ((64, 512), torch.bfloat16, True), ((1, 16), torch.float32, True), ((7, 11008), torch.float16, True),
        ((64, 520), torch.bfloat16, False), ((64, 512), torch.float64, False), ((0, 512), torch.bfloat16, False),
        ((64, 0), torch.bfloat16, False),
    ],
)  # fmt: skip
def test_which_weights_are_taken(shape, dtype, taken):
    for inputs, weight in PAIRS:
        assert takes_codes(SCHEMES[inputs].key, SCHEMES[weight].key, shape, dtype) == taken


@linux
def test_how_a_weight_is_shared():
    """Four rows a program where there are many; warps along K until there are enough, no more than have work."""
    for shape, rows, along, wide in (
        ((14336, 4096), 4, 1, False), ((4096, 14336), 2, 2, False), ((1024, 4096), 2, 8, False),
        ((1024, 1040), 2, 2, False), ((8, 512), 2, 1, False), ((13996, 512), 2, 1, False), ((13997, 512), 4, 1, False),
        ((131072, 16384), 4, 1, True), ((131071, 16384), 4, 1, True), ((131070, 16384), 4, 1, False),
    ):  # fmt: skip
        launch = w8a8_launch_for(SCHEMES["int8_rowwise"], SCHEMES["int8_rowwise"], shape, torch.bfloat16)
        assert launch.tail == (*shape, True, "int", "int", rows, along, wide, "bfloat16", True)
        assert (launch.grid, launch.warps) == ((-(-shape[0] // rows), 1, 1), along)


def drawn(scheme, shape, rng, most):
    """Codes from `most` below zero to above, and scales that are powers of two; zero points of all sizes."""
    q = fast.quantize(torch.zeros(shape), scheme)
    kind = {"int8": np.int8, "float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}
    codes = rng.integers(-most, most, shape, endpoint=True).astype(kind[q.scheme.element]).view(np.uint8)
    parts = {"codes": codes, "scale": rng.choice(np.float32([2.0**-7, 2.0**-6, 2.0**-4]), q.scale.shape)}
    if q.zero is not None:
        parts["zero"] = rng.integers(-128, 128, q.zero.shape, np.int8)
    return replace(q, **{name: torch.from_numpy(np.asarray(part)) for name, part in parts.items()})


@np.errstate(over="ignore", invalid="ignore")
def by_lanes(x, w, bias, dtype):
    """What the kernel's programs make."""
    launch = w8a8_launch_for(x.scheme, w.scheme, tuple(w.shape), dtype)
    y = torch.full((1, w.shape[0]), float("nan"), dtype=dtype)
    memory = host(y)
    given = [
        None if v is None else Pointer(host(v)) for v in (x.codes, x.scale, x.zero, w.codes, w.scale, bias)
    ]
    for program in range(launch.grid[0]):
        body(gemv_w8a16, "triton_gemv_w8a8_kernel", program)(*given, Pointer(memory), *launch.tail)
    return y


SHAPES = ((37, 512), (1, 16), (5, 528), (48, 1024), (9, 2768), (3, 4096), (6, 11008))


@linux
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("inputs", "weight"), PAIRS)
def test_every_code_meets_its_input_its_scale_and_its_zero_point(inputs, weight, shape):
    """Sums are exact: of integers all, of floats as long as codes are small. So one wrong place shows in the bits."""
    rng = np.random.default_rng(shape[1])
    most = 127 if inputs.startswith("int8") else 4
    x, w = drawn(inputs, (1, shape[1]), rng, most), drawn(weight, shape, rng, most)
    for dtype, bias in (
        (torch.bfloat16, None),
        (torch.float32, torch.randn(shape[0])),
        (torch.float16, None),
    ):
        assert_same_bits(by_lanes(x, w, bias, dtype), specified(x, w, bias, dtype))


@linux
@pytest.mark.parametrize(("inputs", "weight"), PAIRS)
def test_random_numbers(inputs, weight):
    """Integers are the reference bit for bit, rounding by rounding; floats inside the bound, and not always equal."""
    x, w, bias = operands(inputs, weight, 40, 2768)
    made, wanted = by_lanes(x, w, bias, torch.float32), specified(x, w, bias, torch.float32)
    if inputs.startswith("int8"):
        assert_same_bits(made, wanted)
        return
    exact = reference.dequantize(x).double() @ reference.dequantize(w).double().t() + bias.double()
    options = {"accumulation": "blocked", "bias": bias}
    bound = reference.matmul_error_bound(x, transposed(w), **options)
    tensor_core = reference.matmul_error_bound(x, transposed(w), **{**options, "accumulation": "hopper_fp8"})
    assert ((made.double() - exact).abs() <= bound + 2.0**-40).all()
    assert (bound <= tensor_core).all()
    assert not torch.equal(made, wanted)


@linux
def test_not_a_number_stays_in_its_row():
    """A scale of the weight, a code of the inputs."""
    x, w, _ = operands("fp8_rowwise", "fp8_rowwise", 13, 528)
    w.scale[9] = float("nan")
    assert by_lanes(x, w, None, torch.bfloat16).isnan()[0].tolist() == [row == 9 for row in range(13)]
    x.codes[0, 520] = 0x7F
    assert by_lanes(x, w, None, torch.bfloat16).isnan().all()


@linux
def test_a_compiled_kernel_serves_one_kind_of_zero_point_and_bias(monkeypatch):
    """Dtype and presence of every operand belong to its key."""
    recorded = Recorded(monkeypatch, Flat)
    w, row = reference.quantize(torch.ones(64, 512), "int8_rowwise"), torch.ones(1, 512)
    inputs = [reference.quantize(row, name) for name in ("int8_rowwise", "int8_rowwise_asymmetric")]
    biases = [None, torch.zeros(64), torch.zeros(64, dtype=torch.bfloat16)]
    for counts in ((6, 0), (6, 6)):
        for x in inputs:
            for bias in biases:
                linear_of_codes(x, w, bias, dtype=torch.bfloat16)
        assert recorded.counts() == counts


@linux
@pytest.mark.parametrize("inputs", ["int8_rowwise", "fp8_rowwise"])
def test_indices_beyond_32_bits(inputs):
    """The last rows of 2**34 codes, all of which are one number in memory."""
    shape = (2**20, 2**14)
    launch = w8a8_launch_for(SCHEMES[inputs], SCHEMES[inputs], shape, torch.bfloat16)
    words = np.lib.stride_tricks.as_strided(np.array([0x01010101], np.int32), (2**32,), (0,))
    ones, zeros = np.ones(shape[0], np.float32), np.zeros(2**14, np.uint8)
    y = np.full(shape[0], 7, ml_dtypes.bfloat16)
    body(gemv_w8a16, "triton_gemv_w8a8_kernel", launch.grid[0] - 1)(
        Pointer(zeros), Pointer(ones), None, Pointer(words), Pointer(ones), None, Pointer(y), *launch.tail
    )
    assert (y[-4:] == 0).all()
    assert (y[:-4] == 7).all()


@linux
def test_views_at_odd_addresses_are_copied(monkeypatch):
    """The kernel reads words of four bytes."""
    from fast.kernels.triton_gemv import select as code_linear

    moved = [torch.zeros(q.codes.numel() + 1, dtype=torch.uint8)[1:].view(q.codes.shape) for q in (X, W)]
    assert all(codes.data_ptr() % 4 for codes in moved)
    seen = []
    monkeypatch.setattr(
        code_linear.CompiledLaunch, "run", lambda launch, pointers, device: seen.append(pointers)
    )
    x, w = (replace(q, codes=codes) for q, codes in zip((X, W), moved, strict=True))
    code_linear.linear_of_codes(x, w, torch.zeros(48), torch.bfloat16, None)
    (pointers,) = seen
    assert [p is None for p in pointers] == [False, False, True, False, False, False, False]
    assert all(p.data_ptr() % 4 == 0 for p in pointers if p is not None)
