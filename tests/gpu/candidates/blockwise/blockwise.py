"""a @ b.T of e4m3 codes scaled in blocks of 128 along the sum, on GPUs of compute capability 9.0.

The tensor core sums a block's 128 products, with the 14 bits that it keeps; that sum times the product of both scales is added
to a float32 sum, block after block; the bias is added in float32, and the result is rounded to bfloat16.

A candidate in CUDA C++ for `ao_lab.training.scaled_mm.scaled_mm_blocks`, which nothing selects and no package contains. On an
H200 earlier variants gave exact sums exactly, at 0.86 to 0.90 of the speed of torch's own product; the variants here compile
without spills and have not run on a GPU. It may move to `fast/kernels/scaled_mm` once `validate` finds all results right there
and a variant at least as fast as torch for a range of shapes that a dispatcher can name. `blockwise.cu` is the kernel, `build`
compiles it by nvcc, `cubin` launches what was compiled, `validate` compares and times on a GPU, `test_candidate` needs none.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from tests.gpu.candidates.blockwise.cubin import TENSOR_MAP_STEP, Module, codes_map, scales_map

BLOCK = 128
#: What K and N are multiples of, and the float32 of 16 bytes.
STEP, WORDS = 16, TENSOR_MAP_STEP // 4
#: Dynamic shared memory that a program of compute capability 9.0 may have, in bytes.
MOST_SHARED = 232_448
#: Tiles along M that share the codes of their columns in the L2 cache.
GROUP = 8


class Variant(NamedTuple):
    """A kernel of the module: multiplying warpgroups, waves of 64 rows of each, stages of the ring, programs of a cluster."""

    groups: int
    waves: int
    stages: int
    cluster: int

    @property
    def rows(self) -> int:
        """Rows of a tile, which has 128 columns."""
        return 64 * self.groups * self.waves

    @property
    def threads(self) -> int:
        """Threads of a program, those that load included."""
        return 128 * (self.groups + 1)

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory: codes, scales and two barriers of each stage, alignment."""
        return self.stages * ((self.rows + BLOCK) * (BLOCK + 4) + 16) + 1024


VARIANTS = {
    "g3w1_c2": Variant(3, 1, 5, 2),
    "g3w1_c1": Variant(3, 1, 5, 1),
    "g2w1_c2": Variant(2, 1, 6, 2),
    "g2w1_c1": Variant(2, 1, 6, 1),
    "g2w1d_c2": Variant(2, 1, 6, 2),
    "g2w2_c2": Variant(2, 2, 4, 2),
}


class Problem(ctypes.Structure):
    """The kernels' second argument; the first are the tensor maps."""

    _fields_ = (
        ("bias", ctypes.c_void_p), ("y", ctypes.c_void_p),
        ("m", ctypes.c_int), ("n", ctypes.c_int), ("k", ctypes.c_int), ("group", ctypes.c_int),
    )  # fmt: skip


def blockwise(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    cubin: Path,
    variant: str = "g3w1_c2",
    group: int = GROUP,
) -> torch.Tensor:
    """a (M, K) @ b.T (K, N) plus bias (N, bfloat16): (M, N), bfloat16.

    a, b: e4m3 codes, contiguous, of 16-byte addresses. scale_a: float32 (M, ceil(K/128)), strides (1, M) spare a copy where M
    is a multiple of 4. scale_b: the same of N, or (ceil(N/128), ceil(K/128)) of squares. cubin: what `build` made. ValueError
    where shapes do not fit.
    """
    check(a, b, scale_a, scale_b)
    (m, k), n = a.shape, b.shape[0]
    rows_of_b = scale_b.shape[0] == n
    one = VARIANTS[variant]
    scale_a = blocks_major(scale_a)
    scale_b = blocks_major(scale_b) if rows_of_b else padded(scale_b)
    maps = _codes_maps(a.data_ptr(), b.data_ptr(), m, n, k, one.rows // one.cluster) + _scales_maps(
        scale_a.data_ptr(), scale_a.stride(1), scale_b.data_ptr(), scale_b.stride(1 if rows_of_b else 0),
        m, n, -(-k // BLOCK), one.rows, rows_of_b,
    )  # fmt: skip
    y = torch.empty((m, n), dtype=torch.bfloat16, device=a.device)
    if m and n:
        problem = Problem(None if bias is None else bias.data_ptr(), y.data_ptr(), m, n, k, group)
        name = variant + "_rows" * rows_of_b
        arguments = ((ctypes.c_char * len(maps)).from_buffer_copy(maps), problem)
        _module(cubin, a.get_device()).launch(
            name, programs(one, m, n, a.get_device()), one.threads, one.shared, arguments
        )
    return y


def check(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> None:
    """Raise ValueError where shapes do not fit each other or the tensor copy engine."""
    (m, k), (n, other) = a.shape, b.shape
    blocks = -(-k // BLOCK)
    if other != k or k == 0 or k % STEP or n % STEP:
        raise ValueError(
            f"a (M, K) and b (N, K) need one K; K and N must be multiples of {STEP}, got {tuple(a.shape)}, {tuple(b.shape)}"
        )
    if scale_a.shape != (m, blocks) or scale_b.shape not in ((n, blocks), (-(-n // BLOCK), blocks)):
        raise ValueError(
            f"scales must be ({m}, {blocks}) and ({n}, {blocks}) or ({-(-n // BLOCK)}, {blocks}), "
            f"got {tuple(scale_a.shape)} and {tuple(scale_b.shape)}"
        )


def blocks_major(scale: torch.Tensor) -> torch.Tensor:
    """Scales (rows, blocks) so that those of a block lie side by side, a multiple of 16 bytes from those of the next."""
    if scale.stride(0) == 1 and scale.stride(1) % WORDS == 0 and scale.data_ptr() % TENSOR_MAP_STEP == 0:
        return scale
    rows, blocks = scale.shape
    made = scale.new_empty((blocks, -(-rows // WORDS) * WORDS))
    made[:, :rows] = scale.t()
    return made.t()[:rows]


def padded(scale: torch.Tensor) -> torch.Tensor:
    """Scales (rows, blocks) so that each row is side by side, a multiple of 16 bytes from the next."""
    if scale.stride(1) == 1 and scale.stride(0) % WORDS == 0 and scale.data_ptr() % TENSOR_MAP_STEP == 0:
        return scale
    rows, blocks = scale.shape
    made = scale.new_empty((rows, -(-blocks // WORDS) * WORDS))
    made[:, :blocks] = scale
    return made[:, :blocks]


def programs(variant: Variant, m: int, n: int, device: int) -> int:
    """Programs to launch: as many as the device runs at once, in whole clusters, or one for each tile."""
    size = variant.cluster
    tiles = -(-m // variant.rows) * -(-n // (BLOCK * size)) * size
    return min(tiles, torch.cuda.get_device_properties(device).multi_processor_count // size * size)


@lru_cache(maxsize=16)
def _module(cubin: Path, device: int) -> Module:
    return Module(cubin, device)


@lru_cache(maxsize=4096)
def _codes_maps(a: int, b: int, m: int, n: int, k: int, box: int) -> bytes:
    return codes_map(a, m, k, box) + codes_map(b, n, k, BLOCK) if m and n else b""


@lru_cache(maxsize=4096)
def _scales_maps(
    a: int, a_stride: int, b: int, b_stride: int, m: int, n: int, blocks: int, rows: int, rows_of_b: bool
) -> bytes:
    if not (m and n):
        return b""
    of_a = scales_map(a, m, blocks, a_stride, rows)
    if rows_of_b:
        return of_a + scales_map(b, n, blocks, b_stride, BLOCK)
    return of_a + scales_map(b, blocks, -(-n // BLOCK), b_stride, WORDS)


__all__ = ["VARIANTS", "Variant", "blocks_major", "blockwise", "padded"]
