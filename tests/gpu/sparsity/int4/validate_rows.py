"""On a Hopper GPU: 1 to 256 rows of inputs by int4 in 2:4 storage, with zero points and without: bits, then times.

    PYTHONPATH=. python tests/gpu/sparsity/int4/validate_rows.py [--seconds 140] [--part bits times]

Bits: every group, both dtypes of inputs and of scales, with and without zero points and a bias, where sums are exact; and the
dense weight. Times: each way to multiply in CUDA graphs over weights that exceed the second-level cache, beside bfloat16; a
line for each shape and count of rows. Writes $OUT/sparse_int4_rows.json; exit code 1 where a bit differs, or where what the
rule chooses is slower than bfloat16 for up to FASTER rows, or than the dense weight made for the call for more.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

import fast
import reference
from fast.kernels.sm90_sparse24_w4a16_gemv import host as skinny
from fast.kernels.sm90_sparse24_w4a16_gemv.select import AT_ONCE, MOST_ROWS, choose
from fast.kernels.sm90_sparse24_w4a16_gemv.variants import TILE, Form, Variant, fitted, rows_of_tiles
from fast.kernels.sparse_linear import host
from reference.sparsity.linear_sparse_int4 import sparse_int4_weight
from tests.gpu.harness.graph_times import captured, in_turn
from tests.gpu.sparsity.products import int4_timing as speed
from tests.gpu.sparsity.products.int4_cases import as_tensors, exact_case, zero_points
from tests.gpu.sparsity.products.skinny_bits import compile_all
from tests.gpu.sparsity.progress import Progress
from tests.support.linear_cases import exact_result

#: Of the bits: rows and columns of the weight, rows of inputs. Of the times: shapes, rows of inputs, rounds.
SMALL, COUNTS = (200, 2048), (1, 8, 16, 17, 24, 40, 64)
SHAPES, ROWS, ROUNDS = ((14336, 4096), (4096, 14336), (4096, 4096)), (1, 8, 16, 17, 32, 48, 64, 128, 256), 5
GROUP, FASTER, TOLERANCE, COMPILED = 128, 32, 1.05, (16, 64, 256)
#: Rows of a chunk with columns of its stages, and variants of each that are timed.
CHUNKS, MOST, WARPS = ((16, 512), (24, 256), (32, 256)), 1, 7
Call = Callable[[], Any]


def bits(progress: Progress) -> None:
    """Every form, compiled at once before."""
    forms = list(product((32, 64, 128, 256), (False, True), (False, True), (False, True)))
    wanted = [
        (choose(form, count, *SMALL), form)
        for group, narrow, half, zeros in forms
        for form in (Form(group, narrow, half, zeros=zeros),)
        for count in COUNTS
    ]
    compile_all([pair for pair in wanted if pair[0] is not None], progress)
    for group, narrow, half, zeros in forms:
        label = f"g{group} {'bfloat16' if narrow else 'float32'} scales, {'float16' if half else 'bfloat16'}"
        label += ", zero points" if zeros else ""
        progress.attempt(label, lambda: one_form(label, group, narrow, half, zeros, progress))  # noqa: B023


def one_form(label: str, group: int, narrow: bool, half: bool, zeros: bool, progress: Progress) -> None:
    """All counts of rows, twice each; the dense weight."""
    names = ("float16" if half else "bfloat16", "bfloat16" if narrow else "float32")
    for count in COUNTS:
        case = exact_case(count, *SMALL, group, *names, seed=count)
        zero = torch.from_numpy(zero_points(case, count)) if zeros else None
        x, codes, metadata, scale, bias = as_tensors(case)
        bias = None if count % 2 else bias
        w = sparse_int4_weight(codes, metadata, scale, zero)
        right = exact_result(x, w, bias)
        given = [None if one is None else one.cuda() for one in (x, codes, metadata, scale, bias, zero)]
        for _ in range(2):
            made = fast.linear_sparse_int4(*given)  # type: ignore[arg-type]
            progress.check(f"{label} {count} rows", torch.equal(made.cpu(), right))
        if count == COUNTS[0]:
            dense = torch.ops.ao_lab.sparse_int4_dense(*given[1:4], x.dtype, given[5])
            progress.check(f"{label} dense", torch.equal(dense.cpu(), reference.dequantize(w, names[0])))


def chunked(form: Form, count: int, shape: tuple[int, int]) -> Iterator[Variant]:
    """Variants of chunks of several sizes: those with the fewest tiles one after the other, of enough warps."""
    n, k = shape
    for tokens, columns in CHUNKS:
        chunks = -(-count // tokens)
        if tokens > count + 7 and tokens > MOST_ROWS:
            continue
        found = {}
        for splits, tiles, at_once in product((1, 2, 4, 8), range(1, 17), (1, 2)):
            one = fitted(form, tokens, columns, splits, tiles, k, at_once)
            if one is None or 4 * tiles % splits or one.phases * at_once < WARPS:
                continue
            waves = -(-(-(-n // (TILE * tiles)) * chunks) // (AT_ONCE[splits] * at_once))
            found[one._replace(chunks=chunks)] = (waves * (tiles + 1) * at_once, splits)
        yield from sorted(found, key=found.__getitem__)[:MOST]


class Held:
    """Weights of a shape in turn, more than the second-level cache holds."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape = shape
        self.sparse = speed.several(lambda size: speed.sparse_weight(size, GROUP), shape, 0.41)
        self.zeros = [
            torch.randint(-8, 8, one[2].shape, device="cuda", dtype=torch.int8) for one in self.sparse
        ]
        self.dense = speed.several(speed.dense_weight, shape, 2.0)
        self.int4 = speed.several(speed.int4_weight, shape, 0.53)

    def ways(self, count: int) -> dict[str, list[Call]]:
        """Each with all of its weights; "zero" is what the rule chooses for zero points."""
        x = torch.randn(count, self.shape[1], device="cuda", dtype=torch.bfloat16)
        both = list(zip(self.sparse, self.zeros, strict=True))
        found: dict[str, list[Call]] = {
            "bf16": [lambda w=w: torch.nn.functional.linear(x, w) for w in self.dense],
            "zero": [lambda w=w, z=z: fast.linear_sparse_int4(x, *w, None, z) for w, z in both],
            "symmetric": [lambda w=w: fast.linear_sparse_int4(x, *w) for w in self.sparse],
        }
        # Kernels of Triton are compiled for seconds each.
        if self.shape == SHAPES[0] and count in COMPILED:
            found["int4"] = [lambda w=w: fast.linear(x, w) for w in self.int4]
        if self.shape == SHAPES[0] and count in COMPILED and MOST_ROWS < count <= host.MOST_ROWS:
            tiling = host.tiling_of(*self.shape, GROUP, count)
            found["mma_sparse"] = [
                lambda w=w: host.linear_sparse_int4(x, *w, None, GROUP, None, tiling) for w in self.sparse
            ]
        if count >= MOST_ROWS:
            found["dense"] = [lambda w=w, z=z: by_dense(x, w, z) for w, z in both]
            found["dense alone"] = [
                lambda w=w, z=z: torch.ops.ao_lab.sparse_int4_dense(*w, x.dtype, z) for w, z in both
            ]
        for one in variants(count, self.shape):
            name = ",".join(str(int(number)) for number in one)
            found[name] = [
                lambda w=w, z=z, v=one: skinny.sm90_sparse24_w4a16_gemv(x, *w, None, GROUP, v, z)
                for w, z in both
            ]
        return found


def by_dense(x: torch.Tensor, w: Any, zero: torch.Tensor) -> torch.Tensor:
    """By torch with the dense weight."""
    return torch.nn.functional.linear(x, torch.ops.ao_lab.sparse_int4_dense(*w, x.dtype, zero))


def variants(count: int, shape: tuple[int, int]) -> list[Variant]:
    """Those that are timed beside the rule's."""
    form = Form(GROUP, False, False, zeros=True)
    chunks = -(-count // MOST_ROWS)
    if chunks == 1:
        return []
    many = choose(form, MOST_ROWS, chunks * rows_of_tiles(shape[0]), shape[1])
    ruled = [] if many is None else [many._replace(chunks=chunks, tiles=min(many.tiles, shape[0] // TILE))]
    return list(dict.fromkeys([*ruled, *chunked(form, count, shape)]))


def times(progress: Progress) -> list[dict[str, Any]]:
    """A row for each shape and count."""
    form, rows = Form(GROUP, False, False, zeros=True), []
    pairs = {(one, form) for shape in SHAPES for count in ROWS for one in variants(count, shape)}
    for shape, count, zeros in product(SHAPES, ROWS, (False, True)):
        own = Form(GROUP, False, False, zeros=zeros)
        one = choose(own, count, *shape) if count <= host.MOST_ROWS else None
        pairs |= {(one, own)} if one is not None else set()
    compile_all(pairs, progress)
    for shape in SHAPES:
        held = Held(shape)
        for count in ROWS:
            if progress.left() <= 0:
                progress.left_out.append(f"{shape} {count} rows")
                continue
            rows.append(timed(held, count, progress))
    return rows


def timed(held: Held, count: int, progress: Progress) -> dict[str, Any]:
    """Microseconds by way, printed; ways that fail are named."""
    graphs = {}
    for name, calls in held.ways(count).items():
        try:
            graphs[name] = captured(calls)
        except Exception as error:  # noqa: BLE001  others go on
            progress.check(
                f"{held.shape} {count} rows {name}", False, f"{type(error).__name__}: {error}"[:300]
            )
    us = in_turn(graphs, ROUNDS)
    progress.say(
        f"{held.shape} {count:3} rows: " + "  ".join(f"{name} {one:.1f}" for name, one in us.items())
    )
    other = "bf16" if count <= FASTER else "dense"
    if count <= host.MOST_ROWS and {"zero", other} <= {*us}:
        label = f"{held.shape} {count} rows: slower than {other}"
        progress.check(label, us["zero"] <= TOLERANCE * us[other])
    return {"shape": held.shape, "rows": count, "us": us}


def main() -> int:
    """Compare, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=140.0)
    parser.add_argument("--part", nargs="+", choices=("bits", "times"), default=("bits", "times"))
    given = parser.parse_args()
    torch.manual_seed(0)
    progress = Progress(given.seconds)
    # More rows than the rule gives to chunks are measured too.
    skinny.MOST_CHUNKED = max(ROWS)
    if "bits" in given.part:
        bits(progress)
    rows = times(progress) if "times" in given.part else []
    if out := os.environ.get("OUT"):
        Path(out, "sparse_int4_rows.json").write_text(
            json.dumps({"rows": rows, "wrong": progress.wrong}, indent=1)
        )
    return progress.verdict()


if __name__ == "__main__":
    sys.exit(main())
