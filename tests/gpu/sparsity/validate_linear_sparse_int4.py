"""On a GPU: `linear_sparse_int4` exact on integers, within its bound on others, the same bits fifty times; then its times.

    PYTHONPATH=. python tests/gpu/sparsity/validate_linear_sparse_int4.py [--device cpu] [--tune | --choices | --skinny | --bar]
        [--pairs [--no-times]] [--rows 1 16] [--shapes 0 1] [--seconds 90] [--variants 14] [--group 64] [--out FOLDER]

Integers: shapes whole and cut, all groups, both dtypes, both storages of scales, one to sixty-four rows and more. --tune:
each of several tiles is compared and timed, in place of all that. --choices: in place of it too, the choices of real shapes at
1 to 16 rows are compared, and timed beside int4 alone and bfloat16; inputs arranged beside inputs in place. --skinny:
`sm90_sparse24_w4a16_gemv` alone (capability 9.0): all elements by one-hot rows, integers, bounds, groups, odd rows, variants.
--bar: times of its variants at 1 to 16 rows beside the kernel in Triton, int4 alone, preshuffled, and bfloat16. --pairs: two
products of one input in one launch of it, bits, then times beside a launch each; --no-times: bits alone. --rows, --shapes,
--group: what is timed, shapes by their numbers, columns of a scale. --seconds: after which --skinny, --bar and --pairs begin
nothing new. Writes what it found into --out, else $OUT: linear_sparse_int4.json, with --choices, --skinny, --bar and --pairs
linear_sparse_int4_<that>.json. Exits with 1 on any difference.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import fast
import reference
from reference.sparsity.linear_sparse_int4 import sparse_int4_weight
from tests.gpu.sparsity.products import decode_bar as bar
from tests.gpu.sparsity.products import int4_timing as speed
from tests.gpu.sparsity.products.int4_cases import EXACT, Case, as_tensors, exact_case, random_case
from tests.gpu.sparsity.progress import Progress
from tests.support.linear_cases import exact_result

BOUND = ((1, 64, 4096, 128), (2, 48, 1024, 32), (16, 64, 1024, 64), (64, 32, 2048, 128))
REPEATS = 50


def cases(make: Any, shapes: Any) -> Iterator[tuple[str, Case]]:
    """Operands on the CPU, with labels; both dtypes, and scales in both with each of them by turns."""
    for seed, shape in enumerate(shapes):
        for at, dtype in enumerate(("bfloat16", "float16")):
            storage = ("float32", "bfloat16")[(seed // 2 + at) % 2]
            case = as_tensors(make(*shape, dtype, storage, seed))
            yield f"{shape} {dtype} scales {storage}", case if seed % 2 else case._replace(bias=None)


def placed(case: Case, device: str) -> list[Any]:
    """The operands on a device."""
    return [None if part is None else part.to(device) for part in case]


def exact(case: Case) -> torch.Tensor:
    """The result where all sums are exact."""
    return exact_result(case.x, sparse_int4_weight(*case[1:4]), case.bias)


def exact_results(device: str) -> Iterator[str]:
    """Results that are not the rounded product, where all sums are exact."""
    for label, case in cases(exact_case, EXACT):
        wanted, on_device = exact(case), placed(case, device)
        for call in ("first", "again"):
            different = int((fast.linear_sparse_int4(*on_device).cpu() != wanted).sum())
            if different:
                yield f"exact {label} {call}: {different} of {wanted.numel()} differ"


def tiles(device: str) -> Iterator[str]:
    """The same of every tile, cut and whole."""
    if device == "cpu":
        return
    from fast.kernels.sparse_linear import host

    for count, rows, length in ((1, 4104, 1024), (16, 144, 1152)):
        case = as_tensors(exact_case(count, rows, length, speed.GROUP))
        wanted, on_device = exact(case), placed(case, device)
        for numbers in {*speed.TILINGS, *speed.TILINGS_16}:
            tiling = speed.tiling_of_numbers(numbers)
            if tiling.wide and not host.is_wide(length, speed.GROUP, tiling):
                continue
            y = host.linear_sparse_int4(*on_device, speed.GROUP, None, tiling)
            different = -1 if y is None else int((y.cpu() != wanted).sum())
            if different:
                yield f"{tiling} of {(count, rows, length)}: {different} differ"


def bounded_results(device: str) -> Iterator[str]:
    """Results that are farther from the exact product than allowed, or another time others."""
    for label, case in cases(random_case, BOUND):
        w = sparse_int4_weight(*case[1:4])
        truth = case.x.double() @ fast.dequantize(w).double().t()
        truth = truth if case.bias is None else truth + case.bias.double()
        allowed: Any = reference.linear_error_bound(case.x, w, case.bias)
        on_device = placed(case, device)
        got = fast.linear_sparse_int4(*on_device)
        outside = int((~((got.cpu().double() - truth).abs() <= allowed)).sum())
        if outside:
            yield f"bound {label}: {outside} of {truth.numel()} outside"
        others = sum(not torch.equal(fast.linear_sparse_int4(*on_device), got) for _ in range(REPEATS))
        if others:
            yield f"repeats {label}: {others} of {REPEATS} differ"


def gradients(device: str) -> Iterator[str]:
    """Gradients that are not products with the dense weight."""
    case = as_tensors(exact_case(3, 64, 256, 64))
    x, *weight, bias = placed(case, device)
    x, bias = x.requires_grad_(), bias.requires_grad_()
    fast.linear_sparse_int4(x, *weight, bias).sum().backward()
    wanted = fast.dequantize(sparse_int4_weight(*case[1:4])).sum(0).expand(3, -1).to(x.dtype)
    if not torch.equal(x.grad.cpu(), wanted) or not bool((bias.grad == 3).all()):
        yield "gradients differ"


def at_the_bar(shapes: list[tuple[int, int]], counts: Any) -> int:
    """Bits and times of a shape after another, written after each."""
    found: dict[str, Any] = {"wrong": [], "device": torch.cuda.get_device_name(), "times": []}
    for shape in shapes:
        wrong = list(bar.different(shape, counts))
        print("\n".join([*wrong, f"{shape}: {len(wrong) or 'no'} choices differ"]), flush=True)
        found["wrong"] += wrong
        found["times"] += bar.timed(shape, counts)
        written("linear_sparse_int4_choices", found)
    return int(bool(found["wrong"]))


def skinny(options: argparse.Namespace, shapes: list[tuple[int, int]]) -> int:
    """Bits (--skinny) or times (--bar) of `sm90_sparse24_w4a16_gemv`, written as they come."""
    from tests.gpu.sparsity.products import skinny_bits, skinny_times

    progress, found = Progress(options.seconds), dict[str, Any](device=torch.cuda.get_device_name(), times=[])
    if options.skinny:
        found["wrong"] = skinny_bits.compared(progress)
        written("linear_sparse_int4_skinny", found | {"left_out": progress.left_out}, options.out)
        return int(bool(found["wrong"]))
    counts = options.rows or skinny_times.COUNTS
    for row in skinny_times.timed(shapes, counts, progress, options.variants, options.group):
        found["times"].append(row)
        written("linear_sparse_int4_bar", found, options.out)
    progress.say(f"not reached: {', '.join(progress.left_out) or 'nothing'}")
    written("linear_sparse_int4_bar", found | {"left_out": progress.left_out}, options.out)
    return 0


def pairs(options: argparse.Namespace) -> int:
    """Bits of two products in one launch, then times, written as they come; 2 where the time ended before."""
    from tests.gpu.sparsity.pairs import bits, times

    progress, found = Progress(options.seconds), dict[str, Any](device=torch.cuda.get_device_name(), times=[])
    found["wrong"] = bits.compared(progress)
    for row in () if options.no_times else times.timed(options.rows or times.COUNTS, progress):
        found["times"].append(row)
        written("linear_sparse_int4_pairs", found, options.out)
    written("linear_sparse_int4_pairs", found | {"left_out": progress.left_out}, options.out)
    return progress.verdict()


def written(name: str, found: dict[str, Any], folder: str | None = None) -> None:
    """Into a folder, else $OUT, where there is one."""
    folder = folder or os.environ.get("OUT")
    if folder:
        Path(folder, f"{name}.json").write_text(json.dumps(found, indent=1))


def main(arguments: list[str] | None = None) -> int:
    """Compare, then time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tune", action="store_true")
    for name in ("choices", "skinny", "bar", "pairs", "no-times"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--variants", type=int, default=14)
    parser.add_argument("--group", type=int, default=speed.GROUP)
    parser.add_argument("--out")
    parser.add_argument("--rows", type=int, nargs="*")
    parser.add_argument(
        "--shapes", type=int, nargs="*", default=range(len(speed.SHAPES)), help="their numbers"
    )
    options = parser.parse_args(arguments)
    shapes = [speed.SHAPES[at] for at in options.shapes]
    if options.pairs:
        return pairs(options)
    if options.skinny or options.bar:
        return skinny(options, shapes)
    if options.choices:
        return at_the_bar(shapes, options.rows or bar.COUNTS)
    checks = (tiles,) if options.tune else (exact_results, bounded_results, gradients)
    wrong = [line for find in checks for line in find(options.device)]
    print("\n".join([*wrong[:40], f"{len(wrong)} wrong" if wrong else "agreed"]), flush=True)
    found: dict[str, Any] = {"wrong": wrong}
    if options.device == "cuda":
        found["device"] = torch.cuda.get_device_name()
        found["times"] = speed.measure(shapes, options.rows or speed.COUNTS, options.tune)
    written("linear_sparse_int4", found, options.out)
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
