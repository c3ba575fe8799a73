"""The variants of the kernel: how large its tiles are, and what is defined for its source."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from fast.launch.cuda import Kernel
from fast.launch.hopper import KINDS, MOST_SHARED, SHARED, SYSTEM
from fast.scale_factors import SECOND
from fast.scale_factors import TERMS as LEVELS

#: Names of elements by the numbers that the source gives them.
ELEMENTS = ("int4", "int8", "e4m3", "e2m1", "e4m3_mx", "nf4")
#: Elements whose scales are factors of theirs, of bfloat16 alone.
FACTORED = ("e2m1", "e4m3_mx")
#: Elements of `direct.cu` with scales of rows or factors; it takes int4 in groups, too.
DIRECT = ("int8", "e4m3", "e4m3_mx")
#: Columns of a step.
STEP = 128
#: Bytes of a stage of one block: smaller ones are asked for too slowly.
STAGE = 8192
#: Bytes of 64 rows by 64 columns.
ATOMS = {"int4": 2048, "int8": 4096, "e4m3": 4096, "e2m1": 2048, "e4m3_mx": 4096, "nf4": 2048}
MOST_STAGES = 16
#: Bytes of the table of levels: 8 for each byte of codes, sixteen times (`levels.cuh`).
TABLE = 256 * 16 * 8


class Form(NamedTuple):
    """What is multiplied. group: columns of a group, 0 where a row is one; half: whether inputs are float16; out: y's dtype."""

    element: str
    group: int
    zero: bool
    half: bool
    out: str

    @property
    def steps(self) -> int:
        """Steps of a stage."""
        return STAGE // (2 * ATOMS[self.element])

    def groups(self, steps: int) -> int:
        """Groups that so many steps may touch."""
        if self.group == 0:
            return 1
        return steps * STEP // self.group + (2 if self.group > STEP else 0)

    def small(self, steps: int) -> int:
        """Bytes of scales, or factors, and zero points of a row for so many steps."""
        if self.element in FACTORED:
            return steps * STEP // 64 * (8 if self.group == 16 else 2)
        return self.groups(steps) * (4 * (self.group > 0) + 2 * self.zero)


Sizes = tuple[int, int, int, int]


class Variant(NamedTuple):
    """tokens: rows of x of a tile. blocks: of 64 rows of the weight in a program. phases: warps that share a block's steps.

    splits: programs along K, a cluster. stages: of the ring. at_once: programs of a multiprocessor. streamed: whether x comes
    in stages too, by a warp of its own. tabled: bytes of a word of NF4 that a table decodes, 0, 2 or 4. ahead: whether the
    first stages are asked for, into the L2 cache, before the kernel in front has ended.
    """

    tokens: int
    blocks: int
    phases: int
    splits: int
    stages: int
    at_once: int = 2
    streamed: bool = False
    tabled: int = 2
    ahead: bool = False

    def programs(self, n: int) -> int:
        """Programs for n rows of the weight."""
        return n // (64 * self.blocks) * self.splits

    @property
    def threads(self) -> int:
        """Threads of a program, the warps that load included."""
        return 32 * (4 * self.blocks * self.phases + 1 + self.streamed)

    def stage(self, form: Form) -> int:
        """Bytes of a stage and its barriers."""
        return self.blocks * STAGE + 16 + self.streamed * self.tokens * (form.steps * 2 * STEP + 16)

    def shared(self, form: Form, count: int, steps: int) -> int:
        """Bytes of dynamic shared memory for `count` rows of x and `steps` along K: ring, sums, alignment, the table; of a
        program's part of K scales, zero points and rows of x."""
        rows, part = 64 * self.blocks, -(-steps // self.splits)
        sums = self.phases * self.tokens * (rows + 4) * 4
        table = TABLE if form.element == "nf4" and self.tabled else 0
        x = 0 if self.streamed else count * (part * 2 * STEP + 16)
        return self.stages * self.stage(form) + sums + 144 + table + form.small(part) * rows + x


class Direct(NamedTuple):
    """Of `direct.cu`. tokens: rows of x of a tile. slabs: of 16 rows of the weight in a program. phases: warps that share a
    slab's atoms. loads: halves of atoms that a warp has asked for, even; whole ones of int4. ahead: as above. late: whether the
    next kernel is let in with a warp's last loads, and not at once."""

    tokens: int
    slabs: int
    phases: int
    loads: int
    ahead: bool = False
    late: bool = False

    @property
    def source(self) -> str:
        """Name of the source."""
        return "direct.cu"

    def programs(self, n: int) -> int:
        """Programs for n rows of the weight, a multiple of the slabs'."""
        return n // (16 * self.slabs)

    @property
    def threads(self) -> int:
        """Threads of a program."""
        return 32 * self.slabs * self.phases

    def shared(self, form: Form, count: int, steps: int) -> int:
        """Bytes of dynamic shared memory for `count` rows of x and `steps` along K: x, sums, a barrier for each piece of x."""
        columns = 64 if form.element == "int4" else 32
        pieces = -(-steps * STEP // (columns * self.loads * self.phases))
        sums = self.phases * self.tokens * (16 * self.slabs + 4) * 4
        return 16 + count * (steps * 2 * STEP + 16) + sums + 8 * pieces

    def takes(self, form: Form, count: int, n: int, k: int) -> bool:
        """Whether a product is one for it: elements, whole programs, x within shared memory, an atom for each warp."""
        whole = form.group and form.group % 64 == 0 and not form.zero
        served = (
            whole
            if form.element == "int4"
            else form.element in DIRECT and (form.group == 0 or form.element in FACTORED)
        )
        return (
            served
            and count <= self.tokens
            and n % (16 * self.slabs) == 0
            and k // 64 >= self.phases
            and self.shared(form, count, k // STEP) <= MOST_SHARED
        )


def fitted(form: Form, sizes: Sizes, count: int, steps: int, at_once: int = 2, **rest: int) -> Variant | None:
    """The variant with as many stages as shared memory holds for `at_once` programs, a multiple of the phases, no more than its
    steps ask for; None where that is none. sizes: tokens, blocks, phases, splits; rest: further fields."""
    one = Variant(*sizes, 1, at_once, **rest)  # type: ignore[arg-type]
    stage, phases = one.stage(form), one.phases
    room = min(SHARED // at_once - SYSTEM, MOST_SHARED) - one.shared(form, count, steps) + stage
    part = -(-steps // one.splits)
    needed = -(-part // form.steps // phases) * phases
    stages = min(room // stage // phases * phases, MOST_STAGES // phases * phases, needed)
    return one._replace(stages=stages) if stages > 0 else None


def _defines(variant: Variant | Direct, form: Form) -> dict[str, int | str]:
    return {name.upper(): int(value) for name, value in variant._asdict().items()} | {
        "STEPS": form.steps, "ELEMENT": ELEMENTS.index(form.element), "GROUP": form.group, "ZERO": int(form.zero),
        "HALF": int(form.half), "OUT": KINDS.index(form.out), "PLANES": planes("float16" if form.half else "bfloat16"),
        "SECOND": f"{SECOND}f",
    }  # fmt: skip


def planes(dtype: str) -> str:
    """Bytes of the levels of NF4, four in a number: of the high bytes of both terms, of the low ones of either."""
    rows = []
    for plane in range(3):
        values = bytes((hi >> 8, hi & 255, mid & 255)[plane] for hi, mid in LEVELS[dtype])
        words = [f"0x{int.from_bytes(values[at : at + 4], 'little'):08X}u" for at in range(0, 16, 4)]
        rows.append("{" + ",".join(words) + "}")
    return "{" + ",".join(rows) + "}"


KERNEL = Kernel(
    "sm90_w4a16_gemv",
    Path(__file__).parent,
    _defines,
    own=("problem.cuh", "decode.cuh", "factors.cuh", "levels.cuh", "sums.cuh", "load.cuh"),
    shared=("words.cuh", "copies.cuh", "pairs.cuh"),
    programmatic=True,
)


__all__ = ["ELEMENTS", "FACTORED", "KERNEL", "STEP", "Direct", "Form", "Variant", "fitted"]
