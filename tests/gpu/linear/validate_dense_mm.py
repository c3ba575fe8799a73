"""On a Hopper GPU: `sm90_s8_gemm` bit for bit, twenty times, and its times beside Triton's kernel, torch's fp8 and bfloat16.

    PYTHONPATH=. python tests/gpu/linear/validate_dense_mm.py [--json PATH] [--bits 25] [--times 30]
        [--shapes 0 1] [--rows 1024]

--bits, --times: seconds after which nothing of a part starts (0: leave it out). Bits are those of `torch._int_mm`, whose sums
are exact, and an epilogue in float32, into poisoned memory between guards. Times are CUDA graphs in turn over more weights than
the second-level cache holds (`graph_times`):

rule      `fast.linear_of_codes`
t256c2... a variant of `sm90_s8_gemm` by its name
triton    `int_scaled_mm` by its own rule
fp8       `torch._scaled_mm` of float8_e4m3fn with scales for each row and fast sums
bf16      `F.linear`

Prints a line a case and a row, writes PATH after each; exits with 1 on any difference.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import fast
from fast.kernels.scaled_mm import host as triton_host
from fast.kernels.scaled_mm.tiles import int_tile_of
from fast.kernels.sm90_s8_gemm import host
from fast.kernels.sm90_s8_gemm.variants import Variant, fitted, sources
from fast.launch import cache
from fast.launch.nvrtc import cached_cubin
from reference import SCHEMES, Quantized
from tests.gpu.harness.graph_times import captured, in_turn

BEGIN = time.monotonic()
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
#: M, N, K, dtype of the output, of the bias.
CASES = (
    (257, 4104, 4096, BF16, FP32), (1000, 14336, 4096, BF16, None), (8192, 4096, 528, FP16, FP16), (513, 520, 16, BF16, BF16),
    (300, 8, 1040, FP32, BF16), (1025, 6144, 14336, BF16, FP32), (129, 136, 272, FP16, None), (2049, 4112, 1040, FP32, None),
    (16391, 1032, 4112, BF16, BF16),
)  # fmt: skip
#: Tokens, programs that share them, stages that one warpgroup is behind the other.
CHECKED = ((256, 2, 2), (128, 2, 2), (256, 1, 2), (256, 2, 0))
TIMED = ((256, 2, 2), (256, 2, 1), (256, 2, 0), (256, 1, 2), (128, 2, 2))
SHAPES = ((14336, 4096), (4096, 14336), (6144, 4096), (4096, 4096))
ROWS = (256, 512, 1024, 2048, 8192)
REPETITIONS, GUARD, POISON = 20, 256, 0xA5
#: Bytes that weights in turn have together at least, and rounds.
COLD, ROUNDS = 150e6, 7


def say(text: str) -> None:
    """With the seconds that have passed."""
    sys.stdout.write(f"[{time.monotonic() - BEGIN:6.1f}] {text}\n")
    sys.stdout.flush()


def variant_of(numbers: tuple[int, int, int], dtype: torch.dtype) -> Variant:
    """With as many stages as fit."""
    tokens, pair, skew = numbers
    return fitted(tokens, pair, host.is_stored(dtype), skew)


def compile_all() -> None:
    """All variants into the cache on the disk, on all cores; nothing of a GPU is touched."""
    jobs = {(variant_of(one, dtype), dtype) for one in {*CHECKED, *TIMED} for dtype in (BF16, FP16, FP32)}
    with multiprocessing.get_context("fork").Pool(8) as pool:
        pool.map(compiled, jobs, chunksize=1)
    say(f"compiled {len(jobs)} variants")


def compiled(job: Any) -> None:
    """One."""
    variant, dtype = job
    cached_cubin(*sources(variant, "int8", str(dtype).removeprefix("torch.")), name=host.NAME)


def operands_of(m: int, n: int, k: int, bias: torch.dtype | None) -> list[Any]:
    """Codes of all sizes, scales, and a bias about as large as the products."""
    x, w = (
        torch.randint(0, 256, (rows, k), device="cuda", dtype=torch.int16).to(torch.uint8) for rows in (m, n)
    )
    scales = torch.rand(m, 1, device="cuda") * 1e-3, torch.rand(n, 1, device="cuda") - 0.5
    added = None if bias is None else torch.randn(n, device="cuda").to(bias)
    return [x, scales[0], None, w, scales[1], added]


def wanted(given: list[Any], dtype: torch.dtype) -> torch.Tensor:
    """Exact sums, each step rounded to float32, one rounding."""
    x, x_scale, _, w, scale, bias = given
    y = torch._int_mm(x.view(torch.int8), w.view(torch.int8).t()).float() * x_scale * scale.t()
    return (y if bias is None else y + bias.float()).to(dtype)


class Poisoned:
    """Outputs within memory of one byte; `whole` tells whether what is around them still is."""

    def __init__(self) -> None:
        self.made: list[torch.Tensor] = []

    def __call__(self, shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        """As `direct.allocator` makes them."""
        size = shape[0] * shape[1] * dtype.itemsize
        memory = torch.full((size + 2 * GUARD,), POISON, dtype=torch.uint8, device="cuda")
        self.made = [memory]
        return memory[GUARD : GUARD + size].view(dtype).view(shape)

    def whole(self) -> bool:
        """Of the last output."""
        (memory,) = self.made
        return bool((memory[:GUARD] == POISON).all() and (memory[-GUARD:] == POISON).all())


def wrong_of(case: Any) -> Iterator[str]:
    """What is wrong with any variant."""
    m, n, k, dtype, bias = case
    given = operands_of(m, n, k, bias)
    right = wanted(given, dtype).view(torch.int16 if dtype.itemsize == 2 else torch.int32)
    for numbers in CHECKED:
        variant = variant_of(numbers, dtype)
        call = host.Product(variant, "int8", dtype, given)
        call.allocate = memory = Poisoned()
        for repetition in range(REPETITIONS):
            made = call(*given).view(right.dtype)
            if not torch.equal(made, right) or not memory.whole():
                differ = made != right
                first = differ.nonzero()[:1].tolist()
                around = "" if memory.whole() else ", and what is around it"
                yield f"{variant.name} {repetition}: {int(differ.sum())} of {differ.numel()} differ, first {first}{around}"
                break


def quantized(codes: torch.Tensor, scale: torch.Tensor) -> Quantized:
    """Rows of codes."""
    scheme = SCHEMES["int8_rowwise"]
    return Quantized(
        codes=codes, scale=scale, outer=None, zero=None, shape=tuple(codes.shape), axis=1, scheme=scheme
    )


def routed() -> Iterator[str]:
    """What is wrong with the public call, its repetition included, and whether the kernel took it."""
    given = operands_of(1024, 4096, 4096, BF16)
    x, w = quantized(given[0], given[1]), quantized(given[3], given[4])
    right = wanted(given, BF16)
    cache.CALLS.clear()
    for repetition in range(2):
        if not torch.equal(fast.linear_of_codes(x, w, given[5], dtype=BF16), right):
            yield f"linear_of_codes differs, call {repetition}"
    if not any(isinstance(call, host.Product) for call, _ in cache.CALLS.values()):
        yield f"sm90_s8_gemm was not taken: {host.FAILED}"


def compare(seconds: float, found: dict[str, Any]) -> None:
    """Bits of all cases."""
    for case in CASES:
        if time.monotonic() - BEGIN > seconds:
            say(f"not compared: {case}")
            continue
        wrong = list(wrong_of(case))
        say("\n    ".join([f"{case}: {len(wrong)} wrong", *wrong]))
        found["wrong"] += [f"{case}: {text}" for text in wrong]
    wrong = list(routed())
    say("\n    ".join([f"routed: {len(wrong)} wrong", *wrong]))
    found["wrong"] += wrong


class Timed:
    """Weights of a shape: int8, fp8 and bfloat16, several of each."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape, size = shape, shape[0] * shape[1]
        dense = torch.randn(shape, device="cuda", dtype=BF16)
        self.bf16 = [dense.clone() for _ in range(int(COLD / (2 * size)) + 2)]
        self.int8 = [fast.quantize(dense, "int8_rowwise") for _ in range(int(COLD / size) + 2)]
        self.fp8 = [fast.quantize(dense, "fp8_rowwise") for _ in self.int8]

    def calls(self, rows: int) -> dict[str, list[Callable[[], Any]]]:
        """By the name of what computes it."""
        x = torch.randn(rows, self.shape[1], device="cuda", dtype=BF16)
        codes, floats = (fast.quantize(x, name) for name in ("int8_rowwise", "fp8_rowwise"))
        made: dict[str, list[Callable[[], Any]]] = {
            "rule": [partial(fast.linear_of_codes, codes, w, dtype=BF16) for w in self.int8]
        }
        for numbers in TIMED:
            variant = variant_of(numbers, BF16)
            first = [codes.codes, codes.scale, None]
            call = host.Product(variant, "int8", BF16, [*first, self.int8[0].codes, self.int8[0].scale, None])
            made[variant.name] = [partial(call, *first, w.codes, w.scale) for w in self.int8]
        tile = int_tile_of(rows, *self.shape)
        of_triton = partial(triton_host.linear_of_codes, codes, bias=None, dtype=BF16, key=None, tile=tile)
        made["triton"] = [partial(of_triton, w=w) for w in self.int8]
        made["fp8"] = [partial(by_fp8, floats, w) for w in self.fp8]
        made["bf16"] = [partial(torch.nn.functional.linear, x, w) for w in self.bf16]
        return made

    def times(self, rows: int) -> dict[str, float]:
        """Microseconds."""
        return in_turn({name: captured(each) for name, each in self.calls(rows).items()}, ROUNDS)


def by_fp8(x: Quantized, w: Quantized) -> torch.Tensor:
    """torch's product with scales for each row."""
    a, b = (q.codes.view(torch.float8_e4m3fn) for q in (x, w))
    return torch._scaled_mm(a, b.t(), x.scale, w.scale.t(), out_dtype=BF16, use_fast_accum=True)


def told(shape: tuple[int, int], rows: int, times: dict[str, float]) -> str:
    """A row as a line, with tera-operations a second and bfloat16's time over that of the rule."""
    n, k = shape
    rate = 2e-6 * rows * n * k / times["rule"]
    each = "  ".join(f"{name} {us:.1f}" for name, us in times.items())
    return f"{shape} {rows:5} rows: {each}  ({rate:.0f} TOPS, x{times['bf16'] / times['rule']:.2f} of bf16)"


def measure(seconds: float, options: Any, found: dict[str, Any]) -> None:
    """Times, written after each row."""
    end = time.monotonic() + seconds
    for shape in (SHAPES[at] for at in options.shapes):
        weights = Timed(shape)
        for rows in options.rows:
            if time.monotonic() > end:
                say(f"not timed: {shape} {rows} rows")
                continue
            times = weights.times(rows)
            say(told(shape, rows, times))
            found["times"].append({"shape": shape, "rows": rows, "us": times})
            write(options.json, found)


def write(path: Path | None, found: dict[str, Any]) -> None:
    """What is known so far."""
    if path is not None:
        path.write_text(json.dumps({**found, "device": torch.cuda.get_device_name()}, indent=1))


def main(arguments: list[str] | None = None) -> int:
    """Compare and time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--bits", type=float, default=25.0)
    parser.add_argument("--times", type=float, default=30.0)
    parser.add_argument("--shapes", type=int, nargs="*", default=range(len(SHAPES)))
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {"wrong": [], "times": []}
    compile_all()
    with torch.no_grad():
        if options.bits > 0:
            compare(options.bits, found)
            write(options.json, found)
        if options.times > 0:
            measure(options.times, options, found)
    say(f"{len(found['wrong'])} wrong")
    write(options.json, found)
    return int(bool(found["wrong"]))


if __name__ == "__main__":
    raise SystemExit(main())
