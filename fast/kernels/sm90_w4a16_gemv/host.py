"""`sm90_w4a16_gemv`, 1 to 16 rows by a preshuffled weight: the variants of its source, which of them multiplies, where that is
faster than `triton_small_m`, and what is launched.

Rules of measured times, whose thresholds are coefficients (reports/LOG.md, "Times that docstrings of `sm90_w4a16_gemv` held"):

* Launches are programmatic: two programs a multiprocessor leave the next kernel a place where there is work for both. To ask
  for its weight then, into the L2 cache (`ahead`), gains only where programs have a multiprocessor of their own.
* int4 up to 8 rows: one or two rows straight from memory (`direct.cu`), the largest weights by one block in three phases.
* 8 bits: straight from memory where programs are one wave, else through shared memory up to 4 rows, as every program reads x.
* Small weights: straight from memory, a program for each 16 rows. int4 in groups of 64: one program a multiprocessor, as the
  scales of two leave them too few stages.
* NF4 up to 16 rows, decoded by the table alone; e2m1 of small weights. x of more than `upfront` rows comes in stages, and
  programs are as tall as leaves every multiprocessor one, so that x is read by few.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fast.cost import Coefficients, first_row, holds
from fast.launch import cuda
from fast.launch.cuda import (
    AT_ONCE,
    BIAS,
    KINDS,
    MOST_SHARED,
    MULTIPROCESSORS,
    SHARED,
    SYSTEM,
    CudaLaunch,
    Kernel,
)
from fast.launch.launcher import FLOAT_NAMES, Call
from fast.scale_factors import SECOND, ArrangedWeight
from fast.scale_factors import TERMS as LEVELS

C = Coefficients("sm90_w4a16_gemv")
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
    """What is multiplied. group: columns of a group, 0 where a row is one; half: whether inputs are float16; out: y's dtype;
    weights: of a launch; gated: whether of two y is silu of the first product times the second."""

    element: str
    group: int
    zero: bool
    half: bool
    out: str
    weights: int = 1
    gated: bool = False

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
        "HALF": int(form.half), "WEIGHTS": form.weights, "GATED": int(form.gated), "OUT": KINDS.index(form.out),
        "PLANES": planes("float16" if form.half else "bfloat16"), "SECOND": f"{SECOND}f",
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
    shared=("words.cuh", "copies.cuh", "pairs.cuh", "gated.cuh"),
    programmatic=True,
)


# Which variant a product gets

#: Rows of x that a variant takes at most: two tiles of the tensor core's 8.
MOST_ROWS = 16
#: Rows of x of a tile.
TILES = (8, 16)


def gains(form: Form, count: int, n: int, k: int) -> bool:
    """Whether so many rows are multiplied faster than by `linear_small`."""
    if _small(form, TILES[0], count, n, k) is not None:
        return True
    most = first_row(C.gaining, **_facts(form, count, n, k))["rows"]
    return count <= most and choose(form, count, n, k) is not None


def _facts(form: Form, count: int, n: int, k: int) -> dict[str, Any]:
    """What tables of the coefficients ask of a product."""
    return {
        "element": form.element, "group": form.group, "rows": count, "size": n * k, "length": k, "blocks": n // 64,
        "pairs": n // 128, "slabs": _slabs(n), "fills": _fills(n, k),
    }  # fmt: skip


def _fills(n: int, k: int) -> bool:
    """Whether blocks of 64 rows, and parts of K of them, nearly fill a device."""
    return (
        n // 64 * min(C.most_splits, max(1, k // STEP // C.fewest_steps)) >= C.enough
        and n // 64 * 2 >= C.enough
    )


def _slabs(n: int) -> int:
    """Slabs of a program where those of n rows are one wave that leaves no multiprocessor out; 0 where none are."""
    return next(
        (
            slabs
            for slabs in range(1, 17)
            if n % (16 * slabs) == 0 and C.whole <= n // 16 // slabs <= MULTIPROCESSORS
        ),
        0,
    )


@lru_cache(maxsize=1024)
def choose(form: Form, count: int, n: int, k: int) -> Variant | Direct | None:
    """The variant for `count` rows of x (1 to MOST_ROWS) and a weight (n, k), multiples of 128; None where what programs
    keep of x, or of scales, is too long."""
    tokens = next(size for size in TILES if count <= size)
    if form.element in C.tall or (form.element == "e4m3_mx" and not _fills(n, k)):
        return _tall(form, tokens, count, n, k)
    small = _small(form, tokens, count, n, k)
    return small or _direct(form, tokens, count, n, k) or _stream(form, tokens, count, n, k)


def _small(form: Form, tokens: int, count: int, n: int, k: int) -> Direct | None:
    """Straight from memory, where programs of 16 rows are fewer than multiprocessors; None for factors, and where it is not."""
    small = C.small
    if (
        n * k > small["size"]
        or n // 16 >= C.whole
        or count > small["rows"]
        or form.element in FACTORED
        or form.zero
    ):
        return None
    one = Direct(tokens, 1, min(small["warps"], k // 64), small["loads"])
    return one if one.takes(form, count, n, k) else None


def _direct(form: Form, tokens: int, count: int, n: int, k: int) -> Direct | None:
    """Straight from memory, where programs of that are one wave; None else."""
    slabs = _slabs(n)
    sizes = first_row(C.direct, **_facts(form, count, n, k)) if slabs else {}
    if "warps" not in sizes:
        return None
    # Those of factors were not timed with what lets kernels overlap.
    overlap = form.element not in FACTORED
    one = Direct(tokens, slabs, min(sizes["warps"] // slabs, k // 64), sizes["loads"], overlap, overlap)
    return one if one.takes(form, count, n, k) else None


def _stream(form: Form, tokens: int, count: int, n: int, k: int) -> Variant | None:
    """Through shared memory; None where scales, or x, leave no room."""
    steps, splits = k // STEP, 1
    while splits < C.most_splits and n // 64 * splits < C.enough and steps // (2 * splits) >= C.fewest_steps:
        splits *= 2
    facts = _facts(form, count, n, k)
    for row in C.stream:
        if holds(row, facts):
            sizes = (tokens, row["blocks"], row["phases"], splits if row.get("parted") else 1)
            flags = {name: row[name] for name in ("streamed", "ahead") if name in row}
            if (one := fitted(form, sizes, count, steps, row["at_once"], **flags)) is not None:
                return one
    return None


def _tall(form: Form, tokens: int, count: int, n: int, k: int) -> Variant | None:
    """One program a multiprocessor, with sixteen warps."""
    possible = [blocks for blocks in (1, 2, 4) if n % (64 * blocks) == 0]
    blocks = next((blocks for blocks in possible if n // (64 * blocks) <= MULTIPROCESSORS), possible[-1])
    steps, programs, splits = k // STEP, n // (64 * blocks), 1
    while (
        splits < C.most_splits and programs <= AT_ONCE[2 * splits] and steps // (2 * splits) >= C.fewest_steps
    ):
        splits *= 2
    sizes, rest = (tokens, blocks, 4 // blocks, splits), {"streamed": count > C.upfront, "ahead": splits > 1}
    return fitted(form, sizes, count, steps, 1, tabled=C.tabled, **rest)


#: Pointers of a launch in the order of the source's `Problem`; then count, n, k and the bias's dtype.
POINTERS = ("x", "codes", "scale", "zero", "x_scale", "bias", "y")


def launch_for(
    w: ArrangedWeight,
    count: int,
    inputs: torch.dtype,
    dtype: torch.dtype,
    variant: Variant | Direct | None = None,
) -> CudaLaunch | None:
    """What multiplies `count` rows of inputs by a weight into `dtype`, where the family takes them (`fast.gemm.families`); its
    pointers are POINTERS. None where no variant has room, compiles and loads. variant: by default that of `choose`.
    """
    form = form_of(w, inputs, dtype)
    given = variant or choose(form, count, *w.shape)
    if given is None or not cuda.is_loadable(KERNEL, given, form, w.words.get_device()):
        return None
    return launch_of(given, form, count, w.shape)


def sm90_w4a16_gemv(
    x: torch.Tensor,
    w: ArrangedWeight,
    bias: torch.Tensor | None = None,
    *,
    x_scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    variant: Variant | Direct | None = None,
    key: Any = None,
    record: Any = None,
) -> torch.Tensor | None:
    """`linear_small` by this kernel, of operands that it would have checked; None as `launch_for`.

    key, record: see `dispatch`, of a call without x_scale.
    """
    dtype = x.dtype if dtype is None else dtype
    launch = launch_for(w, x.numel() // w.shape[1], x.dtype, dtype, variant)
    if launch is None:
        return None
    scales = {} if x_scale is None else {"x_scale": x_scale}
    call = Call({"x": x, "codes": w.words, "scale": w.scale, "zero": w.zero, **scales, "bias": bias})
    call.allocate("y", (*x.shape[:-1], w.shape[0]), dtype)
    call.launch(launch, POINTERS)
    y: torch.Tensor = call.result("y", key, record)
    return y


def form_of(w: ArrangedWeight, inputs: torch.dtype, dtype: torch.dtype) -> Form:
    """What is multiplied."""
    return Form(w.element, w.group, w.zero is not None, inputs == torch.float16, FLOAT_NAMES[dtype])


@lru_cache(maxsize=4096)
def launch_of(variant: Variant | Direct, form: Form, count: int, shape: tuple[int, int]) -> CudaLaunch:
    """One launch, compiled once."""
    n, k = shape
    shared = variant.shared(form, count, k // STEP)
    return CudaLaunch(
        KERNEL, variant, form, POINTERS, variant.programs(n), shared, ("4i", (count, n, k, BIAS))
    )


__all__ = [
    "ELEMENTS",
    "FACTORED",
    "KERNEL",
    "MOST_ROWS",
    "POINTERS",
    "STEP",
    "TILES",
    "Direct",
    "Form",
    "Variant",
    "choose",
    "fitted",
    "form_of",
    "gains",
    "launch_for",
    "launch_of",
    "sm90_w4a16_gemv",
]
