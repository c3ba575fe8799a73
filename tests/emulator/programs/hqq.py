"""The kernel of HQQ on CPU tensors in Triton's interpreter, against `reference.calibration.hqq`, bit for bit.

    TRITON_INTERPRET=1 python -m tests.emulator.interpreter_process hqq

Powers go through log2 and exp2 of NumPy here; on these weights their last bit decides nothing.
"""

from __future__ import annotations

import numpy as np
import torch

from ao_lab.testing.strategies import assert_same_bits
from fast.calibration import hqq as module
from fast.calibration.hqq import hqq_on_device
from fast.kernels.calibration import hqq as kernel
from reference.arrays.bridges import to_numpy
from reference.calibration.hqq import hqq
from reference.schemes.conventions import hqq_scheme

#: Bits, group, storage, dtype of the weights, options.
CASES = (
    (4, 64, "float32", torch.float32, {}),
    (3, 32, "float16", torch.float16, {"p": 0.5, "beta": 100.0}),
    (2, 128, "bfloat16", torch.float32, {"steps": 3}),
    (8, 256, "float32", torch.bfloat16, {"p": 1.0, "beta": 50.0}),
)


def main() -> None:
    """Compare zero points and codes; some programs have rows that do not exist."""
    module.has_kernels = lambda x: True
    launches = []
    of_kernel = kernel.zero_points
    kernel.zero_points = lambda *given: launches.append(1) or of_kernel(*given)
    for bits, group, storage, dtype, options in CASES:
        scheme = hqq_scheme(bits, group, storage)
        w = np.random.default_rng(bits).standard_t(4, (7, 256)).astype(np.float32) * 0.05
        w[3] = 0
        tensor = torch.from_numpy(w).to(dtype)
        found = hqq_on_device(tensor, scheme, **options)
        expected = hqq(to_numpy(tensor), scheme, **options)
        assert_same_bits(found.zero, expected.zero)
        assert_same_bits(found.codes, expected.codes)
        print(scheme.name, storage, dtype)
    assert len(launches) == len(CASES)
