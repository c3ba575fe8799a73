"""Two outcomes compared bit for bit, and the first differences as a person wants to see them: in hexadecimal, by block."""

from __future__ import annotations

from typing import Any

import numpy as np

from ao_lab.testing.bits import bits_of
from reference import Quantized, Scales
from reference.arrays.namespace import namespace_of
from reference.quantize.blocks import Blocks

SHOWN = 3  # differing elements or blocks that are shown
AROUND = 16  # elements of a block that are shown
PARTS = ("codes", "scale", "outer", "zero")
Found = tuple[int, int, list[str]]
Array = np.ndarray[Any, Any]


def differences(got: Any, wanted: Any, x: Any = None) -> Found:
    """(values compared, values different, text) of two outcomes on the host."""
    if isinstance(got, Quantized) and isinstance(wanted, Quantized):
        return _quantized(got, wanted, x)
    if isinstance(got, Scales) and isinstance(wanted, Scales):
        return _together([_values(getattr(got, n), getattr(wanted, n), n, None) for n in PARTS[1:]])
    if isinstance(got, tuple) and isinstance(wanted, tuple) and len(got) == len(wanted):
        pairs = zip(got, wanted, strict=True)
        return _together([_prefixed(differences(a, b, x), f"[{i}]") for i, (a, b) in enumerate(pairs)])
    return _values(got, wanted, "values", x)


def _prefixed(found: Found, prefix: str) -> Found:
    return found[0], found[1], [f"{prefix} {line}" for line in found[2]]


def _together(parts: list[Found]) -> Found:
    return sum(p[0] for p in parts), sum(p[1] for p in parts), [line for p in parts for line in p[2]]


def _values(got: Any, wanted: Any, name: str, x: Any) -> Found:
    """Arrays, None, or failures."""
    arrays = isinstance(got, np.ndarray), isinstance(wanted, np.ndarray)
    if not all(arrays):
        same = not any(arrays) and got == wanted
        return 1, int(not same), [] if same else [f"{name}: got {brief(got)}, expected {brief(wanted)}"]
    if (got.dtype, got.shape) != (wanted.dtype, wanted.shape):
        return (
            max(wanted.size, 1),
            max(wanted.size, 1),
            [f"{name}: got {brief(got)}, expected {brief(wanted)}"],
        )
    a, b = bits_of(got), bits_of(wanted)
    places = np.argwhere(a != b)
    shown = [_element(name, tuple(place), a, b, x) for place in places[:SHOWN]]
    return wanted.size, len(places), shown


def _element(name: str, place: tuple[int, ...], got: Array, wanted: Array, x: Any) -> str:
    line = f"{name}{list(map(int, place))}: got {_hex(got[place])}, expected {_hex(wanted[place])}"
    alike = isinstance(x, np.ndarray) and x.shape == got.shape
    return f"{line}, input {_hex(bits_of(x)[place])}" if alike else line


def _quantized(got: Quantized, wanted: Quantized, x: Any) -> Found:
    """All parts; the first differing blocks in full if shapes allow it."""
    rest = ("shape", "axis", "scheme", "packed", "tiled")
    other = [_values(getattr(got, n, None), getattr(wanted, n, None), n, None) for n in rest]
    parts = [_values(getattr(got, name), getattr(wanted, name), name, None) for name in PARTS]
    found = _together([(0, bad, text) for _, bad, text in other] + parts)
    blocks = _blocks(got, wanted, x) if found[1] and isinstance(x, np.ndarray) else []
    return found[0], found[1], found[2] + blocks


def _blocks(got: Quantized, wanted: Quantized, x: Array) -> list[str]:
    """The first blocks that differ: input, codes and scales of both."""
    if got.codes.shape != x.shape or wanted.codes.shape != x.shape or _shape(got) != _shape(wanted):
        return []
    blocks = Blocks.of(x.shape, wanted.scheme.scale, wanted.axis)
    ns = namespace_of(x)
    inputs, theirs, ours = (_rows(blocks, ns, bits_of(v)) for v in (x, got.codes, wanted.codes))
    scales = [blocks.accept(bits_of(v), ns).reshape(-1) for v in (got.scales.scale, wanted.scales.scale)]
    wrong = np.flatnonzero((theirs != ours).any(1) | (scales[0] != scales[1]))
    return [_block(int(i), inputs[i], theirs[i], ours[i], *(s[i] for s in scales)) for i in wrong[:SHOWN]]


def _shape(q: Quantized) -> Any:
    return getattr(q.scale, "shape", None), getattr(q.scale, "dtype", None)


def _rows(blocks: Blocks, ns: Any, values: Array) -> Array:
    split = blocks.split(ns, values)
    return split.reshape(-1, split.shape[-1])


def _block(index: int, x: Array, got: Array, wanted: Array, scale: Any, right: Any) -> str:
    """One block; of a long one the part around the first difference, and its largest magnitude."""
    first = int(np.argmax(got != wanted))
    start = max(0, min(first - AROUND // 2, len(x) - AROUND))
    part = slice(start, start + AROUND)
    sign = 1 << (8 * x.dtype.itemsize - 1)
    top = _hex((x & x.dtype.type(sign - 1)).max())
    return (
        f"block {index} from element {start}: input {_list(x[part])} (largest {top}), codes got {_list(got[part])}, "
        f"expected {_list(wanted[part])}, scale got {_hex(scale)}, expected {_hex(right)}"
    )


def _hex(value: Any) -> str:
    value = np.asarray(value)
    return f"0x{int(value):0{2 * value.dtype.itemsize}x}"


def _list(values: Array) -> str:
    return "[" + " ".join(f"{int(v):0{2 * values.dtype.itemsize}x}" for v in values) + "]"


def brief(value: Any) -> str:
    """An outcome in a line."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} of shape {value.shape}"
    if isinstance(value, tuple):
        return f"({', '.join(brief(item) for item in value)})"
    if isinstance(value, (Quantized, Scales)):
        return f"{type(value).__name__}({', '.join(f'{n} {brief(getattr(value, n, None))}' for n in PARTS)})"
    return f"{type(value).__name__} {value!r}"[:600] if not hasattr(value, "text") else repr(value)[:600]
