"""`triton_gemv_w8a16_kernel`, lane by lane: every code of a weight meets its input, its scale and its zero point.

Sums are exact, so that one wrong place shows in the bits. See `tests.emulator.gluon_lanes`.
"""

import platform

import numpy as np
import pytest
import torch

from ao_lab.config.recipe import named
from ao_lab.testing.strategies import assert_same_bits

if platform.system() != "Linux":
    pytest.skip("triton has no packages for this system", allow_module_level=True)

from fast.kernels.triton_gemv import gemv_w8a16
from tests.emulator.gluon_lanes import Pointer, body, host
from tests.support.chosen import launch_for
from tests.support.linear_cases import exact_inputs, exact_result, exact_weight, integers

CASES = [
    ("int8_rowwise", 37, 512, torch.bfloat16), ("int8_rowwise", 5, 4096, torch.float32),
    ("int8_tensorwise", 6, 1024, torch.float16), ("int8_rowwise_asymmetric", 5, 1536, torch.float16),
    ("int8_g32", 9, 1536, torch.bfloat16), ("int8_g128_asymmetric", 7, 2048, torch.bfloat16),
    ("fp8_rowwise", 14, 1024, torch.bfloat16), ("fp8_rowwise_e5m2", 3, 512, torch.float16),
    ("mxfp8_e4m3", 5, 1024, torch.bfloat16), ("fp8_128x128", 130, 512, torch.float16), ("mxint8", 9, 512, torch.float32),
]  # fmt: skip


@pytest.mark.parametrize(("name", "rows", "length", "dtype"), CASES, ids=str)
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
