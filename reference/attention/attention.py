"""Attention over keys and values as a cache stores them, in float64, with what may differ from it.

y = softmax(scale q k^T + bias) v of the values that `dequantize` gives in float32: every product, exponential and sum is
float64, one rounding at the end. It runs on the host in NumPy for every library, as `reference.matmul` does.

**What storing costs** (`storage_error_bound`). Let scores move by |ds_j| <= d_j = scale sum_i |q_i| |dk_ji| and D = max_j d_j
over the keys that are attended to. Each weight is multiplied by e^(ds_j) and divided by a mean of such factors, so it lies
between p_j e^(-2D) and p_j e^(2D), and

    |dy| <= (e^(2D) - 1) sum_j p_j |v_j| + e^(2D) sum_j p_j |dv_j|.

**What a kernel may add** (`attention_error_bound`). Scores in float32 of `width` products, in any order, are off by at most
E = gamma(width + 4) scale sum_i |q_i k_ji|, plus 2^-22 (|s_j - max s| + 1) for the exponential (its argument is scaled by
log2 e and rounded; the function itself is good to two units). Weights enter the second product rounded to a dtype of roundoff
u (2^-9 of bfloat16, 2^-12 of float16 with its subnormals 2^-25, 2^-24 of float32), their sum in float32, over `keys` terms in
any order: gamma(keys + 8). So |dy| <= (e^(2E) (1 + u)(1 + 2 gamma) - 1) sum_j p_j |v_j| + 2^-25 sum_j |v_j| for float16,
and half a unit of the output's dtype. Values times their scales are float32 products: one more roundoff a factor, inside gamma.
Where a weight takes its token's scale before it is rounded, over a power of two up to the largest scale, 2^-25 is of that: the
last sum times `spread`, how many times the smallest scale of the tokens the largest one is.

**FP8 sums over a long context** (`accumulation="hopper_fp8"`). Weights e^(s - max) times `peak`, rounded to e4m3, are
multiplied with values in e4m3 by the tensor core of `reference.matmul.tensor_core_model`, whose accumulator has 14 bits: in one
chain over the context (promote=None) a step's products below 2^-13 of the sum are cut off, and what is left of a single token
among 131072 is little; with `promote` the chain restarts every so many tokens and parts are added in float32.

Sources: Vaswani et al., arXiv 1706.03762, section 3.2.1; FlashAttention-3, arXiv 2407.08608 (FP8: weights times 2^8);
two-level sums: SageAttention2, arXiv 2411.10958, DeepSeek-V3, arXiv 2412.19437, section 3.3.2. The bounds are our own
derivation.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from reference.arrays.namespace import Array, DTypeLike, choice, dtype_name
from reference.attention.window import Window
from reference.formats.encode import decode, encode
from reference.matmul.error_bound import gamma, rounding_error
from reference.matmul.exact import F64, round_result
from reference.matmul.operands import from_host, to_host
from reference.matmul.tensor_core_model import TensorCore, tensor_core_matmul
from reference.quantize.quantize import Quantized, dequantize

OUTPUTS = ("float32", "bfloat16", "float16")
ACCUMULATIONS = ("exact", "hopper_fp8")
#: Roundoff of weights as the second product takes them (24, 8, 11 bits), and what is lost below its smallest normal number.
WEIGHTS = {"float32": (2.0**-24, 0.0), "bfloat16": (2.0**-8, 0.0), "float16": (2.0**-11, 2.0**-25)}
#: What FlashAttention-3 multiplies weights by before they become e4m3.
PEAK = 256.0


class _Problem(NamedTuple):
    """Operands on the host: q (B, H, T, D), k and v (B, KV, S, D), scores (B, H, T, S) with their bias, -inf where masked."""

    q: F64
    k: F64
    v: F64
    scores: F64
    scale: float


def attention(
    q: Array,
    k: Array | Quantized,
    v: Array | Quantized,
    *,
    scale: float | None = None,
    causal: bool = False,
    mask: Array | None = None,
    length: Any = None,
    softcap: float | None = None,
    out_dtype: DTypeLike | None = None,
    accumulation: str = "exact",
    promote: int | None = None,
    computed: tuple[Array, Array] | None = None,
    window: Window | None = None,
) -> Array:
    """Attention of q over stored keys and values: (B, H, T, D of v), in the library of q.

    q: float32, bfloat16 or float16 (B, H, T, D); k, v: arrays (B, KV, S, D) of these dtypes, or `Quantized` of that shape; KV
    divides H, and query heads of a group follow each other. scale: factor of scores; None: 1 / sqrt(D). length: how many of the
    S positions hold a token, a number or one for each of B; None: all. causal: query t of T sees the first length - T + t + 1
    of them. mask: bool (True: attend) or float (added to scores), broadcast to (B, H, T, S). softcap: scores become
    softcap tanh(score / softcap) before bias and mask. out_dtype: that of q, or a name. A query that sees nothing gives zeros;
    what a mask or the length hides is never read, so that NaN there does no harm. A score that is NaN or plus infinity makes
    all results of its query NaN, a NaN in a value that of its channel; of a score of minus infinity the weight is 0.

    accumulation: "exact", or "hopper_fp8": see the module; k and v as values, promote: tokens of a chain, None for all.
    computed: keys and values as they were computed, arrays (B, KV, S, D), of which each query sees those that `window` says,
    and k and v of all others; "exact" sums.

    Raises ValueError for shapes, lengths and masks that do not fit, TypeError for other dtypes.
    """
    choice(accumulation, ACCUMULATIONS, "accumulation")
    rules = scale, causal, mask, length, softcap
    p, kind = _problem(q, k, v, *rules)
    out = kind if out_dtype is None else dtype_name(out_dtype, (*OUTPUTS, "float64"), "out_dtype")
    if computed is not None and window is not None:
        y = _of_both(p, _problem(q, *computed, *rules)[0], window, length, causal)
        return from_host(y if out == "float64" else round_result(y, out), out, q)
    weights, total = _weights(p.scores)
    exact = accumulation == "exact"
    y = _by_heads(weights / total, p.v) if exact else _fp8_sums(weights, p.v, promote) / total
    return from_host(y if out == "float64" else round_result(y, out), out, q)


def _of_both(p: _Problem, computed: _Problem, window: Window, length: Any, causal: bool) -> F64:
    """Attention to what is stored, p, and of some tokens to what was computed."""
    queries, keys = p.scores.shape[-2:]
    as_computed = window.seen(queries, keys, keys if length is None else length, causal)
    weights, total = _weights(np.where(as_computed, computed.scores, p.scores))
    shares = weights / total
    stored = _by_heads(np.where(as_computed, 0.0, shares), p.v)
    return stored + _by_heads(np.where(as_computed, shares, 0.0), computed.v)


def attention_error_bound(
    q: Array,
    k: Array | Quantized,
    v: Array | Quantized,
    *,
    weights: str = "bfloat16",
    out_dtype: DTypeLike = "bfloat16",
    scale: float | None = None,
    causal: bool = False,
    mask: Array | None = None,
    length: Any = None,
    softcap: float | None = None,
    products: float = 0.0,
    zeros: Array | None = None,
    spread: float = 1.0,
) -> F64:
    """The most by which a kernel of float32 sums may differ from `attention` before its rounding: float64 (B, H, T, D of v).

    weights: dtype in which softmax's weights enter the second product (`WEIGHTS`). products: relative roundoff of each product
    of scores beside float32's, where queries are rounded with the scales of channels: 2^-10 of two roundings to float16, while
    a channel's scale and its product with the query are no less than 2^-14 of the largest ones. zeros: what zero points of keys
    stand for, in k's shape, where a product with codes alone is summed and that with zero points taken off it: both sums are as
    long as k's, and their terms together at most |k| + 2 |zeros| (codes are k + zeros). spread: largest scale of a token's
    values over the smallest one that is not 0, at least 1, where weights are rounded with them. Other arguments as in
    `attention`. Raises ValueError for a spread below 1, and for zeros of another shape than k.
    """
    choice(weights, tuple(WEIGHTS), "weights")
    if not spread >= 1:
        raise ValueError(
            f"spread is the largest scale over the smallest one, 1 or more, got {spread!r}; leave it out where scales are alike"
        )
    p, _ = _problem(q, k, v, scale, causal, mask, length, softcap)
    width, keys = p.q.shape[-1], p.k.shape[-2]
    roundoff, lost = WEIGHTS[weights]
    seen = np.isfinite(p.scores)
    unnormalized, total = _weights(p.scores)
    magnitudes = _by_heads(np.abs(p.q), np.abs(p.k).swapaxes(-1, -2)) * abs(p.scale)
    summed = magnitudes
    if zeros is not None:
        beside = np.abs(_beside(zeros, p.k)).swapaxes(-1, -2)
        summed = magnitudes + 2 * _by_heads(np.abs(p.q), beside) * abs(p.scale)
    distance = np.where(seen, -np.log(np.maximum(unnormalized, 1e-300)), 0.0)
    moved = gamma(width + 4) * summed + products * magnitudes + 2.0**-22 * (distance + 1)
    most = np.where(seen, moved, 0.0).max(axis=-1, keepdims=True, initial=0.0)
    grown = np.exp(2 * most) * (1 + roundoff) * (1 + 2 * gamma(keys + 8)) - 1
    values = np.abs(p.v)
    error = grown * _by_heads(unnormalized / total, values)
    error = error + lost * spread * _by_heads(seen.astype(np.float64), values) / total
    y = np.abs(_by_heads(unnormalized / total, p.v))
    return np.asarray(error + rounding_error(y + error, dtype_name(out_dtype, OUTPUTS, "out_dtype")))


def _beside(zeros: Array, k: F64) -> F64:
    """Zero points as numbers, in k's shape."""
    host = np.asarray(to_host(zeros, "zeros")[0], dtype=np.float64)
    if host.shape != k.shape:
        raise ValueError(
            f"zeros are of every element of k, {k.shape}, got {host.shape}; repeat those of a group for its tokens"
        )
    return host


def storage_error_bound(
    q: Array,
    k: Array,
    v: Array,
    stored_k: Array | Quantized,
    stored_v: Array | Quantized,
    *,
    scale: float | None = None,
    causal: bool = False,
    mask: Array | None = None,
    length: Any = None,
) -> F64:
    """The most by which attention over stored keys and values differs from that over k and v: float64 (B, H, T, D of v)."""
    p, _ = _problem(q, k, v, scale, causal, mask, length, None)
    other, _ = _problem(q, stored_k, stored_v, scale, causal, mask, length, None)
    seen = np.isfinite(p.scores)
    weights, total = _weights(p.scores)
    moved = _by_heads(np.abs(p.q), np.abs(other.k - p.k).swapaxes(-1, -2)) * abs(p.scale)
    most = np.where(seen, moved, 0.0).max(axis=-1, keepdims=True, initial=0.0)
    shares = weights / total
    error = np.expm1(2 * most) * _by_heads(shares, np.abs(p.v))
    return np.asarray(error + np.exp(2 * most) * _by_heads(shares, np.abs(other.v - p.v)))


def _problem(
    q: Array, k: Any, v: Any, scale: float | None, causal: bool, mask: Any, length: Any, softcap: float | None
) -> tuple[_Problem, str]:
    host_q, kind = to_host(q, "q")
    if kind not in OUTPUTS:
        raise TypeError(f"attention takes q in {', '.join(OUTPUTS)}, got {kind}; cast it first")
    host_k, host_v = _stored(k, "k"), _stored(v, "v")
    check_heads(host_q.shape, host_k.shape, host_v.shape)
    seen, bias = _visible(mask, causal, length, (*host_q.shape[:3], host_k.shape[2]))
    # What nobody attends to is never read: NaN times a weight of zero is NaN.
    used = seen.any(axis=(1, 2))[:, None, :, None]
    host_k, host_v = (np.where(used, x, 0.0) for x in (host_k, host_v))
    scale = 1 / math.sqrt(host_q.shape[-1]) if scale is None else float(scale)
    scores = _by_heads(host_q, host_k.swapaxes(-1, -2)) * scale
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    scores = np.where(seen, scores if bias is None else scores + bias, -np.inf)
    return _Problem(host_q, host_k, host_v, scores, scale), kind


def _by_heads(x: F64, y: F64) -> F64:
    """x (B, H, T, any) times y (B, KV, any, any), each of its heads for a group of x's."""
    batch, heads, queries, length = x.shape
    together = x.reshape(batch, y.shape[1], heads // y.shape[1] * queries, length)
    return np.asarray(np.matmul(together, y).reshape(batch, heads, queries, y.shape[-1]))


def _stored(x: Any, name: str) -> F64:
    return to_host(dequantize(x, "float32") if isinstance(x, Quantized) else x, name)[0]


def check_heads(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
    """ValueError for shapes that do not fit together."""
    if not (len(q) == len(k) == len(v) == 4) or k[:3] != v[:3] or q[0] != k[0] or q[3] != k[3]:
        raise ValueError(
            f"attention takes q (B, H, T, D), k (B, KV, S, D) and v (B, KV, S, any), got {q}, {k} and {v}"
        )
    if not k[1] or q[1] % k[1]:
        raise ValueError(
            f"key heads divide query heads, got {q[1]} query heads and {k[1]} key heads in {q} and {k}"
        )


def _visible(mask: Any, causal: bool, length: Any, shape: tuple[int, ...]) -> tuple[Any, F64 | None]:
    """bool of `shape` (B, H, T, S), True where a query sees a key, and what is added to scores."""
    batch, _, queries, keys = shape
    lengths = np.asarray(keys if length is None else length, np.int64)
    if lengths.shape not in ((), (1,), (batch,)) or not ((lengths >= 0) & (lengths <= keys)).all():
        raise ValueError(
            f"length is a number from 0 to {keys}, or one for each of {batch}, got {length!r}; a cache of {keys} positions "
            "holds no more"
        )
    ends = np.broadcast_to(lengths.reshape(-1, 1, 1, 1), (batch, 1, queries, 1))
    if causal:
        ends = ends - queries + 1 + np.arange(queries).reshape(1, 1, -1, 1)
    seen = np.arange(keys).reshape(1, 1, 1, -1) < ends
    bias = None
    if mask is not None:
        mask = np.asarray(mask) if np.asarray(mask).dtype == bool else to_host(mask, "mask")[0]
        try:
            mask = np.broadcast_to(mask, shape)
        except ValueError:
            raise ValueError(
                f"mask broadcasts to (B, H, T, S) = {shape}, got shape {np.shape(mask)}"
            ) from None
        seen, bias = (seen & mask, None) if mask.dtype == bool else (seen & (mask != -np.inf), mask)
    return np.broadcast_to(seen, shape), bias


def _weights(scores: F64) -> tuple[F64, F64]:
    """e^(score - largest) and its sum, 1 where there is nothing to attend to."""
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    with np.errstate(invalid="ignore"):  # infinity less infinity is NaN
        weights = np.exp(scores - np.where(top == -np.inf, 0.0, top))
    total = weights.sum(axis=-1, keepdims=True)
    return weights, np.where(total == 0, 1.0, total)


def _fp8_sums(weights: F64, values: F64, promote: int | None) -> F64:
    """weights @ values by FP8 tensor cores: both in e4m3, the weights times `PEAK`."""
    codes = encode((weights * PEAK).astype(np.float32), "float8_e4m3fn")
    rounded = np.asarray(decode(codes, "float8_e4m3fn"), np.float64)
    values = np.repeat(values, rounded.shape[1] // values.shape[1], axis=1)
    return tensor_core_matmul(rounded, values, core=TensorCore(promote=promote)) / PEAK


__all__ = ["attention", "attention_error_bound", "storage_error_bound"]
