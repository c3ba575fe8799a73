"""`check_plain`: arrays whose values are not all that counts are refused, since the functions here would drop the rest.

A masked array has values under its mask that its own functions leave out: an amax would count them. np.matrix reshapes and
multiplies by rules of its own. Sparse and nested tensors of torch have no strided memory. Other subclasses of NumPy's array, as
np.memmap and np.recarray, are read as arrays; results carry no label.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


def check_plain(x: Any) -> None:
    """TypeError that names the way out for a masked array, np.matrix and a tensor that is not dense, also in a list of
    arrays.
    """
    if type(x) is np.ndarray:
        return
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            "a masked array was given, whose mask would be dropped and whose hidden values would count; "
            "use x.filled(value), x.compressed(), or np.ma.getdata(x) where the mask does not matter"
        )
    if isinstance(x, np.matrix):
        raise TypeError("np.matrix was given, whose own rules of shapes would be dropped; use np.asarray(x)")
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
