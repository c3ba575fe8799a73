"""Comparisons of arrays by their bits, for arrays of any library, with messages in hexadecimal.

Public through `ao_lab.testing.strategies`; here because it needs no Hypothesis.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from reference.arrays.bridges import to_numpy

Array = np.ndarray[Any, Any]
SHOWN = 8  # differing elements that a message lists


def bits_of(x: Any) -> Array:
    """Bit patterns of an array of any library, as NumPy unsigned integers of the same width and shape."""
    array = _numpy(x)
    if array.dtype == bool:
        return array.view(np.uint8)
    return np.ascontiguousarray(array).reshape(array.shape).view(f"uint{8 * array.dtype.itemsize}")


def assert_same_bits(actual: Any, expected: Any, *, inputs: Any = None) -> None:
    """Raise AssertionError unless both hold the same bits: NaNs by their payload, zeros by their sign.

    actual, expected: arrays of NumPy, JAX or torch (any device), in any combination, or `Quantized`, `Scales` and tuples of
    such. Shape and dtype count too. inputs: what a kernel was given; the message shows its bits where the shape agrees.
    The message lists the first differences as index, bits got, bits expected, input and says how many there are.
    """
    problems = _differences(actual, expected, inputs, "")
    if problems:
        raise AssertionError("\n".join(problems))


def assert_same_quantized(actual: Any, expected: Any, *, inputs: Any = None) -> None:
    """`assert_same_bits` of two `Quantized`: codes, scales and zero points, and the same shape, axis and scheme."""
    for q in (actual, expected):
        if not {"codes", "scale", "scheme"} <= set(getattr(q, "__dataclass_fields__", ())):
            raise TypeError(f"assert_same_quantized takes two Quantized, got {type(q).__name__}")
    assert_same_bits(actual, expected, inputs=inputs)


def _differences(actual: Any, expected: Any, inputs: Any, name: str) -> list[str]:
    """A paragraph for every array that differs."""
    actual, expected = _parts(actual), _parts(expected)
    if isinstance(actual, dict) and isinstance(expected, dict):
        keys = sorted(actual.keys() ^ expected.keys())
        found = [f"{name or 'structure'}: only one side has {', '.join(map(str, keys))}"] if keys else []
        for key in (key for key in expected if key in actual):
            inner = f"{name}.{key}" if name else str(key)
            found += _differences(actual[key], expected[key], inputs, inner)
        return found
    arrays = [hasattr(value, "dtype") for value in (actual, expected)]
    if all(arrays):
        return _array_differences(actual, expected, inputs, name or "array")
    if any(arrays) or actual != expected:
        return [f"{name or 'value'}: got {_brief(actual)}, expected {_brief(expected)}"]
    return []


def _parts(value: Any) -> Any:
    """Dataclasses of arrays and tuples as dictionaries; a scheme's record stays one value."""
    if (
        is_dataclass(value)
        and not isinstance(value, type)
        and hasattr(value, "scale")
        and hasattr(value, "outer")
    ):
        if hasattr(value, "element"):
            return value
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, (tuple, list)) and any(hasattr(item, "dtype") for item in value):
        return dict(enumerate(value))
    return value


def _array_differences(actual: Any, expected: Any, inputs: Any, name: str) -> list[str]:
    got, want = _numpy(actual), _numpy(expected)
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        same = got.shape == want.shape and got.dtype.itemsize == want.dtype.itemsize
        cure = f"; for their bits alone view one as {want.dtype}" * same
        return [
            f"{name}: got {got.dtype} of shape {got.shape}, expected {want.dtype} of shape {want.shape}{cure}"
        ]
    different = bits_of(got) != bits_of(want)
    count = int(different.sum())
    if not count:
        return []
    lines = [f"{name}: {count} of {different.size} elements differ ({want.dtype}, shape {want.shape})"]
    given = None if inputs is None else _numpy(inputs)
    for row in np.argwhere(different)[:SHOWN]:
        index = tuple(int(i) for i in row)
        line = f"  {index}: got {_hex(got[index])}, expected {_hex(want[index])}"
        lines.append(
            line if given is None or given.shape != got.shape else f"{line}, input {_hex(given[index])}"
        )
    return lines + ([f"  and {count - SHOWN} more"] if count > SHOWN else [])


def _hex(value: Any) -> str:
    """0x3f800000 (1.0); integers without a second reading."""
    value = np.asarray(value)
    pattern = f"0x{int(bits_of(value)):0{2 * value.dtype.itemsize}x}"
    return pattern if value.dtype.kind in "uib" else f"{pattern} ({value[()]})"


def _brief(value: Any) -> str:
    return f"{value.dtype} array of shape {tuple(value.shape)}" if hasattr(value, "dtype") else repr(value)


def _numpy(value: Any) -> Array:
    """Any library's array as NumPy, bits untouched."""
    if type(value).__module__.partition(".")[0] == "torch" or hasattr(value, "detach"):
        value = to_numpy(value.detach().cpu())
    return np.asarray(value)


__all__ = ["assert_same_bits", "assert_same_quantized", "bits_of"]
