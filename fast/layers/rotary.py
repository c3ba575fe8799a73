"""`rotary` for torch tensors, with its gradient; see `reference.layers.rotary` for the rules.

No name of `fast` itself: attention of models that train calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fast.dispatch import Function, execute, run
from fast.ops import register
from reference.layers import rotary as specified

Values = tuple[Any, ...]
Operands = Sequence[Any]


def rotary(
    x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, *, inverse: bool = False
) -> torch.Tensor:
    """x (B, H, T, D) turned, on its device; its memory is (B, T, H, D). Differentiable in x; tables are constants.

    Arguments, edges and errors as in `reference.layers.rotary.rotary`; x may be a view of (B, T, H, D).
    """
    if cosine.requires_grad or sine.requires_grad:
        raise ValueError("rotary's tables have no gradient, and one of them requires it; detach them")
    y: torch.Tensor = run(ROTARY, None, (inverse, *_strides(x, cosine, sine)), (x, cosine, sine))
    return y


def _strides(*tensors: Any) -> Values:
    try:
        return tuple(t.stride() for t in tensors)
    except (AttributeError, RuntimeError):
        return ()


def rotary_op(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, inverse: bool) -> torch.Tensor:
    """x turned; memory of (B, T, H, D)."""
    y = execute(ROTARY, None, (inverse, *_strides(x, cosine, sine)), (x, cosine, sine))
    return _as_heads(y)


def _as_heads(y: torch.Tensor) -> torch.Tensor:
    """The result where its memory is (B, T, H, D): the reference's is not."""
    return y.transpose(1, 2).contiguous().transpose(1, 2)


def _fake(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, inverse: bool) -> torch.Tensor:
    batch, heads, length, width = x.shape
    return x.new_empty((batch, length, heads, width)).transpose(1, 2)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, cosine, sine, ctx.inverse = inputs
    ctx.save_for_backward(cosine, sine)


def _backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    return rotary(g, *ctx.saved_tensors, inverse=not ctx.inverse), None, None, None


def _kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    from fast.kernels.layers import attention as kernels

    return kernels.rotary(*operands, values[0], key)


ROTARY = Function(
    "rotary", ("x", "cosine", "sine"), lambda r, v, o: _as_heads(specified.rotary(*o, inverse=v[0])),
    lambda r, v, o: ROTARY_OP(*o, v[0]), _kernel, differentiable=True,
)  # fmt: skip
ROTARY_OP = register("rotary", rotary_op, _fake, _backward, _save)


__all__ = ["rotary"]
