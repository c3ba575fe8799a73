"""`check_plain`: arrays that mean more than their values are refused, since the functions here would drop the rest.

A masked array has values under its mask that its own functions leave out: an amax would count them. np.matrix multiplies and
reshapes by rules of its own, and any other subclass of NumPy's array may carry units, names or a mask. Sparse and nested
tensors of torch have no strided memory. np.memmap is an ordinary array in a file.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

PLAIN = (np.ndarray, np.memmap)


def check_plain(x: Any) -> None:
    """TypeError that names the way out unless x is an ordinary array, a dense tensor, or no array at all."""
    if type(x) in PLAIN:
        return
    if isinstance(x, np.ndarray):
        raise TypeError(_numpy_message(x))
    if isinstance(x, (list, tuple)):
        for item in x:
            check_plain(item)
        return
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        kind = tensor_kind(torch, x)
        if kind:
            raise TypeError(
                f"a dense tensor was expected, got a {kind} tensor; {WAYS.get(kind, 'to_dense() makes it dense')}"
            )


#: What makes a dense tensor, by `tensor_kind`.
WAYS = {
    "masked": "its mask would be dropped: to_tensor(value) fills what is masked",
    "nested": "use one call for each of its parts, or torch.nested.to_padded_tensor",
}


def tensor_kind(torch: Any, x: Any) -> str:
    """ "masked", "nested" or the name of a sparse layout; "" for a dense tensor."""
    if torch.compiler.is_compiling():
        return ""
    if type(x) is not torch.Tensor and isinstance(x, torch.masked.MaskedTensor):
        return "masked"
    if x.is_nested:
        return "nested"
    return "" if x.layout is torch.strided else str(x.layout).removeprefix("torch.")


def _numpy_message(x: Any) -> str:
    name = f"{type(x).__module__}.{type(x).__name__}"
    if isinstance(x, np.ma.MaskedArray):
        return (
            "a masked array was given, whose mask would be dropped and whose hidden values would count; "
            "use x.filled(value), x.compressed(), or np.ma.getdata(x) where the mask does not matter"
        )
    return (
        f"an ordinary array was expected, got {name}, whose own rules would be dropped; use numpy.asarray(x)"
    )
