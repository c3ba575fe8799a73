"""The variants of the kernel: how rows of the weight and K are parted, and what is defined for its source."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from fast.kernels.hopper.headers import common
from fast.kernels.linear_skinny.variants import KINDS, MOST_SHARED, OPTIONS

SOURCE = Path(__file__).with_name("fp8_skinny.cu")
#: The header beside it, and those of all kernels.
INPUTS, COMMON = "inputs.cuh", ("words.cuh", "copies.cuh")
#: Rows of a slab; columns of a turn, and of a piece of x; bytes between rows of x beside their codes.
SLAB, TURN, PIECE, PAD = 16, 128, 256, 64


class Variant(NamedTuple):
    """tokens: rows of x of a tile. slabs: of 16 rows of the weight in a program. phases: warps that share a slab's turns.

    each: turns that a warp has asked for. ahead: whether the first ones are asked for, into the L2 cache, before the kernel in
    front has ended. late: whether the next kernel may begin when the last ones are asked for, not before. kept: pieces of x
    that a warp quantizes; 0 where x is codes.
    """

    tokens: int
    slabs: int
    phases: int
    each: int
    ahead: bool = False
    late: bool = False
    kept: int = 0

    @property
    def threads(self) -> int:
        """Threads of a program."""
        return 32 * self.slabs * self.phases

    def programs(self, n: int) -> int:
        """Programs for n rows of the weight, a multiple of the slabs'."""
        return n // (SLAB * self.slabs)

    def shared(self, count: int, k: int) -> int:
        """Bytes of dynamic shared memory for `count` rows of x: their codes, sums, a word of each, alignment."""
        sums = self.phases * self.tokens * (SLAB * self.slabs + 4) * 4
        return 128 + count * (k + PAD) + sums + 4 * self.tokens

    def takes(self, count: int, n: int, k: int) -> bool:
        """Whether a product is one for it: whole programs and pieces, x within shared memory, a turn for each warp."""
        whole = n % (SLAB * self.slabs) == 0 and k % PIECE == 0 and k // TURN >= self.phases
        room = self.kept == 0 or count * (k // PIECE) <= self.kept * self.slabs * self.phases
        return whole and room and 0 < count <= self.tokens and self.shared(count, k) <= MOST_SHARED


def sources(variant: Variant) -> tuple[str, dict[str, str], tuple[str, ...]]:
    """Source, headers and options for NVRTC."""
    source, inputs = texts()
    headers = {**{name: common()[name] for name in COMMON}, INPUTS: inputs}
    defined = {name.upper(): int(value) for name, value in variant._asdict().items()}
    return source, headers, (*OPTIONS, *(f"-D{name}={value}" for name, value in defined.items()))


@lru_cache(maxsize=1)
def texts() -> tuple[str, str]:
    """The kernel, and the header beside it."""
    return SOURCE.read_text(), SOURCE.with_name(INPUTS).read_text()


__all__ = ["INPUTS", "KINDS", "MOST_SHARED", "PIECE", "SLAB", "TURN", "Variant", "sources"]
