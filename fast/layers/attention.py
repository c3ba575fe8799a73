"""What attention needs beside products; no names of `fast` itself.

`rotary`, with its gradient: attention of models that train calls it; see `reference.layers.rotary` for the rules.

`attend_one`: attention of a single generated token over a static cache, one kernel, the same for all weights. It has no
scheme, no reference and no gradient, and runs on CUDA alone. `experiments.decode` calls it.

Between two products of a layer there is little to compute, so what counts is how many kernels follow each other: compiled from
plain torch, rotary embedding, cache writes and attention are six (times: reports/LOG.md). A serving engine has such a kernel.
Bfloat16, our configurations and torchao's all run it.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from fast.dispatch import Function, execute, run
from fast.ops import register, strides
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
    y: torch.Tensor = run(ROTARY, None, (inverse, *strides(x, cosine, sine)), (x, cosine, sine))
    return y


def rotary_op(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, inverse: bool) -> torch.Tensor:
    """x turned; memory of (B, T, H, D)."""
    y = execute(ROTARY, None, (inverse, *strides(x, cosine, sine)), (x, cosine, sine))
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
ROTARY_OP = register("rotary", rotary_op, _fake, _backward, _save, linear_in=(0,))


#: Keys that a program loads at once.
STEP = 256
#: Warps of a program.
WARPS = 8
#: Evaluated at import, since tracers do not follow find_spec.
HAS_TRITON = find_spec("triton") is not None


@torch.library.custom_op("ao_lab_decode::attend_one", mutates_args=("keys", "values"), device_types="cuda")
def attend_one(
    qkv: Tensor, cosine: Tensor, sine: Tensor, position: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Attention of one query a head over what the cache holds up to its position; CUDA only.

    qkv: (1, 1, (heads + 2 * kv_heads) * head_dim), bfloat16 or float16, queries, keys and values of this token as they come
    from their product; cosine, sine: (1, head_dim), of its position, in the same dtype; position: (1), int64, below the
    cache's length; keys, values: (1, kv_heads, length, head_dim), contiguous, in the same dtype, where this token's own are
    written. Returns (1, 1, heads * head_dim).

    Rotated queries and keys are rounded to their dtype, as they are stored; everything else is float32, rounded at the end.
    ValueError for other sizes, and for a head_dim that is no power of two. The online softmax is that of Milakov and
    Gimelshein, 2018 (arXiv 1805.02867).
    """
    from fast.kernels.layers.attention import attention_kernel

    kv_heads, length, width = checked_sizes(qkv, keys, values)
    heads = qkv.shape[-1] // width - 2 * kv_heads
    y = qkv.new_empty(1, 1, heads * width)
    # Hopper and later: programmatic dependent launch; the kernel loads the cache while the one before it ends.
    use_pdl = torch.cuda.get_device_capability(qkv.device) >= (9, 0)
    with torch.cuda.device_of(qkv):  # Triton launches on the current one
        attention_kernel[heads,](
            qkv, cosine, sine, position, keys, values, y, width**-0.5,
            HEADS=heads, KV_HEADS=kv_heads, WIDTH=width, LENGTH=length, STEP=STEP, USE_PDL=use_pdl,
            num_warps=WARPS, launch_pdl=use_pdl,
        )  # fmt: skip
    return y


def checked_sizes(qkv: Tensor, keys: Tensor, values: Tensor) -> tuple[int, int, int]:
    """Key-value heads, positions and head_dim; ValueError for what `attend_one` does not handle."""
    kv_heads, length, width = keys.shape[1:]
    single = qkv.shape[:2] == (1, 1) and keys.shape[0] == 1 and values.shape == keys.shape
    if not single or width & (width - 1) or not (keys.is_contiguous() and values.is_contiguous()):
        raise ValueError(
            f"attend_one takes one token of one text, contiguous caches and heads of a power of two; got {tuple(qkv.shape)} "
            f"and caches of {tuple(keys.shape)} and {tuple(values.shape)}; use torch's scaled_dot_product_attention otherwise"
        )
    return kv_heads, length, width


def supports(qkv: Tensor) -> bool:
    """Whether `attend_one` handles this product: one token, on a GPU, with triton installed."""
    return qkv.shape[:2] == (1, 1) and qkv.is_cuda and HAS_TRITON


@attend_one.register_fake
def _decode_fake(
    qkv: Tensor, cosine: Tensor, sine: Tensor, position: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    kv_heads, _, width = keys.shape[1:]
    return qkv.new_empty(1, 1, qkv.shape[-1] - 2 * kv_heads * width)


__all__ = ["attend_one", "rotary", "supports"]
