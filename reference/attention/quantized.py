"""Attention whose two matmuls multiply 8-bit operands: queries by keys in int8 or e4m3, softmax's weights by values in e4m3.

With q (T, D), k and v (S, D) of a head, H a Hadamard transform of head_dim and f = scale log2(e):

1. m = mean of the keys that any query sees, in float32; k' = (k - m) H, q' = q H, in float32 (`rotate`, `center`).
2. q', k' and v become codes by the recipe's schemes: q' and k' along head_dim, v along tokens, a scale for each channel.
3. s = f q' k'^T of what the codes stand for; t = ceil(max s) of each row; p = e4m3(256 2^(s - t)).
4. y = (p v) / (sum of p), of the rounded weights, so that they add up to one.

**Exact steps.** H is orthogonal, so q' k'^T = q (k - m)^T, which is q k^T less q m, a constant of the row, and softmax of a row
is unchanged by a constant. t is a power of two's exponent: a running maximum in a kernel rescales sums exactly, and what e4m3
rounds a weight to does not depend on the order of blocks, except for weights below 2^-14 of the largest. Inexact are the
three roundings to 8 bits, and p's.

**Which of the options, measured** on queries, keys and values of trained models: `experiments/prefill_attention`. Removing
the mean of v, as some do, loses more than it gains where the sum is of rounded weights; and the other way round.

**Sums over tokens** (`accumulation="hopper_fp8"`): FP8 products by the tensor core's 14-bit sums, in chains of so many tokens
that are added in float32 (`AttentionRecipe.chain`), by `reference.matmul.tensor_core_model`.

**What a kernel may add** (`quantized_attention_error_bound`), u = 2^-24. Integer scores are exact; those of e4m3 are off by
the tensor core's bound. The exponent of a weight is off by 8 u (|s| + |s - t| + 8), the exponential by 2^-22 more, relatively:
e in all. A weight's code then differs where (1 + e) or (1 - e) times it rounds differently, and by half a step of a
subnormal (2^-10, or 2^-9 where t is one more) where it is below 2^-5. With dp_j the most that all this moves p_j,

    |dy| <= (sum dp_j |v_j| + |y| sum dp_j) / (P - sum dp_j) + error of sums,  P = sum p_j,

and half a unit of the output's dtype. Sums in float32, in any order: gamma(S + 8) sum p_j (|v_j| + |y|) / P; chains in 14
bits: every step of 32 tokens cuts its 32 products and the sum before, and delivers a sum, each to 2^-13 of the largest of
these: at most 34 2^-13 max.

Sources: SageAttention, arXiv 2410.02367 (int8, mean key); SageAttention2, arXiv 2411.10958 (FP8 values, two-level sums);
FlashAttention-3, arXiv 2407.08608 (FP8, Hadamard); QuaRot, arXiv 2404.00456. Bounds and the power-of-two maximum are ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from reference.arrays.namespace import Array, DTypeLike, and_nearest, choice, dtype_name
from reference.attention.attention import ACCUMULATIONS, OUTPUTS, PEAK, check_heads
from reference.formats.encode import decode, encode
from reference.layers.hadamard import hadamard
from reference.matmul.error_bound import gamma, rounding_error
from reference.matmul.exact import F64, round_result
from reference.matmul.operands import from_host, to_host
from reference.matmul.tensor_core_model import TensorCore, parts_of, tensor_core_matmul
from reference.quantize.quantize import Quantized, dequantize, quantize
from reference.schemes.schemes import SCHEMES, Scheme, scheme_of

WEIGHT = "float8_e4m3fn"
LOG2E = 1.4426950408889634
#: Queries whose weights are held at a time.
QUERIES = 256
#: Elements that scores are multiplied in; sums of the first are exact.
INTEGER = "int8"
SCORES = (INTEGER, WEIGHT)


@dataclass(frozen=True, kw_only=True)
class AttentionRecipe:
    """How queries, keys and values are quantized to 8 bits.

    query, key: schemes of queries and keys along head_dim, of the same element, int8 or float8_e4m3fn; key may have blocks of
    (tokens, head_dim). value: a scheme of float8_e4m3fn along tokens. rotate: Hadamard's transform of head_dim on queries and
    keys (of the largest power of two that divides it). center: the mean key is removed. chain: tokens that the tensor
    core accumulates before they are added to float32 sums, a multiple of 32.

    ValueError for other elements, scales of the whole tensor or with zero points, and chains of another length.
    """

    query: str | Scheme = "int8_rowwise"
    key: str | Scheme = "int8_rowwise"
    value: str | Scheme = "fp8_rowwise"
    rotate: bool = True
    center: bool = True
    chain: int = 128

    def __post_init__(self) -> None:
        for name in ("query", "key", "value"):
            object.__setattr__(self, name, scheme_of(getattr(self, name)))
        query, key, value = self.schemes
        for scheme in self.schemes:
            if scheme.zero is not None or scheme.outer is not None or scheme.scale.storage != "float32":
                raise ValueError(
                    f"attention in 8 bits takes schemes with float32 scales alone, got {scheme.name}; use int8_rowwise or "
                    "fp8_rowwise"
                )
        if query.element not in SCORES or query.element != key.element or value.element != WEIGHT:
            raise ValueError(
                f"queries and keys are both int8 or both {WEIGHT}, values {WEIGHT}; got {query.element}, {key.element} and "
                f"{value.element}"
            )
        if type(self.chain) is not int or self.chain < 32 or self.chain % 32:
            raise ValueError(f"chain is a multiple of 32 tokens, got {self.chain!r}")

    @property
    def schemes(self) -> tuple[Scheme, Scheme, Scheme]:
        """Records of queries, keys and values."""
        return self.query, self.key, self.value  # type: ignore[return-value]  # names became records in __post_init__

    def __str__(self) -> str:
        query, key, value = (scheme.name for scheme in self.schemes)
        options = ", rotated" * self.rotate + ", mean key removed" * self.center
        return f"queries {query}, keys {key}, values {value} by channels, weights e4m3{options}"


def by_blocks(scheme: str, tokens: int) -> Scheme:
    """A scheme with one scale for so many tokens of a head, whatever its width up to 1024."""
    record = SCHEMES[scheme]
    scale = replace(record.scale, block=(tokens, 1024), partial=True)
    return replace(record, name=f"{record.element}_{tokens}_tokens", scale=scale)


#: Recipes by name.
ATTENTION_RECIPES: Mapping[str, AttentionRecipe] = {
    "int8": AttentionRecipe(),
    "int8_block": AttentionRecipe(key=by_blocks("int8_rowwise", 128)),
    "fp8": AttentionRecipe(query="fp8_rowwise", key="fp8_rowwise"),
}


def attention_recipe_of(recipe: Any) -> AttentionRecipe:
    """The recipe of a name, or itself; ValueError for unknown names, TypeError for anything else."""
    if isinstance(recipe, AttentionRecipe):
        return recipe
    if not isinstance(recipe, str):
        raise TypeError(
            f"a recipe is an AttentionRecipe or a name of one, got {type(recipe).__name__}: {recipe!r:.60}"
        )
    if recipe not in ATTENTION_RECIPES:
        raise ValueError(
            f"no recipe of attention is called {recipe!r}{and_nearest(recipe, ATTENTION_RECIPES)}; names are "
            f"{', '.join(ATTENTION_RECIPES)}, or give an AttentionRecipe"
        )
    return ATTENTION_RECIPES[recipe]


class Operands(NamedTuple):
    """q, k and v as codes, in NumPy, and the mean key (B, KV, 1, D), None where it is not removed."""

    q: Quantized
    k: Quantized
    v: Quantized
    mean: Any


def quantize_operands(
    q: Array,
    k: Array,
    v: Array,
    recipe: str | AttentionRecipe = "int8",
    *,
    seen: Any = None,
    mean: Any = None,
) -> Operands:
    """What the matmuls of attention multiply: steps 1 and 2.

    q (B, H, T, D), k (B, KV, S, D), v (B, KV, S, Dv): float32, bfloat16 or float16. seen: bool (B, S), keys that any query
    sees; the others are zeros. mean: float32 (B, KV, 1, D) to be removed instead of the keys' own: that is how a kernel, whose
    sum has another order, is compared bit for bit.
    """
    recipe = attention_recipe_of(recipe)
    hosts = [to_host(x, name)[0].astype(np.float32) for x, name in ((q, "q"), (k, "k"), (v, "v"))]
    check_heads(*(x.shape for x in hosts))
    hosts[1:] = _hidden(hosts[1:], seen)
    if not recipe.center:
        mean = None
    elif mean is None:
        mean = mean_key(hosts[1], seen)
    else:
        mean = to_host(mean, "mean")[0].astype(np.float32)
    if mean is not None:
        hosts[1:2] = _hidden([_difference(hosts[1], mean)], seen)
    if recipe.rotate:
        width = hosts[0].shape[-1]
        hosts[:2] = [np.asarray(hadamard(x, width & -width)) for x in hosts[:2]]
    query, key, value = recipe.schemes
    return Operands(
        quantize(hosts[0], query), quantize(hosts[1], key), quantize(hosts[2], value, axis=-2), mean
    )


def _hidden(tensors: list[Any], seen: Any) -> list[Any]:
    """Zeros in place of tokens that nobody sees."""
    if seen is None:
        return tensors
    return [np.where(np.asarray(seen)[:, None, :, None], x, np.float32(0)) for x in tensors]


def mean_key(k: Any, seen: Any = None) -> Any:
    """float32 (B, KV, 1, D): the mean over tokens, of float64 sums; 0 where there are none."""
    count = k.shape[2] if seen is None else np.asarray(seen).sum(1).reshape(-1, 1, 1, 1)
    return (k.astype(np.float64).sum(2, keepdims=True) / np.maximum(count, 1)).astype(np.float32)


def _difference(x: Any, mean: Any) -> Any:
    """x - mean in float32; the largest finite number where that overflows."""
    limit = np.float32(np.finfo(np.float32).max)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(np.isfinite(x), np.clip(x - mean, -limit, limit), x)


def quantized_attention(
    q: Array,
    k: Array,
    v: Array,
    recipe: str | AttentionRecipe = "int8",
    *,
    scale: float | None = None,
    causal: bool = False,
    offset: int | None = None,
    window: int | None = None,
    mask: Array | None = None,
    mean: Array | None = None,
    out_dtype: DTypeLike | None = None,
    accumulation: str = "exact",
) -> Array:
    """Attention with operands in 8 bits: (B, H, T, Dv), in the library and dtype of q.

    q: float32, bfloat16 or float16 (B, H, T, D); k (B, KV, S, D), v (B, KV, S, Dv); KV divides H, and query heads of a group
    follow each other. recipe: an `AttentionRecipe` or a name of `ATTENTION_RECIPES`. scale: positive factor of scores; None:
    1 / sqrt(D). causal: query t sees keys up to offset + t; offset: None for S - T (the last query sees all), 0 for torch's
    `is_causal`. window: of these the last so many. mask: bool (True: attend), broadcast to (B, H, T, S). mean: see
    `quantize_operands`. out_dtype: that of q, or a name. accumulation: of the second matmul, "exact" or "hopper_fp8".

    A query that sees nothing gives zeros; keys and values that nobody sees are never read. Float64 but for what the module
    says, one rounding at the end. With `rotate` channels whose sum is no float32 (beyond 2^120) make
    their token NaN. ValueError for shapes, masks and numbers that do not fit, TypeError for other dtypes.
    """
    choice(accumulation, ACCUMULATIONS, "accumulation")
    recipe = attention_recipe_of(recipe)
    p = _problem(q, k, v, recipe, scale, causal, offset, window, mask, mean)
    out = p.kind if out_dtype is None else dtype_name(out_dtype, (*OUTPUTS, "float64"), "out_dtype")
    chain = recipe.chain if accumulation == "hopper_fp8" else None
    y = np.concatenate(
        [_attended(p, part, chain) for part in parts_of(max(1, p.q.shape[2]), QUERIES)], axis=2
    )
    return from_host(y if out == "float64" else round_result(y, out), out, q)


def quantized_attention_error_bound(
    q: Array,
    k: Array,
    v: Array,
    recipe: str | AttentionRecipe = "int8",
    *,
    scale: float | None = None,
    causal: bool = False,
    offset: int | None = None,
    window: int | None = None,
    mask: Array | None = None,
    mean: Array | None = None,
    out_dtype: DTypeLike = "bfloat16",
    accumulation: str = "hopper_fp8",
) -> F64:
    """The most by which a kernel may differ from `quantized_attention` in float64: float64 (B, H, T, Dv).

    accumulation: "hopper_fp8" bounds a kernel on the tensor core against exact sums, "exact" one whose sums are float32.
    Other arguments as in `quantized_attention`.
    """
    choice(accumulation, ACCUMULATIONS, "accumulation")
    recipe = attention_recipe_of(recipe)
    p = _problem(q, k, v, recipe, scale, causal, offset, window, mask, mean)
    chain = recipe.chain if accumulation == "hopper_fp8" else None
    parts = [_bound(p, part, chain) for part in parts_of(max(1, p.q.shape[2]), QUERIES)]
    y, error = (np.concatenate(each, axis=2) for each in zip(*parts, strict=True))
    return np.asarray(error + rounding_error(np.abs(y) + error, dtype_name(out_dtype, OUTPUTS, "out_dtype")))


class _Problem(NamedTuple):
    """What codes stand for, float64: q (B, H, T, D), k (B, KV, S, D), codes' values v and scales; factor: scale log2(e)."""

    q: F64
    k: F64
    v: F64
    v_scale: F64
    seen: Any
    factor: float
    kind: str
    element: str


def _problem(
    q: Any, k: Any, v: Any, recipe: AttentionRecipe, scale: float | None, causal: bool, offset: int | None,
    window: int | None, mask: Any, mean: Any,
) -> _Problem:  # fmt: skip
    host, kind = to_host(q, "q")
    if kind not in OUTPUTS:
        raise TypeError(f"attention takes q in {', '.join(OUTPUTS)}, got {kind}; cast it first")
    shapes = host.shape, tuple(k.shape), tuple(v.shape)
    check_heads(*shapes)
    scale = 1 / math.sqrt(shapes[0][-1]) if scale is None else float(scale)
    if not 0 < scale < math.inf:
        raise ValueError(f"scale is a positive number, got {scale!r}; negate q for a negative one")
    seen = visible((*shapes[0][:3], shapes[1][2]), causal, offset, window, mask)
    used = seen.any(axis=(1, 2))
    codes = quantize_operands(q, k, v, recipe, seen=None if used.all() else used, mean=mean)
    queries, keys = (np.asarray(dequantize(x, "float32"), np.float64) for x in (codes.q, codes.k))
    values, by_channel = (np.asarray(x, np.float64) for x in (decode(codes.v.codes, WEIGHT), codes.v.scale))
    element = recipe.schemes[0].element
    return _Problem(queries, keys, values, by_channel, seen, scale * LOG2E, kind, element)


def visible(shape: tuple[int, ...], causal: bool, offset: int | None, window: int | None, mask: Any) -> Any:
    """bool of `shape` (B, H, T, S), True where a query sees a key; ValueError for numbers and masks that do not fit."""
    queries, keys = shape[2:]
    if window is not None and (not causal or type(window) is not int or window < 1):
        raise ValueError(f"window is a number of tokens, 1 or more, beside causal=True; got {window!r}")
    if offset is not None and (not causal or type(offset) is not int):
        raise ValueError(f"offset is the place of the first query, beside causal=True; got {offset!r}")
    seen = np.ones((queries, keys), bool)
    if causal:
        place = np.arange(queries)[:, None] + (keys - queries if offset is None else offset)
        seen = np.arange(keys) <= place
        seen &= np.arange(keys) > place - (
            keys + abs(int(place.max(initial=0))) + 1 if window is None else window
        )
    if mask is not None:
        mask = np.asarray(mask)
        if mask.dtype != bool:
            raise ValueError(
                f"the mask of attention in 8 bits is bool, True where a query sees a key, got {mask.dtype}; biases are not "
                "taken: use scaled_dot_product_attention for them"
            )
        try:
            seen = seen & np.broadcast_to(mask, shape)
        except ValueError:
            raise ValueError(f"mask broadcasts to (B, H, T, S) = {shape}, got shape {mask.shape}") from None
    return np.broadcast_to(seen, shape)


def _by_heads(x: F64, y: F64) -> F64:
    """x (B, H, T, any) times y (B, KV, any, any), each of its heads for a group of x's."""
    return np.asarray(np.matmul(x, np.repeat(y, x.shape[1] // y.shape[1], axis=1)))


def _weights(p: _Problem, part: slice) -> tuple[F64, F64, F64]:
    """256 2^(s - t) of some queries, exact, -1 where nothing is seen; scores s, and t."""
    scores = _by_heads(p.q[:, :, part], p.k.swapaxes(-1, -2)) * p.factor
    seen = p.seen[:, :, part]
    top = np.ceil(np.where(seen, scores, -np.inf).max(axis=-1, keepdims=True, initial=-np.inf))
    top = np.where(np.isfinite(top) | np.isnan(top), top, 0.0)
    return np.where(seen, np.exp2(np.where(seen, scores, top) - top) * PEAK, -1.0), scores, top


def _rounded(weights: F64) -> F64:
    """Values of e4m3; 0 where nothing is seen."""
    codes = encode(np.maximum(weights, 0.0).astype(np.float32), WEIGHT)
    return np.asarray(decode(codes, WEIGHT), np.float64)


def _attended(p: _Problem, part: slice, chain: int | None) -> F64:
    """Results of some queries. chain: tokens of the tensor core's sums; None: exact ones."""
    weights = _rounded(_weights(p, part)[0])
    total = weights.sum(axis=-1, keepdims=True)
    if chain is None:
        sums = _by_heads(weights, p.v)
    else:
        values = np.repeat(p.v, weights.shape[1] // p.v.shape[1], axis=1)
        sums = tensor_core_matmul(weights, values, core=TensorCore(promote=chain))
    scales = np.repeat(p.v_scale, weights.shape[1] // p.v.shape[1], axis=1)
    return np.asarray(sums / np.where(total == 0, 1.0, total) * scales)


def _bound(p: _Problem, part: slice, chain: int | None) -> tuple[F64, F64]:
    """Results of some queries and by how much a kernel's may differ from them."""
    unit = 2.0**-24
    weights, scores, top = _weights(p, part)
    seen = weights >= 0
    off = 8 * unit * (np.abs(scores) + np.abs(scores - top) + 8)
    if p.element != INTEGER:
        width = p.q.shape[-1]
        magnitudes = _by_heads(np.abs(p.q[:, :, part]), np.abs(p.k).swapaxes(-1, -2)) * p.factor
        off = off + magnitudes * (gamma(width + 4) if chain is None else -(-width // 32) * 34 * 2.0**-13)
    factor = np.where(seen, np.exp2(off) * (1 + 2.0**-22), 1.0)
    rounded = _rounded(weights)
    moved = np.maximum(
        np.abs(_rounded(weights * factor) - rounded), np.abs(_rounded(weights / factor) - rounded)
    )
    moved = np.where(seen, moved + np.where(weights < 2.0**-5, 2.0**-9, 0.0), 0.0)
    values = np.abs(p.v)
    total = rounded.sum(axis=-1, keepdims=True)
    y = np.abs(_by_heads(rounded, p.v)) / np.where(total == 0, 1.0, total)
    shift = moved.sum(axis=-1, keepdims=True)
    sums = gamma(p.k.shape[2] + 8) * (_by_heads(rounded + moved, values) + y * total)
    if chain is not None:
        sums = sums + _cut(rounded + moved, p, chain)
    rest = total - shift
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.where(rest > 0, (_by_heads(moved, values) + y * shift + sums) / rest, np.inf)
    error = np.where(seen.any(axis=-1, keepdims=True), error, 0.0)
    scales = np.repeat(p.v_scale, weights.shape[1] // p.v.shape[1], axis=1)
    return np.asarray(y * scales), np.asarray(error * scales * (1 + gamma(8)) + gamma(8) * y * scales)


def _cut(weights: F64, p: _Problem, chain: int) -> F64:
    """What 14-bit sums of chains lose, at most: 34 2^-13 of the largest product or partial sum, at every step of 32 tokens.

    Sums of magnitudes stand for partial sums, and the smallest normal number for subnormal operands.
    """
    tiny, values = 2.0**-6, np.repeat(np.abs(p.v), weights.shape[1] // p.v.shape[1], axis=1)
    lost = np.zeros((*weights.shape[:3], values.shape[-1]))
    raised, normal = np.where(weights > 0, np.maximum(weights, tiny), 0.0), np.maximum(values, tiny)
    for tokens in parts_of(weights.shape[-1], chain):
        held = np.zeros_like(lost)
        for step in parts_of(tokens.stop - tokens.start, 32):
            at = slice(tokens.start + step.start, tokens.start + step.stop)
            products = raised[..., at, None] * normal[:, :, None, at]
            held = held + np.matmul(weights[..., at], values[:, :, at])
            lost += 34 * 2.0**-13 * np.maximum(products.max(axis=-2), held)
    return lost


__all__ = [
    "ATTENTION_RECIPES",
    "AttentionRecipe",
    "Operands",
    "attention_recipe_of",
    "by_blocks",
    "quantize_operands",
    "quantized_attention",
    "quantized_attention_error_bound",
    "visible",
]
