"""`sm90_intn_small_m`: what it takes, the variants of its source, which of them a product gets, and what is launched. A
product gets the shortest time by what a multiprocessor takes, fitted to measured times (`reports/gpu/family_times.csv`)."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from fast.cost import Coefficients, Time, first_row, quickest
from fast.launch import cuda
from fast.launch.cuda import AT_ONCE, BIAS, MOST_SHARED, SHARED, SYSTEM, CudaLaunch, Kernel
from fast.launch.cuda import MULTIPROCESSORS as PROCESSORS
from fast.launch.launcher import Call
from reference import Quantized
from reference.quantize.quantize import check_quantized
from reference.schemes.schemes import Scheme

C = Coefficients("sm90_intn_small_m")
#: Columns that a stage is a multiple of: a row of codes of any width is whole pieces of 16 bytes.
STEP = 128
#: Widths of codes that the kernel reads.
WIDTHS = (2, 3, 4, 5, 6)


class Form(NamedTuple):
    """What is multiplied. bits: of a code; group: columns of a scale; zero: whether there are zero points, int8; signed: two's
    complement; half: whether x and y are float16, else bfloat16."""

    bits: int
    group: int
    zero: bool
    signed: bool
    half: bool

    @property
    def unit(self) -> int:
        """Columns that are summed before they are scaled."""
        return 32 if self.group == 32 else 64


class Variant(NamedTuple):
    """tokens: rows of x of a program. slabs: of 16 * height rows of the weight in a program, a warp each. phases: warps that
    share a slab's units of 32 or 64 columns. splits: programs along K, a cluster. steps: of 128 columns in a stage. stages: of
    the ring. at_once: programs of a multiprocessor that registers are limited for."""

    tokens: int
    slabs: int
    height: int
    phases: int
    splits: int
    steps: int
    stages: int
    at_once: int = 1

    @property
    def rows(self) -> int:
        """Rows of the weight of a program."""
        return 16 * self.slabs * self.height

    @property
    def threads(self) -> int:
        """Threads of a program."""
        return 32 * self.slabs * self.phases

    def programs(self, count: int, n: int) -> int:
        """Programs for `count` rows of x and n of the weight."""
        return -(-n // self.rows) * -(-count // self.tokens) * self.splits

    def stage(self, form: Form) -> int:
        """Bytes of a stage, as `problem.cuh` has it."""
        columns = STEP * self.steps
        codes = columns * form.bits // 8
        codes += 0 if codes // 16 % 2 else 16
        scales = max(1, columns // form.group)
        return self.rows * (codes + 4 * (scales + 4 * (scales > 4))) + self.tokens * (2 * columns + 64)

    def shared(self, form: Form, k: int) -> int:
        """Bytes of dynamic shared memory: the ring or the sums, alignment, zero points of whole rows."""
        sums = self.phases * self.tokens * (self.rows + 4) * 4
        zeros = self.rows * (-(-(k // form.group) // 4) * 4 + 4) if form.zero else 0
        return max(self.stages * self.stage(form), sums) + 128 + zeros

    def takes(self, form: Form, k: int) -> bool:
        """Whether stages have whole groups or groups whole stages, warps whole units, programs a stage, and all has room."""
        columns = STEP * self.steps
        whole = columns % form.group == 0 or form.group % columns == 0
        return (
            whole
            and k % columns == 0
            and k // columns >= self.splits
            and columns % (form.unit * self.phases) == 0
            and self.shared(form, k) <= MOST_SHARED
        )


def longest(form: Form, k: int, most: int) -> int:
    """The most steps of a stage, `most` halved until K and groups permit it."""
    steps = most
    while steps > 1 and (k % (STEP * steps) or (STEP * steps % form.group and form.group % (STEP * steps))):
        steps //= 2
    return steps


def fitted(form: Form, variant: Variant, k: int) -> Variant | None:
    """A variant with as many of its stages as shared memory holds, for fewer programs at once where it holds less than two;
    None where one program has no room either."""
    for at_once in range(variant.at_once, 0, -1):
        room = min(SHARED // at_once - SYSTEM, MOST_SHARED)
        for stages in range(variant.stages, 1, -1):
            one = variant._replace(stages=stages, at_once=at_once)
            if one.shared(form, k) <= room and one.takes(form, k):
                return one
    return None


def _defines(variant: Variant, form: Form) -> dict[str, int]:
    return {name.upper(): int(value) for one in (variant, form) for name, value in one._asdict().items()}


KERNEL = Kernel(
    "sm90_intn_small_m",
    Path(__file__).parent,
    _defines,
    own=("problem.cuh", "decode.cuh", "load.cuh"),
    shared=("words.cuh", "copies.cuh", "pairs.cuh"),
    programmatic=True,
)


# Which variant a product gets

#: Rows of x at most.
MOST_ROWS = 128


@lru_cache(maxsize=4096)
def choose(form: Form, count: int, n: int, k: int) -> Variant | None:
    """The variant for `count` rows of x (1 to MOST_ROWS) and a weight (n, k); None where none fits."""
    times = [
        (one, cost(one, rates, form, count, n, k))
        for tile, rates in tiles_of(count)
        if (one := placed(tile, form, count, n, k)) is not None
    ]
    return quickest(times)


def tiles_of(count: int) -> list[tuple[Variant, list[int]]]:
    """The tiles that are tried for `count` rows of x, with their rates by the width of codes."""
    variants = first_row(C.tiles, rows=count)["variants"]
    return [(Variant(*one["tile"]), one["ns"]) for one in variants]


def most_rows(n: int) -> int:
    """The most rows of x that are multiplied by a weight of n rows as it is stored; more are by the dense weight."""
    return int(first_row(C.most_rows, n=n)["rows"])


def cost(variant: Variant, rates: list[int], form: Form, count: int, n: int, k: int) -> float:
    """Nanoseconds of a product by a variant: those of its start, its waves, and the programs of the busiest multiprocessor."""
    programs, waves = busiest(variant, count, n)
    once = C.start + C.part * waves * variant.tokens * variant.splits
    return Time(programs, k / STEP / variant.splits, rate(rates, form.bits), once=once).total


def busiest(variant: Variant, count: int, n: int) -> tuple[int, int]:
    """Programs that one multiprocessor has in all waves, and how many waves there are: so many clusters run at once."""
    clusters = variant.programs(count, n) // variant.splits
    whole, rest = divmod(clusters, AT_ONCE[variant.splits] * variant.at_once)
    return whole * variant.at_once + -(-rest * variant.splits // PROCESSORS), whole + (rest > 0)


def rate(rates: list[int], bits: int) -> float:
    """A tile's rate for codes of a width: that of 4 bits, which other kernels multiply, is between those of 3 and 5."""
    two, three, five, six = rates
    return {2: two, 3: three, 4: (three + five) / 2, 5: five, 6: six}[bits]


def placed(variant: Variant, form: Form, count: int, n: int, k: int) -> Variant | None:
    """A variant as a product has room for it: steps, phases and stages at most its own, parts of K as many as gain.

    Where multiprocessors have room for twice as many programs, each is made two along K, a cluster.
    """
    steps = longest(form, k, variant.steps)
    # Warps that share rows take units in turn, which a short stage has fewer of.
    one = variant._replace(steps=steps, phases=min(variant.phases, steps * STEP // form.unit))
    stages = k // (STEP * steps)
    while (
        2 * one.splits <= C.most_splits
        and 2 * one.programs(count, n) <= PROCESSORS * one.at_once
        and stages >= 2 * one.splits * C.stages_each
    ):
        one = one._replace(splits=2 * one.splits)
    return fitted(form, one, k)


#: Pointers of a launch in the order of the source's `Problem`; then count, n, k and the bias's dtype.
POINTERS = ("x", "codes", "scale", "zero", "bias", "y")


def launch_for(
    w: Quantized, count: int, dtype: torch.dtype, variant: Variant | None = None
) -> CudaLaunch | None:
    """What multiplies `count` rows of a dtype by a stored weight (N, K); its pointers are POINTERS.

    None where another kernel has to: no rows or more than MOST_ROWS, weights of which `form_of` knows nothing, variants that do
    not fit, compile or load. variant: by default that of `choose`.
    """
    form = form_of(w.scheme, tuple(w.shape), w.axis, w.packed)
    if form is None or not 0 < count <= MOST_ROWS:
        return None
    form = form._replace(half=dtype == torch.float16)
    given = variant or choose(form, count, *w.shape)
    if given is None or not given.takes(form, w.shape[1]):
        return None
    if not cuda.is_loadable(KERNEL, given, form, w.codes.get_device()):
        return None
    return launch_of(given, form, count, (w.shape[0], w.shape[1]))


def sm90_intn_small_m(
    x: torch.Tensor, w: Quantized, bias: torch.Tensor | None = None, variant: Variant | None = None
) -> torch.Tensor | None:
    """`fast.linear` by this kernel alone, of operands that it would have checked; None as `launch_for`."""
    launch = launch_for(w, x.numel() // w.shape[1], x.dtype, variant)
    if launch is None:
        return None
    check_quantized(w)
    call = Call({"x": x, "codes": w.codes, "scale": w.scale, "zero": w.zero, "bias": bias})
    call.allocate("y", (*x.shape[:-1], w.shape[0]), x.dtype)
    call.launch(launch, POINTERS)
    y: torch.Tensor = call.result("y")
    return y


@lru_cache(maxsize=4096)
def form_of(scheme: Scheme, shape: tuple[int, ...], axis: int, packed: bool) -> Form | None:
    """A weight's form, beside bfloat16; None for those that the kernel does not read.

    It reads matrices of packed integers in WIDTHS bits along rows of whole steps, each 32 columns, 64, or a multiple of 128, or
    each row, with a float32 scale and perhaps a zero point in int8.
    """
    fmt, scale, zero = scheme.format, scheme.scale, scheme.zero
    integers = fmt.kind == "int" and fmt.bits in WIDTHS and not fmt.fraction_bits and fmt.nan_code is None
    plain = (
        scale.storage == "float32"
        and scale.stored == "decode"
        and scheme.outer is None
        and not scale.flat_size
    )
    zeros = zero is None or (zero.rule == "code" and zero.storage == "int8" and fmt.signed)
    if not (packed and integers and plain and zeros) or len(shape) != 2 or axis != 1:
        return None
    if not isinstance(scale.block, int) or (scale.block != -1 and scale.block % 32):
        return None
    length = shape[1]
    group = length if scale.block == -1 else scale.block
    whole = (
        length > 0 and length % STEP == 0 and length % group == 0 and (group in (32, 64) or group % STEP == 0)
    )
    return Form(fmt.bits, group, zero is not None, fmt.signed, False) if whole else None


@lru_cache(maxsize=4096)
def launch_of(variant: Variant, form: Form, count: int, shape: tuple[int, int]) -> CudaLaunch:
    """One launch, compiled once."""
    n, k = shape
    sizes = ("4i", (count, n, k, BIAS))
    return CudaLaunch(
        KERNEL, variant, form, POINTERS, variant.programs(count, n), variant.shared(form, k), sizes
    )


__all__ = [
    "KERNEL",
    "MOST_ROWS",
    "STEP",
    "WIDTHS",
    "Form",
    "Variant",
    "busiest",
    "choose",
    "cost",
    "fitted",
    "form_of",
    "launch_for",
    "longest",
    "most_rows",
    "placed",
    "rate",
    "sm90_intn_small_m",
    "tiles_of",
]
