"""`linear_small` of inputs that are quantized on the way: which schemes it takes, the operator, and its kernels compiled for
Hopper without a GPU. Bits are compared in Triton's interpreter (`programs/products/linear_small_dynamic.py`)."""

import platform

import pytest
import torch

import fast
import reference
from ao_lab.config.recipe import named
from fast.gemm.families import TRITON_SMALL_M
from fast.matmul.preshuffled import layout
from fast.matmul.preshuffled.dynamic import CODES, DIGITS, VALUES, kind_of, linear_small_dynamic
from reference import SCHEMES
from tests.fast.kernels.compiling.kernel_samples import by_day
from tests.fast.kernels.compiling.kernel_samples import named as features
from tests.support.linear_cases import inputs, weight

BF16, HALF = torch.bfloat16, torch.float16
LINUX = platform.system() == "Linux"
KINDS = {
    "int8_rowwise": CODES, "int8_rowwise_asymmetric": CODES, "fp8_rowwise": CODES, "fp8_rowwise_e5m2": CODES,
    "compressed_tensors.int8_token": CODES, "mxfp8_e4m3_rceil": VALUES, "mxfp4": VALUES, "mxint8": VALUES,
    "fp8_tensorwise": None, "fp8_1x128": None, "fp8_128x128": None, "nvfp4": None, "nf4": None, "int8_g32": None,
    "int8_tensorwise": None,
}  # fmt: skip


def preshuffled(name="int4_g128", rows=128, length=256):
    plain = weight(named(name), rows, length)
    return plain, layout.preshuffled(plain)


@pytest.mark.parametrize("name", KINDS)
def test_what_is_exact(name):
    assert kind_of(named(name)) == KINDS[name]


@pytest.mark.parametrize("name", [name for name in SCHEMES if kind_of(SCHEMES[name])])
def test_what_is_exact_is_that(name):
    """Of every scheme that is taken: values, or codes less the zero point, are the same in 16 bits, at both ends of a range."""
    scheme = SCHEMES[name]
    for dtype in DIGITS:
        info = torch.finfo(dtype)
        for power in (1.0, 2.0**-12, info.smallest_normal * 4, info.max / 2**6):
            x = (inputs(8, 256, torch.float32) * power).to(dtype)
            q = reference.quantize(x, scheme)
            if kind_of(scheme) == VALUES:
                values = reference.dequantize(q)
            else:
                values = torch.from_numpy(scheme.format.values.copy())[q.codes.long()]
                values = values if q.zero is None else values - q.zero.float()
            assert torch.allclose(values.to(dtype).float(), values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [BF16, HALF, torch.float32])
@pytest.mark.parametrize("name", ["int8_rowwise_asymmetric", "fp8_rowwise", "mxfp8_e4m3_rceil"])
def test_a_cpu_runs_the_reference(name, dtype):
    plain, stored = preshuffled()
    x, bias = inputs(6, 256, dtype).reshape(2, 3, 256), inputs(1, 128, dtype)[0]
    rows = reference.quantize(x.reshape(6, 256), name)
    wanted = reference.linear(rows, plain, bias, out_dtype=str(dtype).removeprefix("torch."))
    assert torch.equal(linear_small_dynamic(x, name, stored, bias), wanted.reshape(2, 3, 128))
    assert linear_small_dynamic(x[:0], name, stored).shape == (0, 3, 128)
    torch.compiler.reset()
    compiled = torch.compile(linear_small_dynamic, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, name, stored, bias), wanted.reshape(2, 3, 128))


@pytest.mark.parametrize("name", ["int8_rowwise", "mxfp8_e4m3_rceil"])
def test_gradients_pass_where_nothing_saturated(name):
    plain, stored = preshuffled()
    x, bias = inputs(5, 256, torch.float32).requires_grad_(), torch.zeros(128, requires_grad=True)
    g = inputs(5, 128, torch.float32)
    linear_small_dynamic(x, name, stored, bias).backward(g)
    through = g @ fast.dequantize(plain)
    wanted, *_ = reference.fake_quantize_vjp(through, x.detach(), name, axis=-1)
    assert torch.equal(x.grad, wanted)
    assert torch.equal(bias.grad, g.sum(0))


def test_errors():
    _, stored = preshuffled()
    x = inputs(3, 256, BF16)
    with pytest.raises(
        ValueError, match=r"16-bit floats must hold fp8_1x128 exactly.*multiply them by `linear_small`"
    ):
        linear_small_dynamic(x, "fp8_1x128", stored)
    with pytest.raises(ValueError, match="the last axes must be the same"):
        linear_small_dynamic(x[:, :128], "int8_rowwise", stored)
    with pytest.raises(ValueError, match=r"bias has shape \(3,\)"):
        linear_small_dynamic(x, "int8_rowwise", stored, torch.zeros(3))
    with pytest.raises(TypeError, match="takes torch tensors, got list"):
        linear_small_dynamic([1.0], "int8_rowwise", stored)
    with pytest.raises(ValueError, match="scheme"):
        linear_small_dynamic(x, "int8_rowwice", stored)
    stored.scale.requires_grad_()
    with pytest.raises(NotImplementedError, match="no gradient for the scales"):
        linear_small_dynamic(x, "int8_rowwise", stored)


def test_operator():
    stored = preshuffled()[1]
    x = inputs(3, 256, torch.float32).requires_grad_()
    arguments = (x, stored.codes, stored.scale, None, None, [128, 256], "int8_rowwise", stored.scheme.key)
    torch.library.opcheck(torch.ops.ao_lab.linear_small_dynamic.default, arguments)


#: Codes with zero points of a byte and of 16 bits, of floats, values; by night all.
BITS = ("int8_rowwise_asymmetric", "fp8_rowwise", "torchao.int8_rowwise_asymmetric", "mxfp4_rceil")


@pytest.mark.skipif(not LINUX, reason="triton has no packages for this system")
@pytest.mark.parametrize("names", [BITS, pytest.param((), marks=pytest.mark.nightly)], ids=["day", "all"])
def test_bits(names):
    from tests.emulator.interpreter_process import lines_of

    lines = lines_of("linear_small", "dynamic", *names)
    assert len(lines) == (len(names) or 14)


#: Schemes of inputs, the length of a row, and the most registers and instructions of the kernel in front.
COMPILED = [
    ("int8_rowwise", 4096, 40, 260), ("int8_rowwise", 14336, 40, 260), ("int8_rowwise_asymmetric", 4096, 40, 380),
    ("int8_rowwise_asymmetric", 28672, 40, 640), ("fp8_rowwise", 4096, 40, 260), ("fp8_rowwise_e5m2", 14336, 40, 460),
    ("torchao.int8_rowwise_asymmetric", 14336, 40, 680), ("mxfp8_e4m3_rceil", 4096, 40, 240), ("mxfp4_rceil", 4096, 48, 340),
]  # fmt: skip


@pytest.mark.skipif(not LINUX, reason="triton has no packages for this system")
@pytest.mark.parametrize(
    ("name", "length", "registers", "instructions"),
    by_day(
        COMPILED,
        lambda case: features(
            values=kind_of(named(case[0])), zero=named(case[0]).zero is None, project="." in case[0]
        ),
    ),
)
def test_kernels_compile_as_they_are_meant_to(name, length, registers, instructions):
    """Wide loads and stores, no spills, and the product may begin meanwhile: two launches where K is one part."""
    from fast.kernels import exact_inputs
    from fast.scale_factors import ArrangedWeight
    from tests.fast.kernels.compiling.kernel_compiler import launched

    words = torch.empty((14336 // 64, length // 64, 512), dtype=torch.int32)
    w = ArrangedWeight(words, torch.empty((length // 128, 14336)), None, (14336, length), "int4", 128)
    scheme = named(name)
    for dtype in (BF16, HALF):
        x = torch.empty((16, length), dtype=dtype)
        call = lambda x=x: exact_inputs.linear_small_dynamic(  # noqa: E731
            x, scheme, kind_of(scheme), w, None, [TRITON_SMALL_M.name]
        )
        first, product, *others = launched(call)
        assert first.kernel == ("row_codes_kernel" if kind_of(scheme) == CODES else "block_values_kernel")
        assert product.kernel == "triton_small_m_kernel"
        assert [each.kernel for each in others] in ([], ["sum_splits_kernel"])
        for machine in (first, product):
            assert (machine.local, machine.stack) == (0, 0)
        assert set(first.accesses("LDG")) == {16}
        assert first.accesses("STG")[16] >= 2
        assert first.registers <= registers
        assert first.count() <= instructions
        assert "griddepcontrol.wait" in first.ptx
        assert "griddepcontrol.launch_dependents" in first.ptx
