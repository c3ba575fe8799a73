"""Products with experts in a module's own forward, taken over while it runs: the module's code stays as it is.

What is taken over: `torch._grouped_mm` and `torch.nn.functional.grouped_mm` of rows sorted by expert; and products of rows with
one expert's matrix or of a batch with all, where the matrix is the module's own parameter, a view of it, or such a one in
another dtype. Every other product with experts (einsum, baddbmm, a matrix on the left) raises RuntimeError before it runs, and
so does a forward in which some parameter of experts was in no product: nothing trains in high precision unseen. Dynamo does not
ask modes about grouped products, so the module stays out of compiled graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ao_lab.quantization.modules import is_batch
from ao_lab.training.grouped.transformers_forward import linear_by
from ao_lab.training.layers import Settings
from ao_lab.training.transforms.support import check_experts_traced

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
#: Names of functions that multiply matrices.
MULTIPLIES = {
    "linear", "matmul", "mm", "bmm", "mv", "dot", "inner", "einsum", "tensordot", "addmm", "addmm_", "baddbmm", "baddbmm_",
    "addbmm", "addmv", "chain_matmul", "multi_dot", "linalg_multi_dot", "bilinear", "grouped_mm", "_grouped_mm", "_scaled_mm",
    "_scaled_grouped_mm", "__matmul__", "__rmatmul__",
}  # fmt: skip
WAY_OUT = "leave it out by filter_fn, or choose an implementation that calls grouped_mm"

#: x (T, K), w (E, N, K), offsets (E,) and the shape of the result.
Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, ...]]


class ExpertProducts(TorchFunctionMode):
    """Sends products with experts to `grouped_linear`, and notes of which parameters they were."""

    def __init__(self, module: nn.Module, settings: Settings) -> None:
        super().__init__()
        self.module, self.settings, self.evaluated = module, settings, not module.training
        #: Names of parameters with three axes by the memory of these, of views, and of copies in another dtype.
        self.own = {
            _memory(p): frozenset([name])
            for name, p in module.named_parameters(recurse=False)
            if p.dim() == 3
        }
        self.seen: set[str] = set()
        #: Copies whose memory `own` knows: while they are held nothing else gets it.
        self.held: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [*_tensors(args, kwargs)]
        owners = [names for t in given if (names := self._names(t))]
        if not owners and func not in GROUPED:
            return func(*args, **kwargs)
        found = self._product(func, args, kwargs)
        if found is not None:
            self.seen.update(*owners)
            x, w, offsets, shape = found
            y = linear_by(self.settings, x, w, offsets, evaluated=self.evaluated).reshape(shape)
            bias = _bias(func, args, kwargs)
            return y if bias is None else y + bias.to(y.dtype)
        if getattr(func, "__name__", "") in MULTIPLIES:
            self._refuse(func, frozenset().union(*owners))
        result = func(*args, **kwargs)
        return self._noted(result, given, owners) if len(owners) == len(given) else result

    def _noted(self, result: Any, given: list[torch.Tensor], owners: list[frozenset[str]]) -> Any:
        """The result of a function of experts alone; a cast, a copy, or matrices put together are theirs too."""
        if not isinstance(result, torch.Tensor) or result.numel() != sum(t.numel() for t in given):
            return result
        if (key := _memory(result)) not in self.own:
            self.own[key] = frozenset().union(*owners)
            self.held.append(result)
        return result

    def _refuse(self, func: Any, names: frozenset[str]) -> None:
        kind, name = type(self.module).__name__, getattr(func, "__name__", str(func))
        which = ", ".join(sorted(names)) or "its experts"
        raise RuntimeError(
            f"{kind} multiplies {which} by {name} in a way that a recipe does not take over, and would do so in high "
            f"precision; {WAY_OUT}"
        )

    def check_all_seen(self) -> None:
        """RuntimeError where a parameter of experts was in no product that was taken over."""
        names = [
            n for n, p in self.module.named_parameters(recurse=False) if is_batch(p) and 1 not in p.shape
        ]
        missing = [name for name in names if name not in self.seen]
        if missing:
            raise RuntimeError(
                f"{type(self.module).__name__} called no product with its experts that a recipe takes over, of "
                f"{', '.join(missing)}; {WAY_OUT}"
            )

    def _product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found | None:
        """A product with experts; None for anything else."""
        if func in GROUPED:
            return _grouped(*args, **kwargs)
        if func is nn.functional.linear:
            given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
            a, b = given["input"], given["weight"]
            return _of_one(a, b) if self._names(b) and not self._names(a) else None
        if func not in MATMULS or len(args) + len(kwargs) != 2:
            return None
        a, b = args[0] if args else kwargs["input"], args[1] if len(args) > 1 else [*kwargs.values()][-1]
        if not self._names(b) or self._names(a) or b.dim() not in (2, 3):
            return None
        return _of_all(a, b) if b.dim() == 3 else _of_one(a, b.transpose(-2, -1))

    def _names(self, matrix: Any) -> frozenset[str]:
        """The parameters that a tensor is of; none for other tensors."""
        return self.own.get(_memory(matrix), frozenset()) if isinstance(matrix, torch.Tensor) else frozenset()


def is_matrices(parameter: torch.Tensor) -> bool:
    """Whether a parameter is of matrices, one for each expert: not of biases with an axis of one entry."""
    return is_batch(parameter) and 1 not in parameter.shape


def _memory(x: torch.Tensor) -> int:
    """What tells a tensor's memory from others, which its views share; of a DTensor that of this rank's part."""
    return int(getattr(x, "_local_tensor", x).untyped_storage()._cdata)


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that a function is given, those in its lists too."""
    for value in (*args, *kwargs.values()):
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(one, torch.Tensor):
                yield one


def _bias(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The bias of torch's linear layer."""
    if func is not nn.functional.linear:
        return None
    given: torch.Tensor | None = args[2] if len(args) > 2 else kwargs.get("bias")
    return given


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
    """Rows (..., K) that are all of one expert."""
    if not x.dim() or w.dim() != 2:
        return None
    rows = x.reshape(-1, x.shape[-1])
    offsets = torch.full((1,), rows.shape[0], dtype=torch.int32, device=x.device)
    return rows, w[None], offsets, (*x.shape[:-1], w.shape[0])


def _of_all(a: torch.Tensor, b: torch.Tensor) -> Found | None:
    """As many rows for each expert."""
    if a.dim() != 3 or a.shape[0] != b.shape[0]:
        return None
    experts, rows, length = a.shape
    offsets = torch.arange(1, experts + 1, dtype=torch.int32, device=a.device) * rows
    return a.reshape(experts * rows, length), b.transpose(1, 2), offsets, (experts, rows, b.shape[2])


@torch.compiler.disable(  # type: ignore[no-untyped-call, untyped-decorator]
    reason="ao_lab: a module's products with its experts are taken over while it runs; call torch.compile without "
    "fullgraph=True"
)
def run_intercepted(
    forward: Callable[..., Any],
    module: nn.Module,
    settings: Settings,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """forward(*args, **kwargs) with its products with experts by the recipe.

    Raises RuntimeError where rows went in and a parameter of experts was in no product to take over: it would train in high
    precision.
    """
    check_experts_traced(next(p for p in module.parameters(recurse=False) if p.dim() == 3))
    with ExpertProducts(module, settings) as products:
        result = forward(*args, **kwargs)
    if any(t.numel() for t in _tensors(args, kwargs)):
        products.check_all_seen()
    return result


__all__ = ["NAMES", "ExpertProducts", "is_matrices", "run_intercepted"]
