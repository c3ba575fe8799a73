"""Whether the kernels that a row names are still those that run: by the functions in the sources of `fast/kernels`, and by the
family that is chosen for such a product today, where the row is of a product.

A row names the functions that a captured graph launched (`experiments.harness.cuda_graph`). Those of libraries are nobody's
choice here, and nothing is said of them. A function that was renamed is the one that it is called today; one that is in no
source any more no longer serves. The same of linear layers, whose rows say a kind and a family: `experiments.linear.current`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import fast
from experiments.harness.revision import has_triton, is_hopper
from experiments.harness.rows import Row
from fast.gemm.families import FAMILIES, Family

#: How a row's kernel stands to today's: the same, or another one.
TODAY, OTHER = "today", "other"
#: What functions were called in rows of before.
FORMER = {
    "dense_mm": "sm90_s8_gemm",
    "sparse_mm": "sm90_sparse24_gemm",
    "linear_skinny": "sm90_w4a16_gemv",
    "mixed_mm": "sm90_w4a16_gemm",
    "linear_bits": "sm90_intn_small_m",
    "linear_small_kernel": "triton_small_m_kernel",
    "scaled_mm_kernel": "triton_scaled_mm_kernel",
    "int_scaled_mm_kernel": "triton_int_scaled_mm_kernel",
    **{
        f"{name}_kernel": f"triton_{name}_kernel"
        for name in (
            *("gemv_any", "gemv_w8a8", "gemv_w8a16", "gemv_w8a16_pair", "gemv_w8a16_swiglu"),
            *("gemv_w4a16", "gemv_w4a16_pair", "gemv_w4a16_swiglu"),
        )
    },
}
#: Names of libraries' kernels and of what torch.compile makes, and the end of a list that is cut.
LIBRARIES = re.compile(
    r"::|^_Z|nvjet|cutlass|cublas|cudnn|xmma|^triton_(poi|red|per|tem|for|split)_|^elementwise|^\d+ more$"
)
#: How a kernel begins, in Triton, in Gluon and in CUDA C++.
DEFINED = re.compile(
    r'@(?:triton|gluon)\.jit.*?\ndef (\w+)\(|extern "C" __global__ [^;{]*?\bvoid (\w+)\(', re.DOTALL
)
#: What a row's product is multiplied by today; None of rows that are of no product.
Chosen = Callable[[Row], Family | None]


@cache
def functions() -> frozenset[str]:
    """The names of all kernels in the sources of `fast/kernels`, functions that kernels call included."""
    found = set[str]()
    for path in (Path(fast.__file__).parent / "kernels").rglob("*"):
        if path.suffix in (".py", ".cu"):
            found.update(one or other for one, other in DEFINED.findall(path.read_text("utf-8")))
    return frozenset(found)


@cache
def ours(kernel: str) -> tuple[str, ...]:
    """The functions of ours among those that a row names, by the names that they have today."""
    names = [name.strip() for name in kernel.split(" + ") if name.strip()]
    return tuple(FORMER.get(name, name) for name in names if not LIBRARIES.search(name))


@cache
def family_of(function: str) -> str:
    """The family that a function is of, whose name its own begins with; "" of one that is of none."""
    return max((name for name in FAMILIES if function.startswith(name)), key=len, default="")


def outdated(row: Row, chosen: Chosen = lambda row: None) -> str:
    """As "measured with kernel first_kernel, which is in no source any more"; nothing of what still runs, and of kernels that
    are not ours.

    chosen: see `Chosen`; asked of ours alone, on the GPUs that it chooses for (`is_hopper`), and not without Triton, in whose
    kernels sizes are chosen.
    """
    named = ours(row.kernel)
    gone = [name for name in named if name not in functions()]
    if gone:
        return f"measured with kernel {gone[0]}, which is in no source any more"
    ran = next(filter(None, map(family_of, named)), "")
    today = chosen(row) if ran and is_hopper(row.device) and has_triton() else None
    if today is None or today.name == ran:
        return ""
    return f"measured with kernel {ran}; today {today.name} is chosen"


def kernel_state(row: Row, chosen: Chosen = lambda row: None) -> str:
    """TODAY or OTHER; "" of rows that name no kernel of ours."""
    return "" if not ours(row.kernel) else OTHER if outdated(row, chosen) else TODAY


def current(rows: Iterable[Row], chosen: Chosen = lambda row: None) -> list[Row]:
    """The rows but those of other kernels than today's."""
    return [row for row in rows if not outdated(row, chosen)]


def outdated_words(rows: Iterable[Row], chosen: Chosen = lambda row: None) -> list[str]:
    """A paragraph that names the lines of other kernels than today's; none where there are none."""
    found = {row.line: (row, words) for row in rows if (words := outdated(row, chosen))}
    if not found:
        return []
    lines = [f"{row.method}, {row.setting}: {words}" for row, words in found.values()]
    return [f"**Other kernels than today's: {len(lines)}.** In no finding or target: {'; '.join(lines)}."]
