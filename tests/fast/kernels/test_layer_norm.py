"""`fast.layer_norm_quantize`: its bits in Triton's interpreter, the code made for Hopper, a CPU, a program."""

import platform

import pytest
import torch

import fast
import reference
from reference import SCHEMES
from tests.emulator.interpreter_process import lines_of

if platform.system() != "Linux":
    pytest.skip("triton has no packages for this system", allow_module_level=True)

from fast.kernels.layers.layer_norm import layer_norm_kernel
from fast.kernels.layers.rms_norm import EVICT
from fast.kernels.layers.tiles import _block_length, tiles
from tests.fast.kernels.compiling.kernel_compiler import compiled, output_arguments


def test_bits_in_the_interpreter():
    """Rows filled up, several of a program, with NaN, infinities and squares that overflow; with and without a bias."""
    (count,) = lines_of("layer_norm", "few")
    assert int(count) == 8


@pytest.mark.nightly
def test_bits_of_every_dtype_in_the_interpreter():
    (count,) = lines_of("layer_norm")
    assert int(count) >= 60


@pytest.mark.parametrize(("length", "elements", "per_thread"), [(512, 1024, 32), (1536, 4096, 64)])
def test_code_for_hopper(length, elements, per_thread):
    """Nothing in local memory, x read and codes written in words of 16 bytes; no square is contracted with a sum: the scale's
    division has what there is of fma."""
    name, dtype = "fp8_rowwise", "bfloat16"
    size = 1 << (length - 1).bit_length()
    place = tiles(
        16384, length, _block_length(SCHEMES[name], (16384, length)), size=size, elements=elements, stride=length,
        per_thread=per_thread,
    )  # fmt: skip
    tensors = dict.fromkeys(("x", "weight", "bias"), dtype)
    made = {k: v for k, v in output_arguments(name, dtype).items() if k != "y"}
    machine = compiled(
        layer_norm_kernel, {**tensors, "eps": 1e-5, **place.arguments, **made, "EVICT": EVICT}, place.warps
    )
    assert machine.local == 0
    assert machine.widths("LDG") == {"128"}
    assert machine.widths("STG") <= {"128", "32"}
    assert machine.ptx.count("fma.rn") <= 8 < per_thread


def test_a_cpu_runs_the_reference_and_programs_an_operator():
    x, weight, bias = torch.randn(4, 64), torch.randn(64), torch.randn(64)
    expected = reference.layer_norm_quantize(x, weight, "mxfp8_e4m3", bias=bias)
    found = fast.layer_norm_quantize(x, weight, "mxfp8_e4m3", bias=bias)

    def run(x):
        q = fast.layer_norm_quantize(x, weight, "mxfp8_e4m3", bias=bias)
        return q.codes, q.scale

    compiled_parts = torch.compile(run, backend="aot_eager", fullgraph=True)(x)
    for parts in ((found.codes, found.scale), compiled_parts):
        assert all(torch.equal(a, b) for a, b in zip(parts, (expected.codes, expected.scale), strict=True))
