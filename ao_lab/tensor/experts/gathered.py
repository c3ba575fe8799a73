"""Experts by number, `w[numbers]` of weights (E, N, K): nothing is copied until something else than a product asks for it.

transformers' "batched_mm", to which `generate` switches for decoding on GPUs, gathers an expert for each choice of a token and
multiplies by `bmm`. A gather of quantized experts that goes into `bmm` becomes a grouped product instead: the choices sorted by
expert on their device, the weights where they are, no host that waits, no shape that depends on values. All else sees the
gathered parts, which are made when they are first read.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from ao_lab.gemm.select import grouped_product, groups_reason, product
from ao_lab.tensor import slicing
from ao_lab.tensor.metadata import PARTS
from ao_lab.tensor.quantized_tensor import QuantizedTensor, wrapper
from fast.device import PLAIN

aten = torch.ops.aten
#: What `torch._grouped_mm` multiplies.
GROUPED = (torch.bfloat16, torch.float16, torch.float32)
#: On GPUs: lengths are multiples of this many elements, of bfloat16, from this compute capability on.
STEP, OLDEST = 8, (8, 0)
#: Recipes' kernels that do not insist on products of another kind.
KERNELS = ("auto", "dequantize")
#: Where the transposed weight is in `_settled`, beside dtypes.
TURNED = "turned"


def _part(name: str) -> Any:
    return property(lambda t: getattr(t.copied, name))


class Gathered(QuantizedTensor):
    """`source[numbers]`; see the module text. The numbers are sorted where they are."""

    source: QuantizedTensor
    #: int64 (S,), from 0.
    numbers: torch.Tensor
    #: int64 (S,): which of them comes where in the sorted ones.
    places: torch.Tensor
    #: int32 (E,): the place after each expert's last.
    ends: torch.Tensor

    @staticmethod
    def __new__(cls, source: QuantizedTensor, *order: torch.Tensor) -> Gathered:
        """The entries of `source` that numbers, places and ends say."""
        shape = (order[0].shape[0], *source.shape[1:])
        result: Gathered = wrapper(cls, shape, source.meta, source.device)  # type: ignore[assignment]
        result.meta, result.source = source.meta, source
        result.numbers, result.places, result.ends = order
        return result

    @property
    def copied(self) -> QuantizedTensor:
        """The entries as they are stored, made when they are first asked for; ValueError where blocks span entries."""
        known: QuantizedTensor | None = self.__dict__.get("_copied")
        if known is None:
            known = self.__dict__["_copied"] = chosen(self.source, self.numbers)
        return known

    codes, scale, outer, zero, input_scale, input_zero = map(_part, PARTS)

    def transposed(self) -> QuantizedTensor:
        """The last two axes the other way round; no parts are made."""
        return Gathered(turned(self.source), self.numbers, self.places, self.ends)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The dense entries, of the whole where blocks span them."""
        if slicing.has_entries(self.source):
            return self.copied.dequantize(dtype)
        return self.source.dequantize(dtype)[self.numbers]

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        return deepcopy(self.copied, memo)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """What it is made of; tracers ask, and no parts are made for them."""
        return ["source", "numbers", "places", "ends"], None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Products as the module text says; what leads to them without a copy; all else of the copied entries."""
        if func is aten.bmm.default:
            return _product(*args)
        found = LAZY[func](*args, **(kwargs or {})) if func in LAZY else None
        if found is not None:
            return return_and_correct_aliasing(func, args, kwargs or {}, found)  # type: ignore[no-untyped-call]
        if (result := func.decompose(*args, **(kwargs or {}))) is not NotImplemented:
            return result  # inference mode sends operations that are made of others
        args, kwargs = tree_map_only(Gathered, lambda t: t.copied, (args, kwargs or {}))
        return func(*args, **kwargs)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], meta: Any, size: Any, stride: Any) -> QuantizedTensor:
        return Gathered(inner["source"], inner["numbers"], inner["places"], inner["ends"])


def _same(t: Gathered, *arguments: Any, **options: Any) -> Gathered:
    return Gathered(t.source, t.numbers, t.places, t.ends)


def _as_it_is(t: Gathered, shape: Any, **options: Any) -> Gathered | None:
    """Views of its own shape, which `matmul` asks for."""
    return _same(t) if tuple(shape) == tuple(t.shape) else None


def _turned(t: Gathered, first: int, second: int) -> QuantizedTensor | None:
    return t.transposed() if {first % 3, second % 3} == {1, 2} else None


#: Views that copy nothing; None where they would.
LAZY: dict[Any, Any] = {
    **dict.fromkeys((aten.detach.default, aten.alias.default), _same),
    **dict.fromkeys(
        (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default), _as_it_is
    ),
    aten.transpose.int: _turned,
}


def gathered(t: QuantizedTensor, index: torch.Tensor) -> QuantizedTensor:
    """t[index] of experts (E, N, K); IndexError for numbers of no expert, as for a dense tensor."""
    every = torch.arange(t.shape[0], device=t.device)
    numbers = every[index]
    ordered, places = torch.sort(numbers, stable=True)
    return Gathered(t, numbers, places, torch.searchsorted(ordered, every, right=True, out_int32=True))


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
    return any(_groups(w, t.dtype, index.shape[0]) for w in (turned(t), t)) or not slicing.has_entries(t)


def turned(t: QuantizedTensor) -> QuantizedTensor:
    """`t.transposed()`, kept with weights that have memory: each token of each layer asks for it."""
    if type(t.codes) not in PLAIN:
        return t.transposed()
    settled = t.__dict__.setdefault("_settled", {})
    if TURNED not in settled:
        settled[TURNED] = t.transposed()
    return settled[TURNED]  # type: ignore[no-any-return]


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left times right, one of them gathered; (W x) is (x' W')'."""
    if isinstance(right, Gathered):
        x = left.dequantize() if isinstance(left, QuantizedTensor) else left
        return _by_expert(x, right.source, right)
    weight: Any = left
    return _by_expert(right.transpose(-2, -1), turned(weight.source), weight).transpose(-2, -1)


def _by_expert(x: torch.Tensor, w: QuantizedTensor, order: Gathered) -> torch.Tensor:
    """x (S, M, K) times w[numbers] (S, K, N), in x's dtype: by groups where that reads less, else by the entries."""
    if _groups(w, x.dtype, x.shape[0]):
        return _by_groups(x, w, order)
    if slicing.has_entries(w):
        return product(x, chosen(w, order.numbers))
    return torch.bmm(x, w.dequantize(x.dtype)[order.numbers])


def _by_groups(x: torch.Tensor, w: QuantizedTensor, order: Gathered) -> torch.Tensor:
    """x sorted by expert, multiplied, and back in its places."""
    many, rows, length = x.shape
    ends = order.ends if isinstance(rows, int) and rows == 1 else order.ends * rows
    ordered = x[order.places].reshape(many * rows, length)
    y = grouped_product(ordered, w, aten._grouped_mm.default, ends).reshape(many, rows, w.shape[2])
    return torch.empty_like(y).index_copy_(0, order.places, y)


def _groups(w: QuantizedTensor, dtype: torch.dtype, many: Any) -> bool:
    """Whether `many` rows of a dtype are multiplied by weights (E, K, N) in groups.

    Where these are read as they are stored; else torch multiplies them all made dense, which is less than the entries made
    dense where these are at least as many, as numbers that a tracer leaves open are taken to be.
    """
    if isinstance(many, int) and many == 0:
        return False
    if groups_reason(w, dtype) is None:
        return True
    more = not isinstance(many, int) or many >= w.shape[0] or not slicing.has_entries(w)
    return more and w.recipe.kernel in KERNELS and _torch_groups(w, dtype)


def _torch_groups(w: QuantizedTensor, dtype: torch.dtype) -> bool:
    """Whether `torch._grouped_mm` takes the dense weights; inductor knows it of bfloat16 alone."""
    if w.is_cuda:
        whole = all(length % STEP == 0 for length in w.shape[1:])
        return dtype == torch.bfloat16 and whole and torch.cuda.get_device_capability(w.device) >= OLDEST
    traced = torch.compiler.is_compiling()
    return w.device.type == "cpu" and (dtype == torch.bfloat16 or (dtype in GROUPED and not traced))


__all__ = ["Gathered", "chosen", "gathered", "turned", "waits"]
