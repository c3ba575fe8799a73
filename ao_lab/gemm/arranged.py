"""What products derive from the parts of a 2:4 weight: made when one is first computed, kept with the codes until a part
changes.

It lies beside the codes and is none of the weight's parts: files, state dicts and collectives never have it, and a copy makes
its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

#: The attribute of codes that holds it, by the names of products.
ATTRIBUTE = "_arranged"


def kept(
    codes: torch.Tensor, metadata: torch.Tensor, name: str, make: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """What `make` made for product `name` of these parts; made anew where one of them has changed.

    ValueError where it has to be made while a CUDA graph is captured: memory of the graph would be kept, and its host waits.
    """
    all_of_them: dict[str, tuple[Any, torch.Tensor]] = codes.__dict__.setdefault(ATTRIBUTE, {})
    state = (_version(codes), _version(metadata), codes.data_ptr(), metadata.data_ptr())
    found = all_of_them.get(name)
    if found is not None and found[0] == state:
        return found[1]
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            f"a 2:4 weight is arranged for {name} once, outside of CUDA graphs; run the layer before capture"
        )
    made = make()
    all_of_them[name] = (state, made)
    return made


def forget_arranged(codes: torch.Tensor) -> None:
    """All that was derived from codes that have changed; tensors do not count changes that an operation of a subclass makes in
    them."""
    codes.__dict__.pop(ATTRIBUTE, None)


def _version(part: torch.Tensor) -> int:
    """Changes so far; tensors of inference mode count none."""
    return -1 if part.is_inference() else part._version


__all__ = ["forget_arranged", "kept"]
