"""`fast.linear_block_norm`: its bits in Triton's interpreter, the code made for Hopper, operators, what the kernel refuses."""

import platform

import pytest
import torch

import fast
import reference
from reference import SCHEMES, Quantized
from tests.emulator.interpreter_process import lines_of
from tests.support.block_norm import CASES, operands

if platform.system() != "Linux":
    pytest.skip("triton has no packages for this system", allow_module_level=True)

from fast.kernels.triton_scaled_mm import block_norm as host
from tests.fast.kernels.compiling.kernel_compiler import launched_together


def test_bits_in_the_interpreter():
    assert len(lines_of("block_norm", "few")) == 1


@pytest.mark.nightly
def test_bits_of_every_case_in_the_interpreter():
    assert len(lines_of("block_norm")) == len(CASES)


def call(scheme, variant=None, m=256, n=512, k=512, dtype=torch.bfloat16):
    row = SCHEMES["fp8_rowwise"]
    sides = [
        Quantized(torch.empty((rows, k), dtype=torch.uint8), torch.empty((rows, 1)), None, None, (rows, k), 1, row)
        for rows in (m, n)
    ]  # fmt: skip
    given = *sides, torch.empty(n), None, 1e-6, True, scheme, dtype, True, variant
    return lambda: host.linear_block_norm(*given)


def test_the_epilogue_stays_in_registers():
    """Products of 8-bit floats by descriptors, nothing spilled; sums and maxima of a row between four lanes: two exchanges each
    and row of a thread; codes by the conversion of two, results in words of 16 bytes."""
    asked = [(scheme, one) for one in (host.Variant(), host.USUAL) for scheme in ("", host.SCHEME_NAME)]
    for (scheme, one), (code,) in zip(asked, launched_together([call(*each) for each in asked]), strict=True):
        assert (code.local, code.stack) == (0, 0)
        assert code.named("QGMMA") >= 4
        assert set(code.accesses("STG")) == ({16, 4} if scheme else {16})
        # Persistent, results change lanes by exchanges too: shared memory has the next tile's operands.
        if not one.persistent:
            assert code.named("SHFL") == (12 if scheme else 4)
            assert not scheme or code.named("F2FP") == one.rows * host.BLOCK // (32 * one.warps * 2)


def test_results_in_float32_fit_in_shared_memory():
    """Compiling refuses what takes more than there is, as a tile of them beside the next one's operands does."""
    ((code,),) = launched_together([call("", dtype=torch.float32)])
    assert code.local == 0
    assert code.stack <= 40
    with pytest.raises(AssertionError, match="bytes of shared memory"):
        launched_together([call("", host.USUAL, dtype=torch.float32)])


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_a_cpu_runs_the_reference_and_programs_an_operator(case):
    _, activation, scheme, dtype, _ = case
    x, w, gain, bias = operands(case)
    options = {"bias": bias, "activation": activation, "scheme": scheme or None, "dtype": dtype}
    expected = reference.linear_block_norm(x, w, gain, **options)
    found = fast.linear_block_norm(x, w, gain, **options)

    def run(gain):
        y = fast.linear_block_norm(x, w, gain, **options)
        return (y.codes, y.scale) if scheme else (y,)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)(gain)
    wanted = (expected.codes, expected.scale) if scheme else (expected,)
    assert all(torch.equal(a, b) for a, b in zip(compiled, wanted, strict=True))
    assert torch.equal(found.codes if scheme else found, wanted[0])


@pytest.mark.parametrize(
    ("x", "w", "scheme", "block", "reason"),
    [
        ((8, 32, "fp8_rowwise"), (256, 32, "fp8_rowwise"), "", 256, None),
        ((8, 32, "fp8_tensorwise"), (256, 32, "fp8_rowwise"), "fp8_1x128", 256, None),
        ((8, 32, "int8_rowwise"), (256, 32, "int8_rowwise"), "", 256, "8-bit floats"),
        ((8, 32, "mxfp8_e4m3"), (256, 32, "fp8_rowwise"), "", 256, "scales are of rows"),
        ((8, 32, "fp8_rowwise"), (128, 32, "fp8_rowwise"), "", 256, "N is whole blocks"),
        ((8, 32, "fp8_rowwise"), (256, 32, "fp8_rowwise"), "", 128, "N is whole blocks"),
        ((8, 32, "fp8_rowwise"), (256, 32, "fp8_rowwise"), "fp8_rowwise", 256, "results are floats"),
    ],
)
def test_what_the_kernel_takes(x, w, scheme, block, reason):
    sides = [reference.quantize(torch.ones(rows, length), name) for rows, length, name in (x, w)]
    said = host.refusal(*sides, scheme, torch.bfloat16, block)
    assert (said is None) if reason is None else reason in said


def test_a_kernel_reads_no_scales_of_columns():
    """`axis=0` has K scales, one a column, where the kernel would read one a row."""
    x, w = (reference.quantize(torch.ones(n, 32), "fp8_rowwise") for n in (32, 256))
    across = reference.quantize(torch.ones(32, 32), "fp8_rowwise", axis=0)
    assert host.refusal(x, w, "", torch.bfloat16, 256) is None
    assert "along K" in host.refusal(across, w, "", torch.bfloat16, 256)


def test_what_the_kernel_would_read_beyond_is_refused_first():
    """The launch, where a CUDA tensor would go, checks what the reference does."""
    from fast.layers.block_norm import LINEAR_BLOCK_NORM, settings

    x, w = (reference.quantize(torch.ones(n, 32), "fp8_rowwise") for n in (8, 256))
    short = reference.quantize(torch.ones(8, 16), "fp8_rowwise")
    gain = torch.ones(256)
    for side, weight, bias, eps, message in (
        (short, gain, None, 1e-6, "the last axes must be the same"),
        (x, gain[:128], None, 1e-6, "weight is float32 of shape"),
        (x, gain.bfloat16(), None, 1e-6, "weight is float32 of shape"),
        (x, gain, gain[:1], 1e-6, "bias has shape"),
        (x, gain, None, -1.0, "eps is a number"),
    ):
        values = (256, eps, "none", "", "bfloat16", side.scheme.key, *settings(side), *settings(w))
        with pytest.raises(ValueError, match=message):
            LINEAR_BLOCK_NORM.kernel(
                w.scheme, values, (side.codes, side.scale, w.codes, w.scale, weight, bias), None
            )
    with pytest.raises(TypeError, match="takes Quantized inputs, got Tensor"):
        fast.linear_block_norm(torch.ones(8, 32), w, gain, bias=gain, activation="hard_swish")
    with pytest.raises(ValueError, match="without outer scales and zero points"):
        fast.linear_block_norm(x, fast.quantize(torch.ones(256, 32), "nvfp4"), gain)
