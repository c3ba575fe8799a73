"""`triton_gemv_w4a16_kernel`, lane by lane: every element of a weight meets its input, its scale and its zero point.

`triton_gemv_w8a16_kernel`, lane by lane: every code of a weight meets its input, its scale and its zero point.

Sums are exact, so that one wrong place shows in the bits. See `tests.emulator.gluon_lanes`.
"""

import platform
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

if platform.system() != "Linux":
    pytest.skip("triton has no packages for this system", allow_module_level=True)

import fast
from ao_lab.config.recipe import named
from ao_lab.testing.strategies import assert_same_bits
from fast.kernels.triton_gemv import gemv_w4a16, gemv_w8a16
from tests.emulator.gluon_lanes import Pointer, body, host
from tests.support.family_times import launch_for
from tests.support.linear_cases import POWERS, exact_inputs, exact_result, exact_weight, integers


def given(name, rows, length, dtype, seed=0):
    """A weight of all codes, scales that are powers of two, zero points of all sizes; inputs and bias."""
    rng, scheme = np.random.default_rng(seed), named(name)
    w = fast.quantize(torch.zeros(rows, length), scheme, packed=True)
    kept = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.uint16}.get(
        scheme.scale.storage, np.uint8
    )
    powers = np.array(POWERS[scheme.scale.storage], kept)
    parts = {
        "codes": rng.integers(0, 256, w.codes.shape, np.uint8),
        "scale": rng.choice(powers, w.scale.shape),
    }
    if w.zero is not None:
        values = (
            np.arange(-8, 8, dtype=np.int8)
            if w.zero.dtype == torch.int8
            else np.array([0xBF80, 0, 0x4040], np.uint16)
        )
        parts["zero"] = rng.choice(values, w.zero.shape)
    w = type(w)(**{**vars(w), **{part: torch.from_numpy(v) for part, v in parts.items()}})
    return w, *(torch.from_numpy(rng.integers(-2, 3, n)).to(dtype) for n in (length, rows))


#: Codes from 0 to 15 without a zero point; scales that are powers of two.
PLAIN = replace(named("int4_g64"), name="uint4", element="uint4")
SMALL = replace(
    named("int4_g32"), name="int4 e8m0", scale=replace(named("int4_g32").scale, storage="float8_e8m0fnu")
)
HALVES = [
    replace(
        named(name), name=f"{name} float16", scale=replace(named(name).scale, storage="float16", floor=None)
    )
    for name in ("int4_g128", "int4_g32_asymmetric")
]
CASES = [
    (HALVES[0], 31, 512, torch.float16), (HALVES[1], 24, 768, torch.bfloat16),
    (PLAIN, 19, 256, torch.bfloat16), (PLAIN, 16, 512, torch.float16), (SMALL, 23, 768, torch.bfloat16),
    ("int4_g32", 37, 256, torch.bfloat16), ("int4_g32_asymmetric", 16, 4096, torch.float16),
    ("int4_g64_asymmetric", 33, 1536, torch.bfloat16), ("int4_g96_asymmetric", 17, 768, torch.float16),
    ("int4_g160", 16, 1280, torch.bfloat16), ("int4_g128_asymmetric_bf16", 31, 512, torch.float16),
    ("int4_g256", 40, 2048, torch.float16), ("int4_rowwise", 18, 768, torch.bfloat16),
    ("int4_rowwise_asymmetric", 48, 1024, torch.float16), ("torchao.int4_g32_tinygemm", 20, 512, torch.bfloat16),
    ("torchao.int4_g64_tinygemm", 37, 1792, torch.float16), ("int4_g32_asymmetric_bf16", 9600, 1024, torch.bfloat16),
]  # fmt: skip


@pytest.mark.parametrize(("name", "rows", "length", "dtype"), CASES, ids=str)
def test_every_element_meets_its_input_its_scale_and_its_zero_point(name, rows, length, dtype):
    w, x, bias = given(name, rows, length, dtype)
    launch = launch_for(w, 1, dtype)
    assert launch.kernel.__name__ == "triton_gemv_w4a16_kernel"
    y = np.zeros(rows, ml_dtypes.bfloat16 if dtype == torch.bfloat16 else np.float16)
    pointers = [None if v is None else Pointer(host(v)) for v in (x, w.codes, w.scale, w.zero, bias)]
    programs = range(launch.grid[0]) if rows < 100 else (0, launch.grid[0] // 2, launch.grid[0] - 1)
    for program in programs:
        body(gemv_w4a16, "triton_gemv_w4a16_kernel", program)(*pointers, Pointer(y), *launch.tail)
    wanted = (x.double() @ fast.dequantize(w).double().t() + bias.double()).to(torch.float32).to(dtype)
    taken = np.concatenate([np.arange(16) + min(16 * program, rows - 16) for program in programs])
    assert (y[taken] == host(wanted)[taken]).all()


CASES_W8A16 = [
    ("int8_rowwise", 37, 512, torch.bfloat16), ("int8_rowwise", 5, 4096, torch.float32),
    ("int8_tensorwise", 6, 1024, torch.float16), ("int8_rowwise_asymmetric", 5, 1536, torch.float16),
    ("int8_g32", 9, 1536, torch.bfloat16), ("int8_g128_asymmetric", 7, 2048, torch.bfloat16),
    ("fp8_rowwise", 14, 1024, torch.bfloat16), ("fp8_rowwise_e5m2", 3, 512, torch.float16),
    ("mxfp8_e4m3", 5, 1024, torch.bfloat16), ("fp8_128x128", 130, 512, torch.float16), ("mxint8", 9, 512, torch.float32),
]  # fmt: skip


@pytest.mark.parametrize(("name", "rows", "length", "dtype"), CASES_W8A16, ids=str)
def test_every_code_meets_its_input_its_scale_and_its_zero_point(name, rows, length, dtype):
    w, x = exact_weight(named(name), rows, length), exact_inputs(1, length, dtype)
    for bias in (None, integers(-3, 3, (rows,), 9).to(dtype)):
        launch = launch_for(w, 1, dtype)
        assert launch.kernel.__name__ == "triton_gemv_w8a16_kernel"
        y = torch.full((1, rows), float("nan"), dtype=dtype)
        memory = host(y)
        pointers = [None if v is None else Pointer(host(v)) for v in (x, w.codes, w.scale, w.zero, bias)]
        with np.errstate(over="ignore"):
            for program in range(launch.grid[0]):
                body(gemv_w8a16, "triton_gemv_w8a16_kernel", program)(
                    *pointers, Pointer(memory), *launch.tail
                )
        assert_same_bits(y, exact_result(x, w, bias))
