"""On a GPU: `sm90_intn_small_m` exact on integers, within its bound, the same bits twenty times; then its times and older
kernels'.

    PYTHONPATH=. python tests/gpu/linear/validate_linear_bits.py [--no-bits] [--no-times] [--bits 2 3 6] [--rows 1 8]
        [--all] [--older] [--seconds 60]

Times are of CUDA graphs in turn over weights that exceed the L2 cache: bfloat16, the rule's variant ("new"), candidates with
--all, and with --older the kernels that other devices have ("old"; where they take no such rows, dequantization and torch's
product), which Triton compiles one by one. `select.py` is fitted to what --all prints (`reports/data/linear_bits_tiles.json`).
Exits with 1 on any difference.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import fast
from ao_lab.config.recipe import named
from fast.kernels.linear import select
from fast.kernels.sm90_intn_small_m import host
from fast.kernels.sm90_intn_small_m.select import choose, placed
from fast.kernels.sm90_intn_small_m.variants import Form, Variant, sources
from fast.launch.nvrtc import cached_cubin
from reference import Quantized, Scheme
from tests.gpu.harness.graph_times import captured, in_turn
from tests.support import linear_cases as cases

BF16, HALF = torch.bfloat16, torch.float16
BEGIN = time.monotonic()
SCHEMES = (
    "int2_g32", "int2_g64_asymmetric", "int3_g32", "int3_g128_asymmetric", "int5_g64", "int5_g32_asymmetric",
    "int6_g32_asymmetric", "int6_g128", "int3_rowwise", "int4_g32",
)  # fmt: skip
COUNTS, SMALL = (1, 2, 5, 8, 16, 17, 33, 64, 90, 128), ((37, 128), (150, 1024), (277, 384), (64, 4096))
SHAPES, ROWS = ((14336, 4096), (4096, 14336), (4096, 4096)), (1, 2, 4, 8, 16, 32, 64, 128)
#: Tiles, by rows of x at most: those of `select.TILES`, and others. Tiles of fewer rows of x read the weight several times.
CANDIDATES = {
    2: (
        "8,1,1,8,1,4,4,4",
        "8,2,1,4,1,4,3,3",
        "8,2,2,4,1,2,4,2",
        "8,7,1,4,1,4,5,1",
        "8,7,1,2,1,2,8,1",
        "8,7,1,4,1,2,8,1",
    ),
    8: (
        "8,1,1,8,1,4,4,4",
        "8,2,1,4,1,4,3,3",
        "8,2,2,4,1,2,4,2",
        "8,7,1,4,1,4,5,1",
        "8,7,1,2,1,2,8,1",
        "8,4,1,2,1,2,4,3",
    ),
    16: ("16,2,1,4,1,2,4,3", "16,2,2,4,1,2,4,2", "16,4,1,2,1,2,4,2", "16,7,1,2,1,2,6,1", "16,7,1,4,1,2,6,1"),
    32: (
        "32,2,2,2,1,1,4,3",
        "32,4,1,2,1,2,3,2",
        "32,7,1,2,1,2,4,1",
        "32,7,1,2,1,1,6,1",
        "32,4,2,2,1,1,4,1",
        "16,8,1,4,1,2,5,1",
    ),
    64: (
        "64,4,2,1,1,1,3,2",
        "64,8,1,1,1,1,4,1",
        "64,7,1,1,1,1,5,1",
        "64,7,1,2,1,2,3,1",
        "64,7,1,2,1,1,5,1",
        "64,8,1,2,1,1,4,1",
        "48,7,1,2,1,2,4,1",
        "32,8,1,2,1,2,3,1",
    ),
    128: (
        "128,8,1,1,1,1,3,1",
        "64,8,1,2,1,1,4,1",
        "64,4,2,1,1,1,3,2",
        "128,7,1,1,1,1,3,1",
        "128,7,1,2,1,1,4,1",
        "128,8,1,2,1,1,3,1",
        "96,7,1,2,1,1,4,1",
        "96,8,1,2,1,1,3,1",
    ),
}


def scheme_of(name: str) -> Scheme:
    """A scheme by any of its names."""
    record = named(name)
    if record is None:
        raise ValueError(f"no scheme {name!r}")
    return record


def form_named(scheme: str, length: int, dtype: torch.dtype) -> Form:
    """A weight's form."""
    form = host.form_of(scheme_of(scheme), (16, length), 1, True)
    if form is None:
        raise ValueError(f"sm90_intn_small_m does not read {scheme} in rows of {length}")
    return Form(*form[:-1], dtype == HALF)


def compiled(job: tuple[Variant, Form]) -> None:
    """One kernel into the cache of cubins."""
    cached_cubin(*sources(*job), name="sm90_intn_small_m")


def compile_all(jobs: Iterable[tuple[Variant | None, Form]]) -> None:
    """Kernels on all cores: NVRTC works outside of Python's lock."""
    found = [(variant, form) for variant, form in dict.fromkeys(jobs) if variant is not None]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(compiled, found))
    say(f"compiled {len(found)} variants")


def say(text: str) -> None:
    """A line with the seconds since the beginning."""
    print(f"[{time.monotonic() - BEGIN:6.1f}] {text}", flush=True)


def on_device(w: Quantized) -> Quantized:
    """A weight on the GPU."""
    moved = {name: one.cuda() for name, one in vars(w).items() if isinstance(one, torch.Tensor)}
    return Quantized(**{**vars(w), **moved})


def multiplied(
    x: torch.Tensor, w: Quantized, bias: torch.Tensor | None = None, variant: Variant | None = None
) -> torch.Tensor:
    """By the kernel; RuntimeError where it does not take this."""
    y = host.sm90_intn_small_m(x, w, bias, variant)
    if y is None:
        raise RuntimeError(
            f"sm90_intn_small_m does not take {tuple(x.shape)} by {w.scheme.name} {tuple(w.shape)}"
        )
    return y


def tasks() -> Iterator[tuple[str, tuple[int, int], int, torch.dtype]]:
    """Small shapes: scheme, shape, rows of x, dtype; shapes and dtypes take turns."""
    for i, (scheme, count) in enumerate(product(SCHEMES, COUNTS)):
        for dtype in (BF16, HALF) if count in (1, 8, 64) else ((BF16, HALF)[i % 2],):
            yield scheme, SMALL[(i + i // len(COUNTS)) % len(SMALL)], count, dtype


def wrong_small(scheme: str, shape: tuple[int, int], count: int, dtype: torch.dtype) -> Iterator[str]:
    """Exact sums with a bias, random ones within the bound, as `fast.linear` gives them."""
    record, bias = scheme_of(scheme), (torch.arange(shape[0]) % 7 - 3).to(dtype)
    w, x = cases.exact_weight(record, *shape), cases.exact_inputs(count, shape[1], dtype)
    got = multiplied(x.cuda(), on_device(w), bias.cuda())
    if not torch.equal(got.cpu(), cases.exact_result(x, w, bias)):
        yield f"exact: {int((got.cpu() != cases.exact_result(x, w, bias)).sum())} of {got.numel()} differ"
    w, x = cases.weight(record, *shape), cases.inputs(count, shape[1], dtype)
    got = multiplied(x.cuda(), on_device(w))
    if bad := cases.outside(got.cpu(), x, w, None):
        yield f"bound: {bad} of {got.numel()} are farther away"


def wrong_large(scheme: str, shape: tuple[int, int], count: int) -> Iterator[str]:
    """A model's shape: random codes, powers of two as scales, exact; the same bits twenty times, and through `fast.linear`."""
    w = drawn(scheme, shape, count)
    x = torch.randint(-1, 2, (count, shape[1]), device="cuda").to(BF16)
    wanted, got = cases.exact_result(x, w, None), multiplied(x, w)
    if not torch.equal(got, wanted):
        yield f"exact: {int((got != wanted).sum())} of {got.numel()} differ"
    differ = sum(not torch.equal(multiplied(x, w), got) for _ in range(20))
    differ += scheme != "int4_g32" and not torch.equal(fast.linear(x, w), got)
    if differ:
        yield f"{differ} of 21 repetitions differ"


def drawn(scheme: str, shape: tuple[int, int], seed: int) -> Quantized:
    """Any codes, scales 1/2, 1 and 2, zero points of 8 bits."""
    draw = torch.Generator("cuda").manual_seed(seed)
    w = fast.quantize(torch.randn(shape, device="cuda", generator=draw), scheme_of(scheme), packed=True)
    w.codes.copy_(torch.randint(0, 256, w.codes.shape, device="cuda", generator=draw))
    w.scale.copy_(2.0 ** torch.randint(-1, 2, w.scale.shape, device="cuda", generator=draw))
    if w.zero is not None:
        w.zero.copy_(torch.randint(-128, 128, w.zero.shape, device="cuda", generator=draw))
    return w


def check_bits(seconds: float) -> int:
    """How many checks failed; none begins after so many seconds. Shapes of models, which a GPU draws, come first."""
    small = list(tasks())
    schemes = ("int2_g32", "int3_g32_asymmetric", "int6_g128")
    large = list(product(schemes, SHAPES, (1, 8, 16, 32, 64, 128)))
    wanted = [*small, *((*one, BF16) for one in large)]
    forms = [(form_named(scheme, shape[1], dtype), count, shape) for scheme, shape, count, dtype in wanted]
    compile_all((choose(form, count, *shape), form) for form, count, shape in forms)
    failed = 0
    runs = [(one, wrong_large(*one)) for one in large] + [(one, wrong_small(*one)) for one in small]
    for at, (task, check) in enumerate(runs):
        if time.monotonic() - BEGIN > seconds:
            say(f"{len(runs) - at} checks are left out: {seconds:.0f} seconds are over")
            break
        wrong = list(check)
        failed += bool(wrong)
        say(f"{task}: {wrong or 'right'}")
    say(f"{len(runs)} checks of bits, {failed} wrong")
    return failed


def candidates(form: Form, count: int, shape: tuple[int, int]) -> list[Variant]:
    """Tiles beside the rule's."""
    most = next(most for most in CANDIDATES if count <= most)
    found = [placed(Variant(*map(int, one.split(","))), form, count, *shape) for one in CANDIDATES[most]]
    rule = choose(form, count, *shape)
    return [one for one in dict.fromkeys(found) if one is not None and one != rule]


def old(x: torch.Tensor, w: Quantized) -> Any:
    """The kernels of other devices, or dequantization and torch's product."""
    with mock.patch.object(host, "launch_for", return_value=None):
        y = select.linear(x, w, None)
    return torch.nn.functional.linear(x, fast.dequantize(w, x.dtype)) if y is None else y


def time_row(
    scheme: str, count: int, held: list[Quantized], dense: list[torch.Tensor], every: bool, older: bool
) -> None:
    """Microseconds of a product by all ways."""
    shape = (held[0].shape[0], held[0].shape[1])
    x = torch.randn(count, shape[1], device="cuda", dtype=BF16)
    form = form_named(scheme, shape[1], BF16)
    calls: dict[str, list[Any]] = {
        "bf16": [partial(torch.nn.functional.linear, x, w) for w in dense],
        **({"old": [partial(old, x, w) for w in held]} if older else {}),
        "new": [partial(multiplied, x, w) for w in held],
    }
    for one in candidates(form, count, shape) if every else ():
        calls[",".join(map(str, one))] = [partial(multiplied, x, w, None, one) for w in held]
    times = in_turn({name: captured(each) for name, each in calls.items()}, 7)
    rule = choose(form, count, *shape)
    best = min(times, key=times.__getitem__)
    print(f"{shape} {scheme:20} {count:4} rows: " + "  ".join(f"{name} {took:.1f}" for name, took in times.items()),
          f" [new is {tuple(rule or ())}; best {best}]", flush=True)  # fmt: skip


def check_times(widths: list[int], rows: list[int], every: bool, older: bool) -> None:
    """All shapes; groups of 32 without zero points of every width, and two other schemes of the first shape."""
    schemes = {shape: [f"int{bits}_g32" for bits in widths] for shape in SHAPES}
    schemes[SHAPES[0]] += ["int3_g128", "int3_g32_asymmetric"]
    wanted = [(shape, scheme, count) for shape in SHAPES for scheme, count in product(schemes[shape], rows)]
    jobs = []
    for shape, scheme, count in wanted:
        form = form_named(scheme, shape[1], BF16)
        jobs += [(choose(form, count, *shape), form)]
        jobs += [(one, form) for one in (candidates(form, count, shape) if every else ())]
    compile_all(jobs)
    for shape in SHAPES:
        copies = max(2, -(-(120 << 20) // (2 * shape[0] * shape[1])))
        dense = [torch.randn(shape, device="cuda", dtype=BF16) for _ in range(copies)]
        for scheme in schemes[shape]:
            each = shape[0] * shape[1] * int(scheme[3]) // 8
            held = [fast.quantize(torch.randn(shape, device="cuda"), scheme_of(scheme), packed=True)
                    for _ in range(max(2, -(-(120 << 20) // each)))]  # fmt: skip
            for count in rows:
                time_row(scheme, count, held, dense, every, older)


def main() -> None:
    """Bits, then times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--no-bits", action="store_true")
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--older", action="store_true")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 3, 5, 6])
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    given = parser.parse_args()
    say(torch.cuda.get_device_name())
    failed = 0 if given.no_bits else check_bits(given.seconds)
    if not given.no_times:
        check_times(given.bits, given.rows, given.all, given.older)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
