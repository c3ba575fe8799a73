"""Whether a line was measured with the kernel that is chosen for it today.

A row says which kernel ran, and at which commit. Which one is chosen today `fast.gemm.choose` says, of a Hopper GPU of 132
multiprocessors, without a GPU here. Where both differ the row is shown with both names, and no figure, finding, headline or
target is made of it. Rows of before kernels were named say "fused" alone: of these the family that is chosen today must have
existed at their commit, which git knows; where there is no history nothing is said of them. Nor is anything of any row where
Triton is not installed, with which kernels are chosen: pages say so.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch

from ao_lab.config.recipe import Recipe
from ao_lab.gemm.codes import BLOCK
from ao_lab.tensor.metadata import recipe_reason
from experiments.harness.revision import DIRTY, has_triton, is_hopper, printed
from experiments.harness.rows import ROOT, Row, table_parts
from experiments.linear.tables import EXPERTS, OF_OURS
from fast.gemm import families
from fast.gemm.choose import choose, codes_of_layer
from fast.gemm.families import CODES, FAMILIES, HOPPER, PLAIN, PRESHUFFLED, Family, Problem
from fast.matmul.preshuffled.layout import scheme_reason
from fast.scale_factors import form_of
from reference import Scheme

#: What kernels were called in rows before families had their names.
FORMER = {
    "linear_skinny": families.SM90_W4A16_GEMV.name,
    "linear_small_kernel": families.TRITON_SMALL_M.name,
    "mixed_mm": families.SM90_W4A16_GEMM.name,
    "linear_bits": families.SM90_INTN_SMALL_M.name,
    "dense_mm": families.SM90_S8_GEMM.name,
}
#: Kernels of `ao_lab.gemm.select` that rows name.
DEQUANTIZE, FUSED = "dequantize", "fused"
KINDS = (DEQUANTIZE, FUSED, "int8", "scaled_mm")
BF16 = torch.bfloat16


#: How a row's kernel stands to today's: the same, another one, or not known, since rows of then did not name it.
TODAY, OTHER, UNNAMED = "today", "other", "unnamed"


def outdated(row: Row) -> str:
    """As "measured with kernel dequantize; today triton_small_m is chosen"; nothing where that is the kernel that ran, or where
    one of both is not known."""
    return _compared(*row.line, row.kernel, row.commit)[1]


def kernel_state(row: Row) -> str:
    """TODAY, OTHER or UNNAMED; "" of rows that no kernel of ours is chosen for."""
    return _compared(*row.line, row.kernel, row.commit)[0]


def current(rows: Iterable[Row]) -> list[Row]:
    """The rows that were measured with the kernels that are chosen today, and those of which that is not known."""
    return [row for row in rows if not outdated(row)]


@cache
def _compared(
    table: str, setting: str, method: str, device: str, kernel: str, commit: str
) -> tuple[str, str]:
    """The state of a line, and what `outdated` says."""
    kind, ran = named(kernel)
    rows = setting.partition(" ")[0]
    of_gpus = kind in KINDS and rows.isdigit() and is_hopper(device)
    if not of_gpus or not has_triton():
        return "", ""
    today = family_today(*table_parts(table)[::2], method, int(rows))
    if today is None:
        return "", ""
    if kind != kind_of(today, kind) or (ran in FAMILIES and ran != today.name):
        return OTHER, f"measured with kernel {ran or kind}; today {shown(today)} is chosen"
    if ran in FAMILIES or kind == DEQUANTIZE:
        return TODAY, ""
    if existed(today.name, commit) is False:
        return OTHER, f"measured before kernel {today.name}, which is chosen today"
    return UNNAMED, ""


def named(kernel: str) -> tuple[str, str]:
    """Of a row's kernel what `ao_lab.gemm.select` calls it, and the family, by the name that it has today; "" where it is not
    named."""
    kind, _, launched = kernel.partition(": ")
    first = launched.partition(" + ")[0]
    return kind, FORMER.get(first, first) if kind == FUSED else ""


def kind_of(family: Family, other: str) -> str:
    """What `ao_lab.gemm.select` calls a family; of codes by codes that is the element's affair, as rows have it."""
    if family is families.TORCH_DEQUANTIZE:
        return DEQUANTIZE
    codes = CODES in family.layouts or family in (families.TORCH_SCALED_MM, families.TORCH_INT_MM)
    return other if codes and other not in (DEQUANTIZE, FUSED) else "codes" if codes else FUSED


def shown(family: Family) -> str:
    """A family as the column of kernels has it."""
    return DEQUANTIZE if family is families.TORCH_DEQUANTIZE else family.name


@cache
def family_today(part: str, data: str, method: str, rows: int) -> Family | None:
    """What multiplies so many rows by a layer of ours on a Hopper GPU; None of other layers.

    part: the kind of a table; data: the shape, of experts with their number in front. The weight is preshuffled where its
    scheme and shape allow it: values that forbid it (NaN) do not come up in layers that are measured.
    """
    if method not in OF_OURS:
        return None
    *experts, n, k = map(int, data.split("x"))
    recipe = recipe_of(method)
    if part == EXPERTS:
        p = preshuffled(recipe.weight, n, k, rows / experts[0], experts[0])
    elif recipe.activation is not None and recipe_reason(recipe) is not None:
        return of_codes(recipe.activation, recipe.weight, n, k, rows)
    elif scheme_reason(recipe.weight, (n, k), 1) is None:
        p = preshuffled(recipe.weight, n, k, rows)
    else:
        weight = (recipe.weight, 1, recipe.weight.format.bits < 8)
        p = Problem(PLAIN, rows, n, k, BF16, HOPPER, weight=weight)
    return next(choose(p))


@cache
def recipe_of(method: str) -> Recipe:
    """The recipe of one of ours."""
    build = OF_OURS[method].build
    if build is None:
        raise ValueError(f"{method!r} is no quantized layer; methods are {', '.join(OF_OURS)}")
    recipe: Recipe = build().recipe()
    return recipe


def preshuffled(weight: Scheme, n: int, k: int, rows: float, experts: int = 0) -> Problem:
    """Rows by a preshuffled weight, or by one of so many experts."""
    form = form_of(weight, k)
    return Problem(PRESHUFFLED, rows, n, k, BF16, HOPPER, *form, weight.zero is not None, experts=experts)


def of_codes(x: Scheme, w: Scheme, n: int, k: int, rows: int) -> Family:
    """Of a layer whose inputs are quantized to 8 bits."""
    if x.scale.block == BLOCK:
        return families.TORCH_SCALED_MM
    zero = x.zero is not None
    return codes_of_layer(x, w, Problem(CODES, rows, n, k, BF16, HOPPER, element=x.element, zero=zero))


@cache
def existed(family: str, commit: str) -> bool | None:
    """Whether the source of a family in CUDA C++ existed at a commit, under any name; None of others, and without history."""
    path = f"{FAMILIES[family].source}/{family}.cu"
    if not commit or not (ROOT / path).is_file():
        return None
    paths = former_paths(path)
    there = printed("git", "ls-tree", "--name-only", commit.removesuffix(DIRTY), "--", *paths)
    return None if there is None or not paths else bool(there.strip())


@cache
def former_paths(path: str) -> tuple[str, ...]:
    """All paths that a file has had."""
    log = printed("git", "log", "--follow", "--name-only", "--format=", "--", path) or ""
    return tuple(dict.fromkeys(line for line in log.splitlines() if line))


__all__ = ["current", "family_today", "kernel_state", "outdated"]
