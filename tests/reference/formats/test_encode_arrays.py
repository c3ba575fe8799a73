"""`encode` and `decode` for other libraries and unusual arrays: equal bits everywhere, and clear errors.

NumPy, JAX eager, JAX under jit, torch through NumPy's memory and torch's own operations give the same codes for random bit
patterns in every format, mode and policy. Shapes, strides, 0-d and read-only arrays work; what cannot work says why.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from reference.formats.encode import decode, encode
from reference.formats.formats import FORMATS
from tests.support import oracles
from tests.support.oracles import MODES, Array
from tests.support.record_samples import sampled

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
WORDS = oracles.words(COUNT, 5)


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
    x, random_words = jnp.asarray(X), jnp.asarray(WORDS)
    theirs = jax.jit(encode_all, static_argnums=2)(x, random_words, mode)
    assert_same(encode_all(X, WORDS, mode), theirs, mode)


@pytest.mark.parametrize("mode", sampled({"nearest_even", "stochastic"}, MODES))
def test_jax_step_by_step_gives_the_bits_of_numpy(mode: str) -> None:
    """All formats and policies one by one, without compilation."""
    theirs = encode_all(jnp.asarray(X), jnp.asarray(WORDS), mode, encode.__wrapped__)
    assert_same(encode_all(X, WORDS, mode), theirs, mode)


@pytest.mark.parametrize("mode", ["nearest_even", "stochastic"])
def test_concrete_jax_arrays_give_the_bits_of_numpy(mode: str) -> None:
    """The public function outside jit, which compiles by itself: one format of each kind."""
    for name in FORMATS_OF_EACH_PATH:
        if mode in oracles.modes(FORMATS[name]):
            bits = WORDS if mode == "stochastic" else None
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
    truth = encode_all(X, WORDS, mode)
    x, random_words = torch.from_numpy(X), torch.from_numpy(WORDS)
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


def all_codes(name: str) -> Array:
    bits = FORMATS[name].bits
    return np.arange(1 << bits).astype(np.uint8 if bits <= 8 else np.uint16)


CODES = {name: all_codes(name) for name in FORMATS}


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
        bits = np.broadcast_to(WORDS[:1, None], view.shape)
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
    with pytest.raises(TypeError, match=r"encode takes float32.* shape \(3,\)"):
        encode(x, "float8_e4m3fn")


@pytest.mark.parametrize("x", [3, [1, 2], True, 1j, "1.0", None])
def test_python_objects_that_are_no_floats(x: Any) -> None:
    with pytest.raises(TypeError, match=r"encode takes float32|an array of NumPy, JAX or torch was expected"):
        encode(x, "float8_e4m3fn")


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_other_tensors_are_type_errors(dtype: torch.dtype) -> None:
    x = torch.ones(3).to(dtype)
    for function in (encode, encode.__wrapped__):
        with pytest.raises(TypeError, match="encode takes float32"):
            function(x, "float8_e4m3fn")


@pytest.mark.parametrize(
    "codes", [np.ones(3, np.int8), np.ones(3, np.float32), [1, 2], 1.0, np.ones(2, np.uint32)]
)
def test_codes_are_unsigned_bytes(codes: Any) -> None:
    with pytest.raises(TypeError, match="decode takes codes as uint8 or uint16"):
        decode(codes, "float8_e4m3fn")


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
    with pytest.raises(ValueError, match=f"{name}.*use overflow='saturate'"):
        encode(X, name, overflow=overflow)


def test_infinity_and_nan_can_be_asked_for() -> None:
    """`inf` and `nan` choose between the two where a format has both; the sign stays with both."""
    x = np.array([1e30, -1e30], np.float32)
    assert encode(x, "float8_e5m2", overflow="inf").tolist() == [0x7C, 0xFC]
    assert encode(x, "float8_e5m2", overflow="nan").tolist() == [0x7F, 0xFF]
    assert encode(x, "float8_e4m3fn", overflow="nan").tolist() == [0x7F, 0xFF]
    assert encode(x, "float8_e4m3fnuz", overflow="nan").tolist() == [0x80, 0x80]


def test_random_bits_come_with_stochastic_rounding_only() -> None:
    with pytest.raises(ValueError, match="needs random_bits, one uint32 per element"):
        encode(X, "int8", rounding="stochastic")
    with pytest.raises(ValueError, match="'nearest_even' takes no random_bits"):
        encode(X, "int8", random_bits=WORDS)


@pytest.mark.parametrize(
    "random_bits",
    [WORDS[:-1], WORDS.view(np.int32), WORDS.astype(np.uint64), WORDS.reshape(2, -1), WORDS.tolist(), 7, jnp.asarray(WORDS)],
    ids=["short", "int32", "uint64", "shape", "list", "number", "library"],
)  # fmt: skip
def test_random_bits_of_another_kind(random_bits: Any) -> None:
    for name in ("float8_e4m3fn", "int8"):
        with pytest.raises(
            ValueError, match=r"one uint32 per element of x in the same library, shape \(2048,\)"
        ):
            encode(X, name, rounding="stochastic", random_bits=random_bits)


def test_codebooks_have_one_rounding() -> None:
    with pytest.raises(ValueError, match="rounding of codebook nf4 is one of nearest_even"):
        encode(X, "nf4", rounding="up")
