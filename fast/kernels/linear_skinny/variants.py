"""The variants of the kernel: how large its tiles are, and what is defined for its source."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_name("linear_skinny.cu")
HEADERS = Path(__file__).parents[1] / "hopper"
OPTIONS = ("--gpu-architecture=sm_90a", "--std=c++17")
#: Names of dtypes and elements by the numbers that the source gives them.
KINDS, ELEMENTS = ("float32", "bfloat16", "float16"), ("int4", "int8", "e4m3")
#: Bytes of shared memory of a multiprocessor, what each program takes of it besides its own, and the most of a program.
SHARED, SYSTEM, MOST_SHARED = 233472, 1024, 232448
#: Columns of a step; bytes of a row of x in a stage; bytes of 64 rows by 64 columns.
STEP, PITCH, ATOMS = 128, 272, {"int4": 2048, "int8": 4096, "e4m3": 4096}
MOST_STAGES = 16


class Form(NamedTuple):
    """What is multiplied. group: columns of a group, 0 where a row is one; half: whether inputs are float16; out: y's dtype."""

    element: str
    group: int
    zero: bool
    half: bool
    out: str

    @property
    def each(self) -> int:
        """Groups of a step."""
        return STEP // self.group if 0 < self.group < STEP else 1


class Variant(NamedTuple):
    """tokens: rows of x of a tile. blocks: of 64 rows of the weight in a program. phases: warps that share a block's steps.

    splits: programs along K, a cluster. stages: of the ring. at_once: programs of a multiprocessor.
    """

    tokens: int
    blocks: int
    phases: int
    splits: int
    stages: int
    at_once: int = 2

    @property
    def threads(self) -> int:
        """Threads of a program, the warp that loads included."""
        return 32 * (4 * self.blocks * self.phases + 1)

    def stage(self, form: Form) -> int:
        """Bytes of a stage: words, columns of x, scales, zero points."""
        rows = 64 * self.blocks
        words, x = 2 * self.blocks * ATOMS[form.element], self.tokens * PITCH
        return words + x + form.each * rows * (4 * (form.group > 0) + 2 * form.zero)

    def shared(self, form: Form) -> int:
        """Bytes of dynamic shared memory: ring, sums, barriers, alignment."""
        sums = self.phases * self.tokens * (64 * self.blocks + 4) * 4
        return self.stages * (self.stage(form) + 16) + sums + 128


def fitted(
    form: Form, tokens: int, blocks: int, phases: int, splits: int, steps: int, at_once: int = 2
) -> Variant:
    """The variant with as many stages as shared memory holds for `at_once` programs, no more than its steps."""
    one = Variant(tokens, blocks, phases, splits, 1, at_once)
    each = one.stage(form) + 16
    room = min(SHARED // at_once - SYSTEM, MOST_SHARED) - (one.shared(form) - each)
    return one._replace(stages=max(1, min(room // each, MOST_STAGES, -(-steps // splits))))


def sources(variant: Variant, form: Form) -> tuple[str, dict[str, str], tuple[str, ...]]:
    """Source, headers and options for NVRTC."""
    defined = {
        "TOKENS": variant.tokens, "BLOCKS": variant.blocks, "PHASES": variant.phases, "SPLITS": variant.splits, "STAGES":
        variant.stages, "AT_ONCE": variant.at_once, "ELEMENT": ELEMENTS.index(form.element), "GROUP": form.group, "ZERO":
        int(form.zero), "HALF": int(form.half), "OUT": KINDS.index(form.out),
    }  # fmt: skip
    source, header = texts()
    return (
        source,
        {"copies.cuh": header},
        (*OPTIONS, *(f"-D{name}={value}" for name, value in defined.items())),
    )


@lru_cache(maxsize=1)
def texts() -> tuple[str, str]:
    """The kernel and the header of copies."""
    return SOURCE.read_text(), (HEADERS / "copies.cuh").read_text()


__all__ = ["ELEMENTS", "KINDS", "STEP", "Form", "Variant", "fitted", "sources"]
