"""Which family of kernels multiplies: the one place that says it, of inference, of experts, of training and of 2:4.

`choose` gives the families that take a `Problem`, the quickest first and torch's last: who multiplies takes the first, and the
next one where it does not compile or load. What a family takes stands in its record; which of two is quicker here, by models
and bounds that were fitted to measured times (`fast/coefficients.toml`).
`by_rows` says it for ranges of rows. Which of its variants a family runs is its own affair (`Family.chosen`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch

from fast.cost import Coefficients, first_row, holds
from fast.gemm.families import (
    CODES,
    FAMILIES,
    FLOATS,
    HALVES,
    HOPPER,
    PLAIN,
    PRESHUFFLED,
    SM90,
    SM90_INTN_SMALL_M,
    SM90_S8_GEMM,
    SM90_SPARSE24_GEMM,
    SM90_SPARSE24_W4A16_GEMV,
    SM90_W4A16_GEMM,
    SM90_W4A16_GEMV,
    SPARSE,
    SPARSE_INT4,
    TORCH_DEQUANTIZE,
    TORCH_INT_MM,
    TORCH_SCALED_MM,
    TRITON_GEMM_SMALL_M,
    TRITON_GEMV_ANY,
    TRITON_GEMV_W4A16,
    TRITON_GEMV_W8A8,
    TRITON_GEMV_W8A16,
    TRITON_INT_SCALED_MM,
    TRITON_SCALED_MM,
    TRITON_SMALL_M,
    TRITON_SPARSE24_SMALL_M,
    Device,
    Family,
    Problem,
)
from reference import Scheme
from reference.schemes.schemes import POWER_RULES, record_of

C = Coefficients("choose")
#: What tiles of `triton_scaled_mm` divide lengths by.
TILE = 128


def choose(p: Problem, first: str = "") -> Iterator[Family]:
    """The families that multiply, the quickest first; `torch_dequantize` last, but for codes, which a reference multiplies.

    first: the name of a family that was measured to be quicker on this device (`ao_lab.tune`): it goes first where it takes the
    problem.
    """
    if first and FAMILIES[first].refusal(p) is None:
        yield FAMILIES[first]
    yield from (family for family in RULES[p.layout](p) if family.name != first)


def able(p: Problem) -> list[Family]:
    """All families that take a problem, in the order of `choose`, then those that it leaves out as slower."""
    order = [family for family in choose(p) if family.takes]
    return order + [
        one for one in FAMILIES.values() if one not in order and one.takes and one.refusal(p) is None
    ]


def running(families: Iterable[Family], p: Problem, device: int) -> tuple[Family, dict[str, str]]:
    """The first of these families that multiplies on a device; and of those before it, by name, why they did not load there.

    What was not tried yet in this process is taken to load. families: as `choose` has them, whose last one needs no loading.
    """
    failures: dict[str, str] = {}
    for family in families:
        reason = family.failure(p, device)
        if reason is None:
            return family, failures
        failures[family.name] = reason
    raise ValueError(f"families end with one that needs no loading, got {', '.join(failures) or 'none'}")


def _preshuffled(p: Problem) -> Iterator[Family]:
    if p.experts:
        yield from _experts(p)
    elif p.products > 1:
        yield from _pair(p)
    else:
        yield from _one_weight(p)


def _one_weight(p: Problem) -> Iterator[Family]:
    gemm = SM90_W4A16_GEMM.refusal(p) is None and p.rows <= rows_of_gemm(p)
    first = gemm and _gemm_is_faster(p)
    if first:
        yield SM90_W4A16_GEMM
    if _gemv_is_faster(p):
        yield SM90_W4A16_GEMV
    if TRITON_SMALL_M.refusal(p) is None and not _dense_is_faster(p):
        yield TRITON_SMALL_M
    if gemm and not first:
        yield SM90_W4A16_GEMM
    yield TORCH_DEQUANTIZE


def _dense_is_faster(p: Problem) -> bool:
    """Whether torch was measured to multiply by the dense weight faster than `triton_small_m` does by a filled one."""
    if not p.filled or p.rows <= C.few_of_filled:
        return False
    facts = {"element": p.element, "zero": p.zero, "size": p.n * p.k, "whole": p.k % 64 == 0}
    return any(holds(row, facts) for row in C.dense_of_filled)


def rows_of_gemm(p: Problem) -> int:
    """The most rows that `sm90_w4a16_gemm` multiplies faster than torch does with the dense weight."""
    row = first_row(C.rows_of_gemm, element=p.element, group=p.group, size=p.n * p.k)
    return int(row.get("rows", SM90_W4A16_GEMM.takes[0].rows))


@lru_cache(maxsize=4096)
def _gemm_is_faster(p: Problem) -> bool:
    """Whether `sm90_w4a16_gemm`, which takes such rows, is faster than `triton_small_m`, which takes up to 128."""
    least, most = C.asked_for
    if not least <= p.rows <= most:
        return False
    from fast.kernels.sm90_w4a16_gemm.host import small_m_microseconds
    from fast.kernels.triton_small_m.host import microseconds

    weight = SM90_W4A16_GEMM.chosen(p).problem.weight
    product, processors = (int(p.rows), p.n, p.k), p.device.processors
    other = microseconds(*product, *weight, processors)
    return small_m_microseconds(*product, weight, processors) < C.margin * other


def _gemv_is_faster(p: Problem) -> bool:
    """Whether `sm90_w4a16_gemv` takes it, and was measured to be faster than `triton_small_m`."""
    if SM90_W4A16_GEMV.refusal(p) is not None:
        return False
    from fast.kernels.sm90_w4a16_gemv.host import gains

    chosen = SM90_W4A16_GEMV.chosen(p)
    return chosen is not None and gains(chosen.problem, int(p.rows), p.n, p.k)


def _pair(p: Problem) -> Iterator[Family]:
    """Two weights in one launch, where that is faster than one launch each; nothing else."""
    if TRITON_SMALL_M.refusal(p) is None and _pair_is_faster(p):
        yield TRITON_SMALL_M
    elif SM90_W4A16_GEMV.refusal(p) is None and in_one_launch(p._replace(products=1)):
        yield SM90_W4A16_GEMV


def in_one_launch(p: Problem) -> bool:
    """Whether several weights, of which this one is the largest, are multiplied by one launch of `sm90_w4a16_gemv`: where that
    multiplies by it alone, through shared memory. It does in one launch what several would do one after the other."""
    from fast.kernels.sm90_w4a16_gemv.host import Variant

    chosen = SM90_W4A16_GEMV.chosen(p) if _gemv_is_faster(p) and SM90_W4A16_GEMV.chosen else None
    return chosen is not None and isinstance(chosen.variant, Variant)


def _pair_is_faster(p: Problem) -> bool:
    size, eight = p.n * p.k, p.element != "int4"
    if size < C.two_launches or (size >= C.large and not eight and p.rows > C.always_apart):
        return True
    alone = p._replace(products=1)
    if size >= C.large and eight:
        return SM90_W4A16_GEMV.refusal(alone._replace(rows=1)) is not None
    return not _gemv_is_faster(alone)


def _experts(p: Problem) -> Iterator[Family]:
    """Rows sorted by expert; `rows` are those of one on average."""
    some = p if p.rows else p._replace(rows=1)
    if p.rows > C.most_of_expert and SM90_W4A16_GEMM.refusal(some) is None:
        yield SM90_W4A16_GEMM
    if TRITON_SMALL_M.refusal(some) is None:
        yield TRITON_SMALL_M
    yield TORCH_DEQUANTIZE


def _plain(p: Problem) -> Iterator[Family]:
    """A weight in the plain layout, on a GPU of `device.OLDEST` or later."""
    if importlib.util.find_spec("triton") is not None and p.weight is not None:
        yield from _plain_families(p)
    yield TORCH_DEQUANTIZE


def _plain_families(p: Problem) -> Iterator[Family]:
    from fast.kernels.triton_gemv import select

    scheme, axis, packed = p.weight  # type: ignore[misc]
    if scheme.format.bits in select.OWN_BITS and (most := _rows_of_packed(p)):
        if p.rows > most:
            return  # the dense weight is quicker, and no kernel of tiles is in between
        if p.rows:
            yield SM90_INTN_SMALL_M
    weight = None if p.filled else select.weight_of(scheme, p.shape, axis, packed)
    if weight is None or p.inputs not in FLOATS or not weight.rows or not p.rows:
        return
    if p.rows > 1:
        if select.takes_rows(weight, int(p.rows), p.inputs):
            yield TRITON_GEMM_SMALL_M
    elif select.takes_w4a16(weight) and p.inputs in HALVES:
        yield TRITON_GEMV_W4A16
    else:
        yield TRITON_GEMV_W8A16 if select.takes_w8a16(weight) else TRITON_GEMV_ANY


def rows_stored(p: Problem) -> int:
    """The most rows that a kernel multiplies by a weight in the plain layout as it is stored; 0 for none."""
    at_most = (TRITON_GEMM_SMALL_M.takes[0].rows, 96, 32, 1)
    return next((rows for rows in at_most if next(choose(p._replace(rows=rows))) is not TORCH_DEQUANTIZE), 0)


def _rows_of_packed(p: Problem) -> int:
    """The most rows that `sm90_intn_small_m` multiplies faster than torch does with the dense weight; 0 where it takes none."""
    from fast.kernels.sm90_intn_small_m.host import most_rows

    one = p._replace(rows=most_rows(p.n))
    is_taken = SM90_INTN_SMALL_M.refusal(p._replace(rows=1)) is None
    return int(one.rows) if is_taken and SM90_INTN_SMALL_M.chosen(one) is not None else 0


def _codes(p: Problem) -> Iterator[Family]:
    """Rows of 8-bit codes: kernels alone, none for lengths of none."""
    if p.rows == 1:
        yield TRITON_GEMV_W8A8
    elif p.element != "int8":
        yield TRITON_SCALED_MM
    else:
        if SM90_S8_GEMM.refusal(p) is None and SM90_S8_GEMM.chosen(p) is not None:
            yield SM90_S8_GEMM
        yield TRITON_INT_SCALED_MM


def _sparse(p: Problem) -> Iterator[Family]:
    """Rows by a weight of the same element in 2:4 storage."""
    if SM90_SPARSE24_GEMM.refusal(p) is None:
        yield SM90_SPARSE24_GEMM
    yield TORCH_DEQUANTIZE


def _sparse_int4(p: Problem) -> Iterator[Family]:
    """Rows by int4 in 2:4 storage."""
    if SM90_SPARSE24_W4A16_GEMV.refusal(p) is None:
        yield SM90_SPARSE24_W4A16_GEMV
    if TRITON_SPARSE24_SMALL_M.refusal(p) is None and not p.zero:
        yield TRITON_SPARSE24_SMALL_M
    yield TORCH_DEQUANTIZE


RULES: dict[str, Callable[[Problem], Iterator[Family]]] = {
    PRESHUFFLED: _preshuffled,
    PLAIN: _plain,
    CODES: _codes,
    SPARSE: _sparse,
    SPARSE_INT4: _sparse_int4,
}


# Codes by codes, in layers and in the three products of a training step


@lru_cache(maxsize=4096)
def takes_codes(x: str, w: str, shape: tuple[int, int], dtype: torch.dtype, rows: int = 1) -> bool:
    """Whether a kernel computes `linear_of_codes` of such operands on a GPU of `device.OLDEST` or later.

    x, w: `Scheme.key`; shape: of the weight, as stored; rows: of the inputs. Others have rows whose length is no multiple of
    16.
    """
    if importlib.util.find_spec("triton") is None or not all(shape):
        return False
    from fast.launch.launcher import interpreted

    if rows == 1 and interpreted():
        return False  # Gluon has no interpreter
    inputs, weight = record_of(x), record_of(w)
    alike = (inputs.element == "int8") == (weight.element == "int8")
    device, zero = Device(SM90, HOPPER.processors, nvrtc=False), inputs.zero is not None
    p = Problem(CODES, rows, *shape, dtype, device, element=inputs.element, zero=zero)
    return alike and any(family.refusal(p) is None for family in choose(p))


@lru_cache(maxsize=4096)
def codes_beat_torch(x: str, w: str, shape: tuple[int, ...], rows: int, fast_sums: bool = False) -> bool:
    """Whether `triton_scaled_mm` was measured to be faster than `torch._scaled_mm` on Hopper, of several rows.

    Arguments as in `takes_codes`; fast_sums: of both. Nothing is known of other GPUs.
    """
    from fast.kernels.triton_scaled_mm.host import is_faster

    tensorwise = {record_of(scheme).scale.block for scheme in (x, w)} == {"tensor"}
    return is_faster(rows, *shape, rowwise=not tensorwise, fast_sums=fast_sums)


def codes_of_layer(x: Scheme, w: Scheme, p: Problem) -> Family:
    """Of a layer whose inputs are quantized to 8 bits: a kernel of ours, or torch's product of codes.

    x, w: both schemes; p: `problem.of_codes` of these. Ours are one row on GPUs of `device.OLDEST` or later, and on
    Hopper several rows of int8, and of float8 where that was measured to be faster.
    """
    takes = takes_codes(x.key, w.key, p.shape, p.inputs, int(p.rows)) and p.device.capability >= SM90
    if takes and p.rows == 1:
        return TRITON_GEMV_W8A8
    on_hopper = takes and p.device.capability == SM90
    if p.element == "int8":
        return next(choose(p)) if on_hopper else TORCH_INT_MM
    beats = on_hopper and codes_beat_torch(x.key, w.key, p.shape, int(p.rows))
    return TRITON_SCALED_MM if beats else TORCH_SCALED_MM


def float8_of_training(
    x: Scheme, w: Scheme, shape: tuple[int, ...], rows: int, fast_sums: bool, launched: bool
) -> Family:
    """Of rows by a matrix (N, K) of a training step, both float8, on Hopper: `triton_scaled_mm` where it is quicker, and in
    brief products, launched one by one (`launched`), whose bits are the same: under powers of two, and where neither family
    adds a sum in parts. Else `torch_scaled_mm`."""
    from fast.kernels.triton_scaled_mm.host import C as TILES

    whole = shape[1] < TILES.long and not any(length % TILE for length in (rows, *shape))
    brief = launched and 2 * rows * shape[0] * shape[1] <= C.brief
    if brief and whole and _is_exact(x) and _is_exact(w):
        return TRITON_SCALED_MM
    beats = codes_beat_torch(x.key, w.key, tuple(shape), rows, fast_sums)
    return TRITON_SCALED_MM if beats else TORCH_SCALED_MM


def _is_exact(scheme: Scheme) -> bool:
    """Whether scales are powers of two, which the order of multiplications does not round."""
    return scheme.scale.block == -1 and scheme.scale.rule in (*POWER_RULES, "ratio_pow2")


# The gradients of a layer's weight and bias

#: The product, then the sums; both at once, on two streams; the sums by the product's kernel.
APART, BESIDE, EPILOGUE = "apart", "beside", "epilogue"


def gradients(rows: int, n: int, k: int, dtype: torch.dtype) -> str:
    """How dW = dY^T X (n, k) and db, the sums of dY (rows, n), are made on Hopper, for dY that is worth a kernel of sums.

    BESIDE: of one tile a multiprocessor the product leaves four idle, which add up meanwhile; where it takes long enough,
    sums cost no time. EPILOGUE, of float16 where tiles are few along k and most multiprocessors have one: cuBLASLt's kernel
    takes 156 us where product and sums take 183; of bfloat16 it takes longer than both (times: reports/LOG.md).
    """
    if rows * n < C.worth or n * k > C.one_wave:
        return APART
    if k >= C.hidden:
        return BESIDE
    is_wide = rows <= C.most_of_epilogue and n >= C.wide * k and 2 * n * k > C.one_wave
    return EPILOGUE if dtype == torch.float16 and is_wide else APART


#: Rows that are asked for up to 128: families of small M alternate there, of whole tiles and of a few rows more.
ASKED = (*range(1, 18), 20, 24, 28, 32, 33, 40, 48, 56, 64, 65, 80, 96, 112, 128)


class Range(NamedTuple):
    """Rows from `first` to `last`, None for all that follow, and the name of the family that multiplies them."""

    first: int
    last: int | None
    name: str

    def __str__(self) -> str:
        if self.last is None:
            return f"{self.first} tokens and more {self.name}" if self.first > 1 else self.name
        if self.first == self.last:
            return f"{self.first} token{'s' * (self.first > 1)} {self.name}"
        return f"{self.first}-{self.last} tokens {self.name}"


def by_rows(name_of: Callable[[int], str], most: int) -> tuple[Range, ...]:
    """The ranges of rows from 1 to `most` that have one name: asked for at ASKED, at powers of two beyond, and in between until
    each bound is known. A name that begins and ends between two of these numbers is not seen; the last range stands for all
    that follow."""
    result: list[Range] = []
    known = [
        (rows, name_of(rows)) for rows in (*(rows for rows in ASKED if rows < most), *_powers(most), most)
    ]
    first = 1
    for (below, name), (above, other) in pairwise(known):
        if name != other:
            last = _last(name_of, below, above, name)
            result.append(Range(first, last, name))
            first = last + 1
    return (*result, Range(first, None, known[-1][1]))


def _powers(most: int) -> Iterator[int]:
    """Powers of two beyond those that are asked for anyway, below."""
    power = 2 * ASKED[-1]
    while power < most:
        yield power
        power *= 2


def _last(name_of: Callable[[int], str], below: int, above: int, name: str) -> int:
    """The last number of rows that has a name, between one that has it and one that does not."""
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (middle, above) if name_of(middle) == name else (below, middle)
    return below


__all__ = [
    "APART",
    "BESIDE",
    "EPILOGUE",
    "Range",
    "able",
    "by_rows",
    "choose",
    "codes_beat_torch",
    "codes_of_layer",
    "float8_of_training",
    "gradients",
    "in_one_launch",
    "rows_of_gemm",
    "rows_stored",
    "running",
    "takes_codes",
]
