"""Which kernel runs when: the page ``reports/families.md``, from the records of families and what `fast.gemm.choose` selects.

Nothing is measured for it: choices are those on a Hopper GPU of 132 multiprocessors with NVRTC, and need no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from experiments.report.content import Table
from fast.gemm.choose import by_rows, choose, codes_of_layer
from fast.gemm.families import CODES, FAMILIES, HOPPER, PLAIN, PRESHUFFLED, SPARSE, SPARSE_INT4, Problem
from fast.scale_factors import form_of
from reference import SCHEMES

#: Layers of a model of 8B parameters, (outputs, inputs): attention's output, the feed-forward's two.
SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336))
#: Weights by scheme, in the layout that they have on a GPU.
WEIGHTS = {
    PRESHUFFLED: (
        "int4_g128",
        "int4_g32",
        "int8_rowwise",
        "fp8_rowwise",
        "nf4",
        "mxfp4",
        "mxfp8_e4m3",
        "nvfp4",
    ),
    PLAIN: ("int4_g128", "int8_rowwise", "int2_g64", "int3_g64", "int6_g64", "mxfp6_e3m2"),
    CODES: ("int8_rowwise", "fp8_rowwise", "fp8_tensorwise"),
    SPARSE: ("bfloat16", "int8_rowwise", "fp8_rowwise"),
    SPARSE_INT4: ("int4_g128",),
}
#: The most rows that are asked for.
MOST = 1 << 14
BF16 = torch.bfloat16


def tables() -> list[Table]:
    """The families, and the ranges of rows of each weight."""
    families = [
        [f"`{one.name}`", one.about, f"`{one.source}`" if one.source else "torch"]
        for one in FAMILIES.values()
    ]
    ranges = [
        [name, layout, *(", ".join(map(str, by_rows(asked(layout, name, shape), MOST))) for shape in SHAPES)]
        for layout, names in WEIGHTS.items()
        for name in names
    ]
    shapes = [f"{n} x {k}" for n, k in SHAPES]
    return [
        Table("Families", ("family", "fastest for", "source"), families),
        Table(
            "bfloat16 inputs by a weight (N x K): kernel by number of tokens",
            ("weight", "layout", *shapes),
            ranges,
        ),
    ]


def problem_of(layout: str, name: str, shape: tuple[int, int]) -> Problem:
    """One row of bfloat16 by a weight of a scheme; in 2:4 storage "bfloat16" and "float16" are weights too."""
    if layout == SPARSE:
        element = SCHEMES[name].element if name in SCHEMES else name
        return Problem(SPARSE, 1, *shape, BF16, HOPPER, element)
    scheme = SCHEMES[name]
    zero = scheme.zero is not None
    if layout == PLAIN:
        return Problem(PLAIN, 1, *shape, BF16, HOPPER, weight=(scheme, 1, scheme.format.bits < 8))
    if layout == PRESHUFFLED:
        return Problem(PRESHUFFLED, 1, *shape, BF16, HOPPER, *form_of(scheme, shape[1]), zero)
    if layout == CODES:
        return Problem(CODES, 1, *shape, BF16, HOPPER, scheme.element, zero=zero)
    return Problem(SPARSE_INT4, 1, *shape, BF16, HOPPER, "int4", scheme.scale.block, zero)


def asked(layout: str, name: str, shape: tuple[int, int]) -> Callable[[int], str]:
    """What multiplies so many rows by a weight of a scheme."""
    p = problem_of(layout, name, shape)
    if layout == CODES:
        scheme = SCHEMES[name]
        return lambda rows: codes_of_layer(scheme, scheme, p._replace(rows=rows)).name
    return lambda rows: next(choose(p._replace(rows=rows))).name


def families_named() -> Iterator[str]:
    """The names that stand in the table of ranges."""
    for line in tables()[1].lines:
        for cell in line[2:]:
            yield from (one.split()[-1] for one in cell.split(", "))


__all__ = ["WEIGHTS", "families_named", "problem_of", "tables"]
