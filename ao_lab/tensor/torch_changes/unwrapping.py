"""Quantized weights taken apart for compiled programs, where torch does that slowly.

A compiled program has plain tensors as inputs; before each call torch takes every subclass apart. torch 2.13 writes code for
that while it compiles. Before, a function walks over the inputs, and asks each subclass for its sizes and strides through
`__torch_function__`, whether or not the program has sizes that are left open (times: reports/LOG.md). In its place
weights whose sizes are known give their parts by name; all else goes torch's way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch

PACKAGE = "torch._functorch._aot_autograd"
#: The module whose function of this name takes inputs apart, and the one that versions have which write code for it.
MODULE, NAME, CODE = f"{PACKAGE}.runtime_wrappers", "runtime_unwrap_tensor_subclasses", "subclass_codegen"
TENSOR = torch.Tensor
PLAIN = (TENSOR, torch.nn.Parameter, int)

Unwrap = Callable[..., list[Any]]


def unwrap_by_names(kind: type) -> None:
    """Let torch take tensors of `kind` and its subclasses apart by the names that they give; after `MODULE` is imported."""
    wrappers: Any = sys.modules[MODULE]
    if hasattr(wrappers, NAME) and find_spec(f"{PACKAGE}.{CODE}") is None:
        setattr(wrappers, NAME, unwrapping(getattr(wrappers, NAME), kind))


def unwrapping(plain: Unwrap, kind: type) -> Unwrap:
    """torch's function `plain`, but for tensors of `kind` whose sizes a program knows and whose parts are plain tensors."""

    def unwrap(
        wrapped_args: list[Any], *, append_symints: bool, subclass_metas: Sequence[Any] | None = None
    ) -> list[Any]:
        options = {"append_symints": append_symints}
        if subclass_metas is None:
            return plain(wrapped_args, **options, subclass_metas=None)
        result: list[Any] = []
        for at, arg in enumerate(wrapped_args):
            if type(arg) in PLAIN:
                result.append(arg)
                continue
            meta = subclass_metas[at]
            parts = known_parts(arg, meta) if isinstance(arg, kind) else None
            result += plain([arg], **options, subclass_metas=[meta]) if parts is None else parts
        return result

    return unwrap


def known_parts(tensor: Any, meta: Any) -> list[torch.Tensor] | None:
    """The tensors inside, in the order of their names; None where torch has to look: at open sizes (None in `meta`), and at
    parts that have parts themselves."""
    if None in meta.outer_size or None in meta.outer_stride:
        return None
    held = tensor.__dict__
    names, _ = held.get("_flattened") or tensor.__tensor_flatten__()
    parts = [held[name] for name in names]
    for part in parts:  # a loop: faster than all(...) of two or three
        if type(part) is not TENSOR:
            return None
    return parts


__all__ = ["MODULE", "known_parts", "unwrap_by_names", "unwrapping"]
