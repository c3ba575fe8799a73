"""The variants of the kernel: how K and rows are parted, and what is defined for its source."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from fast.launch.cuda import Kernel
from fast.launch.hopper import MOST_SHARED, REGISTERS, SHARED, SYSTEM

#: Columns that a stage may have.
STAGES = (256, 512)
#: Rows of a tile of the weight.
TILE = 16
#: Warps of a program at most.
MOST_WARPS = 16
#: Bytes of a copy at least.
LEAST_BYTES = 4
#: Words of a row of a warp's sums of a tile.
LINE = 20
#: Tiles that a warp has asked for and not multiplied.
AHEAD = 2
#: One weight, two of one x, or silu of the first product times the second, by the numbers of the source.
ONE, TWO, GATED = 0, 1, 2


class Form(NamedTuple):
    """What is multiplied. group: columns of a scale; narrow: whether scales are bfloat16; half: whether inputs are float16.

    products: ONE, TWO or GATED. zeros: whether each scale has a zero point beside it.
    """

    group: int
    narrow: bool
    half: bool
    products: int = ONE
    zeros: bool = False

    @property
    def scale_bytes(self) -> int:
        """Of a scale."""
        return 2 if self.narrow else 4

    def scales(self, columns: int) -> int:
        """Bytes of the scales of a row of so many columns."""
        return columns // self.group * self.scale_bytes

    def points(self, columns: int) -> int:
        """Bytes that have the zero points of a row of so many columns: a whole copy at least."""
        return max(LEAST_BYTES, columns // self.group) if self.zeros else 0

    def part(self, columns: int) -> int:
        """Bytes of a stage of 16 rows: codes, metadata, scales, zero points; a multiple of 128."""
        row = columns // 4 + columns // 8 + self.scales(columns) + self.points(columns)
        return -(-TILE * row // 128) * 128


class Variant(NamedTuple):
    """tokens: rows of x of a tile. columns: of a stage. phases: warps of a program, one for each stage of its part of K.

    splits: programs along K, a cluster. tiles: of 16 rows of a program. at_once: programs of a multiprocessor.
    early: whether the first `ahead` tiles are asked for before the kernel in front has ended. ahead: tiles under way.
    chunks: of `tokens` rows of x, each with programs of its own.
    """

    tokens: int
    columns: int
    phases: int
    splits: int
    tiles: int
    at_once: int = 1
    early: bool = True
    ahead: int = 1
    chunks: int = 1

    @property
    def threads(self) -> int:
        """Threads of a program."""
        return 32 * self.phases

    @property
    def registers(self) -> int:
        """What a thread asks for: x of its stage, sums, and the rest."""
        return (self.columns // 8 + 8) * (self.tokens // 8) + 40

    def programs(self, n: int) -> int:
        """Programs for a weight of n rows."""
        return -(-n // (TILE * self.tiles)) * self.splits * self.chunks

    def shared(self, form: Form) -> int:
        """Bytes of dynamic shared memory: stages of all warps under way, their sums, alignment; sums that a cluster's programs
        send."""
        ring, sent = min(self.ahead + 1, self.tiles), 4 * TILE * self.tiles * self.tokens
        sums = self.tiles * self.phases * self.tokens * LINE * 4
        return ring * self.phases * form.part(self.columns) + sums + 128 + (sent if self.splits > 1 else 0)


def fitted(
    form: Form, tokens: int, columns: int, splits: int, tiles: int, k: int, at_once: int = 1
) -> Variant | None:
    """The variant for K columns; None where they are no whole stages, a row's scales are less than a copy or its zero points
    no whole copies, tiles of a gate and of what it gates are no pairs, or there is no room: for warps, registers, shared
    memory."""
    if k % columns or form.scales(columns) < LEAST_BYTES or (form.products == GATED and tiles % 2):
        return None
    if form.zeros and (form.products != ONE or k // form.group % LEAST_BYTES):
        return None
    one = Variant(
        tokens, columns, -(-(k // columns) // splits), splits, tiles, at_once, ahead=min(AHEAD, tiles)
    )
    room = min(SHARED // at_once - SYSTEM, MOST_SHARED)
    if one.phases > MOST_WARPS or one.shared(form) > room:
        return None
    return one if one.registers * one.threads * at_once <= REGISTERS else None


def _defines(variant: Variant, form: Form) -> dict[str, int]:
    return {name.upper(): int(value) for name, value in variant._asdict().items()} | {
        "GROUP": form.group, "SCALE_BYTES": form.scale_bytes, "HALF": int(form.half), "PRODUCTS": form.products,
        "ZEROS": int(form.zeros),
    }  # fmt: skip


KERNEL = Kernel(
    "sm90_sparse24_w4a16_gemv",
    Path(__file__).parent,
    _defines,
    own=("gated.cuh", "output.cuh"),
    shared=("words.cuh", "copies.cuh"),
    programmatic=True,
)


def rows_of_tiles(*rows: int) -> int:
    """Rows of weights in tiles of their own."""
    return sum(-(-n // TILE) * TILE for n in rows)


__all__ = ["GATED", "KERNEL", "ONE", "STAGES", "TWO", "Form", "Variant", "fitted", "rows_of_tiles"]
