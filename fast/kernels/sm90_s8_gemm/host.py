"""`sm90_s8_gemm`, many rows of int8 codes on a GPU: the variants of its source, which of them a shape gets, by rounds of tiles
on the multiprocessors there are, and what is launched.

A tile of 256 tokens keeps the tensor core busy for 1024 cycles a stage, and by two programs that share tokens 32 KiB are read
in them; one of 128 for 512, with 24 KiB, which is more than the second-level cache was seen to deliver to the 2:4 kernel
(`sm90_sparse24_gemm`). So narrow tiles are taken where they leave fewer multiprocessors without one.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fast.cost import Coefficients, Time, quickest
from fast.kernels.hopper.wgmma import header, product
from fast.launch import cuda
from fast.launch.cuda import (
    BIAS,
    GROUP,
    KINDS,
    MOST_SHARED,
    MULTIPROCESSORS,
    CudaLaunch,
    Kernel,
    Maps,
    at_once,
    processors_of,
)
from fast.launch.driver import tensor_map
from fast.launch.launcher import FLOAT_NAMES, Call
from reference import Quantized

C = Coefficients("sm90_s8_gemm")
#: PTX's names of elements, by the names of their dtypes; a product is of one of them. Sums of floats are the tensor core's.
ELEMENTS = {"int8": "s8", "float8_e4m3fn": "e4m3"}
INTEGER = "int8"
#: Elements of K of an instruction.
INSTRUCTION = 32
#: Features of a tile.
FEATURES = 128
#: Warpgroups that multiply them.
GROUPS = 2
#: Threads of a program, with those that load.
THREADS = 384
#: Bytes of a row in a stage.
ROW = 128
#: Bytes of an outgoing row of 64 outputs of 16 bits.
OUTGOING = 128
#: Words of a token in an outgoing tile that is not stored by the copy engine.
PITCH = 68
#: Stages that one warpgroup is behind the other.
SKEW = 2
#: Stages of the ring at most.
MOST_STAGES = 8


class Variant(NamedTuple):
    """tokens: of a tile, a multiple of 32. pair: programs of a cluster, along the features, which share tokens. stages: of the
    ring. stored: whether the copy engine writes y, of 16 bits. skew: stages that one warpgroup is behind the other, fewer than
    there are; no result may depend on it.
    """

    tokens: int
    pair: int
    stages: int
    stored: bool
    skew: int = SKEW

    @property
    def cluster(self) -> int:
        """Programs of a cluster."""
        return self.pair

    @property
    def threads(self) -> int:
        """Threads of a program."""
        return THREADS

    @property
    def chunk(self) -> int:
        """Tokens of a warpgroup's outgoing tile; where it is stored there are two of these."""
        return 32 if self.stored else 16

    @property
    def name(self) -> str:
        """Such as t256c2s4d2 of 16-bit outputs, t256c2s4d2w of others."""
        return f"t{self.tokens}c{self.pair}s{self.stages}d{self.skew}" + "w" * (not self.stored)

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory: ring, outgoing tiles, scales and biases, barriers, alignment."""
        ring = self.stages * (self.tokens + FEATURES) * ROW
        outgoing = self.chunk * (2 * OUTGOING if self.stored else 4 * PITCH)
        return ring + GROUPS * (outgoing + 4 * (self.tokens + 128)) + 16 * self.stages + 1024


def fitted(tokens: int, pair: int, stored: bool, skew: int = SKEW) -> Variant:
    """The variant with as many stages as shared memory holds, at most MOST_STAGES."""
    one = Variant(tokens, pair, 1, stored, skew)
    each = one._replace(stages=2).shared - one.shared
    return one._replace(stages=min(MOST_STAGES, 1 + (MOST_SHARED - one.shared) // each))


class Problem(NamedTuple):
    """What is multiplied: elements, and the dtype of the result, by their names."""

    element: str
    out: str


def _defines(variant: Variant, problem: Problem) -> dict[str, int]:
    return {
        "TOKENS": variant.tokens, "PAIR": variant.pair, "STAGES": variant.stages, "CHUNK": variant.chunk,
        "STORED": int(variant.stored), "SKEW": variant.skew, "OUT": KINDS.index(problem.out),
        "INTEGER": int(problem.element == INTEGER),
    }  # fmt: skip


def _generated(variant: Variant, problem: Problem) -> dict[str, str]:
    integer, kind = problem.element == INTEGER, ELEMENTS[problem.element]
    # Integers have no signs of the operands.
    operands = "{0}, {1}, 1" + ("" if integer else ", 1, 1")
    result = product(
        variant.tokens,
        INSTRUCTION,
        f"{kind}.{kind}",
        "u64 a, u64 b",
        operands,
        '"l"(a), "l"(b)',
        integer=integer,
    )
    return {"products.h": header(integer, [result])}


KERNEL = Kernel(
    "sm90_s8_gemm",
    Path(__file__).parent,
    _defines,
    generated=_generated,
    instead="Triton's kernel multiplies",
    fails_whole=True,
)


# Which variant a product gets


@lru_cache(maxsize=4096)
def choose(
    tokens: int, features: int, stored: bool, multiprocessors: int = MULTIPROCESSORS
) -> Variant | None:
    """The variant for so many tokens and features; None where another kernel is to be taken. stored: see `Variant`."""
    times = {}
    for tile in C.tiles:
        programs = programs_of(tile["tokens"], tokens, features)
        if programs >= C.busy * multiprocessors:
            rounds = -(-programs // (C.pair * at_once(C.pair, multiprocessors)))
            times[tile["tokens"]] = Time(rounds, 1, tile["time"]).total
    width = quickest(times.items())
    return None if tokens < C.least or width is None else fitted(width, C.pair, stored)


def programs_of(width: int, tokens: int, features: int, pair: int | None = None) -> int:
    """Tiles of so many tokens, those included that a cluster has beyond the features."""
    pair = pair or C.pair
    return -(-tokens // width) * -(-features // (FEATURES * pair)) * pair


#: Pointers of a launch, of which the first two are read through their tensor maps alone.
POINTERS = ("codes", "x", "x_scale", "scale", "bias", "y")
#: Numbers of the source's `Problem`: tokens, features, steps, x_scale_step, scale_step, bias_kind, group; filled up to 8 bytes.
NUMBERS = "7i4x"


def linear_of_codes(
    x: Quantized, w: Quantized, bias: torch.Tensor | None, dtype: torch.dtype, key: Any
) -> torch.Tensor | None:
    """Rows of int8 codes (M, K) times the transpose of a weight of int8 codes (N, K): the sum, exact in int32, as float32,
    times x's scale, times the weight's, plus the bias, each rounded to float32; then one rounding to `dtype`.

    Operands are those that the family takes (`fast.gemm.families`). None where another kernel is faster (`select`), and where
    the variant does not compile or load. key: of the call; see `dispatch`.
    """
    variant = choose(x.shape[0], w.shape[0], is_stored(dtype), processors_of(x.codes.get_device()))
    call = None if variant is None else call_of(variant, problem_of(dtype), x, w, bias)
    if call is None:
        return None
    y: torch.Tensor = call.result("y", key, x.scheme)
    return y


def problem_of(dtype: torch.dtype) -> Problem:
    """Products of int8 codes into a dtype."""
    return Problem(INTEGER, FLOAT_NAMES[dtype])


def is_stored(dtype: torch.dtype) -> bool:
    """Whether the copy engine writes y."""
    return dtype.itemsize == 2


def call_of(
    variant: Variant, problem: Problem, x: Quantized, w: Quantized, bias: torch.Tensor | None
) -> Call | None:
    """The call whose launch made "y", of codes (M, K) and (N, K), and scales: one number or one for each row. None where the
    variant does not compile or load."""
    (tokens, length), features, device = x.codes.shape, w.codes.shape[0], x.codes.get_device()
    if not cuda.is_loadable(KERNEL, variant, problem, device, variant.shared):
        return None
    at_once = cuda.clusters_at_once(KERNEL, variant, problem, variant.shared, device)
    clusters = programs_of(variant.tokens, tokens, features, variant.pair) // variant.pair
    numbers = (
        tokens, features, -(-length // ROW), int(x.scale.numel() > 1), int(w.scale.numel() > 1), BIAS, GROUP,
    )  # fmt: skip

    def describe(weight: int, x: int, y: int = 0) -> bytes:
        result = tensor_map(weight, features, length, (FEATURES, ROW))
        result += tensor_map(x, tokens, length, (variant.tokens // variant.pair, ROW))
        return (
            result + tensor_map(y, tokens, 2 * features, (variant.chunk, ROW)) if variant.stored else result
        )

    launch = CudaLaunch(
        KERNEL, variant, problem, POINTERS, min(clusters, at_once) * variant.pair, variant.shared, (NUMBERS, numbers),
        maps=Maps(describe, 2, (0, 1, 5) if variant.stored else (0, 1)),
    )  # fmt: skip
    call = Call(
        {"x": x.codes, "x_scale": x.scale, "zero": x.zero, "codes": w.codes, "scale": w.scale, "bias": bias}
    )
    call.allocate("y", (tokens, features), getattr(torch, problem.out))
    call.launch(launch, POINTERS)
    return call


__all__ = [
    "ELEMENTS",
    "FEATURES",
    "INTEGER",
    "KERNEL",
    "POINTERS",
    "ROW",
    "SKEW",
    "THREADS",
    "Problem",
    "Variant",
    "call_of",
    "choose",
    "fitted",
    "is_stored",
    "linear_of_codes",
    "problem_of",
    "programs_of",
]
