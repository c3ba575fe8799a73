"""The kernel of searched scales on CPU tensors in Triton's interpreter, against `reference.search_scales`, bit for bit.

TRITON_INTERPRET=1 python -m tests.emulator.interpreter_process candidates
"""

from __future__ import annotations

import numpy as np
import torch

from ao_lab.testing.strategies import assert_same_bits
from fast.calibration import search as module
from fast.kernels.calibration import candidates as kernel
from reference.arrays.bridges import to_numpy
from reference.calibration.search import search_scales

#: Scheme, dtype of the weights, norm.
CASES = (
    ("int3_g64_asymmetric", torch.bfloat16, 2.0),
    ("int3_g64_asymmetric", torch.float32, 3.0),
    ("mxfp4", torch.bfloat16, 3.0),
)


def main() -> None:
    """Compare scales and zero points; cubes choose others than squares."""
    module.has_kernels = lambda x: True
    launches, of_kernel, scales = [], kernel.best_candidates, []

    def counted(*given, **named):
        launches.append(1)
        return of_kernel(*given, **named)

    kernel.best_candidates = counted
    rng = np.random.default_rng(1)
    w = torch.from_numpy(rng.standard_t(4, (8, 128)).astype(np.float32) * 0.05)
    weights = torch.from_numpy(np.exp(rng.standard_normal(128)))
    for name, dtype, norm in CASES:
        x = w.to(dtype)
        found = module.search_scales_on_device(x, name, weights=weights, norm=norm)
        expected = search_scales(to_numpy(x), name, weights=weights.numpy(), norm=norm)
        assert_same_bits(found.scale, expected.scale)
        if expected.zero is not None:
            assert_same_bits(found.zero, expected.zero)
        squares = search_scales(to_numpy(x), name, weights=weights.numpy())
        scales.append(bool((expected.scale != squares.scale).any()))
        print(name, dtype, norm)
    assert len(launches) == len(CASES)
    assert scales == [norm == 3 for _, _, norm in CASES]
