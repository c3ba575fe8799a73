"""Quantized tensors between torch and JAX over the same memory, by DLPack.

Codes and scales are uint8, uint16, int8 or float32, which both libraries and DLPack know. JAX arrays never change, so do not
write into a tensor whose memory an array shares. NumPy aligns its memory to 16 bytes and XLA wants 64 on a CPU: tensors that
the specification made on a CPU can often not be shared with JAX, those that torch or a kernel allocated can.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import jax
import torch
import torch.utils.dlpack

from reference import Quantized, Scales

SHARED = ("uint8", "uint16", "uint32", "int8", "int32", "float32", "bfloat16", "float16")
# XLA copies memory that begins elsewhere, or (on a GPU) hands it to kernels that count on 16.
ALIGNMENT = 64


def from_torch(q: Any, *, copy: bool | None = None) -> Any:
    """A `Quantized`, `Scales` or tensor of torch as one of JAX, on the same device and over the same memory.

    copy: None shares memory and copies what cannot be shared (gaps between elements, odd alignment); False shares or raises;
    True copies, after which the tensors may be written to. Gradients are left behind. Raises TypeError for what holds no torch
    tensors or has a dtype that codes and scales never have, ValueError for tensors on devices that JAX does not see.
    """
    return _converted(q, torch.Tensor, "from_torch", lambda tensor, name: _to_jax(tensor, name, copy))


def to_torch(q: Any, *, copy: bool | None = None) -> Any:
    """A `Quantized`, `Scales` or array of JAX as one of torch; the inverse of `from_torch`, with the same errors."""
    return _converted(q, jax.Array, "to_torch", lambda array, name: _to_torch(array, name, copy))


def _converted(value: Any, kind: Any, what: str, convert: Callable[[Any, str], Any]) -> Any:
    """Every array of a container, or the array, converted; None stays."""
    if not isinstance(value, (Quantized, Scales)):
        return convert(_checked(value, kind, what, "the argument"), what)
    names = [item.name for item in fields(value) if item.name in ("codes", "scale", "outer", "zero")]
    parts = {name: getattr(value, name) for name in names if getattr(value, name) is not None}
    for name, part in parts.items():
        _checked(part, kind, what, name)
    if len({_device(part) for part in parts.values()}) > 1:
        where = ", ".join(f"{name} on {_device(part)}" for name, part in parts.items())
        raise ValueError(f"{what}: the parts lie on different devices: {where}; move them to one")
    return replace(value, **{name: convert(part, name) for name, part in parts.items()})


def _checked(value: Any, kind: Any, what: str, name: str) -> Any:
    """`value` if it is an array of the right library that can be shared at all."""
    if not isinstance(value, kind):
        library = "torch tensors" if kind is torch.Tensor else "JAX arrays"
        raise TypeError(
            f"{what} takes {library}, Scales or Quantized of them; {name} is a {type(value).__name__}"
        )
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{what}: {name} is traced; memory can be shared outside jit, vmap and grad only")
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in SHARED:
        raise TypeError(
            f"{what}: {name} is {dtype}; quantized values and scales are uint8, uint16, int8 or float32, so view its "
            "bytes as uint8"
        )
    return value


def _device(value: Any) -> str:
    return str(value.device)


def _to_jax(tensor: torch.Tensor, name: str, copy: bool | None) -> Any:
    tensor = tensor.detach()
    _require_visible(tensor, name)
    fits = tensor.is_contiguous() and not tensor.is_neg() and tensor.data_ptr() % ALIGNMENT == 0
    if copy is False and not fits:
        raise ValueError(
            f"from_torch: {name} cannot be shared: shape {tuple(tensor.shape)}, strides {tensor.stride()}, address "
            f"{tensor.data_ptr() % ALIGNMENT} bytes past a multiple of {ALIGNMENT}; a contiguous clone of torch's own can"
        )
    if copy or not fits:
        tensor = tensor.resolve_neg().clone(memory_format=torch.contiguous_format)
    # JAX makes another GPU of several the current one of this thread, and torch exports from the current one only.
    with torch.cuda.device_of(tensor):  # type: ignore[no-untyped-call]
        return _shared(jax.numpy.from_dlpack(tensor), tensor, name, copy)


def _shared(array: Any, tensor: torch.Tensor, name: str, copy: bool | None) -> Any:
    """The array, which has the tensor's memory if that was asked for."""
    if copy is False and array.size and array.unsafe_buffer_pointer() != tensor.data_ptr():
        raise ValueError(f"{name}: DLPack copied an array of shape {array.shape} and dtype {array.dtype}")
    return array


def _require_visible(tensor: torch.Tensor, name: str) -> None:
    """ValueError for a tensor that JAX could not reach."""
    kind = tensor.device.type
    if kind not in ("cpu", "cuda") or tensor.layout is not torch.strided:
        raise ValueError(
            f"from_torch: {name} is a {tensor.layout} tensor on {tensor.device}; move it to a CPU or GPU"
        )
    if kind == "cuda" and not _jax_sees(tensor.device.index):
        raise ValueError(
            f"from_torch: {name} lies on {tensor.device}, which JAX does not see; see jax.devices()"
        )


def _jax_sees(index: int) -> bool:
    try:
        return any(device.local_hardware_id == index for device in jax.local_devices(backend="cuda"))
    except RuntimeError:
        return False


def _to_torch(array: Any, name: str, copy: bool | None) -> torch.Tensor:
    devices = list(array.devices())
    if len(devices) > 1:
        raise ValueError(
            f"to_torch: {name} is spread over {len(devices)} devices; gather it with jax.device_put first"
        )
    on_gpu = devices[0].platform == "gpu"
    if on_gpu and not torch.cuda.is_available():
        raise ValueError(
            f"to_torch: {name} lies on {devices[0]}, which torch does not see; copy it with jax.device_put"
        )
    if not on_gpu:
        # On a GPU the streams wait for each other.
        jax.block_until_ready(array)
    tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(array)
    _shared(array, tensor, name, copy)
    return tensor.clone() if copy else tensor
