"""Methods of transformers' models that look at a weight's memory or change its number of rows, for quantized weights.

`get_memory_footprint()` counts bytes as they are stored. `resize_token_embeddings` draws new rows from the dequantized ones and
leaves the table and the head quantized by their own schemes: rows that stay keep their codes and scales where a scale belongs
to rows of its own, else the whole is quantized again. A table or a head in training (QAT, low precision) stays the layer that
it is; one with tensors of its rows beside its weight (learned scales, adapters, masks) is refused before anything changes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from ao_lab.checkpoint.transformers.sharded import holds_quantized
from ao_lab.quantization.modules import training_state
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from ao_lab.tensor.slicing import block_sizes, has_pieces, is_flat


def put_in() -> None:
    """Put these in place of transformers'; a second call does nothing."""
    from transformers.modeling_utils import PreTrainedModel

    kind: Any = PreTrainedModel
    if getattr(kind.get_memory_footprint, "of_ao_lab", False):
        return
    changed = {"get_memory_footprint": _footprint(kind.get_memory_footprint)}
    for name in ("_get_resized_embeddings", "_get_resized_lm_head"):
        changed[name] = _resizing(getattr(kind, name))
    changed["_resize_token_embeddings"] = _checking(kind._resize_token_embeddings)
    for name, method in changed.items():
        method.of_ao_lab = True
        setattr(kind, name, method)


def _footprint(plain: Any) -> Any:
    @functools.wraps(plain)
    def get_memory_footprint(self: Any, return_buffers: bool = True) -> Any:
        weights = [p for p in self.parameters() if holds_quantized(p)]
        return plain(self, return_buffers) + sum(
            _stored(p) - p.nelement() * p.element_size() for p in weights
        )

    return get_memory_footprint


def _stored(weight: Any) -> int:
    """Bytes of a weight as it is stored; of a sharded one those of all ranks, as transformers counts dense ones."""
    shard = getattr(weight, "_local_tensor", weight)
    return int(shard.nbytes * weight.nelement() // max(shard.nelement(), 1))


def _checking(plain: Any) -> Any:
    @functools.wraps(plain)
    def _resize_token_embeddings(
        self: Any,
        new_num_tokens: int | None,
        pad_to_multiple_of: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        rows = len(self.get_input_embeddings().weight)
        wanted, step = new_num_tokens or rows, pad_to_multiple_of or 1
        if -(-wanted // step) * step != rows:
            _check_rows_alone(self)
        return plain(self, new_num_tokens, pad_to_multiple_of, *args, **kwargs)

    return _resize_token_embeddings


def _check_rows_alone(model: Any) -> None:
    """ValueError where a table or a head in training has more tensors than its weight and bias, which would keep their rows."""
    resized = (model.get_input_embeddings(), model.get_output_embeddings())
    for name, module in model.named_modules():
        if not any(module is one for one in resized) or training_state(module) is None:
            continue
        held = [*module._parameters.items(), *module._buffers.items()]
        beside = [each for each, tensor in held if tensor is not None and each not in ("weight", "bias")]
        if beside:
            raise ValueError(
                f"resize_token_embeddings: {name} is in training with {', '.join(beside)} beside its weight, of as many rows "
                "as it has; resize before the model is prepared (quantize_, sparsify_), or leave this layer out"
            )


def _resizing(plain: Any) -> Any:
    @functools.wraps(plain)
    def resized(self: Any, old: nn.Module, *args: Any, **kwargs: Any) -> Any:
        weight: Any = getattr(old, "weight", None)
        if not isinstance(weight, QuantizedTensor):
            return _in_place(old, plain(self, old, *args, **kwargs))
        old.weight = nn.Parameter(weight.dequantize(), requires_grad=False)
        try:
            new = plain(self, old, *args, **kwargs)
            made = new.weight.detach()
        finally:
            old.weight = weight
        if made.shape != weight.shape:
            kept: Any = weight.detach()
            new.weight = nn.Parameter(joined(kept, made), requires_grad=False)
        return new

    return resized


def _in_place(old: nn.Module, new: Any) -> Any:
    """A head in training takes the rows of the plain one that transformers has made; as it does itself with tables."""
    if new is old or training_state(old) is None:
        return new
    for name, parameter in old.named_parameters(recurse=False):
        parameter.data, parameter.grad = getattr(new, name).data, None
    old.out_features = new.out_features
    return old


def joined(kept: QuantizedTensor, dense: torch.Tensor) -> QuantizedTensor:
    """`dense` in the scheme of `kept`, whose first rows (as many as both have) it has."""
    rows = min(len(kept), len(dense))
    if not _has_rows(kept) or kept.shape[1] != dense.shape[1]:
        return kept.like(dense)
    parts = [kept[:rows]]
    if rows < len(dense):
        parts.append(kept.like(dense[rows:]))
    result: QuantizedTensor = torch.cat(parts) if len(parts) > 1 else parts[0].clone()  # type: ignore[assignment]
    return result


def _has_rows(weight: QuantizedTensor) -> bool:
    """Whether each row has scales and zero points of its own."""
    held = [name for name in ("scale", "outer", "zero") if weight.parts[name] is not None]
    turned = weight.meta.transposed or weight.meta.axis != -1
    if turned or is_flat(weight):
        return False
    return block_sizes(weight)[0] == 1 and all(has_pieces(weight, name, 0) for name in held)


__all__ = ["joined", "put_in"]
