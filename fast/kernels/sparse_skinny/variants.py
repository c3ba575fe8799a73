"""The variants of the kernel: how large its tiles are, how far it copies ahead, and what is defined for its source."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from fast.kernels.hopper.headers import common
from fast.kernels.linear_skinny.variants import KINDS, MOST_SHARED, OPTIONS, SHARED, SYSTEM

SOURCE = Path(__file__).with_name("sparse_skinny.cu")
#: Columns that a stage may have, rows of a tile, and the bytes between rows of x in a stage that keep banks apart.
STAGES, TILE, APART = (512, 256), 16, 16
#: Slots of the ring and warps of a program at most; registers of a multiprocessor; what a copy has at least.
MOST_SLOTS, MOST_WARPS, REGISTERS, LEAST_BYTES = 8, 32, 1 << 16, 4


class Form(NamedTuple):
    """What is multiplied. group: columns of a scale; narrow: whether scales are bfloat16; half: whether inputs are float16."""

    group: int
    narrow: bool
    half: bool

    @property
    def scale_bytes(self) -> int:
        """Of a scale."""
        return 2 if self.narrow else 4

    def scales(self, columns: int) -> int:
        """Bytes of the scales of a row of so many columns."""
        return columns // self.group * self.scale_bytes

    def tile(self, columns: int) -> int:
        """Bytes of a stage of 16 rows: codes, metadata, scales; a multiple of 128."""
        return -(-TILE * (columns // 4 + columns // 8 + self.scales(columns)) // 128) * 128


class Variant(NamedTuple):
    """tokens: rows of x of a tile. columns: of a stage. height: tiles of 16 rows of a warp. slabs: of a program, as many rows each.

    phases: warps that share a slab's stages. splits: programs along K, a cluster. slots: of the ring; ahead: rounds (a stage of
    each phase) that are copied ahead, all slots where they hold all rounds, else one less. at_once: programs of a
    multiprocessor.
    """

    tokens: int
    columns: int
    height: int
    slabs: int
    phases: int
    splits: int
    slots: int
    ahead: int
    at_once: int = 1

    @property
    def rows(self) -> int:
        """Rows of the weight of a program."""
        return TILE * self.height * self.slabs

    @property
    def threads(self) -> int:
        """Threads of a program."""
        return 32 * self.slabs * self.phases

    @property
    def registers(self) -> int:
        """What a thread asks for: sums of a group and of all, and the rest."""
        return 56 + 8 * self.height * (self.tokens // 8) + 4 * (self.tokens // 8)

    def programs(self, n: int) -> int:
        """Programs for a weight of n rows."""
        return -(-n // self.rows) * self.splits

    def slot(self, form: Form, count: int) -> int:
        """Bytes of a round: x, and the tiles of all warps."""
        x = -(-self.phases * count * (2 * self.columns + APART) // 128) * 128
        return x + self.slabs * self.phases * self.height * form.tile(self.columns)

    def shared(self, form: Form, count: int) -> int:
        """Bytes of dynamic shared memory for `count` rows of x: the ring, or the sums in its place; alignment."""
        sums = self.phases * self.tokens * (self.rows + 4) * 4
        return max(self.slots * self.slot(form, count), sums) + 128


def rounds_of(k: int, columns: int, phases: int, splits: int) -> int:
    """Rounds of the longest part of K."""
    return -(-(-(-(k // columns) // splits)) // phases)


def fitted(form: Form, sizes: Sequence[int], count: int, k: int, at_once: int = 1) -> Variant | None:
    """The variant with as many slots as shared memory holds for `at_once` programs, no more than it has rounds.

    sizes: tokens to splits. None where K is no multiple of a stage, a row's scales are less than a copy, or there is no room:
    for warps, registers, or two slots of more rounds.
    """
    one = Variant(*sizes, 1, 1, at_once)  # type: ignore[call-arg]
    if k % one.columns or form.scales(one.columns) < LEAST_BYTES or one.slabs * one.phases > MOST_WARPS:
        return None
    room = min(SHARED // at_once - SYSTEM, MOST_SHARED)
    rounds = rounds_of(k, one.columns, one.phases, one.splits)
    slots = min((room - 128) // one.slot(form, count), MOST_SLOTS, rounds)
    made = one._replace(slots=slots, ahead=slots if slots == rounds else slots - 1)
    # Registers are given to four warps at a time.
    enough = made.registers * 128 * at_once * -(-one.slabs * one.phases // 4) <= REGISTERS
    return made if enough and made.ahead > 0 and made.shared(form, count) <= room else None


def sources(variant: Variant, form: Form) -> tuple[str, dict[str, str], tuple[str, ...]]:
    """Source, headers and options for NVRTC."""
    numbers = {"GROUP": form.group, "SCALE_BYTES": form.scale_bytes, "HALF": int(form.half)}
    defined = {name.upper(): value for name, value in variant._asdict().items()} | numbers
    options = (*OPTIONS, *(f"-D{name}={value}" for name, value in defined.items()))
    return source(), {"copies.cuh": common()["copies.cuh"]}, options


@lru_cache(maxsize=1)
def source() -> str:
    """The text of the kernel."""
    return SOURCE.read_text()


__all__ = ["KINDS", "MOST_SHARED", "STAGES", "Form", "Variant", "fitted", "rounds_of", "sources"]
