"""`quantized_attention` for torch tensors: both matmuls of attention with operands in 8 bits, for prefill; forward alone.

See `reference.attention.quantized` for the rules. CPU tensors: the reference. CUDA tensors: the kernels of
`fast.kernels.attention` (`refusal` says what they do not take).
"""

from __future__ import annotations

import math

import torch

from fast.dispatch import wants_gradient
from reference.attention import quantized as specified
from reference.attention.attention import check_heads
from reference.attention.quantized import AttentionRecipe, attention_recipe_of
from reference.schemes.schemes import record_of

#: What stands for no offset of a causal edge, and for no window, in the operator.
NONE = -(1 << 31)
#: Places beyond do not fit kernels' 32-bit integers.
FARTHEST = 1 << 30


def quantized_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    recipe: str | AttentionRecipe = "int8",
    *,
    scale: float | None = None,
    causal: bool = False,
    offset: int | None = None,
    window: int | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of q (B, H, T, D) over k (B, KV, S, D) and v (B, KV, S, Dv), in q's dtype: (B, H, T, Dv), memory (B, T, H, Dv).

    Arguments, edges and errors as in the reference. mask: bool, which broadcasts to (B, H, T, S). No gradient: ValueError where
    one is wanted. ValueError on a GPU for what no kernel takes.
    """
    check_heads(tuple(q.shape), tuple(k.shape), tuple(v.shape))
    if wants_gradient((q, k, v)):
        raise ValueError(
            "attention in 8 bits has no gradient; call it under torch.no_grad(), or train with "
            "torch.nn.functional.scaled_dot_product_attention"
        )
    recipe = attention_recipe_of(recipe)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    if not causal and (offset is not None or window is not None):
        specified.visible((1, 1, 1, 1), causal, offset, window, None)  # says what is wrong
    if offset is not None and abs(offset) > FARTHEST:
        raise ValueError(f"offset is the place of the first query, {-FARTHEST} to {FARTHEST}; got {offset!r}")
    y: torch.Tensor = torch.ops.ao_lab.quantized_attention(
        q, k, v, *(scheme.key for scheme in recipe.schemes), recipe.rotate, recipe.center, recipe.chain, scale, causal,
        NONE if offset is None else offset, NONE if window is None else window, mask,
    )  # fmt: skip
    return y


@torch.library.custom_op("ao_lab::quantized_attention", mutates_args=())
def quantized_attention_operator(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query: str,
    key: str,
    value: str,
    rotate: bool,
    center: bool,
    chain: int,
    scale: float,
    causal: bool,
    offset: int,
    window: int,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """`quantized_attention` as an operator, which compiled programs call."""
    schemes = (record_of(name) for name in (query, key, value))
    recipe = AttentionRecipe(
        **dict(zip(("query", "key", "value"), schemes, strict=True)),
        rotate=rotate,
        center=center,
        chain=chain,
    )
    options = {
        "scale": scale, "causal": causal, "offset": None if offset == NONE else offset,
        "window": None if window == NONE else window, "mask": mask,
    }  # fmt: skip
    if q.is_cuda:
        from fast.kernels.attention import prefill

        with torch.cuda.device_of(q):  # Triton launches on the current one
            return prefill.attention(q, k, v, recipe, **options)
    y: torch.Tensor = specified.quantized_attention(q, k, v, recipe, **options)
    return y.transpose(1, 2).contiguous().transpose(1, 2)


@quantized_attention_operator.register_fake
def _fake(
    q, k, v, query, key, value, rotate, center, chain, scale, causal, offset, window, mask
):  # type: ignore[no-untyped-def] # fmt: skip
    batch, heads, tokens, _ = q.shape
    return q.new_empty((batch, tokens, heads, v.shape[-1])).transpose(1, 2)


__all__ = ["quantized_attention"]
