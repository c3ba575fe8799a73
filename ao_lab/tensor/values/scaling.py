"""A `QuantizedTensor` times or divided by a power of two, in place: its scales change, its codes stay, nothing is rounded.

RWKV of transformers divides weights so when it is first evaluated, and multiplies them again to train. Any other factor needs
codes for other values: the weight is quantized again (`ao_lab.tensor.values.in_place`).
"""

from __future__ import annotations

from math import frexp
from typing import Any

import torch

from ao_lab.tensor.op_registry import operation
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from ao_lab.tensor.values.in_place import requantized
from fast.formats.storage import times_power_of_two
from reference.formats.storage import SCALED
from reference.schemes.schemes import Scheme

aten = torch.ops.aten


@operation(aten.mul_.Tensor, aten.mul_.Scalar)
def _multiply(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    return _changed(func, args, kwargs, 1)


@operation(aten.div_.Tensor, aten.div_.Scalar)
def _divide(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    return _changed(func, args, kwargs, -1)


def _changed(func: Any, args: Any, kwargs: Any, sign: int) -> torch.Tensor:
    """By its scales where the factor is a power of two, else quantized again."""
    t = args[0]
    exponent = _exponent(args[1]) if isinstance(t, QuantizedTensor) else None
    return requantized(func, args, kwargs) if exponent is None else _scaled(t, sign * exponent)


def _scaled(t: QuantizedTensor, exponent: int) -> QuantizedTensor:
    """t, its scales times 2**exponent; nothing has changed where that is refused."""
    plain = t.plain
    changed = {name: _moved(plain, name, exponent * way) for name, way in _places(t.scheme).items()}
    for name, part in changed.items():
        getattr(plain, name).copy_(part)
    if plain is not t:
        t.copy_(plain)
    return t


def _exponent(factor: Any) -> int | None:
    """e of a factor 2**e; None for any other."""
    if isinstance(factor, torch.Tensor) and (factor.numel() != 1 or isinstance(factor, QuantizedTensor)):
        return None
    fraction, exponent = frexp(float(factor))
    return exponent - 1 if fraction == 0.5 else None


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
    if storage not in SCALED:
        raise ValueError(
            f"scales of {scheme.name} are stored as {storage}, which powers of two do not leave exact; dequantize() it"
        )
    moved, exact = times_power_of_two(part, storage, exponent)
    if not bool(exact.all()):
        raise ValueError(
            f"scales of {t!r} times 2**{exponent} leave the range of their storage; dequantize() it"
        )
    return moved


__all__: list[str] = []
