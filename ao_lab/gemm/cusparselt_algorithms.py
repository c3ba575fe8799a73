"""Which of cuSPARSELt's algorithms multiplies a 2:4 weight: searched while `ao_lab.tune` measures, verified, kept in a file.

The library has tens of algorithms for a product, its default is often slow, and some have given wrong or changing results
(PyTorch issue 155333). So an algorithm is used only after its result has been compared: on integers, whose sums are exact in
every order, with the dense product bit for bit, and on the layer's own operands with itself, `REPEATS` times bit for bit. The
library's own search comes first, then every identifier that it has is timed. Nothing is searched when a layer runs: a range of
rows without an algorithm has none, and the layer multiplies its dense equivalent.

A file of a device holds what was found, beside the choices of `ao_lab.gemm.saved`; another library version has another file.
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

from ao_lab.gemm.problem import rows_range
from ao_lab.gemm.saved import path_of
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


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
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
    found: list[tuple[float, Algorithm]] = []
    probe = Probe(n, k, rows, element, device)
    for algorithm in probe.algorithms():
        try:
            if probe.is_exact(algorithm) and is_repeatable(call, algorithm):
                found.append((seconds(call, algorithm, device), algorithm))
        except RuntimeError as error:  # what integers do the layer's own operands may not
            _raise_unless_refused(error)
    best = min(found)[1] if found else None
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
            found = library.mm_search(self.packed, self.b.t(), None, None, self.out, True)
        except RuntimeError as error:  # the library multiplies nothing of this shape
            _raise_unless_refused(error)
            return
        alg_id, split_k, mode, most = (int(value) for value in found)
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


__all__ = [
    "OUT",
    "Algorithm",
    "Call",
    "Probe",
    "file_of",
    "forget",
    "is_repeatable",
    "known",
    "refusal",
    "search",
    "searches",
    "seconds",
]
