"""Products of a `QuantizedTensor` and quantized inputs: which function computes them, and its distance from the exact sum."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional

import fast
import reference
from ao_lab import Recipe, quantized
from ao_lab.config.recipe import integer_scheme
from ao_lab.gemm import codes
from ao_lab.gemm.dense import as_right_operand
from ao_lab.gemm.select import PRODUCTS, select_kernel
from reference import SCHEMES, Scales
from tests.ao_lab.gemm.capability import set_capability
from tests.support.quantized_weights import DEVICES
from tests.support.quantized_weights import weight as numbers

INT8 = ("int8_rowwise", "int8_tensorwise", "int8_rowwise_asymmetric")
FLOAT8 = ("fp8_rowwise", "fp8_tensorwise")


@pytest.fixture(autouse=True, params=DEVICES)
def device(request):
    with torch.device(request.param):
        yield request.param


def weight_of(scheme, activation, kernel="auto", shape=(48, 128), dtype=torch.float32, **options):
    named = SCHEMES[activation] if isinstance(activation, str) else activation
    recipe = Recipe(weight=SCHEMES[scheme], activation=named, kernel=kernel, **options)
    return quantized(numbers(*shape, dtype=dtype), recipe)


def host(x, w, accumulation, **options):
    """`reference.matmul` of the input and the weight as the product sees them."""
    inputs = reference.quantize(x, w.recipe.activation, scales=w.input_scales)
    out = str(x.dtype).removeprefix("torch.")
    return reference.matmul(
        inputs, as_right_operand(w.transposed()), accumulation=accumulation, out_dtype=out, **options
    )


@pytest.mark.parametrize("activation", INT8)
@pytest.mark.parametrize("scheme", INT8[:2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [9, 1])
def test_int8_is_the_reference_bit_for_bit(scheme, activation, dtype, bias, rows):
    """Exact integer sums, then scales and bias in float32: one block of the blocked tier."""
    w, x = weight_of(scheme, activation, dtype=dtype), numbers(rows, 128, seed=1, dtype=dtype)
    added = numbers(48, seed=2, dtype=dtype) if bias else None
    assert select_kernel(w.transposed(), dtype) == "int8"
    expected = host(x, w, "blocked", block=128, bias=added)
    assert torch.equal(functional.linear(x, w, added), expected)


@pytest.mark.parametrize("activation", INT8[:2])
def test_int8_with_static_scales(activation):
    named = SCHEMES["int8_tensorwise"] if activation == INT8[0] else integer_scheme(8, "tensor", True)
    zero = None if named.zero is None else torch.tensor(-7, dtype=torch.int8)
    static = Scales(torch.tensor(0.02), None, zero)
    recipe = Recipe(weight=SCHEMES["int8_rowwise"], activation=named)
    w, x = quantized(numbers(48, 128), recipe, input_scales=static), numbers(9, 128, seed=1)
    assert select_kernel(w.transposed(), x.dtype) == "int8"
    assert torch.equal(functional.linear(x, w), host(x, w, "blocked", block=128))
    # Static means that other rows change nothing.
    assert torch.equal(functional.linear(torch.cat([x, 9 * x]), w)[:9], functional.linear(x, w))


@pytest.mark.parametrize("activation", FLOAT8)
@pytest.mark.parametrize("scheme", FLOAT8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [9, 1])
def test_scaled_mm_is_inside_the_bound(device, scheme, activation, dtype, bias, rows):
    if device == "cuda" and dtype != torch.bfloat16:
        pytest.skip("on a GPU it writes bfloat16")
    kernel = "auto" if device == "cuda" else "scaled_mm"
    w, x = weight_of(scheme, activation, kernel, dtype=dtype), numbers(rows, 128, seed=1, dtype=dtype)
    added = numbers(48, seed=2, dtype=dtype) if bias else None
    assert select_kernel(w.transposed(), dtype) == "scaled_mm"
    got = functional.linear(x, w, added).double()
    operands = reference.quantize(x, activation), as_right_operand(w.transposed())
    out = str(dtype).removeprefix("torch.")
    exact = reference.dequantize(operands[0]).double() @ reference.dequantize(operands[1]).double()
    exact = exact if added is None else exact + added.double()
    # Tensor cores add float8 products with fewer bits than float32 has, which one row is added in.
    cores = device == "cuda" and rows > 1
    tier = {"accumulation": "hopper_fp8"} if cores else {"accumulation": "blocked", "block": 1}
    bound = fast.matmul_error_bound(*operands, out_dtype=out, bias=added, **tier)
    assert ((got - exact).abs() <= bound.double() + 2.0**-40).all()
    assert torch.equal(got.isnan(), exact.isnan())


@pytest.mark.parametrize("shape", [(48, 128), (8, 16), (40, 528), (1000, 1040), (72, 136)])
@pytest.mark.parametrize("activation", INT8)
@pytest.mark.parametrize(
    ("dtype", "bias"),
    [(torch.bfloat16, None), (torch.float16, torch.float32), (torch.float32, torch.bfloat16)],
)
def test_one_row_has_the_bits_of_several(activation, shape, dtype, bias, monkeypatch):
    """A kernel for one row, called twice since the second call is a replay, and the product that others take."""
    w, x = (
        weight_of("int8_rowwise", activation, shape=shape, dtype=dtype),
        numbers(1, shape[1], seed=1, dtype=dtype),
    )
    added = None if bias is None else numbers(shape[0], seed=2, dtype=bias)
    with torch.no_grad():
        first, again = (functional.linear(x, w, added) for _ in range(2))
        monkeypatch.setattr(codes, "takes_codes", lambda *_: False)
        wanted = functional.linear(x, w, added)
    assert torch.equal(first, wanted)
    assert torch.equal(again, wanted)


@pytest.mark.parametrize("scheme", ["int8_rowwise", "fp8_rowwise"])
@pytest.mark.parametrize(
    ("rows", "length", "newest", "taken"),
    [
        (1, 128, (9, 0), 1), (1, 136, (9, 0), 0), (1, 128, (8, 9), 0), (0, 128, (9, 0), 0), (64, 1024, (9, 0), 1),
        (20000, 1024, (9, 0), 0), (64, 1040, (9, 0), 0), (64, 1024, (10, 0), 0),
    ],
)  # fmt: skip
def test_few_rows_on_a_gpu_are_multiplied_as_codes(scheme, rows, length, newest, taken, monkeypatch):
    """Of tensors that only say where they would be, and of a GPU that is there in name alone. Of integers it is any number."""
    if rows > 1 and scheme.startswith("int8"):
        taken = int(newest == (9, 0))
    columns = 48 if rows < 2 else 2048
    seen, multiplied = [], codes.linear_of_codes
    set_capability(monkeypatch, newest)
    monkeypatch.setattr(
        codes, "_integer_sums", lambda a, b: a.new_empty((len(a), b.shape[1]), dtype=torch.int32)
    )
    for module in (codes, codes):
        monkeypatch.setattr(module, "linear_of_codes", lambda *a, **k: seen.append(a) or multiplied(*a, **k))
    with FakeTensorMode(), torch.no_grad():
        dense = torch.empty(columns, length, device="cuda:0", dtype=torch.bfloat16)
        w = quantized(dense, Recipe(weight=SCHEMES[scheme], activation=SCHEMES[scheme]))
        made = functional.linear(dense.new_empty(rows, length), w)
    assert (made.shape, made.dtype, made.device.type) == ((rows, columns), torch.bfloat16, "cuda")
    assert len(seen) == taken


@pytest.mark.parametrize("scheme", ["int8_rowwise", "fp8_rowwise"])
@pytest.mark.parametrize(("length", "taken"), [(128, True), (144, True), (136, False)])
def test_one_row_in_a_program_that_leaves_sizes_open(scheme, length, taken, monkeypatch):
    """The kernel that the same layer has by itself, so that a compiled program has its bits."""
    set_capability(monkeypatch, (9, 0))
    real, dense = weight_of(scheme, scheme), torch.empty(48, length, dtype=torch.uint8, device="cpu")
    opened = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(dense, static_shapes=False)
    assert not any(isinstance(size, int) for size in opened.shape)
    where = {"is_cuda": True, "device": torch.device("cuda", 0)}
    for stored in (opened, dense):
        layer = SimpleNamespace(**where, codes=stored, scheme=real.scheme, recipe=real.recipe)
        assert codes._is_one_row(torch.empty(1, length, dtype=torch.bfloat16), layer) == taken


@pytest.mark.parametrize(
    "scheme", ["int8_rowwise", "fp8_rowwise", "mxfp4", "nvfp4", "int4_g32", "nf4", "mxfp8_e4m3"]
)
@pytest.mark.parametrize("activation", [None, "int8_rowwise", "fp8_rowwise", "mxfp8_e4m3", "nvfp4"])
def test_kernels_by_name(scheme, activation):
    x, added = numbers(5, 128, seed=1), numbers(48, seed=2)
    emulated = weight_of(scheme, activation, "dequantize")
    inputs = x if activation is None else reference.dequantize(reference.quantize(x, activation))
    assert torch.equal(
        functional.linear(x, emulated, added), functional.linear(inputs, emulated.dequantize(), added)
    )
    exact = weight_of(scheme, activation, "reference")
    expected = reference.matmul(inputs, emulated.dequantize().t().contiguous(), bias=added)
    assert torch.equal(functional.linear(x, exact, added), expected)


def test_accumulation_of_the_reference():
    w, x = (
        weight_of("fp8_rowwise", "fp8_rowwise", "reference", accumulation="hopper_fp8"),
        numbers(5, 128, seed=1),
    )
    assert torch.equal(functional.linear(x, w), host(x, w, "hopper_fp8"))


def test_a_kernel_that_cannot_says_which_can():
    w = weight_of("mxfp4", "mxfp8_e4m3", "int8")
    with pytest.raises(
        ValueError, match=r"'int8' does not take mxfp4 x mxfp8_e4m3: both operands .* dequantize, reference"
    ):
        functional.linear(numbers(2, 128), w)


@pytest.mark.parametrize(
    ("scheme", "activation", "name", "reason"),
    [
        ("int8_g32", "int8_rowwise", "int8", "one float32 scale"),
        ("int8_rowwise_asymmetric", "int8_rowwise", "int8", "zero point"),
        ("int8_rowwise", None, "int8", "int8"),
        ("fp8_1x128", "fp8_1x128", "scaled_mm", "compute capability 9.0"),
        ("fp8_1x128", "fp8_rowwise", "scaled_mm", "one float32 scale"),
        ("torchao.fp8_rowwise_training", "fp8_rowwise", "scaled_mm", "decoding"),
        ("mxfp8_e4m3", "mxfp8_e4m3", "scaled_mm", "one float32 scale"),
        ("int8_rowwise", "fp8_rowwise", "scaled_mm", "float8"),
    ],
)
def test_refusals(device, scheme, activation, name, reason):
    w = weight_of(scheme, activation).transposed()
    assert reason in PRODUCTS[name].unsupported_reason(w, torch.float32)
    fused = activation is None or device == "cpu"
    assert select_kernel(w, torch.float32) == ("fused" if fused else "dequantize")


@pytest.mark.parametrize(
    ("scheme", "activation", "reason"),
    [
        ("int4_g32", "int8_rowwise", "inputs must not be quantized"),
        ("torchao.fp8_rowwise_training", None, "do not read torchao.fp8_rowwise_training in shape"),
        ("int4_g32", None, None),
    ],
)
def test_what_fused_refuses(device, scheme, activation, reason):
    """On a CPU scales that divide are read, and inputs quantized; on a GPU they are not."""
    w = weight_of(scheme, activation).transposed()
    found = PRODUCTS["fused"].unsupported_reason(w, torch.float32)
    if reason is None or device == "cpu":
        assert found is None
        assert "stored as (out, in)" in PRODUCTS["fused"].unsupported_reason(w.transposed(), torch.float32)
        return
    assert reason in found
    with pytest.raises(ValueError, match="kernel 'fused' does not take"):
        functional.linear(numbers(2, 128), w.transposed().with_recipe(kernel="fused"))


def test_sums_that_may_overflow_are_left_to_floats():
    recipe = Recipe(weight=SCHEMES["int8_rowwise"], activation=SCHEMES["int8_rowwise"])
    # GPUs take lengths that are multiples of 8.
    w = quantized(torch.ones(8, 65544), recipe)
    assert select_kernel(w.transposed(), torch.float32) == ("dequantize" if w.is_cuda else "fused")
    longest = quantized(
        torch.full((8, 65536), -1.0),
        Recipe(weight=SCHEMES["int8_rowwise"], activation=SCHEMES["int8_rowwise_asymmetric"]),
    )
    assert select_kernel(longest.transposed(), torch.float32) == "int8"
    made = functional.linear(torch.ones(1, 65536), longest)
    assert made.tolist()[0] == pytest.approx([-65536] * 8, rel=1e-6)


@pytest.mark.parametrize("activation", ["int8_rowwise", "fp8_rowwise"])
def test_gradients_meet_the_weight_alone(activation):
    scheme = activation
    w = weight_of(scheme, activation)
    x, g = numbers(5, 128, seed=1).requires_grad_(), numbers(5, 48, seed=2)
    functional.linear(x, w).backward(g)
    assert torch.equal(x.grad, g @ w.dequantize())


@pytest.mark.parametrize("activation", ["int8_rowwise", "fp8_rowwise"])
def test_batches_and_experts(device, activation):
    recipe = Recipe(weight=SCHEMES[activation], activation=SCHEMES[activation])
    w, x = quantized(numbers(3, 48, 128), recipe), numbers(3, 5, 128, seed=1)
    inputs = reference.dequantize(reference.quantize(x, activation))
    assert torch.equal(torch.bmm(x, w.mT), torch.bmm(inputs, w.dequantize().mT))
    floats = "scaled_mm" if device == "cuda" else "fused"
    wanted = "int8" if activation == "int8_rowwise" else floats
    assert select_kernel(w[1].transposed(), torch.bfloat16) == wanted
    with pytest.raises(ValueError, match="matrix"):
        torch.bmm(x, w.with_recipe(kernel="int8" if activation == "int8_rowwise" else "scaled_mm").mT)


@pytest.mark.parametrize("activation", ["int8_rowwise", "fp8_rowwise"])
def test_a_weight_on_the_left_quantizes_its_inputs_too(activation):
    w, x = weight_of(activation, activation), numbers(128, 5, seed=1)
    assert torch.equal(w @ x, functional.linear(x.t().contiguous(), w).t())
    assert torch.equal(w @ x[:, 0].contiguous(), (w @ x[:, :1])[:, 0])
    assert torch.equal(functional.linear(x[:, 0].contiguous(), w), (w @ x[:, :1])[:, 0])
    alone = weight_of(activation, None)
    assert torch.equal(alone @ x, alone.dequantize() @ x)
    batch = quantized(numbers(3, 48, 128), w.recipe)
    columns = numbers(3, 128, 1, seed=2)
    inputs = reference.dequantize(reference.quantize(columns.mT.contiguous(), activation))
    assert torch.equal(torch.bmm(batch, columns), torch.bmm(inputs, batch.dequantize().mT).mT)


@pytest.mark.parametrize("scheme", [*INT8[:2], *FLOAT8])
def test_a_weight_stored_the_other_way_round_is_dequantized(scheme):
    """Its codes are not rows along which one sums: read as if they were, a square one would be another matrix."""
    x, dense = numbers(5, 128, seed=1), numbers(128, 128)
    w = quantized(dense, Recipe(weight=SCHEMES[scheme], activation=SCHEMES[scheme]), axis=0)
    inputs = reference.dequantize(reference.quantize(x, scheme))
    assert select_kernel(w, x.dtype) == "dequantize"
    assert torch.equal(x @ w, inputs @ w.dequantize())
    kernel = "int8" if scheme in INT8 else "scaled_mm"
    with pytest.raises(ValueError, match=r"stored as \(out, in\)"):
        _ = x @ w.with_recipe(kernel=kernel)


def test_scaled_sums_beside_quantized_inputs_are_refused():
    w, x = weight_of("int8_rowwise", "int8_rowwise"), numbers(5, 128, seed=1)
    with pytest.raises(ValueError, match="alpha and beta"):
        torch.addmm(numbers(48), x, w.t(), alpha=2)
    with pytest.raises(ValueError, match="a weight on the right"):
        torch.addmm(numbers(5), w, x.t())


def test_empty_inputs():
    for scheme, activation in (
        ("int8_rowwise", "int8_rowwise"),
        ("fp8_rowwise", "fp8_rowwise"),
        ("mxfp4", None),
    ):
        assert functional.linear(torch.zeros(0, 128), weight_of(scheme, activation)).shape == (0, 48)


def test_a_chosen_kernel_that_cannot_take_the_weight_is_not_used(device, monkeypatch):
    """A choice may be older than the rules of its kernel, or written for another weight with the same keys."""
    w = weight_of("mxfp8_e4m3", None).transposed()
    default = select_kernel(w, torch.float32, 4)
    unable = next(
        name for name in PRODUCTS if PRODUCTS[name].unsupported_reason(w, torch.float32) is not None
    )
    able = (
        "dequantize"
        if default != "dequantize"
        else next(
            name
            for name in PRODUCTS
            if name != default and PRODUCTS[name].unsupported_reason(w, torch.float32) is None
        )
    )
    for chosen, used in ((unable, default), (able, able), ("a kernel of another version", default)):
        monkeypatch.setattr("ao_lab.gemm.select.tuned", lambda *_, chosen=chosen: chosen)
        assert select_kernel(w, torch.float32, 4) == used
