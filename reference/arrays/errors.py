"""Arguments that are names: of a record, of a choice, of a dtype; errors say what was given, the rule, and the way out."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

Record = TypeVar("Record")
#: How many names a message gives.
NAMED = 3
#: Of how many it gives all where no command lists them.
LONGEST_LIST = 16
#: Of which records `ao-lab formats`, `ao-lab schemes` and `ao-lab configs` list the names.
LISTED = ("format", "scheme", "config")


def lookup(name: object, table: Mapping[str, Record], what: str) -> Record:
    """`table[name]`, or ValueError with the nearest names, or where all are listed (TypeError if `name` is no string)."""
    if not isinstance(name, str):
        raise TypeError(f"a {what} is given by name or as a record, got {type(name).__name__}: {name!r}")
    if name not in table:
        raise ValueError(f"unknown {what} {name!r}; {_nearest(name, table, what)}")
    return table[name]


def choice(value: object, allowed: tuple[str, ...], what: str) -> str:
    """`value` if it is one of `allowed`, else ValueError that lists them."""
    if value not in allowed:
        raise ValueError(f"{what} is one of {', '.join(allowed)}; got {value!r}")
    return str(value)


def _nearest(name: str, table: Mapping[str, object], what: str) -> str:
    """A few names like this one, those that hold it first; else the first few, and what lists all."""
    inside = [known for known in table if name and name.lower() in known.lower()]
    similar = difflib.get_close_matches(name, table, n=NAMED, cutoff=0.4)
    close = list(dict.fromkeys([*sorted(inside, key=len), *similar]))[:NAMED]
    if close:
        return f"the nearest are {', '.join(close)}"
    known = sorted(table)
    if len(known) <= (NAMED if what in LISTED else LONGEST_LIST):
        return f"known are {', '.join(known)}"
    some = f"known are {', '.join(known[:NAMED])} and {len(known) - NAMED} more"
    return f"{some}; `ao-lab {what}s` lists them" if what in LISTED else some


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
