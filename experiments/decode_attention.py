"""Attention of the one token that is being generated, for the model of `decode`: a kernel of its own, the same for all weights.

Between two products of a layer there is little to compute (232 keys of eight heads, 1 MB), so what counts is how many kernels
follow each other. What the compiler makes of rotations, writes into the cache, and attention as plain torch are six, 17 us with
the gaps between them, where all products by 4-bit weights of a layer take 49; cuDNN's attention alone takes 14, torch's
flex_attention 18. This is the part that a serving engine brings along. Bfloat16, our configurations and torchao's all run it.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Keys that a program takes at once, and its warps.
STEP, WARPS = 256, 8


@torch.library.custom_op("ao_lab_decode::attend_one", mutates_args=("keys", "values"), device_types="cuda")
def attend_one(
    qkv: Tensor, cosine: Tensor, sine: Tensor, position: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Attention of one query a head over what the cache holds up to its position; CUDA only.

    qkv: (1, 1, (heads + 2 * kv_heads) * head_width), bfloat16 or float16, queries, keys and values of this token as they come
    from their product; cosine, sine: (1, head_width), of its position, in the same dtype; position: (1), int64, below the
    cache's length; keys, values: (1, kv_heads, length, head_width), contiguous, in the same dtype, where this token's own are
    written. Returns (1, 1, heads * head_width).

    Rotated queries and keys are rounded to their dtype, as they are stored; everything else is float32, rounded at the end.
    """
    from experiments.decode_attention_kernel import attention_kernel

    kv_heads, length, width = keys.shape[1:]
    heads = qkv.shape[-1] // width - 2 * kv_heads
    y = qkv.new_empty(1, 1, heads * width)
    attention_kernel[heads,](
        qkv, cosine, sine, position, keys, values, y, width**-0.5,
        HEADS=heads, KV_HEADS=kv_heads, WIDTH=width, LENGTH=length, STEP=STEP, LATE=True, num_warps=WARPS, launch_pdl=True,
    )  # fmt: skip
    return y


@attend_one.register_fake
def _fake(
    qkv: Tensor, cosine: Tensor, sine: Tensor, position: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    kv_heads, _, width = keys.shape[1:]
    return qkv.new_empty(1, 1, qkv.shape[-1] - 2 * kv_heads * width)


__all__ = ["attend_one"]
