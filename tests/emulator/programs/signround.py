"""SignRound's kernels on CPU tensors in Triton's interpreter, against `reference.calibration.signround`, bit for bit.

TRITON_INTERPRET=1 python -m tests.emulator.interpreter_process signround
"""

from __future__ import annotations

import numpy as np
import torch

from ao_lab.testing.strategies import assert_same_bits
from fast.calibration import signround as module
from fast.calibration.signround import signround_on_device, signround_span
from fast.kernels.calibration import signround as kernel
from reference import SCHEMES
from reference.arrays.bridges import to_numpy
from reference.calibration import signround as rule
from reference.calibration.signround import SignRoundState
from reference.quantize.blocks import Blocks

#: Scheme, dtype of the weights, shape, whether their scales stay.
CASES = (
    ("int4_g32_asymmetric", torch.bfloat16, (24, 160), False),
    ("int4_g128", torch.float32, (24, 256), True),
    ("int8_rowwise", torch.float16, (24, 96), False),
    ("mxfp4", torch.float32, (24, 160), False),
    ("nvfp4", torch.bfloat16, (24, 160), False),
    ("nf4", torch.float32, (24, 128), True),
    ("nf4", torch.bfloat16, (24, 128), False),
    ("mxint8", torch.float32, (24, 64), False),
)


def main() -> None:
    """Compare values, codes, gradients and steps."""
    launches: list[str] = []
    for name in ("moved", "gradient", "step"):
        setattr(kernel, name, _counting(getattr(kernel, name), name, launches))
    module.has_kernels = lambda x: True
    for name, dtype, shape, stay in CASES:
        launches.clear()
        compare(name, dtype, shape, stay)
        assert {"moved", "gradient", "step"} <= set(launches), (name, launches)
        print(name, dtype)


def compare(name: str, dtype: torch.dtype, shape: tuple[int, int], stay: bool) -> None:
    """One scheme; a block of zeros, a weight past which its unit leads nowhere finite."""
    rng, scheme = np.random.default_rng(len(name)), SCHEMES[name]
    w = rng.standard_t(4, shape).astype(np.float32) * 0.05
    w[3, :32] = 0
    if dtype == torch.float32:
        w[5, 3] = np.finfo(np.float32).max
    tensor = torch.from_numpy(w).to(dtype)
    factors = Blocks.of(shape, scheme.scale, -1).scale_shape
    v = rng.uniform(-0.5, 0.5, shape).astype(np.float32)
    v[7], v[8] = 0.5, -0.5
    low, high = (rng.uniform(0.5, 1, factors).astype(np.float32) for _ in range(2))
    scales = rule.signround_codes(to_numpy(tensor), v, low, high, scheme).scales if stay else None
    state = SignRoundState(v, None, None) if stay else SignRoundState(v, low, high)
    on_device = SignRoundState(*(None if part is None else torch.from_numpy(part) for part in state))
    given = None if scales is None else module.torch_of(scales)
    span = None if stay or tensor.device.type == "cpu" else signround_span(tensor, scheme)
    found = signround_on_device(tensor, on_device, scheme, given, span=span)
    g = rng.standard_normal(shape).astype(np.float32)
    g[2] = 0
    values, vjp = rule.signround_quantize(to_numpy(tensor), *state, scheme, scales=scales)
    assert_same_bits(found.result().values, values)
    expected, gradients = vjp(g), found.gradients(torch.from_numpy(g))
    stepped = module.signround_step(on_device, gradients, 0.3, range_rate=0.1)
    for ours, theirs in (
        (gradients, expected),
        (stepped, rule.signround_step(state, expected, 0.3, range_rate=0.1)),
    ):
        for one, other in zip(ours, theirs, strict=True):
            if other is not None:
                assert_same_bits(one, other)


def _counting(call, name, launches):
    def counted(*arguments, **named):
        launches.append(name)
        return call(*arguments, **named)

    return counted
