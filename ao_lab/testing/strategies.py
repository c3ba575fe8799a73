"""Hypothesis strategies for the inputs that break quantization kernels, and comparisons that print bit patterns.

A kernel of your own is held against the specification like this::

    from hypothesis import given
    from ao_lab import quantize, testing

    @given(testing.blocks("mxfp4", dtype="bfloat16"))
    def test_my_kernel(x):
        expected = quantize(x, "mxfp4")
        codes, scale = my_kernel(torch.from_numpy(x.view("int16")).view(torch.bfloat16).cuda())
        testing.assert_same_bits(codes, expected.codes, inputs=x)
        testing.assert_same_bits(scale, expected.scale)

`float_arrays` draws elements (random bit patterns, ties of a format and their neighbours, subnormals, both zeros, NaN,
infinities, the largest floats), `blocks` draws arrays whose blocks have difficult maxima, `shapes` the shapes that a scheme
takes, odd and empty ones included, and `fill` makes a large array of one kind without Hypothesis. All return NumPy arrays.
Large arrays come from a drawn seed and a drawn list of kinds, single elements are then drawn on top: so the same choices
always give the same array, and a failure shrinks toward zeros with few elements that matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from ao_lab.install.extras import MissingExtra, missing

try:
    from hypothesis import strategies as st
    from hypothesis.strategies import DrawFn, SearchStrategy
except ModuleNotFoundError:
    raise MissingExtra(missing("hypothesis"), name="hypothesis") from None

from ao_lab.testing.bits import assert_same_bits, assert_same_quantized, bits_of
from ao_lab.testing.samples import FILLS, FINITE_KINDS, KINDS, Array, Layout, Shape, fill, signed, ties
from reference.arrays.namespace import DTypeLike, namespace_of
from reference.formats.formats import Format
from reference.quantize.blocks import Blocks
from reference.schemes.schemes import Scheme, scheme_of

NEAR = (-1, 0, 1)  # one pattern below, at, and above a power of two or a target


@st.composite
def float_arrays(
    draw: DrawFn,
    dtype: DTypeLike = "float32",
    shape: Shape | SearchStrategy[Shape] = (4, 32),
    *,
    kinds: Sequence[str] = KINDS,
    fmt: str | Format = "float8_e4m3fn",
) -> Array:
    """Arrays of one to three kinds, mixed, with up to four more elements drawn one by one.

    dtype: float32, bfloat16, float16 or float64. kinds: which of `KINDS` occur. fmt: whose ties are meant.
    """
    size = shape if isinstance(shape, tuple) else draw(shape)
    chosen = draw(st.lists(st.sampled_from(list(kinds)), min_size=1, max_size=3, unique=True))
    seed = draw(st.integers(0, 2**32 - 1))
    parts = [fill(kind, size, dtype=dtype, seed=seed + i, fmt=fmt) for i, kind in enumerate(chosen)]
    x = np.choose(
        np.random.default_rng(seed).integers(0, len(parts), size), [bits_of(part) for part in parts]
    )
    flat = np.asarray(x).reshape(-1)
    if flat.size:
        single = st.tuples(st.integers(0, flat.size - 1), _elements(dtype, kinds, fmt))
        for index, value in draw(st.lists(single, max_size=4)):
            flat[index] = value
    return flat.reshape(size).view(Layout.of(dtype).dtype)


def _elements(dtype: DTypeLike, kinds: Sequence[str], fmt: str | Format) -> SearchStrategy[int]:
    """Bit patterns of single elements."""
    few = [bits_of(fill(kind, (16,), dtype=dtype, fmt=fmt)).tolist() for kind in kinds]
    return st.sampled_from(sorted({pattern for patterns in few for pattern in patterns}))


@st.composite
def shapes(draw: DrawFn, scheme: str | Scheme, *, axis: int = -1, most: int = 3) -> Shape:
    """Shapes that a scheme takes along `axis`: up to `most` blocks, short last blocks where allowed, empty axes, 0-d."""
    record = scheme_of(scheme)
    return draw(_lengths(record, axis, most).filter(lambda shape: _fits(shape, record, axis)))


def _fits(shape: Shape, scheme: Scheme, axis: int) -> bool:
    try:
        blocks = Blocks.of(shape, scheme.scale, axis)
        if scheme.outer is not None and scheme.outer.statistic != "absmax_elements":
            Blocks.of(blocks.scale_shape, scheme.outer, 0)
    except ValueError:
        return False
    return True


def _lengths(scheme: Scheme, axis: int, most: int) -> SearchStrategy[Shape]:
    block, small = scheme.scale.block, st.integers(0, 4)
    if isinstance(block, str) or block == -1:
        if not block_of_scales(scheme):
            return st.lists(small | st.integers(5, 70), min_size=0, max_size=3).map(tuple)
        quantum = int(str(block)[5:]) * block_of_scales(scheme)
        return st.integers(0, most).flatmap(lambda n: st.sampled_from([(n * quantum,), (n, 8, quantum // 8)]))
    sizes = block if isinstance(block, tuple) else (block,)
    lengths = [_multiple(size, most, scheme.scale.partial) for size in sizes]
    lead = st.lists(small, max_size=2)
    return st.builds(lambda lead, *inner: _placed((*lead, *inner), axis), lead, *lengths)


def block_of_scales(scheme: Scheme) -> int:
    """How many scales share an outer scale, where a short last group of them is refused; else 0."""
    outer = scheme.outer
    return outer.block if outer is not None and isinstance(outer.block, int) and not outer.partial else 0


def _multiple(size: int, most: int, partial: bool) -> SearchStrategy[int]:
    whole = st.integers(0, most).map(lambda n: n * size)
    return whole | st.integers(1, most * size) if partial else whole


def _placed(shape: Shape, axis: int) -> Shape:
    """The last length moved to `axis`, if that axis exists."""
    if not -len(shape) <= axis < len(shape):
        return shape
    rest = list(shape[:-1])
    rest.insert(axis % len(shape), shape[-1])
    return tuple(rest)


#: What the largest magnitude of a block can be, the simplest first.
MAXIMA = ("zero", "power", "target", "subnormal", "largest", "wide", "nan", "infinity", "bits")


@st.composite
def blocks(
    draw: DrawFn,
    scheme: str | Scheme,
    *,
    dtype: DTypeLike = "float32",
    shape: Shape | SearchStrategy[Shape] | None = None,
    axis: int = -1,
    maxima: Sequence[str] = MAXIMA,
) -> Array:
    """Arrays whose blocks, as `scheme` cuts them along `axis`, have difficult maxima.

    Each block is all zeros, has a maximum of a power of two or of target * 2**k (or one bit pattern below or above it), is
    subnormal, reaches the largest float, is finite with any exponents, holds one NaN or one infinity, or is random bits.
    """
    record, layout = scheme_of(scheme), Layout.of(dtype)
    size = shape if isinstance(shape, tuple) else draw(shapes(record, axis=axis) if shape is None else shape)
    cut = Blocks.of(size, record.scale, axis)
    split = cut.split(namespace_of(np.zeros(())), np.zeros(size, np.int32))
    one = st.tuples(st.sampled_from(list(maxima)), st.integers(0, (1 << 16) - 1), st.sampled_from(NEAR))
    recipes = draw(st.lists(one, min_size=1, max_size=6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = np.zeros((prod(split.shape[:-1]), split.shape[-1]), layout.unsigned)
    for i in range(len(rows) if rows.size else 0):
        rows[i] = _block(rng, rows.shape[1], recipes[i % len(recipes)], record, layout)
    return np.asarray(cut.join(namespace_of(rows), rows.reshape(split.shape))).view(layout.dtype)


def _block(
    rng: np.random.Generator, size: int, recipe: tuple[str, int, int], scheme: Scheme, layout: Layout
) -> Array:
    """Bit patterns of one block: a maximum of the recipe's kind at a random place, the rest below it."""
    kind, number, step = recipe
    if kind == "bits":
        return FILLS["bits"](rng, (size,), layout, scheme.format)
    largest = _maximum(kind, number, step, scheme.scale.target, layout)
    limit = largest if 0 < largest < layout.infinity else 0 if kind == "zero" else layout.infinity - 1
    # Half of the elements anywhere below the maximum, half within four binades of it.
    low = max(limit - (4 << layout.mantissa), 0)
    magnitude = rng.integers(
        np.where(rng.integers(0, 2, size) == 0, 0, low), limit + 1, dtype=layout.unsigned
    )
    magnitude = np.where(rng.integers(0, 3, size) == 0, _shortened(rng, magnitude, scheme, layout), magnitude)
    magnitude[number % size] = largest
    return signed(rng, magnitude, layout)


def _shortened(rng: np.random.Generator, magnitude: Array, scheme: Scheme, layout: Layout) -> Array:
    """Few significant bits, as ties have: where the scale is a power of two many of them are ties."""
    kept = rng.integers(0, min(scheme.format.bits, layout.mantissa) + 1, magnitude.shape)
    lost = (layout.mantissa - kept).astype(layout.unsigned)
    return np.asarray((magnitude >> lost) << lost)


def _maximum(kind: str, number: int, step: int, target: float, layout: Layout) -> int:
    exponents = (layout.infinity >> layout.mantissa) - 1
    top, mantissa = layout.infinity - 1, (1 << layout.mantissa) - 1
    field = (number % exponents + 1) << layout.mantissa
    fraction = int(layout.pattern(target)) & mantissa
    return {
        "zero": 0,
        "power": min(field + step, top),
        "target": min(field + fraction + step, top),
        "subnormal": 1 + number % mantissa,
        "largest": top - number % 3,
        "wide": layout.smallest_normal + number * (top - layout.smallest_normal) // ((1 << 16) - 1),
        "nan": layout.infinity + 1 + number % mantissa,
        "infinity": layout.infinity,
    }[kind]


__all__ = [
    "FINITE_KINDS",
    "KINDS",
    "MAXIMA",
    "assert_same_bits",
    "assert_same_quantized",
    "blocks",
    "fill",
    "float_arrays",
    "shapes",
    "ties",
]
