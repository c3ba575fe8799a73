"""Experts by number, `w[numbers]` of weights (E, N, K): nothing is copied until something else than a product asks for it.

transformers' "batched_mm", to which `generate` switches for decoding on GPUs, gathers an expert for each choice of a token and
multiplies by `bmm`. A gather of quantized experts that goes into `bmm` becomes a grouped product instead: the choices sorted by
expert on their device, the weights where they are, no host that waits, no shape that depends on values. All else sees the
gathered parts, which are made when they are first read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ao_lab.gemm.select import grouped_product, groups_reason, product
from ao_lab.tensor import slicing
from ao_lab.tensor.metadata import PARTS
from ao_lab.tensor.quantized_tensor import QuantizedTensor, wrapper

aten = torch.ops.aten
#: What `torch._grouped_mm` multiplies.
GROUPED = (torch.bfloat16, torch.float16, torch.float32)
#: On GPUs its lengths are multiples of this many bytes / 2, of bfloat16, from this compute capability on.
STEP, OLDEST = 8, (8, 0)
#: Recipes' kernels that do not insist on products of another kind.
KERNELS = ("auto", "dequantize")


@dataclass(frozen=True)
class Order:
    """Numbers (S,) of experts, sorted; made on their device."""

    numbers: torch.Tensor
    #: int64 (S,): which number comes where in the sorted ones.
    places: torch.Tensor
    #: int32 (E,): the place after each expert's last.
    ends: torch.Tensor


class Gathered(QuantizedTensor):
    """`source[numbers]`; see the module text."""

    source: QuantizedTensor
    order: Order

    @staticmethod
    def __new__(cls, source: QuantizedTensor, order: Order) -> Gathered:  # type: ignore[misc]
        """The entries of `source` that the order has numbers of."""
        shape = (order.numbers.shape[0], *source.shape[1:])
        result: Gathered = wrapper(cls, shape, source.meta, source.device)  # type: ignore[assignment]
        result.meta, result.source, result.order = source.meta, source, order
        return result

    def __getattr__(self, name: str) -> Any:
        """The parts, when the first of them is read; ValueError where blocks span entries."""
        if name not in PARTS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self.__dict__.update(chosen(self.source, self.order.numbers).parts)
        return self.__dict__[name]

    def transposed(self) -> QuantizedTensor:
        """The last two axes the other way round; no parts are made."""
        return Gathered(self.source.transposed(), self.order)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The dense entries, of the whole where blocks span them."""
        if _gathers(self.source):
            return super().dequantize(dtype)
        return self.source.dequantize(dtype)[self.order.numbers]


def gathered(t: QuantizedTensor, index: torch.Tensor) -> QuantizedTensor:
    """t[index] of experts (E, N, K); IndexError for numbers of no expert, as for a dense tensor."""
    every = torch.arange(t.shape[0], device=t.device)
    numbers = every[index]
    ordered, places = torch.sort(numbers, stable=True)
    ends = torch.searchsorted(ordered, every, right=True, out_int32=True)
    return Gathered(t, Order(numbers, places, ends))


def chosen(t: QuantizedTensor, index: torch.Tensor) -> QuantizedTensor:
    """Copies of the entries along axis 0 that a vector of numbers names; ValueError where blocks span entries."""
    result = slicing.select_rows(t, index)
    if result is None:
        raise ValueError(
            f"indexing of {t!r}: a vector of numbers along axis 0, where no block spans it; dequantize() first"
        )
    return result


def waits(t: QuantizedTensor, index: torch.Tensor) -> bool:
    """Whether t[index] is `gathered`: experts one way round of which a product of groups takes."""
    if type(t) is not QuantizedTensor or len(t.shape) != 3 or t.meta.flat is not None or t.requires_grad:
        return False
    return not _gathers(t) or any(_groups(w, t.dtype, index.shape[0]) for w in (t, t.transposed()))


def gathered_product(x: torch.Tensor, w: Gathered) -> torch.Tensor:
    """x (S, M, K) times w (S, K, N), in x's dtype: by groups where that reads less, else by the entries."""
    source, order = w.source, w.order
    if _groups(source, x.dtype, x.shape[0]):
        return _by_groups(x, order, lambda rows, ends: grouped_product(rows, source, _GROUPED_MM, ends))
    if _gathers(source):
        return product(x, chosen(source, order.numbers))
    return torch.bmm(x, w.dequantize(x.dtype))


_GROUPED_MM = aten._grouped_mm.default


def _by_groups(
    x: torch.Tensor, order: Order, multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """multiply(rows, ends) of x (S, M, K), sorted by expert, back in their places: (S, M, N)."""
    many, rows, length = x.shape
    ends = order.ends if isinstance(rows, int) and rows == 1 else order.ends * rows
    y = multiply(x[order.places].reshape(many * rows, length), ends).reshape(many, rows, -1)
    return torch.empty_like(y).index_copy_(0, order.places, y)


def _gathers(t: QuantizedTensor) -> bool:
    """Whether entries are copied as they are stored."""
    return slicing.has_entries(t)


def _groups(w: QuantizedTensor, dtype: torch.dtype, many: Any) -> bool:
    """Whether `many` rows of a dtype are multiplied by weights (E, K, N) in groups.

    Where these are read as they are stored; else torch multiplies them all made dense, which is less than the entries made
    dense where these are at least as many, as numbers that a tracer leaves open are taken to be.
    """
    if isinstance(many, int) and many == 0:
        return False
    if groups_reason(w, dtype) is None:
        return True
    more = not isinstance(many, int) or many >= w.shape[0] or not _gathers(w)
    return more and w.recipe.kernel in KERNELS and _torch_groups(w, dtype)


def _torch_groups(w: QuantizedTensor, dtype: torch.dtype) -> bool:
    """Whether `torch._grouped_mm` takes the dense weights; inductor knows it of bfloat16 alone."""
    if w.is_cuda:
        whole = all(length % STEP == 0 for length in w.shape[1:])
        return dtype == torch.bfloat16 and whole and torch.cuda.get_device_capability(w.device) >= OLDEST
    traced = torch.compiler.is_compiling()
    return w.device.type == "cpu" and (dtype == torch.bfloat16 or (dtype in GROUPED and not traced))


__all__ = ["Gathered", "chosen", "gathered", "gathered_product", "waits"]
