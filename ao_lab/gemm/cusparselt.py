"""cuSPARSELt's product of a 2:4 weight, through torch: a candidate of `ao_lab.tune`, never a default.

y' (N, M) = W x' with the sparse operand on the left, written transposed, so y (M, N) comes out row-major. By operands:

* 16-bit elements stored as they are, and inputs of that dtype: float32 sums, one rounding, the bias added before it.
* int8 by int8, a scale for each row: int32 sums, then what kernel "int8" does after its sums: the same bits as the dense layer.
* float8_e4m3fn by float8_e4m3fn: float32 sums, written as float32; then scales and bias as for int8, in float32, and one
  rounding.

The library's own arrangement of the weight is made from the canonical parts when a product first needs it and kept beside them
(as many bytes again); changed parts are arranged anew. Its traps, and what guards here: 8-bit outputs are e4m3 or int8 unless
`out_dtype` says otherwise, and 16-bit ones refuse it; a vector alpha, a scale for each row of the weight, is refused for float8
("operation not supported": Hopper, torch 2.11, CUDA 13.0), and an alpha of one element waits for the GPU, so none is given; a
right operand that is not contiguous is read as a packed transpose, and pointers are expected at multiples of 16 bytes, so the
input and the bias are copied where they are not so; a bias of another dtype is read unchecked, so the dense equivalent is
multiplied; few rows are padded to 8 or 16. What the library refuses for lengths and element `ao_lab.tune` asks it beforehand.
Algorithms are those that `ao_lab.gemm.cusparselt` has searched and verified; without one the dense equivalent is
multiplied.

Sources: cuSPARSELt 0.8 documentation, cusparseLtMatmul; PyTorch's cuSPARSELtOps.cpp.

Which of cuSPARSELt's algorithms multiplies a 2:4 weight: searched while `ao_lab.tune` measures, verified, kept in a file.

The library has tens of algorithms for a product, its default is often slow, and some have given wrong or changing results
(PyTorch issue 155333). So an algorithm is used only after its result has been compared: on integers, whose sums are exact in
every order, with the dense product bit for bit, and on the layer's own operands with itself, `REPEATS` times bit for bit. The
library's own search comes first, then every identifier that it has is timed. Nothing is searched when a layer runs: a range of
rows without an algorithm has none, and the layer multiplies its dense equivalent.

A file of a device holds what was found, beside the choices of `ao_lab.gemm.choices`; another library version has another file.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fast
from ao_lab.gemm.choices import path_of, rows_range
from ao_lab.gemm.codes import quantized_input
from ao_lab.gemm.dense import dequantized
from ao_lab.gemm.operand import Kernel, QuantizedWeight, kept
from ao_lab.gemm.sparse import device_reason, kind_of, shape_reason, traceable
from fast.matmul.weights import one_scale
from fast.ops import constant_result
from fast.user_cache import NoCacheFolder, read_own, write_own

#: Products that have to be the same bit for bit.
REPEATS = 10
#: Products of a reading of time.
TIMED = 5
FORMAT = 1
#: The results' dtypes of 8-bit elements; others have their own.
OUT = {torch.int8: torch.int32, torch.float8_e4m3fn: torch.float32}
#: What errors say where the library does not multiply something.
REFUSALS = ("cusparselt", "not supported", "unsupported")
#: Rows that the library is asked with.
ASKED = 32
#: Largest integer of the exact test: sums of K / 2 products stay below 2**24 for K up to 2**23, and every element has them.
LARGEST = 2


class Algorithm(NamedTuple):
    """cuSPARSELt's settings: identifier, split of the sum (1: none) and how its parts are added."""

    alg_id: int
    split_k: int = 1
    mode: int = -1


Call = Callable[[Algorithm], torch.Tensor]
#: By device, then by product: an algorithm, or None where none was right.
_known: dict[str, dict[str, Algorithm | None]] = {}


@constant_result
def known(device: str, n: int, k: int, rows: int, element: str) -> Algorithm | None:
    """The verified algorithm of a product (rows, K) by (N, K); None where none was searched, or none was right."""
    return _table(torch.device(device)).get(key_of(n, k, rows, element))


def searches() -> bool:
    """Whether `ao_lab.tune` measures now: only then is anything searched."""
    # `ao_lab.tuning` stands above this room; where it was never imported nobody tunes.
    tuning = sys.modules.get("ao_lab.tuning.api")
    return bool(tuning is not None and tuning._busy) and not torch.compiler.is_compiling()


def search(
    call: Call, shape: tuple[int, int, int], element: torch.dtype, device: torch.device
) -> Algorithm | None:
    """The quickest algorithm for (N, K, rows) that is right; remembered and written down, None too."""
    n, k, rows = shape
    timed: list[tuple[float, Algorithm]] = []
    probe = Probe(n, k, rows, element, device)
    for algorithm in probe.algorithms():
        try:
            if probe.is_exact(algorithm) and is_repeatable(call, algorithm):
                timed.append((seconds(call, algorithm, device), algorithm))
        except RuntimeError as error:  # what integers do the layer's own operands may not
            _raise_unless_refused(error)
    best = min(timed)[1] if timed else None
    table = _table(device)
    table[key_of(n, k, rows, str(element))] = best
    with suppress(NoCacheFolder):
        _save(table, file_of(device))
    return best


@lru_cache(maxsize=256)
def refusal(n: int, k: int, element: torch.dtype, device: torch.device) -> str | None:
    """Why the library multiplies no weight (N, K) of an element, in its words; None where it does."""
    try:
        packed = torch._cslt_compress(torch.zeros((n, k), dtype=element, device=device))
        b = torch.zeros((ASKED, k), dtype=element, device=device)
        settings: dict[str, Any] = {"out_dtype": OUT[element]} if element in OUT else {}
        torch._cslt_sparse_mm(packed, b.t(), transpose_result=True, **settings)
    except RuntimeError as error:
        _raise_unless_refused(error)
        text = str(error).splitlines()[0]
        return f"cuSPARSELt refuses {element} of shape {(n, k)}: {text}"
    return None


class Probe:
    """A product of this shape on integers, and what it must give."""

    def __init__(self, n: int, k: int, rows: int, element: torch.dtype, device: torch.device) -> None:
        step = 16 if element.itemsize == 1 else 8
        # All of it on the device: on the host the product alone takes seconds at thousands of rows.
        draw: dict[str, Any] = {"generator": torch.Generator(device).manual_seed(0), "device": device}
        self.element = element
        self.out = OUT.get(element)
        w = torch.randint(-LARGEST, LARGEST + 1, (n, k), **draw)
        places = torch.rand((n, k // 4, 4), **draw).argsort(-1)
        w = w * (places < 2).reshape(n, k)
        x = torch.randint(-LARGEST, LARGEST + 1, (-(-rows // step) * step, k), **draw)
        self.packed = torch._cslt_compress(w.to(element))
        self.b = x.to(element).contiguous()
        # Sums of integers are exact in float32 in any order; a result of 16 bits rounds them once.
        self.expected = (x.double() @ w.double().t()).to(self.out or element)

    def product(self, algorithm: Algorithm) -> torch.Tensor:
        """By an algorithm."""
        settings: dict[str, Any] = {
            "alg_id": algorithm.alg_id,
            "split_k": algorithm.split_k,
            "split_k_mode": algorithm.mode,
        }
        if self.out is not None:
            settings["out_dtype"] = self.out
        return torch._cslt_sparse_mm(self.packed, self.b.t(), transpose_result=True, **settings)

    def algorithms(self) -> Iterator[Algorithm]:
        """What the library's search says, then every identifier without a split sum."""
        library: Any = torch._C._cusparselt
        try:
            searched = library.mm_search(self.packed, self.b.t(), None, None, self.out, True)
        except RuntimeError as error:  # the library multiplies nothing of this shape
            _raise_unless_refused(error)
            return
        alg_id, split_k, mode, most = (int(value) for value in searched)
        first = Algorithm(alg_id, split_k, mode if split_k != 1 else -1)
        yield first
        yield from (one for number in range(most) if (one := Algorithm(number)) != first)

    def is_exact(self, algorithm: Algorithm) -> bool:
        """Whether an algorithm computes integers exactly; one that the library refuses for this shape does not."""
        try:
            return torch.equal(self.product(algorithm), self.expected)
        except RuntimeError as error:
            _raise_unless_refused(error)
            return False


def _raise_unless_refused(error: RuntimeError) -> None:
    """Raise what is no refusal of the library: too little memory, which may be there next time, or a fault of the call."""
    text = str(error).lower()
    if isinstance(error, torch.OutOfMemoryError) or not any(word in text for word in REFUSALS):
        raise error


def is_repeatable(call: Call, algorithm: Algorithm) -> bool:
    """Whether the layer's own product has the same bits again and again."""
    first = call(algorithm)
    return all(torch.equal(_bits(call(algorithm)), _bits(first)) for _ in range(REPEATS - 1))


def seconds(call: Call, algorithm: Algorithm, device: torch.device) -> float:
    """The shortest of some calls; on a GPU the GPU's own time, replayed from a CUDA graph.

    The library plans in each call, which takes the host longer than the GPU takes for a product of few rows: by the host's
    clock all algorithms are equal there, and a slow one is as good as any.
    """
    if device.type == "cuda":
        return _replayed(call, algorithm, device)
    readings = []
    for _ in range(TIMED):
        started = time.perf_counter()
        call(algorithm)
        readings.append(time.perf_counter() - started)
    return min(readings)


def _replayed(call: Call, algorithm: Algorithm, device: torch.device) -> float:
    """Seconds of a call among several of one graph, the shortest of some replays."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    with torch.cuda.device(device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(TIMED):
            call(algorithm)
    readings = []
    for _ in range(TIMED):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize(device)
        readings.append(float(begin.elapsed_time(end)) / 1e3 / TIMED)
    return min(readings)


def key_of(n: int, k: int, rows: int, element: str) -> str:
    """A product by its lengths, rows rounded up to a power of two."""
    return f"{n}x{k}, rows <= {rows_range(rows)}, {element.removeprefix('torch.')}"


def file_of(device: torch.device) -> Path:
    """The file of a device's algorithms."""
    path = path_of(device)
    version = torch.backends.cusparselt.version() if torch.backends.cusparselt.is_available() else None
    return path.with_name(f"{path.stem}_cusparselt_{version}.json")


def forget() -> None:
    """Forget what was read and asked: files are read again, and the library is asked again, when that is needed."""
    _known.clear()
    refusal.cache_clear()


def _table(device: torch.device) -> dict[str, Algorithm | None]:
    name = str(device)
    if name not in _known:
        try:
            _known[name] = _read(file_of(device))
        except NoCacheFolder:
            _known[name] = {}
    return _known[name]


def _read(path: Path) -> dict[str, Algorithm | None]:
    """What a file holds; nothing where there is none, or one that cannot be read: algorithms are then searched again."""
    try:
        content = json.loads(read_own(path))
        if content["format"] != FORMAT:
            return {}
        return {
            key: None if value is None else Algorithm(*map(int, value))
            for key, value in content["found"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _save(table: dict[str, Algorithm | None], path: Path) -> None:
    write_own(path, json.dumps({"format": FORMAT, "found": {**_read(path), **table}}, indent=1).encode())


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


NAME = "cusparselt"
#: torch's dtypes of the elements that it multiplies, and what lengths are multiples of.
ELEMENTS = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn,
}  # fmt: skip
STEPS = {1: 32, 2: 16}
#: Rows are padded to multiples of these.
ROWS = {1: 16, 2: 8}
#: The compute capability from which there are products of 16-bit elements and integers, and of float8.
OLDEST, OLDEST_FLOAT8 = (8, 0), (8, 9)
#: Bytes that addresses of operands are multiples of.
ALIGNMENT = 16


def unsupported_reason(w: QuantizedWeight, dtype: torch.dtype) -> str | None:
    """Why it does not take a weight (K, N) beside inputs of a dtype; None where it does."""
    if w.meta.layout != "2:4":
        return "the weight is not in 2:4 storage"
    if (reason := _operands_reason(w, dtype)) is not None:
        return reason
    step = STEPS[ELEMENTS[w.scheme.element].itemsize]
    return shape_reason(w, step, features=True) or _device_reason(w) or _library_reason(w)


def _operands_reason(w: QuantizedWeight, dtype: torch.dtype) -> str | None:
    element, activation = w.scheme.element, w.recipe.activation
    if element in ("bfloat16", "float16"):
        if activation is not None or dtype != ELEMENTS[element]:
            return f"inputs of {element} weights must be {element} themselves, got {dtype}"
        return None
    if element not in ELEMENTS:
        return f"it supports bfloat16, float16, int8 and float8_e4m3fn, not {element}"
    if activation is None or activation.element != element:
        return f"inputs of {element} weights must be {element} too"
    if not (one_scale(activation) and one_scale(w.scheme)) or w.zero is not None:
        return "each row must have one float32 scale for decoding, and the weight no zero point"
    return None


def _device_reason(w: QuantizedWeight) -> str | None:
    if w.is_cuda and not torch.backends.cusparselt.is_available():
        return f"torch {torch.__version__} was built without cuSPARSELt"
    return device_reason(w, OLDEST_FLOAT8 if kind_of(w.scheme) == "float8" else OLDEST)


def _library_reason(w: QuantizedWeight) -> str | None:
    """What the library itself says; asked while `ao_lab.tune` measures. At other times only verified algorithms run."""
    if not searches():
        return None
    return refusal(int(w.shape[1]), int(w.shape[0]), ELEMENTS[w.scheme.element], w.device)


def run(x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x (M, K) times w (K, N), plus bias, in x's dtype; by the dense equivalent where no algorithm is known for the rows."""
    rows = x.shape[0]
    element = ELEMENTS[w.scheme.element]
    other = element.itemsize == 2 and bias is not None and bias.dtype != x.dtype
    if not isinstance(rows, int) or not rows or other:
        return dequantized(x, w, bias)
    algorithm = known(str(w.device), int(w.shape[1]), int(w.shape[0]), rows, str(element))
    if algorithm is None and searches():
        algorithm = search(_call(x, w, bias), (int(w.shape[1]), int(w.shape[0]), rows), element, w.device)
    if algorithm is None:
        return dequantized(x, w, bias)
    return _multiplied(x, w, bias, algorithm)


def _multiplied(
    x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None, algorithm: Algorithm
) -> torch.Tensor:
    element = ELEMENTS[w.scheme.element]
    scheme = w.recipe.activation
    parts, chosen = (w.codes, w.metadata, str(element)), tuple(algorithm)  # type: ignore[attr-defined]
    if scheme is None:
        return _rows(product_of(x, *parts, bias, *chosen), x.shape[0])
    inputs = quantized_input(x, w, scheme)
    sums = _rows(product_of(inputs.codes.view(element), *parts, None, *chosen), x.shape[0])
    if inputs.zero is not None:
        sums = sums - inputs.zero.to(torch.int32) * w.codes.view(torch.int8).sum(1, dtype=torch.int32)
    y = sums.to(torch.float32) * inputs.scale * (w.scale if w.scale.dim() == 0 else w.scale.reshape(-1))
    total: torch.Tensor = y if bias is None else y + bias.to(torch.float32)
    return total.to(x.dtype)


def _call(x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None) -> Call:
    """What a search calls with an algorithm: this product, its input's cast included."""
    return lambda algorithm: _multiplied(x, w, bias, algorithm)


def _rows(y: torch.Tensor, rows: int) -> torch.Tensor:
    return y[:rows]


def _product(
    b: torch.Tensor,
    codes: torch.Tensor,
    metadata: torch.Tensor,
    element: str,
    bias: torch.Tensor | None,
    alg_id: int,
    split_k: int,
    mode: int,
) -> torch.Tensor:
    """b (M, K) times the 2:4 codes (N, K/2), padded rows below: (M', N)."""
    packed = arranged(codes, metadata, ELEMENTS[element.removeprefix("torch.")])
    step = ROWS[b.dtype.itemsize]
    # A byte view is padded: torch pads no float8.
    missing = -b.shape[0] % step
    padded = torch.nn.functional.pad(b.view(torch.uint8), (0, 0, 0, missing)).view(b.dtype) if missing else b
    settings: dict[str, Any] = {"alg_id": alg_id, "split_k": split_k, "split_k_mode": mode}
    if (out := OUT.get(b.dtype)) is not None:
        settings["out_dtype"] = out
    if bias is not None:
        settings["bias"] = _readable(bias)
    return torch._cslt_sparse_mm(packed, _readable(padded).t(), transpose_result=True, **settings)


def _fake(
    b: torch.Tensor, codes: torch.Tensor, metadata: torch.Tensor, element: str, *rest: Any
) -> torch.Tensor:
    step = ROWS[b.dtype.itemsize]
    return b.new_empty((-(-b.shape[0] // step) * step, codes.shape[0]), dtype=OUT.get(b.dtype, b.dtype))


def _readable(x: torch.Tensor) -> torch.Tensor:
    """Itself where the library can read it, else a copy: contiguous, at an address that is a multiple of `ALIGNMENT`."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % ALIGNMENT else x


def arranged(codes: torch.Tensor, metadata: torch.Tensor, element: torch.dtype) -> torch.Tensor:
    """The library's arrangement of canonical codes and metadata, kept with the codes until either changes."""

    def make() -> torch.Tensor:
        return torch._cslt_compress(fast.decompress(codes.view(element), metadata))

    return kept(codes, metadata, NAME, make)


product_of = traceable("cusparselt_mm", _product, _fake)
KERNEL = Kernel(run, unsupported_reason)


__all__ = [
    "NAME",
    "Algorithm",
    "Probe",
    "arranged",
    "file_of",
    "forget",
    "is_repeatable",
    "known",
    "product_of",
    "refusal",
    "run",
    "search",
    "searches",
    "seconds",
    "unsupported_reason",
]
