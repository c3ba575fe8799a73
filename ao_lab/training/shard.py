"""A weight, or a shard of its rows, that FSDP2 gathers as codes: a tensor around a plain one, which counts what writes to it.

Operations run on the tensor inside. Views share their count with the shard, copies that FSDP2 and `module.to` make have one of
their own, other results are plain tensors. What is sent of a shard, and when it is made anew, is in `ao_lab.training.fsdp`: all
ranks have to come to the same answer, so an operation that reads a shard leaves its count, and one that writes to it belongs on
every rank.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

from ao_lab.tensor.fsdp import Metadata
from reference import Quantized, Scheme

aten = torch.ops.aten
#: Operations whose results share the memory of the shard, beside those of whose schemas torch knows that.
VIEWS = {aten._unsafe_view.default, aten.lift_fresh.default}
#: Operations that make another shard of the same kind: FSDP2 pads with `new_zeros`, modules move by the others.
COPIES = {
    aten.clone.default, aten._to_copy.default, aten.empty_like.default, aten.new_zeros.default, aten.new_empty.default,
    aten._pin_memory.default,
}  # fmt: skip
#: What stays on this rank: the shard's codes and scales, their dtype, what was sent, and a number that no other codes have.
Sent = tuple[Quantized, torch.dtype, Metadata, int]
#: The tensors to gather, and what stays.
Gathered = tuple[tuple[torch.Tensor, ...], Sent]


@dataclass(eq=False)
class Amax:
    """The largest magnitude of a whole weight, of which each rank holds a shard; shared by all views of the shard.

    It holds as long as the weight has the version that it was found for; see `version_of`.
    """

    #: float32, 0-d, over all ranks; None: not known.
    amax: torch.Tensor | None = None
    #: The weight's scale, and the dtype that the weight was cast to before; None: not known.
    scale: torch.Tensor | None = None
    dtype: torch.dtype | None = None
    version: tuple[int, ...] | None = None
    #: The number of the weight among those of its group of ranks, the same on each of them; None: not known.
    place: int | None = None
    #: How many times ranks have agreed to find it again, after writes that a rank may have made alone.
    agreed: int = 0
    #: How many operations have written to the shard, and of these how many to lists of tensors, as optimizers do on every rank.
    writes: int = 0
    writes_of_lists: int = 0
    #: What was sent last, and of which weight, dtype and place (`sent_again`); None once an operation writes to the shard.
    sent: tuple[tuple[Any, ...], Gathered] | None = None
    #: What is sent of a shard in parts, and of which dtype, weight and mesh; None: not known.
    form: tuple[tuple[Any, ...], Metadata] | None = None
    #: Whether a CUDA graph has an operation that writes to the shard: replays of it cannot be seen.
    replayed: bool = False

    def written(self, in_list: bool = False) -> None:
        """Count an operation that writes to the shard; what was made of its values is let go."""
        self.writes += 1
        self.writes_of_lists += in_list
        self.sent = None
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            self.replayed = True


def is_view(func: Any) -> bool:
    """Whether results of an operation share the memory of the shard: a row, rows, the transpose."""
    return func.is_view or func in VIEWS


@lru_cache(maxsize=256)
def writes_first(func: Any) -> bool:
    """Whether an operation writes to the memory of its first argument, to no other, and returns it: most of an optimizer's do.
    They take a short way, since a step has ten of them a weight and a launch waits for each."""
    schema = func._schema
    written = [
        argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments
    ]
    changes_shape = torch.Tag.inplace_view in func.tags or is_view(func)
    return any(written[:1]) and not any(written[1:]) and len(schema.returns) == 1 and not changes_shape


@lru_cache(maxsize=256)
def writes_lists(func: Any) -> bool:
    """Whether an operation writes to the tensors of its first argument, a list, and returns nothing: foreach operations, whose
    lists have every weight of an optimizer."""
    schema = func._schema
    written = [one.alias_info is not None and one.alias_info.is_write for one in schema.arguments]
    return any(written[:1]) and not any(written[1:]) and not schema.returns and takes_lists(func)


@lru_cache(maxsize=256)
def takes_lists(func: Any) -> bool:
    """Whether the first argument of an operation is a list of tensors: foreach operations and fused steps."""
    arguments = func._schema.arguments
    return bool(arguments) and str(arguments[0].type) == "List[Tensor]"


@lru_cache(maxsize=256)
def names_of_arguments(func: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of an operation's arguments, and of those that it writes to."""
    arguments = func._schema.arguments
    written = [one.name for one in arguments if one.alias_info is not None and one.alias_info.is_write]
    return tuple(one.name for one in arguments), tuple(written)


def told(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[CastOnGather]:
    """The shards that learn of an operation: those that it writes to. A shard that is only read (`copy_` into a buffer) stays
    as old as it is on other ranks. Of an operation that writes to nothing, or does not say so, all."""
    names, written = names_of_arguments(func)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    of = [given.get(name) for name in written] if written else given
    return [one for one in tree_leaves(of) if isinstance(one, CastOnGather)]


def tell(known: Amax, func: Any) -> None:
    """Let a shard know of an operation on it: one that writes, or a collective, whose schema does not say that it writes. Ranks
    reduce scales together: a write is only what all of them do."""
    if func._schema.is_mutable:
        known.written(takes_lists(func))
    elif func.namespace == "c10d":
        known.sent = None


def inside(given: Any) -> Any:
    """Plain tensors for shards, alone or in a list."""
    if isinstance(given, (list, tuple)):
        return [one.dense if isinstance(one, CastOnGather) else one for one in given]
    return given.dense if isinstance(given, CastOnGather) else given


def plainly_given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether no tensor is in a list or named."""
    nested = any(isinstance(value, (list, tuple)) for value in args)
    return not nested and not any(isinstance(value, (torch.Tensor, list, tuple)) for value in kwargs.values())


class CastOnGather(torch.Tensor):
    """A weight, or a shard of its rows, in its own dtype; see the module text. dense: the tensor inside."""

    dense: torch.Tensor
    scheme: Scheme
    known: Amax

    @staticmethod
    def __new__(cls, dense: torch.Tensor, scheme: Scheme, known: Amax | None = None) -> CastOnGather:
        """A tensor over the memory of `dense`, gathered in `scheme`. known: of the shard that this is a view of."""
        shard: CastOnGather = torch.Tensor._make_wrapper_subclass(
            cls,
            dense.shape,
            strides=dense.stride(),
            storage_offset=dense.storage_offset(),
            dtype=dense.dtype,
            device=dense.device,
            requires_grad=dense.requires_grad,
        )
        shard.dense, shard.scheme, shard.known = dense, scheme, Amax() if known is None else known
        return shard

    def to_write(self) -> torch.Tensor:
        """The tensor inside, for a kernel that writes to it by its address; counted as a write."""
        self.known.written()
        return self.dense

    def numpy(self, *, force: bool = False) -> Any:
        """A NumPy array of the same memory that can be read, not written to: nobody would see these writes. Errors are those of
        `torch.Tensor.numpy`, for a weight that requires a gradient among them."""
        array = self._plainly().numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """The values as Python numbers, as those of a plain tensor."""
        return self.dense.tolist()

    def __dlpack__(self, **asked: Any) -> Any:
        """The tensor inside, for another library, which may write to it: counted as a write now, later ones are not seen."""
        plain = self._plainly()
        self.known.written()
        return plain.__dlpack__(**asked)

    def __format__(self, spec: str) -> str:
        formatted: str = self.dense.__format__(spec)  # type: ignore[no-untyped-call]
        return formatted

    def _plainly(self) -> torch.Tensor:
        return self.dense.detach().requires_grad_(self.requires_grad)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if writes_lists(func):
            for t in args[0]:
                if isinstance(t, CastOnGather):
                    t.known.written(True)
            func(*(inside(one) for one in args), **{name: inside(one) for name, one in kwargs.items()})
            return None
        if writes_first(func) and isinstance(args[0], CastOnGather) and plainly_given(args, kwargs):
            args[0].known.written()
            func(*(t.dense if isinstance(t, CastOnGather) else t for t in args), **kwargs)
            return args[0]
        shards = [t for t in tree_leaves((args, kwargs)) if isinstance(t, CastOnGather)]
        for shard in told(func, args, kwargs):
            tell(shard.known, func)
        inner_args, inner_kwargs = tree_map_only(CastOnGather, lambda t: t.dense, (args, kwargs))
        result = func(*inner_args, **inner_kwargs)
        first = shards[0]
        if is_view(func) or func in COPIES:
            known = first.known if is_view(func) else None
            result = tree_map_only(torch.Tensor, lambda t: CastOnGather(t, first.scheme, known), result)
        if is_view(func) or func._schema.is_mutable:
            return return_and_correct_aliasing(func, args, kwargs, result)  # type: ignore[no-untyped-call]
        return result

    def __tensor_flatten__(self) -> tuple[list[str], Scheme]:
        return ["dense"], self.scheme  # what compiled programs depend on

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], scheme: Scheme, size: Any, stride: Any
    ) -> CastOnGather:
        return CastOnGather(inner["dense"], scheme)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"CastOnGather({self.scheme.name}, {self.dense!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy as torch makes of a plain tensor: what shared memory does so again. Nothing is known of the copy's weight."""
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:  # torch's refusal
            return super().__deepcopy__(memo)  # type: ignore[no-untyped-call]
        known = memo.setdefault(id(self.known), Amax())
        copied = CastOnGather(copy.deepcopy(self.dense, memo), self.scheme, known)
        memo[id(self)] = copied.requires_grad_(self.requires_grad)
        copied.grad = copy.deepcopy(self.grad, memo)
        rest = {name: value for name, value in self.__dict__.items() if name not in copied.__dict__}
        copied.__dict__.update(copy.deepcopy(rest, memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A plain tensor in files: what reads them need not know this class."""
        if getattr(self, "_is_param", False):
            return torch.nn.Parameter(self.dense, self.requires_grad).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        return self.dense.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


__all__ = ["Amax", "CastOnGather", "Gathered", "Sent"]
