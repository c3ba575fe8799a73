"""Records made of other records, while a program is traced too.

Dynamo runs a function whose result is constant instead of tracing it. Of a record that such a function gives, Dynamo of torch
2.11 knows no origin, and reads its fields but not its key, by which operators are called. So the function gives no record but
the attribute that holds it: attributes are read when they are asked for, where of a dictionary (`reference.schemes.RECORDS`) a
program would see what was in it when it first looked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from itertools import count
from typing import ParamSpec

import torch

from reference import Scheme

Given = ParamSpec("Given")


class _Kept:
    """Records as attributes."""


def derived(make: Callable[Given, Scheme]) -> Callable[Given, Scheme]:
    """A function from text and numbers to a record, which is made once, and which a tracer can read as any other."""
    kept, numbers, places = _Kept(), count(), dict[object, str]()

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def place(*given: str | int) -> str:
        key = *map(type, given), *given  # 1 is True
        if key not in places:
            name = f"record_{next(numbers)}"
            setattr(kept, name, make(*given))  # type: ignore[arg-type, call-arg]
            places.setdefault(key, name)
        return places[key]

    @wraps(make)
    def found(*args: Given.args, **kwargs: Given.kwargs) -> Scheme:
        if kwargs:
            raise TypeError(f"{make.__name__} takes positional arguments, got {', '.join(kwargs)}")
        record: Scheme = getattr(kept, place(*args))
        return record

    return found


__all__ = ["derived"]
