"""Which variant of `sm90_w4a16_gemv` multiplies 1 to 16 rows by a preshuffled weight, and where it is faster than
`linear_small`.

Rules of measured times, whose thresholds are coefficients (reports/LOG.md, "Times that docstrings of `sm90_w4a16_gemv` held"):

* Launches are programmatic: two programs a multiprocessor leave the next kernel a place where there is work for both. To ask
  for its weight then, into the L2 cache (`ahead`), gains only where programs have a multiprocessor of their own.
* int4 up to 8 rows: one or two rows straight from memory (`direct.cu`), the largest weights by one block in three phases.
* 8 bits: straight from memory where programs are one wave, else through shared memory up to 4 rows, as every program reads x.
* Small weights: straight from memory, a program for each 16 rows. int4 in groups of 64: one program a multiprocessor, as the
  scales of two leave them too few stages.
* NF4 up to 16 rows, decoded by the table alone; e2m1 of small weights. x of more than `upfront` rows comes in stages, and
  programs are as tall as leaves every multiprocessor one, so that x is read by few.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from fast.cost import Coefficients, first_row, holds
from fast.kernels.sm90_w4a16_gemv.variants import FACTORED, STEP, Direct, Form, Variant, fitted
from fast.launch.hopper import AT_ONCE, MULTIPROCESSORS

C = Coefficients("sm90_w4a16_gemv")
#: Rows of x that a variant takes at most: two tiles of the tensor core's 8.
MOST_ROWS = 16
#: Rows of x of a tile.
TILES = (8, 16)


def gains(form: Form, count: int, n: int, k: int) -> bool:
    """Whether so many rows are multiplied faster than by `linear_small`."""
    if _small(form, TILES[0], count, n, k) is not None:
        return True
    most = first_row(C.gaining, **_facts(form, count, n, k))["rows"]
    return count <= most and choose(form, count, n, k) is not None


def _facts(form: Form, count: int, n: int, k: int) -> dict[str, Any]:
    """What tables of the coefficients ask of a product."""
    return {
        "element": form.element, "group": form.group, "rows": count, "size": n * k, "length": k, "blocks": n // 64,
        "pairs": n // 128, "slabs": _slabs(n), "fills": _fills(n, k),
    }  # fmt: skip


def _fills(n: int, k: int) -> bool:
    """Whether blocks of 64 rows, and parts of K of them, nearly fill a device."""
    return (
        n // 64 * min(C.most_splits, max(1, k // STEP // C.fewest_steps)) >= C.enough
        and n // 64 * 2 >= C.enough
    )


def _slabs(n: int) -> int:
    """Slabs of a program where those of n rows are one wave that leaves no multiprocessor out; 0 where none are."""
    return next(
        (
            slabs
            for slabs in range(1, 17)
            if n % (16 * slabs) == 0 and C.whole <= n // 16 // slabs <= MULTIPROCESSORS
        ),
        0,
    )


@lru_cache(maxsize=1024)
def choose(form: Form, count: int, n: int, k: int) -> Variant | Direct | None:
    """The variant for `count` rows of x (1 to MOST_ROWS) and a weight (n, k), multiples of 128; None where what programs
    keep of x, or of scales, is too long."""
    tokens = next(size for size in TILES if count <= size)
    if form.element in C.tall or (form.element == "e4m3_mx" and not _fills(n, k)):
        return _tall(form, tokens, count, n, k)
    small = _small(form, tokens, count, n, k)
    return small or _direct(form, tokens, count, n, k) or _stream(form, tokens, count, n, k)


def _small(form: Form, tokens: int, count: int, n: int, k: int) -> Direct | None:
    """Straight from memory, where programs of 16 rows are fewer than multiprocessors; None for factors, and where it is not."""
    small = C.small
    if (
        n * k > small["size"]
        or n // 16 >= C.whole
        or count > small["rows"]
        or form.element in FACTORED
        or form.zero
    ):
        return None
    one = Direct(tokens, 1, min(small["warps"], k // 64), small["loads"])
    return one if one.takes(form, count, n, k) else None


def _direct(form: Form, tokens: int, count: int, n: int, k: int) -> Direct | None:
    """Straight from memory, where programs of that are one wave; None else."""
    slabs = _slabs(n)
    sizes = first_row(C.direct, **_facts(form, count, n, k)) if slabs else {}
    if "warps" not in sizes:
        return None
    # Those of factors were not timed with what lets kernels overlap.
    overlap = form.element not in FACTORED
    one = Direct(tokens, slabs, min(sizes["warps"] // slabs, k // 64), sizes["loads"], overlap, overlap)
    return one if one.takes(form, count, n, k) else None


def _stream(form: Form, tokens: int, count: int, n: int, k: int) -> Variant | None:
    """Through shared memory; None where scales, or x, leave no room."""
    steps, splits = k // STEP, 1
    while splits < C.most_splits and n // 64 * splits < C.enough and steps // (2 * splits) >= C.fewest_steps:
        splits *= 2
    facts = _facts(form, count, n, k)
    for row in C.stream:
        if holds(row, facts):
            sizes = (tokens, row["blocks"], row["phases"], splits if row.get("parted") else 1)
            flags = {name: row[name] for name in ("streamed", "ahead") if name in row}
            if (one := fitted(form, sizes, count, steps, row["at_once"], **flags)) is not None:
                return one
    return None


def _tall(form: Form, tokens: int, count: int, n: int, k: int) -> Variant | None:
    """One program a multiprocessor, with sixteen warps."""
    possible = [blocks for blocks in (1, 2, 4) if n % (64 * blocks) == 0]
    blocks = next((blocks for blocks in possible if n // (64 * blocks) <= MULTIPROCESSORS), possible[-1])
    steps, programs, splits = k // STEP, n // (64 * blocks), 1
    while (
        splits < C.most_splits and programs <= AT_ONCE[2 * splits] and steps // (2 * splits) >= C.fewest_steps
    ):
        splits *= 2
    sizes, rest = (tokens, blocks, 4 // blocks, splits), {"streamed": count > C.upfront, "ahead": splits > 1}
    return fitted(form, sizes, count, steps, 1, tabled=C.tabled, **rest)


__all__ = ["MOST_ROWS", "TILES", "choose", "gains"]
