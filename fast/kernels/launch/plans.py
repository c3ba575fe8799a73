"""Plans (`passes`) made ready for torch tensors of one shape: buffers allocated, passes launched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fast.kernels.launch.launcher import Launch
from fast.kernels.launch.plan import Plan
from fast.kernels.launch.replay import DTYPES, filled, index_of, remember

NAMES = {DTYPES[name]: name for name in ("float32", "bfloat16", "float16")}


class Prepared:
    """A plan whose launches know their kernels."""

    def __init__(self, plan: Plan) -> None:
        self.buffers = plan.buffers
        self.launches = [Launch(step) for step in plan.passes]

    def __call__(self, tensors: dict[str, Any], device: torch.device) -> dict[str, Any]:
        """Run the passes on the caller's tensors (contiguous, on that device); all buffers by name."""
        for name, buffer in self.buffers.items():
            made = torch.empty(buffer.shape, dtype=DTYPES[buffer.dtype], device=device)
            tensors[name] = filled(made, buffer) if buffer.fill else made
        for step in self.launches:
            step(tensors, index_of(device))
        return tensors

    def remember(
        self, key: Any, scheme: Any, inputs: Mapping[str, torch.Tensor | None], finishing: Callable[..., Any]
    ) -> None:
        """Answer the next call with this key by the plan, which just ran on these tensors; see `replay.remember`."""
        steps = [(step, step.buffers) for step in self.launches]
        remember(key, scheme, inputs, self.buffers, steps, finishing)


__all__ = ["DTYPES", "NAMES", "Prepared"]
