"""On a GPU of compute capability 9.0: the candidate for products of blocks, its bits and its time beside torch's.

    PYTHONPATH=. python tests/gpu/candidates/blockwise/validate.py [--nvcc PATH] [--seconds 45] [--only NAME ...]

Compiles `tests.gpu.candidates.blockwise` first (10 s). Each variant must give the bits of exact sums where integers and powers
of two make every sum exact (shapes that divide nothing, both layouts of scales, a bias, 30 repeats against races), and stay
within the tensor core's error elsewhere. Variants that do are then timed in turn with torch under CUDA graphs. A kernel that
does not end within 5 s ends the program with status 9: give it a limit (`timeout 100`) all the same. 1: something is wrong.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from tests.gpu.candidates.blockwise import build
from tests.gpu.candidates.blockwise.blockwise import BLOCK, VARIANTS, blockwise

#: M, N, K, whether all sums are exact, whether scales of a lie block after block.
CASES = (
    (256, 256, 512, True, False), (1000, 1040, 1152, True, True), (128, 384, 4096, True, False), (1, 128, 128, True, False),
    (4096, 4096, 1024, True, True), (3000, 2064, 1040, True, False), (517, 640, 2048, False, False),
)  # fmt: skip
SHAPES = ((8192, 8192, 8192), (16384, 4096, 14336), (16384, 14336, 4096), (4096, 4096, 4096), (8192, 4096, 4096),
          (2048, 4096, 4096), (128, 14336, 4096), (14336, 4096, 16384))  # fmt: skip
LIMIT, REPEATS, ROUNDS = 5.0, 30, 12
#: Sums of a block keep 13 bits below the largest product, results 8 bits.
OF_BLOCKS, OF_RESULT = 2.0**-12, 2.0**-8
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def wait(what: str) -> None:
    """Wait for the device; leave the program if it hangs."""
    event, start = torch.cuda.Event(), time.time()
    event.record()
    while not event.query():
        if time.time() - start > LIMIT:
            say(f"HANG {what}")
            os._exit(9)
        time.sleep(0.001)


def operands(m: int, n: int, k: int, rows: bool, exact: bool) -> Operands:
    """Codes and scales; exact: small integers and powers of two."""
    torch.manual_seed(m + n + k)
    blocks, of_b = -(-k // BLOCK), n if rows else -(-n // BLOCK)
    shapes = ((m, k), (n, k)), ((m, blocks), (of_b, blocks))
    if exact:
        codes = [torch.randint(-3, 4, shape, device="cuda").float() for shape in shapes[0]]
        scales = [torch.randint(-1, 2, shape, device="cuda").float().exp2() for shape in shapes[1]]
    else:
        codes = [torch.randn(shape, device="cuda") * 60 for shape in shapes[0]]
        scales = [torch.rand(shape, device="cuda") * 0.01 + 1e-4 for shape in shapes[1]]
    a, b = (x.to(torch.float8_e4m3fn) for x in codes)
    return a, b, scales[0], scales[1]


def dequantized(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    rows, k = codes.shape
    wide = scale.double().repeat_interleave(BLOCK, 1)[:, :k]
    return codes.double() * (wide if scale.shape[0] == rows else wide.repeat_interleave(BLOCK, 0)[:rows])


def wrong(run: Callable[..., torch.Tensor], case: tuple[int, int, int, bool, bool], rows: bool) -> int:
    """How many results of a case are not what they must be."""
    m, n, k, exact, major = case
    a, b, scale_a, scale_b = operands(m, n, k, rows, exact)
    got = run(a, b, scale_a.t().contiguous().t() if major else scale_a, scale_b)
    wait(f"{case}")
    left, right = dequantized(a, scale_a), dequantized(b, scale_b)
    want = left @ right.t()
    if exact:
        return int((got != want.float().bfloat16()).sum())
    bound = left.abs() @ right.abs().t() * OF_BLOCKS + want.abs() * OF_RESULT
    return int(((got.double() - want).abs() > bound).sum() + (~got.isfinite()).sum())


def wrong_with_bias(run: Callable[..., torch.Tensor], rows: bool) -> int:
    a, b, scale_a, scale_b = operands(300, 640, 1024, rows, True)
    bias = torch.randint(-8, 9, (640,), device="cuda").bfloat16()
    want = dequantized(a, scale_a) @ dequantized(b, scale_b).t() + bias.double()
    return int((run(a, b, scale_a, scale_b, bias) != want.float().bfloat16()).sum())


def wrong_repeated(run: Callable[..., torch.Tensor], rows: bool) -> int:
    a, b, scale_a, scale_b = operands(2048, 2048, 2048, rows, True)
    want = (dequantized(a, scale_a) @ dequantized(b, scale_b).t()).float().bfloat16()
    return max(int((run(a, b, scale_a, scale_b) != want).sum()) for _ in range(REPEATS))


def is_right(name: str, cubin: Path, rows: bool) -> bool:
    """Say what of a variant is wrong."""
    run = partial(blockwise, cubin=cubin, variant=name)
    found = {str(case): wrong(run, case, rows) for case in CASES}
    found |= {"bias": wrong_with_bias(run, rows), "repeated": wrong_repeated(run, rows)}
    wait(name)
    bad = {what: count for what, count in found.items() if count}
    say(f"{name} {'1x128' if rows else '128x128'}: {bad or 'right'}")
    return not bad


def graphed(call: Callable[[], torch.Tensor], count: int) -> Callable[[], None]:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    return graph.replay


def times(calls: dict[str, Callable[[], torch.Tensor]], count: int) -> dict[str, float]:
    """Median milliseconds of each call, in turn."""
    replays = {name: graphed(call, count) for name, call in calls.items()}
    seen: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS + 2):
        for name, replay in replays.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            replay()
            end.record()
            end.synchronize()
            if turn > 1:
                seen[name].append(start.elapsed_time(end) / count)
    return {name: statistics.median(values) for name, values in seen.items()}


def compare(shape: tuple[int, int, int], names: list[str], cubin: Path, rows: bool) -> None:
    """TFLOP/s of torch and of each variant, with the ratio of its speed to torch's."""
    m, n, k = shape
    a, b, scale_a, scale_b = operands(m, n, k, rows, False)
    # Powers of two, as the recipe's: then torch's order of the two scales does not matter.
    scale_a, scale_b = (scale.log2().round().exp2() for scale in (scale_a, scale_b))
    scale_a = scale_a.t().contiguous().t()
    scale_b = scale_b.t().contiguous().t() if rows else scale_b
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "torch": lambda: torch._scaled_mm(a, b.t(), scale_a, scale_b.t(), out_dtype=torch.bfloat16)
    }
    for name in names:
        calls[name] = partial(blockwise, a, b, scale_a, scale_b, cubin=cubin, variant=name)
    same = all(torch.equal(calls["torch"](), calls[name]()) for name in names)
    work = 2 * m * n * k
    took = times(calls, max(1, min(20, int(2e12 / work))))
    row = " ".join(f"{name} {work / ms / 1e9:.0f} ({took['torch'] / ms:.3f})" for name, ms in took.items())
    say(f"{m}x{n}x{k} {'1x128' if rows else '128x128'} bits of torch: {same}; {row}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nvcc")
    parser.add_argument("--seconds", type=float, default=45)
    parser.add_argument("--only", nargs="*", default=list(VARIANTS), choices=VARIANTS)
    given = parser.parse_args()
    cubin = Path(tempfile.mkdtemp()) / "blockwise.cubin"
    for line in build.complaints(build.build(cubin, given.nvcc)):
        say(line)
    start = time.time()
    right = {rows: [name for name in given.only if is_right(name, cubin, rows)] for rows in (False, True)}
    for shape in SHAPES:
        for rows in (False, True):
            if time.time() - start < given.seconds:
                compare(shape, right[rows], cubin, rows)
    return int(any(len(names) < len(given.only) for names in right.values()))


if __name__ == "__main__":
    raise SystemExit(main())
