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
#: Columns of a step; bytes of 64 rows by 64 columns; bytes of a stage of one block: smaller ones are asked for too slowly.
STEP, ATOMS, STAGE = 128, {"int4": 2048, "int8": 4096, "e4m3": 4096}, 8192
MOST_STAGES = 16


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

    @property
    def stage(self) -> int:
        """Bytes of a stage and its barriers."""
        return self.blocks * STAGE + 16

    def shared(self, form: Form, count: int, steps: int) -> int:
        """Bytes of dynamic shared memory for `count` rows of x and `steps` along K: ring, sums, alignment; of a program's part
        of K scales, zero points and rows of x."""
        rows, part = 64 * self.blocks, -(-steps // self.splits)
        sums = self.phases * self.tokens * (rows + 4) * 4
        small = form.groups(part) * rows * (4 * (form.group > 0) + 2 * form.zero)
        return self.stages * self.stage + sums + 144 + small + count * (part * 2 * STEP + 16)


def fitted(
    form: Form, sizes: tuple[int, int, int, int], count: int, steps: int, at_once: int = 2
) -> Variant | None:
    """The variant with as many stages as shared memory holds for `at_once` programs, no more than its steps; None where that
    is none. sizes: tokens, blocks, phases, splits."""
    one = Variant(*sizes, 1, at_once)
    room = min(SHARED // at_once - SYSTEM, MOST_SHARED) - one.shared(form, count, steps) + one.stage
    part = -(-steps // one.splits)
    stages = min(room // one.stage, MOST_STAGES, -(-part // form.steps))
    return one._replace(stages=stages) if stages > 0 else None


def sources(variant: Variant, form: Form) -> tuple[str, dict[str, str], tuple[str, ...]]:
    """Source, headers and options for NVRTC."""
    numbers = {
        "STEPS": form.steps, "ELEMENT": ELEMENTS.index(form.element), "GROUP": form.group, "ZERO": int(form.zero),
        "HALF": int(form.half), "OUT": KINDS.index(form.out),
    }  # fmt: skip
    defined = {name.upper(): value for name, value in variant._asdict().items()} | numbers
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


__all__ = ["ELEMENTS", "KINDS", "MOST_SHARED", "STEP", "Form", "Variant", "fitted", "sources"]
