"""Times of `sm90_sparse24_w4a16_gemv` at the rows of decoding: its variants, the rule's first, beside `mma_sparse_kernel`,
int4 alone in the preshuffled layout, and bfloat16; CUDA graphs in turn over weights that exceed the second-level cache
together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fast.kernels.linear_small.host import linear_small
from fast.kernels.sm90_sparse24_w4a16_gemv.host import sm90_sparse24_w4a16_gemv
from fast.kernels.sm90_sparse24_w4a16_gemv.select import MOST_ROWS
from fast.kernels.sm90_sparse24_w4a16_gemv.variants import Form, Variant
from fast.kernels.sparse_linear import host
from tests.gpu.harness.graph_times import captured, in_turn
from tests.gpu.linear.small.times import rate
from tests.gpu.linear.small.weights import filled_weight
from tests.gpu.sparsity.products import int4_timing as speed
from tests.gpu.sparsity.products.skinny_bits import compile_all, variants
from tests.gpu.sparsity.progress import Progress

COUNTS, MOST, ROUNDS = (1, 2, 4, 8, 16), 14, 9
TILES, DENSE, TORCH = "mma_sparse_kernel", "int4", "bf16"
Calls = dict[str, list[Callable[[], Any]]]


def named(one: Variant) -> str:
    """Its numbers."""
    return ",".join(str(int(number)) for number in one)


class Weights:
    """Those of a shape in groups, of each kernel so many that every one comes from the memory."""

    def __init__(self, shape: tuple[int, int], group: int) -> None:
        self.shape, self.form = shape, Form(group, False, False)
        self.sparse = speed.several(lambda size: speed.sparse_weight(size, group), shape, 0.41)
        self.stored = speed.several(lambda size: filled_weight(f"int4_g{group}", size), shape, 0.53)
        self.dense = speed.several(speed.dense_weight, shape, 2.0)

    def calls(self, x: torch.Tensor, most: int) -> Calls:
        """Each with all of its weights; variants first, of those the rule's."""
        group, count = self.form.group, len(x)
        tiling = host.tiling_of(*self.shape, group, count)
        found: Calls = {
            named(one): [
                lambda w=w, v=one: sm90_sparse24_w4a16_gemv(x, *w, None, group, v) for w in self.sparse
            ]
            for one in variants(self.form, count, self.shape, most)
        }
        found[TILES] = [
            lambda w=w: host.linear_sparse_int4(x, *w, None, group, None, tiling) for w in self.sparse
        ]
        found[DENSE] = [lambda w=w: linear_small(x, w) for w in self.stored]
        found[TORCH] = [lambda w=w: torch.nn.functional.linear(x, w) for w in self.dense]
        return found


def row_of(held: Weights, count: int, most: int) -> dict[str, Any]:
    """Microseconds by name, with the rule's and the best variant."""
    x = torch.randn(count, held.shape[1], device="cuda", dtype=torch.bfloat16)
    graphs, failed = {}, {}
    for name, calls in held.calls(x, most).items():
        try:
            graphs[name] = captured(calls)
        except Exception as error:  # noqa: BLE001  others go on
            failed[name] = f"{type(error).__name__}: {str(error)[-200:]}"
    times = in_turn(graphs, ROUNDS)
    own = {name: us for name, us in times.items() if name not in (TILES, DENSE, TORCH)}
    stored = sum(part.nbytes for part in held.sparse[0]) + x.nbytes + 2 * count * held.shape[0]
    return {
        "shape": held.shape, "group": held.form.group, "rows": count, "rule": next(iter(own), None),
        "best": min(own, key=own.__getitem__, default=None),
        "floor": stored / rate(), "us": times, "failed": failed,
    }  # fmt: skip


def told(row: dict[str, Any]) -> str:
    """A row as a line."""
    us, nothing = row["us"], float("nan")
    best, rule, dense = (us.get(name, nothing) for name in (row["best"], row["rule"], DENSE))
    return (
        f"{row['shape']} {row['rows']:2} rows: best {best:6.2f} ({row['best']}) rule {rule:6.2f} ({row['rule']}) floor "
        f"{row['floor']:5.2f}  {TILES} {us.get(TILES, nothing):6.2f}  {DENSE} {dense:6.2f} x{dense / best:.2f}  {TORCH} "
        f"{us.get(TORCH, nothing):6.2f}" + (f"  FAILED {row['failed']}" if row["failed"] else "")
    )


def timed(
    shapes: Sequence[tuple[int, int]],
    counts: Sequence[int],
    progress: Progress,
    most: int = MOST,
    group: int = speed.GROUP,
) -> Iterator[dict[str, Any]]:
    """A row for each shape and count within the time, printed."""
    counts = [count for count in counts if count <= MOST_ROWS]
    form = Form(group, False, False)
    compile_all(((v, form) for s in shapes for c in counts for v in variants(form, c, s, most)), progress)
    for shape in shapes:
        held = Weights(shape, group) if progress.left() > 0 else None
        for count in counts:
            if held is None or progress.left() < 0:
                progress.left_out.append(f"{shape} {count} rows")
                continue
            row = row_of(held, count, most)
            progress.say(told(row))
            yield row


__all__ = ["COUNTS", "timed"]
