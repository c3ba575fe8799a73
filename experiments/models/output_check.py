"""The check before a model is timed: its outputs are finite and near those of the model that it is compared with.

Both limits are coarse on purpose: rounding moves outputs by percents, a product that reads its weights wrongly by their whole
size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from experiments.harness.outcome import Wrong

#: Largest relative change of outputs: by a scheme (4 bits change the logits of 32 random layers by 0.46), and by compiling.
SCHEME_LIMIT, COMPILED_LIMIT = 0.7, 0.3


def relative_change(outputs: Tensor, expected: Tensor | None, limit: float, cause: str) -> tuple[float, str]:
    """Norm of the difference over the norm of `expected`, with its unit; 0 where nothing is expected.

    `Wrong` where outputs are not finite, or change by more than `limit`; `cause` ends its sentence.
    """
    if not torch.isfinite(outputs).all():
        raise Wrong("outputs are not finite")
    if expected is None:
        return 0.0, "ratio"
    change = float((outputs - expected).norm() / expected.norm())
    if not change <= limit:  # nor where what is expected is zero
        raise Wrong(f"outputs differ by {change:.3f} of their size {cause}, more than {limit}")
    return change, "ratio"
