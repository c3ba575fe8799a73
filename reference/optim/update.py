"""One step of Adam, AdamW and Lion on a parameter, its gradient and its states, bit for bit.

Everything is float32, every operation rounded once, in this order; numbers of a step are computed in float64 and rounded once
(`Numbers`). p, g, m, v are the parameter, the gradient and the moments as they were stored, as float32. In brackets stands a
product that is not rounded before it is added (a fused multiply-add):

    Adam    g = [wd p] + g
    both    m = [b1 m] + (1 - b1) g,    v = min([b2 v] + (1 - b2) (g g), largest float32),    r = sqrt(v)
            p = [p k] - (m (lr / (1 - b1^t))) (1 / ([r (1 / sqrt(1 - b2^t))] + eps))
    Lion    p = [p k] - lr sign([b1 m] + (1 - b1) g),    m = [b2 m] + (1 - b2) g

k is 1 - lr wd, for Adam 1. Of a moment that is stored as values x and a scale s, [b m] is [x (b s)], and of a root [b2 v] is
[(x x) (b2 (s s))]: what a block shares is multiplied once for the block.

The update uses the fresh moments; then they are stored (`reference.optim.states`) and p is rounded to its dtype: to nearest
even, or stochastically by 16 random bits, where an update of less than half a unit in the last place would be lost for ever.
Powers b^t are products of float64 squares, from the lowest bit of t on, so that they are equal everywhere.

**Parameters with a 24-bit or 32-bit master** (`split_master`): a bfloat16 parameter, rounded to nearest from a float32 whose
lowest 8 bits (none) were rounded away, and what that rounding took, as int8 (int16). Both are integers that add up, so nothing
is lost between steps: `join_master` gives the float32 back. The idea is FlashOptim's (arXiv 2602.23349); its error counts
steps of a 254th (65534th) of the bfloat16's last place, this one steps of the float32 pattern.

Finite input never becomes NaN: squares stop at the largest float32, and eps is positive. A gradient that is not finite makes
the first moment of its block NaN, and with it parameters, as torch's optimizers make its element; `ao_lab.optim` refuses such
gradients before a step. Of a NaN that is written only that it is one is specified.

Sources: Kingma and Ba, Adam (arXiv 1412.6980), algorithm 1; Loshchilov and Hutter, Decoupled weight decay (arXiv 1711.05101),
algorithm 2; Chen et al., Symbolic discovery of optimization algorithms (arXiv 2302.06675), program 1.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite
from typing import Any

import numpy as np

from reference.arrays.namespace import choice, codes_of, namespace_of
from reference.arrays.softfloat import LARGEST, float32_bits, fused_multiply_add
from reference.formats.encode import encode_bits, to_dtype_bits
from reference.formats.formats import FORMATS
from reference.optim.states import (
    Floats,
    State,
    States,
    halves,
    load_parts,
    store_state,
)
from reference.quantize.stored import Quantized

KINDS = ("adam", "adamw", "lion")
#: Bits of a master weight that a bfloat16 parameter leaves to its errors, by the width of these.
MASTERS = {"none": 0, "24bit": 8, "32bit": 16}
TOP = np.int32(LARGEST).view(np.float32)


def power(base: float, exponent: int) -> float:
    """base**exponent: float64 products of squares, from the lowest bit of the exponent on."""
    result, square = 1.0, float(base)
    while exponent:
        if exponent & 1:
            result *= square
        square *= square
        exponent >>= 1
    return result


@dataclass(frozen=True)
class Numbers:
    """The numbers of a step, float32: see the module text. `keep` is k there."""

    first: np.float32
    first_rest: np.float32
    second: np.float32
    second_rest: np.float32
    size: np.float32
    root: np.float32
    eps: np.float32
    keep: np.float32
    decay: np.float32

    @property
    def array(self) -> Floats:
        """All of them in order, float32 (9,)."""
        return np.array([getattr(self, field.name) for field in fields(self)], np.float32)

    @classmethod
    def of(
        cls, kind: str, step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> Numbers:
        """Of step t (from 1 on); lr, eps and weight_decay are rounded to float32 first, betas are not."""
        lr, decay = float(np.float32(lr)), float(np.float32(weight_decay))
        lion = kind == "lion"
        size = lr if lion else lr / (1.0 - power(betas[0], step))
        root = 1.0 if lion else 1.0 / float(np.sqrt(np.float64(1.0 - power(betas[1], step))))
        single = np.float32
        return cls(
            single(betas[0]), single(1.0 - betas[0]), single(betas[1]), single(1.0 - betas[1]), single(size), single(root),
            single(eps), single(1.0 if kind == "adam" else 1.0 - lr * decay), single(decay),
        )  # fmt: skip


def check_numbers(kind: str, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """ValueError for what is no kind, or out of range: lr and weight_decay >= 0, betas in [0, 1), eps >= 2**-126."""
    choice(kind, KINDS, "optimizer")
    for name, value in (("lr", lr), ("weight_decay", weight_decay)):
        if not (isfinite(value) and value >= 0):
            raise ValueError(f"{name} is a finite number of 0 or more, got {value!r}")
    for at, beta in enumerate(betas):
        if not 0 <= beta < 1:
            raise ValueError(f"betas lie in [0, 1), got betas[{at}] = {beta!r}")
    if kind != "lion" and not (isfinite(eps) and eps >= 2.0**-126):
        raise ValueError(
            f"eps is 2**-126 or more, got {eps!r}: with 0 a parameter whose gradients are 0 becomes NaN; use 1e-30"
        )


@dataclass(frozen=True)
class Key:
    """What random bits are keyed by: a seed of 64 bits, the step, the number of the parameter, and the blocks of it in front
    of this part (0 unless it is a shard).
    """

    seed: int = 0
    parameter: int = 0
    first: int = 0


@dataclass(frozen=True)
class Stored:
    """A parameter's matrix and its states between steps.

    p: float32, bfloat16 or float16 (rows, length). first, second: `Quantized`, or float32 arrays where the state is float32;
    second is None for Lion. error: int8 or int16 of p's shape where there is a master weight, else None.
    """

    p: Any
    first: Any
    second: Any = None
    error: Any = None


def begin(p: Any, states: States, kind: str = "adamw", master: str = "none") -> Stored:
    """A parameter's states before its first step: moments of 0, no error."""
    choice(master, tuple(MASTERS), "master")
    zeros = np.zeros(p.shape, np.float32)
    first, second = (_store(zeros, state, None) for state in (states.first, states.second))
    error = None if not MASTERS[master] else np.zeros(p.shape, f"int{MASTERS[master]}")
    return Stored(p, first, None if kind == "lion" else second, error)


def _store(x: Floats, state: State, words: Any) -> Any:
    if state.scheme is None:
        return x
    if state.stochastic and words is None:
        words = np.zeros(x.shape, np.uint32)
    return store_state(x, state, words if state.stochastic else None)


def _decayed(stored: Any, state: State, beta: np.float32, new: Floats) -> Floats:
    """beta times a stored moment, plus what is new."""
    if not isinstance(stored, Quantized):
        return fused_multiply_add(stored, beta, new)
    values, scales = load_parts(stored, state)
    if state.transform == "sqrt":
        return fused_multiply_add(values * values, beta * (scales * scales), new)
    return fused_multiply_add(values, beta * scales, new)


def update(
    stored: Stored,
    g: Any,
    states: States,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    kind: str = "adamw",
    stochastic_round: bool = False,
    key: Key | None = None,
) -> Stored:
    """The parameter and its states after step `step` (from 1 on). g: float32, bfloat16 or float16 of p's shape, NumPy.

    stochastic_round: bfloat16 parameters are rounded stochastically. Raises ValueError as `check_numbers` does, and for a
    gradient of another shape.
    """
    check_numbers(kind, lr, betas, eps, weight_decay)
    if g.shape != stored.p.shape:
        raise ValueError(f"a gradient has its parameter's shape {stored.p.shape}, got {g.shape}")
    key = key or Key()
    numbers = Numbers.of(kind, step, lr, betas, eps, weight_decay)
    master = stored.p if stored.error is None else join_master(stored.p, stored.error)
    with np.errstate(all="ignore"):
        p, m, v = _moved(as_float32(master), as_float32(g), stored, states, numbers, kind)

    def words(swapped: bool = False) -> Any:
        return halves(
            p.shape, states.first.block, seed=key.seed, step=step, parameter=key.parameter, swapped=swapped, first=key.first
        )  # fmt: skip

    draws = states.first.stochastic or (v is not None and states.second.stochastic)
    both = words() if draws else None
    first, second = _store(m, states.first, both), None if v is None else _store(v, states.second, both)
    if stored.error is not None:
        p, error = split_master(p, 8 * stored.error.dtype.itemsize)
        return Stored(p, first, second, error)
    name = str(stored.p.dtype)
    rounds = words(swapped=True) if stochastic_round and name == "bfloat16" else None
    return Stored(as_dtype(p, name, rounds), first, second)


def _moved(
    p: Floats, g: Floats, stored: Stored, states: States, n: Numbers, kind: str
) -> tuple[Floats, Floats, Floats | None]:
    """The parameter and the moments after the step, float32, before they are stored."""
    if kind == "adam":
        g = fused_multiply_add(n.decay, p, g)
    beta, rest = (n.second, n.second_rest) if kind == "lion" else (n.first, n.first_rest)
    m = _decayed(stored.first, states.first, beta, rest * g)
    if kind == "lion":
        direction: Floats = np.sign(_decayed(stored.first, states.first, n.first, n.first_rest * g))
        return fused_multiply_add(p, n.keep, -(n.size * direction)), m, None
    v = _decayed(stored.second, states.second, n.second, n.second_rest * (g * g))
    v = np.where(v <= TOP, v, TOP)
    inverse = np.float32(1) / fused_multiply_add(np.sqrt(v), n.root, n.eps)
    return fused_multiply_add(p, n.keep, -((m * n.size) * inverse)), m, v


def as_float32(x: Any) -> Floats:
    """float32 values of a float array, exact."""
    ns = namespace_of(x)
    return np.asarray(ns.bitcast(float32_bits(ns, x, ns.dtype_name(x)), "float32"))


def as_dtype(x: Floats, name: str, words: Any = None) -> Any:
    """float32 rounded to a parameter's dtype, to nearest even, or to bfloat16 stochastically by words, as IEEE 754 says."""
    ns = namespace_of(x)
    bits = ns.bitcast(x, "int32")
    if words is None or name == "float32":
        return to_dtype_bits(ns, bits, name)
    fmt = FORMATS[name]
    codes = encode_bits(ns, bits, fmt, "stochastic", "nonfinite", words)
    return ns.bitcast(codes_of(ns, codes, 16), name)


def split_master(p: Floats, width: int) -> tuple[Any, Any]:
    """(bfloat16, int8 or int16): the pattern of a float32, rounded to 24 bits (width 8) or as it is (16), as the nearest
    pattern of its upper 16 bits and the difference.

    Ties go away from zero. NaN: the quiet NaN and 0. What rounds beyond the largest bfloat16 is infinity there, and comes back.
    """
    bits = np.where(np.isnan(p), np.int32(0x7FC00000), p.view(np.int32)).view(np.uint32)
    rounded = bits + np.uint32(1 << (15 - width) if width < 16 else 0)
    code = ((rounded + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)
    error = (rounded >> np.uint32(16 - width)).astype(f"uint{width}").view(f"int{width}")
    return namespace_of(p).bitcast(code, "bfloat16"), error


def join_master(p: Any, error: Any) -> Floats:
    """The float32 that `split_master` split."""
    width = 8 * error.dtype.itemsize
    code = p.view(np.uint16).astype(np.uint32) << np.uint32(16)
    bits = code + (error.astype(np.int32) << (16 - width)).view(np.uint32)
    return np.asarray(bits.view(np.float32))


__all__ = [
    "KINDS",
    "MASTERS",
    "Key",
    "Numbers",
    "Stored",
    "begin",
    "check_numbers",
    "join_master",
    "power",
    "split_master",
    "update",
]
