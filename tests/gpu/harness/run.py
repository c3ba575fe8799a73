"""What a test of kernels does: call `fast` and `reference` on the same values, compare all bits, keep a count.

A `Run` is what a job gets: the device, the module that stands for `fast`, and the list of its checks. A call that raises is an
outcome like any other: the same class and text are expected from both sides.

Two outcomes compared bit for bit, and the first differences as a person wants to see them: in hexadecimal, by block.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np
import torch

import reference
from ao_lab.testing.bits import bits_of
from reference import Quantized, Scales
from reference.arrays.bridges import to_numpy, to_torch
from reference.arrays.namespace import namespace_of
from reference.quantize.blocks import Blocks
from tests.gpu.harness.poison import poisoned

WATCHED = ("quantize", "dequantize", "choose_scales", "encode", "decode", "pack", "unpack", "fake_quantize",
           "fake_quantize_vjp", "linear", "quantize_both", "rms_norm_quantize", "layer_norm_quantize", "swiglu_quantize",
           "prune", "compress", "decompress", "quantize_compressed", "prune_transposable", "compress_transposable",
           "linear_sparse", "linear_sparse_int4")  # fmt: skip
SHOWN = 6  # failing checks of a job that keep their text
UNSET = object()
#: Bytes that outputs hold before they are written; none is the code or scale that a test would expect throughout.
POISONS = (0xA5, 0x5A, 0x3C, 0xC3, 0x96)


class DeviceLost(RuntimeError):
    """The CUDA context of this process is of no more use."""


@dataclass(frozen=True)
class Settings:
    """What the command line chose; every process of the pool has a copy."""

    device: str = "cuda"
    fast: str = "fast"
    #: Part of the inputs and repetitions to do, 0 to 1.
    fraction: float = 1.0

    def few(self, count: int, least: int = 1) -> int:
        """`count`, reduced to the chosen part, but not below `least`."""
        return max(least, round(count * self.fraction))


@dataclass
class Check:
    """The outcome of comparing one call: `function` names the public function whose kernel ran."""

    function: str
    label: str
    count: int
    different: int
    detail: list[str] = field(default_factory=list)
    status: str = "ok"
    #: Whether `fast` handed the call on to the reference: then no kernel was tested.
    handed_on: bool = False


@dataclass(frozen=True)
class Failure:
    """A call that raised: class and text, without the words in which array libraries differ."""

    kind: str
    text: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """The outcome of an exception."""
        text = re.sub(r"\b(ndarray|Tensor)\b", "array", str(error))
        return cls(type(error).__name__, text)


def outcome(call: Callable[[], Any]) -> Any:
    """What `call` returns, or the `Failure` that it raises."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001  an error is a result that has to be the same
        return Failure.of(error)


def convert(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """`leaf` of every array in tuples, `Scales` and `Quantized`; everything else unchanged."""
    if is_dataclass(value) and type(value).__name__ in ("Scales", "Quantized"):
        return type(value)(**{item.name: convert(getattr(value, item.name), leaf) for item in fields(value)})
    if type(value) is tuple:
        return tuple(convert(item, leaf) for item in value)
    return leaf(value) if isinstance(value, (np.ndarray, np.generic, torch.Tensor)) else value


def host(value: Any) -> Any:
    """Tensors of any device as NumPy arrays, also inside containers."""

    def leaf(item: Any) -> Any:
        item = item.detach().cpu().contiguous() if isinstance(item, torch.Tensor) else item
        return np.asarray(to_numpy(item))

    return convert(value, leaf)


def reference_function(name: str) -> Any:
    """The public function of the specification."""
    return getattr(reference, name)


class Run:
    """One job's access to both sides, and its checks."""

    def __init__(self, settings: Settings, fast: Any = None) -> None:
        self.settings = settings
        self.fast = importlib.import_module(settings.fast) if fast is None else fast
        self.device = torch.device(settings.device)
        self.checks: list[Check] = []
        self.calls = 0
        self.handed_on = False

    def put(self, value: Any) -> Any:
        """NumPy arrays as tensors on the device, also inside containers."""

        def leaf(item: Any) -> Any:
            made = to_torch(np.array(item)) if not isinstance(item, torch.Tensor) else item
            return made.to(self.device)

        return convert(value, leaf)

    def expect(self, function: str, *args: Any, **keywords: Any) -> Any:
        """What the reference makes of NumPy arrays."""
        with np.errstate(all="ignore"):
            return outcome(lambda: reference_function(function)(*args, **keywords))

    def obtain(self, function: str, *args: Any, **keywords: Any) -> Any:
        """What `fast` makes of the same arrays on the device, every output poisoned beforehand."""
        placed, options = self.put(args), {key: self.put(value) for key, value in keywords.items()}
        self.calls += 1
        return self.guarded(lambda: getattr(self.fast, function)(*placed, **options))

    def guarded(self, call: Callable[[], Any]) -> Any:
        """The outcome of a call of `fast`: poisoned outputs, writes beyond them reported."""

        def work() -> Any:
            with poisoned(POISONS[self.calls % len(POISONS)]), watched(seen):
                return call()

        seen: list[str] = []
        got = outcome(work)
        self.handed_on = bool(seen)
        if isinstance(got, Failure):
            self.alive(got)
        return got

    def alive(self, failure: Failure) -> None:
        """DeviceLost where nothing more can run on the device."""
        if self.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize()
        except Exception as error:
            raise DeviceLost(f"{failure.kind}: {failure.text}") from error

    def same(self, function: str, label: str, *args: Any, expected: Any = UNSET, **keywords: Any) -> Any:
        """Compare one call of `fast` with the reference (or with `expected`); returns what was expected."""
        wanted = self.expect(function, *args, **keywords) if expected is UNSET else expected
        got = self.obtain(function, *args, **keywords)
        self.compare(function, label, got, wanted, x=args[0] if args else None)
        return wanted

    def compare(self, function: str, label: str, got: Any, wanted: Any, x: Any = None) -> bool:
        """Record whether two outcomes are the same bits on the right device; returns that."""
        count, different, detail = differences(host(got), host(wanted), host(x))
        away = [item.device for item in tensors(got) if item.device.type != self.device.type]
        if away:
            different, detail = different + len(away), [*detail, f"outputs on {away[0]}, not {self.device}"]
        self.record(function, label, count, different, detail)
        return not different

    def record(
        self, function: str, label: str, count: int, different: int, detail: list[str], status: str = ""
    ) -> None:
        """Keep one check; the text of the first few failing ones."""
        kept = sum(bool(check.detail) for check in self.checks) < SHOWN
        status = status or ("different" if different else "ok")
        self.checks.append(
            Check(
                function,
                label,
                count,
                different,
                detail if different and kept else [],
                status,
                self.handed_on,
            )
        )
        self.handed_on = False

    def missing(self, function: str, reason: str = "fast has no such function") -> bool:
        """Whether `fast` lacks a function, which is recorded."""
        if hasattr(self.fast, function):
            return False
        self.record(function, "absent", 0, 0, [], status="missing")
        self.checks[-1].detail = [reason]
        return True


@contextmanager
def watched(seen: list[str]) -> Iterator[None]:
    """Names of the functions of `reference` that are called in the meantime."""
    originals = {name: getattr(reference, name) for name in WATCHED if hasattr(reference, name)}

    def noted(name: str, function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            seen.append(name)
            return function(*args, **keywords)

        return call

    for name, function in originals.items():
        setattr(reference, name, noted(name, function))
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(reference, name, function)


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors of a result."""
    found: list[torch.Tensor] = []

    def leaf(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            found.append(item)
        return item

    convert(value, leaf)
    return found


SHOWN_DIFFERENCES = 3  # differing elements or blocks that are shown
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
    shown = [_element(name, tuple(place), a, b, x) for place in places[:SHOWN_DIFFERENCES]]
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
    return [
        _block(int(i), inputs[i], theirs[i], ours[i], *(s[i] for s in scales))
        for i in wrong[:SHOWN_DIFFERENCES]
    ]


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
