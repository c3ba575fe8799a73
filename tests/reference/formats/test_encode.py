"""`encode` and `decode` against a definition in exact fractions (`tests.support.oracles`), on float32 and float64 bit patterns.

What other libraries say about every 16-bit pattern is in `test_encode_exhaustive`.

For other libraries and unusual arrays bits are equal everywhere, and errors clear: NumPy, JAX eager, JAX under jit, torch
through NumPy's memory and torch's own operations give the same codes for random bit patterns in every format, mode and
policy. Shapes, strides, 0-d and read-only arrays work; what cannot work says why.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.arrays.namespace import namespace_of
from reference.formats.encode import decode, encode, encode_bits
from reference.formats.formats import FORMATS, Format
from tests.support import oracles
from tests.support.oracles import CODEBOOKS, FLOATS, MODES, Array, encode_with, exact_code
from tests.support.record_samples import sampled
from tests.support.refusals import refused

WORDS = oracles.words(1 << 16)
# Integers of other widths are the same rule with another limit; their values, ties and limits are all tested below.
WIDTHS = {f"{sign}int{bits}" for sign in ("", "u") for bits in (2, 3, 5, 6, 7)}
DRAWN = sampled(set(FORMATS) - WIDTHS, FORMATS)


# -- The exact definition ----------------------------------------------------------------------------------------------


def assert_exact(x: Array, fmt: Format, mode: str, overflow: str, random_words: Array) -> None:
    """`encode` of a float32 or float64 array equals the definition in fractions, element by element."""
    ours = encode_with(x, fmt, mode, overflow, random_words)
    stochastic = mode == "stochastic"
    # Random bits meet the 24-bit significand: a float64 is rounded to odd first, as the module says.
    numbers = [oracles.odd_float32(float(v)) if stochastic else float(v) for v in x]
    truth = np.array(
        [exact_code(v, fmt, mode, overflow, int(w)) for v, w in zip(numbers, random_words, strict=True)],
        ours.dtype,
    )
    assert (ours == truth).all(), f"{fmt.name} {mode} {overflow}: {oracles.first_mismatches(ours, truth, x)}"


def neighbours(fmt: Format, dtype: str) -> Array:
    """Every value, tie and limit of the format, one unit of `dtype` below and above, both signs, and the specials."""
    with np.errstate(over="ignore"):
        marks = np.array(oracles.landmarks(fmt), dtype)
    up, down = np.array(np.inf, dtype), np.array(-np.inf, dtype)
    with np.errstate(over="ignore", under="ignore"):
        near = np.concatenate(
            [marks, np.nextafter(marks, up), np.nextafter(marks, down), [np.inf, np.nan, 1e30]]
        )
    return np.concatenate([near, -near]).astype(dtype)


@pytest.mark.parametrize("name", FORMATS)
def test_neighbours_of_every_value_and_tie_are_exact(name: str) -> None:
    """float32 and float64 numbers next to every value and tie, all modes and policies, against exact fractions."""
    fmt = FORMATS[name]
    for dtype in ("float32", "float64"):
        x = neighbours(fmt, dtype)
        for mode in oracles.modes(fmt):
            for overflow in oracles.policies(fmt):
                assert_exact(x, fmt, mode, overflow, oracles.words(len(x), 7))


@pytest.mark.parametrize("name", DRAWN)
@settings(max_examples=40)
@given(data=st.data())
def test_float32_bit_patterns_are_exact(name: str, data: st.DataObject) -> None:
    """Random float32 bit patterns, ties, subnormals and limits against exact fractions."""
    _check_random_patterns(FORMATS[name], data, oracles.float32_patterns(FORMATS[name]), "float32")


@pytest.mark.parametrize("name", DRAWN)
@settings(max_examples=40)
@given(data=st.data())
def test_float64_bit_patterns_are_rounded_once(name: str, data: st.DataObject) -> None:
    """Random float64 bit patterns, and values that float32 would move onto or across a tie, against exact fractions."""
    _check_random_patterns(FORMATS[name], data, oracles.float64_patterns(FORMATS[name]), "float64")


def _check_random_patterns(fmt: Format, data: st.DataObject, one: st.SearchStrategy[int], dtype: str) -> None:
    width = 8 if dtype == "float32" else 16
    patterns = data.draw(st.lists(one, min_size=1, max_size=16), "bit patterns")
    drawn = data.draw(st.lists(st.integers(0, 0xFFFFFFFF), min_size=len(patterns), max_size=len(patterns)))
    mode = data.draw(st.sampled_from(oracles.modes(fmt)), "rounding")
    overflow = data.draw(st.sampled_from(oracles.policies(fmt)), "overflow")
    x = np.array(patterns, f"uint{4 * width}").view(dtype)
    try:
        assert_exact(x, fmt, mode, overflow, np.array(drawn, np.uint32))
    except AssertionError as error:
        error.add_note(
            f"{dtype} {oracles.hexadecimal(patterns, width)}, words {oracles.hexadecimal(drawn, 8)}"
        )
        raise


# -- Tables ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in FORMATS if FORMATS[n].bits <= 8 and n not in CODEBOOKS])
def test_table_and_rule_agree(name: str) -> None:
    """`encode` of NumPy arrays, which may use a table, equals the rule `encode_bits` on random and sticky bit patterns."""
    drawn = np.random.default_rng(3).integers(0, 1 << 32, 1 << 15, dtype=np.uint32)
    tops = np.arange(1 << 16, dtype=np.uint32) << 16
    # One low bit, the lowest or the highest, decides between a tie and its neighbour.
    bits = np.concatenate([drawn, tops | 1, tops | 0x8000, tops])
    fmt, ns = FORMATS[name], namespace_of(bits)
    for mode in MODES[:-1]:
        for overflow in oracles.policies(fmt):
            rule = encode_bits(ns, bits.view(np.int32), fmt, mode, overflow)
            ours = encode(bits.view(np.float32), fmt, rounding=mode, overflow=overflow)
            assert (ours == rule).all(), f"{mode} {overflow}: {oracles.first_mismatches(ours, rule, bits)}"


# -- decode ------------------------------------------------------------------------------------------------------------


def all_codes(fmt: Format) -> Array:
    """Every code of a format."""
    return np.arange(1 << fmt.bits).astype(np.uint8 if fmt.bits <= 8 else np.uint16)


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_has_its_exact_value(name: str) -> None:
    """`decode` of every code against sign, exponent and mantissa in fractions, bit for bit with the sign of zero."""
    fmt = FORMATS[name]
    codes = all_codes(fmt)
    truth = np.array(
        [oracles.float32_pattern(*oracles.exact_value(fmt, int(code))) for code in codes], np.uint32
    )
    ours = decode(codes, name).view(np.uint32)
    assert (ours == truth).all(), oracles.first_mismatches(ours, truth, codes)


@pytest.mark.parametrize(
    "name", [n for n in FORMATS if hasattr(ml_dtypes, n) or n in ("float16", "int8", "uint8")]
)
def test_every_code_decodes_as_in_ml_dtypes(name: str) -> None:
    """`decode` of every code against ml_dtypes' (or NumPy's) view of the same byte; NaN against NaN."""
    codes = all_codes(FORMATS[name])
    dtype = oracles.dtype_of(name)
    with np.errstate(invalid="ignore"):
        theirs = codes.view(dtype).astype(np.float32)
    ours = decode(codes, name)
    nan = np.isnan(ours)
    assert (nan == np.isnan(theirs)).all()
    assert (ours.view(np.uint32) == theirs.view(np.uint32))[~nan].all()


@pytest.mark.parametrize("name", FORMATS)
def test_encode_of_decode_is_the_identity(name: str) -> None:
    """encode(decode(c)) == c for every code that is not NaN, in every mode and policy.

    -0 keeps its code where the format has one; the lowest integer of int8_nan and 0xFF of e8m0 are NaN and go to
    `nan_code`; every other code that is ever written (-2 of ternary is not), infinities included, comes back. In `saturate` an
    infinity becomes the largest value.
    """
    fmt = FORMATS[name]
    codes = all_codes(fmt)
    values = decode(codes, name)
    for mode in oracles.modes(fmt):
        for overflow in oracles.policies(fmt):
            infinite = np.isinf(values)
            kept = (infinite & (overflow != "saturate")) | (~infinite & (values >= fmt.min))
            back = encode_with(values, fmt, mode, overflow, WORDS[: len(values)])
            assert (back == codes)[kept].all(), oracles.first_mismatches(back[kept], codes[kept], codes[kept])
            assert (back[np.isnan(values)] == fmt.nan_code).all()


@pytest.mark.parametrize("name", ["float6_e2m3fn", "float4_e2m1fn", "int4", "uint2", "nf4"])
def test_decode_ignores_bits_above_the_format(name: str) -> None:
    fmt = FORMATS[name]
    codes = np.arange(256).astype(np.uint8)
    low = codes & np.uint8((1 << fmt.bits) - 1)
    assert (decode(codes, name).view(np.uint32) == decode(low, name).view(np.uint32)).all()


@pytest.mark.parametrize("name", FLOATS)
def test_nan_payloads_and_signs_are_dropped(name: str) -> None:
    """Every kind of float32 and float64 NaN, signalling ones too, becomes the one NaN of the format, or 0."""
    single = np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFC00000, 0xFFFFFFFF], np.uint32)
    double = np.array([0x7FF8000000000000, 0xFFF8000000000001, 0xFFFFFFFFFFFFFFFF], np.uint64)
    for x in (single.view(np.float32), double.view(np.float64)):
        for mode in MODES:
            for overflow in oracles.policies(FORMATS[name]):
                codes = encode_with(x, name, mode, overflow, WORDS[: len(x)])
                assert set(codes.tolist()) == {FORMATS[name].nan_code or 0}


# Every combination that exists, for one mode.
CASES = {
    mode: [(n, p) for n, f in FORMATS.items() if mode in oracles.modes(f) for p in oracles.policies(f)]
    for mode in MODES
}
FORMATS_OF_EACH_PATH = ["float8_e4m3fn", "bfloat16", "int8", "nf4", "float8_e8m0fnu"]
COUNT = 1 << 11


def random_patterns() -> Array:
    """float32 with uniformly random bits, half of them with exponents near 1, subnormals and specials among them."""
    rng = np.random.default_rng(11)
    bits = rng.integers(0, 1 << 32, COUNT, dtype=np.uint32)
    bits[: COUNT // 2] = (bits[: COUNT // 2] & 0x8FFFFFFF) | 0x38000000
    bits[-256:-128] &= 0x807FFFFF
    bits[-128:-64] &= 0xFFFF0000
    bits[-64:] &= 0xFF800000
    return bits.view(np.float32)


X = random_patterns()
ARRAY_WORDS = oracles.words(COUNT, 5)


def encode_all(x: Any, random_words: Any, mode: str, function: Any = encode) -> list[Any]:
    """Codes in every format and policy of a mode."""
    bits = random_words if mode == "stochastic" else None
    return [
        function(x, name, rounding=mode, overflow=policy, random_bits=bits) for name, policy in CASES[mode]
    ]


def assert_same(ours: list[Any], theirs: list[Any], mode: str, x: Array = X) -> None:
    for case, a, b in zip(CASES[mode], ours, theirs, strict=True):
        b = np.asarray(b)
        assert a.dtype == b.dtype, case
        assert (a == b).all(), f"{case} {mode}: {oracles.first_mismatches(a, b, x)}"


@pytest.mark.parametrize("mode", MODES)
def test_jax_under_jit_gives_the_bits_of_numpy(mode: str) -> None:
    """All formats and policies in one compiled function."""
    x, random_words = jnp.asarray(X), jnp.asarray(ARRAY_WORDS)
    theirs = jax.jit(encode_all, static_argnums=2)(x, random_words, mode)
    assert_same(encode_all(X, ARRAY_WORDS, mode), theirs, mode)


@pytest.mark.parametrize("mode", sampled({"nearest_even", "stochastic"}, MODES))
def test_jax_step_by_step_gives_the_bits_of_numpy(mode: str) -> None:
    """All formats and policies one by one, without compilation."""
    theirs = encode_all(jnp.asarray(X), jnp.asarray(ARRAY_WORDS), mode, encode.__wrapped__)
    assert_same(encode_all(X, ARRAY_WORDS, mode), theirs, mode)


@pytest.mark.parametrize("mode", ["nearest_even", "stochastic"])
def test_concrete_jax_arrays_give_the_bits_of_numpy(mode: str) -> None:
    """The public function outside jit, which compiles by itself: one format of each kind."""
    for name in FORMATS_OF_EACH_PATH:
        if mode in oracles.modes(FORMATS[name]):
            bits = ARRAY_WORDS if mode == "stochastic" else None
            there = None if bits is None else jnp.asarray(bits)
            theirs = np.asarray(encode(jnp.asarray(X), name, rounding=mode, random_bits=there))
            assert (theirs == encode(X, name, rounding=mode, random_bits=bits)).all(), name


@pytest.mark.parametrize("source", sampled({"bfloat16"}, oracles.SIXTEEN_BIT))
def test_jax_takes_16_bit_floats(source: str) -> None:
    """bfloat16 and float16 inputs, every pattern, nearest even, under jit."""
    x = oracles.every_pattern(source)
    theirs = jax.jit(encode_all, static_argnums=2)(jnp.asarray(x), None, "nearest_even")
    assert_same(encode_all(x, None, "nearest_even"), theirs, "nearest_even", x)


@pytest.mark.parametrize("mode", sampled({"nearest_even"}, ["nearest_even", "up"]))
def test_jax_takes_float64(mode: str) -> None:
    """With 64-bit types enabled: digits and subnormals that float32 lacks, under jit."""
    with np.errstate(invalid="ignore"):
        x = np.concatenate([X.astype(np.float64) * (1 + 2.0**-30), X.astype(np.float64) * 2.0**-20])
    truth = encode_all(x, None, mode)
    with jax.enable_x64(True):
        theirs = jax.jit(encode_all, static_argnums=2)(jnp.asarray(x), None, mode)
        assert_same(truth, theirs, mode, x)


def test_jax_vmap_gives_the_bits_of_numpy() -> None:
    x = X.reshape(8, -1)
    theirs = jax.jit(jax.vmap(lambda row: encode(row, "float6_e3m2fn")))(jnp.asarray(x))
    assert (np.asarray(theirs) == encode(x, "float6_e3m2fn")).all()


@pytest.mark.parametrize("mode", MODES)
def test_torch_gives_the_bits_of_numpy(mode: str) -> None:
    """CPU tensors through shared memory, and torch's own operations (`encode.__wrapped__`), as on other devices."""
    truth = encode_all(X, ARRAY_WORDS, mode)
    x, random_words = torch.from_numpy(X), torch.from_numpy(ARRAY_WORDS)
    assert_same(truth, encode_all(x, random_words, mode), mode)
    assert_same(truth, encode_all(x, random_words, mode, encode.__wrapped__), mode)


@pytest.mark.parametrize("source", [*oracles.SIXTEEN_BIT, "float64"])
def test_torch_takes_other_floats(source: str) -> None:
    """Every 16-bit pattern, and float64 with digits that float32 lacks; both torch paths."""
    with np.errstate(invalid="ignore"):
        wide = X.astype(np.float64) * (1 + 2.0**-30)
    x = wide if source == "float64" else oracles.every_pattern(source)
    carrier = x.view(np.int16) if x.itemsize == 2 else x
    tensor = torch.from_numpy(carrier).view(getattr(torch, source))
    truth = encode_all(x, None, "nearest_even")
    for function in (encode, encode.__wrapped__):
        assert_same(truth, encode_all(tensor, None, "nearest_even", function), "nearest_even", x)


CODES = {name: all_codes(fmt) for name, fmt in FORMATS.items()}


def float_bits(values: Any) -> Array:
    return np.asarray(values).view(np.uint32)


def test_decode_is_the_same_in_jax() -> None:
    """Every code, eager and in one program for all formats, bit for bit (subnormals and NaN included)."""
    codes = {name: jnp.asarray(array) for name, array in CODES.items()}
    together = jax.jit(lambda codes: {name: decode(array, name) for name, array in codes.items()})(codes)
    for name, array in CODES.items():
        truth = float_bits(decode(array, name))
        assert (float_bits(decode.__wrapped__(codes[name], name)) == truth).all(), name
        assert (float_bits(together[name]) == truth).all(), name


@pytest.mark.parametrize("name", FORMATS)
def test_decode_is_the_same_in_torch(name: str) -> None:
    """Every code, through NumPy's memory and by torch's own operations."""
    truth, tensor = float_bits(decode(CODES[name], name)), torch.from_numpy(CODES[name])
    assert (float_bits(decode(tensor, name)) == truth).all()
    assert (float_bits(decode.__wrapped__(tensor, name)) == truth).all()


# -- Shapes, strides and kinds of arrays -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS_OF_EACH_PATH)
@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0, 2), (), (1,), (3, 1, 5)])
def test_shapes(name: str, shape: tuple[int, ...]) -> None:
    """Empty, 0-d and odd shapes keep their shape in every library."""
    x = np.full(shape, 1.5, np.float32)
    code = int(encode(np.float32(1.5), name))
    for array in (x, jnp.asarray(x), torch.from_numpy(x)):
        codes = encode(array, name)
        assert tuple(codes.shape) == shape
        assert isinstance(codes, jax.Array | np.ndarray | torch.Tensor)
        assert (np.asarray(codes) == code).all()
        values = decode(codes, name)
        assert tuple(values.shape) == shape
        assert (np.asarray(values) == FORMATS[name].values[code]).all()


@pytest.mark.parametrize("name", FORMATS_OF_EACH_PATH)
def test_strides(name: str) -> None:
    """Transposed, sliced, reversed, broadcast, Fortran-ordered and read-only arrays equal their contiguous copies."""
    x = X.reshape(16, -1)
    frozen = x.copy()
    frozen.setflags(write=False)
    for view in (
        x.T,
        x[::3, 1::2],
        x[::-1, ::-1],
        np.broadcast_to(x[:1], x.shape),
        np.asfortranarray(x),
        frozen,
    ):
        copy = view.copy(order="C")
        assert (encode(view, name) == encode(copy, name)).all()
        bits = np.broadcast_to(ARRAY_WORDS[:1, None], view.shape)
        drawn = np.ascontiguousarray(bits)
        if name != "nf4":
            ours = encode(view, name, rounding="stochastic", random_bits=bits)
            assert (ours == encode(copy, name, rounding="stochastic", random_bits=drawn)).all()
        codes = encode(view, name)
        assert (decode(codes[::-1], name).view(np.uint32) == decode(codes, name)[::-1].view(np.uint32)).all()


@pytest.mark.parametrize("name", FORMATS_OF_EACH_PATH)
def test_strides_in_torch(name: str) -> None:
    """Transposed, sliced and expanded tensors and parameters; the result is a tensor that can be written to."""
    x = torch.from_numpy(X.copy()).view(16, -1)
    for view in (x.t(), x[::3, 1::2], x[:1].expand(16, -1), torch.nn.Parameter(x)):
        codes = encode(view, name)
        assert (codes.numpy() == encode(view.detach().numpy().copy(), name)).all()
        assert (encode.__wrapped__(view.detach(), name) == codes).all()
        codes[...] = 0


def test_input_is_left_alone() -> None:
    x = X.copy()
    for name in FORMATS_OF_EACH_PATH:
        encode(x, name)
    assert (x.view(np.uint32) == X.view(np.uint32)).all()


class Labelled(np.ndarray[Any, Any]):
    """A subclass such as users have."""


def test_subclasses_give_plain_arrays() -> None:
    """A subclass is read as an array; codes carry no label. (`tests/reference/arrays/test_namespace.py` has those that are
    refused.)
    """
    for name in FORMATS_OF_EACH_PATH:
        labelled = X.view(Labelled)
        codes = encode(labelled, name)
        assert type(codes) is np.ndarray
        assert (codes == encode(X, name)).all()


def test_python_numbers() -> None:
    """Python floats and lists of them are float64, rounded once."""
    assert encode(464.0, "float8_e4m3fn") == 0x7E
    assert np.shape(encode(1.0, "float8_e4m3fn")) == ()
    assert encode([1.0, -2.0], "float8_e4m3fn").tolist() == [0x38, 0xC0]
    # float32 would round this onto the tie 1.0625 and then to even, 1.0.
    assert encode(1.0625 + 2.0**-40, "float8_e4m3fn") == 0x39


# -- Errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", ["int32", "uint8", "bool", "complex64", "float8_e4m3fn", "longdouble", ">f4", "O"]
)
def test_other_inputs_are_type_errors(dtype: str) -> None:
    """Integers, booleans, complex numbers, narrower and wider floats, and foreign byte order are named in the message."""
    x = np.ones(3, dtype if dtype in (">f4", "O") else getattr(ml_dtypes, dtype, dtype))
    refused(TypeError, r"encode takes float32.* shape \(3,\)", encode, x, "float8_e4m3fn")


@pytest.mark.parametrize("x", [3, [1, 2], True, 1j, "1.0", None])
def test_python_objects_that_are_no_floats(x: Any) -> None:
    with pytest.raises(TypeError, match=r"encode takes float32|an array of NumPy, JAX or torch was expected"):
        encode(x, "float8_e4m3fn")


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_other_tensors_are_type_errors(dtype: torch.dtype) -> None:
    x = torch.ones(3).to(dtype)
    for function in (encode, encode.__wrapped__):
        refused(TypeError, "encode takes float32", function, x, "float8_e4m3fn")


@pytest.mark.parametrize(
    "codes", [np.ones(3, np.int8), np.ones(3, np.float32), [1, 2], 1.0, np.ones(2, np.uint32)]
)
def test_codes_are_unsigned_bytes(codes: Any) -> None:
    refused(TypeError, "decode takes codes as uint8 or uint16", decode, codes, "float8_e4m3fn")


def test_unknown_names() -> None:
    """An unknown format names its neighbours; an unknown mode or policy names all of them."""
    for function, x in ((encode, X), (decode, np.zeros(1, np.uint8))):
        with pytest.raises(ValueError, match="unknown format 'float8_e4m3'; the nearest are float8_e4m3fn"):
            function(x, "float8_e4m3")
        with pytest.raises(TypeError, match="a format is given by name or as a record, got int"):
            function(x, 8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"rounding is one of nearest_even, nearest_away.*got 'nearest'"):
        encode(X, "int8", rounding="nearest")
    with pytest.raises(ValueError, match=r"overflow is one of saturate, nonfinite.*got 'clip'"):
        encode(X, "int8", overflow="clip")


@pytest.mark.parametrize(
    ("name", "overflow"),
    [("float8_e4m3fn", "inf"), ("float8_e8m0fnu", "inf"), ("float8_e5m2fnuz", "inf"), ("float4_e2m1fn", "nan"),
     ("float6_e2m3fn", "nonfinite"), ("int8", "nan"), ("nf4", "nonfinite"), ("int8_nan", "nonfinite")],
)  # fmt: skip
def test_overflow_that_a_format_cannot_express(name: str, overflow: str) -> None:
    refused(ValueError, f"{name}.*use overflow='saturate'", encode, X, name, overflow=overflow)


def test_infinity_and_nan_can_be_asked_for() -> None:
    """`inf` and `nan` choose between the two where a format has both; the sign stays with both."""
    x = np.array([1e30, -1e30], np.float32)
    assert encode(x, "float8_e5m2", overflow="inf").tolist() == [0x7C, 0xFC]
    assert encode(x, "float8_e5m2", overflow="nan").tolist() == [0x7F, 0xFF]
    assert encode(x, "float8_e4m3fn", overflow="nan").tolist() == [0x7F, 0xFF]
    assert encode(x, "float8_e4m3fnuz", overflow="nan").tolist() == [0x80, 0x80]


def test_random_bits_come_with_stochastic_rounding_only() -> None:
    refused(ValueError, "needs random_bits, one uint32 per element", encode, X, "int8", rounding="stochastic")
    refused(ValueError, "'nearest_even' takes no random_bits", encode, X, "int8", random_bits=ARRAY_WORDS)


@pytest.mark.parametrize(
    "random_bits",
    [
        ARRAY_WORDS[:-1], ARRAY_WORDS.view(np.int32), ARRAY_WORDS.astype(np.uint64), ARRAY_WORDS.reshape(2, -1),
        ARRAY_WORDS.tolist(), 7, jnp.asarray(ARRAY_WORDS),
    ],
    ids=["short", "int32", "uint64", "shape", "list", "number", "library"],
)  # fmt: skip
def test_random_bits_of_another_kind(random_bits: Any) -> None:
    for name in ("float8_e4m3fn", "int8"):
        with pytest.raises(
            ValueError, match=r"one uint32 per element of x in the same library, shape \(2048,\)"
        ):
            encode(X, name, rounding="stochastic", random_bits=random_bits)


def test_codebooks_have_one_rounding() -> None:
    refused(ValueError, "rounding of codebook nf4 is one of nearest_even", encode, X, "nf4", rounding="up")
