"""Experts by number, `w[numbers]` of weights (E, N, K): nothing is copied until something else than a product asks for it.

transformers' "batched_mm", to which `generate` switches for decoding on GPUs, gathers an expert for each choice of a token and
multiplies by `bmm`. A gather of quantized experts that goes into `bmm` becomes a grouped product instead: the choices sorted by
expert on their device, the weights where they are, no host that waits, no shape that depends on values. Anything else makes it,
and all views of it, a plain `QuantizedTensor` of copied parts. A weight that is written before that is an error.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from ao_lab.gemm.dense import grouped_product, groups_reason
from ao_lab.gemm.select import product
from ao_lab.tensor import slicing
from ao_lab.tensor.metadata import PARTS
from ao_lab.tensor.quantized_tensor import QuantizedTensor, wrapper
from fast.dispatch import PLAIN

aten = torch.ops.aten
#: What `torch._grouped_mm` multiplies.
GROUPED = (torch.bfloat16, torch.float16, torch.float32)
#: Its strides are multiples of this many bytes.
ALIGNED = 16
#: On GPUs it takes bfloat16 alone, from this compute capability on.
OLDEST = (8, 0)
#: Recipes' kernels that do not insist on products of another kind.
KERNELS = ("auto", "dequantize")
#: Where the transposed weight is in `_settled`, beside dtypes.
TRANSPOSED = "transposed"


def _part(name: str) -> Any:
    return property(lambda t: getattr(t.copied, name))


def _of_choice(name: str) -> Any:
    return property(lambda t: getattr(t.choice, name))


class Choice:
    """What a gather and its views wait with: the weight and the numbers, until a copy takes the weight's place."""

    def __init__(self, source: QuantizedTensor, *order: torch.Tensor) -> None:
        """Numbers, int64 (S,), from 0; their places in the sorted ones, int64 (S,); the place after each expert's last one,
        int32 (E,)."""
        self.whole, self.copy = source, None  # type: QuantizedTensor, QuantizedTensor | None
        self.numbers, self.places, self.ends = order
        #: Kept, so that no other part gets the address of one that was replaced.
        self.parts, self.written = source.parts, _writes(source)

    @property
    def source(self) -> QuantizedTensor:
        """The weight; RuntimeError where it is no longer what it was."""
        if _writes(self.whole) != self.written:
            raise RuntimeError(
                f"w[numbers] of {self.whole!r}: the weight was written or replaced after it was indexed, before anything was "
                f"copied; use w[numbers] (and its gradients) before the weight is written, or w[numbers].clone()"
            )
        return self.whole

    def copied(self) -> QuantizedTensor:
        """The entries as they are stored, from now on apart from the weight; ValueError where blocks span entries."""
        if self.copy is None:
            self.copy = chosen(self.source, self.numbers)
            del self.whole, self.parts
        return self.copy


def _writes(t: QuantizedTensor) -> list[tuple[Any, ...]]:
    """What differs once the weight (which alone counts what dispatch writes) or a part is written or replaced."""
    return [(_version(t),), *(_write(part) for part in t.parts.values() if part is not None)]


def _write(part: torch.Tensor) -> tuple[Any, ...]:
    """Tracers' tensors have no address."""
    return id(part), _version(part), part.data_ptr() if type(part) in PLAIN else None


def _version(t: torch.Tensor) -> int | None:
    return None if t.is_inference() else t._version  # which tensors of inference mode do not have


class Gathered(QuantizedTensor):
    """`w[numbers]`, or its last two axes the other way round; see the module text. A plain tensor once it is copied."""

    choice: Choice
    flipped: bool

    @staticmethod
    def __new__(cls, choice: Choice, flipped: bool = False) -> Gathered:
        """The entries of `choice`, as the weight has them or flipped."""
        like = transposed_once(choice.whole) if flipped else choice.whole
        shape = (choice.numbers.shape[0], *like.shape[1:])
        result: Gathered = wrapper(cls, shape, like.meta, like.device)  # type: ignore[assignment]
        result.meta, result.choice, result.flipped = like.meta, choice, flipped
        return result

    codes, scale, outer, zero, input_scale, input_zero, metadata = map(_part, PARTS)
    numbers, places, ends = map(_of_choice, ("numbers", "places", "ends"))

    @property
    def source(self) -> QuantizedTensor:
        """The weight of which these are entries, its axes as here."""
        return transposed_once(self.choice.source) if self.flipped else self.choice.source

    @property
    def copied(self) -> QuantizedTensor:
        """Itself, of parts of its own; ValueError where blocks span entries."""
        if torch.is_inference_mode_enabled() and not self.is_inference():
            with torch.inference_mode(False):  # parts that can be written wherever it can be
                self.choice.copied()
        self.choice.copied()
        return self.settled()

    def settled(self) -> QuantizedTensor:
        """Itself: of a copy's parts where it or a view of it was copied, so that all see what is written to one."""
        if (copy := self.choice.copy) is not None:
            self._become(copy.transposed() if self.flipped else copy)
        return self

    def _become(self, other: QuantizedTensor) -> None:
        """A plain tensor of another one's parts and description."""
        self.__dict__.update(other.parts, meta=other.meta)
        del self.choice, self.flipped
        self.__class__ = QuantizedTensor  # type: ignore[assignment]

    def adopt(self, other: torch.Tensor) -> None:
        """Nothing is copied only to be replaced."""
        if isinstance(other, QuantizedTensor):
            self._become(other)
        QuantizedTensor.adopt(self, other)

    def transposed(self) -> QuantizedTensor:
        """The last two axes the other way round; no parts are made."""
        return (
            Gathered(self.choice, not self.flipped)
            if self.choice.copy is None
            else self.settled().transposed()
        )

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The dense entries, of the whole where blocks span them."""
        if self.choice.copy is not None or slicing.has_entries(self.source):
            return self.copied.dequantize(dtype)
        return self.source.dequantize(dtype)[self.numbers]

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        return deepcopy(self.copied, memo)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """What it is made of; tracers ask, and no parts are made for them."""
        if self.choice.copy is not None:
            return self.settled().__tensor_flatten__()
        return ["source", "numbers", "places", "ends"], None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Products as the module text says; what leads to them without a copy; all else of the copied entries."""
        args, kwargs = tree_map_only(Gathered, Gathered.settled, (args, kwargs or {}))
        if any(isinstance(t, Gathered) for t in args):
            if func is aten.bmm.default:
                return _product(*args)
            found = LAZY[func](*args, **kwargs) if func in LAZY else None
            if found is not None:
                return return_and_correct_aliasing(func, args, kwargs, found)  # type: ignore[no-untyped-call]
            if (result := func.decompose(*args, **kwargs)) is not NotImplemented:
                return result  # inference mode sends operations that are made of others
        args, kwargs = tree_map_only(Gathered, lambda t: t.copied, (args, kwargs))
        return func(*args, **kwargs)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], meta: Any, size: Any, stride: Any) -> QuantizedTensor:
        return Gathered(Choice(inner["source"], inner["numbers"], inner["places"], inner["ends"]))


def _same(t: Gathered) -> Gathered:
    return Gathered(t.choice, t.flipped)


def _traced(t: Gathered) -> Gathered | None:
    """What tracers ask for; elsewhere it is how parameters are made, which are plain."""
    return None if type(t.numbers) in PLAIN else _same(t)


def _as_it_is(t: Gathered, shape: Any, **options: Any) -> Gathered | None:
    """Views of its own shape, which `matmul` asks for."""
    return _same(t) if tuple(shape) == tuple(t.shape) else None


def _transposed(t: Gathered, first: int, second: int) -> QuantizedTensor | None:
    return t.transposed() if {first % 3, second % 3} == {1, 2} else None


#: Views that copy nothing; None where they would.
LAZY: dict[Any, Any] = {
    **dict.fromkeys((aten.detach.default, aten.alias.default), _traced),
    **dict.fromkeys(
        (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default), _as_it_is
    ),
    aten.transpose.int: _transposed,
}


def gathered(t: QuantizedTensor, index: torch.Tensor) -> QuantizedTensor:
    """t[index] of experts (E, N, K); IndexError for numbers of no expert, as for a dense tensor."""
    every = torch.arange(t.shape[0], device=t.device)
    numbers = every[index]
    ordered, places = torch.sort(numbers, stable=True)
    return Gathered(
        Choice(t, numbers, places, torch.searchsorted(ordered, every, right=True, out_int32=True))
    )


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
    return any(
        _groups(w, t.dtype, index.shape[0]) for w in (transposed_once(t), t)
    ) or not slicing.has_entries(t)


def transposed_once(t: QuantizedTensor) -> QuantizedTensor:
    """`t.transposed()`, kept with weights that have memory: each token of each layer asks for it."""
    if type(t.codes) not in PLAIN:
        return t.transposed()
    settled = t.__dict__.setdefault("_settled", {})
    if TRANSPOSED not in settled:
        settled[TRANSPOSED] = t.transposed()
    return settled[TRANSPOSED]  # type: ignore[no-any-return]


def _product(left: Any, right: Any) -> torch.Tensor:
    """left times right, one of them gathered; (W x) is (x' W')'. RuntimeError for shapes that `torch.bmm` does not take."""
    sizes: Any = left.shape, right.shape
    fits = len(sizes[0]) == len(sizes[1]) == 3
    torch._check(  # type: ignore[no-untyped-call]
        fits and sizes[0][0] == sizes[1][0] and sizes[0][2] == sizes[1][1],
        lambda: f"bmm of {tuple(sizes[0])} and {tuple(sizes[1])}: it takes (B, M, K) and (B, K, N)",
    )
    if not isinstance(right, Gathered):
        return _product(right.mT, left.transposed()).mT
    return _by_expert(left.dequantize() if isinstance(left, QuantizedTensor) else left, right.source, right)


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
    dense where these are at least as many. Where a tracer leaves the number open it may be small: then the entries.
    """
    if isinstance(many, int) and many == 0:
        return False
    if groups_reason(w, dtype) is None:
        return True
    more = (isinstance(many, int) and many >= w.shape[0]) or not slicing.has_entries(w)
    return more and w.recipe.kernel in KERNELS and _torch_groups(w, dtype)


def _torch_groups(w: QuantizedTensor, dtype: torch.dtype) -> bool:
    """Whether `torch._grouped_mm` takes the dense weights; inductor knows it of bfloat16 alone."""
    if dtype not in GROUPED or any(length * dtype.itemsize % ALIGNED for length in w.shape[1:]):
        return False
    if w.is_cuda:
        return dtype == torch.bfloat16 and torch.cuda.get_device_capability(w.device) >= OLDEST
    return w.device.type == "cpu" and (dtype == torch.bfloat16 or not torch.compiler.is_compiling())


__all__ = ["Gathered", "chosen", "gathered", "transposed_once", "waits"]
