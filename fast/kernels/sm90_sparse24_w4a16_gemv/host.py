"""The host side of `sm90_sparse24_w4a16_gemv`: what it takes, the variants of its source (how K and rows are parted), which of
them a product gets, and its launch; two products of one x in one launch, and silu of the first times the second.

Rules of measured times (reports/LOG.md, "Times that docstrings of the 2:4 kernels held"):

* Stages of 512 columns before those of 256; parts of K of at most eight stages.
* Two parts of K whose programs share a multiprocessor before all of K by one, as one multiplies while the other begins or ends;
  of fewer than three tiles each, one wave of twice as many. Else one wave, where the sums of its tiles fit.
* At 16 rows, whose x a warp reads long, few tiles are divided along K.
* 17 to 24 rows at once, in stages of 256 columns, before chunks of 16. More rows are chunks of 16, not of 24 or 32.

At its beginning and end a launch has few bytes under way (times: reports/LOG.md). Two weights of one x lose that once, and have
the variant of one weight with the rows of both: each product has the bits that this variant gives it alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fast.cost import Coefficients, Time, quickest
from fast.launch import cuda
from fast.launch.cuda import AT_ONCE, BIAS, MOST_SHARED, REGISTERS, SHARED, SYSTEM, CudaLaunch, Kernel
from fast.launch.launcher import Call, same_device

C = Coefficients("sm90_sparse24_w4a16_gemv")
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
    own=("output.cuh",),
    shared=("words.cuh", "copies.cuh", "gated.cuh"),
    programmatic=True,
)


def rows_of_tiles(*rows: int) -> int:
    """Rows of weights in tiles of their own."""
    return sum(-(-n // TILE) * TILE for n in rows)


# Which variant a product gets

#: Rows of x of a program at most: two tiles of the tensor core's 8.
MOST_ROWS = 16
#: Rows of x of a tile.
TOKENS = (8, 16)


@lru_cache(maxsize=1024)
def choose(form: Form, count: int, n: int, k: int) -> Variant | None:
    """The variant for `count` rows of x (1 to 64) and a weight (n, k); None where none divides k or fits.

    Chunks of MOST_ROWS rows have the variant of one of them by a weight of as many times the rows.
    """
    chunks = -(-count // MOST_ROWS)
    if chunks == 1:
        return next(candidates(form, count, n, k), None)
    if count <= C.three["rows"] and form.products == ONE and (three := _of_three(form, n, k)) is not None:
        return three
    one = choose(form, MOST_ROWS, chunks * rows_of_tiles(n), k)
    if one is None:
        return None
    tiles = min(one.tiles, -(-n // TILE))
    return one._replace(chunks=chunks, tiles=tiles, ahead=min(one.ahead, tiles))


def _of_three(form: Form, n: int, k: int) -> Variant | None:
    """The variant for three tiles of rows at once whose programs have the fewest tiles in turn; None where none fits."""
    times, three = [], C.three
    for splits, tiles in product(three["splits"], range(1, three["tiles"] + 1)):
        one = fitted(form, three["rows"], three["columns"], splits, tiles, k)
        if one is not None and one.phases >= three["warps"] and 4 * tiles % splits == 0:
            clusters = -(-n // (TILE * tiles))
            times.append((one, Time(-(-clusters // AT_ONCE[splits]), tiles, 1, 1).total))
    return quickest(times)


def candidates(form: Form, count: int, n: int, k: int) -> Iterator[Variant]:
    """Variants whose programs have no more tiles than there are, what is preferred first; of a gate and what it gates an even
    number."""
    tokens, tiles = next(size for size in TOKENS if count <= size), -(-n // TILE)
    for columns in sorted(STAGES, reverse=True):
        for splits, (at_once, size) in _parted(tokens, k // columns, tiles):
            even = size + size % 2 if form.products == GATED else size
            one = fitted(form, tokens, columns, splits, even, k, at_once)
            if one is not None and (at_once == 1 or one.phases <= C.warps):
                yield one


def _parted(tokens: int, stages: int, tiles: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """Programs along K, none without a stage, each with programs of a multiprocessor and tiles of a program."""
    if AT_ONCE[1] < tiles <= 2 * AT_ONCE[2] * C.most_tiles and 2 <= stages <= 2 * C.warps:
        shared = -(-tiles // (2 * AT_ONCE[2]))
        yield 2, ((2, shared) if shared >= C.several else (1, -(-tiles // AT_ONCE[2])))
    least = 2 if tokens == TOKENS[1] and tiles <= AT_ONCE[2] else 1
    for splits in sorted(C.splits, key=lambda one: (-(-stages // one) > C.warps, one < least, one)):
        if splits <= stages:
            yield from ((splits, sizes) for sizes in _sizes(tokens, splits, tiles))


def _sizes(tokens: int, splits: int, tiles: int) -> Iterator[tuple[int, int]]:
    """Programs of a multiprocessor, and tiles of a program."""
    room = AT_ONCE[splits]
    wave, two = -(-tiles // room), tokens == TOKENS[0] and splits == 1
    if two and wave <= 2:
        yield 2, 1
    if wave <= C.most_tiles:
        yield 1, wave
    if two and tiles >= C.short:
        yield 2, C.short
    fewer = range(min(wave - 1, C.most_tiles), 0, -1)
    yield from ((1, size) for size in sorted(fewer, key=lambda size: -(-tiles // (size * room)) * (size + 1)))
    yield from ((2, size) for size in range(min(wave, tiles, C.most_tiles), 0, -1))


INPUTS = (torch.bfloat16, torch.float16)
#: Pointers of a launch in the order of the source's `Problem`; then count, n, k and the bias's dtype.
POINTERS = ("x", "codes", "metadata", "scale", "bias", "y")
#: Of two products; the rows of the second and a gap at the end.
PAIR_POINTERS = (*POINTERS, "codes2", "metadata2", "scale2", "y2")
#: With zero points.
ZERO_POINTERS = (*POINTERS, "zero")
#: Codes, metadata and scales of a weight, as `linear_sparse_int4` takes them.
Weight = Sequence[torch.Tensor]


def launch_for(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    group: int,
    variant: Variant | None = None,
    zero: torch.Tensor | None = None,
) -> CudaLaunch | None:
    """What multiplies x by a weight in 2:4 storage; its pointers are its `names`.

    Operands are those of `check_operands`. None where another kernel has to: devices that are not Hopper's, no rows of x or
    more than 64, a K or groups that no variant divides. variant: by default that of `choose`.
    """
    n, k = codes.shape[0], 4 * codes.shape[1]
    count = x.numel() // k if k else 0
    if not n or not 0 < count <= C.most_chunked or not is_served(x):
        return None
    form = Form(group, scale.dtype != torch.float32, x.dtype == torch.float16, zeros=zero is not None)
    given = variant or choose(form, count, n, k)
    if given is None or not cuda.is_loadable(KERNEL, given, form, x.get_device()):
        return None
    return launch_of(given, form, count, (n, k))


def sm90_sparse24_w4a16_gemv(
    x: torch.Tensor,
    codes: torch.Tensor,
    metadata: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    group: int,
    variant: Variant | None = None,
    zero: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """`linear_sparse_int4` by this kernel alone; None as `launch_for`."""
    launch = launch_for(x, codes, scale, group, variant, zero)
    if launch is None:
        return None
    given = {"x": x, "codes": codes, "metadata": metadata, "scale": scale, "bias": bias, "zero": zero}
    call = Call(given)
    add_product(call, launch)
    y: torch.Tensor = call.result("y")
    return y


def add_product(call: Call, launch: CudaLaunch) -> None:
    """Launch a product in a call that has its operands, and allocate its result "y"."""
    x, codes = call.tensors["x"], call.tensors["codes"]
    call.allocate("y", (*x.shape[:-1], codes.shape[0]), x.dtype)
    call.launch(launch, launch.names)


def pair_launch_for(
    x: torch.Tensor, first: Weight, second: Weight, group: int, products: int, variant: Variant | None = None
) -> CudaLaunch | None:
    """What multiplies x by two weights (N, K) and (M, K); products: TWO or GATED. Its pointers are PAIR_POINTERS.

    Operands are those of `check_operands` with one group. None where other kernels have to: as `launch_for`, weights on
    other devices or with scales of two dtypes, GATED of weights of two shapes. variant: by default that of `choose` for the
    rows of both.
    """
    n, m, k = first[0].shape[0], second[0].shape[0], 4 * first[0].shape[1]
    count = x.numel() // k if k else 0
    if not n or not m or not 0 < count <= MOST_ROWS or not is_served(x):
        return None
    alike = first[2].dtype == second[2].dtype and same_device(x, *first, *second)
    if not alike or (products == GATED and n != m):
        return None
    form = Form(group, first[2].dtype != torch.float32, x.dtype == torch.float16, products)
    given = variant or choose(form, count, rows_of_tiles(n, m), k)
    if given is None or not cuda.is_loadable(KERNEL, given, form, x.get_device()):
        return None
    return launch_of(given, form, count, (n, k), m)


def sm90_sparse24_w4a16_gemv_pair(
    x: torch.Tensor,
    first: Weight,
    second: Weight,
    group: int,
    variant: Variant | None = None,
    key: Any = None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """x (..., K) times the transposes of two weights: (..., N) and (..., M) in x's dtype. None as `pair_launch_for`.

    key: see `dispatch`.
    """
    call = _recorded(x, first, second, pair_launch_for(x, first, second, group, TWO, variant))
    if call is None:
        return None
    result: tuple[torch.Tensor, torch.Tensor] = call.result(("y", "y2"), key)
    return result


def sm90_sparse24_w4a16_gemv_swiglu(
    x: torch.Tensor, gate: Weight, up: Weight, group: int, variant: Variant | None = None, key: Any = None
) -> torch.Tensor | None:
    """`reference.swiglu` of the two products of `sm90_sparse24_w4a16_gemv_pair` by this variant, the bits of that: (..., N) in
    x's dtype.

    None as `pair_launch_for`; key: see `dispatch`.
    """
    call = _recorded(x, gate, up, pair_launch_for(x, gate, up, group, GATED, variant))
    if call is None:
        return None
    result: torch.Tensor = call.result("y", key)
    return result


def _recorded(x: torch.Tensor, first: Weight, second: Weight, launch: CudaLaunch | None) -> Call | None:
    """The call whose launch made "y", and "y2" where there are two."""
    if launch is None:
        return None
    names = ("codes", "metadata", "scale")
    parts = dict(zip((*names, *(f"{name}2" for name in names)), (*first, *second), strict=True))
    call = Call({"x": x, **parts})
    call.allocate("y", (*x.shape[:-1], first[0].shape[0]), x.dtype)
    if launch.problem.products == TWO:
        call.allocate("y2", (*x.shape[:-1], second[0].shape[0]), x.dtype)
    call.launch(launch, PAIR_POINTERS)
    return call


def is_served(x: torch.Tensor) -> bool:
    """Whether dtype and device are those of the kernel."""
    return x.dtype in INPUTS and cuda.is_served(x)


@lru_cache(maxsize=4096)
def launch_of(
    variant: Variant, form: Form, count: int, shape: tuple[int, int], second: int = 0
) -> CudaLaunch:
    """One launch, compiled once. second: rows of the second weight, where the form has two."""
    sizes: tuple[int | None, ...] = (count, *shape, BIAS)
    names, numbers = ZERO_POINTERS if form.zeros else POINTERS, ("4i", sizes)
    if form.products:
        names, numbers = PAIR_POINTERS, ("6i", (*sizes, second, 0))
    programs = variant.programs(rows_of_tiles(shape[0], second))
    return CudaLaunch(KERNEL, variant, form, names, programs, variant.shared(form), numbers)


__all__ = [
    "GATED",
    "KERNEL",
    "MOST_ROWS",
    "ONE",
    "STAGES",
    "TWO",
    "C",
    "Form",
    "Variant",
    "add_product",
    "candidates",
    "choose",
    "fitted",
    "is_served",
    "launch_for",
    "launch_of",
    "pair_launch_for",
    "rows_of_tiles",
    "sm90_sparse24_w4a16_gemv",
    "sm90_sparse24_w4a16_gemv_pair",
    "sm90_sparse24_w4a16_gemv_swiglu",
]
