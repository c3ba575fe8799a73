"""Plans (`passes`) made ready for torch tensors of one shape: buffers allocated, passes launched."""

from __future__ import annotations

from typing import Any

import torch

from fast.kernels.launch import HOOKS, Launch
from fast.kernels.passes import Buffer, Plan

DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "bfloat16", "float16", "uint8", "int8", "uint16", "int32", "uint32")
}
NAMES = {DTYPES[name]: name for name in ("float32", "bfloat16", "float16")}


class Prepared:
    """A plan whose launches know their kernels."""

    def __init__(self, plan: Plan) -> None:
        self.buffers = [(name, b.shape, DTYPES[b.dtype], b) for name, b in plan.buffers.items()]
        self.launches = [Launch(step) for step in plan.passes]

    def __call__(self, tensors: dict[str, Any], device: torch.device) -> dict[str, Any]:
        """Run the passes on the caller's tensors (contiguous); all buffers by name."""
        for name, shape, dtype, buffer in self.buffers:
            if buffer.fill:
                tensors[name] = filled(buffer, dtype, device)
            else:
                tensors[name] = torch.empty(shape, dtype=dtype, device=device)
        index = device.index if device.type == "cuda" else -1
        for launch in self.launches:
            launch(tensors, index)
        return tensors


class Quick:
    """A plan of one pass from x to fresh buffers: the shortest way from a call to the driver."""

    def __init__(self, prepared: Prepared) -> None:
        self.launch = prepared.launches[0]
        self.buffers = [(shape, dtype) for _, shape, dtype, _ in prepared.buffers]
        order = [name for name, *_ in prepared.buffers]
        self.slots = [
            -1 if name == "x" else order.index(name) if name in order else None
            for name in self.launch.buffers
        ]
        self.parts = [
            order.index(name) if name in order else None for name in ("codes", "scale", "outer", "zero")
        ]

    @staticmethod
    def serves(prepared: Prepared) -> bool:
        """Whether the plan is of that kind."""
        return len(prepared.launches) == 1 and not any(buffer.fill for *_, buffer in prepared.buffers)

    def __call__(self, x: torch.Tensor) -> list[torch.Tensor | None] | None:
        """codes, scale, outer, zero of an aligned contiguous tensor; None where the kernel has still to be compiled."""
        device = x.device
        compiled = self.launch.compiled.get(device.index)
        if compiled is None or HOOKS.launch_enter_hook.calls or HOOKS.launch_exit_hook.calls:
            return None
        made = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.buffers]
        addresses = [tensor.data_ptr() for tensor in made]
        addresses.append(x.data_ptr())
        slots = [None if slot is None else addresses[slot] for slot in self.slots]
        self.launch.direct(slots, device.index, compiled)
        return [None if part is None else made[part] for part in self.parts]


def filled(buffer: Buffer, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A buffer whose rows start with the numbers of its fill."""
    if buffer.fill == (0,):
        return torch.zeros(buffer.shape, dtype=dtype, device=device)
    made = torch.empty(buffer.shape, dtype=dtype, device=device)
    for row, value in zip(made, buffer.fill, strict=True):
        row.fill_(value)
    return made
