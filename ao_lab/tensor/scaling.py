"""A `QuantizedTensor` times or divided by a power of two, in place: its scales change, its codes stay, nothing is rounded.

RWKV of transformers divides weights so when it is first evaluated, and multiplies them again to train. Any other factor would
need codes for other values: TypeError or ValueError, with the way out.
"""

from __future__ import annotations

from math import frexp
from typing import Any

import torch

from ao_lab.tensor.op_registry import operation
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from reference.schemes.schemes import Scheme

aten = torch.ops.aten


@operation(aten.mul_.Tensor, aten.mul_.Scalar)
def _multiply(func: Any, args: Any, kwargs: Any) -> QuantizedTensor:
    return _scaled(args[0], args[1], 1)


@operation(aten.div_.Tensor, aten.div_.Scalar)
def _divide(func: Any, args: Any, kwargs: Any) -> QuantizedTensor:
    return _scaled(args[0], args[1], -1)


def _scaled(t: Any, factor: Any, sign: int) -> QuantizedTensor:
    """t, its scales times 2**(sign * e) where `factor` is 2**e; nothing has changed where that is refused."""
    if not isinstance(t, QuantizedTensor):
        raise TypeError("a dense tensor is not changed by a quantized one in place; dequantize() that first")
    exponent = sign * _exponent(t, factor)
    plain = t.plain
    changed = {name: _moved(plain, name, exponent * way) for name, way in _places(t.scheme).items()}
    for name, part in changed.items():
        getattr(plain, name).copy_(part)
    if plain is not t:
        t.copy_(plain)
    return t


def _exponent(t: QuantizedTensor, factor: Any) -> int:
    """e of a factor 2**e; ValueError for any other."""
    single = not isinstance(factor, torch.Tensor) or (
        factor.numel() == 1 and not isinstance(factor, QuantizedTensor)
    )
    value = float(factor) if single else 0.0
    fraction, exponent = frexp(value)
    if fraction != 0.5:
        shown = value if single else f"a tensor of shape {tuple(factor.shape)}"
        raise ValueError(
            f"{t!r} is multiplied and divided in place by a power of two alone, which changes its scales; got {shown}: "
            f"change the weight before it is quantized, or dequantize() it"
        )
    return exponent - 1


def _places(scheme: Scheme) -> dict[str, int]:
    """The parts that hold the weight's magnitude, and whether they grow with it (1) or fall (-1)."""
    outer = scheme.outer
    if outer is not None:
        way = 1 if outer.stored == "decode" else -1
        # A mean that was subtracted from the scales stands beside their factor.
        return {"outer": way, "zero": 1} if outer.center == "mean" else {"outer": way}
    places = {"scale": 1 if scheme.scale.stored == "decode" else -1}
    return {**places, "zero": 1} if scheme.zero is not None and scheme.zero.rule == "value" else places


def _moved(t: QuantizedTensor, name: str, exponent: int) -> torch.Tensor:
    """A part times 2**exponent; ValueError where that is no number that the part can hold."""
    part = getattr(t, name)
    scheme = t.scheme
    storage = scheme.scale.storage if name == "scale" else "float32"
    if name == "zero" and scheme.zero is not None:
        storage = scheme.zero.storage
    if storage == "float8_e8m0fnu":
        codes = part.to(torch.int32)
        moved = torch.where(codes == 255, codes, codes + exponent)
        _check(t, bool(((moved >= 1) & (moved <= 255) & ((moved < 255) | (codes == 255))).all()), exponent)
        return moved.to(part.dtype)
    if storage not in ("float32", "bfloat16", "float16"):
        raise ValueError(
            f"scales of {scheme.name} are stored as {storage}, which powers of two do not leave exact; dequantize() it"
        )
    numbers = part if storage == "float32" else part.view(getattr(torch, storage))
    moved = torch.ldexp(numbers.double(), torch.tensor(exponent, device=part.device)).to(numbers.dtype)
    back = torch.ldexp(moved.double(), torch.tensor(-exponent, device=part.device)).to(numbers.dtype)
    ordinary = (moved.abs() >= torch.finfo(numbers.dtype).smallest_normal) | (moved == 0) | moved.isnan()
    same = (back == numbers) | numbers.isnan()
    _check(t, bool((ordinary & same).all()), exponent)
    return moved.view(part.dtype)


def _check(t: QuantizedTensor, good: bool, exponent: int) -> None:
    if not good:
        raise ValueError(
            f"scales of {t!r} times 2**{exponent} leave the range of their storage; dequantize() it"
        )


__all__: list[str] = []
