"""The states of a parameter as tensors: what is allocated, where shards begin, and float32 moments in and out.

A state lies in `optimizer.state[p]` under the names that torch's AdamW has: ``step``, ``exp_avg``, ``exp_avg_sq``; where a
moment is quantized ``exp_avg_codes`` and ``exp_avg_scale`` stand in its place, so that no other optimizer takes codes for a
moment. ``error`` is that of a master weight. Of a DTensor they are DTensors with its placements: blocks end with a row, so
codes and scales are sharded as the parameter is, and `torch.distributed.checkpoint` saves, loads and reshards them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import prod
from typing import Any

import torch

from fast.optim.update import Moment, Slot
from reference.arrays.bridges import to_numpy, to_torch
from reference.formats.storage import packed_shape
from reference.optim.states import STATES, State, States, load_state, matrix_shape, store_state
from reference.optim.update import MASTERS
from reference.quantize.stored import Quantized

#: Parameters of fewer elements keep float32 moments, as in bitsandbytes and torchao.
LEAST = 4096
NAMES = {"exp_avg": "first", "exp_avg_sq": "second"}


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "to_local")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def to_write(p: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter as a plain tensor that a step writes to; a weight that FSDP2 gathers quantized
    (`ao_lab.training.shard.CastOnGather`) counts that, so that what was made of it is made anew, and its parameter does: ranks
    that step it all know that the others have."""
    part: Any = local(p.detach())
    counts = hasattr(part, "to_write")
    if counts and is_sharded(p) and not p.is_inference():
        torch.autograd.graph.increment_version(p)
    written: torch.Tensor = part.to_write() if counts else part
    return written


def on_any_rank(flag: torch.Tensor, parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """A flag of one element, in place the largest of all ranks that have a part of a parameter: each of them has to call it."""
    groups: dict[str, tuple[Any, str]] = {}
    for p in filter(is_sharded, parameters):
        mesh = p.device_mesh  # type: ignore[attr-defined]
        for axis, placement in enumerate(p.placements):  # type: ignore[attr-defined]
            if placement.is_shard():
                group = mesh.get_group(axis)
                groups[group.group_name] = group, mesh.device_type
    for group, device in groups.values():
        moved = flag.to(device)  # of offloaded parameters
        torch.distributed.all_reduce(moved, torch.distributed.ReduceOp.MAX, group=group)
        flag.copy_(moved)
    return flag


def states_for(p: torch.Tensor, states: States) -> States:
    """The states of a parameter: float32 where it has fewer than `LEAST` elements, or is a sharded vector."""
    if p.numel() < LEAST or (is_sharded(p) and p.dim() < 2):
        return STATES["float32"]
    return states


def lead_axes(shape: tuple[int, ...], block: int) -> int:
    """How many first axes count rows."""
    rows, axis, count = matrix_shape(shape, block)[0], 0, 1
    while count < rows or (len(shape) > 1 and axis < 1):
        count *= shape[axis]
        axis += 1
    return axis


def moment_shapes(shape: tuple[int, ...], state: State) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the codes and of the scales of a parameter."""
    assert state.scheme is not None
    axis = lead_axes(shape, state.block)
    length = prod(shape[axis:])
    codes = packed_shape((*shape[:axis], length), state.scheme.format)
    return codes, (*shape[:axis], -(-length // state.block))


def begin_state(p: torch.Tensor, states: States, kind: str, master: str) -> dict[str, Any]:
    """The states of a parameter before its first step."""
    mine = states_for(p, states)
    result: dict[str, Any] = {"step": torch.zeros((), dtype=torch.float32, device=local(p).device)}
    for name, field in NAMES.items():
        if kind == "lion" and field == "second":
            continue
        put_moment(result, name, p, getattr(mine, field), None)
    if MASTERS[master] and p.dtype == torch.bfloat16:
        result["error"] = like(p, torch.zeros(local(p).shape, dtype=getattr(torch, f"int{MASTERS[master]}"),
                                            device=local(p).device), tuple(p.shape))  # fmt: skip
    return result


def put_moment(
    result: dict[str, Any], name: str, p: torch.Tensor, state: State, value: torch.Tensor | None
) -> None:
    """Store a moment (None: zeros; else float32 of this rank's part of p, of a state that is quantized) under its names."""
    part = local(p)
    shape = tuple(part.shape)
    if state.scheme is None:
        result[name] = like(p, torch.zeros(shape, dtype=torch.float32, device=part.device), tuple(p.shape))
        return
    codes_shape, scale_shape = moment_shapes(shape, state)
    whole_codes, whole_scale = moment_shapes(tuple(p.shape), state)
    rows, length = matrix_shape(shape, state.block)
    if value is None or not value.numel():
        codes, scale = zeros_stored(state)
        codes = codes.expand(prod(codes_shape)).reshape(codes_shape)
        scale = scale.expand(prod(scale_shape)).reshape(scale_shape)
    else:
        q = stored_nearest(value.detach().float().cpu().reshape(rows, length), state)
        codes, scale = to_torch(q.codes).reshape(codes_shape), to_torch(q.scale).reshape(scale_shape)
    result[f"{name}_codes"] = like(p, codes.to(part.device).contiguous(), whole_codes)
    result[f"{name}_scale"] = like(p, scale.to(part.device).contiguous(), whole_scale)


@lru_cache(maxsize=64)
def zeros_stored(state: State) -> tuple[torch.Tensor, torch.Tensor]:
    """The byte of codes and the scale, one of each, that a moment of zeros is stored as."""
    q = stored_nearest(torch.zeros(1, state.block, dtype=torch.float32), state)
    return to_torch(q.codes)[:1, :1].reshape(1), to_torch(q.scale).reshape(1)


def stored_nearest(x: torch.Tensor, state: State) -> Quantized:
    """A moment that comes as float32, stored to nearest: values that were stored before keep their codes."""
    array = to_numpy(x.contiguous())
    words = None
    if state.stochastic:
        import numpy as np

        words = np.full(array.shape, 0x80000000, np.uint32)
    return store_state(array, state, words)


def like(p: torch.Tensor, part: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """This rank's part of a tensor of a shape, sharded as p is; as it is where p is not."""
    if not is_sharded(p):
        return part
    from torch.distributed.tensor import DTensor, Shard

    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    sizes = list(shape)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard) and placement.dim >= len(shape):
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} is sharded along axis {placement.dim}, inside its rows of states; "
                f"shard it along the first axis, or give states='float32'"
            )
        if isinstance(placement, Shard) and placement.dim == len(shape) - 1 and placement.dim > 0:
            ranks = mesh.size(axis)
            if p.shape[placement.dim] % ranks:
                raise ValueError(
                    f"axis {placement.dim} of a parameter of shape {tuple(p.shape)} is sharded over {ranks} ranks, which do "
                    f"not divide it: states of low precision need equal parts of rows; shard it along the first axis"
                )
            sizes[placement.dim] = part.shape[placement.dim] * ranks
    stride = [prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    result = DTensor.from_local(
        part, mesh, placements, run_check=False, shape=torch.Size(sizes), stride=tuple(stride)
    )
    return result.to(part.device)  # offloaded parameters lie on another device than the mesh


def place_of(p: torch.Tensor, block: int) -> tuple[int, int]:
    """The number of the first block of this rank's part among those of the whole parameter; of a vector the elements of that
    block that lie before it."""
    if not is_sharded(p):
        return 0, 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape = tuple(p.shape)
    _, offset = compute_local_shape_and_global_offset(shape, p.device_mesh, p.placements)  # type: ignore[attr-defined]
    axis = lead_axes(shape, block)
    row = sum(o * prod(shape[at + 1 : axis]) for at, o in enumerate(offset[:axis]))
    inside = sum(o * prod(shape[axis + at + 1 :]) for at, o in enumerate(offset[axis:]))
    before = int(inside) % block if p.dim() < 2 and local(p).numel() else 0
    return int(row * -(-prod(shape[axis:]) // block) + inside // block), before


def slot_of(
    p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], number: int, first: int, inside: int = 0
) -> Slot:
    """What a step reads and writes of a parameter; a gradient with other strides is copied."""

    def moment(name: str) -> Moment | None:
        if f"{name}_codes" in state:
            return Moment(local(state[f"{name}_codes"]), local(state[f"{name}_scale"]))
        return Moment(local(state[name])) if name in state else None

    error = state.get("error")
    result = moment("exp_avg")
    assert result is not None
    return Slot(
        to_write(p), local(grad).contiguous(), state["step"], result, moment("exp_avg_sq"),
        None if error is None else local(error), number, first, inside,
    )  # fmt: skip


def moment_of(p: torch.Tensor, state: dict[str, Any], name: str, record: State) -> torch.Tensor:
    """A moment as float32 of the parameter's shape (of a DTensor this rank's part, sharded as p is)."""
    if name in state:
        return local(state[name]).detach().float().clone() if not is_sharded(p) else state[name]
    part = local(p)
    if not part.numel():  # the shard of a rank that has no row
        return like(p, torch.zeros(part.shape, device=part.device), tuple(p.shape))
    shape = matrix_shape(tuple(part.shape), record.block)
    codes = to_numpy(local(state[f"{name}_codes"]).cpu()).reshape(shape[0], -1)
    scale = to_numpy(local(state[f"{name}_scale"]).cpu()).reshape(shape[0], -1)
    assert record.scheme is not None
    value = load_state(Quantized(codes, scale, None, None, shape, 1, record.scheme, packed=True), record)
    result = to_torch(value).reshape(part.shape).to(part.device)
    return like(p, result, tuple(p.shape))


__all__ = [
    "LEAST",
    "begin_state",
    "local",
    "moment_of",
    "on_any_rank",
    "place_of",
    "put_moment",
    "slot_of",
    "states_for",
]
