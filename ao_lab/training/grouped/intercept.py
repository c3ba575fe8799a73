"""Products with experts in a module's own forward, taken over while it runs: the module's code stays as it is.

What is taken over: `torch._grouped_mm` and `torch.nn.functional.grouped_mm` of rows sorted by expert; and products of rows with
one expert's matrix or of a batch with all, where the matrix is the module's own parameter or a view of it. Dynamo does not ask
modes about grouped products, so the module stays out of compiled graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ao_lab.training.grouped.transformers_forward import linear_by
from ao_lab.training.layers import Settings

#: What a forward that can be taken over calls one of, by name.
NAMES = {"grouped_mm", "_grouped_mm", "bmm", "linear", "matmul"}
GROUPED = (
    (torch._grouped_mm, nn.functional.grouped_mm)
    if hasattr(nn.functional, "grouped_mm")
    else (torch._grouped_mm,)
)
MATMULS = (
    torch.matmul,
    torch.mm,
    torch.bmm,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.Tensor.mm,
    torch.Tensor.bmm,
)

#: x (T, K), w (E, N, K), offsets (E,) and the shape of the result.
Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, ...]]


class ExpertProducts(TorchFunctionMode):
    """Sends products with experts to `grouped_linear`, and counts them."""

    def __init__(self, module: nn.Module, settings: Settings) -> None:
        super().__init__()
        self.settings, self.count, self.evaluated = settings, 0, not module.training
        self.own = {p.untyped_storage().data_ptr() for p in module.parameters(recurse=False) if p.dim() == 3}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = self._product(func, args, kwargs)
        if found is None:
            return func(*args, **kwargs)
        self.count += 1
        x, w, offsets, shape = found
        return linear_by(self.settings, x, w, offsets, evaluated=self.evaluated).reshape(shape)

    def _product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found | None:
        """A product with experts; None for anything else."""
        if func in GROUPED:
            return _grouped(*args, **kwargs)
        if len(args) != 2 or kwargs or not self._owns(args[1]):
            return None
        a, b = args
        if func is nn.functional.linear:
            return _of_one(a, b)
        if func in MATMULS:
            return _of_all(a, b) if a.dim() == b.dim() == 3 else _of_one(a, b.transpose(-2, -1))
        return None

    def _owns(self, matrix: Any) -> bool:
        return isinstance(matrix, torch.Tensor) and matrix.untyped_storage().data_ptr() in self.own


def _grouped(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: Any = None,
    out_dtype: Any = None,
) -> Found | None:
    """Rows sorted by expert; not the other forms of torch's function."""
    if a.dim() != 2 or b.dim() != 3 or offs is None or bias is not None or out_dtype not in (None, a.dtype):
        return None
    return a, b.transpose(1, 2), offs, (a.shape[0], b.shape[2])


def _of_one(x: torch.Tensor, w: torch.Tensor) -> Found | None:
    """Rows that are all of one expert."""
    if x.dim() != 2 or w.dim() != 2:
        return None
    offsets = torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device)
    return x, w[None], offsets, (x.shape[0], w.shape[0])


def _of_all(a: torch.Tensor, b: torch.Tensor) -> Found:
    """As many rows for each expert."""
    experts, rows, length = a.shape
    offsets = torch.arange(1, experts + 1, dtype=torch.int32, device=a.device) * rows
    return a.reshape(experts * rows, length), b.transpose(1, 2), offsets, (experts, rows, b.shape[2])


@torch.compiler.disable  # type: ignore[untyped-decorator]
def run_intercepted(
    forward: Callable[..., Any],
    module: nn.Module,
    settings: Settings,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """forward(*args, **kwargs) with its products with experts by the recipe.

    Raises RuntimeError where rows went in and there was no product to take over: the module would train in high precision.
    """
    with ExpertProducts(module, settings) as products:
        result = forward(*args, **kwargs)
    if not products.count and any(isinstance(a, torch.Tensor) and a.numel() for a in args):
        raise RuntimeError(
            f"{type(module).__name__} called no product with its experts that a recipe takes over; leave it out by filter_fn, "
            f"or choose an implementation that calls grouped_mm"
        )
    return result


__all__ = ["NAMES", "ExpertProducts", "run_intercepted"]
