"""`sm90_sparse24_gemm`, tokens by a 2:4 weight on a GPU: the variants of its source, which of them a shape gets, the shortest
time by a model of one multiprocessor, and what is launched for a call.

What a stage takes is the longest of three: the tensor core (an instruction of n tokens reads 64 n bytes of tokens and 2048 of
values from shared memory, 128 a cycle, and multiplies in n / 2 cycles), what the L2 cache delivers to a multiprocessor, and,
for the weight, what the memory does. The model only has to order variants. Its rates are fitted to measured times
(`reports/gpu/family_times.csv`) by `tests/gpu/sparsity/gemm.py`; the same times say how many clusters run at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fast.cost import Coefficients, Time, quickest
from fast.kernels.hopper.wgmma import header
from fast.kernels.hopper.wgmma import product as wgmma
from fast.kernels.sm90_sparse24_gemm.arrange import arrange
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
from fast.launch.launcher import Call

C = Coefficients("sm90_sparse24_gemm")
#: Bytes of a row of x in a panel.
PANEL = 128
#: Words of a token in an outgoing tile.
PITCH = 68
#: Stages of the ring at most.
MOST_STAGES = 12
#: Bytes of 64 outputs of 16 bits.
ROW = 128
#: Stages that one warpgroup is behind the other.
SKEW = 2

#: Elements of K of an instruction, by the bits of an element.
INSTRUCTION = {8: 64, 16: 32}


class Elements(NamedTuple):
    """values, x: PTX's names of the elements of the weight and of x; bits of each."""

    values: str
    x: str
    bits: int

    @property
    def integer(self) -> bool:
        """Whether sums are int32, not float32."""
        return self.values == "s8"


#: Elements of the weight and of x, by the names of their dtypes.
ELEMENTS = {
    ("bfloat16", "bfloat16"): Elements("bf16", "bf16", 16),
    ("float16", "float16"): Elements("f16", "f16", 16),
    ("int8", "int8"): Elements("s8", "s8", 8),
    ("float8_e4m3fn", "float8_e4m3fn"): Elements("e4m3", "e4m3", 8),
    ("float8_e4m3fn", "float8_e5m2"): Elements("e4m3", "e5m2", 8),
    ("float8_e5m2", "float8_e4m3fn"): Elements("e5m2", "e4m3", 8),
    ("float8_e5m2", "float8_e5m2"): Elements("e5m2", "e5m2", 8),
}


class Variant(NamedTuple):
    """tokens: of a tile. groups: warpgroups that multiply, 64 features each. panels: of 128 bytes of x in a stage of the ring.

    stages: of the ring. pair: programs of a cluster along the features, which share tokens. splits: programs along K. promote:
    whether the tensor core's sums of a stage (128 elements of 8 bits) are added in float32. serial: whether a stage waits for
    the one before, which no result may depend on. stored: whether the copy engine writes y, of 16 bits and without scales.
    skew: stages that one warpgroup is behind the other then, an even number; no result may depend on it.
    """

    tokens: int
    groups: int
    panels: int
    stages: int
    pair: int
    splits: int
    promote: bool = False
    serial: bool = False
    stored: bool = False
    skew: int = SKEW

    @property
    def features(self) -> int:
        """Features of a tile."""
        return 64 * self.groups

    @property
    def threads(self) -> int:
        """Threads of a program, those that load included."""
        return 128 * (self.groups + 1)

    @property
    def cluster(self) -> int:
        """Programs of a cluster."""
        return self.pair * self.splits

    @property
    def chunk(self) -> int:
        """Tokens of a warpgroup's outgoing tile; where it is stored there are two of these."""
        if self.stored:
            return 16 if self.tokens % 32 else 32
        return self.tokens if self.splits > 1 else 16 if self.tokens > 128 else min(self.tokens, 32)

    @property
    def name(self) -> str:
        """Such as t128g2p1s6c2k1."""
        sizes = f"t{self.tokens}g{self.groups}p{self.panels}s{self.stages}c{self.pair}k{self.splits}"
        return (
            sizes + "_promoted" * self.promote + "_serial" * self.serial + f"_stored{self.skew}" * self.stored
        )

    def ring(self, bits: int) -> int:
        """Bytes of the ring for elements of as many bits."""
        metadata = 1024 if bits == 8 else 512
        panel = self.tokens * PANEL + self.features * PANEL // 2 + self.groups * metadata
        return self.stages * self.panels * panel

    def shared(self, bits: int) -> int:
        """Bytes of dynamic shared memory: ring, outgoing tile (of the ring's bytes with splits), scales and biases, barriers,
        alignment."""
        if self.stored:
            outgoing = self.groups * 2 * self.chunk * ROW
        else:
            outgoing = self.groups * (self.tokens + 128) * 4
            outgoing += 0 if self.splits > 1 else self.groups * self.chunk * PITCH * 4
        return self.ring(bits) + outgoing + 16 * self.stages + 1024


class Problem(NamedTuple):
    """What is multiplied. out: the name of the result's dtype."""

    elements: Elements
    out: str


def _defines(variant: Variant, problem: Problem) -> dict[str, int]:
    elements = problem.elements
    return {
        "TOKENS": variant.tokens, "GROUPS": variant.groups, "PANELS": variant.panels, "STAGES": variant.stages,
        "PAIR": variant.pair, "SPLITS": variant.splits, "CHUNK": variant.chunk, "PROMOTE": int(variant.promote),
        "LATER": int(not variant.serial), "STORED": int(variant.stored), "SKEW": variant.skew * variant.stored,
        "OUT": KINDS.index(problem.out), "WIDE": int(elements.bits == 16), "INTEGER": int(elements.integer),
    }  # fmt: skip


def _generated(variant: Variant, problem: Problem) -> dict[str, str]:
    one = problem.elements
    # Signs of the operands, and for 16 bits that neither is transposed; integers have neither.
    operands = "{0}, {1}, {2}, 0, 1" + ("" if one.integer else ", 1, 1" + ", 0, 0" * (one.bits == 16))
    result = wgmma(
        variant.tokens, INSTRUCTION[one.bits], f"{one.values}.{one.x}", "u64 a, u64 b, u32 metadata", operands,
        '"l"(a), "l"(b), "r"(metadata)', integer=one.integer, sparse=True,
    )  # fmt: skip
    return {"products.h": header(one.integer, [result])}


KERNEL = Kernel(
    "sm90_sparse24_gemm",
    Path(__file__).parent,
    _defines,
    generated=_generated,
)


def fitted(
    tokens: int,
    groups: int,
    panels: int,
    pair: int,
    splits: int,
    bits: int,
    *,
    promote: bool = False,
    stored: bool = False,
) -> Variant:
    """The variant with as many stages as shared memory holds, at most MOST_STAGES."""
    one = Variant(tokens, groups, panels, 1, pair, splits, promote, stored=stored)
    two = one._replace(stages=2)
    each = two.shared(bits) - one.shared(bits)
    fixed = one.shared(bits) - each
    return one._replace(stages=min(MOST_STAGES, (MOST_SHARED - fixed) // each))


# Which variant a product gets


class Rates(NamedTuple):
    """The constants of the model, in `coefficients.toml`.

    l2, memory: bytes a cycle that a multiprocessor gets from the L2 cache and from memory. multiply: cycles of the tensor core
    over those of its tables. begin, token: cycles that a tile costs besides its stages: to begin and end, and for each token
    of 64 features that a warpgroup writes. clock: of cycles a nanosecond, which changes no order.
    """

    l2: float
    memory: float
    multiply: float
    begin: float
    token: float
    clock: float


class Terms(NamedTuple):
    """What a product by a variant is made of. waves: of tiles one after the other. panels: of a tile.

    multiplied: cycles of the tensor core for a panel. delivered, read: bytes of a panel that a multiprocessor gets from the L2
    cache, and from memory. written: tokens that a tile's warpgroups write, twice where parts of K are added first.
    """

    waves: int
    panels: int
    multiplied: float
    delivered: float
    read: float
    written: int


@lru_cache(maxsize=4096)
def choose(
    tokens: int, features: int, length: int, bits: int, promote: bool, multiprocessors: int = MULTIPROCESSORS
) -> Variant:
    """The variant for x (tokens, K) and a weight of features, rows of x having `length` bytes."""
    times = (
        (one, cycles(one, tokens, features, length, bits, multiprocessors))
        for one in candidates(tokens, bits, promote)
    )
    return quickest(times)  # type: ignore[return-value]


def candidates(tokens: int, bits: int, promote: bool) -> Iterator[Variant]:
    """Variants whose tiles are no larger than the tokens ask for."""
    smallest = min(tile[0] for tile in C.tiles if tile[0] >= min(tokens, 256))
    for count, groups, panels in C.tiles if tokens <= 256 else C.tiles + C.wide:
        if count > smallest or (promote and count > 128) or (smallest > 128 and count < 128):
            continue
        for pair, splits in C.clusters:
            if count // pair < 8 or (splits > 1 and count > 128) or (pair > 2 and 128 < count < 256):
                continue
            # Sums are promoted after 128 elements of 8 bits: one panel.
            yield fitted(count, groups, 1 if promote else panels, pair, splits, bits, promote=promote)


def cycles(
    one: Variant,
    tokens: int,
    features: int,
    length: int,
    bits: int,
    multiprocessors: int = MULTIPROCESSORS,
) -> float:
    """How long all of a product takes, by the model."""
    return cycles_of(terms(one, tokens, features, length, bits, multiprocessors), rates())


def rates() -> Rates:
    """The constants that were fitted."""
    return Rates(**C.rates)


def cycles_of(parts: Terms, rates: Rates) -> float:
    """The sum of a product's parts."""
    stage = max(parts.multiplied * rates.multiply, parts.delivered / rates.l2, parts.read / rates.memory)
    return Time(parts.waves, parts.panels, stage, rates.begin + rates.token * parts.written).total


def terms(
    one: Variant, tokens: int, features: int, length: int, bits: int, multiprocessors: int = MULTIPROCESSORS
) -> Terms:
    """What a product by a variant is made of."""
    clusters = -(-tokens // one.tokens) * -(-features // (one.features * one.pair))
    waves = -(-clusters // at_once(one.cluster, multiprocessors))
    metadata = 1024 if bits == 8 else 512
    weight = one.groups * (64 * PANEL // 2 + metadata)
    instruction = max(one.tokens / 2, (64 * one.tokens + 2048) / 128) * (C.promoted if one.promote else 1)
    # Programs that are at work, in the mean of the waves, share the memory; one row of tiles reads the weight once.
    working = clusters * one.cluster / waves
    return Terms(
        waves=waves,
        panels=-(-length // (PANEL * one.splits)),
        multiplied=one.groups * 2 * instruction,
        delivered=one.tokens * PANEL / one.pair + weight,
        read=weight * working / multiprocessors / min(-(-tokens // one.tokens), 8),
        written=one.tokens * (1 if one.splits == 1 else 2),
    )


#: Tokens of the smallest tile that the copy engine writes.
LEAST_STORED = 128
Operands = Sequence[Any]
#: Pointers of a launch, of which the first two are read through their tensor maps alone.
POINTERS = ("values", "x", "metadata", "x_scale", "scale", "bias", "y")
#: Numbers of the source's `Problem`: tokens, features, steps, panels, blocks, x_scale_step, scale_step, bias_kind, group;
#: filled up to 8 bytes.
NUMBERS = "9i4x"
#: Operands in the order of calls.
OPERANDS = ("x", "values", "metadata", "bias", "x_scale", "scale")


def linear_sparse(name: str, fast_sums: bool, operands: Operands, key: Any) -> torch.Tensor | None:
    """The product of checked operands, by the variant for their shape. name: of the output's dtype; key: see `dispatch`."""
    x, values, metadata, *rest = operands
    bits = _bits(operands)
    arranged = metadata.dim() == 3
    order = metadata if arranged else arrange(metadata, bits)
    call = product(name, fast_sums, (x, values, order, *rest))
    y: torch.Tensor = call.result("y", key, before=None if arranged else partial(_arranged_first, bits))
    return y


def _arranged_first(bits: int, call: Call) -> Callable[..., Any]:
    """A call of canonical metadata, which is put in order in each."""
    return lambda x, values, metadata, *rest: call(x, values, arrange(metadata, bits), *rest)


def product(name: str, fast_sums: bool, operands: Operands, variant: Variant | None = None) -> Call:
    """The call whose launch made "y" of operands with arranged metadata. variant: by default that of `variant_for`."""
    x, values, metadata, bias, x_scale, scale = operands
    one = variant or variant_for(name, fast_sums, operands)
    launch = launch_of(one, name, operands)
    call = Call(dict(zip(OPERANDS, operands, strict=True)))
    call.allocate("y", (*x.shape[:-1], values.shape[0]), name)
    call.launch(launch, POINTERS)
    return call


def variant_for(name: str, fast_sums: bool, operands: Operands) -> Variant:
    """That of `variant_of` for operands."""
    x, features, elements = operands[0], operands[1].shape[0], _elements(operands)
    scaled, processors = operands[4] is not None or operands[5] is not None, processors_of(x.get_device())
    shape = x.numel() // x.shape[-1], features, x.shape[-1]
    return variant_of(*shape, elements, name, scaled=scaled, fast_sums=fast_sums, processors=processors)


def variant_of(
    tokens: int, features: int, k: int, elements: Elements, name: str, *, processors: int, scaled: bool = False,
    fast_sums: bool = True,
) -> Variant:  # fmt: skip
    """That of `variants.choose`; where the copy engine can write y, it does. name: of y's dtype; scaled: whether rows or
    columns have scales."""
    bits, promote = elements.bits, not fast_sums and elements.bits == 8 and not elements.integer
    variant = choose(tokens, features, k * bits // 8, bits, promote, processors)
    if not is_stored(variant, bits, features, name, scaled):
        return variant
    return fitted(*variant[:3], variant.pair, variant.splits, bits, stored=True)


def launch_of(variant: Variant, name: str, operands: Operands) -> CudaLaunch:
    """The launch of a variant. RuntimeError or OSError where it does not compile or load."""
    x, values, metadata, _, x_scale, scale = operands
    problem, features = Problem(_elements(operands), name), values.shape[0]
    tokens, length = x.numel() // x.shape[-1], x.shape[-1] * problem.elements.bits // 8
    shared = variant.shared(problem.elements.bits)
    at_once = cuda.clusters_at_once(KERNEL, variant, problem, shared, x.get_device())
    numbers = (
        tokens, features, steps_of(variant, length), metadata.shape[1], -(-features // 64),
        int(x_scale is not None and x_scale.numel() > 1), int(scale is not None and scale.numel() > 1), BIAS, GROUP,
    )  # fmt: skip
    first, second = boxes(variant)

    def describe(values: int, x: int, y: int = 0) -> bytes:
        result = tensor_map(values, features, length // 2, first) + tensor_map(x, tokens, length, second)
        return (
            result + tensor_map(y, tokens, 2 * features, (variant.chunk, ROW)) if variant.stored else result
        )

    return CudaLaunch(
        KERNEL, variant, problem, POINTERS, programs_of(variant, tokens, features, at_once), shared, (NUMBERS, numbers),
        maps=Maps(describe, 2, (0, 1, 6) if variant.stored else (0, 1)),
    )  # fmt: skip


def is_stored(variant: Variant, bits: int, features: int, name: str, scaled: bool) -> bool:
    """Whether the copy engine writes y: rows are multiples of 16 bytes, and nothing but a bias enters."""
    plain = not scaled and name in ("bfloat16", "float16")
    return (
        plain and bits == 16 and features % 8 == 0 and variant.tokens >= LEAST_STORED and variant.splits == 1
    )


def boxes(variant: Variant) -> tuple[tuple[int, int], tuple[int, int]]:
    """Boxes (rows, bytes) of values and of x that a copy of the kernel takes."""
    return (variant.features, PANEL // 2 * variant.panels), (variant.tokens // variant.pair, PANEL)


def steps_of(variant: Variant, length: int) -> int:
    """Stages along K, for rows of x of `length` bytes."""
    return -(-length // (PANEL * variant.panels))


def tiles_of(variant: Variant, tokens: int, features: int) -> int:
    """Tiles of clusters."""
    return -(-tokens // variant.tokens) * -(-features // (variant.features * variant.pair))


def programs_of(variant: Variant, tokens: int, features: int, at_once: int) -> int:
    """Programs to launch: with splits a cluster for each tile, else at most the clusters that run at once, which persist."""
    tiles = tiles_of(variant, tokens, features)
    return (tiles if variant.splits > 1 else min(tiles, max(1, at_once))) * variant.cluster


def _elements(operands: Operands) -> Any:
    """Of values and x."""
    names = (str(one.dtype).removeprefix("torch.") for one in (operands[1], operands[0]))
    return ELEMENTS[tuple(names)]  # type: ignore[index]


def _bits(operands: Operands) -> int:
    """Of an element."""
    bits: int = _elements(operands).bits
    return bits


__all__ = [
    "ELEMENTS",
    "KERNEL",
    "PANEL",
    "ROW",
    "Elements",
    "Problem",
    "Rates",
    "Terms",
    "Variant",
    "boxes",
    "candidates",
    "choose",
    "cycles",
    "cycles_of",
    "fitted",
    "is_stored",
    "launch_of",
    "linear_sparse",
    "product",
    "programs_of",
    "rates",
    "steps_of",
    "terms",
    "variant_for",
    "variant_of",
]
