"""Sums of rows of a stored table in CUDA C++ for Hopper: which tables and bags are taken, how they are compiled and launched.

It gives the bits of `embedding_bag.embedding_bag_kernel`, which adds up what this does not take: weights, padding, zero points,
scales of parts of a row, rows that are no multiples of 16 bytes or fill few lines of 128. There a lane waits for ids and then
for their rows, again for each few of a bag, and each bag begins anew; here a warp reads ahead over the ends of bags
(`reports/LOG.md`).
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from fast.launch import cuda
from fast.launch.cuda import CudaLaunch, Kernel, is_served
from reference import Quantized

#: Bytes of a row that a warp adds up and that come with a scale, the most bags it has, an end of one a lane, and how much of a
#: row's lines is filled.
LINE, COPY, MOST_BAGS, FILLED = 128, 16, 32, 0.6
#: Ids of a warp, about, and warps that keep a GPU busy: fewer ids are a warp's where there would be fewer warps.
IDS, WARPS_AT_LEAST = 214, 8 * cuda.MULTIPROCESSORS
#: Elements of a byte that it decodes, and dtypes of sums, by the numbers of the source.
FORMATS, OUTPUTS = ("int8", "float8_e4m3fn"), ("float32", "bfloat16", "float16")
POINTERS = ("codes", "scale", "ids", "offsets", "out")
#: How the numbers of a launch lie: ids; bags, rows, bags of a warp, lines and bytes of a row, bytes between rows and scales.
NUMBERS = "q7I"


class Problem(NamedTuple):
    """What is added up: elements by their number in FORMATS, whether ids have 64 bits, whether sums become means, their dtype
    by its number in OUTPUTS."""

    format: int
    wide: bool
    mean: bool
    output: int


class Variant(NamedTuple):
    """warps: of a program. rows: of a piece. stages: pieces in shared memory, one of which is added up. resident: programs of a
    multiprocessor."""

    warps: int = 4
    rows: int = 32
    stages: int = 2
    resident: int = 6

    @property
    def cluster(self) -> int:
        """Programs of a cluster."""
        return 1

    @property
    def threads(self) -> int:
        """Threads of a program."""
        return 32 * self.warps

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a program: codes and copies of scales, and the scales of one piece."""
        return self.warps * self.rows * (self.stages * (LINE + COPY) + 4)


VARIANT = Variant()


def _defines(variant: Variant, problem: Problem) -> dict[str, int]:
    return {
        "FORMAT": problem.format, "WIDE": int(problem.wide), "MEAN": int(problem.mean), "OUTPUT": problem.output,
        "WARPS": variant.warps, "ROWS": variant.rows, "STAGES": variant.stages, "RESIDENT": variant.resident,
    }  # fmt: skip


KERNEL = Kernel(
    "sm90_embedding_bag", Path(__file__).parent, _defines, shared=(), instead="Triton's kernel adds rows up",
    fails_whole=True,
)  # fmt: skip


def problem_of(
    q: Quantized, ids: torch.Tensor, offsets: torch.Tensor, mode: str, dtype: str
) -> Problem | None:
    """Of what the kernel is compiled for; None where Triton's adds up: bytes of other elements, zero points, other scales than
    a float32 a row, rows that leave too much of their lines empty, ids of other or of two dtypes, 2**31 rows, bags or more,
    a table whose address or whose rows are no multiples of 16 bytes."""
    scheme = q.scheme
    by_rows = q.zero is None and q.outer is None and tuple(q.scale.shape) == (q.shape[0], 1)
    if not by_rows or scheme.format.name not in FORMATS or q.scale.dtype != torch.float32:
        return None
    if scheme.scale.stored != "decode" or scheme.dequantize != "float32":
        return None
    if ids.dtype != offsets.dtype or ids.dtype not in (torch.int32, torch.int64):
        return None
    small = max(q.shape[0], len(offsets)) < 1 << 31
    if not small or not is_wide(q.shape[1]) or not is_aligned(q.codes) or q.scale.data_ptr() % 16:
        return None
    return Problem(
        FORMATS.index(scheme.format.name), ids.dtype == torch.int64, mode == "mean", OUTPUTS.index(dtype)
    )


def is_wide(width: int) -> bool:
    """Whether rows of so many bytes are copied in sixteens and fill their lines well."""
    return width % 16 == 0 and width >= FILLED * LINE * lines_of(width)


def lines_of(width: int) -> int:
    """Of a row."""
    return -(-width // LINE)


def is_aligned(codes: torch.Tensor) -> bool:
    """Whether every row of a table begins at a multiple of 16 bytes, and is contiguous."""
    return codes.stride(1) == 1 and codes.stride(0) % 16 == 0 and codes.data_ptr() % 16 == 0


def taken(
    q: Quantized,
    ids: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    mode: str,
    padding: int,
    dtype: str,
) -> Problem | None:
    """The problem of bags on their device, where this kernel takes them, compiles and loads there."""
    if weights is not None or padding >= 0 or not is_served(q.codes):
        return None
    problem = problem_of(q, ids, offsets, mode, dtype)
    if problem is None or not cuda.is_loadable(KERNEL, VARIANT, problem, q.codes.get_device()):
        return None
    return problem


def bags_of_a_warp(ids: int, bags: int, parts: int) -> int:
    """So many that a warp has about IDS of the ids, fewer where too few warps would have some."""
    wanted = round(IDS * bags / max(ids, 1))
    return max(1, min(MOST_BAGS, wanted, -(-bags * parts // WARPS_AT_LEAST)))


def embedding_bag(
    q: Quantized, ids: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor, problem: Problem, variant: Variant | None = None,
    each: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Sums of rows (bags, width) in `out`; ids and offsets contiguous. variant, each (bags of a warp): for measurements.

    Codes and scales may lie in rows of their own pitch (`Quantized` views of one buffer): strides of both are read.
    """
    bags, width, parts = len(offsets), q.shape[1], lines_of(q.shape[1])
    each = each or bags_of_a_warp(len(ids), bags, parts)
    variant = variant or VARIANT
    warps = -(-bags // each) * parts
    numbers = (len(ids), bags, q.shape[0], each, parts, width, q.codes.stride(0), 4 * q.scale.stride(0))
    one = _launch(problem, variant, -(-warps // variant.warps), numbers)
    one.run((q.codes, q.scale, ids, offsets, out), out.get_device())
    return out


@lru_cache(maxsize=256)
def _launch(problem: Problem, variant: Variant, programs: int, numbers: tuple[int, ...]) -> CudaLaunch:
    return CudaLaunch(KERNEL, variant, problem, POINTERS, programs, variant.shared, (NUMBERS, numbers))


__all__ = [
    "KERNEL",
    "VARIANT",
    "Problem",
    "Variant",
    "bags_of_a_warp",
    "embedding_bag",
    "problem_of",
    "taken",
]
