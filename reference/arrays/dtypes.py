"""Arguments that name a dtype, in every spelling of NumPy, JAX, ml_dtypes and torch, as one name."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

#: How a dtype may be given: its name ("float16", "f2"), np.dtype, a scalar type (np.float16, ml_dtypes.bfloat16, jnp.float16)
#: or a torch.dtype.
DTypeLike = Any


def dtype_name(dtype: DTypeLike, allowed: tuple[str, ...], what: str) -> str:
    """The name of a dtype that is one of `allowed`; ValueError that lists them for anything else."""
    if type(dtype) is str and dtype in allowed:
        return dtype
    name = spelled(dtype)
    if name not in allowed:
        raise ValueError(
            f"{what} is one of {', '.join(allowed)}, as a name, np.dtype, scalar type or torch.dtype; got {dtype!r}"
        )
    return name


def spelled(dtype: DTypeLike) -> str:
    """The name of a dtype in any spelling; "" for what is none, for another byte order and for None, NumPy's float64."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dtype, torch.dtype):
        return str(dtype).removeprefix("torch.")
    if isinstance(dtype, str):
        dtype = dtype.removeprefix("torch.")
        if dtype == "bfloat16":
            return "bfloat16"
    # Arrays have a dtype too, and are none.
    elif not isinstance(dtype, (np.dtype, type)) and (not hasattr(dtype, "dtype") or hasattr(dtype, "shape")):
        return ""
    try:
        found = np.dtype(dtype)
    except TypeError:
        return ""
    return found.name if found.isnative else ""
