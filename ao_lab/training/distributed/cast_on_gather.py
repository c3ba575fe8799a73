"""`CastOnGather`: a weight that FSDP2 sends as codes of 8 bits, and keeps in its own dtype.

FSDP2 slices the parameter and keeps a shard; optimizers update that shard as they do any other. Before a layer runs FSDP2 asks
the shard what to send (`fsdp_gather` gives the class these methods); what arrives is a `QuantizedTensor`, which the layer
multiplies with as it is.

Operations run on the tensor inside. Views, and copies that FSDP2 and `module.to` make, are of this class again; all other
results are plain tensors, so that the state of optimizers, gradients and checkpoints is plain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

from reference import Scheme

aten = torch.ops.aten
#: Operations whose results share the memory of the shard.
VIEWS = {
    aten.detach.default, aten.alias.default, aten.view.default, aten._unsafe_view.default, aten.as_strided.default,
    aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, aten.lift_fresh.default,
}  # fmt: skip
#: Operations that make another shard of the same kind: FSDP2 pads with `new_zeros`, modules move by the others.
COPIES = {
    aten.clone.default, aten._to_copy.default, aten.empty_like.default, aten.new_zeros.default, aten.new_empty.default,
    aten._pin_memory.default,
}  # fmt: skip


@dataclass(eq=False)
class Amax:
    """The largest magnitude of a whole weight, of which each rank holds a shard; shared by all views of the shard.

    It holds as long as the weight has the version that it was found for; see `gather_scales.version_of`.
    """

    #: float32, 0-d, over all ranks; None: not known.
    amax: torch.Tensor | None = None
    #: The weight's scale, and the dtype that the weight was cast to before; None: not known.
    scale: torch.Tensor | None = None
    dtype: torch.dtype | None = None
    version: tuple[int, ...] | None = None
    #: How many operations have written to the shard.
    writes: int = 0


class CastOnGather(torch.Tensor):
    """A weight, or a shard of its rows, in its own dtype; see the module text. dense: the tensor inside."""

    dense: torch.Tensor
    scheme: Scheme
    known: Amax

    @staticmethod
    def __new__(cls, dense: torch.Tensor, scheme: Scheme, known: Amax | None = None) -> CastOnGather:
        """A tensor over the memory of `dense`, gathered in `scheme`. known: of the shard that this is a view of."""
        made: CastOnGather = torch.Tensor._make_wrapper_subclass(
            cls,
            dense.shape,
            strides=dense.stride(),
            storage_offset=dense.storage_offset(),
            dtype=dense.dtype,
            device=dense.device,
            requires_grad=dense.requires_grad,
        )
        made.dense, made.scheme, made.known = dense, scheme, Amax() if known is None else known
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        shards = [t for t in tree_leaves((args, kwargs)) if isinstance(t, CastOnGather)]
        if func._schema.is_mutable:
            for shard in shards:
                shard.known.writes += 1
        inner_args, inner_kwargs = tree_map_only(CastOnGather, lambda t: t.dense, (args, kwargs))
        result = func(*inner_args, **inner_kwargs)
        first = shards[0]
        if func in VIEWS or func in COPIES:
            known = first.known if func in VIEWS else None
            result = tree_map_only(torch.Tensor, lambda t: CastOnGather(t, first.scheme, known), result)
        if func in VIEWS or func._schema.is_mutable:
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

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A plain tensor in files: what reads them need not know this class."""
        if getattr(self, "_is_param", False):
            return torch.nn.Parameter(self.dense, self.requires_grad).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        return self.dense.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


__all__ = ["Amax", "CastOnGather"]
