"""Optimizer states as schemes: what a moment is stored as, and back.

A state is a matrix (rows, length) of float32, one row for each row of its parameter (`matrix_shape`). A `State` record says
how it is stored: a `Scheme`, blocks along rows with a short last one, behind a transform.

* ``none``: the scheme stores the moment.
* ``sqrt``: it stores the root of the second moment. v spans the square of what gradients span; the root halves that in bits.
* ``softsign`` (FlashOptim, arXiv 2602.23349): of x = m / s, s the block's absmax, the integer nearest to 127 * 2x / (1 + |x|)
  is stored; back x = y / (2 - |y|), y = code / 127. ``sqrt`` beside uint8 is its second moment.

**A stored 0 is the defect of the field.** Where v is stored as 0 and m is not, the next update is m / (sqrt((1 - b2) g^2) +
eps), or m / eps where g is 0: up to 250,000 times too large. The default states have a `least` code, below which the
second moment does not fall (of e4m3 the smallest normal number, 1/28672 of the largest), and scales of 2**-44 or more, before
the first step too: their v is never 0.

**The default states are rounded stochastically.** v moves by 0.1 % a step, less than half a code: rounding to nearest never
moves it, rounding up drives it away. m moves by a tenth of its distance from g, so that to nearest it stops where that is half
a code: under a constant gradient at 0.75 of it. It is rounded to three fraction bits stochastically, then to nearest, which is
the same where e4m3 is normal; elements below 1/14336 of a block's largest are rounded to nearest. Scales are powers of two: the
grid of normal numbers does not move when a block's maximum does, so that rounding costs what a moment moved and no more, and
values that were stored are stored again as the same values.

Codebooks of other libraries are ``dynamic8``, ``dynamic8_unsigned``, ``dynamic4`` and ``linear4_unsigned`` of
`reference.formats`. Those libraries round a tie between two values to the larger one, codebooks here to the lower index.

Random bits: 16 an element, half a word of Philox 4x32-10 (`reference.formats.encode`). Element i under a seed, at a step, of
parameter number p has output (i mod 8) // 2 of philox(seed, counter = (i // 8, 0, p, step)); i counts elements as if every
block of a row were full. Of a word for two neighbours both moments take the lower half where i is even, the upper where it is
odd, and the parameter the other one. So replicas agree, a resumed run goes on with the same bits, and any element's can be
computed alone.

Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization (arXiv 2110.02861), section 2.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from reference.arrays.namespace import choice, lookup
from reference.formats.encode import MASK, decode, encode, philox
from reference.formats.formats import FORMATS
from reference.quantize.quantize import dequantize, quantize
from reference.quantize.scales import choose_scales
from reference.quantize.stored import Quantized
from reference.schemes.schemes import FLOOR, Scale, Scheme

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]

TRANSFORMS = ("none", "sqrt", "softsign")
#: Elements that share a counter of Philox.
TOGETHER = 8

_quantize: Callable[..., Quantized] = inspect.unwrap(quantize)
_dequantize: Callable[..., Any] = inspect.unwrap(dequantize)
_decode: Callable[..., Any] = inspect.unwrap(decode)
_encode: Callable[..., Any] = inspect.unwrap(encode)


@dataclass(frozen=True, kw_only=True)
class State:
    """How a moment is stored. ValueError for a transform that does not exist."""

    name: str
    #: None: float32 as it is.
    scheme: Scheme | None
    #: ``none``, ``sqrt`` or ``softsign``.
    transform: str = "none"
    #: The smallest code that is stored, of a moment that is not negative.
    least: int = 0
    #: Fraction bits to which scaled elements are rounded stochastically before they are stored to nearest; 0: they are not.
    fraction: int = 0

    def __post_init__(self) -> None:
        choice(self.transform, TRANSFORMS, "transform")

    @property
    def block(self) -> int:
        """Elements of a block; of float32 states 256, by which random bits are counted."""
        return int(self.scheme.scale.block) if self.scheme is not None else 256  # type: ignore[arg-type]

    @property
    def stochastic(self) -> bool:
        """Whether it is rounded stochastically."""
        return self.scheme is not None and (self.scheme.rounding == "stochastic" or self.fraction > 0)


@dataclass(frozen=True, kw_only=True)
class States:
    """How an optimizer's two moments are stored; `second` is unused where there is none (Lion).

    Raises ValueError for moments in blocks of two sizes: the same bits round both.
    """

    name: str
    first: State
    second: State
    #: Where the record breaks the rules of the default states, in words.
    deviations: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        first, second = self.first.block, self.second.block
        if self.second.scheme is not None and first != second:
            raise ValueError(
                f"both moments of states {self.name!r} have one block size, got {first} and {second}"
            )

    def with_block(self, block: int) -> States:
        """The same with another block size; ValueError unless it is a power of two from 8 to 4096."""
        if type(block) is not int or block not in [1 << k for k in range(3, 13)]:
            raise ValueError(f"block_size is a power of two from 8 to 4096, got {block!r}")
        return replace(self, first=_with_block(self.first, block), second=_with_block(self.second, block))


def _with_block(state: State, block: int) -> State:
    if state.scheme is None or state.block == block:
        return state
    scheme = replace(state.scheme, scale=replace(state.scheme.scale, block=block))
    return replace(state, scheme=scheme)


FLOAT32 = State(name="float32", scheme=None)
ZEROS = "a second moment far below its block's largest is stored as 0, and the next update is up to 250,000 times too large"
TIES = "a tie between two values goes to the lower index, torchao's to the larger value"


#: Smallest scale of a root: squared, with the least code, it has a square root that is computed without exceptions.
ROOT_FLOOR = ("stored", 2.0**-44)


def _ours(
    element: str,
    block: int,
    rounding: str,
    rule: str = "ratio_pow2",
    floor: tuple[str, float | str] = FLOOR,
) -> Scheme:
    scale = Scale(block=block, target=FORMATS[element].max, rule=rule, floor=floor, partial=True)
    return Scheme(name=f"state_{element}_{rounding}", element=element, scale=scale, rounding=rounding)


def _torchao(element: str, block: int, target: float) -> Scheme:
    """torchao 0.18, optim/quant_utils.py `scale_tensor` and optim/subclass_fp8.py: x / max(absmax, 1e-12) * target."""
    scale = Scale(block=block, target=target, floor=("statistic", 1e-12), partial=True)
    return Scheme(name=f"torchao.state_{element}", element=element, scale=scale, apply="divide")


def _records() -> list[States]:
    stochastic = "stochastic"
    first = State(name="e4m3", scheme=_ours("float8_e4m3fn", 256, "nearest_even"), fraction=3)
    root = State(
        name="sqrt_e4m3",
        transform="sqrt",
        least=8,
        scheme=_ours("float8_e4m3fn", 256, stochastic, floor=ROOT_FLOOR),
    )
    first4 = State(name="e2m1", scheme=_ours("float4_e2m1fn", 128, stochastic))
    root4 = State(
        name="sqrt_uint4",
        transform="sqrt",
        least=1,
        scheme=_ours("uint4", 128, stochastic, "ratio", ROOT_FLOOR),
    )
    pairs = {
        "torchao.8bit": (("dynamic8", 256, 1.0), ("dynamic8_unsigned", 256, 1.0), (ZEROS, TIES)),
        "torchao.4bit": (("dynamic4", 128, 1.0), ("linear4_unsigned", 128, 1.0), (TIES,)),
        "torchao.fp8": (("float8_e4m3fn", 256, 448.0), ("float8_e4m3fn", 256, 448.0), (ZEROS,)),
    }
    others = [
        States(
            name=name, first=State(name=f"{name}.first", scheme=_torchao(*first_)),
            second=State(name=f"{name}.second", scheme=_torchao(*second_)), deviations=deviations,
        )
        for name, (first_, second_, deviations) in pairs.items()
    ]  # fmt: skip
    half = Scale(block=32, target=1.0, floor=("stored", 2.0**-24), storage="float16", partial=True)
    flash = States(
        name="flashoptim.8bit",
        first=State(
            name="softsign_int8", transform="softsign",
            scheme=Scheme(name="flashoptim.first", element="int8", scale=half),
        ),
        second=State(
            name="sqrt_uint8", transform="sqrt",
            scheme=Scheme(name="flashoptim.second", element="uint8", scale=replace(half, target=255.0)),
        ),
        deviations=(ZEROS,),
    )  # fmt: skip
    return [
        States(name="float32", first=FLOAT32, second=FLOAT32),
        States(name="8bit", first=first, second=root),
        States(name="4bit", first=first4, second=root4),
        States(name="lion.8bit", first=first, second=FLOAT32),
        *others,
        flash,
    ]


#: Every pair of states by name.
STATES: dict[str, States] = {record.name: record for record in _records()}


def states_of(states: str | States) -> States:
    """The record of a name; a record passes through. Unknown names raise ValueError with the nearest ones."""
    return states if isinstance(states, States) else lookup(states, STATES, "states")


def matrix_shape(shape: tuple[int, ...], block: int) -> tuple[int, int]:
    """(rows, length) of a parameter: its last axes, joined from the right until they hold a block, but never the first of
    several. Blocks end with a row, so that a row of an embedding has scales of its own.
    """
    axis = max(len(shape) - 1, 0)
    while axis > 1 and prod(shape[axis:]) < block:
        axis -= 1
    return prod(shape[:axis]), prod(shape[axis:])


def halves(
    shape: tuple[int, int],
    block: int,
    *,
    seed: int,
    step: int,
    parameter: int,
    swapped: bool = False,
    first: int = 0,
) -> Words:
    """uint32 words of shape (rows, length), 16 random bits in their upper halves; see the module text.

    swapped: the halves of a word change places, as for parameters. first: the number of blocks of the parameter in front of
    this part of it, where it is a shard.
    """
    rows, length = shape
    count = -(-length // block)
    total = rows * count * block
    start = first * block
    index = np.arange(start // TOGETHER, -(-(start + total) // TOGETHER), dtype=np.uint64)
    fixed = [np.full_like(index, np.uint64(value & MASK)) for value in (0, parameter, step)]
    words = np.stack(philox(seed, (index & np.uint64(MASK), fixed[0], fixed[1], fixed[2])), axis=-1)
    words = words.astype(np.uint32)
    pair = [words << np.uint32(16), words & np.uint32(0xFFFF0000)]
    both = np.stack(pair[::-1] if swapped else pair, axis=-1).reshape(-1)
    blocks = both[start % TOGETHER :][:total].reshape(rows, count * block)
    return np.ascontiguousarray(blocks[:, :length])


def store_state(x: Any, state: State, random_bits: Any = None) -> Quantized:
    """A moment as its state stores it.

    x: float32 (rows, length), NumPy, not negative where the transform is sqrt. random_bits: uint32 of its shape where the state
    is rounded stochastically. Codes come packed. Raises ValueError for a state that stores float32, and as `quantize` does.
    """
    if state.scheme is None:
        raise ValueError(f"state {state.name} stores float32 as it is; there is nothing to quantize")
    with np.errstate(all="ignore"):
        if state.transform == "softsign":
            return _store_softsign(x, state)
        if state.fraction:
            return _store_by_fraction(x, state, random_bits)
        value = np.sqrt(x) if state.transform == "sqrt" else x
        q = _quantize(value, state.scheme, random_bits=random_bits)
    if state.least:
        q = replace(q, codes=np.maximum(q.codes, np.uint8(state.least)))
    return _packed(q)


def load_state(q: Quantized, state: State) -> Floats:
    """The moment that `store_state` stored, float32 (rows, length)."""
    with np.errstate(all="ignore"):
        if state.transform == "softsign":
            return _load_softsign(q)
        value: Floats = _dequantize(q)
        return value * value if state.transform == "sqrt" else value


def load_parts(q: Quantized, state: State) -> tuple[Floats, Floats]:
    """(values, scales), both float32 (rows, length): what `store_state` stored is their product, its square for sqrt."""
    with np.errstate(all="ignore"):
        spread = _spread(q.scale, q.scheme, q.shape[-1])
        if state.transform == "softsign":
            y = q.codes.view(np.int8).astype(np.float32) / np.float32(127)
            return y / (np.float32(2) - np.abs(y)), spread
        return _decode(_unpacked(q), q.scheme.format), spread


def _unpacked(q: Quantized) -> Any:
    from reference.formats.storage import unpack

    return inspect.unwrap(unpack)(q.codes, q.scheme.format, q.shape) if q.packed else q.codes


def _packed(q: Quantized) -> Quantized:
    from reference.formats.storage import pack

    return replace(q, codes=inspect.unwrap(pack)(q.codes, q.scheme.format), packed=True)


def _store_softsign(x: Floats, state: State) -> Quantized:
    """Scales of x as the scheme chooses them, and integers nearest to 127 * 2x / (1 + |x|) of the scaled elements."""
    scheme = state.scheme
    assert scheme is not None
    scales = choose_scales(x, scheme)
    spread = _spread(scales.scale, scheme, x.shape[-1])
    scaled = np.clip(x / spread, np.float32(-1), np.float32(1))
    companded = np.float32(2) * scaled / (np.float32(1) + np.abs(scaled)) * np.float32(127)
    codes = np.rint(companded).astype(np.int8).view(np.uint8)
    return Quantized(codes, scales.scale, None, None, x.shape, 1, scheme, packed=True)


def _store_by_fraction(x: Floats, state: State, random_bits: Any) -> Quantized:
    """Elements over their scale, rounded stochastically to a fraction of some bits at any exponent, then to nearest."""
    scheme = state.scheme
    assert scheme is not None
    scales = choose_scales(x, scheme)
    spread = _spread(scales.scale, scheme, x.shape[-1])
    wide = FORMATS[f"e8m{state.fraction}"]
    scaled = x * (np.float32(1) / spread)
    rounded = _decode(_encode(scaled, wide, rounding="stochastic", random_bits=random_bits), wide)
    codes = np.where(np.isnan(spread), np.uint8(scheme.poison_code), _encode(rounded, scheme.format))
    return Quantized(codes, scales.scale, None, None, x.shape, 1, scheme, packed=True)


def _load_softsign(q: Quantized) -> Floats:
    y = q.codes.view(np.int8).astype(np.float32) / np.float32(127)
    return np.asarray(y / (np.float32(2) - np.abs(y)) * _spread(q.scale, q.scheme, q.shape[-1]), np.float32)


def _spread(scale: Any, scheme: Scheme, length: int) -> Floats:
    """float32 scales of elements, (rows, length), of stored ones (rows, blocks)."""
    storage = scheme.scale.storage
    value = scale if storage == "float32" else _decode(scale, storage)
    return np.asarray(np.repeat(value, int(scheme.scale.block), axis=-1)[:, :length])  # type: ignore[arg-type]


__all__ = [
    "FLOAT32",
    "STATES",
    "State",
    "States",
    "halves",
    "load_parts",
    "load_state",
    "matrix_shape",
    "states_of",
    "store_state",
]
